"""How long a step takes: the sum of its operations, each at the speed that it gets (hardware.py), and what of its
messages and copies does not hide behind them.

A rank's own rows are N = B*T/tp; u, the bytes of one (N, C) tensor, is the unit of elementwise passes, whose amounts are
bytes read and written. Sizes that speeds depend on: of a matrix product the geometric mean of the weight's dims, of
attention the keys of a rank's block, of elementwise passes their bytes.
Source: MEMO 4.1 for what hides behind what; DESIGN section 2.
"""

from math import sqrt

from memo.backends import kernel_of
from memo.layer import CHUNK_ROWS, group_heads, head_rows
from memo.swap.alpha import ROWS

# units that a pass reads and writes. What was measured on a machine (calibrate.py) counts as one pass, whatever it took
PASSES = {"norm forward": 2, "norm backward": 4, "rotary": 2, "merge": 5}
PASSES_OF_TORCH = {"norm forward": 4, "norm backward": 8, "rotary": 10, "merge": 9}  # with ops=torch on a GPU: memo/ops.py


def passes(cfg, speeds):
    return PASSES_OF_TORCH if cfg.ops == "torch" and "rotary" not in speeds.table else PASSES


class Layer:
    """Seconds of one layer's operations on one rank. `groups_s`: to rebuild each group of alpha.GROUPS, all rows; `kernel`:
    of attention, see memo/backends.py."""

    def __init__(self, cfg, machine, itemsize):
        self.cfg, self.machine, self.speeds, self.kernel = cfg, machine, machine.speeds, kernel_of(cfg, machine)
        B, T, C = cfg.batch_size, cfg.block_size // cfg.cp, cfg.n_embd
        self.rows, self.C, self.tp, self.cp = B * T, C, cfg.tp, cfg.cp
        self.u = B * T * C * itemsize // cfg.tp
        self.kv_bytes, self.itemsize = 2 * self.u, itemsize
        scores = B * cfg.block_size**2 / 2 * C  # that the mask leaves, times C
        self.attention_flops = 4 * scores / (cfg.cp * cfg.tp)  # two products forward; five backward
        self.passes, self.pieces = passes(cfg, self.speeds), self.pieces_of_rows()
        attention, norm = self.attention_forward_s(), self.pass_s("norm forward")
        rope = self.pass_s("rotary") if cfg.position == "rope" else 0.0
        qkv, fc1 = self.matmul_s(C, C), self.matmul_s(4 * C, C)
        gather = self.exposed_s(3 * qkv, "gather")
        self.groups_s = {"ln1_out": norm, "q": gather / 3 + qkv + rope, "k": gather / 3 + qkv + rope, "v": gather / 3 + qkv,
                         "mid": self.into_residual_s(C), "ln2_out": norm, "fc1_out": fc1 + self.exposed_s(fc1, "gather"),
                         "gelu_out": self.pass_s("gelu forward", 8)}
        self.attention_s = attention + self.pass_s("copy", 2)  # into attn_out
        self.forward_s = sum(self.groups_s.values()) + self.attention_s + self.into_residual_s(4 * C)
        self.backward_s = self.backward()
        self.attention_kernels_s = sum(self.kernels_s())
        in_attention = attention + self.attention_backward_s() - self.attention_kernels_s
        forward = gather + sum(self.exposed_s(s, op) for s, op in (
            (qkv, "scatter"), (fc1, "gather"), (self.matmul_s(C, 4 * C), "scatter")))
        self.messages_s = forward + self.exposed_in_backward_s() + in_attention

    def kernels_s(self):
        """Of attention (forward, backward) on this rank's share of the scores."""
        size = self.cfg.block_size // (1 if self.cfg.context_parallel == "ulysses" else self.cp)
        name = self.kernel if f"{self.kernel} forward" in self.speeds.table else "attention"
        return [self.speeds.seconds(f"{name} {way}", part * self.attention_flops, size)
                for way, part in (("forward", 1.0), ("backward", 2.5))]

    def matmul_s(self, gives, takes):
        """All rows times a weight that `takes` so many columns and `gives` so many, one of them split among the tp ranks."""
        weights = gives * takes / self.tp
        return self.speeds.seconds("matmul", 2 * self.rows * weights, sqrt(weights))

    def pass_s(self, op, units=None):
        nbytes = (units or self.passes[op]) * self.u
        return self.speeds.seconds(op, nbytes, nbytes)

    def pieces_of_rows(self):
        """Of a rank's own rows, as tp.in_turns cuts them on a GPU."""
        return max(1, min(self.rows // self.tp // ROWS, max(2, -(-2 * self.rows // CHUNK_ROWS))))

    def exposed_s(self, compute_s, *messages):
        """Exposed seconds of gathers and scattered sums of all rows beside so much computing, by pieces of rows, two under
        way: at best the first message of the first piece, and what takes longer than the computing. How far it gets there is
        the machine's "hidden"; on a CPU, and where it is not known, nothing hides."""
        if self.tp == 1:
            return 0.0
        seconds = [self.machine.message_s(op, self.u * (self.tp - 1), self.tp) for op in messages]
        hidden = self.speeds.rate("hidden") if "hidden" in self.speeds.table and self.pieces > 1 else 0.0
        best = seconds[0] / self.pieces + max(0.0, sum(seconds) - compute_s)
        return sum(seconds) - hidden * max(0.0, sum(seconds) - best)

    def into_residual_s(self, takes):
        """residual + x w^T: each of the tp ranks has a part of the sum."""
        matmul = self.matmul_s(self.C, takes)
        return matmul + self.exposed_s(matmul, "scatter") + (self.pass_s("copy", 3) if self.tp > 1 else 0.0)

    def exposed_in_backward_s(self):
        """Of gathers of dy, ln2_out, dy and a scattered sum; of a gather of ln1_out and a scattered sum."""
        one, four = 2 * self.matmul_s(self.C, self.C), 2 * self.matmul_s(4 * self.C, self.C)
        return self.exposed_s(2 * four + one, "gather", "gather", "scatter", "gather") + self.exposed_s(3 * one, "gather",
                                                                                                     "scatter")

    def backward(self):
        matmuls = 2 * (4 * self.matmul_s(self.C, self.C) + 2 * self.matmul_s(4 * self.C, self.C))  # dx and dw of each linear
        passes = 2 * self.pass_s("norm backward") + self.pass_s("gelu backward", 12)
        if self.cfg.position == "rope":
            passes += 2 * self.pass_s("rotary")
        if group_heads(self.cfg) < self.cfg.n_head // self.tp:
            passes += self.pass_s("copy", 6)  # a group's dq, dk, dv take the place of its q, k, v
        return matmuls + passes + self.exposed_in_backward_s() + self.attention_backward_s()

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
        # to fp32 and back; merged are all queries with an earlier rank's block, half of them with a later one's
        merge = self.pass_s("copy", 6 + 0.75 * (self.cp - 1) * self.passes["merge"])
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
    """(forward, backward, stall) seconds of all layers: the schedule of swap/buffers.py, event by event. recompute_s(i): of
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
    chunk = head_rows(V, machine.cpu)
    dw = speeds.seconds("copy", 8 * V * C * rows / chunk, 8 * V * C)  # read and written in fp32 by each chunk
    matmuls = 3 * speeds.seconds("matmul", 2 * rows * C * V, sqrt(C * V))
    softmax = speeds.seconds("softmax", rows * V * (2 * itemsize + 8), rows * V)
    messages = sum(2 * machine.message_s(op, u * (cfg.tp - 1), cfg.tp) for op in ("gather", "scatter"))
    norms = sum(speeds.seconds(op, passes(cfg, speeds)[op] * u, u) for op in ("norm forward", "norm backward"))
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
