"""What the papers measured, as memo_paper.json, metp_paper.json and sppo_paper.json have it, and the configs
of MEMO's rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from memo.config.config import Config
from memo.decide.choose import degrees_of
from memo.estimate.arena import fast_arena
from memo.estimate.budget import Estimate
from memo.estimate.search import config_with, estimate_or_none
from memo.run.load_config import load_config
from memo.system import hardware

PAPER, METP, SPPO = (json.loads((Path(__file__).parent / f"{name}_paper.json").read_text())
                     for name in ("memo", "metp", "sppo"))
GPUS = {name: model["gpus"] for name, model in PAPER["models"].items()}
# Of the paper's 2 TB: torch's pinned cache rounds blocks up to powers of two. Set to the cells of 7B that ran
# out of it (research/papers/memo_fit.py)
HOST_BYTES = 1.035e12
LONG = 65536  # tokens from which a sequence takes more than one GPU: below, MEMO's rows are Megatron-LM's
SEQUENCES = 16  # of a step: by the wall-clock of MEMO's Table 3, which nowhere says it


def paper_config(model: str, S: int, **keys: Any) -> Config:
    """The preset of a model at another context, with the paper's sequences of a step, on the host memory that
    the paper could use."""
    cfg = load_config([f"config/{model.lower()}_1m.py", f"--block_size={S}", "--subsequences=1",
                       "--states=device", f"--gradient_accumulation_steps={SEQUENCES}"])
    return replace(cfg, host_memory_gb=HOST_BYTES / 1e9, **keys)


def config_of(model: str, tokens: int, facts: dict[str, Any] = PAPER, **keys: Any) -> Config:
    """The config of one of a paper's models, in bf16, with GPT-2's vocabulary and the sequences of a step."""
    shape = {name: facts["models"][model][name] for name in ("n_layer", "n_embd", "n_head")}
    return Config(**shape, vocab_size=50257, block_size=tokens, dtype="bfloat16",
                  gradient_accumulation_steps=SEQUENCES, **keys)


def rows_of_table3(model: str, system: str = "memo") -> dict[int, float | str]:
    """{context: MFU in percent, "oom" or "oohm"}."""
    return {r["seq_tokens"]: r.get("mfu", r.get("fail")) for r in PAPER["table3"]
            if r["model"] == model and r["system"] == system}


def of_that_width(model: str, S: int, world: int = 0) -> list[Estimate]:
    """The estimates with the preset's tp, by cp, on the paper's GPUs, or on `world` of them. Each row of the
    paper is in the best layout that its authors found; they name it for 7B alone."""
    cfg, world = paper_config(model, S), world or GPUS[model]
    machine = hardware.machine("a800-80gb")
    every = (estimate_or_none(config_with(cfg, cp=cp), machine, world, fast_arena)
             for cp in degrees_of(world // cfg.tp))
    return [got for got in every if got]
