"""How long a step takes: the sum of its operations, each at the speed that it gets (memo/hardware.py), and what of its
messages and copies does not hide behind them.

A rank's own rows are N = B*T/tp; u, the bytes of one (N, C) tensor, is the unit of elementwise passes, whose amounts are
bytes read and written. Sizes that speeds depend on: of a matrix product the geometric mean of the weight's dims, of
attention the keys of a rank's block, of elementwise passes their bytes.
Source: MEMO 4.1 for what hides behind what; DESIGN section 2.
"""

from math import sqrt

from memo.activations import HEAD_ROWS, group_heads


def rotary_units(itemsize):
    """Reads and writes of one tensor, in units of it: in place in fp32; otherwise a copy in fp32, the turn, a copy back."""
    return 2 if itemsize == 4 else 10


class Layer:
    """Seconds of one layer's operations on one rank. `groups_s`: to rebuild each group of alpha.GROUPS, all rows."""

    def __init__(self, cfg, machine, itemsize):
        self.cfg, self.machine, self.speeds = cfg, machine, machine.speeds
        B, T, C = cfg.batch_size, cfg.block_size // cfg.cp, cfg.n_embd
        self.rows, self.C, self.tp, self.cp = B * T, C, cfg.tp, cfg.cp
        self.u = B * T * C * itemsize // cfg.tp
        self.kv_bytes, self.itemsize = 2 * self.u, itemsize
        scores = B * cfg.block_size**2 / 2 * C  # that the mask leaves, times C
        self.attention_flops = 4 * scores / (cfg.cp * cfg.tp)  # two products forward; five backward
        attention, norm, gather = self.attention_forward_s(), self.pass_s("norm forward", 2), self.tp_s("gather")
        rope = self.pass_s("rotary", rotary_units(itemsize)) if cfg.position == "rope" else 0.0
        qkv = self.matmul_s(C, C)
        self.groups_s = {"ln1_out": norm, "q": gather / 3 + qkv + rope, "k": gather / 3 + qkv + rope, "v": gather / 3 + qkv,
                         "mid": self.into_residual_s(C), "ln2_out": norm, "fc1_out": gather + self.matmul_s(4 * C, C),
                         "gelu_out": self.pass_s("gelu forward", 8)}
        self.attention_s = attention + self.pass_s("copy", 2)  # into attn_out
        self.forward_s = sum(self.groups_s.values()) + self.attention_s + self.into_residual_s(4 * C)
        self.backward_s = self.backward()
        self.attention_kernels_s = sum(self.kernels_s())
        exposed = attention + self.attention_backward_s() - self.attention_kernels_s
        self.messages_s = 6 * self.tp_s("gather") + 4 * self.tp_s("scatter") + exposed

    def kernels_s(self):
        """Of attention (forward, backward) on this rank's share of the scores."""
        size = self.cfg.block_size // (1 if self.cfg.context_parallel == "ulysses" else self.cp)
        return [self.speeds.seconds(f"attention {way}", part * self.attention_flops, size)
                for way, part in (("forward", 1.0), ("backward", 2.5))]

    def matmul_s(self, gives, takes):
        """All rows times a weight that `takes` so many columns and `gives` so many, one of them split among the tp ranks."""
        weights = gives * takes / self.tp
        return self.speeds.seconds("matmul", 2 * self.rows * weights, sqrt(weights))

    def pass_s(self, op, units):
        return self.speeds.seconds(op, units * self.u, units * self.u)

    def tp_s(self, op):
        """A gather or a scattered sum of all rows: exposed."""
        return self.machine.message_s(op, self.u * (self.tp - 1), self.tp) if self.tp > 1 else 0.0

    def into_residual_s(self, takes):
        """residual + x w^T: each of the tp ranks has a part of the sum."""
        return self.matmul_s(self.C, takes) + self.tp_s("scatter") + (self.pass_s("copy", 3) if self.tp > 1 else 0.0)

    def backward(self):
        # of each linear two products, dx and dw; gathers of dy, ln2_out, dy, ln1_out; two scattered sums
        matmuls = 2 * (4 * self.matmul_s(self.C, self.C) + 2 * self.matmul_s(4 * self.C, self.C))
        norms = 2 * (self.pass_s("norm backward", 3) + self.pass_s("copy", 3))
        rope = 2 * self.pass_s("rotary", rotary_units(self.itemsize)) if self.cfg.position == "rope" else 0.0
        if group_heads(self.cfg) < self.cfg.n_head // self.tp:
            norms += self.pass_s("copy", 6)  # a group's dq, dk, dv take the place of its q, k, v
        messages = 4 * self.tp_s("gather") + 2 * self.tp_s("scatter")
        return matmuls + norms + rope + self.pass_s("gelu backward", 12) + messages + self.attention_backward_s()

    # --- attention, over the ranks of cp ---

    def hop_s(self, nbytes):
        return self.machine.message_s("shift", nbytes, self.cp * self.tp, self.tp)

    def late_s(self, nbytes, block_s):
        """What of a hop does not hide behind the block that is computed meanwhile; on a CPU, which carries the message
        itself, nothing hides."""
        return max(0.0, self.hop_s(nbytes) - (0.0 if self.machine.cpu else block_s))

    def exchange_s(self, tensors):
        """All-to-alls of Ulysses: exposed."""
        message = self.machine.message_s("exchange", self.u * (self.cp - 1) / self.cp, self.cp * self.tp, self.tp)
        return tensors * (message + self.pass_s("copy", 4))

    def attention_forward_s(self):
        kernels = self.kernels_s()[0]
        if self.cp == 1:
            return kernels
        if self.cfg.context_parallel == "ulysses":
            return kernels + self.exchange_s(4)
        merge = self.pass_s("copy", 4 + 5 * (self.cp - 1) * 4 // self.itemsize)  # in fp32
        return kernels + merge + (self.cp - 1) * self.late_s(self.kv_bytes, kernels / self.cp)

    def attention_backward_s(self):
        kernels = self.kernels_s()[1]
        if self.cp == 1:
            return kernels
        if self.cfg.context_parallel == "ulysses":
            return kernels + self.exchange_s(8)
        gradients = self.kv_bytes * 4 // self.itemsize  # dk and dv, in fp32
        late = self.late_s(self.kv_bytes + gradients, kernels / self.cp)
        merge = self.pass_s("copy", 6 + 3 * self.cp * (1 + 8 // self.itemsize))
        return kernels + merge + (self.cp - 1) * late + self.hop_s(gradients)

    def recompute_s(self, missing):
        """Of these rows, {tensor: slice} as in activations.Placement.missing."""
        if not missing:
            return 0.0
        own = self.rows / self.tp
        part = {name: (r.stop - r.start) / own for name, r in missing.items()}
        seconds = sum(part[group] * s for group, s in self.groups_s.items())
        return seconds + (self.attention_s if part["attn_out"] else 0.0)


def swap_s(placement, tensors, forward_s, backward_s, recompute_s, bytes_per_s):
    """(forward, backward, stall) seconds of all layers: the schedule of memo/swap.py, event by event. recompute_s(i): of
    layer i."""
    L, n = placement.n_layer, placement.n_buffers
    copy_s = [sum(nbytes for _, nbytes in placement.swapped(i, tensors).values()) / bytes_per_s for i in range(L)]
    now, stall, offloaded = 0.0, 0.0, []
    for i in range(L):
        start = max(now, offloaded[i - n] if i >= n else 0.0)
        stall, now = stall + start - now, start + forward_s
        offloaded.append(max(now, offloaded[-1] if offloaded else 0.0) + copy_s[i] if copy_s[i] else 0.0)
    forward, prefetched, last = now, {}, 0.0
    for i in reversed(range(L)):
        start = max(now, prefetched.get(i, 0.0))
        stall, now = stall + start - now, start + recompute_s(i) + backward_s
        if i >= n and copy_s[i - n]:
            last = prefetched[i - n] = max(now, last, offloaded[i - n]) + copy_s[i - n]
    return forward, now - forward, stall


def head_s(cfg, machine, itemsize):
    """Final norm, logits, loss and their gradients, chunk by chunk; the embedding and its gradient."""
    speeds, rows, C = machine.speeds, cfg.batch_size * cfg.block_size // cfg.cp, cfg.n_embd
    V, u = cfg.padded_vocab_size / cfg.tp, rows * C * itemsize / cfg.tp
    dw = speeds.seconds("copy", 8 * V * C * rows / HEAD_ROWS, 8 * V * C)  # read and written in fp32 by each chunk
    matmuls = 3 * speeds.seconds("matmul", 2 * rows * C * V, sqrt(C * V))
    softmax = speeds.seconds("softmax", rows * V * (2 * itemsize + 8), rows * V)
    messages = sum(2 * machine.message_s(op, u * (cfg.tp - 1), cfg.tp) for op in ("gather", "scatter"))
    norms = speeds.seconds("norm forward", 2 * u, u) + speeds.seconds("norm backward", 3 * u, u)
    return matmuls + dw + softmax + messages + norms + speeds.seconds("copy", 8 * u * cfg.tp, u)


def stages(cfg, machine):
    """Whether gradients and weights go over PCIe, to the optimizer and back: see memo/staging.py."""
    return cfg.optimizer_device == "cpu" and not machine.cpu


def optimizer_s(cfg, machine, numel, itemsize, data, local_ranks, forward_s):
    """The gradients' norm, AdamW on this rank's shard with their scaling, the cast of its weights. On the
    host AdamW runs at the speed of the host's memory, which its ranks share; weights go up meanwhile and in
    the next forward."""
    speeds, shard = machine.speeds, numel / data
    adamw = (28 + 4 * (cfg.grad_clip > 0)) * shard  # clipping stores the scaled gradients
    cast = (4 + itemsize) * shard
    if stages(cfg, machine):
        host_s = (adamw + cast) * local_ranks / machine.node.host_bytes_per_s
        return host_s + max(0.0, itemsize * shard / machine.node.pcie_bytes_per_s - host_s - forward_s)
    rest = speeds.seconds("copy", 4 * shard + 4 * numel, 4 * numel)  # norm; all gradients to zero
    return rest + speeds.seconds("adamw", adamw, adamw) + speeds.seconds("copy", cast, cast)


def data_s(cfg, machine, numel, itemsize, data, world, forward_s, backward_s):
    """Exposed seconds of the gradients' sum and way to the host, behind the last backward, and of the
    parameters' way back to all ranks, behind the next forward. Of each the bucket at the end is always
    exposed: taken as one in thirty. On a CPU nothing hides."""
    gradients = params = 0.0
    if data > 1:
        gradients = machine.message_s("scatter", 4 * numel * (data - 1) / data, world, cfg.tp)
        params = machine.message_s("gather", itemsize * numel * (data - 1) / data, world, cfg.tp)
    if machine.cpu:
        return gradients + params
    if stages(cfg, machine):  # a layer's place is free when its gradients are summed and gone
        gradients += 4 * numel / data / machine.node.pcie_bytes_per_s
    return max(gradients / 30, gradients - backward_s) + max(params / 30, params - forward_s)
