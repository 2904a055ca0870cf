"""Seconds of a layer by METP (memo/metp_block.py): a rank has rows of its own alone, and the matrices travel.
What is made from these is made again in the backward. Messages that are under way together do not slow each
other here.

    part      what a rank has of the MLP's matrices; a step of the MLP uses one of them, tp in all
    group     of heads, whose q, k and v exist at once
    hop       of a part to the next rank, in the backward of its fp32 gradients too
"""

from math import sqrt

from memo.estimate.roofline import (
    GRADIENT_BYTES,
    ROUNDING,
    TURNING_GRADIENT,
    TURNING_INPUT,
    LayerSeconds,
    norm_of,
)
from memo.layer import ATTENTION, head_groups, travelling


class MetpSeconds(LayerSeconds):
    """See LayerSeconds. Products are of parts and of groups: their sizes are these."""

    def set_seconds(self) -> None:
        cfg, ops = self.cfg, self.layer.operations
        self.groups, self.own = head_groups(cfg), self.rows // self.tp
        self.part, self.group = travelling(cfg)
        self.carried = 1 if cfg.matmul == "fp8" else self.itemsize  # bytes of a matrix's element on its way
        self.hop_bytes = sum(self.part.values()) * self.carried
        D, columns = self.layer.head_dim, [op for op in ops if op.kind == "column"]
        # widths of a group of heads' q, k, v and of a part's hidden tensors. Groups that share a head of keys
        # make keys and values each for itself
        self.q_width = self.Q // self.groups
        self.widths = [max(D, op.gives // self.groups) for op in columns if op.reads == "ln1_out"]
        self.turned = sum(max(D * self.groups, op.gives) for op in columns if op.rotary)
        self.hidden = [op.gives // self.tp for op in columns if op.reads == "ln2_out"]
        self.output, self.part_width = ops[-1], ops[-1].takes // self.tp
        self.norm_s = self.pass_s(f"{norm_of(cfg)} forward", self.C)
        self.groups_s = {"mid": self.projection_again_s(1.0)}
        self.attention_s, _ = self.attention_half_s(0.0)
        self.forward_s, messages = self.forward()
        self.backward_s, more = self.backward_and_messages()
        self.messages_s = messages + more + self.attention_messages_s

    # --- one operation ---

    def parts_s(self, n: int, gives: float, takes: float) -> float:
        """Seconds of own rows times n matrices of (gives, takes), whose results are added up. Where these are
        narrow, memory is slower than the products. FP8 rounds what is multiplied for each."""
        flops_s = self.speeds.seconds(self.matmul, 2 * self.own * gives * takes, sqrt(gives * takes))
        rounding_s = self.copy_s(ROUNDING * takes) if self.cfg.matmul == "fp8" else 0.0
        return n * (max(flops_s, self.copy_s(takes + 2 * gives)) + rounding_s)

    def matrices_s(self, turning: float = 0.0) -> float:
        """Seconds in which FP8 products round the rank's own matrices, and turn those of all ranks."""
        if self.cfg.matmul != "fp8":
            return 0.0
        return self.matrix_s((ROUNDING / self.tp + turning) * self.layer.matrix_elements)

    def backward_s_of(self, n: int, gives: int, takes: int) -> float:
        """Seconds of the gradients of n such matrices, and of what they multiply."""
        products = self.parts_s(n, gives, takes) + self.parts_s(n, takes, gives)
        if self.cfg.matmul != "fp8":
            return products
        turning = self.copy_s(TURNING_GRADIENT * gives + TURNING_INPUT * takes)
        return products + n * (turning + self.matrix_s(GRADIENT_BYTES / self.itemsize * gives * takes))

    def activation_s(self, way: str) -> float:
        if self.output.gated:
            return self.pass_s(f"swiglu {way}", self.output.takes)
        return self.bytes_s(f"gelu {way}", (2 if way == "forward" else 3) * self.output.takes)

    def sums_s(self, elements: float) -> float:
        """Seconds to set fp32 gradients of travelling matrices to zero and to add them to others."""
        return self.speeds.seconds("copy", 16 * elements, 16 * elements) if elements else 0.0

    # --- messages between the ranks of tp ---

    def travel_s(self, op: str, nbytes: float) -> float:
        """Of one message; op: as in Machine.message_s."""
        return self.machine.message_s(op, nbytes, self.tp)

    def broadcast_s(self, names: str) -> float:
        """Seconds of a group's matrices and biases whose names begin so."""
        return self.group_s("broadcast", names, self.carried)

    def reduce_s(self, names: str) -> float:
        """Seconds of their fp32 gradients' way home."""
        return self.group_s("reduce", names, 4)

    def group_s(self, op: str, names: str, itemsize: int) -> float:
        """Each is a message, or one from each rank that has some of its columns: keys may be as wide as those
        of several ranks."""
        seconds = 0.0
        for name, n in self.group.items():
            ranks = max(1, self.tp // self.layer.kv_heads) if name[0] in "kv" else 1
            if name[0] in names:
                seconds += ranks * self.travel_s(op, n * itemsize / ranks)
        return seconds

    def exposed_beside(self, message_s: float, compute_s: float) -> float:
        """Exposed seconds of messages beside operations: see LayerSeconds.exposed_s."""
        hidden = self.speeds.rate("hidden") if "hidden" in self.speeds.table else 0.0
        return message_s - hidden * min(message_s, compute_s)

    def steps_s(self, coming: float, going: float, steps: int, compute_s: float,
                before_s: float = 0.0) -> float:
        """Exposed seconds of messages beside steps of compute_s each. In a step the matrices of the next one
        come, in so many seconds, and gradients of the step before go. The messages before the first step and
        behind the last are not counted. The first of those that come leaves before_s before its step."""
        if steps == 1:
            return 0.0
        exposed = self.exposed_beside(coming, compute_s + before_s) + self.exposed_beside(going, compute_s)
        return exposed + (steps - 2) * self.exposed_beside(coming + going, compute_s)

    def exposed_hops_s(self, nbytes: float, block_s: float) -> float:
        """Hops go two ahead, and a group's first ones beside the group before: all of them hide behind all
        blocks. What hides behind a group's products, too, is not counted."""
        return self.late_s((self.ring - 1) * nbytes, self.ring * block_s)

    @property
    def first_bytes(self) -> float:
        """The first group's: all others' leave beside the group before."""
        return self.kv_bytes / (1 if self.machine.cpu else head_groups(self.cfg))

    # --- forward ---

    def attention_half_s(self, mid: float) -> tuple[float, float]:
        """(seconds, exposed seconds of broadcasts among them) to make attn_out and a part of mid's rows from
        x."""
        work = self.attention_out_s() + mid * self.projection_s() + self.queries_keys_values_s()
        coming, piece = self.broadcast_s("qkv"), self.projection_piece_s()
        step = work / self.groups
        exposed = self.first_group_s()
        # beside each group but the last the next one's; a piece of the projection's matrix beside the first
        # group of each rank's heads but the first's, and beside the last group
        exposed += (self.groups - self.tp) * self.exposed_beside(coming, step)
        exposed += (self.tp - 1) * self.exposed_beside(coming + piece, step)
        exposed += self.exposed_beside(piece, step)
        return self.norm_s + work + exposed, exposed

    def first_group_s(self) -> float:
        """Exposed seconds of the first group's matrices: of keys, which come beside a norm, of values and of
        queries, each beside the product of the one before."""
        beside = [self.norm_s, *(self.parts_s(1, width, self.C) for width in self.widths[1:])]
        return sum(self.exposed_beside(self.broadcast_s(name), s)
                   for name, s in zip("kvq", beside, strict=True))

    def queries_keys_values_s(self) -> float:
        rotary = self.pass_s("rotary", self.turned) if self.turned else 0.0
        return sum(self.parts_s(self.groups, width, self.C) for width in self.widths) + rotary

    def projection_s(self) -> float:
        return self.parts_s(self.tp**2, self.C / self.tp, self.Q / self.tp)

    def projection_piece_s(self) -> float:
        """Seconds of the gather of a piece of its matrix, of as many as ranks."""
        return self.travel_s("gather", self.C * self.Q * self.carried * (self.tp - 1) / self.tp**2)

    def projection_again_s(self, mid: float) -> float:
        """Seconds of a part of mid's rows from attn_out: all pieces are sent for at once."""
        products, piece = mid * self.projection_s(), self.projection_piece_s()
        beside = self.exposed_beside(piece, products / self.tp)
        return products + piece + (self.tp - 1) * beside

    def mlp_s(self) -> float:
        """Seconds of the MLP's products and passes. Each part begins with the norm."""
        products = sum(self.parts_s(self.tp, width, self.C) for width in self.hidden)
        products += self.parts_s(self.tp, self.C, self.part_width)
        return self.tp * self.norm_s + products + self.activation_s("forward")

    def forward(self) -> tuple[float, float]:
        """(seconds, exposed seconds of matrices among them)."""
        attention, exposed = self.attention_half_s(1.0)
        mlp, hop = self.mlp_s(), self.travel_s("shift", self.hop_bytes)
        step = mlp / self.tp  # the own part is the first
        exposed_hops = self.exposed_beside(hop, attention + step)
        if self.tp > 2:  # the second leaves when the own part begins
            exposed_hops += self.exposed_beside(hop, 2 * step)
            exposed_hops += (self.tp - 3) * self.exposed_beside(hop, step)
        return self.matrices_s() + attention + mlp + exposed_hops, exposed + exposed_hops

    # --- backward ---

    def backward_and_messages(self) -> tuple[float, float]:
        """(seconds, exposed seconds of matrices and gradients among them)."""
        norm_backward = self.pass_s(f"{norm_of(self.cfg)} backward", self.C)
        mlp, attention = self.mlp_backward_s(), self.attention_half_backward_s()
        # the first two hops beside the own part, the last gradients beside attention
        hop, home = (self.travel_s("shift", n) for n in (self.hop_bytes, 4 * sum(self.part.values())))
        step, group = mlp / self.tp, self.broadcast_s("qkvp")
        exposed = self.exposed_beside(hop, step)
        exposed += self.steps_s(hop, home, max(1, self.tp - 1), step, max(0.0, step - hop))
        exposed += self.exposed_beside(home, attention) + self.exposed_beside(group, mlp)
        exposed += self.steps_s(group, self.reduce_s("qkvp"), self.groups, attention / self.groups)
        # behind the last group: the projection's left beside attention, the others' before their products
        last = norm_backward + sum(self.parts_s(1, self.C, width) for width in self.widths)
        exposed += self.exposed_beside(self.reduce_s("qkv"), last)
        sums = self.sums_s(sum(self.part.values()) * (self.tp - 1) + sum(self.group.values()) * self.groups)
        products = mlp + attention + self.matrices_s(TURNING_INPUT)
        return products + self.norm_s + 2 * norm_backward + sums + exposed, exposed

    def mlp_backward_s(self) -> float:
        """Seconds of the MLP's gradients: norm, hidden tensors and activation are made again."""
        again = self.mlp_s() - self.parts_s(self.tp, self.C, self.part_width)
        products = self.backward_s_of(self.tp, self.C, self.part_width)
        products += sum(self.backward_s_of(self.tp, width, self.C) for width in self.hidden)
        return again + products + self.activation_s("backward")

    def attention_half_backward_s(self) -> float:
        """Seconds of the gradients of projection, attention, q, k and v: these three are made again."""
        products = self.backward_s_of(self.groups, self.C, self.q_width)
        products += sum(self.backward_s_of(self.groups, width, self.C) for width in self.widths)
        passes = self.pass_s("rotary", self.turned) if self.turned else 0.0
        if self.layer.head_norms:  # once more, then of their gradients
            passes += sum(map(self.head_norms_s, ("forward", "backward")))
        if self.at_once < self.cfg.n_head // self.groups:
            passes += self.copy_s(2 * (self.Q + 2 * self.KV))  # a group's dq, dk, dv go where q, k, v were
        return self.queries_keys_values_s() + products + passes + self.attention_backward_s()

    def recompute_s(self, missing: dict[str, slice]) -> float:
        part = {name: (r.stop - r.start) / self.own for name, r in missing.items()}
        if part.get(ATTENTION):
            return self.attention_half_s(part.get("mid", 0.0))[0]
        return self.projection_again_s(part["mid"]) if part.get("mid") else 0.0
