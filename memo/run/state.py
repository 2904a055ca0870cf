"""What a run holds: what was asked (Checked), how it is laid out (Decided), what it trains with (Run)."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from memo.checkpoint.checkpoint import Checkpoint, Saver
from memo.config.config import Config, as_keys
from memo.config.keys import Keys
from memo.config.layout import Layout
from memo.data.batch import Data
from memo.decide.where import Decision
from memo.errors import reason, warn
from memo.estimate.budget import Estimate
from memo.estimate.regions import Line
from memo.layer.row_order import RowOrder
from memo.parallel.mesh import Mesh
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.files import plain_name


@dataclass(kw_only=True)
class Checked:
    """Holds the part of a run that each rank knows by itself, before the device is touched."""

    cfg: Config  # with the dataset's vocab_size
    data: Data
    out: Path  # cfg.out_dir
    ckpt: Checkpoint | None  # to resume from
    hf: str | None  # the folder of a model of Hugging Face to start from
    device: torch.device
    dtype: torch.dtype
    speaks: bool  # whether this rank prints, logs and draws: rank 0
    one_host: bool  # whether all ranks are on this host
    force: bool  # whether to start although memory lacks
    kernels: Keys  # keys that name those of the run
    origin: dict[str, object]  # see memo/system/origin.py


@dataclass(kw_only=True)
class Decided(Checked):
    """Holds a run with a layout, for which there is memory."""

    cfg: Layout
    host_limit_bytes: int  # this rank's share of the host, for swapped activations
    expected: Estimate | None
    asked: Keys = field(default_factory=dict)  # keys that cfg has numbers for: they were auto
    owner: str = ""  # the text of out/.lock, the same on all ranks
    lock: IO | None = None  # out/.lock, open on rank 0


@dataclass(kw_only=True)
class Run(Decided):
    """Holds a run that can train."""

    mesh: Mesh
    order: RowOrder  # of the rows of this rank
    model: Model
    optimizer: Optimizer
    decision: Decision
    lines: list[Line]  # what lives where on this rank
    saver: Saver
    peak: float | None  # FLOP/s of the GPU, where they are known
    first: int  # the step to begin with
    step: int  # the step under way
    done: int  # steps
    whole: bool = True  # whether weights and optimizer are those after `done` steps; False while they change
    loggers: list = field(default_factory=list)
    stage_records: list[dict] = field(default_factory=list)  # report.stage_record() of each of several stages
    own: dict[str, bytes] = field(default_factory=dict)  # that came with the model: huggingface.own_files()
    failed_saves: int = 0  # in a row
    slowest_s: float = 0.0  # of the steps so far
    told: set[str] = field(default_factory=set)  # warnings of attempt(), and pictures: once each

    @property
    def stored(self) -> Keys:
        """Lists the keys of config.json and of checkpoints."""
        wandb_id = self.ckpt and self.ckpt.config.get("wandb_id")  # a run goes on in Weights & Biases as well
        about = dict(tokenizer=self.data.meta.get("tokenizer"), asked=self.asked, origin=self.origin,
                     wandb_id=wandb_id if plain_name(wandb_id) else self.owner[-8:],
                     gradient_accumulation_steps=self.cfg.micro_batches(self.mesh.dp.size))
        return as_keys(self.cfg) | {name: value for name, value in about.items() if value}

    def where(self) -> str:
        """Says how far this rank is, for an error."""
        return f", stage {self.cfg.stage}" * (self.cfg.pp > 1) + f", step {self.step}"

    def attempt(self, what: str, work: Callable[..., object], *args: object) -> bool:
        """Calls work(*args), not worth a run -> did it succeed? A failure is a warning, once a reason."""
        try:
            work(*args)
            return True
        except Exception as e:
            line = f"{what} failed ({type(e).__name__}: {reason(e)}); training goes on"
            if line not in self.told:
                self.told.add(line)
                warn(line)
            return False

    def close(self) -> None:
        """Waits for the save under way, and gives back streams, memory and groups."""
        with ExitStack() as stack:  # the last one is closed first; all of them, even if one fails
            if self.lock:
                stack.callback(self.lock.close)
            for part in (self.mesh, self.model.arena, self.model, self.saver):
                stack.callback(part.close)
