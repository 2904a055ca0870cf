"""Prints the memory requests of a training step of one rank in the format of memo.planner, without memory or
GPU: python -m memo.run.trace_step [config/x.py] [--key=value ...] [--multiprocessors=132] [--stage=0]

Layers that make the same requests are run once; of the chunks of the head, which are alike, two.
"""

import sys
from dataclasses import replace
from functools import partial

from memo.config.keys import Keys
from memo.config.layout import Layout
from memo.errors import ConfigError
from memo.run.load_config import keys_help, load_config
from memo.system.command import Arguments, answer_early, run


def read_argv(argv: list[str]) -> tuple[Layout, int]:
    """Reads (Layout of the stage, multiprocessors). After --help the process ends. Errors: ConfigError."""
    if {"--help", "-h"} & set(argv):
        print(f"{__doc__}\n{keys_help()}")
        sys.exit()
    parser = Arguments(ranks=True, prog="python -m memo.run.trace_step")
    parser.option("--multiprocessors", int, 0, "of the GPU", least=0, most=10**5, why="no GPU has as many")
    parser.option("--stage", int, 0, "that of the rank, of pp stages", least=0)
    own, rest = parser.parse_known_args(argv)
    cfg = load_config(rest)
    if cfg.pp == "auto":
        raise ConfigError("pp=auto must be a number for a trace, which is of one rank; try --pp=1")
    if own.stage >= cfg.pp:
        raise ConfigError(f"stage={own.stage} must be below pp={cfg.pp} (stages are counted from 0); try "
                          f"--stage={cfg.pp - 1}")
    if not cfg.vocab_size:
        raise ConfigError("vocab_size=0 must be known without a dataset; try --vocab_size=50257")
    return Layout.of(cfg, stage=own.stage, msp=False), own.multiprocessors


if __name__ == "__main__":  # before torch is imported, which takes seconds
    answer_early(read_argv)

import torch

from memo.estimate.arena import recompute_sweeps, shortest
from memo.layer.edges import Edges
from memo.layer.tiles import Learned
from memo.parallel.mesh import Mesh
from memo.planner.trace import Trace
from memo.run.rehearsal import kernel_requests, traced_requests
from memo.states.passes import Model
from memo.system.axis import Axis
from model import GPT


class Short(Edges):
    """Computes like Edges, but the head ends after two chunks."""

    def head(self, x: torch.Tensor, targets: torch.Tensor | Learned, N: int, scale: float | None,
             loss: torch.Tensor) -> None:
        rows = 2 * self.own_head_rows
        some = (targets._replace(rows=targets.rows[:rows], targets=targets.targets[:rows])
                if isinstance(targets, Learned) else targets[:rows * self.tp.size])
        super().head(x[:rows], some, N, scale, loss)


def trace_step(cfg: Layout, device: str, threads: int = 1, multiprocessors: int = 0) -> Trace:
    """Traces a rank of cfg.tp and cfg.cp on "cuda" or "cpu". To recompute rows needs no other requests."""
    dtype = {"auto": "bfloat16" if device == "cuda" else "float32"}.get(cfg.dtype, cfg.dtype)
    keep: Keys = dict(activation="keep", alpha="auto")
    sweeps = recompute_sweeps(cfg)
    cfg = replace(shortest(cfg, 2 if sweeps else 1), **keep)  # a later unit makes them again
    requests = partial(kernel_requests, threads=threads, deterministic=cfg.deterministic,
                       multiprocessors=multiprocessors, documents=cfg.documents)
    mesh = Mesh(weights=Axis("tp", cfg.tp), hops=Axis("hops", cfg.tp), tokens=Axis("cp", cfg.token_ranks))

    def short_model(device: torch.device) -> Model:
        model = Model(GPT, cfg, device, getattr(torch, dtype), mesh=mesh)
        model.gpt.edges = Short(**vars(model.gpt.edges))
        return model
    return traced_requests(short_model, cfg.batch_size, cfg.block_size // cfg.cp,
                           [{}] * (len(cfg.layers) * cfg.subsequences),
                           "cpu" if device == "cpu" else "meta", requests, "made" if sweeps else "stay")


def main(argv: list[str]) -> None:
    cfg, multiprocessors = read_argv(argv)
    device = "cpu" if cfg.device == "cpu" else "cuda"
    print(trace_step(cfg, device, torch.get_num_threads(), multiprocessors).text, end="")


if __name__ == "__main__":
    sys.exit(run(main))
