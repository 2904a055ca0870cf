"""Prints the memory requests of a training step of one rank in the format of memo.planner, without memory or GPU:
python trace_step.py [config/x.py] [--key=value ...]

Layers that make the same requests are run once; of the chunks of the head, which are alike, two.
"""

import sys
from dataclasses import replace

import torch

from memo import profiler
from memo.command import end_with_reader
from memo.config import ConfigError, load_config
from memo.mesh import Axis, Mesh
from model import GPT, HEAD_ROWS


class Short(GPT):
    """Its head ends after two chunks."""

    def head(self, x, targets, *args):
        tp = self.mesh.tp.size
        rows = 2 * max(1, HEAD_ROWS // tp)
        super().head(x[:rows], targets[:rows * tp], *args)


def trace_step(cfg, device, threads=1):
    """The planner.Trace of a rank of cfg.tp and cfg.cp on "cuda" or a "cpu" with so many threads; nothing is recomputed in
    it, which requests no more than the forward does. cfg.dtype auto: as there."""
    dtype = {"auto": "bfloat16" if device == "cuda" else "float32"}.get(cfg.dtype, cfg.dtype)
    attention = "math" if cfg.attention == "math" else "auto"
    cfg = replace(cfg, n_layer=1, attention=attention, activation="keep", alpha="auto")
    mesh = Mesh(tp=Axis("tp", cfg.tp), cp=Axis("cp", cfg.cp))
    return profiler.traced(lambda where: Short(cfg, where, getattr(torch, dtype), mesh=mesh), cfg.batch_size,
                           cfg.block_size // cfg.cp, [{}], "cpu" if device == "cpu" else "meta", threads)


if __name__ == "__main__":
    end_with_reader()
    try:
        config = load_config(sys.argv[1:])
        print(trace_step(config, "cpu" if config.device == "cpu" else "cuda", torch.get_num_threads()).text, end="")
    except ConfigError as e:
        sys.exit(f"error: {e}")
