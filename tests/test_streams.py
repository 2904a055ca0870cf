"""Streams and events mean the same on the CPU's worker threads as on CUDA."""

import threading
import time

import pytest
import torch

from memo.schedule.spans import stall_s
from memo.schedule.streams import CpuStream, Event, Timeline, close_streams, open_streams

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture
def workers():
    timeline = Timeline()
    streams = [CpuStream(name, timeline) for name in ("compute", "offload")]
    yield *streams, timeline
    for s in streams:
        s.close()


def test_spans_may_be_cleared_while_another_thread_looks():
    timeline = Timeline()

    class Mark:
        def done(self):
            timeline.clear()
            return False
    for _ in range(3):
        timeline.add("compute", "launch", "forward", None, Mark())
    assert timeline.newest() == (3, -1, "")


def test_a_stream_runs_in_order_and_beside_the_host(workers):
    a, _, _ = workers
    seen, gate = [], threading.Event()
    a.launch("first", gate.wait)
    for i in range(100):
        a.launch("next", seen.append, i)
    assert seen == []
    gate.set()
    a.synchronize()
    assert seen == list(range(100))


def test_a_wait_holds_back_what_comes_after_it_only(workers):
    a, b, _ = workers
    seen, gate, event = [], threading.Event(), Event("a is done")
    a.launch("slow", gate.wait)
    a.launch("work", seen.append, "a")
    a.record(event)
    b.launch("before", seen.append, "b before")
    b.launch("told", (before := threading.Event()).set)
    b.wait(event)
    b.launch("behind", seen.append, "b behind")
    before.wait()
    time.sleep(0.02)
    assert seen == ["b before"]
    gate.set()
    b.synchronize()
    assert seen == ["b before", "a", "b behind"]


def test_a_wait_is_for_the_record_before_it_and_one_never_recorded_is_none(workers):
    a, b, _ = workers
    event, gate = Event("again and again"), threading.Event()
    b.wait(event)
    b.synchronize()
    a.record(event)
    b.wait(event)  # the first record, though a second one follows that is long in coming
    a.launch("slow", gate.wait)
    a.record(event)
    b.synchronize()
    assert not gate.is_set() and not event.mark.reached.is_set()
    gate.set()
    a.synchronize()
    assert event.mark.reached.is_set()


def test_an_error_reaches_whoever_waits_and_ends_the_streams_work(workers):
    a, b, _ = workers
    seen, event = [], Event("never")
    a.launch("wrong", lambda: 1 / 0)
    a.launch("not run", seen.append, "a")
    a.record(event)
    b.wait(event)
    b.launch("not run", seen.append, "b")
    for stream in (b, a):
        with pytest.raises(ZeroDivisionError):
            stream.synchronize()
    here = CpuStream("compute", Timeline(), threaded=False)
    with pytest.raises(ZeroDivisionError):
        here.wait(event)
    assert seen == []


def test_the_calling_thread_as_a_stream():
    timeline = Timeline()
    here, side = CpuStream("compute", timeline, threaded=False), CpuStream("offload", timeline)
    seen, event = [], Event("copied")
    here.launch("work", seen.append, threading.current_thread())
    assert seen == [threading.current_thread()]
    side.launch("copy", time.sleep, 0.05)
    side.record(event)
    here.wait(event)
    spans = timeline.take()
    assert [(s.stream, s.kind, s.label) for s in spans] == [
        ("compute", "launch", "work"), ("offload", "launch", "copy"), ("compute", "wait", "copied")]
    assert 0 <= stall_s(spans) == spans[2].end_s - spans[2].start_s
    assert spans[0].start_s == 0 and spans[1].end_s - spans[1].start_s >= 0.05
    assert timeline.take() == []
    side.close()


def test_no_thread_before_the_first_copy_and_none_after_closing():
    def threads():
        return [t.name for t in threading.enumerate() if t.name.startswith("memo ")]
    before = len(threads())
    streams = open_streams(torch.device("cpu"))
    streams.compute.launch("work", time.sleep, 0)
    assert len(threads()) == before
    streams.offload.launch("copy", time.sleep, 0)
    assert len(threads()) == before + 1
    close_streams(streams)
    assert len(threads()) == before


@pytest.mark.parametrize("device", DEVICES)
def test_copies_and_compute_ordered_by_events(device):
    device = torch.device(device)
    streams = open_streams(device)
    x, y, host = (torch.zeros(2**20, device=d) for d in (device, device, "cpu"))
    computed, copied = Event("computed"), Event("copied")
    streams.compute.launch("fill", x.fill_, 3.0)
    streams.compute.record(computed)
    streams.offload.wait(computed)
    streams.offload.launch("offload", host.copy_, x)
    streams.offload.record(copied)
    streams.prefetch.wait(copied)
    streams.prefetch.launch("prefetch", y.copy_, host)
    streams.prefetch.record(copied)
    streams.compute.wait(copied)
    streams.compute.launch("double", y.mul_, 2)
    for stream in streams[:3]:
        stream.synchronize()
    assert (host == 3).all() and (y == 6).all()
    spans = streams.timeline.take()
    assert [s.label for s in spans if s.kind == "launch"] == ["fill", "offload", "prefetch", "double"]
    assert all(s.end_s >= s.start_s >= 0 for s in spans)
    close_streams(streams)
