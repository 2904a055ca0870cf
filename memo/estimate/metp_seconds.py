"""Seconds of a layer by METP (memo/metp_block.py): a rank has rows of its own alone, and the matrices travel.
What is made from these is made again in the backward. Messages that are under way together do not slow each
other here.

    part      what a rank has of the MLP's matrices; a step of the MLP uses one of them, tp in all
    group     of heads, whose q, k and v exist at once
    hop       of a part to the next rank, in the backward of its fp32 gradients too
"""

from collections.abc import Sequence
from functools import cached_property
from math import fsum, prod, sqrt

from memo.estimate.roofline import (
    GRADIENT_BYTES,
    ROUNDING,
    TURNING_GRADIENT,
    TURNING_INPUT,
    LayerSeconds,
    norm_of,
)
from memo.layer import ATTENTION, head_groups, travelling

EVERY = "qkvpfgud"  # what the names of the layer's matrices begin with


class MetpSeconds(LayerSeconds):
    """See LayerSeconds. Products are of parts and of groups: their sizes are these. `again`: what of q, k, v
    the backward makes again."""

    again = "qkv"

    def set_seconds(self) -> None:
        cfg, ops = self.cfg, self.layer.operations
        self.own = self.rows // self.tp
        self.part, self.group = travelling(cfg)
        D, columns = self.layer.head_dim, [op for op in ops if op.kind == "column"]
        made = dict(zip("qkv", (op for op in columns if op.reads == "ln1_out"), strict=True))
        # widths of a group of heads' q, k, v, how many groups make each, or have a part of the projection,
        # and widths of a part's hidden tensors
        self.widths = {name: max(D, op.gives // self.groups) for name, op in made.items()}
        self.times = dict.fromkeys("qp", self.groups) | dict.fromkeys("kv", self.keyed)
        self.rotated = [name for name, op in made.items() if op.rotary]
        self.hidden = [op.gives // self.tp for op in columns if op.reads == "ln2_out"]
        self.output, self.part_width = ops[-1], ops[-1].takes // self.tp
        self.norm_s = self.pass_s(f"{norm_of(cfg)} forward", self.C)
        self.groups_s = {"mid": self.projection_again_s(1.0)}
        self.attention_s = self.attention_again_s(0.0)
        self.forward_s, messages = self.forward()
        self.backward_s, more = self.backward_and_messages()
        self.messages_s = messages + more + self.attention_messages_s

    @cached_property
    def groups(self) -> int:
        return head_groups(self.cfg)

    @property
    def keyed(self) -> int:
        """Groups that make keys and values: those that share a head of keys, each for itself."""
        return self.groups

    @property
    def turns(self) -> int:
        return self.groups * -(-self.layer.heads // self.groups // self.at_once)

    # --- one operation ---

    def parts_s(self, n: int, gives: float, takes: float) -> float:
        """Seconds of own rows times n matrices of (gives, takes), whose results are added up. Where these are
        narrow, memory is slower than the products. FP8 rounds what is multiplied for each."""
        flops_s = self.speeds.seconds(self.matmul, 2 * self.own * gives * takes, sqrt(gives * takes))
        rounding_s = self.copy_s(ROUNDING * takes) if self.cfg.matmul == "fp8" else 0.0
        return n * (max(flops_s, self.copy_s(takes + 2 * gives)) + rounding_s)

    def matrix_sizes(self, names: str) -> list[int]:
        """Elements of the layer's matrices whose names begin so."""
        return [prod(p.shape) for name, p in self.layer.parameters.items()
                if len(p.shape) == 2 and name[0] in names]

    def matrices_s(self, names: str = EVERY, turning: float = 0.0) -> float:
        """Seconds in which FP8 products round the rank's own matrices, and turn those of all ranks."""
        if self.cfg.matmul != "fp8":
            return 0.0
        return self.matrix_s((ROUNDING / self.tp + turning) * sum(self.matrix_sizes(names)))

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

    def carried(self, name: str) -> int:
        """Bytes of an element of a parameter on its way."""
        return 1 if self.cfg.matmul == "fp8" and name.endswith("_w") else self.itemsize

    @property
    def hop_bytes(self) -> int:
        """Of a part of the MLP."""
        return sum(n * self.carried(name) for name, n in self.part.items())

    def scales_s(self, names: str = EVERY) -> float:
        """Seconds in which the ranks agree on the scales of FP8 matrices, which nothing hides."""
        sent = 4 * len(self.matrix_sizes(names)) * (self.tp - 1)
        return self.travel_s("gather", sent) if self.cfg.matmul == "fp8" else 0.0

    def one_s(self, op: str, name: str) -> float:
        """Seconds of a group's parameter, or with "reduce" of its fp32 gradient: one message, or one from
        each rank that has some of its columns. Keys may be as wide as those of several ranks."""
        ranks = max(1, self.tp // self.layer.kv_heads) if name[0] in "kv" else 1
        itemsize = 4 if op == "reduce" else self.carried(name)
        return ranks * self.travel_s(op, self.group[name] * itemsize / ranks)

    def group_s(self, op: str, names: str) -> float:
        """Seconds of those whose names begin so, of a group that makes keys and values."""
        return fsum(self.one_s(op, name) for name in self.group if name[0] in names)

    def every_s(self, op: str, names: str) -> float:
        """The same of all groups."""
        return fsum(self.times[name[0]] * self.one_s(op, name) for name in self.group if name[0] in names)

    def others_s(self, op: str, names: str) -> float:
        """The same of each group but one, a mean: some may make no keys."""
        return (self.every_s(op, names) - self.group_s(op, names)) / max(1, self.groups - 1)

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

    def late_hops_s(self, block_s: float) -> float:
        """Hops go two ahead, and a group's first ones beside the group before: all of them hide behind all
        blocks. What hides behind a group's products, too, is not counted."""
        return self.late_s((self.ring - 1) * self.hop_s(self.kv_bytes), self.ring * block_s)

    def late_hops_back_s(self, block_s: float) -> float:
        """The same, but for first hops that have nothing before them: of the first group, and of each turn
        of a group behind its first."""
        keys, gradients = self.hop_s(self.kv_bytes), self.hop_s(self.kv_bytes * 4 // self.itemsize)
        first = keys * (self.turns - self.groups + 1) / self.turns
        return first + self.late_s((self.ring - 1) * (keys + gradients) - first, self.ring * block_s)

    # --- forward ---

    def attention_half_s(self, mid: float, names: str) -> tuple[float, float]:
        """(seconds, exposed seconds of matrices among them) to make attn_out and a part of mid's rows from
        x; `names`: what of q, k, v is not there."""
        work = self.attention_out_s() + mid * self.projection_s() + self.made_s(names)
        coming, piece = self.others_s("broadcast", names), self.projection_piece_s()
        step = work / self.groups
        exposed = self.first_group_s(names)
        # beside each group but the last the next one's; a piece of the projection's matrix beside the first
        # group of each rank's heads but the first's, and beside the last group
        exposed += (self.groups - self.tp) * self.exposed_beside(coming, step)
        exposed += (self.tp - 1) * self.exposed_beside(coming + piece, step)
        exposed += self.exposed_beside(piece, step)
        return self.norm_s + work + exposed, exposed

    def attention_again_s(self, mid: float) -> float:
        """Seconds to make attn_out again, and a part of mid's rows."""
        names = self.again + "p"
        return self.matrices_s(names) + self.scales_s(names) + self.attention_half_s(mid, self.again)[0]

    def first_group_s(self, names: str) -> float:
        """Exposed seconds of the first group's matrices: of keys, of values and of queries, each beside the
        product of the one before, the first beside a norm."""
        order = [name for name in "kvq" if name in names]
        beside = [self.norm_s, *(self.parts_s(1, self.widths[name], self.C) for name in order[:-1])]
        return sum(self.exposed_beside(self.group_s("broadcast", name), s)
                   for name, s in zip(order, beside, strict=True))

    def made_s(self, names: str) -> float:
        """Seconds to make those of q, k, v of all groups."""
        turned = self.turned_s([name for name in self.rotated if name in names])
        return sum(self.parts_s(self.times[name], self.widths[name], self.C) for name in names) + turned

    def turned_s(self, names: Sequence[str]) -> float:
        """Seconds to rotate them."""
        return self.pass_s("rotary", sum(self.times[n] * self.widths[n] for n in names)) if names else 0.0

    def projection_s(self) -> float:
        return self.parts_s(self.tp**2, self.C / self.tp, self.Q / self.tp)

    def projection_piece_s(self) -> float:
        """Seconds of the gather of a piece of its matrix, of as many as ranks."""
        sent = self.C * self.Q * self.carried("proj_w") * (self.tp - 1) / self.tp**2
        return self.travel_s("gather", sent)

    def projection_again_s(self, mid: float) -> float:
        """Seconds of a part of mid's rows from attn_out: all pieces are sent for at once."""
        products, piece = mid * self.projection_s(), self.projection_piece_s()
        beside = self.exposed_beside(piece, products / self.tp)
        return self.matrices_s("p") + self.scales_s("p") + products + piece + (self.tp - 1) * beside

    def mlp_s(self) -> float:
        """Seconds of the MLP's products and passes. Each part begins with the norm."""
        products = sum(self.parts_s(self.tp, width, self.C) for width in self.hidden)
        products += self.parts_s(self.tp, self.C, self.part_width)
        return self.tp * self.norm_s + products + self.activation_s("forward")

    def forward(self) -> tuple[float, float]:
        """(seconds, exposed seconds of matrices among them)."""
        attention, exposed = self.attention_half_s(1.0, "qkv")
        mlp, hop = self.mlp_s(), self.travel_s("shift", self.hop_bytes)
        step = mlp / self.tp  # the own part is the first
        exposed_hops = self.exposed_beside(hop, attention + step)
        if self.tp > 2:  # the second leaves when the own part begins
            exposed_hops += self.exposed_beside(hop, 2 * step)
            exposed_hops += (self.tp - 3) * self.exposed_beside(hop, step)
        messages = self.scales_s() + exposed_hops
        return self.matrices_s() + attention + mlp + messages, exposed + messages

    # --- backward ---

    def backward_and_messages(self) -> tuple[float, float]:
        """(seconds, exposed seconds of matrices and gradients among them)."""
        norm_backward = self.pass_s(f"{norm_of(self.cfg)} backward", self.C)
        mlp, attention = self.mlp_backward_s(), self.attention_half_backward_s()
        # the first two hops beside the own part, the last gradients beside attention
        hop, home = (self.travel_s("shift", n) for n in (self.hop_bytes, 4 * sum(self.part.values())))
        step, one = mlp / self.tp, attention / self.groups
        exposed = self.scales_s() + self.exposed_beside(hop, step)
        exposed += self.steps_s(hop, home, max(1, self.tp - 1), step, max(0.0, step - hop))
        exposed += self.exposed_beside(home, attention)
        group, going = self.every_s("broadcast", "qkvp") / self.groups, self.others_s("reduce", "qkvp")
        exposed += self.exposed_beside(group, mlp) + self.steps_s(group, going, self.groups, one)
        # of the last group: the projection's leave beside attention, as do those of the group before; the
        # others before their products
        last = norm_backward + sum(self.parts_s(1, self.C, width) for width in self.widths.values())
        exposed += self.exposed_beside(going + self.group_s("reduce", "p"), one)
        exposed -= self.exposed_beside(going, one)
        exposed += self.exposed_beside(self.group_s("reduce", "qkv"), last)
        sums = self.sums_s(sum(self.part.values()) * (self.tp - 1)
                           + sum(self.times[name[0]] * n for name, n in self.group.items()))
        products = mlp + attention + self.matrices_s(turning=TURNING_INPUT)
        return products + self.norm_s + 2 * norm_backward + sums + exposed, exposed

    def mlp_backward_s(self) -> float:
        """Seconds of the MLP's gradients: norm, hidden tensors and activation are made again."""
        again = self.mlp_s() - self.parts_s(self.tp, self.C, self.part_width)
        products = self.backward_s_of(self.tp, self.C, self.part_width)
        products += sum(self.backward_s_of(self.tp, width, self.C) for width in self.hidden)
        return again + products + self.activation_s("backward")

    def attention_half_backward_s(self) -> float:
        """Seconds of the gradients of projection, attention, q, k and v."""
        products = self.backward_s_of(self.groups, self.C, self.widths["q"])
        products += sum(self.backward_s_of(self.times[name], width, self.C)
                        for name, width in self.widths.items())
        passes = self.turned_s(self.rotated)
        if self.layer.head_norms:  # once more, then of their gradients
            passes += sum(map(self.head_norms_s, ("forward", "backward")))
        if self.at_once < self.cfg.n_head // self.groups:
            passes += self.copy_s(2 * (self.Q + 2 * self.KV))  # a group's dq, dk, dv go where q, k, v were
        return self.made_s(self.again) + products + passes + self.attention_backward_s()

    def recompute_s(self, missing: dict[str, slice]) -> float:
        part = {name: (r.stop - r.start) / self.own for name, r in missing.items()}
        if part.get(ATTENTION):
            return self.attention_again_s(part.get("mid", 0.0))
        return self.projection_again_s(part["mid"]) if part.get("mid") else 0.0
