"""The arena of temporary tensors of a step: of a trace, which takes the model itself
(memo/run/trace_step.py), or a bound."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from math import gcd
from pathlib import Path
from typing import NamedTuple

from memo.config import layer
from memo.config.config import SUBSEQUENCE_KEYS, Config
from memo.config.layout import Layout, subsequence_lengths
from memo.config.settings import slides
from memo.decide.where import placed
from memo.dsa.solvers import libraries
from memo.errors import ConfigError
from memo.kernels import backends
from memo.planner.plan import ALIGNMENT, PLANNING_S, plan_trace
from memo.planner.trace import Trace
from memo.system.files import cache_place, keep_json, kept_json
from memo.system.hardware import Machine

ROOT = Path(__file__).parents[2]

# of shortest(), what the memory requests of a step depend on
REQUEST_KEYS = ("n_head", "n_embd", "block_size", "vocab_size", "n_kv_head", "head_dim", "n_inner", "norm",
                "norms", "mlp", "bias", "qkv_bias", "qk_norm", "qk_norm_over", "tie_embeddings", "gelu",
                "position", "batch_size", "tp", "tensor_parallel", "head_groups", "cp", "context_parallel",
                "dtype", "solver", "deterministic", "ops", "matmul", "n_layer", "pp", "stage", "documents",
                "sliding_window", "layer_types")
# and with several subsequences; activation, for keys may be made again
SEVERAL_KEYS = (*SUBSEQUENCE_KEYS, "activation")

MASK_BYTES = 16  # of a score of a band on a CPU: a distance in 64 bits, what is hidden, the mask in fp32

# The figures of fast_arena: set by hand, so that the sum is at least the arena of a trace and at most twice
# as much, in the cases of tests/test_estimate.py (test_the_fast_bound_is_one_and_is_near).
# Of attention, in units of one tensor (B, T, heads, D) of a group of heads:
ATTENTION_GROUPS = 4.2  # one rank of cp
ULYSSES_GROUPS = 8.6  # with the tensors that all-to-alls send and receive
RING_GROUPS = {"two ranks": 4.6, "more": 6.6}  # blocks of keys and values on their way, in the run's dtype
RING_FP32_GROUPS = 5  # partial results and gradients, in fp32
# The same over a prefix, in the run's dtype and in fp32; two tensors like k besides:
PREFIX_GROUPS = {"one rank": (3.2, 1), "ulysses": (8.2, 1), "two ranks": (7.6, 3), "more": (10.6, 4)}
MATH_SCORE_BYTES = 13  # of attention=math, a score: scores, mask, their gradients
CPU_QUERIES, CPU_KEYS = 256, 512  # of a thread, the largest block: FlashAttentionKernel.cpp of torch
# Of the rest of a layer:
NORM_CHUNKS = 2.3  # a norm's backward, in units of a chunk of own rows in fp32
RMS_NORM_CHUNKS = 4.3  # the same of RMSNorm with ops=torch on a GPU
AFTER_CHUNK = 1.6  # more of it by METP, where a rank's own rows are several chunks
STATISTICS = 1.01  # with statistics and token ids: all of a layer, times so much
# Of the head:
LOGITS = 1.03  # all that goes with a logit (layer.logit_bytes), times so much
HEAD_ROW_TENSORS = 4  # tensors (rows, C) in the run's dtype


class ArenaBytes(NamedTuple):
    """Bytes of the arena of temporary tensors: without the head, and what the head takes beyond these."""

    transient: int
    head: int


ArenaOf = Callable[[Layout, Machine], ArenaBytes]
TraceOf = Callable[[Layout, str, int, int], Trace]


# --- the arena of temporary tensors ---

def planned_arena_bytes(trace: Trace, solver: str, device: str) -> ArenaBytes:
    """Plans a step's Trace as the run does -> its ArenaBytes."""
    def peak(trace: Trace) -> int:
        return plan_trace(trace, solver, ALIGNMENT[device], PLANNING_S).arena_bytes
    layers = [event for label, events in trace.segments.items() if not label.endswith("head")
              for event in events]
    return ArenaBytes(transient := peak(Trace(tuple(layers))), max(0, peak(trace) - transient))


def shortest(cfg: Layout, layers: int = 1) -> Layout:
    """Leaves each stage so many layers of each kind that cfg's computes, which may help any stage, and as few
    stages as give its own the ends that cfg's has."""
    pp = 1 + (not cfg.has_embedding) + (not cfg.has_head)
    computed = range(cfg.n_layer) if cfg.msp else cfg.layers
    types = [*dict.fromkeys(cfg.types[k] for k in computed)] if cfg.layer_types else []
    sliding = not types or any(map(slides, types))
    short = replace(cfg, n_layer=pp * layers * max(1, len(types)), layer_types=",".join(types), pp=pp,
                    stage=int(not cfg.has_embedding), shares=(), sliding_window=cfg.sliding_window * sliding,
                    rope_local_theta=cfg.rope_local_theta * sliding)
    # a stage with a heavy head has fewer layers than others
    more = (replace(short, n_layer=n * short.n_layer) for n in count(1))
    return next(found for found in more if {*found.stage_kinds} == {cfg.kinds[k] for k in computed})


def recompute_sweeps(cfg: Layout) -> bool:
    """Says whether recompute mode may make keys and values again, whose places later units took."""
    return cfg.activation == "recompute" and placed(cfg, 1).keys_may_leave


@cache
def source_digest() -> bytes:
    """Digests all sources, once: those that this process has."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(
        [*ROOT.glob("*.py"), *ROOT.glob("memo/**/*.py")]))).digest()


def traced_by_model(cfg: Layout, device: str, threads: int, multiprocessors: int) -> Trace:
    """Traces a step with the model, imported only now, for torch takes seconds. Errors: ConfigError."""
    try:
        trace: Trace = import_module("memo.run.trace_step").trace_step(cfg, device, threads, multiprocessors)
    except Exception as e:
        raise ConfigError(f"the trace of a step failed ({e}); try --fast") from None
    return trace


def traced_arena(cfg: Layout, machine: Machine, trace: TraceOf = traced_by_model) -> ArenaBytes:
    """Takes the ArenaBytes of a rank from the cache or from trace(cfg, device, threads, multiprocessors) of
    the shortest() config. Errors: those of `trace`, ConfigError where there is no torch."""
    device = "cpu" if machine.cpu else "cuda"
    names = REQUEST_KEYS + SEVERAL_KEYS * (cfg.subsequences > 1)
    keys = {k: v for k, v in asdict(shortest(cfg)).items() if k in names}
    keys |= dict(device=device, attention=backends.kernel_of(cfg, machine))
    asked = [keys, machine.threads, machine.multiprocessors]
    try:
        key = hashlib.sha256(repr((asked, version("torch"), libraries(), source_digest())).encode())
    except PackageNotFoundError:
        raise ConfigError("the trace of a step needs torch, which is not installed; try --fast") from None
    (folder, _), name = cache_place(), f"arena-{key.hexdigest()[:16]}.json"
    if folder is not None:
        with suppress(Exception):  # not there, or not what was written
            stored = kept_json(folder, name)
            arena = ArenaBytes(**stored["arena"])
            if stored["asked"] == asked and all(type(n) is int and 0 <= n < 2**63 for n in arena):
                return arena
    step = trace(Layout(**keys), device, machine.threads, machine.multiprocessors)
    arena = planned_arena_bytes(step, cfg.solver, device)
    keep_json(dict(asked=asked, arena=arena._asdict()), folder, name)
    return arena


def fast_arena(cfg: Layout, machine: Machine, scale: float = 1.0) -> ArenaBytes:
    """Bounds the ArenaBytes, times `scale`, without a trace: the largest of attention over a group of heads,
    a chunk of rows and a chunk of logits. tests/test_estimate.py compares the bound with traces."""
    nbytes = STATISTICS * (metp_layer_bytes if cfg.metp else megatron_layer_bytes)(cfg, machine)
    nbytes += backends.TE_WORKSPACE_BYTES * (cfg.ops == "te" and cfg.matmul == "fp8")
    head = head_bytes(cfg, itemsize_of(cfg, machine), machine.cpu)
    return ArenaBytes(int(scale * nbytes), int(scale * max(0, head - nbytes)))


def megatron_layer_bytes(cfg: Layout, machine: Machine) -> float:
    """Bounds the bytes of a layer by tensor parallelism."""
    e, tp, C, D, S = itemsize_of(cfg, machine), cfg.tp, cfg.n_embd, cfg.head_width, tokens_at_once(cfg)
    rows, f = cfg.batch_size * S // cfg.cp, 4 / e  # f: fp32 in units of e
    own, chunk, gathered = chunk_bytes(cfg, e)
    heads, sharing, sweep = layer.group_heads(cfg, S), cfg.n_head // cfg.held_kv_heads, 0
    group, kv = (rows * n * D * e for n in (heads, -(-heads // sharing)))
    several = heads < cfg.n_head // tp
    # several groups write dq, dk, dv over q, k, v, and sum those of a shared head of keys and values in fp32
    gradients, sums = (0, 2 * f * kv * (heads < sharing)) if several else (group + 2 * kv, 0)
    Q, F = cfg.n_head * D, cfg.inner_width
    dout = rows * Q // tp * e if max(C, F) < Q else 0  # else it has the place of a wider tensor
    if cfg.subsequences > 1:
        gradients, sums = 0 if several else group, 0  # those of keys have memory of their own
        if recompute_sweeps(cfg):
            sweep = rows * C // tp * e + gathered  # the norm of a unit's input
        if cfg.qk_norm or (cfg.context_parallel == "ulysses" and cfg.cp > 1):
            dout += 2 * rows * cfg.held_kv_heads * D // tp * e  # keys and values as the layer makes them
    product, norm_chunks = chunk * F // C / tp if cfg.mlp != "gelu" else 0, NORM_CHUNKS
    if cfg.ops == "torch" and not machine.cpu:  # a CPU goes by smaller chunks
        product *= 2  # with the gradient of `up`
        norm_chunks = RMS_NORM_CHUNKS if cfg.norm == "rmsnorm" else NORM_CHUNKS
    most = max(attention_bytes(cfg, machine, heads, group, kv) + sums, gradients + norm_chunks * f * own,
               gradients + gathered + chunk / tp, gathered + 2 * f * chunk / tp, gathered + product, sweep)
    if cfg.matmul == "fp8":
        most = max(most, fp8_bytes(cfg, e, gradients, machine.cpu) + gathered + product)
    return most + dout


def fp8_bytes(cfg: Layout, itemsize: int, gradients: float, cpu: bool) -> float:
    """Bounds the bytes of FP8 products, of a piece of rows of all tp ranks: the gradient of an activation of
    the MLP beside operands; operands of a weight's gradient, one maybe twice, and this in fp32; or a gradient
    of x in two parts beside `gradients` of q, k and v. An element takes a byte."""
    C, F, e, (_, chunk, _) = cfg.n_embd, cfg.inner_width / cfg.tp, itemsize, chunk_bytes(cfg, itemsize)
    rows, Q = chunk // (C * e), cfg.n_head * cfg.head_width / cfg.tp
    if cfg.tp > 1 and not cpu:  # two pieces under way have so many
        rows //= 2
    matrix, operands = C * max(F, Q), C + F * (2 if cfg.mlp != "gelu" else 1)  # where none is kept
    return max(rows * (F * e + C) + matrix, rows * operands + 4 * matrix,
               gradients + rows * (2 * C * e + max(F, Q)) + matrix)


def metp_layer_bytes(cfg: Layout, machine: Machine) -> float:
    """Bounds the bytes of a layer by METP. Its backward takes most: beside the matrices on their way a
    gradient (n, C), and q, k, v and the gradient of attention's output, of a group of heads, or a piece of
    rows of a norm's output and of the MLP's inside. Embedding and head are as in tensor parallelism."""
    e, tp, C, D, S = itemsize_of(cfg, machine), cfg.tp, cfg.n_embd, cfg.head_width, tokens_at_once(cfg)
    n = cfg.batch_size * S // (cfg.cp * tp)
    f, heads, sharing = 4 / e, layer.group_heads(cfg, S), cfg.n_head // cfg.kv_heads
    together = cfg.n_head // layer.head_groups(cfg)  # query heads of a group, which may take turns
    q, kv, group, group_kv = (n * D * e * k for k in (together, -(-together // sharing), heads,
                                                      -(-heads // sharing)))
    attention = attention_bytes(cfg, machine, heads, group, group_kv)
    if heads < min(together, sharing):
        attention += 2 * f * group_kv  # sums of a shared head of keys and values
    width = cfg.inner_width // tp
    piece = min(n, layer.METP_ROWS + layer.SPLIT_ROWS)
    hidden = width * (2 if cfg.mlp == "gelu" else 3 if cfg.ops != "torch" else 4)
    own, chunk, gathered = chunk_bytes(cfg, e)
    norm = NORM_CHUNKS * own if cfg.ops == "te" else 0.0  # te's: dx in the run's dtype; Triton's takes little
    if cfg.ops == "torch" or machine.cpu:
        several = n > layer.CHUNK_ROWS  # the next chunk begins before all of the one before is gone
        norm = (several * AFTER_CHUNK + RMS_NORM_CHUNKS if cfg.norm == "rmsnorm" else NORM_CHUNKS) * f * own
    # the next group's own keys and values, and those that come: of two hops, where several blocks of a ring
    # lend memory to one
    ahead = 4 * kv * (cfg.token_ranks > 1)
    if layer.makes_queries_early(cfg):  # and the gradient of that group's output, and keys of one group more
        ahead += 2 * q + 4 * kv
    mlp, attended = piece * (C + hidden) * e, 2 * q + 2 * kv + ahead + attention
    fp8_matrices = 0
    if cfg.matmul == "fp8":  # the norm's output once more; operands, and a weight's gradient in fp32
        # the rank's own, these turned, and others turned
        fp8_matrices = (2 + (tp > 1)) * layer.layer_of(cfg).matrix_elements // tp
        attended += n * C
        mlp += 2 * piece * (C + width) + 4 * C * width
    behind = n * C * e * (cfg.norms != "before")  # the output of a norm that is made again
    halves = max(attended, mlp, norm + behind)
    return message_bytes(cfg, e) + fp8_matrices + max(n * C * e + halves, gathered + 2 * f * chunk / tp)


def tokens_at_once(cfg: Layout) -> int:
    """Counts the tokens of a sequence's longest subsequence."""
    return max(subsequence_lengths(cfg))


def chunk_bytes(cfg: Layout, itemsize: int) -> tuple[int, int, int]:
    """Counts the bytes of a chunk (rows, C): of own rows, of all tp ranks', of gathered ones at a time."""
    rows = cfg.batch_size * tokens_at_once(cfg) // cfg.cp
    own = rows // cfg.tp
    one, chunk = (min(n, layer.CHUNK_ROWS) * cfg.n_embd * itemsize for n in (own, rows))
    return one, chunk, 0 if cfg.tp == 1 else chunk if rows <= layer.CHUNK_ROWS else 2 * chunk


def message_bytes(cfg: Layout, itemsize: int) -> int:
    """Counts the most bytes of METP's matrices and fp32 gradients at a time: in the backward those of two
    parts of the MLP, or of three groups of heads (four in a ring of two) and gradients of the last parts."""
    part, group = (sum(elements.values()) for elements in layer.travelling(cfg))
    itemsize = 1 if cfg.matmul == "fp8" else itemsize
    weights, gradients = (1, 2) if cfg.tp == 2 else (2, 3)  # the gradients come, have come, or are made
    mlp = part * (weights * itemsize + gradients * 4) + group * itemsize
    groups = 4 + layer.makes_queries_early(cfg)  # one more: of one group those of q, k, v at once, too
    attention = group * (groups * itemsize + 2 * 4)
    return max(mlp, attention + 2 * 4 * part)  # sent, and received


def attention_bytes(cfg: Layout, machine: Machine, heads: int, group: int, kv: int) -> float:
    """Bounds the bytes of attention over so many heads, its kernel's too. `group`, `kv`: of queries, keys."""
    e, D, ulysses = itemsize_of(cfg, machine), cfg.head_width, cfg.context_parallel == "ulysses"
    cp, own_heads = cfg.token_ranks, cfg.n_head // (1 if cfg.metp else cfg.tp)
    S = tokens_at_once(cfg)
    f, B, T, H, several = 4 / e, cfg.batch_size, S // cp, heads, heads < own_heads
    kv_heads = dealt = kv // (group // heads)
    if ulysses:  # what the kernel of attention sees
        dealt *= cp // gcd(kv_heads, cp)
        T, H, kv_heads = S, heads // cp, dealt // cp
    name = backends.kernel_of(cfg, machine)
    names = {name, backends.by_bands(name)} if cfg.window else {name}
    kernel = max(sum(backends.workspaces(one, (B, T, H, D), (B, T, kv_heads, D), cfg.deterministic,
                                         machine.multiprocessors, cfg.documents))
                 + 2 * group * (several and one == "flash") for one in names)  # it makes dout, out contiguous
    width = D * (cfg.n_head // layer.head_groups(cfg) if cfg.metp else own_heads)  # of q, with these heads
    if name == "cudnn" and several and not ulysses and B * T * width > backends.FAR:  # attention.near
        kernel += 3 * group + 2 * kv
    if name == "cpu":
        kernel = machine.threads * CPU_QUERIES * CPU_KEYS * 2 * (4 + e % 4)
        if cfg.window:  # masks of a block of rows; sums in fp32
            rows = min(T, backends.BAND_ROWS)
            kernel += rows * min(T, rows + cfg.window) * MASK_BYTES + int((1 + f) * group + 2 * f * kv)
    if name == "math":
        kernel = MATH_SCORE_BYTES * B * H * T * T
    if cfg.qk_norm_over == "all":  # of all heads at once
        kernel += (group + kv) * own_heads // heads
    elif cfg.qk_norm:  # q and k normed, and copies of them where others lie between the heads of a group
        kernel += (1 + several) * (group + kv)
    if cfg.documents:  # a part's gradients beside those of all, alone or by Ulysses; on a CPU dout again
        kernel += (group + 2 * kv) * (cfg.subsequences == 1 and (cp == 1 or ulysses)) + group * machine.cpu
    if cfg.subsequences > 1:
        kind = "one rank" if cp == 1 else "ulysses" if ulysses else "two ranks" if cp == 2 else "more"
        own, fp32 = PREFIX_GROUPS[kind]
        return (own + fp32 * f) * group + 2 * group // heads * dealt + kernel
    fewer = group - kv  # bytes by which a tensor like k is shorter than one like q
    if cp > 1 and ulysses:
        fewer, wide = group - group // heads * dealt, group // heads * dealt
        summed = f * (wide + kv) if wide > kv else 0  # over the ranks that had the same head
        return ULYSSES_GROUPS * group - 4 * fewer + summed + kernel
    if cp > 1:
        blocks, wide = RING_GROUPS["two ranks" if cp == 2 else "more"], 3 if cp == 2 else 5
        return (blocks + RING_FP32_GROUPS * f) * group - (wide + 4 * f) * fewer + kernel
    return ATTENTION_GROUPS * group - 2 * fewer + kernel


def head_bytes(cfg: Layout, itemsize: int, cpu: bool = False) -> int:
    """Counts the bytes of a chunk of the head: logits, softmax, gradient, tensors (rows, C). 0: no head."""
    if not cfg.has_head:
        return 0
    V = cfg.padded_vocab_size / cfg.tp
    nbytes = layer.logit_bytes(itemsize, cfg.ops != "torch" and not cpu)
    copied = itemsize % 4 * cpu  # a CPU's softmax makes a copy in fp32 first, of 4 bytes for 2
    row = V * (LOGITS * nbytes + copied) + HEAD_ROW_TENSORS * cfg.n_embd * itemsize
    return int(layer.head_rows(V, nbytes, cpu) * row)


def itemsize_of(cfg: Config, machine: Machine) -> int:
    """Counts the bytes of an element in the dtype of the run."""
    return {"auto": 4 if machine.cpu else 2, "float32": 4, "bfloat16": 2}[cfg.dtype]
