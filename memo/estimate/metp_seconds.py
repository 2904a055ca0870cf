"""The costs of a unit by METP (memo/layer/metp_block.py): a rank has rows of its own alone, and the matrices
travel. What is made from these is made again in the backward. Messages that are under way together do not
slow each other here.

    part      what a rank has of the MLP's matrices; a step of the MLP uses one of them, tp in all
    group     of heads, whose q, k and v exist at once
    hop       of a part to the next rank, in the backward of its fp32 gradients too"""

from functools import cached_property
from math import fsum, prod, sqrt

from memo.config.layer import head_groups, travelling
from memo.config.layout import Layout
from memo.config.settings import Kind
from memo.estimate.roofline import MESSAGES, Cost, Unit, total
from memo.system.hardware import Machine

EVERY = "qkvpfgud"  # what the names of the layer's matrices begin with


class Metp(Unit):
    """Costs a unit by METP. Products have the sizes of parts and groups. `again`: what of q, k, v a backward
    makes again: several subsequences keep k and v, which one makes of the groups that read the same ones."""

    def __init__(self, cfg: Layout, machine: Machine, itemsize: int, S: int | None = None,
                 kind: Kind | None = None) -> None:
        super().__init__(cfg, machine, itemsize, S, kind)
        self.again = "q" if self.several else "qkv"
        self.groups_of_heads = head_groups(cfg)
        keyed = min(self.groups_of_heads, self.layer.kv_heads) if self.several else self.groups_of_heads
        self.part, self.group = travelling(cfg)
        D, ops = self.layer.head_dim, self.layer.operations
        columns = [op for op in ops if op.kind == "column"]
        made = dict(zip("qkv", (op for op in columns if op.reads == self.layer.inputs[0]), strict=True))
        # widths of a group of heads' q, k, v, how many groups make each, or have a part of the projection,
        # and widths of a part's hidden tensors
        self.widths = {name: max(D, op.gives // self.groups_of_heads) for name, op in made.items()}
        self.times = dict.fromkeys("qp", self.groups_of_heads) | dict.fromkeys("kv", keyed)
        self.rotated = [name for name, op in made.items() if op.rotary]
        self.hidden_widths = [op.gives // self.tp for op in columns if op.reads == self.layer.inputs[1]]
        self.output = next(op for op in reversed(ops) if op.kind == "row")
        self.part_width = self.output.takes // self.tp
        front, behind = cfg.norms != "behind", cfg.norms != "before"
        self.normed = [self.norm("forward")] * front
        self.added = [self.norm("forward"), self.copy(3 * self.C)] * behind  # of a half
        norm = self.norm("backward")  # norms behind are made again
        self.norms_backward = [norm] * 2 * front + [norm, self.norm("forward")] * 2 * behind

    # --- one operation ---

    def parts(self, n: int, gives: float, takes: float) -> Cost:
        """Costs own rows times n matrices of (gives, takes), whose results are added up. Where these are
        narrow, memory is slower than the products. FP8 rounds what is multiplied for each."""
        flops_s = self.speeds.seconds(self.matmul, 2 * self.own * gives * takes, sqrt(gives * takes))
        rounding_s = self.copy(self.ROUNDING * takes).seconds if self.cfg.matmul == "fp8" else 0.0
        return Cost(n * (max(flops_s, self.copy(takes + 2 * gives).seconds) + rounding_s))

    def parts_backward(self, n: int, gives: int, takes: int) -> list[Cost]:
        """Costs the gradients of n such matrices, and of what they multiply."""
        costs = [self.parts(n, gives, takes), self.parts(n, takes, gives)]
        if self.cfg.matmul == "fp8":
            costs += [self.copy(self.TURNING_GRADIENT * gives + self.TURNING_INPUT * takes),
                      self.matrix_copy(self.GRADIENT_BYTES / self.itemsize * gives * takes)] * n
        return costs

    def activation(self, way: str) -> Cost:
        if self.output.gated:
            return self.kernel_pass(f"swiglu {way}", self.output.takes)
        return self.elementwise(f"gelu {way}", (2 if way == "forward" else 3) * self.output.takes)

    def made(self, names: str) -> list[Cost]:
        """Costs making those of q, k, v of all groups."""
        return [*(self.parts(self.times[name], self.widths[name], self.C) for name in names),
                *self.turned(names)]

    def turned(self, names: str) -> list[Cost]:
        width = sum(self.times[name] * self.widths[name] for name in self.rotated if name in names)
        return [self.kernel_pass("rotary", width)] if width else []

    def projection(self) -> Cost:
        return self.parts(self.tp**2, self.C / self.tp, self.Q / self.tp)

    @cached_property
    def mlp(self) -> list[Cost]:
        """Costs the MLP but for its last products. Each part begins with the norm."""
        return [*self.normed * self.tp, self.activation("forward"),
                *(self.parts(self.tp, width, self.C) for width in self.hidden_widths)]

    # --- messages between the ranks of tp, and what FP8 does to what they carry ---

    def carried(self, name: str) -> int:
        """Counts the bytes of an element of a parameter on its way."""
        return 1 if self.cfg.matmul == "fp8" and name.endswith("_w") else self.itemsize

    def hop_of_part_s(self) -> float:
        nbytes = sum(n * self.carried(name) for name, n in self.part.items())
        return self.machine.message_s("shift", nbytes, self.tp)

    def matrices(self, names: str = EVERY, turning: float = 0.0) -> list[Cost]:
        """Costs rounding to FP8 the rank's own matrices whose names begin so, and turning all ranks'."""
        amount = (self.ROUNDING / self.tp + turning) * sum(self.matrix_sizes(names))
        return [self.matrix_copy(amount)] * (self.cfg.matmul == "fp8")

    def matrix_sizes(self, names: str) -> list[int]:
        """Counts the elements of each of the layer's matrices whose names begin so."""
        return [prod(p.shape) for name, p in self.layer.parameters.items()
                if len(p.shape) == 2 and name[0] in names]

    def scales(self, names: str = EVERY) -> list[Cost]:
        """Costs that the ranks agree on the scales of FP8 matrices, which nothing hides."""
        sent = 4 * len(self.matrix_sizes(names)) * (self.tp - 1)
        return [Cost(self.machine.message_s("gather", sent, self.tp), MESSAGES)] * (self.cfg.matmul == "fp8")

    def group_s(self, op: str, names: str, every: bool = False) -> float:
        """Counts the seconds of a group's parameters whose names begin so, or of `every` group's; with
        "reduce" of fp32 gradients. Of keys as wide as those of several ranks each of these sends a part."""
        def one_s(name: str) -> float:
            ranks = max(1, self.tp // self.layer.kv_heads) if name[0] in "kv" else 1
            itemsize = 4 if op == "reduce" else self.carried(name)
            return ranks * self.machine.message_s(op, self.group[name] * itemsize / ranks, self.tp)
        return fsum((self.times[name[0]] if every else 1) * one_s(name) for name in self.group
                    if name[0] in names)

    def others_s(self, op: str, names: str) -> float:
        """Counts the mean seconds of those of each group but one: some may make no keys."""
        others_s = self.group_s(op, names, every=True) - self.group_s(op, names)
        return others_s / max(1, self.groups_of_heads - 1)

    def piece_s(self) -> float:
        """Counts the seconds to gather a piece of the projection's matrix, of as many as ranks."""
        sent = self.C * self.Q * self.carried("proj_w") * (self.tp - 1) / self.tp**2
        return self.machine.message_s("gather", sent, self.tp)

    def steps(self, coming: float, going: float, steps: int, compute_s: float,
              before_s: float = 0.0) -> list[Cost]:
        """Costs messages beside steps of compute_s, but for those before the first and behind the last: the
        matrices of the next step come, before_s earlier for the second; gradients of the one before go."""
        return [self.late(coming, compute_s + before_s), self.late(going, compute_s),
                self.late(coming + going, compute_s, times=steps - 2)] * (steps > 1)

    def first_group(self, names: str) -> list[Cost]:
        """Costs the first group's matrices of k, v, q, each beside the product before, or a norm."""
        order = [name for name in "kvq" if name in names]
        beside = [self.norm("forward"), *(self.parts(1, self.widths[name], self.C) for name in order[:-1])]
        return [self.late(self.group_s("broadcast", name), cost.seconds)
                for name, cost in zip(order, beside, strict=True)]

    # --- forward ---

    def attention_half(self, mid: float, names: str, attend: list[Cost]) -> list[Cost]:
        """Costs attn_out, from q, k, v on `attend`, and a part of mid's rows from x; `names`: what of q, k, v
        is not there."""
        groups, piece = self.groups_of_heads, self.piece_s()
        work = [*attend, *self.made(names), Cost(mid * self.projection().seconds)]
        coming, step_s = self.others_s("broadcast", names), total(work) / groups
        # beside each group but the last the next one's; a piece of the projection's matrix beside the first
        # group of each rank's heads but the first's, and beside the last group
        return [*self.normed, *work, *self.first_group(names),
                self.late(coming, step_s, times=groups - self.tp),
                self.late(coming + piece, step_s, times=self.tp - 1), self.late(piece, step_s)]

    def rebuilt(self, attention: float, mid: float, attend: list[Cost]) -> list[Cost]:
        """Costs rebuilding parts of the rows of attn_out and mid; for mid alone all pieces come at once."""
        if attention:
            names = self.again + "p"
            return [*self.matrices(names), *self.scales(names), *self.attention_half(mid, self.again, attend)]
        products, piece = mid * self.projection().seconds, self.piece_s()
        return [*self.matrices("p"), *self.scales("p"), Cost(products), Cost(piece, MESSAGES),
                self.late(piece, products / self.tp, times=self.tp - 1)] * (mid > 0)

    def forward(self, attend: list[Cost]) -> list[Cost]:
        attention = self.attention_half(1.0, "qkv", attend)
        mlp = self.mlp_forward(total(attention))
        return [*self.matrices(), *self.scales(), *attention, *self.added, *mlp, *self.added]

    def mlp_forward(self, before_s: float) -> list[Cost]:
        """Costs the MLP, whose first matrices come beside so many seconds before it, too."""
        mlp, hop = [*self.mlp, self.parts(self.tp, self.C, self.part_width)], self.hop_of_part_s()
        step = total(mlp) / self.tp  # the own part is the first
        hops = [self.late(hop, before_s + step)]
        if self.tp > 2:  # the second leaves when the own part begins
            hops += [self.late(hop, 2 * step), self.late(hop, step, times=self.tp - 3)]
        return [*mlp, *hops]

    @cached_property
    def groups_s(self) -> dict[str, float]:
        """Counts the seconds to make each group of tensors again."""
        again = {self.layer.projected: self.rebuilt(0, 1, []), "mlp_out": [
            *self.matrices("fgud"), *self.scales("fgud"), *self.mlp_forward(0.0)]}
        return {group: total(again.get(group, self.added)) for group in self.layer.groups}

    def keys_again(self, names: str) -> list[Cost]:
        """Costs k in a backward, whose matrices are there; or k and v in a sweep, where they travel."""
        made = self.made(names)
        if names == "k":
            return made
        later = self.late(self.group_s("broadcast", names), total(made) / self.times["k"],
                          times=self.times["k"] - 1)
        return [*made, *self.matrices(names), *self.scales(names), *self.first_group(names), later]

    # --- backward ---

    @cached_property
    def mlp_backward(self) -> list[Cost]:
        sizes = [(self.C, self.part_width), *((width, self.C) for width in self.hidden_widths)]
        return [*self.mlp, self.activation("backward"),
                *(cost for gives, takes in sizes for cost in self.parts_backward(self.tp, gives, takes))]

    @cached_property
    def products_backward(self) -> list[Cost]:
        """Costs the products of a backward of attention's half, and `again` of q, k, v."""
        return [*self.made(self.again), *self.turned("qkv"),
                *self.parts_backward(self.groups_of_heads, self.C, self.widths["q"]),
                *(cost for name, width in self.widths.items()
                  for cost in self.parts_backward(self.times[name], width, self.C))]

    def backward(self, attend: list[Cost], attend_backward: list[Cost]) -> list[Cost]:
        """Costs a backward, which makes norm, hidden tensors, activation and `again` of q, k, v again."""
        mlp, half = self.mlp_backward, [*attend_backward, *self.products_backward]
        travelled = (sum(self.part.values()) * (self.tp - 1)
                     + sum(self.times[name[0]] * n for name, n in self.group.items()))
        # fp32 gradients of travelling matrices are set to zero and added to others
        sums_s = self.speeds.seconds("copy", 16 * travelled, 16 * travelled) if travelled else 0.0
        return [*mlp, *half, Cost(sums_s), *self.matrices(turning=self.TURNING_INPUT), *self.normed,
                *self.norms_backward, *self.backward_messages(total(mlp), total(half))]

    def backward_messages(self, mlp_s: float, attention_s: float) -> list[Cost]:
        """Costs matrices and gradients on their way beside so many seconds of the two halves."""
        groups, step, one = self.groups_of_heads, mlp_s / self.tp, attention_s / self.groups_of_heads
        # the first two hops beside the own part, the last gradients beside attention
        home = self.machine.message_s("shift", 4 * sum(self.part.values()), self.tp)
        hop = self.hop_of_part_s()
        group, going = self.group_s("broadcast", "qkvp", every=True) / groups, self.others_s("reduce", "qkvp")
        # of the last group: the projection's leave beside attention, as do those of the group before; the
        # others before their products
        last = total([self.norm("backward"), *(self.parts(1, self.C, n) for n in self.widths.values())])
        return [*self.scales(), self.late(hop, step),
                *self.steps(hop, home, max(1, self.tp - 1), step, max(0.0, step - hop)),
                self.late(home, attention_s), self.late(group, mlp_s), *self.steps(group, going, groups, one),
                self.late(going + self.group_s("reduce", "p"), one), self.late(going, one, times=-1),
                self.late(self.group_s("reduce", "qkv"), last)]
