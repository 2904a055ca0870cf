"""What an item of the GPU hour writes down, line by line, so that what stops it leaves the lines before; the
card as memo knows it, and shapes that fit it."""

import math
import os
import sys
import traceback
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from bench.gpu_hour.items import BF16
from memo.system.files import save_json


class Skip(Exception):
    """Why an item, or a part of it, is not run. One line."""


def plain(value):
    """The value as JSON holds it: what is not finite as a word."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Notes:
    """The lines of an item, dict(what, measured, predicted, unit, ok, ...) each, kept in `path` with `found`,
    which has them and whatever else the item says. `ok`: None where a line is no check."""

    def __init__(self, path, **found):
        self.path, self.found = path, found | dict(lines=[])
        self.save()

    def save(self, **more):
        self.found |= more
        save_json(plain(self.found), self.path)

    def line(self, what, measured=None, predicted=None, unit="", ok=None, **more):
        self.found["lines"].append(dict(what=what, measured=measured, predicted=predicted, unit=unit, ok=ok,
                                        **more))
        self.save()
        told = f"{measured} {unit}" if "skipped" not in more else f"skipped: {more['skipped']}"
        print(f"{what}: {told}" + f", expected {predicted}" * (predicted is not None), flush=True)

    def error(self, what, got, want, limit=BF16):
        """A check: the relative error of tensor `got` against fp64. Nothing is proved by zeros."""
        size = want.norm().item()
        error = (got.double() - want).norm().item() / size if size else math.nan
        self.line(what, error, limit, "away", error <= limit)

    def skip(self, what, why):
        self.line(what, skipped=str(why))

    def table(self, name, columns, rows):
        self.save(tables=self.found.get("tables", {}) | {name: [columns, *rows]})

    @contextmanager
    def trying(self, what):
        """An error in the block is a line of its own, and the item goes on; not where the device is lost."""
        try:
            yield
        except Skip as e:
            self.skip(what, e)
        except Exception as e:
            traceback.print_exc()
            self.line(what, why_of(e), ok=False)
            import torch
            torch.cuda.synchronize()  # raises where the process has lost its device
            free_memory()


def why_of(e):
    """The kind of an exception and the first line of what it says."""
    return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"


def is_oom(e):
    import torch
    return isinstance(e, torch.OutOfMemoryError) or "out of memory" in str(e)


def free_memory():
    import gc

    import torch
    gc.collect()
    torch.cuda.empty_cache()
    getattr(torch._C, "_host_emptyCache", lambda: None)()  # the pinned blocks of save_on_cpu
    torch.cuda.reset_peak_memory_stats()


# --- the card ---

@cache
def device():
    """The GPU of this process. Errors: Skip."""
    import torch
    if not torch.cuda.is_available():
        raise Skip("torch finds no CUDA GPU")
    from memo.config.config import Config
    from memo.system.device import pick_device
    return pick_device(Config(device="cuda"))[0]


@cache
def machine_here():
    """The hardware.Machine of this card by what is published of its type, never by a calibration; without
    speeds where the type is not known."""
    import torch

    from memo.memory.slab import available
    from memo.system import hardware
    from memo.system.device import device_name, gpu_facts, own_bytes
    name = device_name(device())
    short = hardware.gpu_named(name)
    found = hardware.machine(short) if short else hardware.Machine(
        name, hardware.NODES["pcie-server"], None, None, None)
    node = replace(found.node, gpus_per_node=torch.cuda.device_count(), host_memory_bytes=available())
    return replace(found, node=node, memory_bytes=own_bytes(device()), **gpu_facts(device()))


def rate_of(op, size=1):
    """The rate of an operation by the tables of memo/system/hardware.py; None where it has none."""
    speeds = machine_here().speeds
    return speeds.rate(op, size) if speeds and (op in speeds.table or "memory" in speeds.table) else None


def shape(asked, **keys):
    """A Layout of the 7B model's width and `keys`, with what was asked for; a Config where they leave states
    open."""
    from memo.config.config import Config
    from memo.config.layout import Layout
    kind = Config if keys.get("states") == "auto" else Layout
    C = keys.pop("n_embd", asked.n_embd)
    keys["block_size"] = min(keys["block_size"], asked.longest)
    return kind(**dict(n_embd=C, n_head=max(1, C // 128), vocab_size=50257, activation="memo", subsequences=1,
                       states="device", attention=asked.attention,
                       host_memory_gb=asked.host_memory_gb) | keys)


def smaller(cfg):
    """The config with half of its layers, down to two; then half of its tokens, down to 4,096; then one
    layer. None: there is no smaller one."""
    fewer, shorter = dict(n_layer=cfg.n_layer // 2), dict(block_size=cfg.block_size // 2)
    if cfg.n_layer > 2 or (cfg.n_layer == 2 and cfg.block_size <= 4096):
        return replace(cfg, **fewer)
    return replace(cfg, **shorter) if cfg.block_size > 4096 else None


def fitting(cfg, ways=({},)):
    """The Estimate of the largest such config that fits this card; of each size the first of `ways`, other
    keys, that does. Errors: Skip."""
    from memo.errors import OutOfHostMemory
    from memo.estimate.arena import fast_arena
    from memo.estimate.budget import estimate
    why = ""
    while cfg is not None:
        for keys in ways:
            try:
                got = estimate(replace(cfg, **keys), machine_here(), 1, fast_arena)
            except OutOfHostMemory as e:  # not even a checkpoint's copy
                why = str(e)
                continue
            if got.fits:
                return got
            why = got.why
        cfg = smaller(cfg)
    raise Skip(f"it does not fit: {why}")


def tensor_bytes(got):
    """What an Estimate expects of torch's tensors: all of the device but for margin, context and NCCL."""
    return got.device_bytes - sum(got.bytes_of(name)[0] for name in ("margin", "context", "communication"))


def named(cfg):
    """A shape in short."""
    return f"C={cfg.n_embd} L={cfg.n_layer} S={cfg.block_size:,}"


# --- the process of an item ---

def end_with(parent):
    """Ends this process when its parent has gone: nobody would read what it finds."""
    import threading
    import time

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


def run_item(name, function, asked):
    """Runs module:function of an item; what it finds is in out/items/<name>.json. -> exit code."""
    end_with(os.getppid())
    notes = Notes(asked.out / "items" / f"{name}.json", item=name)
    try:
        import importlib

        import torch  # noqa: F401 - absent: nothing is to be run
    except ImportError as e:
        notes.save(skipped=f"torch cannot be imported ({e})")
        return 0
    try:
        module, _, called = function.partition(":")
        work = getattr(importlib.import_module(module), called)
        work(notes, asked)
    except Skip as e:
        notes.save(skipped=str(e))
    except BaseException as e:
        traceback.print_exc()
        notes.save(error=why_of(e))
        sys.stdout.flush()
        return 1
    try:
        from bench.machine import machine
        notes.save(machine=machine())
    except Exception as e:
        notes.save(machine=dict(error=why_of(e)))
    return 0

