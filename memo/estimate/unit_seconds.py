"""Seconds of a layer at one of several subsequences, whose queries meet the keys and values of all
subsequences up to it (memo/parallel/prefix.py)."""

from collections import Counter
from functools import cached_property, lru_cache
from math import fsum

from memo.estimate.hardware import Machine
from memo.estimate.metp_seconds import MetpSeconds
from memo.estimate.roofline import LayerOfUnits, LayerSeconds, norm_of
from memo.layer import keys_dealt
from memo.layout import Layout
from memo.subsequences import subsequence_lengths


class UnitSeconds(LayerSeconds):
    """See LayerSeconds. Sizes are those of the subsequence; attention grows with those `before`."""

    def set_seconds(self) -> None:
        super().set_seconds()
        copied = self.copy_s(2 * self.C)  # the input between the stream and the unit, and dx back
        self.forward_s, self.backward_s = self.forward_s + copied, self.backward_s + copied
        self.messages_s -= self.merging_s("forward") + self.merging_s("backward")
        dealing = self.dealing_s() if self.ulysses else 0.0  # of k and v, once
        self.forward_s, self.messages_s = self.forward_s + dealing, self.messages_s + dealing
        if self.layer.head_norms:  # their backward wants keys as they were before these
            self.backward_s += self.keys_again_s("k")
            self.messages_s += self.keys_messages_s("k")
        self.sweep_s = self.pass_s(f"{norm_of(self.cfg)} forward", self.C) + self.keys_again_s("kv") + dealing

    def keys_again_s(self, names: str) -> float:
        """Seconds to make k, or k and v, from the norm's output when nothing else is."""
        return fsum(map(self.operation_s, self.layer.keys[:len(names)])) + self.keys_messages_s(names)

    def keys_messages_s(self, names: str) -> float:
        """Exposed seconds of messages among them."""
        return self.message_s([*self.layer.keys[:len(names)]])

    @property
    def ulysses(self) -> bool:
        return self.ring > 1 and self.cfg.context_parallel == "ulysses"

    @property
    def dealt(self) -> int:
        """Width of keys in the pieces of all ranks."""
        return keys_dealt(self.cfg) * self.KV

    def dealing_s(self) -> float:
        """Seconds of the all-to-alls of k and v, or of their gradients."""
        return 2 * self.exchange_s(self.dealt, 1)

    def before_s(self, way: str) -> float:
        """Seconds of attention's kernels over the keys of all subsequences before."""
        return self.before_by_way[way]

    @cached_property
    def before_by_way(self) -> dict[str, float]:
        lengths = Counter(self.before)
        return {way: fsum(times * self.kernel_s(way, self.attention_flops * 2 * n / self.S, n, full=True)
                          for n, times in lengths.items()) for way in ("forward", "backward")}

    def kernels_s(self) -> list[float]:
        return [own + self.before_s(way)
                for own, way in zip(super().kernels_s(), ("forward", "backward"), strict=True)]

    def passing_s(self, way: str, leaving: float, home: float) -> float:
        """Exposed seconds of what passes the ring: `leaving` bytes of queries, and their sums on the way
        home, a rank behind. The first hop hides behind the own queries' pieces before, the last one behind
        their own piece."""
        before, own = self.before_s(way) / self.ring, super().kernels_s()[way == "backward"] / self.ring
        leave, come = self.hop_s(leaving), self.hop_s(home)
        between = (self.ring - 2) * self.late_s(leave + come, before + own)
        return self.late_s(leave, before) + between + self.late_s(come, own)

    def merging_s(self, way: str) -> float:
        """Seconds to merge partial results, and to add up partial gradients, in fp32."""
        n, p = len(self.before) + 1, 1 if self.ulysses else self.ring
        # of a visitor's own piece half of the queries meet a rank before it
        merges = n - 1 if p == 1 else p * n - 0.25 * (p - 1)
        if way == "forward":  # 6: to fp32 and back
            return self.copy_s(6 * self.Q) + merges * self.pass_s("merge", self.Q) if merges else 0.0
        keys = p * (1 + sum(self.before) / self.S)  # pieces whose sums grow, in units of the own one
        added = 1 + 8 // self.itemsize
        return self.copy_s((2 + added * merges) * self.Q + (2 + added * keys) * 2 * self.KV)

    def attention_forward_s(self) -> float:
        seconds = self.kernels_s()[0] + self.merging_s("forward")
        if self.ulysses:  # q and out
            return seconds + 2 * self.exchange_s(self.Q, self.turns)
        if self.ring > 1:
            fp32 = self.row_bytes * 4 // self.itemsize
            lse = fp32 * self.layer.heads
            seconds += self.passing_s("forward", self.Q * self.row_bytes, self.Q * fp32 + lse)
        return seconds

    def attention_backward_s(self) -> float:
        seconds = self.kernels_s()[1] + self.merging_s("backward")
        if self.ulysses:  # dout, q, out and dq; dk and dv
            return seconds + 4 * self.exchange_s(self.Q, self.turns) + self.dealing_s()
        if self.ring > 1:
            fp32 = self.row_bytes * 4 // self.itemsize
            leaving = 3 * self.Q * self.row_bytes + fp32 * self.layer.heads
            seconds += self.passing_s("backward", leaving, self.Q * fp32)
        return seconds


class MetpUnitSeconds(UnitSeconds, MetpSeconds):
    """See MetpSeconds. The matrices travel once a unit. Keys and values are kept: the backward makes queries
    again alone, and of the groups that read the same keys one makes these."""

    again = "q"

    @property
    def keyed(self) -> int:
        return min(self.groups, self.layer.kv_heads)

    def keys_again_s(self, names: str) -> float:
        return self.made_s(names) + self.keys_messages_s(names)

    def keys_messages_s(self, names: str) -> float:
        """In a backward the matrices are there; in a sweep they travel, with the rounding before."""
        return 0.0 if names == "k" else self.sweeps_matrices_s()

    def sweeps_matrices_s(self) -> float:
        """Exposed seconds of what a sweep sends, with the rounding before."""
        step = self.made_s("kv") / self.keyed
        later = (self.keyed - 1) * self.exposed_beside(self.group_s("broadcast", "kv"), step)
        return self.matrices_s("kv") + self.scales_s("kv") + self.first_group_s("kv") + later


def layer_seconds(cfg: Layout, machine: Machine, itemsize: int) -> LayerOfUnits:
    """The seconds of a layer of a config."""
    return known_seconds(Layout.whole(cfg, optimizer_device="auto", states="device", activation="memo",
                                      alpha_mode="per_tensor"), machine, itemsize)


@lru_cache(4)  # layouts that differ in stages, modes or the optimizer's place alone follow each other
def known_seconds(cfg: Layout, machine: Machine, itemsize: int) -> LayerOfUnits:
    """The same, of keys that count."""
    lengths = subsequence_lengths(cfg)
    alone, several = (MetpSeconds, MetpUnitSeconds) if cfg.metp else (LayerSeconds, UnitSeconds)
    kind = alone if len(lengths) == 1 else several
    return LayerOfUnits([kind(cfg, machine, itemsize, lengths[:i + 1]) for i in range(len(lengths))])
