"""The alpha program: how much of every layer's skeletal activations is swapped; the rest is recomputed.

`paper` finds one alpha for all tensors in closed form, `per_tensor` one fraction for each by a linear
program, `fixed_alpha` takes alpha as it is. Plain numbers in, a SwapPlan out; `place_rows` makes it rows.
Source: MEMO 4.1.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from memo.config import Config
from memo.errors import ConfigError
from memo.layer import INPUT, KEYS_VALUES, SPLIT_ROWS, Tensor, groups_of
from memo.subsequences import unit_rows
from memo.swap.placement import Placement, rows

HOST_SHARE = 0.9  # of a host's free memory that a run may take; the rest is for batches and other processes


class OutOfHostMemory(ConfigError):
    """OOHM: the host cannot hold what is to be swapped."""


def granted_bytes(host_memory_gb: float | Literal["auto"], there_bytes: int, reserved: int,
                  where: str) -> int:
    """Bytes that a host grants: host_memory_gb (1e9 bytes), or HOST_SHARE of what is there beside `reserved`
    bytes. Errors: OutOfHostMemory: more than that asked for. `where`: words for what is there."""
    most = max(0, int(there_bytes * HOST_SHARE) - reserved)
    if host_memory_gb == "auto":
        return most
    if host_memory_gb * 1e9 > most:
        beside = f" beside {reserved / 1e9:.4g} for a checkpoint's copy" if reserved else ""
        raise OutOfHostMemory(f"host_memory_gb={host_memory_gb:g} must be at most {most / 1e9:.4g}, "
                              f"{HOST_SHARE:.0%} of {where}{beside}; try host_memory_gb=auto")
    return int(host_memory_gb * 1e9)


@dataclass(frozen=True)
class AlphaProblem:
    """One rank's sizes, speeds and room."""

    tensors: dict[str, Tensor]  # all skeletal tensors of one layer
    n_layer: int
    forward_s: float  # one layer's forward
    offload_bytes_per_s: float  # what this GPU gets while all GPUs of the host copy at once
    host_bytes: int  # this rank's share
    n_buffers: int = 2  # rounding buffers; the layers in them at the end of the forward are not swapped
    device_bytes: float = inf  # what the device has for two buffers, which share the rows that are recomputed
    taken: tuple[int, int] | None = None  # of these at alpha = 0, at alpha = 1; None: as the tensors say

    @property
    def swapped_layers(self) -> int:
        return max(0, self.n_layer - self.n_buffers)

    @property
    def nbytes(self) -> dict[str, int]:
        return {name: t.nbytes for name, t in self.tensors.items()}

    @property
    def others(self) -> list[str]:
        """The tensors that need not be swapped."""
        return [name for name, t in self.tensors.items() if t.group]

    @property
    def others_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values() if t.group)

    @property
    def always_bytes(self) -> int:
        """x, attn_out and its logsumexp of one layer; with several subsequences keys and values too."""
        return sum(self.nbytes.values()) - self.others_bytes

    @property
    def least_bytes(self) -> int:
        """What a layer sends to the host that keeps only its input."""
        return sum(t.nbytes for name, t in self.tensors.items()
                   if name == INPUT or (name in KEYS_VALUES and not t.group))

    @property
    def least_device_bytes(self) -> int:
        """Bytes of two buffers and three inputs at alpha = 0."""
        return self.taken[0] if self.taken else 2 * self.always_bytes + self.nbytes[INPUT] + self.others_bytes

    @property
    def limits(self) -> dict[str, float]:
        """{"overlap", "host"}, and "device" where that is known: the largest alpha that each limit alone
        allows. At most 1.

        Negative where x and attn_out alone are too much: the copy does not hide, or the host is too small for
        alpha = 0. The copies of the L - n swapped layers, one after the other from the end of the first layer
        on, must be done when the last layer starts: L - 2 layers' time. With the paper's n = 2 that is a
        layer's time for each.
        """
        always, others, layers = self.always_bytes, self.others_bytes, self.swapped_layers
        device = {}
        if self.device_bytes < inf:
            more = self.taken[1] - self.taken[0] if self.taken else others
            device = {"device": min(1.0, (self.device_bytes - self.least_device_bytes) / more)}
        if not layers:
            return {"overlap": 1.0, "host": 1.0} | device
        hidden = self.forward_s * ((self.n_layer - 2) / layers) * self.offload_bytes_per_s
        return {"overlap": min(1.0, (hidden - always) / others),
                "host": min(1.0, (self.host_bytes - layers * always) / (layers * others))} | device

    @property
    def largest_alpha(self) -> float:
        """The largest alpha in [0, 1] under all limits; 0 where even that is over one of them."""
        return max(0.0, min(self.limits.values()))


@dataclass(frozen=True)
class SwapPlan:
    """What is swapped. Bytes are of this rank."""

    fractions: dict[str, float]  # {"other" tensor: f}: rows [0, f) of it are swapped, f in [0, 1]
    alpha: float  # their mean, weighted by bytes
    limits: dict[str, float]  # see AlphaProblem.limits
    binds: str | None  # the lowest limit, which set alpha; None where all are 1, or alpha is the user's
    input_only_layers: int  # swapped layers that keep only x: the fewest that let the rest fit the host
    layer_offload_bytes: int  # of a layer that keeps more than x, if there is one
    host_bytes: int  # of all layers
    fits: bool  # False: OOHM, though every layer keeps only x


def what_set_it(cfg: Config, plan: SwapPlan, n_swapped: int) -> str:
    """alpha, what set it, and what each limit allows: for the startup's table and the estimate's."""
    if not n_swapped:
        return "none: all layers stay on the device"
    why = "given" if not cfg.finds_alpha else f"set by {plan.binds}" if plan.binds else "all of it"
    limits = ", ".join(f"{name} allows {limit:.2f}" for name, limit in plan.limits.items())
    return f"{plan.alpha:.3f}, {why}: {limits}"


def plan(problem: AlphaProblem, fractions: dict[str, float]) -> SwapPlan:
    """The SwapPlan of these fractions, whether or not its copies hide."""
    layers, x, limits = problem.swapped_layers, problem.least_bytes, problem.limits
    others = sum(f * problem.nbytes[name] for name, f in fractions.items())
    layer = problem.always_bytes + int(others)
    lacking = layers * layer - problem.host_bytes
    input_only = min(layers, max(0, int(-(-lacking // (layer - x)))))
    host = input_only * x + (layers - input_only) * layer
    lowest = min(limits, key=limits.__getitem__)
    binds = lowest if limits[lowest] < 1 else None
    offload = layer if input_only < layers else x if layers else 0
    return SwapPlan(fractions, others / problem.others_bytes, limits, binds, input_only, offload, host,
                    host <= problem.host_bytes)


def paper(problem: AlphaProblem) -> SwapPlan:
    """The SwapPlan with one alpha for all tensors, the largest under all limits. Source: MEMO 4.1.

    Where x and attn_out alone are over the overlap limit alpha is 0 and the copy does not hide; where they
    are over the host limit some layers keep only x.
    """
    return plan(problem, dict.fromkeys(problem.others, problem.largest_alpha))


def per_tensor(problem: AlphaProblem, recompute_s: dict[str, float]) -> SwapPlan:
    """The SwapPlan that saves the most recompute seconds under the limits of `paper`.

    recompute_s: {group of the layer: seconds to rebuild all rows of it in one layer}. The limits are all of
    the same sum of bytes, so the linear program is a knapsack: first what saves most per byte, the last one
    in part.
    """
    room = problem.largest_alpha * problem.others_bytes
    fractions: dict[str, float] = {}
    groups, nbytes_of = groups_of(problem.tensors), problem.nbytes
    nbytes = {group: sum(nbytes_of[n] for n in names) for group, names in groups.items()}
    for group in sorted(groups, key=lambda g: recompute_s[g] / nbytes[g], reverse=True):
        f = min(1.0, room / nbytes[group]) if recompute_s[group] > 0 else 0.0
        room = max(0.0, room - f * nbytes[group])
        fractions |= dict.fromkeys(groups[group], f)
    return plan(problem, fractions)


def fixed_alpha(problem: AlphaProblem, alpha: float, block_size: int, multiple: int = 1) -> SwapPlan:
    """The SwapPlan of an alpha set by hand, in [0, 1], hidden or not. OutOfHostMemory where the host cannot
    hold it."""
    chosen = plan(problem, dict.fromkeys(problem.others, float(alpha)))
    if chosen.input_only_layers:
        limit = problem.limits["host"]
        longest = largest_block_size(problem, block_size, multiple, alpha)
        shorter = (f"the largest block_size with this alpha {longest}" if longest else
                   "no block_size fits with this alpha")
        remedy = (f"the largest alpha that fits is {int(limit * 1000) / 1000:g}, {shorter}" if limit >= 0 else
                  "not even alpha=0 fits; try alpha=auto, which can keep just the input of a layer; "
                  f"{shorter}")
        layer = problem.always_bytes + int(alpha * problem.others_bytes)
        raise out_of_host_memory(problem, f"alpha={alpha:g}", layer, remedy)
    return replace(chosen, binds=None)


def out_of_host_memory(problem: AlphaProblem, what: str, layer_bytes: int, remedy: str) -> OutOfHostMemory:
    need, have = problem.swapped_layers * layer_bytes / 2**30, problem.host_bytes / 2**30
    return OutOfHostMemory(f"{what} needs {need:.4g} GiB of host memory for {problem.swapped_layers} swapped "
                           f"layers, this rank has {have:.4g} GiB; {remedy}")


def largest_block_size(problem: AlphaProblem, block_size: int, multiple: int = 1,
                       alpha: float | None = None) -> float:
    """The longest sequence, in tokens and a multiple of `multiple`, with which the host holds at least x of
    all layers; or x, attn_out and `alpha` of the others.

    `block_size`: that of problem.nbytes. Infinite where no layer is swapped.
    """
    if not problem.swapped_layers:
        return inf
    layer = problem.least_bytes
    if alpha is not None:
        layer = problem.always_bytes + int(alpha * problem.others_bytes)
    tokens = int(problem.host_bytes) * block_size // (problem.swapped_layers * layer)
    return tokens // multiple * multiple


def swaps_layers(cfg: Config) -> bool:
    """Whether the mode swaps any layers."""
    return cfg.activation in ("swap", "memo") and cfg.n_layer * cfg.subsequences > 2


def placed(cfg: Config, n_buffers: int, n_rows: int, kept: dict[str, int] | None = None, input_only: int = 0,
           x_stays: bool = False, keys: str = "copied", stream: str = "whole") -> Placement:
    """The Placement of a config in so many buffers, at most one a unit. `keys`: what becomes of keys and
    values that give way to the next layer's; `stream`: of what lies between layers."""
    several = unit_rows(cfg, cfg.batch_size, cfg.block_size // cfg.cp)
    units = cfg.n_layer * max(1, len(several["cuts"]))
    stay = units == cfg.n_layer or n_buffers >= units or cfg.unit_order == "subsequence"
    return Placement(cfg.n_layer, min(units, n_buffers), n_rows, kept or {}, input_only, x_stays,
                     keys="stay" if stay else keys, stream=stream, **several)


def place_rows(cfg: Config, problem: AlphaProblem, n_rows: int,
               recompute_s: dict[str, float] | None = None) -> tuple[Placement, SwapPlan | None]:
    """(Placement, SwapPlan) of a config and the problem that it poses: cfg.activation, cfg.alpha and
    cfg.alpha_mode made rows. The SwapPlan is None in the modes that copy nothing. `recompute_s` as for
    per_tensor, which needs it.

    Errors: OutOfHostMemory, before anything is allocated.
    """
    N, units = n_rows, problem.n_layer
    if cfg.activation == "keep":
        return placed(cfg, units, N), None
    only_input = {name: N if name == INPUT else 0 for name in problem.tensors}
    if cfg.activation == "recompute":
        return placed(cfg, 1, N, only_input, units, x_stays=True, keys="made"), None
    if not cfg.finds_alpha:
        alpha = 1.0 if cfg.activation == "swap" else cfg.alpha
        chosen = fixed_alpha(problem, alpha, cfg.block_size, cfg.block_multiple)
    elif cfg.alpha_mode == "per_tensor" and problem.swapped_layers:
        assert recompute_s is not None  # per_tensor needs it
        chosen = per_tensor(problem, recompute_s)
    else:
        chosen = paper(problem)
    if not chosen.fits:
        raise out_of_host_memory(problem, f"block_size={cfg.block_size}", problem.least_bytes,
                                 "the largest block_size that fits is "
                                 f"{largest_block_size(problem, cfg.block_size, cfg.block_multiple)}")
    granularity = max(1, min(SPLIT_ROWS, N // 16))
    kept = {name: rows(chosen.fractions.get(name, 1), N, granularity) for name in problem.tensors}
    chosen = replace(plan(problem, {name: kept[name] / N for name in problem.others}), binds=chosen.binds)
    return placed(cfg, problem.n_buffers, N, kept, chosen.input_only_layers), chosen
