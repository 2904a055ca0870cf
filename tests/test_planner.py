"""Traces, their text, and plans in one level and two: a model of memory replays every request."""

import json
import random
from dataclasses import replace

import pytest

from memo.dsa.problem import solve
from memo.errors import ConfigError
from memo.planner.__main__ import main
from memo.planner.plan import NEAR, Levels, Plan, cached_plan, plan_trace
from memo.planner.trace import Trace, checked_trace, parse_trace
from memo.system.command import run
from memo.system.files import keep_json, kept_json, readable_json


def step(rng, layers, crossing=True):
    """A random step: embedding, equal layers forward, head, the same backward; some tensors live longer."""
    def piece(n):
        events, live = [], []
        for k in range(n):
            if live and rng.random() < 0.45:
                events.append(("free", *live.pop(rng.randrange(len(live)))))
            else:
                live.append((f"t{k}", rng.randrange(1, 5000)))
                events.append(("malloc", *live[-1]))
        return events + [("free", *t) for t in live]
    forward, backward, head = piece(16), piece(40), piece(20)
    pieces = [("embedding", piece(3)), *((f"forward {i}", forward) for i in range(layers)), ("head", head),
              *((f"backward {i}", backward) for i in reversed(range(layers)))]
    log = []
    for number, (label, events) in enumerate(pieces):
        kind, _, layer = label.partition(" ")
        log += [("begin", label, 0), *((verb, f"{number}.{name}", n) for verb, name, n in events)]
        if crossing and kind != "head":
            log.append(("free" if kind == "backward" else "malloc", f"saved.{layer}", 700))
        log.append(("end", label, 0))
    return checked_trace(log)


def assert_it_replays(trace, plan):
    """By hand, without the planner's code: no two live tensors overlap, all lie in the arena."""
    live, k, segment, most = {}, 0, None, 0
    for verb, name, nbytes in trace.events:
        if verb == "begin":
            segment, k = name, 0
        elif verb == "malloc":
            planned, offset = plan.segments[segment][k]
            assert (planned == nbytes and offset % plan.alignment == 0
                    and 0 <= offset <= plan.arena_bytes - nbytes)
            assert all(offset + nbytes <= start or stop <= offset for start, stop in live.values())
            live[name] = (offset, offset + nbytes)
            most, k = max(most, offset + nbytes), k + 1
        elif verb == "keep":
            assert plan.segments[segment][k] == (nbytes, None)
            k += 1
        elif verb == "free":
            live.pop(name)
    assert plan.lower_bound <= plan.arena_bytes < most + plan.alignment


def test_plans_of_one_and_two_levels_replay():
    rng = random.Random(0)
    for alignment in (1, 64, 512):
        for _ in range(10):
            trace = step(rng, rng.randrange(1, 5))
            two, one = (plan_trace(trace, "greedy", alignment, one_level=one) for one in (False, True))
            assert two.lower_bound == one.lower_bound
            for plan in (two, one):
                assert_it_replays(trace, plan)


def test_equal_layers_are_solved_once_and_without_crossings_level_2_costs_nothing(monkeypatch):
    calls = []
    monkeypatch.setattr("memo.planner.plan.solve",
                        lambda problem, *how: calls.append(len(problem.buffers)) or solve(problem, *how))
    trace = step(random.Random(1), 20, crossing=False)
    plan = plan_trace(trace)
    assert len(calls) == len(plan.levels) < 20  # not 41 segments
    assert_it_replays(trace, plan)
    assert plan.arena_bytes == max(row["peak"] for row in plan.levels)
    assert len({str(plan.segments[f"forward {i}"]) for i in range(20)}) == 1


def test_a_peak_near_its_bound_is_enough():
    """CP-SAT would prove that 1,000,006 bytes are too few; greedy's are taken as they come."""
    lives = [(0, 1, 2), (0, 2, 4), (1, 3, 1), (2, 4, 2), (3, 4, 1), (4, 5, 3), (1, 6, 1), (2, 6, 2),
             (5, 7, 3), (6, 7, 3), (0, 7, 10**6)]
    levels = Levels(1, "auto", 10.0)
    assert levels.bound(lives) == 10**6 + 6 < levels.solve("a", lives)[1] <= NEAR * levels.bound(lives)
    row, = levels.rows.values()
    assert row["solver"] == "greedy" and not row["proven"]
    few = [(lower, upper, n) for lower, upper, n in lives if n < 10**6]
    assert levels.solve("b", few)[1] == 7 and [*levels.rows.values()][1]["proven"]  # of which a byte is much


def test_a_log_without_marks_is_one_segment():
    plan = plan_trace(parse_trace("malloc a 100\nmalloc b 50\nfree a 100\nmalloc c 100 # again\n\n"
                               "free c 100\nfree b 50\n"))
    assert list(plan.segments) == ["step"] and plan.arena_bytes == plan.lower_bound == 150 and plan.proven
    assert [n for n, _ in plan.segments["step"]] == [100, 50, 100]


def test_what_is_never_freed_lives_to_the_end_and_what_is_kept_is_not_planned():
    trace = parse_trace("begin a\nmalloc x 10\nmalloc y 20\nend a\n"
                        "begin b\nmalloc z 5\nfree z 5\nfree y 20\nend b\n")
    assert plan_trace(trace).arena_bytes == plan_trace(trace, one_level=True).arena_bytes == 35
    settled = trace.settled()
    assert settled.events[1] == ("keep", "x", 10) and plan_trace(settled).segments["a"][0] == (10, None)
    assert plan_trace(settled).arena_bytes == 25
    assert settled.settled() == settled
    nothing = parse_trace("begin a\nend a\nmalloc x 5\nfree x 5\n")  # outside: not planned
    assert plan_trace(nothing).arena_bytes == 0 and plan_trace(nothing).segments == {"a": ()}


def test_the_text_of_a_trace_reads_back():
    trace = step(random.Random(2), 3).settled()
    assert parse_trace(trace.text) == trace and "begin forward 0\n" in trace.text


def test_repeated_segments():
    trace = parse_trace("begin a 0\nmalloc 1 8\nfree 1 8\nend a 0\nbegin b\nmalloc 1 9\nfree 1 9\nend b\n")
    order = [("a 0", "a 0"), ("a 1", "a 0"), ("b", "b")]
    counts = {k: len(events) for k, events in trace.repeated(order).segments.items()}
    assert counts == {"a 0": 4, "a 1": 4, "b": 4}
    leaves = parse_trace("begin a\nmalloc 1 8\nend a\nfree 1 8\n").repeated([("a", "a"), ("b", "a")])
    assert [verb for verb, *_ in leaves.events] == ["begin", "keep", "end"] * 2
    crossing = parse_trace("begin a\nmalloc 1 8\nend a\nbegin b\nfree 1 8\nend b\n")
    with pytest.raises(ConfigError):  # what goes from one segment to another cannot be repeated
        crossing.repeated([("b", "b"), ("a", "a")])


def test_a_plan_is_made_once_and_cached(tmp_path, monkeypatch):
    trace = step(random.Random(3), 2)
    (tmp_path / "cache").mkdir()
    plan = cached_plan(trace, tmp_path / "cache")
    with monkeypatch.context() as m:
        m.setattr("memo.planner.plan.solve", None)
        assert cached_plan(trace, tmp_path / "cache") == plan
        with pytest.raises(TypeError):
            cached_plan(trace, tmp_path / "cache", solver="greedy")
        with pytest.raises(TypeError):
            cached_plan(step(random.Random(30), 2), tmp_path / "cache")
    for folder in (tmp_path / "none", None):
        assert cached_plan(trace, folder).segments == plan.segments  # no folder: no cache


def moved(stored):
    """The highest place moved up, so that it is not aligned."""
    stored["offsets"][stored["offsets"].index(max(stored["offsets"]))] += 3


@pytest.mark.parametrize("poison", [
    lambda stored: stored.clear(), lambda stored: stored.update(more=1),
    lambda stored: stored.update(offsets=None), lambda stored: stored.update(levels=1),
    lambda stored: stored.update(offsets=[0] * len(stored["offsets"])),
    lambda stored: stored["offsets"].pop(), lambda stored: stored["offsets"].append(2**30),
    lambda stored: stored.update(offsets=[at - 64 for at in stored["offsets"]]),
    lambda stored: stored.update(offsets=[at + 12 * 2**30 for at in stored["offsets"]]),
    lambda stored: stored.update(offsets=[float(at) for at in stored["offsets"]]),
    lambda stored: stored.update(offsets=[at or False for at in stored["offsets"]]),
    moved])
def test_a_poisoned_plan_is_made_again(tmp_path, poison):
    trace = step(random.Random(3), 2)
    first = next(name for verb, name, _ in trace.events if verb == "malloc" and name.startswith("0."))
    trace = Trace(tuple(event for event in trace.events if event[:2] != ("free", first))).settled()
    plan = cached_plan(trace, tmp_path, alignment=64)
    file, = tmp_path.iterdir()
    sound = kept_json(tmp_path, file.name)
    poison(poisoned := kept_json(tmp_path, file.name))
    assert repr(poisoned) != repr(sound)
    keep_json(poisoned, tmp_path, file.name)
    again = cached_plan(trace, tmp_path, alignment=64)
    assert repr(replace(again, seconds=0, levels=())) == repr(replace(plan, seconds=0, levels=()))
    assert kept_json(tmp_path, file.name)["offsets"] == sound["offsets"]  # in the place of the poisoned one
    assert cached_plan(trace, tmp_path, alignment=64) == again


@pytest.mark.parametrize("text",
                         ["{", "", "[]", "null", "[" * 99999, "[" * 99 + "]" * 99, '{"arena_bytes": NaN}'])
def test_a_damaged_plan_is_made_again(tmp_path, text):
    trace = step(random.Random(3), 2)
    plan = cached_plan(trace, tmp_path)
    file, = tmp_path.iterdir()
    file.write_text(text)
    again = cached_plan(trace, tmp_path)
    assert again.segments == plan.segments and again == cached_plan(trace, tmp_path)


def test_a_wrong_placement_is_not_believed(monkeypatch):
    def wrong(problem, *how):
        s = solve(problem, *how)
        return replace(s, offsets=tuple(max(0, offset - 1) for offset in s.offsets))
    monkeypatch.setattr("memo.planner.plan.solve", wrong)
    with pytest.raises(ValueError, match="buffer|peak"):
        plan_trace(step(random.Random(4), 1))


# --- the command line ---

def test_the_command_line(tmp_path, capsys):
    trace = step(random.Random(5), 3)
    (tmp_path / "requests.log").write_text(trace.text)
    for more in ([], ["--one_level", "--solver=greedy", "--alignment=1"]):
        assert run(main, [str(tmp_path / "requests.log"), "-o", str(tmp_path / "plan.json"), *more]) == 0
        got = json.loads((tmp_path / "plan.json").read_text())
        names = [name for rows in got["segments"].values() for name, *_ in rows]
        assert names == [name for verb, name, _ in trace.events if verb in ("malloc", "keep")]
        got["segments"] = {label: [row[1:] for row in rows] for label, rows in got["segments"].items()}
        segments = {label: tuple(map(tuple, rows)) for label, rows in got["segments"].items()}
        plan = Plan(**got | dict(segments=segments))
        assert_it_replays(trace, plan)
        assert f"in an arena of {plan.arena_bytes:,} bytes" in capsys.readouterr().out
    assert plan.alignment == 1 and len((tmp_path / "plan.json").read_text().splitlines()) < 1000


@pytest.mark.parametrize("text,message", [
    ("malloc a 10\nfree a 10\nfree a 10\n",
     "3: free a 10: it is not allocated here; a free needs a malloc of its own before it"),
    ("malloc a 10\n\nfree b 10\n",
     "3: free b 10: it is not allocated here; a free needs a malloc of its own before it"),
    ("malloc a 10\nfree a 11\n", "2: free a 11: bytes=11 must be 10, as in its malloc"),
    ("malloc a 10\nmalloc a 20\n", "2: malloc a 20: it is allocated already, 10 bytes; free it first"),
    ("malloc a -10\n", "1: malloc a -10: bytes=-10 must be at least 1"),
    ("malloc a 0\n", "1: malloc a 0: bytes=0 must be at least 1"),
    ("malloc a ten\n", "1: bytes='ten' must be a whole number"),
    ("malloc a 1e9\n", "1: bytes='1e9' must be a whole number"),
    (f"malloc a {10**18}\n", f"1: bytes={10**18} must be below 1e18"),
    (f"malloc a {'9' * 18}\nmalloc b 1\n", "2: malloc b 1: bytes in use at one time must stay below 1e18"),
    ("malloc a\n", "1: 'malloc a' must be malloc <tensor> <bytes>"),
    ("malloc a 1 2\n", "1: 'malloc a 1 2' must be malloc <tensor> <bytes>"),
    ("alloc a 10\n", "1: 'alloc' must be one of malloc, free, keep, begin, end"),
    ("begin\n", "1: begin needs the name of a segment"),
    ("begin a\nbegin b\n", "2: begin b: segment 'a' must end first, segments do not nest"),
    ("begin a\nend b\n", "2: end b: the segment that began must end, 'a'"),
    ("end b\n", "1: end b: it did not begin"),
    ("begin a\nend a\nbegin a\n", "3: begin a: there was a segment of this name already; give each its own"),
])
def test_a_log_that_cannot_be(tmp_path, capsys, text, message):
    path = tmp_path / "requests.log"
    path.write_text(text)
    assert run(main, [str(path), "-o", str(tmp_path / "plan.json")]) == 2
    assert capsys.readouterr().err == f"error: {path}:{message}\n"
    assert not (tmp_path / "plan.json").exists()


def test_files_that_cannot_be(tmp_path, capsys):
    path, out = tmp_path / "requests.log", str(tmp_path / "plan.json")
    for content, message in ((None, "cannot be read (No such file or directory); give a request log"),
                             (b"\xff\xfe", "cannot be read"),
                             (b"\n" * (2**20 + 1), "cannot be read (it must have at most 1,048,576 lines)"),
                             (b"begin " + b"a " * 2**13, "(a line of 16,390 characters must have at most"),
                             (b" " * (2**26 + 1), "(it must be at most 67,108,864 characters long)"),
                             (b"# nothing\n", "must hold at least one malloc"),
                             (b"begin a\nkeep b 1\nend a\nmalloc x 5\n",
                              "at least one malloc, inside its segments"),
                             (b"begin a\nmalloc b 1\nfree b 1\n",
                              "segment 'a' must end before the log does")):
        if content is not None:
            path.write_bytes(content)
        assert run(main, [str(path), "-o", out]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path}") and message in error and error.count("\n") == 1
    path.write_text("malloc a 1\n")
    assert run(main, [str(path), "-o", str(tmp_path / "no" / "plan.json")]) == 2
    err = capsys.readouterr().err
    assert "no/plan.json cannot be written (No such file or directory); choose another -o" in err


def test_json_for_people():
    value = {"a": [[1, None], [2, "x,  y [  z  ]"]], "b": [], "c": {"d": [{"e [ 1 ]": 1}], "e": {}},
             "f": ["1, 2", "]"]}
    text = readable_json(value)
    assert json.loads(text) == value and '\n  [1, null],\n' in text and '["1, 2", "]"]' in text
