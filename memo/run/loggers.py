"""The figures of a step, and where they are logged: metrics.jsonl, the console, Weights & Biases."""

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from tqdm import tqdm

from memo.config.config import Config
from memo.config.formulas import percent
from memo.errors import ConfigError, reason, warn
from memo.system.files import Json, JsonObject, open_file, own_folder, parse_json, regular, save_bytes

MOST_LINE, MOST_VALUES = 2**16, 64  # of a line of metrics.jsonl: characters and values
MOST_METRICS = 2**30  # bytes
WANDB_S = 10  # to reach its server


@dataclass
class StepStats:
    """Holds a line of metrics.jsonl: None, or what is not finite, is unknown. `tokens`: in this step."""

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
    bubble_s: float | None = None  # of several stages
    transient_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    host_bytes: int | None = None
    sent_bytes: dict | None = None
    val_loss: float | None = None
    target_tokens: int | None = None  # with documents: those that are learned

    def as_dict(self) -> dict:
        known = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in asdict(self).items()}
        sometimes = "val_loss", "bubble_s", "target_tokens"
        return {k: v for k, v in known.items() if v is not None or k not in sometimes}


def is_step(row: dict) -> bool:
    """Says whether the values of a line that are read again are values that StepStats writes."""
    numbers: list[Json] = [row.get(name) for name in ("iter", "loss", "tgs", "tokens", "step_s")]
    if row.get("val_loss") is not None:
        numbers.append(row["val_loss"])
    return type(row.get("iter")) is int and all(type(n) in (int, float) and 0 <= n < 2**63 for n in numbers)


def read_metrics(path: str | Path, damaged: list[str] | None = None) -> list[dict]:
    """Reads a metrics.jsonl, but for lines cut short or changed, whose beginnings go to `damaged`. Errors:
    OSError; ConfigError: it is too large."""
    rows = []
    with open(open_file(path), errors="replace") as f:
        if (size := os.fstat(f.fileno()).st_size) > MOST_METRICS:
            raise ConfigError(f"{path} has {size:,} bytes, must have at most {MOST_METRICS:,}; move it away")
        for line in iter(partial(f.readline, MOST_LINE), ""):
            with contextlib.suppress(ValueError):
                if is_step(row := parse_json(line, MOST_VALUES)):
                    rows.append(row)
                    continue
            if damaged is not None and line.strip():
                damaged.append(line[:80])
    return rows


class JsonlLogger:
    """Appends to metrics.jsonl, where an earlier run's lines from `first_iter` on are dropped."""

    def __init__(self, path: str | Path, first_iter: int) -> None:
        damaged: list[str] = []
        rows = read_metrics(path, damaged) if os.path.exists(path) else []
        if damaged:
            warn(f"{path}: damaged lines, which are dropped: {len(damaged)}")
        kept = [r for r in rows if r["iter"] < first_iter]
        save_bytes("".join(json.dumps(r) + "\n" for r in kept).encode(), path)
        self.path = path
        self.waiting: list[str] = []

    def log(self, stats: StepStats) -> None:
        """Writes a line. Errors: OSError; the line waits for the next call."""
        self.waiting.append(json.dumps(stats.as_dict()) + "\n")
        self.close()

    def close(self) -> None:
        """Writes the lines that wait, all or none. Errors: OSError."""
        lines = "".join(self.waiting).encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(self.path, flags, 0o666), "ab", buffering=0) as f:
            size = regular(os.fstat(f.fileno())).st_size
            if f.write(lines) < len(lines):  # raises where nothing is written
                f.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.waiting.clear()


class ConsoleLogger:
    """Shows a progress bar with loss, MFU, TGS and time left; without a terminal lines now and then."""

    def __init__(self, steps: int, done: int, seconds_between_lines: float = 10.0) -> None:
        self.terminal, self.between, self.shown = sys.stderr.isatty(), seconds_between_lines, 0.0
        self.bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, disable=not self.terminal)
        self.steps, self.start, self.first = steps, time.monotonic(), done

    def log(self, stats: StepStats) -> None:
        now, done = time.monotonic(), stats.iter + 1
        text = f"loss {stats.loss:.4f}  MFU {percent(stats.mfu)}  TGS {stats.tgs:,.0f}"
        if stats.bubble_s is not None:
            text += f"  bubble {stats.bubble_s:.3g} s"
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

    def close(self) -> None:
        self.bar.close()


class WandbLogger:
    """Logs to Weights & Biases, without an account offline, into `out_dir`. It never stops the run."""

    def __init__(self, cfg: Config, config_dict: JsonObject, id: str | None = None) -> None:
        self.run: Any = None  # wandb's
        try:
            for folder in (Path(cfg.out_dir, name) for name in ("wandb", ".wandb")):  # it takes what is there
                if os.path.lexists(folder):
                    own_folder(folder)
            import wandb
            keys = dict(project=cfg.wandb_project, name=cfg.wandb_run_name or None, dir=cfg.out_dir,
                        id=id, resume="allow", allow_val_change=True, config=config_dict,
                        settings=wandb.Settings(init_timeout=WANDB_S))
            try:
                mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
                self.run = wandb.init(**keys | dict(mode=mode))
            except Exception as e:
                warn(f"wandb has no connection within {WANDB_S} s, logging offline ({reason(e)})")
                self.run = wandb.init(**keys, mode="offline")
        except Exception as e:
            warn(f"wandb is off: {type(e).__name__}: {reason(e)}")

    def log(self, stats: StepStats) -> None:
        known = {k: v for k, v in stats.as_dict().items() if v is not None}
        self.attempt(lambda: self.run.log(known, step=stats.iter))

    def close(self) -> None:
        self.attempt(lambda: self.run.finish())

    def attempt(self, call: Callable) -> None:
        if self.run is not None:
            try:
                call()
            except Exception as e:
                warn(f"wandb stopped logging: {type(e).__name__}: {reason(e)}")
                self.run = None
