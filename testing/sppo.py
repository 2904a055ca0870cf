"""SPPO's recursion of the device memory, subsequence by subsequence, and what a run on the CPU has there."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from memo.config.layer import KEYS_VALUES, SPLIT_ROWS, layer_of
from memo.config.layout import Layout, subsequence_lengths
from memo.decide.where import placed
from memo.memory.buffers import Swap
from memo.schedule.spans import Span
from memo.schedule.step import Moved, Op, Step
from memo.schedule.streams import CpuMark, CpuStream, Streams, Timeline
from memo.states.optim import Optimizer
from memo.states.passes import Model
from model import GPT, initial_weights

CPU = torch.device("cpu")


# --- the recursion ---

def sizes_of(cfg: Layout, stays: dict[str, float]) -> tuple[list[int], list[float]]:
    """([bytes of a subsequence's activations], [alpha, the part of them that goes to the host]), of all
    layers, one sequence. `stays`: {tensor: the part of its rows that stays on the device}."""
    sizes, alphas = list[int](), list[float]()
    for n in subsequence_lengths(cfg):
        tensors = layer_of(cfg).tensors(1, n, 4)
        nbytes = {name: t.nbytes for name, t in tensors.items() if name not in KEYS_VALUES}
        resident = sum(nbytes[name] * (min(part * n, n - SPLIT_ROWS) // SPLIT_ROWS * SPLIT_ROWS) / n
                       for name, part in stays.items())
        sizes.append(cfg.n_layer * sum(nbytes.values()))
        alphas.append(1 - cfg.n_layer * resident / sizes[-1])
    return sizes, alphas


def recursion(sizes: list[int], alphas: list[float]) -> list[int]:
    """[M_i = M_(i-1) + A_i - alpha_(i-1) A_(i-1)]. Source: SPPO, section 5.2."""
    found = [sizes[0]]
    for i in range(1, len(sizes)):
        found.append(found[-1] + sizes[i] - round(alphas[i - 1] * sizes[i - 1]))
    return found


# --- as it is run ---

class Asked(threading.Event):
    """An event that lets a stream work until it is reached."""

    def __init__(self, jobs: deque[Callable]) -> None:
        super().__init__()
        self.jobs = jobs

    def wait(self, timeout: float | None = None) -> bool:
        while not self.is_set():
            self.jobs.popleft()()
        return True


class AtLast(CpuStream):
    """A stream that does nothing before somebody waits for it: the latest that a schedule allows."""

    def __init__(self, name: str, timeline: Timeline) -> None:
        super().__init__(name, timeline)
        self.late: deque[Callable] = deque()

    def put(self, job: Callable) -> None:
        self.late.append(job)

    def mark(self) -> CpuMark:
        mark = CpuMark()
        mark.reached = Asked(self.late)
        self.put(lambda: mark.reach(self.error))
        return mark


def streams_at_last() -> Streams:
    """Streams whose copies to the host are as late as the schedule allows."""
    timeline = Timeline()
    return Streams(CpuStream("compute", timeline, threaded=False), AtLast("offload", timeline),
                   CpuStream("prefetch", timeline), timeline)


def spans_of(model: Model, backward: bool = False) -> list[Span]:
    """The spans of a forward on random tokens, with or without its backward."""
    tokens = torch.randint(model.cfg.vocab_size, (1, model.cfg.block_size + 1))
    model.forward(tokens[:, :-1], tokens[:, 1:], scale=1.0)
    if backward:
        model.backward()
    for stream in model.swap.streams[:3]:
        stream.synchronize()
    return model.swap.streams.timeline.take()


def on_device(swap: Swap, spans: list[Span]) -> list[int]:
    """[bytes] of the activations that lie on the device when a subsequence's last layer has been computed, of
    each subsequence: those of the units computed by then, but for rows that have reached the slab. Without
    keys and values."""
    ends = {s.label: s.end_s for s in spans if s.kind == "launch"}
    assert swap.slab is not None  # something goes to the host
    slab = range(start := swap.slab.bytes.data_ptr(), start + swap.slab.bytes.nbytes)
    events = []
    for unit, tensors in swap.units.items():
        made = sum(getattr(tensors, name).nbytes for name in swap.tensors if name in swap.buffers)
        events.append((ends[f"forward {swap.name(unit)}"], made))
        offload = Step(Op.OFFLOAD, unit, Moved.ACTIVATIONS)
        left = sum(mine.nbytes for mine, there in swap.pairs.get(offload, ())
                   if there.data_ptr() in slab)
        if left:
            events.append((ends[f"offload {swap.name(unit)}"], -left))
    p = swap.placement
    return [sum(nbytes for at, nbytes in events if at <= ends[f"forward {p.n_layer - 1}.{i}"])
            for i in range(p.subsequences)]


def reserved(cfg: Layout, n_buffers: int, stays: dict[str, float], streams: Streams) -> Model:
    """A model whose units' rows all survive, these parts of them on the device."""
    model = Model(GPT, cfg, CPU, torch.float32)
    Optimizer(model, cfg).load(initial_weights(cfg, 0, CPU))
    n = cfg.block_size
    rows = {name: int(part * n) for name, part in stays.items()}
    model.reserve(1, n, replace(placed(cfg, n_buffers), stays=rows), streams=streams)
    return model
