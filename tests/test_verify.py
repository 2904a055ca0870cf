"""memo.verify: how it cuts a run, what it says of tensors and batches that are wrong, how it ends. That it
says right of right configs is bench/verify_fuzz.py's matter, that it finds errors tests/mutations.py's."""

import json
import os
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist

from memo.config.config import Config
from memo.config.rope import parse_scaling, used_factors
from memo.data.batch import open_dataset
from memo.errors import ConfigError, RunFailed
from memo.layer.tiles import RowOrder
from memo.run.load_config import load_config
from memo.system.command import run
from memo.verify import ranks
from memo.verify.__main__ import main, read_argv
from memo.verify.compare import within, worst_of
from memo.verify.ranks import run_ranks
from memo.verify.shrink import cut_degrees, shrink
from memo.verify.steps import Read, make_data
from memo.verify.training import not_in_file, not_packed, put_together
from tests.helpers import ROOT

SMALL = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=256", "--subsequences=1"]


# --- the cut ---

@pytest.mark.parametrize("preset", sorted((ROOT / "config").glob("*.py")), ids=lambda path: path.stem)
def test_a_preset_is_cut_and_keeps_its_structure(preset):
    cfg = load_config([str(preset)])
    world = cfg.tp * cfg.cp * (1 if cfg.pp == "auto" else cfg.pp)
    small, _, split, n, cut = shrink(cfg, world)  # whose rules Config checks
    assert n == small.tp * small.cp * small.pp <= 8 and split in (32, 256)
    for key in ("n_head", "kv_heads", "norm", "mlp", "bias", "position", "tie_embeddings",
                "alpha", "documents", "pack", "tensor_parallel", "context_parallel", "activation", "msp",
                "states"):
        assert getattr(small, key) == getattr(cfg, key)
    before, after = (parse_scaling(keys.rope_scaling) for keys in (cfg, small))
    if before.get("rope_type") == "longrope":  # fewer pairs have numbers, of the same list
        used = used_factors(before, cfg.block_size)
        assert used == used_factors(after, small.block_size) and {*after[used]} < {*before[used]}
    else:
        assert before == after
    for key in ("tp", "cp", "pp"):
        assert (getattr(small, key) > 1) == (getattr(cfg, key) not in (1, "auto"))
    assert small.block_size <= 8192 and small.n_embd <= 1024
    assert any(line.startswith("block_size") for line in cut)


def test_copies_of_a_head_of_keys_are_left():
    """Of 8 heads that 16 ranks hold twice each, 4 that 8 ranks hold twice."""
    small = shrink(Config(n_embd=4096, n_head=32, n_kv_head=8, tp=16, vocab_size=1000), 16).cfg
    assert (small.tp, small.kv_heads, small.held_kv_heads) == (8, 4, 8)


def test_full_keeps_widths_and_says_what_it_cuts():
    cfg = Config(n_embd=128, n_head=4, vocab_size=1000, block_size=65536, n_layer=12)
    cut = shrink(cfg, 1, full=True)
    assert (cut.cfg.n_embd, cut.cfg.vocab_size) == (128, 1000)
    assert cut.words == ["n_layer 12 -> 3", "block_size 65536 -> 1536"]


@pytest.mark.parametrize("before,after", [
    (dict(tp=8, cp=1), dict(tp=8, cp=1)), (dict(tp=8, cp=8), dict(tp=4, cp=2)),
    (dict(tp=6, cp=2), dict(tp=3, cp=2)), (dict(cp=13), dict(cp=13)),
    (dict(tp=8, cp=16, pp=4, dp=2), dict(tp=2, cp=2, pp=2, dp=2))])
def test_degrees_stay_above_one(before, after):
    assert cut_degrees(before) == after


# --- in words ---

def test_what_is_wrong_is_said_in_words():
    torch.manual_seed(0)
    want, degrees, split = {"h.3.k_w": torch.randn(8, 4)}, dict(tp=2, cp=4), {"h.3.k_w": 0}
    for change, words in ((lambda g: g[4:].mul_(0.5), "half, 1/tp what it must be on tp rank 1"),
                          (lambda g: g.mul_(0.25), "1/cp what"),
                          (lambda g: g.mul_(4), "cp times"), (lambda g: g.neg_(), "of other sign"),
                          (lambda g: g.zero_(), "zero"), (lambda g: g[0].fill_(torch.nan), "not finite")):
        change((got := {"h.3.k_w": want["h.3.k_w"].clone()})["h.3.k_w"])
        _, place, said = worst_of(got, want, degrees, split)
        assert place == "layer 3 k_w" and said.startswith(words)
    got = {"h.3.k_w": want["h.3.k_w"] + torch.eye(8, 4)[:, [3, 0, 1, 2]] * (torch.arange(8) == 1)[:, None]}
    assert worst_of(got, want, degrees, {"h.3.k_w": None})[2].endswith("(1 of 8 rows, from 1 on)")
    assert not within("layout", "loss", float("nan"), 1.0, "wrong").right


def test_batches_that_are_wrong_are_found(tmp_path):
    ids = np.random.default_rng(0).integers(100, size=500).astype(np.uint16)
    ids.tofile(tmp_path / "train.bin")
    tokens, targets = (torch.from_numpy(ids[i:i + 8].astype(np.int64))[None] for i in (40, 41))
    places = torch.arange(8)[None]
    even, odd, key = torch.arange(0, 8, 2), torch.arange(1, 8, 2), ("train", 0, 0)

    def read(at, shift=0):
        return at, [Read(key, torch.stack((tokens[:, at], targets[:, at] + shift, places[:, at])))]
    whole, faults = put_together([read(even), read(odd)], 8, copies=1)
    assert not faults and not not_in_file(whole, tmp_path)
    assert "position 1 of step 0, micro batch 0, is read 0 times" in put_together([read(even)], 8, 1)[1][0]
    assert "is read 2 times" in put_together([read(even), read(odd), read(odd)], 8, 1)[1][0]
    assert "rank 1 reads other tokens" in put_together([read(even), read(even, 1)], 8, 2)[1][0]
    whole[key][1] = whole[key][0].roll(-1, 1)  # a known error: the last target is the first token
    assert not_in_file(whole, tmp_path) == ["step 0: the target at position 7 is not the next token"]
    assert "do not follow each other" in not_in_file({key: whole[key].flip(2)}, tmp_path)[0]


@pytest.mark.parametrize("pack", ["best_fit", "in_order"])
def test_documents_that_are_wrong_are_found(pack, tmp_path):
    cfg = Config(block_size=128, batch_size=2, vocab_size=97, documents=True, pack=pack, seed=3)
    make_data(folder := tmp_path / "data", cfg, 4)
    data, order = open_dataset(str(folder), cfg.block_size, packs=pack), RowOrder([(cfg.block_size,)])
    drawn = [data.draw(cfg, "train", step, 0, 1, order) for step in range(6)]  # more than an epoch
    whole = {("train", step, 0): torch.stack((batch.tokens, batch.targets, batch.packed.positions))
             for step, batch in enumerate(drawn)}
    assert len(data.packings["train"]) < 12 and not not_packed(whole, folder, cfg.block_size, pack)
    tokens, targets, positions = torch.stack([*whole.values()], 2).flatten(1, 2).unbind()
    ends, padding = (targets < 0) & (positions.roll(-1, 1) == 0) & (tokens > 0), tokens == 0
    for row, at, change in ((0, (0, 5), 1), (1, ends.nonzero()[0], 7), (1, padding.nonzero()[0], 7),
                            (2, (0, 5), 9)):
        wrong, (sequence, place) = {key: batch.clone() for key, batch in whole.items()}, map(int, at)
        wrong["train", sequence % 6, 0][row, sequence // 6, place] += change
        assert "are no document of train.bin" in not_packed(wrong, folder, cfg.block_size, pack)[0]
    again = whole | {("train", 1, 0): whole["train", 0, 0]}
    assert "again, before all others" in not_packed(again, folder, cfg.block_size, pack)[0]


# --- how it ends ---

def dies(host, told):
    if told.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told.share(None)


def refuses(host, told):
    raise ConfigError("n_head=3 must be even; try 4")


def waits(host, told):
    if told.rank == 1:
        told.share(None)


@pytest.mark.parametrize("work,error,words", [
    (dies, RunFailed, "starting: rank 1 is gone"), (refuses, ConfigError, "^n_head=3 must be even; try 4$"),
    (waits, RunFailed, "no rank has said anything for 1 s")])
def test_ranks_that_fail_are_one_line(work, error, words, monkeypatch):
    monkeypatch.setattr(ranks, "SILENT_S", 1 if work is waits else 60)
    with pytest.raises(error, match=words):
        run_ranks(work, 2, print)


@pytest.mark.parametrize("argv,words", [
    (["--n_layr=3"], "did you mean 'n_layer'"), (["--tp=2", "--gpus=3"], "must be a multiple of pp"),
    (["--n_head=3"], "n_embd=256 % n_head=3 != 0"), (["--gpus=x"], "gpus='x' must be int")])
def test_bad_input_is_one_line(argv, words, capsys):
    with pytest.raises(ConfigError, match=words):
        read_argv(argv)
    assert run(main, argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("fault,keys", [
    ("", []), ("halved", []), ("own part", []), ("", ["--documents=true", "--subsequences=2"]),
    ("", ["--tensor_parallel=metp", "--subsequences=2", "--block_size=1024", "--mlp=swiglu", "--norm=rmsnorm",
          "--n_kv_head=1", "--head_dim=16", "--qk_norm=true"])])
def test_a_run_is_right_unless_messages_are_wrong(fault, keys, monkeypatch, capsys):
    """Faults from outside: a sum that gives half, a gather that brings a rank's own part alone."""
    all_reduce = dist.all_reduce

    def halved(tensor, *how, **more):
        all_reduce(tensor, *how, **more)
        tensor.mul_(0.5) if tensor.is_floating_point() else None

    def own_part(out, x, **how):
        out.view(-1, x.numel()).copy_(x.view(1, -1).expand(2, -1))
        return dist.barrier(async_op=True, group=how["group"])
    if fault == "halved":
        monkeypatch.setattr(dist, "all_reduce", halved)
    elif fault:
        monkeypatch.setattr("memo.system.axis.ALL_GATHER", own_part)
    code = main([*SMALL, "--tp=2", *keys, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert code == bool(fault), said["checks"][0]["text"]
    assert said["right"] == (not fault) and said["ranks"] == 2
    checks = [check["check"] for check in said["checks"]]
    every = {"messages", "reference", "layout", "modes", "influence", "alive", "optimizer", "data", "resume"}
    assert checks[0] == "messages" if fault else every <= {*checks}
