"""Record and replay: live blocks keep their bytes whatever is requested; a plan changes no bit of a run."""

import gc
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
import torch

import train
from memo.config.layout import Layout
from memo.errors import Unusable
from memo.memory.placement import Placement
from memo.planner import allocator
from memo.planner.allocator import Arena
from memo.planner.plan import Plan
from memo.run.rehearsal import rehearsed_requests, traced_requests
from memo.states.passes import Model
from memo.system.files import keep, ours_alone
from model import GPT
from tests.helpers import gpt_layer

CPU = torch.device("cpu")
OTHERS = [t.name for t in gpt_layer(64, 1).skeletal if t.group]


@pytest.fixture
def arena():
    arena = Arena(CPU, guard=True)
    yield arena
    arena.close()


def empty(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def three():
    """Two live at once, then a third."""
    a, b = empty(1000), empty(5000)
    where = [a.data_ptr(), b.data_ptr()]
    del a
    c = empty(300)
    return [*where, c.data_ptr()]


@pytest.mark.slow
def test_a_segment_is_recorded_once_and_then_gets_its_planned_addresses(arena):
    arena.run("piece", three)
    trace = arena.recorded()
    assert [f"{verb} {n}" for verb, _, n in trace.events] == [
        "begin 0", "malloc 1000", "malloc 5000", "free 1000", "malloc 300", "free 5000", "free 300", "end 0"]
    arena.run("piece", three)
    assert arena.recorded().events == ()  # once
    arena.replay(trace)
    plan = arena.plans[-1].plan
    offsets = [offset for _, offset in plan.segments["piece"]]
    first, second = arena.run("piece", three), arena.run("piece", three)
    assert first == second and [p - first[0] for p in first] == [o - offsets[0] for o in offsets]
    stats = arena.stats()
    assert stats.misses == 0 and stats.arena_bytes == plan.arena_bytes == plan.lower_bound == 1024 + 5056
    assert 0 <= stats.arena_bytes - stats.peak_bytes < 64
    assert stats.live_blocks == 0


def test_what_outlives_the_step_is_left_to_torch(arena):
    kept = []
    arena.run("piece", lambda: (kept.append(empty(64)), three()))
    arena.settle()
    plan = arena.plans[-1].plan
    assert plan.segments["piece"][0] == (64, None)
    arena.run("piece", lambda: (kept.append(empty(64)), three()))
    arena.run("piece", three)  # and need not come again
    assert arena.stats().misses == 0


def test_a_tensor_may_go_from_one_segment_to_another(arena):
    held = []

    def make():
        held.append(empty(4000))
        empty(100)

    def use():
        empty(3000)
        held.pop().fill_(1)
    for _ in range(3):
        arena.run("make", make)
        arena.run("use", use)
        arena.settle()
    assert arena.stats().misses == 0 and len(arena.plans) == 1
    assert arena.plans[0].plan.arena_bytes == 4032 + 3008


def test_a_miss_is_served_counted_and_reported_once(arena, capsys):
    arena.run("piece", three)
    arena.settle()
    before = arena.stats()
    for _ in range(3):
        arena.run("piece", lambda: (empty(77), three(), empty(99)))
    assert arena.stats().misses - before.misses == 6
    arena.settle()
    arena.settle()
    assert capsys.readouterr().err == (
        "warning: memory plan: piece: 77 bytes were requested where 1000 were planned; "
        "torch serves what the plan does not have\n")


class Memory:
    """A model of memory: every live tensor has a pattern of its own, looked at before it goes."""

    def __init__(self, rng):
        self.rng, self.live, self.number = rng, [], 0

    def malloc(self, nbytes):
        self.number += 1
        tensor = empty(nbytes).fill_(self.number % 251)
        self.live.append((tensor, self.number % 251))

    def free(self, i):
        tensor, pattern = self.live.pop(i % len(self.live))
        assert (tensor == pattern).all()

    def run(self, stream):
        for op, value in stream:
            if op == "malloc":
                self.malloc(value)
            elif self.live:
                self.free(value)


def random_stream(rng, n):
    return [("malloc", rng.choice((8, 100, 512, 4096, rng.randrange(1, 9000)))) if rng.random() < 0.55 else
            ("free", rng.randrange(100)) for _ in range(n)]


def mutated(rng, stream):
    stream = list(stream)
    for _ in range(min(len(stream) - 1, rng.randrange(1, 5))):
        i = rng.randrange(len(stream))
        change = rng.randrange(4)
        if change == 0:
            del stream[i]
        elif change == 1:
            stream.insert(i, random_stream(rng, 1)[0])
        elif change == 2:
            stream[i] = random_stream(rng, 1)[0]
        else:
            j = rng.randrange(len(stream))
            stream[i], stream[j] = stream[j], stream[i]
    return stream


@pytest.mark.slow
def test_every_live_block_keeps_its_bytes_whatever_is_requested():
    rng, misses = random.Random(0), 0
    for _ in range(150):
        arena, memory = Arena(CPU, guard=True), Memory(rng)
        streams = {f"segment {i}": random_stream(rng, rng.randrange(1, 60))
                   for i in range(rng.randrange(1, 4))}
        for step in range(4):
            for label, stream in streams.items():
                arena.run(label, memory.run, mutated(rng, stream) if step > 1 else stream)
                if rng.random() < 0.5:
                    memory.run(random_stream(rng, 5))  # outside
            if rng.random() < 0.7:
                while memory.live:
                    memory.free(0)
            arena.settle()
        misses += arena.stats().misses
        arena.close()  # blocks may be left: they keep the arena
        while memory.live:
            memory.free(0)
    assert misses > 500


@pytest.mark.slow
def test_the_guard_finds_blocks_that_overlap():
    """Built to trust its plan, the allocator would hand out overlapping blocks: the guard must not."""
    overlapping = Plan(8192, 8192, 64, "greedy", 0.0, {"piece": ((1000, 0), (5000, 512))}, ())
    for flags in ((), ("-DMEMO_TRUST_THE_PLAN", "-O0")):
        arena = Arena(CPU, guard=True, flags=flags)
        arena.lib.memo_reserve(arena.handle, 8192)
        arena.install(overlapping)
        if flags:
            with pytest.raises(RuntimeError, match="two live blocks of 5000 and 1000 bytes overlap"):
                arena.run("piece", lambda: (empty(1000), empty(5000)))
        else:
            arena.run("piece", lambda: (empty(1000), empty(5000)))
            assert arena.stats().misses == 1
        arena.close()


def test_two_arenas_and_another_thread_do_not_meet(arena):
    other, seen = Arena(CPU, guard=True), []
    for a in (arena, other):
        a.run("piece", three)
        a.settle()

    def inside():
        tensor = empty(1000)
        worker = threading.Thread(target=lambda: seen.append((other.run("piece", three), three())))
        worker.start()
        worker.join()
        return tensor.data_ptr()
    mine = arena.run("piece", inside)
    planned, outside = seen[0]
    assert planned == other.run("piece", three) and mine == arena.run("piece", three)[0]
    assert not set(planned) & set(outside) and arena.stats().misses == other.stats().misses == 0
    other.close()


def test_an_error_inside_ends_the_segment(arena):
    with pytest.raises(ZeroDivisionError):
        arena.run("piece", lambda: 1 / 0)
    before = arena.stats().requests
    empty(100)
    assert arena.stats().requests == before


def test_without_a_compiler_that_works_there_is_no_arena(tmp_path, monkeypatch):
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\necho this is no compiler >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    allocator.load_library.cache_clear()
    with pytest.raises(Unusable, match="g\\+\\+ failed: this is no compiler"):
        Arena(CPU)
    allocator.load_library.cache_clear()


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """(a library whose constructor leaves a file, that file)."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "x.cpp").write_text('#include <cstdio>\n__attribute__((constructor)) static void ran() '
                                  f'{{ std::fclose(std::fopen("{folder}/ran", "w")); }}\n')
    subprocess.run(["g++", "-shared", "-fPIC", str(folder / "x.cpp"), "-o", str(folder / "x.so")], check=True)
    return folder / "x.so", folder / "ran"


@pytest.fixture
def quick_compiler(tmp_path, monkeypatch):
    """A g++ that copies what was compiled before."""
    made = Path(os.readlink(allocator.library_of(allocator.cache_place()[0])._name))
    script = tmp_path / "bin" / "g++"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nfor last; do :; done\ncp {made} "$last"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return made.name


def no_home(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError


def another_users(path):
    os.chown(path, 65534, 65534)


PLANTS = {  # what the adversary does: to the cache folder, to the library in it, what is said
    "another user's library": (lambda folder, path: another_users(path), ""),
    "a library that the group can write": (lambda folder, path: path.chmod(0o770), ""),
    "a library without functions": (lambda folder, path: None, ""),
    "a damaged library": (lambda folder, path: path.write_bytes(b"not a library"), ""),
    "a disk that cannot be written": (
        lambda folder, path: shutil.rmtree(folder.parent) or folder.parent.touch(),
        "no cache folder can be made (File exists); set XDG_CACHE_HOME to a"),
    "a folder in the library's place": (lambda folder, path: (path.unlink(), path.mkdir()), ""),
    "a pipe in the library's place": (lambda folder, path: (path.unlink(), os.mkfifo(path)), ""),
    "a link in the library's place": (lambda folder, path: (path.unlink(), path.symlink_to("nowhere")), ""),
    "another user's folder": (lambda folder, path: another_users(folder),
                              "is no folder of this user; remove it, or set"),
    "a folder that all can write": (lambda folder, path: folder.chmod(0o777),
                                    "memo can be written by others; chmod 700 "),
    "a folder above that all can write": (lambda folder, path: folder.parent.chmod(0o777),
                                          "by others; chmod go-w"),
    "a link": (lambda folder, path: (folder.rename(folder.parent / "x"),
                                     folder.symlink_to(folder.parent / "x")),
               "memo is no folder of this user"),
    "no home": (None, "no cache folder can be made (Could not determine home directory.); "
                      "set XDG_CACHE_HOME to a")}


@pytest.mark.parametrize("plant", PLANTS)
def test_no_library_runs_that_another_could_have_written(tmp_path, monkeypatch, capfd, planted,
                                                         quick_compiler, plant):
    if "another user's" in plant and os.getuid() != 0:
        pytest.skip("only root can give a file away")
    change, said = PLANTS[plant]
    library, ran = planted
    temporary, cache = tmp_path / "tmp", tmp_path / "cache"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    if change is None:
        no_home(tmp_path, monkeypatch)
    folder = cache / "memo" if change else temporary / f"memo-{os.getuid()}"
    temporary.mkdir()
    folder.mkdir(parents=True, mode=0o700)
    path = folder / quick_compiler
    keep(library.read_bytes(), path)
    if change:
        path.chmod(0o700)
        change(folder, path)
    allocator.load_library.cache_clear()
    try:
        arena = Arena(CPU)
        arena.run("piece", three)
        assert arena.settle()
        arena.close()
    finally:
        allocator.load_library.cache_clear()
    assert ran.exists() == (plant == "a library without functions")  # which is the user's own
    ran.unlink(missing_ok=True)
    assert [p for p in temporary.iterdir() if p != folder] == []
    err = capfd.readouterr().err
    assert said in err and err.count("\n") == bool(said)
    assert path.is_fifo() == ("a pipe" in plant) and path.is_symlink() == ("a link in" in plant)
    if not said and path.is_file():  # built again
        assert ours_alone(path.stat()) and path.stat().st_size > library.stat().st_size


def test_what_is_compiled_can_be_loaded_whatever_the_umask(tmp_path, monkeypatch, quick_compiler):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        (tmp_path / "new").mkdir(mode=0o700)
        allocator.library_of(tmp_path / "new")
    finally:
        os.umask(before)
    assert [p.name for p in (tmp_path / "new").iterdir()] == [quick_compiler]


def test_one_library_is_not_taken_for_another(tmp_path, planted, quick_compiler):
    """The loader goes by names, and a descriptor's number comes again."""
    keep(planted[0].read_bytes(), tmp_path / "own.so")
    with pytest.raises(AttributeError):
        allocator.open_library(tmp_path / "own.so")
    (tmp_path / "new").mkdir()
    assert allocator.library_of(tmp_path / "new").memo_open
    planted[1].unlink()


def test_a_closed_arena_leaves_its_segments_to_torch():
    arena = Arena(CPU)
    arena.run("piece", lambda: (three(), arena.close()))
    assert len(arena.run("piece", three)) == 3 and arena.stats() == (0,) * 5


def test_the_arena_grows_while_planned_blocks_are_in_use(arena):
    arena.run("small", lambda: empty(64))
    arena.settle()
    held = arena.run("small", lambda: empty(64).fill_(7))
    arena.run("large", lambda: (empty(5000), empty(9000)))
    assert arena.settle() and arena.stats().arena_bytes >= 9000
    new = arena.run("small", lambda: empty(64).fill_(8))
    assert (held == 7).all() and arena.stats().live_blocks == 1
    del held
    assert arena.stats().live_blocks == 1 and (new == 8).all() and arena.stats().misses == 0


def test_no_memory_for_the_arena_is_a_warning(arena, capsys):
    plan = Plan(2**60, 2**60, 64, "greedy", 0.0, {"piece": ((1000, 0),)}, ())
    with pytest.raises(Unusable, match="no memory for an arena of 1.074e\\+09 GiB"):
        arena.install(plan)
    arena.run("piece", three)
    assert arena.settle() and arena.stats().misses == 0


def test_segments_that_fail_or_nest(arena, capsys):
    def fails():
        empty(100)
        raise KeyError
    with pytest.raises(KeyError):
        arena.run("piece", fails)
    arena.run("piece", three)  # recorded as if nothing had been
    with pytest.raises(RuntimeError, match="segment 'inner' may not begin inside another one"):
        arena.run("outer", lambda: arena.run("inner", three))
    arena.run("piece", three)
    assert arena.settle() and list(arena.plans[-1].plan.segments) == ["piece"]
    arena.run("piece", three)
    assert arena.stats().misses == 0 and not capsys.readouterr().err


def test_threads_request_at_once():
    """Each with its arena, handing tensors to the others to free: every tensor keeps its bytes."""
    handed, errors = queue.SimpleQueue(), []

    def worker(seed):
        try:
            rng, arena = random.Random(seed), Arena(CPU, guard=True)
            for step in range(60):
                def work():
                    mine = [(n, empty(n).fill_(n % 251)) for n in (1000, 64, 3000, 500)]
                    handed.put(mine.pop(rng.randrange(4)))
                    return mine
                kept = arena.run("piece", work)
                if step < 3:
                    arena.settle()
                for n, tensor in [*kept, *(handed.get_nowait() for _ in range(min(1, handed.qsize())))]:
                    assert (tensor == n % 251).all()
        except queue.Empty:
            pass
        except BaseException as e:
            errors.append(e)
    threads = [threading.Thread(target=worker, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.slow
def test_a_closed_arenas_memory_goes_with_its_last_tensor():
    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    arena = Arena(CPU)
    n = 2**28
    arena.run("piece", lambda: empty(n).fill_(1))
    arena.settle()
    tensor = []
    arena.run("piece", lambda: tensor.append(empty(n).fill_(1)))
    before = resident()
    arena.close()
    assert resident() > before - n // 2 and (tensor[0] == 1).all()
    tensor.clear()
    assert resident() < before - n // 2


@pytest.mark.slow
def test_without_a_compiler_training_goes_on_without_the_plan(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    allocator.load_library.cache_clear()
    with pytest.raises(Unusable, match=r"there is no C\+\+ compiler"):
        Arena(CPU)
    assert main(dataset, tmp_path / "out", "--max_iters=2") == 0
    out = capsys.readouterr()
    assert ("warning: memory_plan=bilevel is not to be had: there is no C++ compiler, g++ (No such file or "
            "directory); training goes on without it") in out.err and "memory_plan.png" not in out.out
    assert [r["transient_peak_bytes"] for r in metrics(tmp_path / "out")] == [None, None]


# --- a model and a run ---

def model_and_arena(dtype=torch.float32, T=2048, L=4, kept=1024, **kw):
    cfg = Layout(n_layer=L, n_embd=64, n_head=2, vocab_size=300, block_size=T, **kw)
    model = Model(GPT, cfg, CPU, dtype)
    model.params.normal_(0, 0.02)
    model.reserve(1, T, Placement(L, 2, T, dict.fromkeys(OTHERS, kept)))
    return model, Arena(CPU, guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("kw", [dict(), dict(bias=True, position="learned"), dict(dtype=torch.bfloat16)])
def test_the_rehearsal_makes_the_requests_of_a_real_step(kw):
    model, arena = model_and_arena(**kw)
    rehearsed = rehearsed_requests(model, arena).segments
    assert not model.grads.any()
    real = Arena(CPU)
    model.arena = real
    tokens = torch.randint(300, (1, 2048))
    model.forward(tokens, tokens, scale=1.0)
    model.backward()
    model.forward(tokens, tokens)
    recorded = real.recorded().segments
    assert list(recorded) == list(rehearsed) and len(recorded) == 2 + 3 * 4 - 1 + 2
    for label, events in recorded.items():
        assert [(verb, n) for verb, _, n in events] == [(verb, n) for verb, _, n in rehearsed[label]], label
    model.close()


@pytest.mark.slow
@pytest.mark.parametrize("kw", [dict(), dict(bias=True, position="learned"), dict(dtype=torch.bfloat16)])
def test_the_traced_step_is_the_recorded_one_but_for_kernel_workspaces(kw):
    dtype = kw.get("dtype", torch.float32)
    model, arena = model_and_arena(**kw)
    recorded = rehearsed_requests(model, arena).segments
    traced = traced_requests(lambda device: Model(GPT, model.cfg, device, dtype), 1, 2048,
                             model.swap.missing, "cpu").segments
    assert list(traced) == list(recorded)
    for label in traced:
        rest = [n for verb, _, n in recorded[label] if verb == "malloc"]
        workspaces = []
        for n in (n for verb, _, n in traced[label] if verb == "malloc"):  # in the same order
            while rest and rest[0] != n:
                workspaces.append(rest.pop(0))
            assert rest.pop(0) == n, label
        if dtype == torch.float32 and "recompute" in label:
            assert not workspaces + rest
    model.close()


def main(dataset, out, *argv):
    return train.main([f"--dataset={dataset}", f"--out_dir={out}", "--n_layer=4", "--n_head=2", "--n_embd=64",
                       "--alpha=0.5", "--block_size=1024", "--warmup_iters=2", "--device=cpu",
                       "--eval_interval=0", "--memory_plan_check=true", *argv])


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_eight_steps_are_bitwise_those_without_the_plan(dataset, tmp_path, capsys, draw_picture,
                                                        monkeypatch):
    assert main(dataset, tmp_path / "off", "--memory_plan=off", "--memory_plan_check=false",
                "--max_iters=8") == 0
    monkeypatch.setattr("memo.run.report.draw_picture", draw_picture)
    assert main(dataset, tmp_path / "plan", "--max_iters=8", "--eval_interval=4", "--eval_iters=1") == 0
    assert "memory plan" not in capsys.readouterr().err  # no miss
    off, planned = metrics(tmp_path / "off"), metrics(tmp_path / "plan")
    assert [(r["loss"], r["grad_norm"]) for r in off] == [(r["loss"], r["grad_norm"]) for r in planned]
    plans = json.loads((tmp_path / "plan" / "plan.json").read_text())["memory_plans"]
    assert {r["transient_peak_bytes"] for r in planned[2:]} == {plans[0]["arena_bytes"]}
    assert [list(plan["segments"])[0] for plan in plans] == ["1x1024/embedding", "clip"]
    assert (tmp_path / "plan" / "memory_plan.png").stat().st_size > 10_000


@pytest.mark.slow
def test_where_no_layer_can_be_rehearsed_its_requests_are_traced(dataset, tmp_path, monkeypatch, capsys):
    assert main(dataset, tmp_path / "recorded", "--max_iters=3") == 0
    assert "warning" not in capsys.readouterr().err

    def no_room(model, arena):
        if isinstance(arena, Arena):
            arena.run("half", empty, 100)
            raise torch.OutOfMemoryError("no room")
        return rehearsed_requests(model, arena)
    monkeypatch.setattr("memo.run.reserve.rehearsed_requests", no_room)
    assert main(dataset, tmp_path / "traced", "--max_iters=3") == 0
    err = capsys.readouterr().err
    assert "its requests are traced, not recorded" in err
    assert "1x1024/forward 0:" in err  # attention's workspace
    ours, theirs = ([r["loss"] for r in metrics(tmp_path / name)] for name in ("recorded", "traced"))
    assert ours == theirs
    recorded, traced = (json.loads((tmp_path / name / "plan.json").read_text())["memory_plans"][0]
                        for name in ("recorded", "traced"))
    assert (list(recorded["segments"]) == list(traced["segments"])
            and traced["arena_bytes"] <= recorded["arena_bytes"])


@pytest.mark.slow
def test_a_stop_by_signal_and_a_resume_change_nothing(dataset, tmp_path, monkeypatch):
    assert main(dataset, tmp_path / "whole", "--max_iters=8") == 0
    step = train.Optimizer.step

    def step_and_signal(self, lr):
        step(self, lr)
        if self.steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(train.Optimizer, "step", step_and_signal)
    assert main(dataset, tmp_path / "parts", "--max_iters=8") == 128 + signal.SIGTERM
    assert main(dataset, tmp_path / "parts", "--max_iters=8", "--init_from=resume") == 0
    whole, parts = ([r["loss"] for r in metrics(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == parts


@pytest.mark.slow
def test_shapes_in_turns_evaluations_and_another_alpha_change_nothing(capsys):
    """Two equal models, one of them planned: a smaller last batch, lengths in turns, evaluations, alphas."""
    model, arena = model_and_arena()
    twin, _ = model_and_arena()
    twin.params.copy_(model.params)
    arena.replay(rehearsed_requests(model, arena))
    model.arena = arena
    generator = torch.Generator().manual_seed(0)
    for step, (B, T, kept) in enumerate([(1, 2048, 1024), (2, 512, 512), (1, 512, 256), (1, 2048, 1024),
                                         (2, 512, 512), (1, 2048, 256), (1, 2048, 256), (1, 512, 256)]):
        tokens, targets = torch.randint(300, (2, B, T), generator=generator)
        losses = []
        for m in (model, twin):
            m.reserve(B, T, Placement(4, 2, B * T, dict.fromkeys(OTHERS, kept)))
            losses.append([m.forward(targets, tokens).item(), m.forward(tokens, targets, scale=1.0).item()])
            m.backward()
            losses[-1].append(m.forward(tokens, tokens).item())
        assert losses[0] == losses[1] and torch.equal(model.grads, twin.grads), step
        arena.settle()
    assert len(arena.plans) == 3  # one a shape
    assert arena.stats().arena_bytes == max(plan.arena_bytes for _, plan in arena.plans)
    misses = capsys.readouterr().err.splitlines()
    assert misses and all("1x2048/recompute" in line for line in misses)  # only of the other alpha
    assert arena.stats().live_blocks == 0
    for m in (model, twin, arena):
        m.close()
