"""What the spans of stages say: bubbles and stalls, one clock for all, a picture; what a run tells of its
stages."""

import contextlib
import json
import random
from itertools import pairwise
from statistics import mean

import pytest
from matplotlib.image import imread

import train
from memo.config.layout import Layout
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.pipeline_seconds import pipeline_spans
from memo.estimate.report import draw_estimate
from memo.plots.pipeline import bars_of, pipeline
from memo.run.ending import complete
from memo.run.loggers import ConsoleLogger, StepStats, read_metrics
from memo.schedule.program import Fates, Program
from memo.schedule.simulate import times_of_stages
from memo.schedule.spans import (
    Span,
    busy_s,
    length_s,
    on_one_clock,
    sent_and_received,
    simulated_spans,
    stall_s,
)
from memo.schedule.waits import schedule
from memo.system.hardware import machine
from memo.system.launch import Launch
from testing.ranks import pool
from testing.stages import slept
from tests.helpers import argv, bound_arena

COMPUTE_S = {"forward": 1.0, "recompute": 0.5, "backward": 2.0}


def simulated(p, N, copy_s=None, message_s=0.0, layers=2):
    """[(spans, Times) of each stage]; without copy_s nothing is copied."""
    n, every = layers * N, frozenset()
    if copy_s is not None:
        n, every = 2, frozenset(range(layers * N - 2))
    schedules = [schedule(Program(Fates(n, every, every, receives=k > 0, sends=k < p - 1,
                                stream="passed" if k < p - 1 else "whole"), layers, N, "subsequence"))
                 for k in range(p)]

    def seconds(stage, step):
        if step.stream in ("send", "receive"):
            return message_s
        return COMPUTE_S.get(step.kind, 0.0) if step.stream == "compute" else copy_s
    return [(simulated_spans(steps, times), times)
            for steps, times in zip(schedules, times_of_stages(schedules, seconds), strict=True)]


def bubbles_s(stages):
    """The mean over the stages, as metrics.jsonl has it."""
    return max(map(length_s, stages)) - mean(map(busy_s, stages))


@pytest.mark.parametrize("p,N", [(2, 1), (2, 4), (3, 2), (4, 8), (4, 2)])
def test_without_copies_the_bubble_is_as_the_paper_has_it(p, N):
    stages = [spans for spans, _ in simulated(p, N)]
    assert bubbles_s(stages) == pytest.approx((p - 1) / N * mean(map(busy_s, stages)))
    assert {stall_s(spans) for spans in stages} == {0.0}


@pytest.mark.parametrize("copy_s", [0.5, 1.5, 4.0])
def test_a_stall_is_a_wait_for_copies_alone(copy_s):
    stages = simulated(3, 4, copy_s, 0.1)
    assert (stages[0][1].stall_s > 0) == (copy_s > 1)  # those of later stages may hide in bubbles
    for spans, times in stages:
        assert stall_s(spans) == pytest.approx(times.stall_s)
        computed = 2 * 4 * 3.0 + 0.5 * (2 * 4 - 2)
        assert busy_s(spans) == pytest.approx(computed + times.stall_s)
        waits = [s for s in spans if s.stream == "compute" and s.kind == "bubble"]
        assert waits and all("receive" in s.label or "send" in s.label for s in waits)
        compute = sorted((s.start_s, s.end_s) for s in spans if s.stream == "compute")
        assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(compute))  # no gap


@pytest.mark.parametrize("message_s", [0.0, 0.2])
def test_stages_with_clocks_of_their_own_come_onto_one(message_s):
    stages = [spans for spans, _ in simulated(4, 4, 0.5, message_s)]
    offsets = [0.0, *(random.Random(k).uniform(-100, 100) for k in range(3))]
    shifted = [[s._replace(start_s=s.start_s + d, end_s=s.end_s + d) for s in spans]
               for spans, d in zip(stages, offsets, strict=True)]
    for mine, expected in zip(on_one_clock(shifted), stages, strict=True):  # messages take equally long
        assert [s.start_s for s in mine] == pytest.approx([s.start_s for s in expected], abs=1e-9)
    # there 0.1 s longer than back: each neighbour is exact to half of that
    late = [[s._replace(end_s=s.end_s + 0.1 * (s.label.startswith("receive ") and "gradient" not in s.label))
             for s in spans] for spans in shifted]
    for k, (mine, expected) in enumerate(zip(on_one_clock(late), stages, strict=True)):
        assert expected[0].start_s - mine[0].start_s == pytest.approx(0.05 * k, abs=1e-9)


def test_the_picture_has_every_unit_of_every_stage(tmp_path):
    stages = [spans for spans, _ in simulated(3, 4, 1.5)]
    for k, spans in enumerate(stages):
        bars = bars_of(k, spans, 4)
        for look, n in (("forward", 8), ("backward", 8), ("recompute", 6), ("copy", 12)):
            of_look = [bar for bar in bars if bar.look == look]
            assert len(of_look) == n and {bar.subsequence for bar in of_look} >= {0, 1, 2}
        stalls = [bar.end_s - bar.start_s for bar in bars if bar.look == "stall"]
        assert sum(stalls) == pytest.approx(stall_s(spans))
    lent = Span("compute", "launch", "forward 0.11", 0.0, 1.0)  # subsequence 3 of stage 1's, of four
    assert bars_of(0, [lent], 4)[0].subsequence == 3
    assert len(sent_and_received(*stages[:2])) == len(sent_and_received(*stages[1::-1], " gradient")) == 4
    pipeline(stages, 4, tmp_path / "pipeline.png", "three stages, $")
    red, green, blue, _ = imread(tmp_path / "pipeline.png").transpose(2, 0, 1)
    assert red.shape[1] == 1560 and ((red > 0.7) & (green < 0.2) & (blue < 0.3)).sum() > 100  # the stalls


def test_the_dry_run_draws_its_pipeline(tmp_path, monkeypatch):
    monkeypatch.setattr("memo.estimate.report.dry_run", lambda *args: None)  # the other picture
    cfg = Layout(n_layer=7, n_head=8, n_embd=1024, block_size=2**17, vocab_size=50257, pp=3, subsequences=4,
                 unit_order="subsequence", subsequence_cut="flops")
    gpu = machine("h100-80gb")
    got = estimate(cfg, gpu, 3, fast_arena)
    stages = pipeline_spans(got.stages, gpu, 3, 2, got.layer)
    assert bubbles_s(stages) == pytest.approx(got.seconds["bubble"]) and got.seconds["bubble"] > 0
    assert mean(map(stall_s, stages)) == pytest.approx(got.seconds["stall"], abs=1e-12)
    files = draw_estimate(got, None, str(tmp_path / "e.png"))
    assert files == [str(tmp_path / name) for name in ("e.png", "e_pipeline.png")]
    assert imread(files[1]).shape[1] == 1560


# --- real ranks ---

@pytest.mark.ranks
@pytest.mark.parametrize("p,N", [(2, 4), (3, 4)])
def test_where_units_take_equally_long_the_bubble_is_near_the_papers(p, N):
    """Where one subsequence waited for another's way through all stages it would be N times as long. On idle
    cores it is within 10%: bench/pipeline.py."""
    cfg = Layout(n_layer=p, n_head=4, n_embd=64, vocab_size=150, block_size=512, pp=p, subsequences=N,
                 unit_order="subsequence", subsequence_cut="equal", activation="keep")
    for forward_s in (0.02, 0.05, 0.1, 0.2):  # a busy machine delays messages, however long the units take
        stages = pool(p).run(slept, cfg, forward_s)
        assert {stall_s(spans) for spans in stages} == {0.0}
        ratio = bubbles_s(stages) / ((p - 1) / N * mean(map(busy_s, stages)))
        if ratio < 2:
            break
    assert 0.9 < ratio < 2
    # on one clock every stage begins later than the one before, and ends earlier
    computed = [[s for s in spans if s.stream == "compute" and s.kind == "launch"]
                for spans in on_one_clock(stages)]
    for (start, end), (later, earlier) in pairwise((of[0].start_s, of[-1].end_s) for of in computed):
        assert later > start and end > earlier


def trained(host, argv, console):
    """train.main in a rank of a pool -> its exit code."""
    with (open(f"{console}{host.rank}", "w") as file, contextlib.redirect_stdout(file),
          pytest.MonkeyPatch.context() as m):
        bound_arena(m)
        run = train.set_up(argv, Launch(host.rank, host.size, host.rank, host.size), host)
        with contextlib.closing(run):
            code = complete(run, train.train)
        if run.lock:
            run.lock.close()
    return code


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_tells_of_its_stages(dataset, tmp_path):
    keys = dict(pp=2, n_layer=5, subsequences=4, unit_order="subsequence", max_iters=2, alpha=0.5,
                gradient_accumulation_steps=2, solver="greedy")
    out = tmp_path / "out"
    assert pool(2).run(trained, argv(dataset, out, **keys), str(tmp_path / "console")) == [0, 0]
    for row in read_metrics(out / "metrics.jsonl"):
        assert 0 < row["bubble_s"] < row["step_s"] and 0 <= row["stall_s"] < row["step_s"]
    plan = json.loads((out / "plan.json").read_text())
    assert [one["layers"] for one in plan["stages"]] == [[0, 1, 2], [3, 4]]
    assert plan["stages"][0]["placement"] == plan["placement"] != plan["stages"][1]["placement"]
    assert (out / "pipeline.png").exists() and (out / "timeline.png").exists()
    said = (tmp_path / "console0").read_text()
    for text in ("ranks       2: pp=2 dp=1 cp=1 tp=1; ", "activation  memo, stage 0 ",
                 "pipeline    2 stages of 3, 2 layers, 4 subsequences: bubble 1/8 = 12.5% of the "
                 "computing, 2 sequences follow each other\n",
                 "            0: layers 0 to 2 ", "            1: layers 3 to 4 ", "  bubble 0."):
        assert text in said, (text, said)


def test_the_bubble_is_told_of_several_stages_only(tmp_path, capsys):
    known = dict(iter=0, loss=1.0, lr=1.0, grad_norm=1.0, step_s=1.0, tokens=1, tgs=1.0)
    for more in ({}, dict(bubble_s=0.25)):
        stats, log = StepStats(**known, **more), ConsoleLogger(1, 0)
        assert ("bubble_s" in stats.as_dict()) == bool(more)
        log.log(stats)
        assert ("bubble 0.25 s" in capsys.readouterr().out) == bool(more)
