"""Streams and events, with one meaning on CUDA and on the CPU: what a stream is handed runs in order, one
thing after the other; streams run beside each other; `record` marks a point in a stream and `wait` holds
another one back until it is reached. On the CPU a stream is a worker thread, or the calling thread itself.
The stream of messages among ranks ends its work when a library says so; on the CPU the caller starts each.
The optimizer's, where that is on the host, is a thread beside a GPU too.

Launches that have a label, and waits, leave spans in the streams' Timeline, for stalls and pictures.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self

import torch

from memo.schedule.spans import Span
from memo.system.axis import Works


class Mark(Protocol):
    """Names what a host and a Timeline need of a point in a stream."""

    done: Callable[[], bool]

    def wait(self) -> object: ...
    def seconds_since(self, other: Self) -> float: ...


class Event:
    """A point in a stream, set anew by each record(): `mark`. `kind`: of the Span of a wait for it."""

    def __init__(self, name: str, kind: str = "wait") -> None:
        self.name, self.kind = name, kind
        self.mark: Mark | None = None


class Timeline:
    """Says what ran when since the last take(): spans of two marks each, read when the device is done."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, str, Mark, Mark]] = []

    def add(self, stream: str, kind: str, label: str, before: Mark, behind: Mark) -> None:
        self.spans.append((stream, kind, label, before, behind))

    def clear(self) -> None:
        self.spans.clear()

    def newest(self) -> tuple[int, int, str]:
        """Returns how many spans there are, the number of the newest that is done, and its label."""
        spans = self.spans[:]  # another thread may clear them
        done = next((i for i in reversed(range(len(spans))) if spans[i][4].done()), -1)
        return len(spans), done, spans[done][2] if done >= 0 else ""

    def take(self) -> list[Span]:
        """Returns the spans since the last call, when they have ended."""
        spans, self.spans = self.spans, []
        for *_, behind in spans:
            behind.wait()  # what is sent last nobody has waited for
        return [Span(stream, kind, label, *(mark.seconds_since(spans[0][3]) for mark in (before, behind)))
                for stream, kind, label, before, behind in spans]


class Untimed(Timeline):
    """Keeps no spans."""

    def add(self, stream: str, kind: str, label: str, before: Mark, behind: Mark) -> None: ...


class TimedStream(Protocol):
    """Says what both kinds of stream have in common. start() hands it work, hold() is a wait without a
    span."""

    name: str
    timeline: Timeline

    def mark(self) -> Mark: ...
    def start(self, work: Callable[..., object], *args: object) -> None: ...
    def hold(self, event: Event) -> None: ...

    def launch(self, label: str, work: Callable[..., object], *args: object) -> None:
        """Queues work(*args). Without a label it leaves no span."""
        before = self.mark() if label else None
        self.start(work, *args)
        if before is not None:
            self.timeline.add(self.name, "launch", label, before, self.mark())

    def record(self, event: Event) -> None:
        event.mark = self.mark()

    def wait(self, event: Event, label: str = "") -> None:
        """Holds back what follows until the last record() of `event`. Errors, on the CPU: its stream's."""
        if event.mark is not None:
            before = self.mark()
            self.hold(event)
            self.timeline.add(self.name, event.kind, label or event.name, before, self.mark())


# --- CUDA ---

class CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)
        self.done = self.event.query

    def wait(self) -> None:
        if not self.done():
            self.event.synchronize()

    def seconds_since(self, other: "CudaMark") -> float:
        milliseconds: float = other.event.elapsed_time(self.event)
        return milliseconds / 1e3


class CudaStream(TimedStream):
    def __init__(self, name: str, timeline: Timeline, stream: torch.cuda.Stream) -> None:
        self.name, self.timeline, self.stream = name, timeline, stream

    def mark(self) -> CudaMark:
        return CudaMark(self.stream)

    def start(self, work: Callable[..., object], *args: object) -> None:
        with torch.cuda.stream(self.stream):
            works = work(*args)
            if isinstance(works, Works):  # messages, for which a library has a stream of its own
                works.wait()
            assert isinstance(works, Works) or self.name != "replicas"

    def hold(self, event: Event) -> None:
        if isinstance(event.mark, CudaMark):
            self.stream.wait_event(event.mark.event)
        elif event.mark is not None:
            event.mark.wait()  # a thread's: by the host

    def synchronize(self) -> None:
        """Waits until all that was launched is done."""
        self.stream.synchronize()

    close = synchronize


# --- the CPU ---

class CpuMark:
    def __init__(self) -> None:
        self.reached, self.time = threading.Event(), 0.0
        self.done = self.reached.is_set
        self.error: BaseException | None = None

    def reach(self, error: BaseException | None = None) -> None:
        self.time, self.error = time.perf_counter(), error
        self.reached.set()

    def wait(self) -> None:
        """Returns when it is reached. Errors: what went wrong before it."""
        self.reached.wait()
        if self.error is not None:
            raise self.error

    def seconds_since(self, other: "CpuMark") -> float:
        return self.time - other.time


class CpuStream(TimedStream):
    """A worker thread; with `threaded=False` the calling one, where all is done when a call returns.

    An exception ends a worker's work but not its marks: whoever waits for one gets it.
    """

    def __init__(self, name: str, timeline: Timeline, threaded: bool = True) -> None:
        self.name, self.timeline, self.threaded = name, timeline, threaded
        self.error: BaseException | None = None
        self.jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.worker: threading.Thread | None = None  # started by the first job

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                job()
            except BaseException as e:
                self.error = self.error or e
            job = None  # noqa: F841  a job holds its tensors, and the next one may be long in coming

    def put(self, job: Callable[[], object]) -> None:
        if not self.threaded:
            job()
            return
        if self.worker is None:
            self.worker = threading.Thread(target=self.run, name=f"memo {self.name} stream", daemon=True)
            self.worker.start()
        self.jobs.put(job)

    def mark(self) -> CpuMark:
        mark = CpuMark()
        self.put(lambda: mark.reach(self.error))
        return mark

    def start(self, work: Callable[..., object], *args: object) -> None:
        self.put(lambda: self.error or work(*args))

    def hold(self, event: Event) -> None:
        if event.mark is not None:
            self.put(event.mark.wait)

    def synchronize(self) -> None:
        """Waits until all that was launched is done. Errors: what went wrong in it."""
        self.mark().wait()

    def close(self) -> None:
        """Waits for the work in hand and ends the thread."""
        if self.worker is not None:
            self.jobs.put(None)
            self.worker.join()
            self.worker = None


class CpuMessages(CpuStream):
    """The stream of messages that a library sends by threads of its own. The caller starts each, so that they
    have one order on all ranks, and waits before for what they wait for; the worker waits for their ends."""

    def start(self, work: Callable[..., object], *args: object) -> None:
        works = work(*args)
        assert isinstance(works, Works)
        super().start(works.wait)

    def hold(self, event: Event) -> None:
        if event.mark is not None:
            event.mark.wait()


# --- both ---

Stream = CudaStream | CpuStream


class Streams(NamedTuple):
    """Holds the streams of a device. `others`, by name: "send", "receive" and lanes such as "to 1" between
    stages; "replicas", for ranks that hold the same parameters; "optimizer", the host's."""

    compute: Stream
    offload: Stream
    prefetch: Stream
    timeline: Timeline
    others: Mapping[str, Stream] = MappingProxyType({})

    def named(self, name: str) -> Stream:
        """Finds a stream by its name."""
        return self.others[name] if name in self.others else getattr(self, name)


def open_streams(device: torch.device, messages: bool = False, lanes: Iterable[str] = ()) -> Streams:
    """Opens the streams of a device, with `messages` also those to and from neighbours, and `lanes` to and
    from other stages. Compute is the one that torch uses anyway, on the CPU the calling thread."""
    cpu, timeline = device.type == "cpu", Timeline()

    def opened(name: str) -> Stream:
        # of high priority: torch has a pool of 32 of these, and communicators take none: no two names share
        return CpuStream(name, timeline) if cpu else CudaStream(name, timeline, torch.cuda.Stream(device, -1))
    compute: Stream = CpuStream("compute", timeline, threaded=False)
    if not cpu:
        compute = CudaStream("compute", timeline, torch.cuda.current_stream(device))
    others: dict[str, Stream] = {name: opened(name) for name in (*("send", "receive") * messages, *lanes)}
    others["replicas"] = CpuMessages("replicas", Untimed()) if cpu else opened("replicas")
    # a thread's clock is not a GPU's: its spans are in no picture then
    others["optimizer"] = CpuStream("optimizer", timeline if cpu else Untimed())
    return Streams(compute, opened("offload"), opened("prefetch"), timeline, others)


def close_streams(streams: Streams) -> None:
    """Waits for every copy and message under way, then lets the streams go."""
    for stream in (streams.compute, streams.offload, streams.prefetch, *streams.others.values()):
        stream.close()
