"""Figure 1 (left) of MEMO, by simulation: the requests of a step of Megatron-LM, whose layers run under
autograd and recompute everything, at their full size without memory, through torch's caching allocator as
research/caching.py plays it; and the same requests planned.

A rank of 7B with tp4 cp2, bf16. As Megatron-LM: sequence parallelism with one buffer for gathered inputs that
stays, a ring of keys and values, gradients of weights added to fp32 buffers, logits in fp32 for the loss.
Parameters, gradients, the fp32 weights and AdamW's moments are there from the start, outside the trace.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.autograd import Function

from memo.planner.allocator import ALIGNMENT
from memo.planner.plan import plan_trace
from memo.plots.figures import BLUE, GREEN, GREY, ORANGE, PALE, plain
from memo.run.rehearsal import FakeArena
from memo.system.hardware import COMMUNICATOR_BYTES, CONTEXT_BYTES, machine
from research.caching import SimulatedOutOfMemory, simulate_caching
from research.papers.page import SIMULATED, Part, thousands
from testing.paper import PAPER

LAYERS, C, HEADS, V, TP, CP, BF16 = 32, 4096, 32, 50304, 4, 2, 2
STEPS = 3
GATHERED: dict[int, torch.Tensor] = {}  # the buffer that stays, by its rows


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, device="meta", dtype=dtype)


def gathered(x):
    rows = len(x) * TP
    if rows not in GATHERED:
        GATHERED[rows] = empty(rows, C)
    return GATHERED[rows]


class Column(Function):
    """Own rows, gathered, times a part of a weight's columns. The gathered rows are not kept."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return gathered(x) @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        again = gathered(x)
        dx = dy @ w
        own = torch.empty_like(x)  # the scattered sum
        del dx, again
        return own, None


class Row(Function):
    """Parts of rows times a part of a weight's rows, summed and scattered."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x @ w.t()
        return empty(len(y) // TP, C)

    @staticmethod
    def backward(ctx, dy):
        _, w = ctx.saved_tensors
        return empty(len(dy) * TP, C) @ w, None


class Ring(Function):
    """Flash attention over the blocks of a ring: what each step gives is there until all are merged."""

    @staticmethod
    def forward(ctx, q, k, v):
        rows, width = q.shape
        steps, kv = [], torch.stack([k, v])
        for _ in range(CP):
            kv = torch.empty_like(kv)  # that comes
            steps.append((torch.empty_like(q), empty(HEADS // TP, rows, dtype=torch.float32)))
        lse = torch.empty_like(steps[0][1])
        merged = empty(rows, width, dtype=torch.float32)
        out = merged.bfloat16()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, _, _ = ctx.saved_tensors
        kv, dkv = torch.stack([k, v]), None
        dq = torch.empty_like(q)
        for _ in range(CP):
            kv = torch.empty_like(kv)
            block = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            empty(HEADS // TP, len(q), dtype=torch.float32)  # delta
            empty(*q.shape, dtype=torch.float32)  # the sum that dq is rounded from
            dkv = torch.stack(block[1:]) if dkv is None else torch.empty_like(dkv)
        return dq, dkv[0].clone(), dkv[1].clone()


class Recomputed(Function):
    """A layer that keeps its input alone."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, dy)
        return x.grad, None


class Layer:
    def __init__(self):
        self.qkv, self.proj, self.fc1, self.fc2 = (empty(n, m).requires_grad_() for n, m in (
            (3 * C // TP, C), (C, C // TP), (4 * C // TP, C), (C, 4 * C // TP)))

    def __call__(self, x):
        q, k, v = (t.contiguous() for t in Column.apply(F.layer_norm(x, (C,)), self.qkv).chunk(3, -1))
        mid = x + Row.apply(Ring.apply(q, k, v), self.proj)
        return mid + Row.apply(F.gelu(Column.apply(F.layer_norm(mid, (C,)), self.fc1)), self.fc2)


class Loss(Function):
    """Cross entropy over the tp ranks' logits: an fp32 copy becomes the softmax, and the gradient."""

    @staticmethod
    def forward(ctx, logits):
        softmax = logits.float()
        softmax.sub_(softmax.amax(-1, keepdim=True)).exp_()
        ctx.save_for_backward(softmax)
        return softmax.sum(-1).log().mean()

    @staticmethod
    def backward(ctx, dy):
        softmax, = ctx.saved_tensors
        return softmax.mul_(1.0).bfloat16()


def step(arena, layers, table, S, number):
    """A training step of one sequence: the requests of its pieces go to the arena."""
    x = arena.run(f"{number} embedding", empty, S // CP // TP, C).requires_grad_()
    for i, layer in enumerate(layers):
        x = arena.run(f"{number} forward {i}", Recomputed.apply, x, layer)
    loss = arena.run(f"{number} head", lambda: Loss.apply(Column.apply(F.layer_norm(x, (C,)), table)))
    arena.run(f"{number} backward", loss.backward)


def trace(S, steps):
    """The Trace of so many steps. The buffer of gathered inputs is made in the first one, and stays."""
    GATHERED.clear()
    arena, layers, table = FakeArena(), [Layer() for _ in range(LAYERS)], empty(V // TP, C).requires_grad_()
    for number in range(steps):
        step(arena, layers, table, S, number)
    return arena.recorded()


def reorganisations(every, capacity):
    try:
        return simulate_caching(every, capacity)[0].reorganisations
    except SimulatedOutOfMemory:
        return None


def row(S, room, states):
    every = [trace(S, STEPS)]
    (free, _), planned = simulate_caching(every), plan_trace(trace(S, 1), alignment=ALIGNMENT["cuda"],
                                                                 one_level=True)
    allocated, reserved = free.peak_allocated_bytes, free.peak_reserved_bytes
    low, high = allocated, reserved
    while high - low > 2**20:  # the least that it runs in
        middle = (low + high) // 2
        low, high = (middle, high) if reorganisations(every, middle) is None else (low, middle)
    there = reorganisations(every, room - states)
    arena_bytes = planned.arena_bytes + S // CP * C * BF16  # with the buffer that stays
    gib = [n / 2**30 for n in (allocated, reserved, reserved - allocated, arena_bytes, high)]
    return [f"{S // 1024}K", *(round(n, 2) for n in gib), reorganisations(every, high),
            "oom" if there is None else there, "oom" if arena_bytes > room - states else 0]


def make():
    node, numel = machine("a800-80gb"), (12 * LAYERS * C * C + V * C) // TP
    states = numel * (2 + 4 + 12 // CP)
    room = node.memory_bytes - CONTEXT_BYTES - 3 * COMMUNICATOR_BYTES
    rows = [row(S, room, states) for S in PAPER["table4"]["seq_tokens"]]
    head = ["", "allocated, GiB", "/reserved", "/gap", "/planned", "least room", "/reorganised in it",
            "reorganised on an A800", "/planned"]
    facts, count = PAPER["figure1"], PAPER["section52"]["reorganisations"]
    gap = next(one[3] for one in rows if one[0] == thousands(facts["gap_seq_tokens"]))
    return dict(tables=[(head, rows)], room_gib=round((room - states) / 2**30, 1), notes=[
        f"{STEPS} steps of one sequence beside {states / 2**30:.1f} GiB of states, from traced requests: on "
        f"a device without end, in the least room, on an A800. At {thousands(facts['gap_seq_tokens'])} the "
        f"paper's gap is above {facts['gap_bytes'] / 1e9:g} GB, here {gap} GiB. With a plan 640K fits and "
        "768K does not, as in Table 4; without, the paper ends at 512K, here later. Its "
        f"{' and '.join(map(str, count.values()))} reorganisations a step at 128K and 256K are not repeated: "
        "each step asks for the same bytes in the same order, without lengths that vary, workspaces of "
        "kernels or a second stream."])


PAPERS_ENDS = {"full_recompute": "out of memory in the paper, no plan",
               "full_recompute+plan": "out of memory in the paper, planned"}


def draw(facts, path):
    fig, ax = plt.subplots(figsize=(8, 4.4), dpi=110, layout="constrained")
    _, rows = facts["tables"][0]
    for at, column, colour, label in ((-0.27, 1, BLUE, "allocated, simulated"),
                                      (0, 2, PALE, "reserved, simulated"), (0.27, 4, GREEN, "planned")):
        ax.bar([i + at for i in range(len(rows))], [one[column] for one in rows], 0.26, color=colour,
               label=label)
    for at, (name, label) in zip((0, 0.27), PAPERS_ENDS.items(), strict=True):
        failed = [i + at for i, mfu in enumerate(PAPER["table4"]["mfu_percent"][name]) if mfu == "oom"]
        ax.plot(failed, [1.5] * len(failed), "x" if at else "+", color=ORANGE, ms=9, mew=2, label=label)
    ax.axhline(facts["room_gib"], color=GREY, lw=0.8, label="what an A800 has")
    ax.set(xticks=range(len(rows)), xticklabels=[one[0] for one in rows], xlabel="context, tokens",
           ylabel="GiB beside the states")
    ax.legend(frameon=False)
    plain(ax)
    fig.savefig(path)
    plt.close(fig)


PART = Part("Figure 1 (left): fragments", SIMULATED, make, draw)
