"""The problem of alpha: how much of every layer's skeletal activations is swapped; the rest is recomputed.

x, attn_out and lse are swapped whatever alpha is (of an `input_only` unit x alone); "others" are all other
tensors, with several subsequences but for k and v. Each subsequence then has an alpha of its own, whose
copies hide behind the unit that follows. Copies back set no limit: a backward takes twice as long as a
forward, and both ways are taken for equally fast. `per_tensor`, the default, finds a fraction for each group
of tensors by a linear program, `paper` one alpha for all in closed form, `fixed_alpha` takes alpha as it is.
memo/decide/where.py chooses the number of buffers, makes rows of alpha, and with subsequences, or layers that
come, lowers it where a simulated step stalls less and is no slower. Source: MEMO 1 and 4.1; SPPO 5.2.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf

from memo.config.layer import INPUT, Tensor, groups_of
from memo.errors import OutOfHostMemory
from memo.memory.placement import Placement
from memo.memory.sizes import Sizes

ANY_HOST = 2**62  # bytes of a host that holds whatever there is


@dataclass(frozen=True)
class AlphaProblem:
    """One rank's sizes, speeds and room. `placement`: its units and buffers; its `kept` is not read: that
    is the answer."""

    placement: Placement
    tensors: dict[str, Tensor]  # all skeletal tensors of one layer, all rows
    forward_s: tuple[float, ...]  # of a layer's unit at each subsequence
    offload_bytes_per_s: float  # what this GPU gets while all GPUs of the host copy at once
    host_bytes: int  # this rank's share
    device_bytes: float = inf  # what the device has for two buffers, which share the rows that are recomputed

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(self.placement, self.tensors)

    @property
    def nbytes(self) -> dict[str, int]:
        return {name: t.nbytes for name, t in self.tensors.items()}

    @property
    def others(self) -> list[str]:
        """Lists the tensors that need not be swapped."""
        return [name for name, t in self.tensors.items() if t.group]

    @cached_property
    def others_bytes(self) -> int:
        """Counts the bytes of these in one layer."""
        return sum(t.nbytes for t in self.tensors.values() if t.group)

    @cached_property
    def always_bytes(self) -> int:
        """Counts the bytes of x, attn_out and its logsumexp of one layer."""
        apart = self.placement.apart
        return sum(t.nbytes for name, t in self.tensors.items() if not t.group and not apart(name))

    # --- units ---

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lists the rows of a unit at each subsequence, and of each guest's: see Placement.lengths."""
        return self.placement.lengths

    @cached_property
    def parts(self) -> list[float]:
        """Lists these rows as parts of all rows."""
        return [n / self.placement.n_rows for n in self.lengths]

    @property
    def n_swapped(self) -> int:
        return max(0, self.placement.n_swapped)

    @cached_property
    def swapped(self) -> list[int]:
        """Counts the swapped units of each subsequence."""
        of = Counter(self.placement.kinds[:self.n_swapped])
        return [of[i] for i in range(len(self.lengths))]

    @cached_property
    def row_parts(self) -> list[float]:
        """Lists each subsequence's part of the rows of all swapped units; of all units where none is."""
        rows = self.swapped_rows
        return [c * n / rows for c, n in zip(self.swapped, self.lengths, strict=True)] if rows else self.parts

    @cached_property
    def swapped_rows(self) -> int:
        return sum(c * n for c, n in zip(self.swapped, self.lengths, strict=True))

    def mean(self, alphas: Sequence[float]) -> float:
        """Averages the alphas of all subsequences over the rows of the swapped units."""
        return sum(w * a for w, a in zip(self.row_parts, alphas, strict=True))

    # --- the host ---

    @cached_property
    def beside_bytes(self) -> int:
        """Counts what the slab holds beside the rows of swapped units: the stream, keys and values that go
        there; less the inputs that the stream has already."""
        p = self.placement
        by_layer = p.stream_rows and p.order == "layer"  # the stream has the inputs of all layers but one
        twice = self.swapped_rows - sum(p.cuts[:self.n_swapped]) if by_layer else 0
        return self.sizes.stream_bytes + self.sizes.keys_bytes - self.sizes.row_bytes[INPUT] * twice

    def unit_bytes(self, always: int, others: Sequence[float]) -> list[int]:
        """Counts the bytes of the rows of a unit at each subsequence, where a layer has `always` in all
        rows, and others[i] more if all were as those of subsequence i."""
        n_rows, whole = self.placement.n_rows, int if len(self.lengths) == 1 else ceil  # parts may be inexact
        return [always * n // n_rows + whole(part * more)
                for n, part, more in zip(self.lengths, self.parts, others, strict=True)]

    def slab_bytes(self, units: Sequence[int]) -> int:
        """Counts the host's bytes with units of so many bytes at each subsequence."""
        return sum(c * n for c, n in zip(self.swapped, units, strict=True)) + self.beside_bytes

    def needed_bytes(self, alpha: float) -> int:
        """Counts the host's bytes with one alpha for all."""
        others = [alpha * self.others_bytes] * len(self.lengths)
        return self.slab_bytes(self.unit_bytes(self.always_bytes, others))

    @cached_property
    def input_bytes(self) -> list[int]:
        """Counts the bytes of a unit at each subsequence that keeps only its input."""
        return self.unit_bytes(self.nbytes[INPUT], [0] * len(self.lengths))

    @property
    def least_bytes(self) -> int:
        """Counts the host's bytes where all units keep only their input."""
        return self.slab_bytes(self.input_bytes)

    def host_level(self) -> float:
        """Finds the common alpha with which the host is full, where each subsequence takes that or, if less,
        its overlap."""
        room: float = self.host_bytes - self.needed_bytes(0)
        whole = left = float(self.needed_bytes(1) - self.needed_bytes(0))
        for most, weight in sorted((min(max(a, 0.0), 1.0), w)
                                   for a, w in zip(self.overlap, self.row_parts, strict=True)):
            if most * left >= room:
                return room / left if left else 0.0
            room, left = room - most * weight * whole, left - weight * whole
        return 1.0

    # --- the device ---

    def device_bytes_at(self, kept: int) -> int:
        """Counts the bytes of all buffers and regions where so many rows of each of the others survive."""
        placement = replace(self.placement, kept=dict.fromkeys(self.others, kept))
        return Sizes(placement, self.tensors).device_bytes

    # --- what bounds alpha ---

    @cached_property
    def overlap(self) -> list[float]:
        """Finds for each subsequence the largest alpha whose copies hide; at most 1, negative where those of
        x, attn_out, keys and values do not. Of U units U - n are swapped. Their copies run after the first
        unit and before the last one, which writes over the last one copied: in U - 2 units' time, each in
        (U - 2)/(U - n). A unit's time is the mean of the n - 1 that follow it, with n = 2 the next one's."""
        p, found = self.placement, dict[int, float]()
        always = self.always_bytes + self.sizes.layer_keys_bytes
        for i, *following in p.followed:
            mean_s = sum(self.forward_s[j] for j in following) / len(following)
            hidden = mean_s * ((p.n_units - 2) / self.n_swapped) * self.offload_bytes_per_s
            alpha = (hidden - always * self.parts[i]) / (self.others_bytes * self.parts[i])
            found[i] = min(alpha, found.get(i, 1.0))
        return [found.get(i, 1.0) for i in range(len(self.lengths))]

    @cached_property
    def limits(self) -> dict[str, float]:
        """Finds the largest alpha, at most 1, that "overlap", "host" and, if known, "device" alone allow: the
        mean of all subsequences. Negative where copies hide nowhere, or the host has no room for 0."""
        found = {"overlap": 1.0, "host": 1.0}
        if self.n_swapped:
            hides = [max(0.0, a) for a in self.overlap] if max(self.overlap) > 0 else self.overlap
            least = self.needed_bytes(0)
            found = {"overlap": self.mean(hides),
                     "host": min(1.0, (self.host_bytes - least) / (self.needed_bytes(1) - least))}
        if self.device_bytes < inf:
            least = self.device_bytes_at(0)
            more = self.device_bytes_at(self.placement.n_rows) - least
            found["device"] = min(1.0, (self.device_bytes - least) / more) if more else 1.0
        return found

    @cached_property
    def alphas(self) -> list[float]:
        """Finds for each subsequence the largest alpha in [0, 1] under all limits; 0 where that is over."""
        level = min(self.host_level() if self.n_swapped else 1.0, self.limits.get("device", 1.0))
        return [max(0.0, min(level, a)) for a in self.overlap]


Fractions = dict[str, tuple[float, ...]]  # {"other" tensor: of each subsequence the part that is swapped}


@dataclass(frozen=True)
class SwapPlan:
    """Says what is swapped. Bytes are of this rank."""

    fractions: Fractions
    alphas: tuple[float, ...]  # of each subsequence their mean, weighted by bytes
    alpha: float  # the same of all swapped units
    limits: dict[str, float]  # see AlphaProblem.limits
    binds: str | None  # the lowest limit, which set alpha; None where all are 1, or alpha is the user's
    input_only: int  # swapped units that keep only x: the fewest that let the rest fit the host
    layer_bytes: int  # that the units of a layer send which keep more than x, if there are such units
    host_bytes: int  # of all units
    fits: bool  # False: OOHM, though every unit keeps only x


def plan(problem: AlphaProblem, fractions: Fractions) -> SwapPlan:
    """Makes the SwapPlan of these fractions, whether or not its copies hide."""
    nbytes, limits, n = problem.nbytes, problem.limits, problem.n_swapped
    others = [sum(f[i] * nbytes[name] for name, f in fractions.items()) for i in range(len(problem.lengths))]
    units, inputs = problem.unit_bytes(problem.always_bytes, others), problem.input_bytes
    host, input_only = problem.slab_bytes(units), 0
    for count, unit, x in zip(problem.swapped, units, inputs, strict=True):  # see Placement.gives_up
        lacking = host - problem.host_bytes
        giving = min(count, max(0, int(-(-lacking // (unit - x)))))
        host, input_only = host - giving * (unit - x), input_only + giving
    lowest = min(limits, key=limits.__getitem__)
    binds = lowest if limits[lowest] < 1 else None
    layer = sum(units if input_only < n else inputs) + problem.sizes.layer_keys_bytes if n else 0
    alphas = tuple(of / problem.others_bytes for of in others)
    return SwapPlan(fractions, alphas, problem.mean(alphas), limits, binds, input_only, layer, host,
                    host <= problem.host_bytes)


def paper(problem: AlphaProblem) -> SwapPlan:
    """Finds for each subsequence the one alpha for all tensors, the largest under all limits; 0 where even x
    and attn_out are over one: then their copy does not hide, or some units keep only x. Source: MEMO 4.1."""
    return plan(problem, dict.fromkeys(problem.others, tuple(problem.alphas)))


def per_tensor(problem: AlphaProblem, recompute_s: dict[str, float]) -> SwapPlan:
    """Finds the fractions that save the most recompute seconds under the limits of `paper`. `recompute_s`:
    {group: seconds to rebuild all rows of it in one layer}. All limits are of the same sum of bytes, so the
    linear program is a knapsack for each subsequence: first what saves most a byte, the last in part."""
    groups, nbytes_of = groups_of(problem.tensors), problem.nbytes
    nbytes = {group: sum(nbytes_of[n] for n in names) for group, names in groups.items()}
    densest = sorted(groups, key=lambda g: recompute_s[g] / nbytes[g], reverse=True)

    def filled(alpha: float) -> dict[str, float]:
        room, found = alpha * problem.others_bytes, dict[str, float]()
        for group in densest:
            f = min(1.0, room / nbytes[group]) if recompute_s[group] > 0 else 0.0
            room, found[group] = max(0.0, room - f * nbytes[group]), f
        return found
    found = [filled(alpha) for alpha in problem.alphas]
    return plan(problem, {name: tuple(of[group] for of in found)
                          for group in densest for name in groups[group]})


def fixed_alpha(problem: AlphaProblem, alpha: float, block_size: int, multiple: int = 1) -> SwapPlan:
    """Makes the SwapPlan of an alpha set by hand, in [0, 1], hidden or not. Errors: OutOfHostMemory."""
    chosen = plan(problem, dict.fromkeys(problem.others, (float(alpha),) * len(problem.lengths)))
    if chosen.input_only:
        limit, needed = problem.limits["host"], problem.needed_bytes(alpha)
        longest = largest_block_size(problem, block_size, multiple, alpha)
        shorter = (f"the largest block_size with this alpha {longest}" if longest else
                   "no block_size fits with this alpha")
        remedy = (f"the largest alpha that fits is {int(limit * 1000) / 1000:g}, {shorter}" if limit >= 0 else
                  "not even alpha=0 fits; try alpha=auto, which can keep just the input of a "
                  f"{problem.placement.what[:-1]}; {shorter}")
        raise out_of_host_memory(problem, f"alpha={alpha:g}", needed, remedy)
    return replace(chosen, binds=None)


def out_of_host_memory(problem: AlphaProblem, what: str, needed: int, remedy: str) -> OutOfHostMemory:
    need, have = needed / 2**30, problem.host_bytes / 2**30
    return OutOfHostMemory(f"{what} needs {need:.4g} GiB of host memory for {problem.n_swapped} swapped "
                           f"{problem.placement.what}, this rank has {have:.4g} GiB; {remedy}")


def largest_block_size(problem: AlphaProblem, block_size: int, multiple: int = 1,
                       alpha: float | None = None) -> float:
    """Finds the longest sequence, a multiple of `multiple` tokens, with which the host holds x of all units,
    or x, attn_out and `alpha` of the others. `block_size`: the problem's. inf: no unit is swapped."""
    if not problem.n_swapped:
        return inf
    needed = problem.least_bytes if alpha is None else problem.needed_bytes(alpha)
    return int(problem.host_bytes) * block_size // needed // multiple * multiple
