"""Streams that take turns in a random order that their waits allow, and a small model whose passes must give
the same bits in each of them: without any of the waits, not."""

import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memo.config.layout import Layout
from memo.decide.where import Room, place_rows, problem_of
from memo.schedule.streams import CpuMark, CpuMessages, CpuStream, Event, Streams, Timeline
from memo.states.optim import Optimizer
from memo.states.passes import Model
from model import GPT, initial_weights

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = dict(n_layer=5, n_head=1, n_embd=32, vocab_size=64, block_size=256, alpha=0.5,
                             subsequences=1, subsequence_cut="equal", unit_order="layer", states="device")
FOUR = dict(subsequences=4, n_layer=4)
# parameters come to two places, and the sums of a batch's gradients after those of the one before
COME = dict(gradient_accumulation_steps=2)
RACES: dict[str, tuple[dict, dict]] = {  # (keys of the config, fields of the Placement that are others)
    "one": ({}, {}), "four": (FOUR, {}), "four, six buffers": (FOUR, dict(n_buffers=6)),
    "four, keys made": (FOUR, dict(keys="made")), "four, stream copied": (FOUR, dict(stream="copied")),
    "states host": (FOUR | COME | dict(states="host", tie_embeddings=False), dict(keys="made")),
    "optimizer on the host": (dict(optimizer_device="cpu", gradient_accumulation_steps=1), {}),
    "states sharded": (COME | dict(states="sharded", activation="keep", alpha="auto"), {}),
    "five in order": (FOUR | dict(subsequences=5, unit_order="subsequence"),
                      dict(stream="copied", n_buffers=6))}
# {what is waited for: who does it}, of one subsequence; of four with two buffers and with more of them than a
# layer has units; of four whose keys and values are made again; with a copied stream
UNITS = {"forward": "compute", "backward": "compute"}
COPIES = UNITS | {"offload": "offload", "prefetch": "prefetch"}
STREAM = {"offload stream": "offload", "prefetch stream": "prefetch", "offload gradient": "offload"}
GRADIENT = {"prefetch gradient": "prefetch", "head": "compute"}
KEYS_MADE = {"prefetch input": "prefetch", "sweep": "compute"}
STATES = {"prefetch weights": "prefetch", "prefetch weight gradients back": "prefetch",
          "offload weight gradients": "offload"}
ADAMW = {"adamw": "compute"}
ON_HOST = {"clip": "compute", "offload scale": "offload", "adamw on the host weights": "optimizer",
           "offload weight gradients": "offload", "prefetch weights": "prefetch"}
SWEPT = KEYS_MADE | {"prefetch weights back": "prefetch"}
# embedding and head come
EDGES = {"prefetch weight gradients": "prefetch", "embedding": "compute", "head": "compute",
         "embedding backward": "compute"}
WAITS = {"one": COPIES, "four": COPIES,
         "four, six buffers": UNITS | {"prefetch": "prefetch", "offload keys": "offload",
                                       "prefetch keys": "prefetch"},
         "four, keys made": COPIES | KEYS_MADE, "four, stream copied": COPIES | STREAM | GRADIENT,
         "states host": COPIES | SWEPT | STATES | EDGES | ON_HOST, "states sharded": UNITS | STATES | ADAMW,
         "optimizer on the host": COPIES | ON_HOST | {"head": "compute", "embedding backward": "compute"},
         "five in order": COPIES | GRADIENT}


def kind_of(label: str) -> str:
    """What a step is called without its unit or its layer."""
    return re.sub(r" (of the \w+|[\d.]+)$", "", label)


class ByTurns(CpuStream):
    """One of several `streams` that do nothing until somebody waits for one of them: then the calling thread
    does what they were handed. It waits for no event that is called `removed`, or that with one number
    behind. `weight`: how often its turn comes."""

    def __init__(self, name: str, timeline: Timeline, streams: list["ByTurns"]) -> None:
        super().__init__(name, timeline)
        self.queue: deque[tuple[Callable, CpuMark | None]] = deque()
        self.streams, self.removed, self.weight = streams, "", 1.0
        streams.append(self)

    def put(self, job: Callable, mark: CpuMark | None = None) -> None:
        self.queue.append((job, mark))

    def launch(self, label: str, work: Callable, *args: object) -> None:
        self.put(partial(work, *args))

    def hold(self, event: Event) -> None:
        if isinstance(event.mark, CpuMark):
            self.put(lambda: None, event.mark)

    def wait(self, event: Event, label: str = "") -> None:
        if event.mark is not None and self.removed not in (event.name, kind_of(event.name)):
            self.hold(event)

    @property
    def ready(self) -> bool:
        return bool(self.queue) and (self.queue[0][1] is None or self.queue[0][1].reached.is_set())

    def synchronize(self) -> None:
        end = self.mark()
        while not end.reached.is_set():
            ready = [stream for stream in self.streams if stream.ready]
            [stream] = random.choices(ready, [stream.weight for stream in ready])
            stream.queue.popleft()[0]()


def streams_by_turns() -> Streams:
    """The streams of a single rank, which take turns."""
    timeline, taking_turns = Timeline(), list[ByTurns]()
    compute, offload, prefetch, optimizer = (ByTurns(name, timeline, taking_turns)
                                             for name in ("compute", "offload", "prefetch", "optimizer"))
    return Streams(compute, offload, prefetch, timeline, {"optimizer": optimizer})


def shuffle(streams: list[ByTurns], seed: int, removed: str, late: str) -> None:
    """Makes their turns those of `seed`. `removed`: a wait that is left out; `late`: who does what it is
    for."""
    random.seed(seed)
    for stream in streams:
        stream.removed, stream.weight = removed, 10 ** random.uniform(-2, 0)
        if removed and stream.name == late:
            stream.weight = 1e-4  # without the wait the others overtake it


class Racing:
    """A model of RACES over such streams."""

    def __init__(self, race: str) -> None:
        keys, changed = RACES[race]
        self.late = WAITS[race]
        streams = streams_by_turns()
        assert isinstance(streams.compute, ByTurns)
        self.streams = streams.compute.streams
        there = dict(states="device", activation="keep", alpha="auto")
        there |= dict(optimizer_device="auto")
        self.expected = self.passes(*self.built(Layout(**SHAPE | keys | there), {}))
        self.model, self.optimizer = self.built(Layout(**SHAPE | keys), changed, streams)

    @staticmethod
    def built(cfg: Layout, changed: dict[str, Any],
              streams: Streams | None = None) -> tuple[Model, Optimizer]:
        model = Model(GPT, cfg, CPU, torch.float32)
        optimizer = Optimizer(model, cfg)
        placement, _ = place_rows(cfg, problem_of(cfg, 4, None, Room(2**40, cpu=True)))
        model.reserve(1, cfg.block_size, replace(placement, **changed), streams=streams)
        return model, optimizer

    @staticmethod
    def passes(model: Model, optimizer: Optimizer) -> list[torch.Tensor]:
        """Losses, norms and weights of two training steps with other batches, and evaluations in between. The
        host runs ahead of all streams, through all of them."""
        optimizer.load(initial_weights(model.cfg, 0, CPU))
        optimizer.left.clear()  # whatever a pass has left that went wrong
        for state in (model.grads, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.steps):
            state.zero_()
        optimizer.publish()
        seen, random_ids = [], torch.Generator().manual_seed(0)

        def batch() -> tuple[torch.Tensor, torch.Tensor]:
            tokens, targets = torch.randint(64, (2, 1, model.cfg.block_size), generator=random_ids)
            return tokens, targets
        for _ in range(2):
            seen.append(model.forward(*batch()))
            for i in reversed(range(model.micro_batches)):
                seen.append(model.forward(*batch(), scale=1.0))
                model.backward(last=i == 0)
            optimizer.clip(1.0)
            optimizer.step(1e-3)
        streams = model.swap.streams
        for stream in (streams.compute, streams.offload, streams.prefetch, streams.named("optimizer")):
            assert not (stream is None or isinstance(stream, CpuMessages))
            stream.synchronize()  # a stream that nobody waits for has work left
        return [*seen, optimizer.norm.clone(), optimizer.master.clone(), optimizer.exp_avg_sq.clone()]

    def is_right(self, seed: int, removed: str = "") -> bool:
        """Whether they have the bits of a model with all on the device. `removed`: waits that are left
        out."""
        shuffle(self.streams, seed, removed, self.late.get(removed, ""))
        if slab := self.model.swap.slab:
            slab.bytes.fill_(0xFF)  # NaN, lest the copies of the seed before be right by chance
        return all(map(torch.equal, self.passes(self.model, self.optimizer), self.expected))
