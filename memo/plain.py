"""MEMO's training step on one device, as the paper has it (MEMO 4.1). Read this file first.

Why. A layer keeps "skeletal" activations from forward to backward, 16 numbers for each token and channel: x,
attn_out, ln1_out, q, k, v, mid, ln2_out, 4 before the GELU and 4 behind. At a million tokens no GPU holds
those of all layers. Recomputing all of them runs attention twice. Copying all of them to the host can take
longer than the layers compute, and more memory than the host has.

The idea. The device has two buffers (MEMO: "rounding buffers"; of x three), and layer k computes in buffer
k % 2. The host gets a copy of each layer's input x and of attention's output attn_out with its statistic lse.
Each row (a token) of all other tensors follows from the same row of x and attn_out: so the host gets a
fraction alpha of the other tensors' rows (memo/decide/alpha.py finds it), and the backward recomputes the
rest, without attention. Three streams work at the same time. Of five layers (Forward, Recompute, Backward):

    buffer     0     1     0     1     0           0     1        0        1        0
    compute    F0 ─► F1 ─► F2 ─► F3 ─► F4 ─► head  B4 ─► R3 B3 ─► R2 B2 ─► R1 B1 ─► R0 B0
    offload          0 ──► 1 ──► 2 ──► to the host
    prefetch                               from the host 2 ─────► 1 ─────► 0

Four kinds of waits keep the streams apart. A copy to the host waits until its layer has computed; F2 waits
until layer 0 is copied, since it writes over buffer 0. The copy back of layer 2 waits until B4 has used up
buffer 0; R2 waits until layer 2 is back. The last two layers are not copied. But the two buffers share the
memory of dropped rows: F4 has written over those of layer 3, so R3 makes them again.

The trainer itself does the same from a list of steps, with any number of buffers, subsequences and ranks:
memo/schedule/program.py makes the list, execute.py runs it; tests/test_plain.py holds both to the same bits.
"""

from dataclasses import dataclass, field

import torch

from memo.config.config import Config
from memo.config.layer import INPUT, SPLIT_ROWS, n_rows, tensors_of
from memo.layer.activations import Activations
from memo.layer.tiles import one_sequence
from memo.memory.slab import HostSlab
from memo.schedule.streams import Event, Streams
from memo.states.transformer import Transformer


@dataclass(eq=False)
class Skeleton(Activations):
    """Holds what a layer makes in its forward for its backward, by name, for Block to fill and read: x,
    ln1_out, ln1_mean, q, k, v, attn_out, lse, mid and so on, as memo/config/layer.py lists them. Each is a
    view of the layer's place in the memory of that tensor; together these are the layer's buffer."""

    dropped: dict[str, slice] = field(default_factory=dict)  # the rows to recompute, of each tensor
    copied: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (device, host) bytes


@dataclass
class Memory:
    """Holds the activations of all layers, and behind them an entry whose x is the last layer's output."""

    layers: list[Skeleton]
    slab: HostSlab | None  # the host's memory, exactly as large as what is copied; None where nothing is


def kept_rows(alpha: float, n: int) -> int:
    """Counts the rows out of n that survive of a tensor of which a fraction alpha survives."""
    # a product of few rows may differ in its last bits from one of many: rows go in multiples of
    # `granularity`, and where some are recomputed, at least so many are
    granularity = max(1, min(SPLIT_ROWS, n // 16))
    fraction = alpha * (1 + 1e-12)  # 0.29 of 100 is 29, not 28
    return n if alpha >= 1 else int(min(fraction * n, n - granularity) / granularity) * granularity


def take_memory(cfg: Config, alpha: float, dtype: torch.dtype, device: torch.device) -> Memory:
    """Takes the buffers and the slab, once, before the first step."""
    # n rows, one for each token. t.group is set where a tensor can be recomputed: alpha is for these, the
    # "others". x, attn_out and lse have none: all their rows survive
    tensors, n, L = tensors_of(cfg, dtype.itemsize), n_rows(cfg), cfg.n_layer
    rows = {name: kept_rows(alpha, n) if t.group else n for name, t in tensors.items()}
    kept_bytes = {name: t.nbytes // n * rows[name] for name, t in tensors.items()}
    # Dropped rows need no memory of their own, so the two buffers of a tensor share it:
    #     buffer 0   kept rows | shared rows
    #     buffer 1               shared rows | kept rows
    # x has three: layer k writes the next layer's x while that of layer k - 1 is still copied.
    buffers = {}
    for name, t in tensors.items():
        size = 3 * t.nbytes if name == INPUT else t.nbytes + kept_bytes[name]
        whole = torch.empty(size, dtype=torch.uint8, device=device)
        buffers[name] = (whole.split(t.nbytes) if name == INPUT
                         else (whole[:t.nbytes], whole[kept_bytes[name]:]))
    host_bytes, used = max(0, L - 2) * sum(kept_bytes.values()), 0
    slab = HostSlab(host_bytes, device) if host_bytes else None  # page-locked for a GPU
    layers, met = [], [one_sequence(cfg.block_size, kind.window) for kind in cfg.kinds]  # which tokens meet
    for k in range(L + 1):
        mine = {name: buffers[name][k % len(buffers[name])] for name in tensors}
        s = Skeleton({name: mine[name].view(getattr(torch, t.dtype) if t.dtype else dtype).view(t.shape)
                      for name, t in tensors.items()}, meetings=[met[k % L]])
        layers.append(s)
        for name, t in tensors.items():
            if k < L - 1 and rows[name] < n:  # the last layer's rows are all there when its backward comes
                s.dropped[name] = slice(0, n - rows[name]) if k % 2 else slice(rows[name], n)
            if slab is not None and k < L - 2 and kept_bytes[name]:
                first = t.nbytes - kept_bytes[name] if k % 2 else 0
                s.copied += slab.pairs(used, mine[name][first:first + kept_bytes[name]])
                used += kept_bytes[name]
    return Memory(layers, slab)


def copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies [(destination, source)]; on CUDA the host does not wait for it."""
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)


def training_step(gpt: Transformer, memory: Memory, streams: Streams, tokens: torch.Tensor,
                  targets: torch.Tensor) -> torch.Tensor:
    """Computes the mean loss of tokens (B, T); adds its gradients to the parameters'. `gpt`: of model.py."""
    compute, offload, prefetch = streams.compute, streams.offload, streams.prefetch
    blocks, edges, layers, L = gpt.blocks, gpt.edges, memory.layers, len(gpt.blocks)
    computed, offloaded, done, prefetched = ([Event(f"{what} {k}") for k in range(L)] for what in (
        "forward", "offload", "backward", "prefetch"))
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens))
    kinds = gpt.cfg.kinds  # of layers; their rotary positions, None where none are rotated in
    turns = {kind.rope: gpt.rotations_of(positions, kind.rope) for kind in kinds}
    ids, loss = tokens.reshape(-1), torch.zeros((), device=tokens.device)

    compute.launch("embedding", edges.embed, ids, positions, layers[0].x)
    for k in range(L):
        if k >= 2:  # protects layer k - 2: its copy still reads the buffer that layer k writes over
            compute.wait(offloaded[k - 2])
        layers[k].turn = turns[kinds[k].rope]
        compute.launch(f"forward {k}", blocks[k].forward, layers[k], layers[k + 1].x)
        if k < L - 2:
            compute.record(computed[k])
            offload.wait(computed[k])  # protects the slab from a layer that has not computed yet
            offload.launch(f"offload {k}", copy, [(host, buffer) for buffer, host in layers[k].copied])
            offload.record(offloaded[k])
    # the head adds the mean of len(ids) losses, times 1.0, to `loss`, and writes the gradient of the last
    # layer's output over that
    compute.launch("head", edges.head, layers[L].x, targets.reshape(-1), len(ids), 1.0, loss)
    for k in reversed(range(L)):
        if k < L - 2:  # protects layer k from rows that are not back yet
            compute.wait(prefetched[k])
        if layers[k].dropped:
            compute.launch(f"recompute {k}", blocks[k].recompute, layers[k], layers[k].dropped)
        # layers[k + 1].x holds the gradient of the layer's output; that of its input goes over layers[k].x
        compute.launch(f"backward {k}", blocks[k].backward, layers[k + 1].x, layers[k])
        if k >= 2:
            compute.record(done[k])
            prefetch.wait(done[k])  # protects layer k: its backward reads what the copy back writes over
            prefetch.launch(f"prefetch {k - 2}", copy, layers[k - 2].copied)
            prefetch.record(prefetched[k - 2])
    compute.launch("embedding backward", edges.embed_backward, ids, positions, layers[0].x)
    return loss
