"""Streams and events, with one meaning on CUDA and on the CPU: what a stream is handed runs in order, one
thing after the other; streams run beside each other; `record` marks a point in a stream and `wait` holds
another one back until it is reached. On the CPU a stream is a worker thread, or the calling thread itself.

Every launch and every wait leaves a span in the streams' Timeline: that is where stalls are read and pictures
come from.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from queue import SimpleQueue
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self, TypeVar

import torch

from memo.schedule.spans import Span

T = TypeVar("T")


class Mark(Protocol):
    """Names what a Timeline needs of a mark in a stream."""

    done: Callable[[], bool]

    def seconds_since(self, other: Self) -> float: ...


class Event:
    """A point in a stream, set anew by each record(). `mark` is what a wait() that is called now waits
    for. `kind`: of the Span of such a wait."""

    def __init__(self, name: str, kind: str = "wait") -> None:
        self.name, self.kind = name, kind
        self.mark: Mark | None = None


class Timeline:
    """What ran when since the last take(): spans of two marks each, read once the device is done with
    them."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, str, Mark, Mark]] = []

    def add(self, stream: str, kind: str, label: str, before: Mark, behind: Mark) -> None:
        self.spans.append((stream, kind, label, before, behind))

    def clear(self) -> None:
        self.spans.clear()

    def newest(self) -> tuple[int, int, str]:
        """(how many spans there are, the number of the newest that is done, its label)."""
        spans = self.spans[:]  # another thread may clear them
        done = next((i for i in reversed(range(len(spans))) if spans[i][4].done()), -1)
        return len(spans), done, spans[done][2] if done >= 0 else ""

    def take(self) -> list[Span]:
        """[Span] since the last call. Everything launched must be done: call it at the step boundary."""
        spans, self.spans = self.spans, []
        return [Span(stream, kind, label, *(mark.seconds_since(spans[0][3]) for mark in (before, behind)))
                for stream, kind, label, before, behind in spans]


# --- CUDA ---

class CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)
        self.done = self.event.query

    def seconds_since(self, other: "CudaMark") -> float:
        milliseconds: float = other.event.elapsed_time(self.event)
        return milliseconds / 1e3


class CudaStream:
    def __init__(self, name: str, timeline: Timeline, stream: torch.cuda.Stream) -> None:
        self.name, self.timeline, self.stream = name, timeline, stream

    def launch(self, label: str, work: Callable[..., object], *args: object) -> None:
        """Queues work(*args)."""
        before = CudaMark(self.stream)
        with torch.cuda.stream(self.stream):
            work(*args)
        self.timeline.add(self.name, "launch", label, before, CudaMark(self.stream))

    def call(self, work: Callable[..., T], *args: object) -> T:
        """work(*args) by the caller, its messages and kernels behind all that was launched."""
        with torch.cuda.stream(self.stream):
            return work(*args)

    def record(self, event: Event) -> None:
        event.mark = CudaMark(self.stream)

    def wait(self, event: Event, label: str = "") -> None:
        """Holds back what is launched from now on until the last record() of `event` is reached."""
        if isinstance(event.mark, CudaMark):
            before = CudaMark(self.stream)
            self.stream.wait_event(event.mark.event)
            self.timeline.add(self.name, event.kind, label or event.name, before, CudaMark(self.stream))

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

    def seconds_since(self, other: "CpuMark") -> float:
        return self.time - other.time


class CpuStream:
    """A worker thread; with `threaded=False` the calling thread, where everything is done when the call
    returns.

    An exception ends a worker's work but not its marks, so that nobody waits for ever: whoever waits for one
    gets it.
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

    def put_mark(self) -> CpuMark:
        mark = CpuMark()
        self.put(lambda: mark.reach(self.error))
        return mark

    def launch(self, label: str, work: Callable[..., object], *args: object) -> None:
        """Queues work(*args)."""
        before = self.put_mark()
        self.put(lambda: self.error or work(*args))
        self.timeline.add(self.name, "launch", label, before, self.put_mark())

    def call(self, work: Callable[..., T], *args: object) -> T:
        """work(*args) by the caller, behind all that was launched."""
        self.synchronize()
        return work(*args)

    def record(self, event: Event) -> None:
        event.mark = self.put_mark()

    def wait(self, event: Event, label: str = "") -> None:
        """Holds back what is launched from now on until the last record() of `event` is reached. Errors: what
        went wrong before it in its stream."""
        if isinstance(event.mark, CpuMark):
            before = self.put_mark()
            self.put(partial(self.wait_for, event.mark))
            self.timeline.add(self.name, event.kind, label or event.name, before, self.put_mark())

    @staticmethod
    def wait_for(mark: CpuMark) -> None:
        mark.reached.wait()
        if mark.error is not None:
            raise mark.error

    def synchronize(self) -> None:
        """Waits until all that was launched is done. Errors: what went wrong in it."""
        self.wait_for(self.put_mark())

    def close(self) -> None:
        """Waits for the work in hand and ends the thread."""
        if self.worker is not None:
            self.jobs.put(None)
            self.worker.join()
            self.worker = None


# --- both ---

Stream = CudaStream | CpuStream


class Streams(NamedTuple):
    """Holds the streams of a device; `send`, `receive` and `lanes` carry messages between stages."""

    compute: Stream
    offload: Stream
    prefetch: Stream
    timeline: Timeline
    send: Stream | None = None
    receive: Stream | None = None
    lanes: Mapping[str, Stream] = MappingProxyType({})


def stream_named(streams: Streams, name: str) -> Stream:
    return streams.lanes[name] if name in streams.lanes else getattr(streams, name)


def between_stages(streams: Streams) -> list[Stream]:
    """The streams of messages to and from other stages."""
    return [one for one in (streams.send, streams.receive, *streams.lanes.values()) if one is not None]


def open_streams(device: torch.device, messages: bool = False, lanes: Iterable[str] = ()) -> Streams:
    """The streams of a device, with `messages` also those to and from other stages, and `lanes` more of such.
    Compute is the one that torch uses anyway, on the CPU the calling thread."""
    timeline, side = Timeline(), dict[str, Stream]()
    compute: Stream = CpuStream("compute", timeline, threaded=False)
    if device.type == "cuda":
        compute = CudaStream("compute", timeline, torch.cuda.current_stream(device))
    for name in ("offload", "prefetch", *("send", "receive") * messages, *lanes):
        # of high priority: torch has a pool of 32 of these, which communicators take none of; two names that
        # shared one would wait for each other
        side[name] = (CudaStream(name, timeline, torch.cuda.Stream(device, -1)) if device.type == "cuda" else
                      CpuStream(name, timeline))
    others = {name: side.pop(name) for name in lanes}
    return Streams(compute=compute, timeline=timeline, lanes=others, **side)


def close_streams(streams: Streams) -> None:
    """Waits for every copy and message under way, then lets the streams go."""
    for stream in (streams.compute, streams.offload, streams.prefetch, *between_stages(streams)):
        stream.close()
