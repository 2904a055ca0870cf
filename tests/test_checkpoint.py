"""Checkpoints: what is saved is restored, in any layout, no kill, full disk or flipped bit is missed."""

import contextlib
import errno
import itertools
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from memo.checkpoint import checkpoint, dcp
from memo.checkpoint.checkpoint import CheckpointError, Saver
from memo.checkpoint.manifest import CHECKPOINT_JSON, manifest_text, newest
from memo.checkpoint.shards import Unpickler, parse
from memo.config.config import as_keys
from memo.config.layout import Layout
from memo.memory.parameters import Piece, whole
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.axis import Axis
from model import GPT, initial_weights
from testing.ranks import PROCESSES, TIMEOUT_S

CFG = Layout(n_layer=2, n_head=2, n_embd=32, block_size=24, vocab_size=200, bias=True)
LARGER = replace(CFG, n_embd=128)
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, torch.bfloat16]


def fresh(cfg=CFG, dtype=torch.float32, device="cpu", seed=0):
    model = Model(GPT, cfg, device, dtype)
    optimizer = Optimizer(model, cfg)
    optimizer.load(initial_weights(cfg, seed, device))
    return model, optimizer


def train(model, optimizer, iters):
    """Losses of these iterations; the batch depends on the iteration only."""
    losses = []
    for i in iters:
        g = torch.Generator().manual_seed(i)
        batch = torch.randint(model.cfg.vocab_size, (2, 25), generator=g).to(model.device)
        losses.append(model.forward(batch[:, :-1], batch[:, 1:], scale=1.0).item())
        model.backward()
        optimizer.clip(1.0)
        optimizer.step(1e-3 * (1 + i % 3))
    return losses


def state(model, optimizer):
    return [t.clone() for t in (model.params, optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq,
                                optimizer.steps)]


def write(out_dir, pieces, iter, cfg=CFG, **keys):
    saver = Saver(out_dir, **keys)
    saver.save(pieces, as_keys(cfg), iter)
    saver.wait()


def saved(out_dir, steps=3, **kwargs):
    model, optimizer = fresh(**kwargs)
    train(model, optimizer, range(steps))
    write(out_dir, optimizer.pieces(saved=True), steps, model.cfg)
    return model, optimizer


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def contents(folder):
    return {f.name: f.read_bytes() for f in folder.iterdir()}


# --- what is saved is what is restored ---

@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_run_is_the_run(tmp_path, device, dtype):
    model, optimizer = saved(tmp_path, dtype=dtype, device=device)
    before = state(model, optimizer)
    wanted = train(model, optimizer, range(3, 6))

    ckpt = checkpoint.load(tmp_path)
    other = fresh(dtype=dtype, device=device, seed=1)
    train(*other, range(2))
    checkpoint.restore(ckpt, *other)
    other[1].publish()
    assert (ckpt.iter, ckpt.config, ckpt.path) == (3, as_keys(CFG), tmp_path / "ckpt" / "3")
    assert same(state(*other), before)
    assert train(*other, range(ckpt.iter, 6)) == wanted
    assert same(state(*other), state(model, optimizer))


def test_weights_alone_for_a_model_without_optimizer(tmp_path):
    trained, _ = saved(tmp_path)
    model = Model(GPT, CFG, "cpu", torch.bfloat16, grads=False)
    checkpoint.restore(checkpoint.load(tmp_path), model)
    assert torch.equal(model.params, trained.params.bfloat16())


def test_rotary_positions_may_grow(tmp_path):
    trained, _ = saved(tmp_path)
    model, optimizer = fresh(replace(CFG, block_size=96, rope_theta=5e4))
    checkpoint.restore(checkpoint.load(tmp_path), model, optimizer)
    optimizer.publish()
    assert torch.equal(model.params, trained.params)


@pytest.mark.slow
def test_the_newest_stay_and_none_is_written_twice(tmp_path, monkeypatch):
    _, optimizer = saved(tmp_path)
    removed, real = [], shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree",
                        lambda path, **keys: removed.append(path.name) or real(path, **keys))
    for name in ("7.tmp", "kept"):
        (tmp_path / "ckpt" / name).mkdir()
    write(tmp_path, optimizer.pieces(saved=True), 10, whole=3)
    assert {f.name for f in (tmp_path / "ckpt").iterdir()} == {"10", "3", "kept"}  # no step has followed 10
    before = contents(tmp_path / "ckpt" / "10")
    write(tmp_path, optimizer.pieces(saved=True), 10, replace(CFG, max_iters=99), whole=10)
    assert contents(tmp_path / "ckpt" / "10") == before
    # a folder that is not known as whole
    write(tmp_path, optimizer.pieces(saved=True), 10, replace(CFG, max_iters=99))
    assert contents(tmp_path / "ckpt" / "10") != before == contents(tmp_path / "ckpt" / "10.damaged")
    assert removed == ["7.tmp"]
    for iter, names in ((11, {"11", "10", "3"}), (12, {"12", "11", "10"}), (13, {"13", "12", "11"})):
        write(tmp_path, optimizer.pieces(saved=True), iter, keep=2, whole=iter - 1)
        assert {f.name for f in (tmp_path / "ckpt").iterdir()} == names | {"kept", "10.damaged"}
    assert [re.sub("[0-9a-f]{16}", "x", name) for name in removed[1:]] == [
        "3.x.tmp", "10.x.tmp"]  # half removed, they must not look whole
    assert checkpoint.latest(tmp_path) == tmp_path / "ckpt" / "13"
    for name in ("9.damaged", "12.damaged", "12.damaged1", "of.damaged"):
        (tmp_path / "ckpt" / name).mkdir()
    write(tmp_path, optimizer.pieces(saved=True), 14, keep=2, whole=13)
    damaged = {"12.damaged1", "12.damaged", "of.damaged"}
    assert {f.name for f in (tmp_path / "ckpt").iterdir()} == {"14", "13", "12", "kept"} | damaged


# --- pieces: saved in one layout, read in another ---

SHAPES = {"params.a": (7, 5), "params.b": (1, 9), "exp_avg.c": (13,), "exp_avg_sq.d": (6, 1),
          "exp_avg_sq.e": (40, 33)}


def full_tensors(seed):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def ranges(rows, columns, start, end):
    """[start, end) of a matrix as boxes (row, column, rows, columns): a part of a row, whole rows, a part."""
    while start < end:
        row, column = divmod(start, columns)
        n = (min(columns - column, end - start) if column or end - start < columns
             else (end - start) // columns * columns)
        yield row, column, -(-n // columns), min(n, columns)
        start += n


def cut(tensors, ways, seed):
    """The tensors as pieces on `ways` ranks: each is halved along a dimension, a half is a range a rank."""
    random_ = random.Random(seed)
    ranks = [[] for _ in range(ways)]
    for name, t in tensors.items():
        dim = random_.randrange(t.dim())
        at = random_.randint(0, t.shape[dim])
        for begin, part in ((0, t.narrow(dim, 0, at)), (at, t.narrow(dim, at, t.shape[dim] - at))):
            corner = [begin * (d == dim) for d in range(t.dim())]
            rows, columns = part.shape if part.dim() == 2 else (1, len(part))
            ends = sorted(random_.randint(0, part.numel()) for _ in range(ways - 1))
            for pieces, start, end in zip(ranks, [0, *ends], [*ends, part.numel()], strict=True):
                for *offsets, n, m in ranges(rows, columns, start, end):
                    box = part.view(rows, columns) if part.dim() == 1 else part
                    box = box[offsets[0]:offsets[0] + n, offsets[1]:offsets[1] + m]
                    offsets = offsets[-part.dim():]
                    pieces.append(Piece(name, tuple(t.shape),
                                        tuple(a + b for a, b in zip(corner, offsets, strict=True)),
                                        box if part.dim() == 2 else box[0]))
    return ranks


def read_back(ckpt, tensors, ways, seed):
    """Whether every rank of another layout gets its part of the tensors."""
    got = {name: torch.full_like(t, torch.nan) for name, t in tensors.items()}
    for pieces in cut(got, ways, seed):
        ckpt.read(pieces)
    return all(torch.equal(got[name], t) for name, t in tensors.items())


@pytest.mark.slow
def test_any_cutting_is_read_in_any_other(tmp_path):
    boxes = set()
    for seed in range(16):
        tensors = full_tensors(seed)
        pieces = sum(cut(tensors, 1 + seed % 4, seed), [])
        boxes |= {len([p for p in part if p.name == "exp_avg_sq.e"])
                  for part in cut(tensors, 1 + seed % 4, seed)}
        write(tmp_path, pieces, seed + 1)
        ckpt = checkpoint.load(tmp_path)
        assert all(read_back(ckpt, tensors, ways, seed + 100 * ways) for ways in (1, 3, 5))
        assert {f"params.{name}": t.tolist() for name, t in ckpt.tensors("params")} == {
            name: tensors[name].tolist() for name in ("params.a", "params.b")}
    assert boxes >= {2, 3, 4, 5, 6}  # boxes of a rank in the two halves of a matrix


def test_pieces_that_do_not_tile_are_refused(tmp_path):
    for start, found in ((4, 40), (6, 30)):
        pieces = [Piece("params.a", (7, 5), (row, 0), torch.zeros(n, 5))
                  for row, n in ((0, 5), (start, 7 - start))]
        with pytest.raises(CheckpointError,
                           match=rf"the pieces of params.a \(7, 5\) hold {found} elements, must be 35"):
            write(tmp_path, pieces, 1)
    assert os.listdir(tmp_path / "ckpt") == []


WORLD = 3


def a_rank(rank, out_dir):
    """Saves in parallel with the others; then one of them has a full disk, then only the commit fails."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    dist.init_process_group("gloo", init_method=f"file://{out_dir}/meeting", rank=rank, world_size=WORLD)
    ranks = Axis("ranks", WORLD, rank, dist.new_group(backend="gloo"))
    large = {"params.a": torch.zeros(300, 300)}
    for seed in range(6):
        write(out_dir, cut(full_tensors(seed), WORLD, seed)[rank], seed, ranks=ranks)
        dist.barrier()
        assert read_back(checkpoint.load(out_dir, rank, WORLD), full_tensors(seed), 2, seed + 100 + rank)
        dist.barrier()

    limits, saver = resource.getrlimit(resource.RLIMIT_FSIZE), Saver(out_dir, ranks, whole=5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]) if rank == 1 else limits)
    part = [Piece("params.a", (300, 300), (100 * rank, 0), large["params.a"][100 * rank:100 * rank + 100])]
    fails(lambda: saver.save(part, as_keys(CFG), 6), saver,
          r"ckpt/6 cannot be written \(File too large\); the previous one is whole")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    commit, saver.commit = saver.commit, saver.commit if rank else full
    fails(lambda: saver.save(part, as_keys(CFG), 7), saver,
          r"ckpt/7 cannot be written \(No space left on device\); the previous")
    dist.barrier()
    assert os.listdir(out_dir / "ckpt") == ["5"]
    assert read_back(checkpoint.load(out_dir, rank, WORLD), full_tensors(5), 4, 0)
    dist.barrier()
    saver.commit = commit
    saver.save(part, as_keys(CFG), 8)
    saver.wait()
    dist.destroy_process_group()


def full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fails(save, saver, message):
    """The error comes from wait(), in one line, once."""
    save()
    with pytest.raises(CheckpointError, match=f"^[^\n]*{message}[^\n]*$"):
        saver.wait()
    assert saver.thread is None
    saver.wait()


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_write_in_parallel_and_fail_together(tmp_path):
    ranks = [PROCESSES.Process(target=a_rank, args=(rank, tmp_path), daemon=True) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * WORLD
    assert torch.equal(dict(checkpoint.load(tmp_path).tensors("params"))["a"], torch.zeros(300, 300))
    folder = tmp_path / "ckpt" / "8"
    # every rank checks a part, all of them everything
    for name in sorted(contents(folder).keys() - {CHECKPOINT_JSON}):
        shutil.copytree(folder, folder.with_name("9"))
        stored = {k: v for k, v in json.loads((folder / CHECKPOINT_JSON).read_text()).items() if k != "crc32"}
        (folder.with_name("9") / CHECKPOINT_JSON).write_text(manifest_text(stored | dict(iter=9)))
        flip(folder.with_name("9") / name, 50)
        folder.rename(folder.with_name("8.away"))
        refusals = 0
        for rank in range(WORLD):
            try:
                checkpoint.load(tmp_path, rank, WORLD)
            except CheckpointError as e:
                refusals += f"{name} is corrupt" in str(e)
        assert refusals == (WORLD if name == ".metadata" else 1)
        shutil.rmtree(folder.with_name("9"))
        folder.with_name("8.away").rename(folder)


# --- training goes on while a checkpoint is saved ---

@pytest.mark.slow
def test_the_state_is_that_of_the_moment_of_the_call(tmp_path, monkeypatch):
    model, optimizer = fresh()
    train(model, optimizer, range(3))
    before, real = state(model, optimizer), dcp.Writer.write_data
    first, second = threading.Event(), threading.Event()
    gates = iter((first, second))  # a save whose files are all there removes the one before
    monkeypatch.setattr(dcp.Writer, "write_data", lambda *args: next(gates).wait(TIMEOUT_S) and real(*args))
    saver = Saver(tmp_path)
    saver.save(optimizer.pieces(saved=True), as_keys(CFG), 3)
    saver.copied()
    train(model, optimizer, range(3, 6))
    assert saver.thread.is_alive() and checkpoint.latest(tmp_path) is None
    after = state(model, optimizer)
    threading.Timer(0.2, first.set).start()
    saver.save(optimizer.pieces(saved=True), as_keys(CFG), 6)  # waits for the first
    assert first.is_set() and checkpoint.latest(tmp_path).name == "3"
    other = fresh(seed=1)
    for step, there in ((3, before), (6, after)):
        ckpt = checkpoint.load(tmp_path)
        checkpoint.restore(ckpt, *other)
        assert ckpt.iter == step and same(state(*other), there)
        second.set()
        saver.wait()
    assert saver.thread is None


@pytest.mark.parametrize("copies", [True, False])
def test_the_forward_and_backward_need_not_wait_for_the_states(copies, tmp_path, monkeypatch):
    """Only the optimizer's step waits for the copy, or where there is none for the disk."""
    model, optimizer = fresh()
    train(model, optimizer, range(3))
    before, go = state(model, optimizer), threading.Event()
    owner, name = (Saver, "copy") if copies else (dcp.Writer, "write_data")
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: go.wait(TIMEOUT_S) and real(*args))
    saver, batch = Saver(tmp_path, copies=copies), torch.zeros(1, 24, dtype=torch.int64)
    saver.save(optimizer.pieces(saved=True), as_keys(CFG), 3)
    model.forward(batch, batch, scale=1.0)
    model.backward()
    waits = threading.Thread(target=saver.copied)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    go.set()
    waits.join(TIMEOUT_S)
    assert not waits.is_alive()
    optimizer.clip(1.0)
    optimizer.step(1.0)
    saver.wait()
    other = fresh(seed=1)
    checkpoint.restore(checkpoint.load(tmp_path), *other)
    other[1].publish()
    assert same(state(*other), before) and not same(state(model, optimizer), before)


def test_a_copy_that_fails_is_a_failure_and_holds_nobody_up(tmp_path, monkeypatch):
    _, optimizer = fresh()

    def no_memory(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(Saver, "copy", no_memory)
    saver = Saver(tmp_path)
    saver.save(optimizer.pieces(saved=True), as_keys(CFG), 3)
    saver.copied()
    with pytest.raises(CheckpointError,
                       match=r"ckpt/3 cannot be written \(DefaultCPUAllocator: can't allocate"):
        saver.wait()


def test_a_failure_is_raised_once_and_the_next_save_may_succeed(tmp_path, monkeypatch):
    model, optimizer = saved(tmp_path)
    pieces, saver = optimizer.pieces(saved=True), Saver(tmp_path)
    with monkeypatch.context() as m:
        m.setattr(dcp.Writer, "write_data", full)
        saver.save(pieces, as_keys(CFG), 4)
        saver.thread.join()
    assert not saver.thread.is_alive()
    with pytest.raises(CheckpointError,
                       match=r"ckpt/4 cannot be written \(No space left on device\); the previous one"):
        saver.save(pieces, as_keys(CFG), 5)
    assert os.listdir(tmp_path / "ckpt") == ["3"]
    saver.save(pieces, as_keys(CFG), 5)
    saver.close()
    assert checkpoint.load(tmp_path).iter == 5


# --- kills and full disks while saving ---

def run_in_a_process_of_its_own(target, out_dir):
    process = PROCESSES.Process(target=target, args=(out_dir,))
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


def train_forever(out_dir):
    model, optimizer = fresh(LARGER, seed=1)
    ckpt = checkpoint.load(out_dir)
    checkpoint.restore(ckpt, model, optimizer)
    optimizer.publish()
    saver = Saver(out_dir)
    for i in itertools.count(ckpt.iter):
        train(model, optimizer, [i])
        saver.save(optimizer.pieces(saved=True), as_keys(LARGER), i + 1)
        saver.copied()


def saves(out_dir, since, pattern):
    """Whether there is a checkpoint of this name that was written to after `since`, in nanoseconds."""
    with contextlib.suppress(FileNotFoundError):  # it has another name now, or is gone
        return any(p.stat().st_mtime_ns > since for p in (out_dir / "ckpt").glob(pattern))


def kill_twelve_times(out_dir):
    torch.set_num_threads(1)  # no thread pool: the process may fork
    saved(out_dir, steps=0, cfg=LARGER)
    delays, killed_while_saving = random.Random(0), 0
    for n in range(12):
        began, pid = time.time_ns(), os.fork()
        if pid == 0:
            try:
                train_forever(out_dir)
            finally:
                os._exit(1)
        # the kill comes at any moment behind the beginning of a save, or its end
        while not saves(out_dir, began, "*.tmp" if n % 2 else "*[0-9]"):
            time.sleep(0.001)
        time.sleep(delays.uniform(0.0, 0.02 if n % 2 else 0.2))
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        for name in os.listdir(out_dir / "ckpt"):  # every number is whole, not the latest alone
            if name.isdecimal():
                shutil.copytree(out_dir / "ckpt" / name, out_dir / "alone" / "ckpt" / name)
                assert checkpoint.load(out_dir / "alone").iter == int(name)
                shutil.rmtree(out_dir / "alone")
        ckpt = checkpoint.load(out_dir)
        killed_while_saving += len([*(out_dir / "ckpt").glob("*.tmp")])
    assert killed_while_saving >= 1
    assert ckpt.iter >= 1
    model, optimizer = fresh(LARGER, seed=1)
    checkpoint.restore(ckpt, model, optimizer)
    optimizer.publish()
    unbroken = fresh(LARGER)
    train(*unbroken, range(ckpt.iter))
    assert same(state(model, optimizer), state(*unbroken))
    write(out_dir, optimizer.pieces(saved=True), ckpt.iter + 1, LARGER)
    numbers = {int(name) for name in os.listdir(out_dir / "ckpt")}  # a kill may leave one more
    assert numbers - {ckpt.iter - 1} == {ckpt.iter, ckpt.iter + 1}


@pytest.mark.slow
@pytest.mark.ranks
def test_kills_at_any_moment_leave_a_whole_checkpoint_and_the_same_run(tmp_path):
    run_in_a_process_of_its_own(kill_twelve_times, tmp_path)


def fill_the_disk(out_dir):
    model, optimizer = saved(out_dir)
    before = contents(out_dir / "ckpt" / "3")
    train(model, optimizer, [3])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    message = r"^.*ckpt/4 cannot be written \(File too large\); the previous one is whole; choose another.*$"
    with pytest.raises(CheckpointError, match=message):
        write(out_dir, optimizer.pieces(saved=True), 4)
    assert os.listdir(out_dir / "ckpt") == ["3"]
    assert contents(out_dir / "ckpt" / "3") == before
    assert checkpoint.load(out_dir).iter == 3
    checkpoint.FULL.add(os.strerror(errno.EFBIG))  # stands for a full disk; an older checkpoint makes room
    real, calls = Saver.write_files, []

    def full_once(self, folder, pieces):
        calls.append(sorted(filter(str.isdigit, os.listdir(out_dir / "ckpt"))))
        if len(calls) > 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        return real(self, folder, pieces)
    Saver.write_files = full_once
    (out_dir / "ckpt" / "2").mkdir()
    write(out_dir, optimizer.pieces(saved=True), 4, keep=2, whole=3)
    assert calls == [["2", "3"], ["3"]] and sorted(os.listdir(out_dir / "ckpt")) == ["3", "4"]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path):
    run_in_a_process_of_its_own(fill_the_disk, tmp_path)


# --- files that cannot be right ---

@pytest.fixture
def intact(tmp_path):
    saved(tmp_path)
    return tmp_path / "ckpt" / "3"


def flip(file, place, bit=0):
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << bit
    file.write_bytes(data)


def refused(folder, message):
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.load(folder.parents[1])
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_a_truncated_or_missing_file_is_named(intact):
    for name, whole_ in contents(intact).items():
        file, json = intact / name, name == CHECKPOINT_JSON
        for size in (0, 1, len(whole_) // 2, len(whole_) - 1):
            file.write_bytes(whole_[:size])
            why = "cannot be read" if json else f"is {size} bytes long, must be {len(whole_)}"
            refused(intact, f"{name} {why}")
        file.write_bytes(whole_ + b"0")
        refused(intact, f"{name} " + ("cannot be read" if json else "is .* bytes long, must be"))
        file.unlink()
        refused(intact, f"{name} " + ("cannot be read" if json else "is missing"))
        file.write_bytes(whole_)
    assert checkpoint.load(intact.parents[1]).iter == 3


@pytest.mark.slow
def test_every_flipped_bit_is_seen(intact):
    places = random.Random(0)
    for name, whole_ in contents(intact).items():
        for place in [0, len(whole_) - 1, *(places.randrange(len(whole_)) for _ in range(60))]:
            bit = places.randrange(8)
            flip(intact / name, place, bit)
            refused(intact, r"cannot be read|is corrupt \(its crc32")
            flip(intact / name, place, bit)
    assert checkpoint.load(intact.parents[1]).iter == 3


def test_other_formats_are_refused(tmp_path, intact):
    with pytest.raises(CheckpointError,
                       match="nowhere/ckpt holds no checkpoint; train with --init_from=scratch, or"):
        checkpoint.load(tmp_path / "nowhere")
    for stored, message in ((dict(format="memo 3"),
                             "format='memo 3' must be 'memo 2'; read it with the memo that wrote it"),
                            ({}, "is corrupt"), ([], "cannot be read")):
        (intact / CHECKPOINT_JSON).write_text(manifest_text(stored) if stored else str(stored))
        refused(intact, message)


@pytest.mark.slow
@pytest.mark.parametrize("changes,message", [
    (dict(iter=-7), "iter=-7 must be 3, the name of the folder"), (dict(iter="x"), "iter='x' must be 3"),
    (dict(iter=True), "iter=True must be 3"), (dict(iter=None), "iter=None must be 3"),
    (dict(config=[]), "config must be an object"),
    (dict(files=[]), r"files must be an object that names \.metadata"),
    (dict(files={}), r"files must be an object that names \.metadata"),
    *((dict(files={".metadata": [0, 0], name: [1, 1]}), "must be a plain name with bytes and crc32")
      for name in ("/dev/zero", "../3/.metadata", "", "..", "a/b", "a\0")),
    *((dict(files={".metadata": sizes}), "must be a plain name with bytes and crc32")
      for sizes in (None, 3, [1], [1, 2, 3], ["1", 2], [-1, 2], [1.0, 2], [True, 2])),
])
def test_a_resealed_manifest_is_checked(intact, changes, message):
    _, stored = newest(intact.parents[1])
    (intact / CHECKPOINT_JSON).write_text(manifest_text(stored | changes))
    refused(intact, message)


def test_a_save_whose_folder_cannot_be_listed_has_failed(tmp_path, monkeypatch):
    _, optimizer = saved(tmp_path)

    def fails(*args):
        raise OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(checkpoint, "latest", fails)
    monkeypatch.setattr(dcp, "write", fails)
    with pytest.raises(CheckpointError, match=r"ckpt/5 cannot be written \(Input/output error\); choose"):
        write(tmp_path, optimizer.pieces(saved=True), 5)


def test_a_checkpoint_that_somebody_removed_is_written_again(tmp_path):
    _, optimizer = saved(tmp_path)
    shutil.rmtree(tmp_path / "ckpt")
    write(tmp_path, optimizer.pieces(saved=True), 3, whole=3)
    assert checkpoint.load(tmp_path).iter == 3


def test_a_disk_at_fault_is_no_damage(intact, monkeypatch):
    def fails(*args):
        raise OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(checkpoint, "crc32", fails)
    with pytest.raises(CheckpointError,
                       match=r"cannot be read \(Input/output error\); try again, or rename") as e:
        checkpoint.load(intact.parents[1])
    assert not isinstance(e.value, checkpoint.Damaged)


def test_a_link_to_nowhere_is_no_checkpoint(intact):
    (intact.parent / "9").symlink_to("/nonexistent")
    assert checkpoint.read_newest(intact.parents[1], lambda ckpt: ckpt.iter) == 3


def test_files_without_end_are_refused(intact):
    os.rename(intact / ".metadata", intact / "aside")
    os.mkfifo(intact / ".metadata")
    refused(intact, r"\.metadata cannot be read \(is no regular file\)")
    (intact / CHECKPOINT_JSON).unlink()
    (intact / CHECKPOINT_JSON).symlink_to("/dev/zero")
    refused(intact, r"checkpoint\.json cannot be read \(is no regular file\)")


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, intact, capsys):
    _, optimizer = fresh()
    write(tmp_path, optimizer.pieces(saved=True), 5, keep=2)
    flip(tmp_path / "ckpt" / "5" / "__0_0.distcp", 2000)
    assert checkpoint.read_newest(tmp_path, lambda ckpt: ckpt.iter) == 3
    err = capsys.readouterr().err
    assert re.fullmatch(r"warning: checkpoint passed over: \S*/5/__0_0.distcp is corrupt \(its .*\n", err)
    flip(intact / CHECKPOINT_JSON, 20)
    with pytest.raises(CheckpointError, match="5/__0_0.distcp is corrupt"):
        checkpoint.read_newest(tmp_path, lambda ckpt: ckpt.iter)
    shutil.rmtree(intact)
    capsys.readouterr()
    with pytest.raises(CheckpointError, match="5/__0_0.distcp is corrupt"):  # said once
        checkpoint.read_newest(tmp_path, lambda ckpt: ckpt.iter)
    assert not capsys.readouterr().err


def test_a_checkpoint_that_goes_while_it_is_read_is_no_error(tmp_path, intact, capsys):
    """The run beside the reader saves twice and removes what the reader has open."""
    _, optimizer = fresh()
    seen = []

    def read(ckpt):
        if not seen:
            write(tmp_path, optimizer.pieces(saved=True), 4, whole=3)
            write(tmp_path, optimizer.pieces(saved=True), 5, whole=4)
        seen.append(ckpt.iter)
        return dict(ckpt.tensors("params"))
    assert checkpoint.read_newest(tmp_path, read) and seen == [3, 5]
    assert not capsys.readouterr().err


class Evil:
    """Makes the file `path` when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def put_metadata(folder, data):
    """`data` as the metadata of an intact checkpoint."""
    (folder / ".metadata").write_bytes(data)
    _, stored = newest(folder.parents[1])
    stored["files"][".metadata"] = [len(data), checkpoint.crc32(folder / ".metadata")]
    (folder / CHECKPOINT_JSON).write_text(manifest_text(stored))


def test_foreign_metadata_executes_nothing(tmp_path, intact):
    made = tmp_path / "made"
    evil = pickle.dumps(Evil(made))
    pickle.loads(evil)
    made.unlink()  # it would work
    good = (intact / ".metadata").read_bytes()
    for data, message in ((evil, "a NoneType stands where a list must be"),
                          (pickle.dumps(torch.Size([3])), "a NoneType stands where a list must be"),
                          (b"", "it is not a pickle of a checkpoint"), (b"no pickle", "it is not a pickle"),
                          (b"\x80\x04]r\xff\xff\xff\x1f.", "a list stands where a Made must be"),
                          (good.replace(b"__0_0.distcp", b"../../secret"),
                           "'../../secret' is no file of this checkpoint")):
        put_metadata(intact, data)
        refused(intact, rf"\.metadata cannot be read \({message}")
        assert not made.exists()


def made(module, name, state):
    """The opcodes that make an object of a class without arguments."""
    return b"c%s\n%s\n)\x81%sb" % (module, name, state)


def bombs():
    """Pickles of few bytes that stand for very much: tuples nested 40 times, each twice the one before, as a
    key, a value, a name of a class, a file, a tensor's name; and a list in itself."""
    deep = b")" + b"2\x86" * 40
    shared = b")" + b"q\x00h\x00\x86" * 40
    meta, files = b"torch.distributed.checkpoint.metadata", b"torch.distributed.checkpoint.filesystem"
    for tuples in (deep, shared):
        yield b"\x80\x02}" + tuples + b"K\x01s."
        yield b"\x80\x02" + tuples + tuples + b"\x93."
        for key, value in ((tuples, b"K\x01"), (b"K\x01", tuples)):
            inner = b"(X\x0c\x00\x00\x00storage_data}" + key + value + b"s"
            yield b"\x80\x02" + made(meta, b"Metadata", b"}" + inner + b"u") + b"."
        place = made(files, b"_StorageInfo", b"}(X\x06\x00\x00\x00offsetK\x00X\x06\x00\x00\x00lengthK\x01"
                     b"X\x0d\x00\x00\x00relative_path" + tuples + b"u")
        index = made(meta, b"MetadataIndex", b"}X\x03\x00\x00\x00fqn" + tuples + b"s")
        inner = b"}X\x0c\x00\x00\x00storage_data}" + index + place + b"ss"
        yield b"\x80\x02" + made(meta, b"Metadata", inner) + b"."
    yield b"\x80\x02" + b"]q\x00" + b"h\x00a" * 10 + b"."  # a list in itself
    yield b"\x80\x04" + b"\x94" * 1000 + b"."


@pytest.mark.parametrize("data", [*bombs()])
def test_a_pickle_takes_work_in_proportion_to_its_bytes(intact, data):
    """`refused` in a moment: they would take 2**40 steps."""
    put_metadata(intact, data)
    began = time.process_time()
    refused(intact, r"\.metadata cannot be read \(")
    assert time.process_time() - began < 2


def put_shard(folder, change):
    """The shard of an intact checkpoint, changed."""
    shard = folder / "__0_0.distcp"
    shard.write_bytes(change(shard.read_bytes()))
    _, stored = newest(folder.parents[1])
    stored["files"][shard.name] = [shard.stat().st_size, checkpoint.crc32(shard)]
    (folder / CHECKPOINT_JSON).write_text(manifest_text(stored))


@pytest.mark.parametrize("change", [
    lambda data, pkl: data.replace(pkl, (b"\x80\x02})" + b"2\x86" * 40 + b"K\x01s.").ljust(len(pkl), b".")),
    lambda data, pkl: data.replace(pkl, pkl.replace(b"FloatStorage", b"ByteStorage\n")),
    lambda data, pkl: data.replace(b"PK\x01\x02\0\0\0\0\x08\x08\0\0", b"PK\x01\x02\0\0\0\0\x08\x08\x08\0"),
    lambda data, pkl: data.replace(b"PK\6\6", b"PK\6\7"),
    lambda data, pkl: data.replace(b"archive/data/0", b"archive/data/1"),
    lambda data, pkl: data.replace(b"cpuq\x04K", b"cpuq\x04L"),
], ids=["shared tuples", "another type", "compressed", "no zip", "no data", "an opcode"])
def test_a_shard_takes_work_in_proportion_to_its_bytes(tmp_path, change):
    write(tmp_path, [whole("params.a", torch.arange(3.0))], 0)
    folder = tmp_path / "ckpt" / "0"
    data = (folder / "__0_0.distcp").read_bytes()
    start = data.index(b"\x80\x02")
    pkl = data[start:data.index(b"Rq\x0b.") + 4]
    put_shard(folder, lambda data: change(data, pkl))
    with pytest.raises(CheckpointError, match="holds something that is no tensor; nothing of it was run"):
        dict(checkpoint.load(tmp_path).tensors("params"))


def test_a_tensor_is_read_however_it_lies_in_its_shard(tmp_path):
    """Transposed, of no dimension, a part of a larger one; cut anywhere."""
    a = torch.arange(24.0).reshape(4, 6)
    pieces = [Piece("params.a", (6, 4), (0, 0), a.t()[:2]), Piece("params.a", (6, 4), (2, 0), a.t()[2:]),
              whole("params.b", torch.tensor(7.0)), whole("params.c", torch.arange(300.0)[100:200])]
    write(tmp_path, pieces, 0)
    ckpt = checkpoint.load(tmp_path)
    for rows, columns in ((slice(0, 6), slice(0, 4)), (slice(1, 4), slice(1, 3)), (slice(5, 6), slice(0, 1))):
        wanted = a.t()[rows, columns]
        got = torch.full(wanted.shape, -1.0)
        ckpt.read([Piece("params.a", (6, 4), (rows.start, columns.start), got)])
        assert got.equal(wanted)
    stored = dict(checkpoint.load(tmp_path).tensors("params"))
    assert stored["b"] == 7 and stored["c"].equal(torch.arange(300.0)[100:200])


def test_torch_reads_what_memo_writes(tmp_path):
    _, optimizer = saved(tmp_path)
    mine = checkpoint.load(tmp_path)
    theirs = {name: torch.empty(shape) for name, (shape, _) in mine.stored.items()}
    torch.distributed.checkpoint.load(theirs, checkpoint_id=mine.path, no_dist=True)
    for name, tensor in theirs.items():
        got = torch.empty_like(tensor)
        mine.read([whole(name, got)])
        assert got.equal(tensor) and tensor.any()


class EvilTensor(torch.Tensor):
    def __reduce_ex__(self, protocol):
        return Path.touch, (Path(os.environ["MADE"]),)


def test_foreign_tensors_execute_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MADE", str(tmp_path / "made"))
    write(tmp_path, [whole("params.a", torch.zeros(3).as_subclass(EvilTensor))], 0)
    with pytest.raises(CheckpointError,
                       match=r"^\S*ckpt/0 holds something that is no tensor; nothing of it was run[^\n]*"):
        dict(checkpoint.load(tmp_path).tensors("params"))
    assert not (tmp_path / "made").exists()


# --- checkpoints of another model ---

@pytest.mark.slow
@pytest.mark.parametrize(("change", "message"), [
    (dict(vocab_size=300), r"params\.wte is \(256, 32\) in the checkpoint and \(384, 32\) in the model; "
                           r"give the run the checkpoint's vocab_size=200, not 300$"),
    (dict(vocab_size=201), r"is of another model; give the run the checkpoint's vocab_size=200, not 201$"),
    (dict(n_head=4), r"is of another model.*n_head=2, not 4$"),
    (dict(n_layer=3),
     r"params\.h\.2\.q_w is missing in the checkpoint and \(32, 32\) in the model.*n_layer=2, not 3$"),
    (dict(n_layer=1),
     r"params\.h\.1\.q_w is \(32, 32\) in the checkpoint and missing in the model.*n_layer=2, not 1$"),
    (dict(bias=False), r"params\.h\.0\.q_b is .*bias=True, not False$"),
    (dict(position="learned"),
     r"params\.wpe is missing in the checkpoint and \(24, 32\).*position=rope, not learned$"),
])
def test_a_checkpoint_of_another_model_changes_nothing(tmp_path, change, message):
    saved(tmp_path)
    other = fresh(replace(CFG, **change), seed=1)
    train(*other, range(1))
    before, ckpt = state(*other), checkpoint.load(tmp_path)
    for optimizer in (other[1], None):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.restore(ckpt, other[0], optimizer)
    assert same(state(*other), before)


def test_a_checkpoint_that_is_older_than_a_key_has_its_default(tmp_path):
    saved(tmp_path)
    ckpt, younger = checkpoint.load(tmp_path), ("n_kv_head", "norm", "mlp", "tie_embeddings", "rope_scaling")
    ckpt = replace(ckpt, config={k: v for k, v in ckpt.config.items() if k not in younger})
    checkpoint.restore(ckpt, *fresh(CFG, seed=1))


def test_a_missing_moment_is_named(tmp_path):
    model, optimizer = fresh()
    write(tmp_path, [p for p in optimizer.pieces(saved=True) if p.name != "exp_avg.lnf_w"], 3)
    with pytest.raises(CheckpointError,
                       match=r"exp_avg\.lnf_w is missing in the checkpoint and \(32,\) in the model$"):
        checkpoint.restore(checkpoint.load(tmp_path), model, optimizer)


def test_a_pickle_is_read_by_the_listed_opcodes_alone_and_whole():
    data = pickle.dumps(([1, 300, 70000, 2**40, None, True], "text", ("a", "b", "c", "d")), 2)
    assert parse(data) == ([1, 300, 70000, 2**40, None, True], "text", ("a", "b", "c", "d"))
    for n in range(len(data)):
        with pytest.raises(pickle.UnpicklingError):
            parse(data[:n])
    for code in range(256):
        if code not in Unpickler.dispatch:
            with pytest.raises(pickle.UnpicklingError):
                parse(bytes([code]) + b"\x01\x00\x00\x00\x00\x00\x00\x00a.")
