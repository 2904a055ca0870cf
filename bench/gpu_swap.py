"""Every mode of memo beside plain torch, on one CUDA GPU, 7B-shaped layers, bf16: who is fastest, who fits?

    python -m bench.gpu_swap [--lengths=16384,...,524288] [--layers=0] [--cases=keep,recompute,...]
                             [--steps=2] [--seconds=0] [--check=true] [--pin_memory=true]
                             [--out=bench/results/gpu_swap.json]

The cases take turns in one process: memo's `keep`, `recompute`, `swap` and `memo` (both alpha modes), plain
torch with torch.utils.checkpoint on every layer, and plain torch with every saved tensor of the layers
offloaded by save_on_cpu(pin_memory=True). All have bf16 parameters, fp32 master weights and moments, the same
loss in chunks of tokens and expandable segments. --layers=0 takes at each length the most layers whose states
and activations fit beside each other (alpha = 0), up to the 7B model's 32. Before anything is timed the
gradients of every kind of placement are compared with autograd's. Floor: the bare matrix products and
attention kernels of a step, launched alone. A case that does not fit is "oom" (device) or "oohm" (host). Rows
are added to those that --out holds, same length, layers and case replaced; no case starts once --seconds are
over: so a long run may be had in parts, for example with --lengths=262144 --cases=memo --steps=1
--check=false.
"""

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from bench.floor import Kernels
from bench.machine import machine
from memo import memory
from memo.config import Config
from memo.decide import Room, problem_of
from memo.device import device_name, synchronize
from memo.errors import ConfigError
from memo.estimate.hardware import peak_flops_per_s
from memo.formulas import mfu, percent, tgs
from memo.launch import read_launch
from memo.layer import head_rows
from memo.optim import Optimizer
from memo.plots import timeline
from memo.swap.alpha import OutOfHostMemory
from memo.swap.placement import Placement
from memo.swap.placing import place_rows
from memo.swap.slab import host_bytes
from memo.swap.spans import stall_s
from model import GPT, initial_weights
from testing.twin import Twin

STATE_BYTES = 18  # a parameter's: bf16 itself, and in fp32 gradient, master weight and two moments
TRANSIENT_UNITS = 8  # (N, C) tensors beside the buffers; a guess that only chooses the number of layers
OURS = {"keep": dict(activation="keep"), "recompute": dict(activation="recompute"),
        "swap": dict(activation="swap"), "memo": dict(activation="memo"),
        "memo_paper": dict(activation="memo", alpha_mode="paper")}
RIVALS = ("torch_checkpoint", "torch_save_on_cpu")


def free_memory(device):
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # the pinned blocks of save_on_cpu
        torch.cuda.reset_peak_memory_stats(device)


def clock(device):
    synchronize(device)
    return time.perf_counter()


def most_layers(base, S, device):
    """The layers, up to 32, whose states leave room for the buffers at alpha = 0."""
    if device.type != "cuda":
        return 4
    p = problem_of(replace(base, block_size=S), 2, None, Room(0))
    activations = p.least_device_bytes + TRANSIENT_UNITS * p.nbytes["x"]
    room = torch.cuda.mem_get_info(device)[1] * 0.97 - 2**31 - activations
    layers = (room - STATE_BYTES * base.vocab_size * base.n_embd) / (STATE_BYTES * 12 * base.n_embd**2)
    return max(1, min(32, int(layers)))


# --- the cases ---

class Ours:
    def __init__(self, cfg, device, tokens, targets):
        self.model = GPT(cfg, device, torch.bfloat16)
        self.optimizer = Optimizer(self.model, cfg)
        self.optimizer.load(initial_weights(cfg, 0, device))
        self.batch = tokens, targets
        self.decision = memory.reserve_activations(cfg, self.model, memory.host_limit(cfg, read_launch(), 2))
        memory.plan_memory(cfg, self.model)

    def step(self):
        self.model.swap.streams.timeline.clear()
        loss = self.model.forward(*self.batch, scale=1.0)
        self.model.backward()
        self.model.arena.run("clip", self.optimizer.clip, 1.0)
        self.model.arena.run("optimizer", self.optimizer.step, 1e-5)
        self.model.arena.settle()
        return loss

    def figures(self, png):
        d, swap = self.decision, self.model.swap
        spans = swap.streams.timeline.take()
        if png:
            timeline(spans, png.with_suffix(".json"), png, png.stem)
        return dict(alpha=d.alpha, n_buffers=d.placement.n_buffers, input_only=d.placement.input_only,
                    limits=d.swap_plan and d.swap_plan.limits, stall_s=stall_s(spans),
                    host_bytes=swap.host_bytes, buffer_bytes=swap.device_bytes,
                    attention=self.model.attention.name, rates=d.rates and asdict(d.rates),
                    arena_bytes=self.model.arena.stats().arena_bytes, misses=self.model.arena.stats().misses)

    def floor_s(self, device):
        """Seconds of the bare kernels of a step: one layer's L times, one head chunk's as often as there are
        chunks."""
        m, swap = self.model, self.model.swap
        s, x, y = swap.layers[0], swap.x[0], swap.x[1]
        x.normal_()
        with Kernels() as layer:
            m.blocks[0].forward(s, m.turn[0], y)
            m.blocks[0].backward(y, s, m.turn[0])
        rows = m.edges.own_head_rows
        targets, loss = self.batch[1].reshape(-1)[:rows], torch.zeros((), device=device)
        with Kernels() as head:
            m.edges.head(x[:rows], targets, len(x), 1.0, loss)
        seconds = []
        for kernels in (layer, head):
            kernels.run()
            start = clock(device)
            kernels.run()
            seconds.append(clock(device) - start)
        return m.cfg.n_layer * seconds[0] + len(x) / rows * seconds[1]

    def close(self):
        self.model.close()


class Counted(torch.autograd.graph.save_on_cpu):
    """save_on_cpu that raises OutOfHostMemory instead of taking more of the host than `limit` bytes."""

    def __init__(self, pin, limit):
        super().__init__(pin_memory=pin)
        self.nbytes, pack = 0, self.pack_hook

        def counted(t):
            self.nbytes += 1 << (t.nbytes - 1).bit_length()  # what torch's pinned cache takes for it
            if self.nbytes > limit:
                raise OutOfHostMemory(f"save_on_cpu needs more than the host's {limit / 2**30:.4g} GiB")
            return pack(t)
        self.pack_hook = counted


class Plain(Twin):
    """The autograd twin with its layers checkpointed or offloaded, and its head in checkpointed chunks of
    tokens."""

    def set(self, kind, device):
        self.kind, self.pin, self.host = kind, device.type == "cuda", 0
        self.limit = host_bytes("auto")  # now, before torch's pinned cache holds any of it
        return self

    def head(self, x, targets):
        return F.cross_entropy(F.linear(self.lnf(x), self.wte.weight).float(), targets, reduction="sum")

    def forward(self, tokens, targets):
        x, cos, sin = self.embed(tokens)
        if self.kind == "torch_checkpoint":
            for block in self.blocks:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
        else:
            hooks = Counted(self.pin, self.limit)
            with hooks:
                for block in self.blocks:
                    x = block(x, cos, sin)
            self.host = hooks.nbytes
        n = head_rows(self.wte.weight.shape[0], x.is_cpu)
        rows = zip(x.flatten(0, 1).split(n), targets.reshape(-1).split(n), strict=True)
        return sum(checkpoint(self.head, *chunk, use_reentrant=False) for chunk in rows) / tokens.numel()


class Rival:
    def __init__(self, kind, cfg, device, tokens, targets):
        with torch.device(device):
            twin = Plain(cfg).bfloat16()
        self.model = twin.set(kind, device).load(initial_weights(cfg, 0, device))
        self.batch = tokens, targets
        self.params = list(self.model.parameters())
        self.master = [p.detach().float() for p in self.params]
        self.adamw = torch.optim.AdamW(self.master, lr=1e-5, fused=True)

    def step(self):
        loss = self.model(*self.batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for m, p in zip(self.master, self.params, strict=True):
            m.grad, p.grad = p.grad.float(), None
        self.adamw.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.params, strict=True):
                p.copy_(m)
                m.grad = None
        return loss.detach()

    def figures(self, png):
        return dict(host_bytes=self.model.host)

    def close(self):
        self.model = self.params = self.master = self.adamw = None


def build(case, cfg, device, S):
    tokens, targets = torch.randint(0, cfg.vocab_size, (2, 1, S), device=device)
    if case in RIVALS:
        return Rival(case, cfg, device, tokens, targets)
    return Ours(replace(cfg, **OURS[case]), device, tokens, targets)


# --- checking, measuring ---

def placements(cfg):
    """{name: Placement}, of every kind: the modes, alphas, layers that keep only their input, more than two
    buffers."""
    L, N = cfg.n_layer, cfg.block_size
    problem = problem_of(cfg, 2, None, Room(2**60))
    made = {a: place_rows(replace(cfg, activation=a), problem)[0] for a in ("keep", "recompute", "swap")}
    made |= {f"alpha {a}": place_rows(replace(cfg, alpha=a), problem)[0] for a in (0.0, 0.5)}
    half = made["alpha 0.5"].kept
    finer = {name: N * (i % 4) // 4 if name in problem.others else N for i, name in enumerate(half)}
    # one group with their output
    ln = {f"ln{j}_{what}": finer[f"ln{j}_out"] for j in (1, 2) for what in ("mean", "rstd")}
    return made | {"one input only": replace(made["alpha 0.5"], input_only=1),
                   "per tensor": Placement(L, 2, N, finer | ln), "three buffers": Placement(L, 3, N, half)}


def check(base, device):
    """{placement: error}: how far the gradients, summed over three batches, are from autograd's in fp32; and
    the rivals' losses from the same. Exits where one is more than 3e-2 (1e-2) away."""
    S = 4096
    cfg = replace(base, n_layer=5, block_size=S, vocab_size=1000, activation="memo")
    batches = torch.randint(0, cfg.vocab_size, (3, 2, 1, S), device=device)
    twin = Twin(cfg).to(device).load((n, w.bfloat16().float()) for n, w in initial_weights(cfg, 0, device))
    for batch in batches:
        want = twin(*batch)
        want.backward()
    model = GPT(cfg, device, torch.bfloat16)
    model.load(initial_weights(cfg, 0, device))
    worst = {}
    for name, p in placements(cfg).items():
        model.reserve(1, S, p)
        model.grads.zero_()
        for batch in batches:  # the host waits for none of them: each pass meets the copies of the one before
            model.forward(*batch, scale=1.0)
            model.backward()
        worst[name], _ = twin.worst_gradient(model)
        if not worst[name] <= 3e-2:
            sys.exit(f"{name}: a gradient is {worst[name]:.1e} away from autograd's; nothing is timed")
    model.close()
    for kind in RIVALS:
        worst[kind] = abs(Rival(kind, cfg, device, *batches[-1]).step().item() - want.item())
        if not worst[kind] <= 1e-2:
            sys.exit(f"{kind}: its loss is {worst[kind]:.1e} away from autograd's; nothing is timed")
    return worst


def attempt(call):
    """call(), or None where memory does not suffice for it: what is only reported must not cost the row."""
    try:
        return call()
    except RuntimeError as e:
        print(f"warning: {str(e).splitlines()[0]}", file=sys.stderr)
        return None


def measure(case, cfg, device, steps, png):
    """One row. The least seconds of `steps` steps; one before them warms up."""
    S, run, row = cfg.block_size, None, {}
    try:
        run = build(case, cfg, device, S)
        seconds = []
        for _ in range(steps + 1):
            start = clock(device)
            loss = run.step().item()
            seconds.append(clock(device) - start)
        rate = tgs(S, 1, min(seconds[1:]))
        row = dict(step_s=min(seconds[1:]), loss=loss, tokens_per_s=rate,
                   mfu=mfu(cfg, rate, peak_flops_per_s(device_name(device))),
                   device_peak_bytes=torch.cuda.max_memory_allocated(device)
                   if device.type == "cuda" else None,
                   device_reserved_bytes=torch.cuda.max_memory_reserved(device)
                   if device.type == "cuda" else None,
                   **run.figures(png))
        if case == "memo":
            row["floor_s"] = attempt(lambda: run.floor_s(device))
    except OutOfHostMemory as e:
        row = dict(failed="oohm", why=str(e))
    except ConfigError as e:
        row = dict(failed="oom", why=str(e))
    except RuntimeError as e:
        oom = isinstance(e, torch.OutOfMemoryError) or "out of memory" in str(e)
        row = dict(failed="oom" if oom else "error", why=str(e).splitlines()[0])
    if run is not None:
        run.close()
    return row


def show(row):
    if "failed" in row:
        print(f"{row['S']:8} L {row['L']:2} {row['case']:18} {row['failed']}: {row['why'][:90]}", flush=True)
        return
    alpha = "" if row.get("alpha") is None else f"alpha {row['alpha']:.2f}"
    floor = "" if not row.get("floor_s") else f"{row['floor_s'] / row['step_s']:.1%} of the floor"
    peak, host = ((row[k] or 0) / 2**30 for k in ("device_peak_bytes", "host_bytes"))
    print(f"{row['S']:8} L {row['L']:2} {row['case']:18} {row['step_s']:8.3f} s "
          f"{row['tokens_per_s']:9.0f} tok/s  MFU {percent(row['mfu'])}  "
          f"stall {row.get('stall_s') or 0:.3f} s  peak {peak:.1f} GiB  host {host:.1f} GiB  "
          f"{alpha} {floor}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="16384,32768,65536,131072,262144,524288")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--cases", default=",".join([*OURS, *RIVALS]))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0, help="start no case after so long; 0: no limit")
    parser.add_argument("--check", default="true", choices=("true", "false"), help="compare gradients first")
    parser.add_argument("--pin_memory", default="true", choices=("true", "false"))
    parser.add_argument("--n_embd", type=int, default=4096)
    parser.add_argument("--n_head", type=int, default=32)
    parser.add_argument("--device", default="cuda", help="cpu tries the script out, with a small --n_embd")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_swap.json")
    args = parser.parse_args()
    began, device = time.monotonic(), torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("bench/gpu_swap.py needs a CUDA GPU")
    base = Config(n_embd=args.n_embd, n_head=args.n_head, vocab_size=50257,
                  pin_memory=args.pin_memory == "true")
    result = json.loads(args.out.read_text()) if args.out.exists() else dict(rows=[])
    result["machine"] = machine()
    if args.check == "true":
        result["gradient_errors"] = check(base, device)
        print("away from autograd:", ", ".join(f"{c} {e:.1e}" for c, e in result["gradient_errors"].items()),
              flush=True)
    for S in map(int, args.lengths.split(",")):
        L = args.layers or most_layers(base, S, device)
        for case in args.cases.split(","):
            if args.seconds and time.monotonic() - began > args.seconds:
                sys.exit(f"{args.seconds:.0f} s are over: stopped before {case} at {S}")
            free_memory(device)
            png = args.out.with_name(f"gpu_swap_{case}_{S}.png") if case == "memo" else None
            row = dict(S=S, L=L, case=case,
                       **measure(case, replace(base, n_layer=L, block_size=S), device, args.steps, png))
            show(row)
            result["rows"] = [r for r in result["rows"]
                              if (r["S"], r["L"], r["case"]) != (S, L, case)] + [row]
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
