"""FLOPs, MFU and TGS, the figures of a step, and where they are logged."""

import contextlib
import errno
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial

from tqdm import tqdm

from memo.errors import reason
from memo.files import opened, parse_json

MOST_LINE = 2**16  # characters
WANDB_S = 10  # to reach its server


def parameters(cfg):
    """P = 12 L C^2 + V C: the matrices of the layers and the tied embedding. Source: MEMO 5.1."""
    return 12 * cfg.n_layer * cfg.n_embd**2 + cfg.vocab_size * cfg.n_embd


def flops_per_sample(cfg):
    """Model FLOPs of one sequence, forward and backward: 6 S P + 6 L C S^2.

    The second term is attention under the causal mask; without the mask it would be twice that. Source: MEMO 5.1.
    """
    S = cfg.block_size
    return 6 * S * parameters(cfg) + 6 * cfg.n_layer * cfg.n_embd * S**2


def tgs(tokens, gpus, seconds):
    """Tokens per GPU and second. Source: MEMO 5.1."""
    return tokens / (gpus * seconds)


def mfu(cfg, tgs, peak_flops_per_s):
    """Model FLOPs utilisation, 1 is all of the peak; None where the peak is not known. Source: MEMO 5.1."""
    return None if peak_flops_per_s is None else tgs * flops_per_sample(cfg) / cfg.block_size / peak_flops_per_s


@dataclass
class StepStats:
    """A line of metrics.jsonl. None is unknown. `tokens`: in this step; `mfu`: 0..1."""

    iter: int
    loss: float
    lr: float
    grad_norm: float
    step_s: float
    tokens: int
    tgs: float
    mfu: float | None = None
    alpha: float | None = None
    offload_bytes: int | None = None
    stall_s: float | None = None
    transient_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    host_bytes: int | None = None
    sent_bytes: dict | None = None
    val_loss: float | None = None

    def as_dict(self):
        return {k: v for k, v in asdict(self).items() if k != "val_loss" or v is not None}


def percent(fraction):
    return "n/a" if fraction is None else f"{100 * fraction:.1f}%"


def say(text):
    """Prints a line, beside a progress bar if there is one."""
    tqdm.write(text)
    sys.stdout.flush()


def usable(row):
    """Whether a line of a file is what StepStats writes, as far as it is read again."""
    numbers = [row.get(name) for name in ("iter", "loss", "tgs", "tokens", "step_s")]
    numbers += [] if row.get("val_loss") is None else [row["val_loss"]]
    return type(row.get("iter")) is int and all(type(n) in (int, float) and 0 <= n < 2**63 for n in numbers)


def read_metrics(path):
    """The lines of a metrics.jsonl; what a kill or a full disk cut short, and what is no step's, is left out."""
    rows = []
    with open(opened(path), errors="replace") as f:
        for line in iter(partial(f.readline, MOST_LINE), ""):
            with contextlib.suppress(ValueError):
                if usable(row := parse_json(line)):
                    rows.append(row)
    return rows


class JsonlLogger:
    """Appends to metrics.jsonl. A run that starts at `first_iter` drops what an earlier one wrote from there on. Lines that
    a full disk does not take are written with later ones."""

    def __init__(self, path, first_iter):
        kept = [r for r in read_metrics(path) if r["iter"] < first_iter] if os.path.exists(path) else []
        with open(f"{path}.tmp", "w") as f:
            f.writelines(json.dumps(r) + "\n" for r in kept)
        os.replace(f"{path}.tmp", path)
        self.path, self.waiting = path, []

    def log(self, stats):
        """Errors: OSError; the line waits for the next call."""
        self.waiting.append(json.dumps(stats.as_dict()) + "\n")
        self.close()

    def close(self):
        """Writes the lines that wait, all or none. Errors: OSError."""
        lines = "".join(self.waiting).encode()
        with open(self.path, "ab", buffering=0) as f:
            size = f.tell()
            if f.write(lines) < len(lines):  # raises where nothing is written
                f.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.waiting.clear()


class ConsoleLogger:
    """A progress bar with loss, MFU, TGS and time left; a line now and then where the console is no terminal."""

    def __init__(self, steps, done, seconds_between_lines=10.0):
        self.terminal, self.between, self.shown = sys.stderr.isatty(), seconds_between_lines, 0.0
        self.bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, disable=not self.terminal)
        self.steps, self.start, self.first = steps, time.monotonic(), done

    def log(self, stats):
        now, done = time.monotonic(), stats.iter + 1
        text = f"loss {stats.loss:.4f}  MFU {percent(stats.mfu)}  TGS {stats.tgs:,.0f}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(done - self.bar.n)
        val = "" if stats.val_loss is None else f"  val_loss {stats.val_loss:.4f}"
        if self.terminal:
            if val:
                self.bar.write(f"step {stats.iter}  loss {stats.loss:.4f}{val}")
        elif val or done == self.steps or now - self.shown >= self.between:
            left = (now - self.start) / (done - self.first) * (self.steps - done)
            print(f"step {stats.iter}/{self.steps}  {text}{val}  left {left:.0f} s", flush=True)
            self.shown = now

    def close(self):
        self.bar.close()


class WandbLogger:
    """Weights & Biases. Without an account it logs offline, into `out_dir`; no failure of it ever stops the run."""

    def __init__(self, cfg, config_dict):
        self.run = None
        try:
            import wandb
            keys = dict(project=cfg.wandb_project, name=cfg.wandb_run_name or None, dir=cfg.out_dir, config=config_dict,
                        settings=wandb.Settings(init_timeout=WANDB_S))
            mode = os.environ.get("WANDB_MODE")
            try:
                self.run = wandb.init(**keys, mode=mode or ("online" if wandb.login(prompt=False) else "offline"))
            except Exception as e:
                print(f"warning: wandb has no connection within {WANDB_S} s, logging offline ({reason(e)})", file=sys.stderr)
                self.run = wandb.init(**keys, mode="offline")
        except Exception as e:
            print(f"warning: wandb is off: {type(e).__name__}: {reason(e)}", file=sys.stderr)

    def log(self, stats):
        self.attempt(lambda: self.run.log({k: v for k, v in stats.as_dict().items() if v is not None}, step=stats.iter))

    def close(self):
        self.attempt(lambda: self.run.finish())

    def attempt(self, call):
        if self.run is not None:
            try:
                call()
            except Exception as e:
                print(f"warning: wandb stopped logging: {type(e).__name__}: {reason(e)}", file=sys.stderr)
                self.run = None
