"""What a run holds more than once is compared at every save: a bit that differs on one rank stops the run."""

import re
import socket

import pytest
import torch

import train
from memo.checkpoint import checkpoint
from memo.errors import BadState
from memo.states import optim
from memo.states.optim import Optimizer, digest
from testing.ranks import pool
from tests.runs import IN_ORDER, UNTIED, argv, here

KEYS = dict(save_interval=2, eval_interval=0, memory_plan="off")
HOST = rf"\({re.escape(socket.gethostname())}\)"


def views(optimizer, where, name):
    """What this rank holds of a parameter, flat: of `params` as the model has it, or of a state."""
    p = optimizer.model.layout[name]
    optimizer.model.settle()
    if where == "params":
        k = next(i for i, (start, end) in enumerate(optimizer.model.buckets) if start <= p.offset < end)
        return optimizer.model.bucket_params[k][p.offset - optimizer.model.buckets[k][0]:]
    [r] = optimizer.shard_of(p)
    return getattr(optimizer, where)[r.shard]


def flip(optimizer, where, name):
    """A bit that rounding to bfloat16 keeps."""
    values = views(optimizer, where, name)[1:2]
    if values.dtype == torch.float32:
        values.view(torch.int32).bitwise_xor_(1 << 20)
    else:
        values.view(torch.int16).bitwise_xor_(1 << 4)


def flipped(host, argv, rank, steps, where, name):
    """here(), and behind the update that completes so many steps a bit is flipped on one rank."""
    real = Optimizer.step

    def step(self, lr):
        real(self, lr)
        self.model.settle()  # a host's step may be under way
        if int(self.steps) == steps and host.rank == rank:
            flip(self, where, name)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Optimizer, "step", step)
        try:
            return here(host, argv)
        except BadState as e:
            return str(e)


# --- digests ---

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_is_another_one_with_any_bit_and_in_any_other_order(dtype, monkeypatch):
    monkeypatch.setattr(optim, "CHUNK", 7)
    t = torch.randn(23).to(dtype)
    seen, bits = {digest(t, dtype)}, 8 * dtype.itemsize
    for at in (0, 6, 7, 22):
        for bit in range(bits):
            other = t.clone()
            number = 1 << bit if bit < bits - 1 else -1 << bit
            other.view(torch.int32 if bits == 32 else torch.int16)[at] ^= number
            seen.add(digest(other, dtype))
    assert len(seen) == 1 + 4 * bits
    swapped = t[[1, 0, *range(2, 23)]], t[[7, *range(1, 7), 0, *range(8, 23)]], t.flip(0)
    assert len(seen | {digest(s, dtype) for s in swapped}) == len(seen) + 3
    assert digest(t.float(), dtype) == digest(t, dtype)
    assert digest(torch.zeros(2)) != digest(-torch.zeros(2))


# --- ranks ---

@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("ranks,keys,rank,where,name,told", [
    (2, {}, 1, "params", "h.2.fc1_w", "h.2.fc1_w"),  # gathered by dp
    (2, dict(cp=2, dtype="bfloat16"), 0, "params", "wpe", "wpe"),
    (2, dict(states="sharded"), 1, "params", "wte", "wte"),  # of what stays
    (2, dict(dtype="bfloat16"), 1, "master", "wte", r"wte\[\d+:\d+\] and its master weights"),
    (2, dict(tp=2), 1, "exp_avg", "h.1.ln1_w", r"exp_avg\.h\.1\.ln1_w\[0:\d+\]"),  # norms
    (2, dict(tp=2, tensor_parallel="metp", bias="false", position="rope"), 1, "exp_avg_sq", "lnf_w",
     r"exp_avg_sq\.lnf_w\[0:\d+\]"),
    (4, dict(tp=4, n_kv_head=2), 3, "exp_avg", "h.1.k_w", r"exp_avg\.h\.1\.k_w of tp rank 2\[0:\d+\]"),
    (2, dict(tp=2, optimizer_device="cpu"), 1, "master", "h.3.ln2_w", r"params\.h\.3\.ln2_w\[0:\d+\]"),
    (2, dict(pp=2, **IN_ORDER), 1, "exp_avg", "wte", r"exp_avg\.wte\[0:\d+\]"),  # tied
    (4, dict(tp=2, cp=2), 3, "params", "h.0.proj_w", "h.0.proj_w of tp rank 1")])
def test_a_bit_that_differs_stops_the_run_and_is_not_saved(dataset, tmp_path, ranks, keys, rank, where, name,
                                                           told):
    command = argv(dataset, tmp_path, **KEYS | keys)
    [line] = set(pool(ranks).run(flipped, command, rank, 4, where, name))
    message = rf"rank \d {HOST}( and rank \d {HOST})?: different values of {told}, which must be the same: "
    assert re.match(message, line)
    assert f"rank {rank} (" in line
    assert checkpoint.latest(tmp_path).name == "2"


@pytest.mark.slow
@pytest.mark.ranks
def test_of_several_ranks_the_one_that_differs_is_named_first(dataset, tmp_path):
    for rank in (0, 2):
        command = argv(dataset, tmp_path / str(rank), **KEYS, gradient_accumulation_steps=4)
        said = pool(4).run(flipped, command, rank, 2, "params", "wte")
        assert said[0].startswith(f"rank {rank} (")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("ranks,keys,model", [
    (2, dict(states="host"), UNTIED), (4, dict(tp=2, pp=2, **IN_ORDER), {}),
    (4, dict(tp=2, optimizer_device="cpu", dtype="bfloat16"), {})])
def test_what_is_the_same_stays_so(dataset, tmp_path, ranks, keys, model):
    command = argv(dataset, tmp_path, **KEYS | model | dict(gradient_accumulation_steps=4) | keys)
    assert pool(ranks).run(here, command) == [0] * ranks


def test_one_process_compares_its_parameters_with_their_master_weights(dataset, tmp_path, monkeypatch):
    real = Optimizer.step

    def step(self, lr):
        real(self, lr)
        self.model.settle()  # a host's step may be under way
        if int(self.steps) == 4:
            flip(self, "master", "h.1.fc1_w")
    monkeypatch.setattr(Optimizer, "step", step)
    with pytest.raises(BadState, match=rf"^rank 0 {HOST}: different values of h\.1\.fc1_w\[0:4096\] and its"):
        train.main(argv(dataset, tmp_path, **KEYS, dtype="bfloat16"))
    assert checkpoint.latest(tmp_path).name == "2"
