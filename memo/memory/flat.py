"""Flat buffers: every parameter, gradient and moment of a model is a view of one tensor, so that a norm, a
cast or an optimizer step is one kernel, and a shard is a range."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple

from memo.config.config import MODEL_KEYS
from memo.config.keys import Value
from memo.config.layer import Parameter, layer_of
from memo.config.layout import Layout
from memo.schedule.program import coming
from memo.schedule.states import States

STAGE_KEYS = (*MODEL_KEYS, "tensor_parallel", "pp", "stage")  # that the parameters of a stage depend on
ALIGNED_ELEMENTS = 128  # elements: where a layer's parameters begin, and a rank's part of them


@dataclass(frozen=True)
class Location:
    """Locates this rank's part of a parameter, in elements. `whole`: the parameter over all tp ranks."""

    offset: int
    shape: tuple[int, ...]
    whole: Parameter
    bucket: int

    @property
    def end(self) -> int:
        return self.offset + prod(self.shape)


class Range(NamedTuple):
    """Locates a part of the flat buffers that a rank owns, and where that begins in its shard."""

    start: int
    end: int
    at: int

    @property
    def shard(self) -> slice:
        return slice(self.at, self.at + self.end - self.start)


# --- this rank's parts ---

def model_parameters(cfg: Layout) -> dict[str, Parameter]:
    """Lists {name: Parameter} of a stage: the first has the embeddings, each its layers "h.<i>.<name>", the
    last final norm and head, or if that is tied all embeddings: both stages' ranks share these out alike."""
    C, layer = cfg.n_embd, layer_of(cfg)
    named: dict[str, Parameter] = {}
    if cfg.has_embedding or (cfg.has_head and cfg.tie_embeddings):
        named["wte"] = Parameter((cfg.padded_vocab_size, C), 0)
        if cfg.position == "learned":
            named["wpe"] = Parameter((cfg.block_size, C))
    for i in cfg.layers:
        named |= {f"h.{i}.{name}": p for name, p in layer.parameters.items()}
    if cfg.has_head and not cfg.tie_embeddings:
        named["head_w"] = Parameter((cfg.padded_vocab_size, C), 0)
    if cfg.has_head:
        named["lnf_w"] = Parameter((C,), None, "ones")
    return named | ({"lnf_b": Parameter((C,), None, "zeros")} if cfg.has_head and cfg.bias else {})


def shared_numel(layout: dict[str, Location], tp: int) -> int:
    """Counts a rank's elements of what other tp ranks hold too."""
    return sum(p.end - p.offset for p in layout.values() if p.whole.copies(tp) > 1)


def local_layout(cfg: Layout, tp: int, data: int) -> tuple[dict[str, Location], list[tuple[int, int]]]:
    """Lays out a tp rank's part of a stage -> {name: Location}, [(start, end)] of its buckets: embeddings,
    each layer, norm and head. `data` ranks can share out each equally; the first and last may be empty."""
    return known_layout(tuple(getattr(cfg, name) for name in STAGE_KEYS), tp, data)


@lru_cache(64)  # a search asks again and again
def known_layout(keys: tuple[Value, ...], tp: int,
                 data: int) -> tuple[dict[str, Location], list[tuple[int, int]]]:
    """Computes local_layout() of a Layout with these values of STAGE_KEYS."""
    parameters = model_parameters(Layout(**dict(zip(STAGE_KEYS, keys, strict=True))))
    first, *_, last = ("." in name for name in parameters)  # a layer's
    layout, buckets, end = dict[str, Location](), [(0, 0)] * first, 0
    for _, names in groupby(parameters, key=lambda name: name.rpartition(".")[0]):
        start = end
        for name in names:
            layout[name] = Location(end, parameters[name].local_shape(tp), parameters[name], len(buckets))
            end = layout[name].end
        end += -end % (ALIGNED_ELEMENTS * data)
        buckets.append((start, end))
    return layout, buckets + [(end, end)] * last


def bucket_numels(cfg: Layout, data: int) -> list[int]:
    return [end - start for start, end in local_layout(cfg, cfg.tp, data)[1]]


def layer_numel(cfg: Layout, data: int) -> int:
    return bucket_numels(cfg, data)[1]


# --- flat buffers ---

def gradients_in_turns(cfg: Layout, micro_batches: int) -> range:
    """Lists the buckets whose gradients take turns in two places of the device: with the optimizer on the
    host each layer's leave while the layer below computes, unless another unit is to add to them."""
    leaves = cfg.optimizer_device == "cpu" and micro_batches == 1 and cfg.by_layer and not cfg.layers_come
    return range(1, len(cfg.layers) + 1) if leaves else weights_in_turns(cfg)


def weights_in_turns(cfg: Layout) -> range:
    """Lists the buckets whose parameters take turns in two places of the device."""
    come = coming(len(cfg.layers), cfg.layers_come, cfg.edges_come)
    return range(come.start + 1, come.stop + 1)


def states_of(cfg: Layout, replicas: int, micro_batches: int) -> States:
    """Says where this stage's gradients and parameters are between passes; `micro_batches` are a rank's."""
    layers, on_host = len(cfg.layers), cfg.optimizer_on_host
    leave = not cfg.layers_come and len(gradients_in_turns(cfg, micro_batches)) > 0
    return States(layers, coming(layers, cfg.layers_come, cfg.edges_come), range(layers * leave),
                  replicas > 1, on_host, apart=on_host and cfg.layers_come and micro_batches > 1)


def bucket_places(buckets: list[tuple[int, int]], in_turns: range) -> tuple[list[tuple[int, int]], int]:
    """Places buckets in a flat buffer -> [(start, end)], elements in all. Those in turns have its first part:
    odd ones begin where it begins, even ones end where it ends, so that any two neighbours fit."""
    sizes = [end - start for start, end in buckets]
    room = max((a + b for a, b in pairwise([0, *(sizes[k] for k in in_turns)])), default=0)
    places, free = [], room
    for k, n in enumerate(sizes):
        start = free if k not in in_turns else 0 if k % 2 else room - n
        places.append((start, start + n))
        free += n * (k not in in_turns)
    return places, free


def staged_bytes(cfg: Layout, numel: int, micro_batches: int, itemsize: int) -> int:
    """Counts the bytes for a shard's way to an optimizer on the host and back (memo/states/optim.py)."""
    return 4 * (numel + 1) + itemsize * numel * (cfg.layers_come and micro_batches > 1)


def joined(ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Joins neighbours of the same `what` in [(start, end, what)], which ascend."""
    joint: list[tuple[int, int, int]] = []
    for start, end, what in ranges:
        if joint and joint[-1][1:] == (start, what):
            start = joint.pop()[0]
        joint.append((start, end, what))
    return joint


def boxes(start: int, end: int, width: int) -> list[tuple[int, int, int, int]]:
    """Cuts elements [start, end) of a matrix, in order, into up to 3 boxes (row, column, rows, columns)."""
    cut = []
    while start < end:
        row, column = divmod(start, width)
        rows, columns = (end - start) // width, width
        if column or not rows:
            rows, columns = 1, min(width - column, end - start)
        cut.append((row, column, rows, columns))
        start += rows * columns
    return cut
