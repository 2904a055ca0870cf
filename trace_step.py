"""Prints the memory requests of a training step of one rank in the format of memo.planner, without memory or GPU:
python trace_step.py [config/x.py] [--key=value ...] [--multiprocessors=132]

Layers that make the same requests are run once; of the chunks of the head, which are alike, two.
"""

import sys
from dataclasses import replace
from functools import partial

import torch

from memo import profiler
from memo.command import end_with_reader
from memo.config import load_config
from memo.errors import ConfigError
from memo.mesh import Axis, Mesh
from model import GPT


class Short(GPT):
    """Its head ends after two chunks."""

    def head(self, x, targets, *args):
        rows = 2 * self.own_head_rows
        super().head(x[:rows], targets[:rows * self.mesh.tp.size], *args)


def trace_step(cfg, device, threads=1, multiprocessors=0):
    """The planner.Trace of a rank of cfg.tp and cfg.cp on "cuda" with so many multiprocessors or a "cpu" with so many
    threads; nothing is recomputed in it, which requests no more than the forward does. cfg.dtype auto: as there."""
    dtype = {"auto": "bfloat16" if device == "cuda" else "float32"}.get(cfg.dtype, cfg.dtype)
    cfg = replace(cfg, n_layer=1, activation="keep", alpha="auto")
    requests = partial(profiler.kernel_requests, threads=threads, deterministic=cfg.deterministic,
                       multiprocessors=multiprocessors)
    mesh = Mesh(tp=Axis("tp", cfg.tp), cp=Axis("cp", cfg.cp))
    return profiler.traced(lambda where: Short(cfg, where, getattr(torch, dtype), mesh=mesh), cfg.batch_size,
                           cfg.block_size // cfg.cp, [{}], "cpu" if device == "cpu" else "meta", requests)


if __name__ == "__main__":
    end_with_reader()
    try:
        own = [arg for arg in sys.argv[1:] if arg.startswith("--multiprocessors=")]
        config = load_config([arg for arg in sys.argv[1:] if arg not in own])
        print(trace_step(config, "cpu" if config.device == "cpu" else "cuda", torch.get_num_threads(),
                         *(int(arg.partition("=")[2]) for arg in own)).text, end="")
    except ConfigError as e:
        sys.exit(f"error: {e}")
