"""What a config needs and gives on a machine: bytes of every region, alpha, seconds of a step, MFU. Plain
arithmetic; the one thing that takes the model itself, the arena of temporary tensors, is handed in or had
from trace_step.py.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

from memo import backends
from memo.config import Config, communicators, degrees
from memo.decide import Rates, Room, decide, margin_bytes, problem_of, spare_bytes, with_buffers
from memo.errors import ConfigError
from memo.estimate.hardware import COMMUNICATOR_BYTES, CONTEXT_BYTES, GIB, Machine
from memo.estimate.roofline import LayerSeconds, micro_batches, step_s
from memo.files import cache_folder, keep_json, parse_json, read_text
from memo.flat import gradient_places, gradient_slots, local_layout, shared_numel
from memo.formulas import mfu, parameters, tgs
from memo.layer import CHUNK_ROWS, INPUT, Tensor, group_heads, head_rows, tensors_of
from memo.planner.plan import ALIGNMENT, PLANNING_S, cached_plan
from memo.planner.trace import Trace, parse_trace
from memo.swap import alpha
from memo.swap.placement import Placement

ROOT = Path(__file__).parents[2]
STATES_BYTES = 12  # of a parameter: fp32 master weight and two moments
HOST_STATES_BYTES = STATES_BYTES + 4  # with its gradient, where the optimizer lives on the host
# config keys on which the memory requests of a step depend
REQUEST_KEYS = ("n_head", "n_embd", "block_size", "vocab_size", "n_kv_head", "head_dim", "n_inner", "norm",
                "mlp", "bias", "qkv_bias", "qk_norm", "tie_embeddings", "gelu", "position", "batch_size",
                "tp", "cp", "context_parallel", "dtype", "solver", "deterministic", "ops")

# The figures of fast_arena: set by hand, so that the sum is at least the arena of a trace and at most twice
# as much, in the cases of tests/test_estimate.py (test_the_fast_bound_is_one_and_is_near).
# Of attention, in units of one tensor (B, T, heads, D) of a group of heads:
ATTENTION_GROUPS = 4.2  # one rank of cp
ULYSSES_GROUPS = 8.6  # with the tensors that all-to-alls send and receive
RING_GROUPS = {"two ranks": 4.6, "more": 6.6}  # blocks of keys and values on their way, in the run's dtype
RING_FP32_GROUPS = 5  # partial results and gradients, in fp32
MATH_SCORE_BYTES = 13  # of attention=math, a score: scores, mask, their gradients
CPU_QUERIES, CPU_KEYS = 256, 512  # of a thread, the largest block: FlashAttentionKernel.cpp of torch
# Of the rest of a layer:
NORM_CHUNKS = 2.3  # a norm's backward, in units of a chunk of own rows in fp32
RMS_NORM_CHUNKS = 4.3  # the same of RMSNorm with ops=torch on a GPU
STATISTICS = 1.01  # with statistics and token ids: all of a layer, times so much
# Of the head:
LOGIT_BYTES = 8.2  # a logit, its softmax in fp32 and its gradient, where the dtype is fp32; in bf16 2 more
HEAD_ROW_TENSORS = 4  # tensors (rows, C) in the run's dtype


class Line(NamedTuple):
    """Bytes of a rank under one heading; `region` as in plan.json, `what` for people."""

    region: str
    what: str
    device_bytes: int = 0
    host_bytes: int = 0


class ArenaBytes(NamedTuple):
    """Bytes of the arena of temporary tensors: of layers and embedding, and the bytes that the head takes
    beyond these."""

    transient: int
    head: int


ArenaOf = Callable[[Config, Machine], ArenaBytes]
TraceOf = Callable[[dict[str, Any]], Trace]


# --- the arena of temporary tensors ---

def planned_arena_bytes(trace: Trace, solver: str, device: str) -> ArenaBytes:
    """The ArenaBytes of a step's Trace, planned as the run plans it."""
    def peak(trace: Trace) -> int:
        return cached_plan(trace, cache_folder(), solver, ALIGNMENT[device], PLANNING_S).arena_bytes
    layers = [event for label, events in trace.segments.items() if not label.endswith("head")
              for event in events]
    return ArenaBytes(transient := peak(Trace(tuple(layers))), max(0, peak(trace) - transient))


def trace_elsewhere(keys: dict[str, Any]) -> Trace:
    """The Trace of the keys of traced_arena, by another process, which needs torch: some seconds. Errors:
    ConfigError."""
    argv = [f"--{k}={v}" for k, v in keys.items() if k != "threads"]
    done = subprocess.run([sys.executable, ROOT / "trace_step.py", *argv], capture_output=True, text=True,
                          env=os.environ | dict(OMP_NUM_THREADS=str(keys["threads"])))
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"the trace of a step failed ({why}); try --fast")
    return parse_trace(done.stdout, "trace_step.py")


def traced_arena(cfg: Config, machine: Machine, trace: TraceOf = trace_elsewhere) -> ArenaBytes:
    """The ArenaBytes of a rank, from the cache or from trace({key of the config, threads or multiprocessors:
    value}). Errors: those of `trace`, ConfigError where there is no torch."""
    device = "cpu" if machine.cpu else "cuda"
    keys = {k: v for k, v in asdict(cfg).items() if k in REQUEST_KEYS}
    keys |= dict(device=device, threads=machine.threads, attention=backends.kernel_of(cfg, machine),
                 multiprocessors=machine.multiprocessors)
    try:
        key = hashlib.sha256(repr((keys, version("torch"))).encode())
    except PackageNotFoundError:
        raise ConfigError("the trace of a step needs torch, which is not installed; try --fast") from None
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("memo/**/*.py")]):
        key.update(path.read_bytes())
    folder, name = cache_folder(), f"arena-{key.hexdigest()[:16]}.json"
    if folder is not None:
        with suppress(Exception):  # not there, or not what was written
            return checked_arena_bytes(parse_json(read_text(folder / name)), keys)
    arena = planned_arena_bytes(trace(keys), cfg.solver, device)
    keep_json(dict(keys=keys, arena=arena._asdict()), folder, name)
    return arena


def checked_arena_bytes(stored: dict[str, Any], keys: dict[str, Any]) -> ArenaBytes:
    """The ArenaBytes that a file holds for `keys`. Raises any exception where the file is damaged or of other
    keys."""
    arena = ArenaBytes(**stored["arena"])
    if stored["keys"] != keys or not all(type(n) is int and 0 <= n < 2**63 for n in arena):
        raise ValueError("it is not the arena that was asked for")
    return arena


def fast_arena(cfg: Config, machine: Machine, scale: float = 1.0) -> ArenaBytes:
    """A bound of the ArenaBytes, without a trace: the largest of attention over a group of heads, a chunk
    of rows and a chunk of logits. tests/test_estimate.py compares the bound with traces. `scale` multiplies
    it."""
    e, tp, cp, C, D = itemsize_of(cfg, machine), cfg.tp, cfg.cp, cfg.n_embd, cfg.head_width
    rows, f = cfg.batch_size * cfg.block_size // cp, 4 / e  # f: fp32 in units of e
    own, chunk = (min(n, CHUNK_ROWS) * C * e for n in (rows // tp, rows))
    heads, sharing = group_heads(cfg), cfg.n_head // cfg.kv_heads
    group, kv = (rows * n * D * e for n in (heads, -(-heads // sharing)))
    several = heads < cfg.n_head // tp
    # several groups write dq, dk, dv over q, k, v, and sum those of a shared head of keys and values in fp32
    gradients, sums = (0, 2 * f * kv * (heads < sharing)) if several else (group + 2 * kv, 0)
    Q, F = cfg.n_head * D, cfg.inner_width
    dout = rows * Q // tp * e if max(C, F) < Q else 0  # else it has the place of a wider tensor
    gathered = 0 if tp == 1 else chunk if rows <= CHUNK_ROWS else 2 * chunk
    product, norm_chunks = chunk * F // C / tp if cfg.mlp == "swiglu" else 0, NORM_CHUNKS
    if cfg.ops == "torch" and not machine.cpu:  # a CPU goes by smaller chunks
        product *= 2  # with the gradient of `up`
        norm_chunks = RMS_NORM_CHUNKS if cfg.norm == "rmsnorm" else NORM_CHUNKS
    layer = max(attention_bytes(cfg, machine, heads, group, kv) + sums, gradients + norm_chunks * f * own,
                gradients + gathered + chunk / tp, gathered + 2 * f * chunk / tp, gathered + product)
    layer = STATISTICS * (layer + dout)
    return ArenaBytes(int(scale * layer), int(scale * max(0, head_bytes(cfg, e, machine.cpu) - layer)))


def attention_bytes(cfg: Config, machine: Machine, heads: int, group: int, kv: int) -> float:
    """A bound of the bytes of attention over a group of so many heads, with those of its kernel. `group`,
    `kv`: bytes of the group's queries, and of its keys."""
    e, cp, D, ulysses = itemsize_of(cfg, machine), cfg.cp, cfg.head_width, cfg.context_parallel == "ulysses"
    f, B, T, H, several = 4 / e, cfg.batch_size, cfg.block_size // cp, heads, heads < cfg.n_head // cfg.tp
    kv_heads = dealt = kv // (group // heads)
    if ulysses:  # what the kernel of attention sees
        dealt *= cp // gcd(kv_heads, cp)
        T, H, kv_heads = cfg.block_size, heads // cp, dealt // cp
    name = backends.kernel_of(cfg, machine)
    kernel = sum(backends.workspaces(name, (B, T, H, D), (B, T, kv_heads, D), cfg.deterministic,
                                     machine.multiprocessors))
    if name == "flash" and several:
        kernel += 2 * group  # it makes dout and out contiguous
    if name == "cpu":
        kernel = machine.threads * CPU_QUERIES * CPU_KEYS * 2 * (4 + e % 4)
    if name == "math":
        kernel = MATH_SCORE_BYTES * B * H * T * T
    if cfg.qk_norm:  # q and k normed, and copies of them where others lie between the heads of a group
        kernel += (1 + several) * (group + kv)
    fewer = group - kv  # bytes by which a tensor like k is shorter than one like q
    if cp > 1 and ulysses:
        fewer, wide = group - group // heads * dealt, group // heads * dealt
        summed = f * (wide + kv) if wide > kv else 0  # over the ranks that had the same head
        return ULYSSES_GROUPS * group - 4 * fewer + summed + kernel
    if cp > 1:
        blocks, wide = RING_GROUPS["two ranks" if cp == 2 else "more"], 3 if cp == 2 else 5
        return (blocks + RING_FP32_GROUPS * f) * group - (wide + 4 * f) * fewer + kernel
    return ATTENTION_GROUPS * group - 2 * fewer + kernel


def head_bytes(cfg: Config, itemsize: int, cpu: bool = False) -> int:
    """Bytes of a chunk of the head: logits, their softmax in fp32 and gradient, a few tensors (rows, C)."""
    V = cfg.padded_vocab_size / cfg.tp
    row = V * (LOGIT_BYTES + itemsize % 4) + HEAD_ROW_TENSORS * cfg.n_embd * itemsize
    return int(head_rows(V, cpu) * row)


# --- the estimate ---

@dataclass(frozen=True)
class Estimate:
    """Bytes: `lines` are a rank's; `host_bytes` and capacity a node's. `seconds` and `layer` are empty where
    no speeds are known. `reason` and `why`: None where it fits, else oom or oohm, and a sentence."""

    cfg: Config
    machine: Machine
    world: int
    dp: int
    lines: tuple[Line, ...]
    placement: Placement
    plan: alpha.SwapPlan | None
    layer: LayerSeconds | None
    seconds: dict[str, float]
    mfu: float | None
    tgs: float | None
    capacity: int | None
    host_capacity: int
    reason: str | None
    why: str | None

    @property
    def fits(self) -> bool:
        return self.reason is None

    @property
    def only_tight(self) -> bool:
        """Whether it would fit without the margin of device memory."""
        beside_margin = self.device_bytes - self.bytes_of("margin")[0]
        return self.reason == "oom" and beside_margin <= (self.capacity or 0)

    @property
    def local_ranks(self) -> int:
        return min(self.world, self.machine.node.gpus_per_node)

    @property
    def device_bytes(self) -> int:
        return sum(line.device_bytes for line in self.lines)

    @property
    def host_bytes(self) -> int:
        return self.local_ranks * sum(line.host_bytes for line in self.lines)

    @property
    def alpha(self) -> float | None:
        return self.plan.alpha if self.plan and self.placement.n_swapped > 0 else None

    @property
    def binds(self) -> str:
        """What keeps this from being faster."""
        names = {"overlap": "PCIe", "host": "host memory", "device": "device memory"}
        if not self.fits:
            return "device memory" if self.reason == "oom" else "host memory"
        return names[self.plan.binds] if self.plan and self.plan.binds else "compute"

    @property
    def layer_offload_s(self) -> float | None:
        """Of a layer that is swapped; None where none is."""
        if self.plan is None or self.alpha is None:
            return None
        return self.plan.layer_offload_bytes / self.machine.node.pcie_bytes_per_s

    def bytes_of(self, region: str) -> tuple[int, int]:
        """(device, host) bytes of a rank; the head's are the transient region's too, which is one arena."""
        names = ("transient", "head") if region == "transient" else (region,)
        mine = [line for line in self.lines if line.region in names]
        return sum(line.device_bytes for line in mine), sum(line.host_bytes for line in mine)


def itemsize_of(cfg: Config, machine: Machine) -> int:
    """Bytes of an element in the dtype of the run."""
    return {"auto": 4 if machine.cpu else 2, "float32": 4, "bfloat16": 2}[cfg.dtype]


def host_capacity(cfg: Config, machine: Machine, world: int) -> int:
    """Bytes of a node's memory for swapped activations and, with optimizer_device=cpu, the optimizer: those
    that host_memory_gb grants, or those left beside the copy that a checkpoint is written from. Errors:
    ConfigError where the node has fewer."""
    return alpha.granted_bytes(cfg.host_memory_gb, machine.node.host_memory_bytes,
                               snapshot_bytes(cfg, machine, world), "what a node has")


def snapshot_bytes(cfg: Config, machine: Machine, world: int) -> int:
    """Of a node: the copy of weights and moments that a checkpoint is written from."""
    return STATES_BYTES * parameters(cfg) // world * min(world, machine.node.gpus_per_node)


def granting(cfg: Config, machine: Machine, world: int, nbytes: int) -> tuple[Config, Machine]:
    """(cfg, machine) where a node grants so many bytes of host memory, whatever it has."""
    has = int((nbytes + snapshot_bytes(cfg, machine, world)) / alpha.HOST_SHARE) + 2
    node = replace(machine.node, host_memory_bytes=has)
    return replace(cfg, host_memory_gb=nbytes / 1e9), replace(machine, node=node)


def states(cfg: Config, machine: Machine, world: int, itemsize: int) -> tuple[int, int, list[Line]]:
    """(parameters of this rank with padding, ranks that share its optimizer, [Line] of what does not depend
    on the activations)."""
    data = world // cfg.tp
    layout, buckets = local_layout(cfg, cfg.tp, data)
    T, D, micros = cfg.block_size // cfg.cp, cfg.head_width, micro_batches(cfg, world)
    numel, on_host = buckets[-1][1], cfg.optimizer_device == "cpu"
    whole = data == 1 and itemsize == 4 and not on_host  # the weights are the masters
    optimizer = (STATES_BYTES - 4 * whole) * numel // data
    grads, staged = 4 * gradient_places(buckets, gradient_slots(cfg, micros))[1], 0
    if on_host:  # see memo/staging.py
        grads, staged = grads + 4 * shared_numel(layout, cfg.tp), 4 * (numel // data + 1)
    rotations = 8 * D // 2 if cfg.position == "rope" else 0
    lines = [Line("params", "parameters", itemsize * numel), Line("grads", "gradients", grads, staged),
             Line("optimizer", "optimizer", 0 if on_host else optimizer, optimizer if on_host else 0),
             Line("positions", "positions", cfg.batch_size * T * (8 + rotations))]
    if not machine.cpu:
        made = len(set(communicators(cfg.tp, cfg.cp, data // cfg.cp).values()))
        lines += [Line("batch", "tokens and targets", 16 * cfg.batch_size * T * micros),
                  Line("communication", f"{made} NCCL communicator{'s' * (made != 1)}",
                       made * COMMUNICATOR_BYTES),
                  Line("context", "CUDA's context", CONTEXT_BYTES)]
    return numel, data, [line for line in lines if line.device_bytes or line.host_bytes]


def activation_lines(placement: Placement, tensors: dict[str, Tensor]) -> list[Line]:
    """[Line] of the skeletal activations, on device and host. `tensors` as from layer.tensors_of."""
    buffers = placement.buffer_bytes(tensors)
    inputs, n, layers = buffers.pop(INPUT), placement.n_buffers, placement.n_layer
    always = ", ".join(name for name, t in tensors.items() if not t.group and name != INPUT)
    swapped = {INPUT: 0, always: 0, "others": 0}
    for i in range(placement.n_layer):
        for name, (_, nbytes) in placement.swapped(i, tensors).items():
            swapped["others" if tensors[name].group else INPUT if name == INPUT else always] += nbytes
    lines = [Line("rounding_buffers", f"{n} buffer{'s' * (n > 1)} for {layers} layer{'s' * (layers > 1)}",
                  sum(buffers.values())),
             Line("rounding_buffers", f"{placement.n_inputs} buffers for their inputs", inputs)]
    of = f"of {placement.n_swapped} swapped layers"
    return lines + [Line("swap", f"{name} {of}", 0, nbytes) for name, nbytes in swapped.items() if nbytes]


def cpu_spare(cfg: Config, machine: Machine, lines: list[Line], limit: int) -> int:
    """Bytes of a CPU's memory for the buffers of activations: what is left of `limit`, a rank's share of the
    host, beside the model's states (the `lines` of states()) and a bound of the temporary tensors. The same
    in the run."""
    return limit - sum(line.device_bytes for line in lines) - sum(fast_arena(cfg, machine))


def decided(cfg: Config, machine: Machine, itemsize: int, layer: LayerSeconds | None,
            room: Room) -> tuple[Placement, alpha.SwapPlan | None, str | None]:
    """(Placement, SwapPlan, message of OutOfHostMemory or None), from modelled rates."""
    rate = machine.node.pcie_bytes_per_s
    rates = Rates(layer.forward_s, layer.backward_s, layer.groups_s, rate, rate, None) if layer else None
    try:
        return *decide(cfg, itemsize, rates, room), None
    except alpha.OutOfHostMemory as e:  # what it would be on a host that is large enough
        problem = with_buffers(cfg, problem_of(cfg, itemsize, rates, room), room)
        least = problem.swapped_layers * problem.nbytes[INPUT] if cfg.finds_alpha else 2**62
        placement, plan = decide(cfg, itemsize, rates, replace(room, host_bytes=least))
        assert plan is not None  # of a mode that copies
        return placement, replace(plan, limits=problem.limits), str(e)


def estimate(cfg: Config, machine: Machine, world: int, arena: ArenaOf = traced_arena) -> Estimate:
    """The Estimate of a config on `world` ranks of a machine. arena(cfg, machine) -> ArenaBytes. Errors:
    ConfigError for what cannot be, a layout that does not fill the world; not for what does not fit."""
    dp, itemsize = degrees(cfg, world), itemsize_of(cfg, machine)
    if not cfg.vocab_size:
        raise ConfigError("vocab_size=0 must be known without a dataset; try --vocab_size=50257")
    numel, data, lines = states(cfg, machine, world, itemsize)
    layer_bytes = sum(t.nbytes for t in tensors_of(cfg, itemsize).values())
    least = sum(line.device_bytes for line in lines) + layer_bytes
    if least > (machine.memory_bytes or machine.node.host_memory_bytes):
        arena = fast_arena  # it cannot fit: a trace, which may take long, would not change that
    known = machine.speeds is not None and machine.speeds.itemsize == itemsize
    layer = LayerSeconds(cfg, machine, itemsize) if known else None
    transient, head = arena(cfg, machine) if cfg.memory_plan != "off" or not machine.cpu else (0, 0)
    local_ranks, capacity = min(world, machine.node.gpus_per_node), machine.memory_bytes
    host = host_capacity(cfg, machine, world)
    on_host = sum(line.host_bytes for line in lines)
    limit = max(0, host // local_ranks - on_host)
    if machine.cpu:
        spare = cpu_spare(cfg, machine, lines, limit)
    else:
        assert capacity is not None  # it is not a CPU
        free = capacity - sum(line.device_bytes for line in lines)
        spare = spare_bytes(free, capacity, transient, head)
        lines.append(Line("margin", "margin for gaps", margin_bytes(capacity, transient, head)))
    placement, plan, why = decided(cfg, machine, itemsize, layer, Room(limit, spare, machine.cpu))
    lines += activation_lines(placement, tensors_of(cfg, itemsize))
    lines += [Line("transient", "arena of temporary tensors", transient)]
    lines += [Line("head", "more of it for the head", head)] * bool(head)
    seconds = step_s(cfg, machine, world, itemsize, layer, placement, numel, data) if layer else {}
    tokens = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size
    peak = machine.peak_flops_per_s if itemsize == 2 else None
    rate = tgs(tokens, world, seconds["step"]) if seconds else None
    got = Estimate(cfg, machine, world, dp, tuple(lines), placement, plan, layer, seconds,
                   mfu(cfg, rate, peak) if rate else None, rate, capacity, host, None, None)
    reason, why = verdict(got, why)
    return replace(got, reason=reason, why=why)


def verdict(got: Estimate, why: str | None) -> tuple[str | None, str | None]:
    """Whether it fits: an Estimate's (reason, why). `why`: the message of OutOfHostMemory, if there
    was one."""
    device, node, reasons = got.device_bytes, got.machine.node, []

    def lacks(reason: str, needs: float, has: float, what: str) -> None:
        if needs > has:
            reasons.append((reason, f"it needs {needs / GIB:.4g} GiB of {what}, there are {has / GIB:.4g}: "
                                    f"{(needs - has) / GIB:.3g} GiB too much"))
    if got.capacity is not None:
        lacks("oom", device, got.capacity, "device memory")
    else:  # one memory for both
        there = int(node.host_memory_bytes * alpha.HOST_SHARE)
        lacks("oohm", got.host_bytes + got.local_ranks * device, there, "memory on a node")
    if why:
        reasons.append(("oohm", why))
    else:
        lacks("oohm", got.host_bytes, got.host_capacity, "host memory to swap to on a node")
    if not reasons:
        return None, None
    return reasons[0][0], "; and ".join(text for _, text in reasons)
