"""What the MEMO paper measured, as memo_paper.json has it, and the configs of its rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from memo.config import Config
from memo.estimate import hardware
from memo.estimate.arena import fast_arena
from memo.estimate.budget import Estimate, estimate
from memo.load_config import load_config

PAPER = json.loads((Path(__file__).parent / "memo_paper.json").read_text())
GPUS = {name: model["gpus"] for name, model in PAPER["models"].items()}
HOST_BYTES = 1.035e12  # of the paper's 2 TB: torch's pinned cache rounds blocks up to powers of two


def paper_config(model: str, S: int, **keys: Any) -> Config:
    """The preset of a model at another context, on the host memory that the paper could use."""
    cfg = load_config([f"config/{model.lower()}_1m.py", f"--block_size={S}", "--subsequences=1"])
    return replace(cfg, host_memory_gb=HOST_BYTES / 1e9, **keys)


def rows_of_table3(model: str) -> list[tuple[int, float]]:
    """[(context, MFU in percent)] of MEMO, from 64K on."""
    return [(r["seq_tokens"], r["mfu"]) for r in PAPER["table3"]
            if r["model"] == model and r["system"] == "memo" and r["seq_tokens"] >= 65536 and "mfu" in r]


def of_that_width(model: str, S: int) -> list[Estimate]:
    """The estimates with the preset's tp and the paper's 16 sequences a step, by cp. Each row of the paper is
    in the best layout that its authors found; they name it for 7B alone."""
    machine, cps = hardware.machine("a800-80gb"), {"7B": (2,), "13B": (1, 2), "30B": (1, 2, 4)}[model]
    configs = [paper_config(model, S, cp=cp, gradient_accumulation_steps=16) for cp in cps]
    return [estimate(cfg, machine, GPUS[model], fast_arena) for cfg in configs]
