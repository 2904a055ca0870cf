"""Checkpoints: what is saved is what is restored, and no kill, full disk or flipped bit goes unnoticed."""

import itertools
import multiprocessing
import os
import random
import resource
import signal
import time
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from memo import checkpoint
from memo.checkpoint import CheckpointError
from memo.config import Config
from memo.flat import views
from memo.optim import Optimizer
from model import GPT, initial_weights

CFG = Config(n_layer=2, n_head=2, n_embd=32, block_size=24, vocab_size=200, bias=True)
LARGER = replace(CFG, n_embd=128)
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, torch.bfloat16]


def fresh(cfg=CFG, dtype=torch.float32, device="cpu", seed=0):
    model = GPT(cfg, device, dtype)
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
    return [t.clone() for t in (model.params, optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.steps)]


def saved(out_dir, steps=3, **kwargs):
    model, optimizer = fresh(**kwargs)
    train(model, optimizer, range(steps))
    checkpoint.save(out_dir, model, optimizer, model.cfg, steps)
    return model, optimizer


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- what is saved is what is restored ---

@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_run_is_the_run(tmp_path, device, dtype):
    model, optimizer = saved(tmp_path, dtype=dtype, device=device)
    before, noise = state(model, optimizer), torch.rand(5)
    wanted = train(model, optimizer, range(3, 6))

    ckpt = checkpoint.load(tmp_path)
    other = fresh(dtype=dtype, device=device, seed=1)
    train(*other, range(2))
    checkpoint.restore(ckpt, *other)
    assert (ckpt.iter, ckpt.config) == (3, asdict(CFG))
    assert same(state(*other), before)
    assert torch.equal(torch.rand(5), noise)
    assert train(*other, range(ckpt.iter, 6)) == wanted
    assert same(state(*other), state(model, optimizer))


def test_the_file_is_plain_safetensors(tmp_path):
    model, optimizer = saved(tmp_path)
    tensors = load_file(tmp_path / checkpoint.FILE)
    names = {f"{prefix}.{n}" for prefix in ("params", "exp_avg", "exp_avg_sq") for n in model.layout}
    assert tensors.keys() == names | {"steps", "rng.cpu", "crc32"}
    for prefix, flat in (("params", optimizer.master), ("exp_avg_sq", optimizer.exp_avg_sq)):
        assert all(torch.equal(tensors[f"{prefix}.{n}"], t) for n, t in views(model.layout, flat).items())
    assert tensors["steps"] == 3


def test_weights_alone_for_a_model_without_optimizer(tmp_path):
    trained, _ = saved(tmp_path)
    model = GPT(CFG, "cpu", torch.bfloat16, grads=False)
    checkpoint.restore(checkpoint.load(tmp_path), model)
    assert torch.equal(model.params, trained.params.bfloat16())


def test_rotary_positions_may_grow(tmp_path):
    trained, _ = saved(tmp_path)
    model, optimizer = fresh(replace(CFG, block_size=96, rope_theta=5e4))
    checkpoint.restore(checkpoint.load(tmp_path), model, optimizer)
    assert torch.equal(model.params, trained.params)


# --- kills and full disks while saving ---

def run_in_a_process_of_its_own(target, out_dir):
    process = multiprocessing.get_context("spawn").Process(target=target, args=(out_dir,))
    process.start()
    process.join(90)
    assert process.exitcode == 0


def train_forever(out_dir):
    model, optimizer = fresh(LARGER, seed=1)
    ckpt = checkpoint.load(out_dir)
    checkpoint.restore(ckpt, model, optimizer)
    for i in itertools.count(ckpt.iter):
        train(model, optimizer, [i])
        checkpoint.save(out_dir, model, optimizer, LARGER, i + 1)


def kill_twenty_times(out_dir):
    torch.set_num_threads(1)  # no thread pool: the process may fork
    saved(out_dir, steps=0, cfg=LARGER)
    delays, killed_while_saving = random.Random(0), 0
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            try:
                train_forever(out_dir)
            finally:
                os._exit(1)
        time.sleep(delays.uniform(0.02, 0.15))
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        ckpt = checkpoint.load(out_dir)
        killed_while_saving += len(list(out_dir.iterdir())) - 1
    assert killed_while_saving >= 1
    assert ckpt.iter >= 1
    model, optimizer = fresh(LARGER, seed=1)
    checkpoint.restore(ckpt, model, optimizer)
    unbroken = fresh(LARGER)
    train(*unbroken, range(ckpt.iter))
    assert same(state(model, optimizer), state(*unbroken))
    checkpoint.save(out_dir, model, optimizer, LARGER, ckpt.iter)
    assert os.listdir(out_dir) == [checkpoint.FILE]


def test_kills_at_any_moment_leave_a_whole_checkpoint_and_the_same_run(tmp_path):
    run_in_a_process_of_its_own(kill_twenty_times, tmp_path)


def fill_the_disk(out_dir):
    model, optimizer = saved(out_dir)
    before = (out_dir / checkpoint.FILE).read_bytes()
    train(model, optimizer, [3])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    message = r"^.*ckpt\.safetensors cannot be written \(File too large\); the previous one is whole; free some space.*$"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(out_dir, model, optimizer, CFG, 4)
    assert os.listdir(out_dir) == [checkpoint.FILE]
    assert (out_dir / checkpoint.FILE).read_bytes() == before
    assert checkpoint.load(out_dir).iter == 3
    with pytest.raises(CheckpointError, match=r"cannot be written \(No such file or directory\); free"):
        checkpoint.save(out_dir / "nowhere", model, optimizer, CFG, 4)


def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path):
    run_in_a_process_of_its_own(fill_the_disk, tmp_path)


# --- files that cannot be right ---

@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("intact")
    saved(out_dir)
    return (out_dir / checkpoint.FILE).read_bytes()


def refused(out_dir, data, message):
    (out_dir / checkpoint.FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.load(out_dir)
    assert "\n" not in str(error.value)
    assert str(out_dir / checkpoint.FILE) in str(error.value)


def test_a_truncated_file_is_refused(tmp_path, intact):
    for size in (0, 4, 8, 100, len(intact) // 2, len(intact) - 8, len(intact) - 1):
        refused(tmp_path, intact[:size], "cannot be read")
    refused(tmp_path, intact + b"0", "cannot be read")


def test_every_flipped_bit_is_seen(tmp_path, intact):
    places = random.Random(0)
    head = 8 + int.from_bytes(intact[:8], "little")
    for place in [*(places.randrange(head) for _ in range(60)), *(places.randrange(len(intact)) for _ in range(60)),
                  intact.index(b'"iter": "3"') + 9, head, len(intact) - 1]:
        data = bytearray(intact)
        data[place] ^= 1 << places.randrange(8)
        refused(tmp_path, bytes(data), r"cannot be read|is corrupt \(its crc32 differs|format=.* must be")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist; train with --init_from=scratch"):
        checkpoint.load(tmp_path)
    save_file({"a": torch.zeros(3)}, tmp_path / checkpoint.FILE)
    with pytest.raises(CheckpointError, match="format=None must be 'memo 1'"):
        checkpoint.load(tmp_path)
    checkpoint.write(tmp_path / checkpoint.FILE, {}, {"format": "memo 2"})
    with pytest.raises(CheckpointError, match="format='memo 2' must be 'memo 1'"):
        checkpoint.load(tmp_path)


# --- checkpoints of another model ---

@pytest.mark.parametrize(("change", "message"), [
    (dict(vocab_size=300), r"params\.wte is \(256, 32\) in the checkpoint and \(384, 32\) in the model; "
                           r"give the run the checkpoint's vocab_size=200, not 300$"),
    (dict(vocab_size=201), r"is of another model; give the run the checkpoint's vocab_size=200, not 201$"),
    (dict(n_head=4), r"is of another model.*n_head=2, not 4$"),
    (dict(n_layer=3), r"params\.h\.2\.qkv_w is missing in the checkpoint and \(96, 32\) in the model.*n_layer=2, not 3$"),
    (dict(n_layer=1), r"params\.h\.1\.fc1_b is \(128,\) in the checkpoint and missing in the model.*n_layer=2, not 1$"),
    (dict(bias=False), r"params\.h\.0\.fc1_b is .*bias=True, not False$"),
    (dict(position="learned"), r"params\.wpe is missing in the checkpoint and \(24, 32\).*position=rope, not learned$"),
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


def test_a_missing_moment_is_named(tmp_path):
    model, optimizer = saved(tmp_path)
    tensors = load_file(tmp_path / checkpoint.FILE)
    del tensors["exp_avg.lnf_w"], tensors["crc32"]
    checkpoint.write(tmp_path / checkpoint.FILE, tensors, checkpoint.metadata(CFG, 3))
    with pytest.raises(CheckpointError, match=r"exp_avg\.lnf_w is missing in the checkpoint and \(32,\) in the model$"):
        checkpoint.restore(checkpoint.load(tmp_path), model, optimizer)
