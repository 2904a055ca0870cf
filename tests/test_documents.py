"""Documents: packing, the files, and a packed sequence through every layout against its documents alone."""

import json
import os
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from memo.config.layout import Layout
from memo.data import packing
from memo.data.batch import open_dataset
from memo.data.packing import best_fit, pack
from memo.decide.pipeline import even_shares
from memo.errors import ConfigError
from memo.layer.masks import documents
from memo.layer.tiles import RowOrder, row_order
from memo.parallel.mesh import ALONE
from testing.ranks import pool
from tests.helpers import degrees_of
from tests.layouts import agree, assembled, build, layout_keys, on_ranks
from tests.packed import (
    FAMILIES,
    KEYS,
    LENGTHS,
    MODES,
    attention_by_lengths,
    gradients_by_lengths,
    of_documents,
    packed_gradients,
    trained_anywhere,
    write_folder,
)

# --- packing ---

def rooms_by_hand(lengths, S):
    """What best fit leaves free of each sequence: pieces one after the other, the longest first."""
    rooms = []
    for n in sorted(lengths, reverse=True):
        fit = [room for room in rooms if room >= n]
        rooms = sorted([*rooms, S] if not fit else rooms)
        rooms.remove(room := min(fit or [S]))
        rooms.append(room - n)
    return sorted(rooms)


def test_packing_is_best_fit_and_holds_every_token_once():
    rng = np.random.default_rng(0)
    for _ in range(200):
        S, lengths = int(rng.integers(1, 30)), rng.integers(1, 40, rng.integers(1, 60))
        starts, total = np.cumsum(lengths) - lengths, int(lengths.sum())
        for how in ("best_fit", "in_order"):
            packed, seen = pack(starts, total, S, how), np.zeros(total, int)
            every = [packed.pieces(k) for k in range(len(packed))]
            for first, length, ends in (piece for pieces in every for piece in pieces):
                seen[first:first + length] += 1
                document = np.searchsorted(starts, first, "right") - 1
                end = starts[document] + lengths[document]
                assert first + length <= end
                assert ends == (first + length == end)
            assert (seen == 1).all()
            used = [sum(length for _, length, _ in pieces) for pieces in every]
            if how == "in_order":
                assert used[:-1] == [S] * (len(used) - 1)
            else:
                pieces = [n for length in lengths for n in [S] * (length // S) + [length % S] if n]
                assert sorted(S - n for n in used) == rooms_by_hand(pieces, S)
            share = packed.share(0, len(packed), seed=5)
            assert share[:2] == (total, total - len(lengths))


@pytest.mark.parametrize("harm", [None, b"", b"other"])
def test_many_documents_are_packed_once(monkeypatch, tmp_path, harm):
    """The packing is found again; one that was changed, or cannot be kept, is made again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packing, "MANY", 10)
    made, starts = [], np.arange(0, 400, 7)
    monkeypatch.setattr(packing, "best_fit", lambda *args: made.append(args) or best_fit(*args))
    first = packing.packed_once(starts, 401, 64, "best_fit")
    [path] = (tmp_path / "memo").glob("packing-*")
    if harm is not None:
        path.write_bytes(harm)
    again = packing.packed_once(starts, 401, 64, "best_fit")
    assert len(made) == 1 + (harm is not None)
    for name in ("S", "first", "length", "ends", "learned", "bounds"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert packing.packed_once(starts, 402, 64, "best_fit").length.sum() == 402
    victim, lock = tmp_path / "victim", tmp_path / "memo/packing.lock"
    victim.write_text("precious")
    for plant in (lock.mkdir, lambda: os.mkfifo(lock), lambda: lock.symlink_to(victim)):
        (lock.rmdir if lock.is_dir() else lock.unlink)()
        plant()
        assert packing.packed_once(starts, 401, 64, "best_fit").length.sum() == 401
    assert victim.read_text() == "precious"


def test_other_starts_are_refused(tmp_path):
    """A run goes on with the documents that it began with."""
    folder = write_folder(tmp_path / "d", LENGTHS)
    was = open_dataset(folder, 64, packs="best_fit").fingerprints
    starts = np.fromfile(path := tmp_path / "d/train.docs", "<i8")
    starts[2] += 1
    starts.tofile(path)
    with pytest.raises(ConfigError, match=r"train.docs is not what was prepared: its fingerprint is"):
        open_dataset(folder, 64, packs="best_fit")
    meta = json.loads((tmp_path / "d/meta.json").read_text())
    meta["fingerprints"].pop("train.docs")  # an older memo stored none
    (tmp_path / "d/meta.json").write_text(json.dumps(meta))
    now = open_dataset(folder, 64, packs="best_fit").fingerprints
    assert {name for name in now if now[name] != was[name]} == {"train documents"}


def test_epochs_follow_each_other_without_a_gap():
    packing = pack(np.arange(0, 700, 7), 700, 21, "best_fit")
    n = len(packing)
    taken = [k for first in range(0, 3 * n, 5) for k in packing.numbers(first, 5, seed=3)][:3 * n]
    epochs = [taken[i:i + n] for i in range(0, 3 * n, n)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(n)]] * 3
    assert epochs[0] != epochs[1]
    assert packing.numbers(0, n, seed=3) == epochs[0] != packing.numbers(0, n, seed=4)


# --- the files ---


@pytest.mark.parametrize("starts,said", [
    ([0, 5, 5, 9], "document 2 starts at token 5, starts must ascend"),
    ([1, 5, 6, 9], "document 0 starts at token 1"), ([0, 5, 6, 20], "document 3 starts at token 20"),
    ([0, 5, 6], "must have 8 bytes for each of the 4 documents"), (None, "No such file")])
def test_starts_that_are_wrong_are_one_line(tmp_path, starts, said):
    folder = write_folder(tmp_path / "d", [5, 1, 3, 11])
    (folder / "val.docs").unlink()
    if starts is not None:
        np.array(starts, "<i8").tofile(folder / "val.docs")
    with pytest.raises(ConfigError, match=said) as e:
        open_dataset(str(folder), 8, packs="best_fit")
    assert "\n" not in str(e.value)
    assert "documents=true" in str(e.value)
    open_dataset(str(folder), 8)  # windows need no starts


def test_a_folder_without_starts_and_one_without_targets_are_refused(tmp_path):
    folder = write_folder(tmp_path / "d", [1] * 20)
    with pytest.raises(ConfigError, match="has no token that is learned"):
        open_dataset(str(folder), 8, packs="best_fit")
    meta = json.loads((folder / "meta.json").read_text())
    meta.pop("documents")
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match="needs the starts of documents, which dataset=.* lacks"):
        open_dataset(str(folder), 8, packs="best_fit")


# --- through every layout ---


@cache
def expected(family, pack_as, folder):
    return of_documents(Layout(**KEYS | FAMILIES[family], pack=pack_as), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_folder(tmp_path_factory.mktemp("documents") / "d", LENGTHS))


CUTS = [dict(), dict(subsequences=3, unit_order="layer"), dict(subsequences=8, unit_order="subsequence")]


@pytest.mark.parametrize("pack_as", ["best_fit", pytest.param("in_order", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", [*CUTS[:2], pytest.param(CUTS[2], marks=pytest.mark.slow)],
                         ids=["N1", "N3", "N8"])
def test_a_packed_step_is_that_of_its_documents(folder, family, pack_as, cut):
    cfgs = [Layout(**KEYS | FAMILIES[family] | dict(pack=pack_as) | cut | mode) for mode in MODES]
    first, *others = packed_gradients(ALONE.host, cfgs, folder)
    mine = assembled([first[2]])
    agree((*first[:2], mine), expected(family, pack_as, folder), cut)
    for other in others:
        assert other[:2] == first[:2]
        assert other[3] == first[3] == 0, "requests that missed the memory plan"
        assert all(torch.equal(t, mine[name]) for name, t in assembled([other[2]]).items())


# modes that the layouts of ranks run in; ulysses, metp and stages among them
RANKS = [("cp2", "ring", {}), ("cp2", "ring", dict(subsequences=3)), ("cp2", "ulysses", {}),
         ("cp2", "ulysses", dict(subsequences=3)), ("tp2", "ring", {}), ("tp2", "metp", {}),
         ("tp2", "metp", dict(subsequences=4)), ("tp2 cp2", "ring", dict(subsequences=2)),
         ("tp2 cp2", "metp", {}), ("cp4", "ring", {}), ("dp2", "ring", {}), ("tp2 dp2", "metp", {}),
         ("pp3", "ring", dict(subsequences=4)), ("pp2 cp2", "ring", dict(subsequences=4)),
         ("pp2", "ring", dict(subsequences=4, msp=True)), ("pp2 cp2", "ring", dict(subsequences=4, msp=True))]


CASES = [(*case, [*FAMILIES][k % 2]) for k, case in enumerate(RANKS)]
CASES += [(*RANKS[1], "gpt"), (*RANKS[8], "qwen")]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("text,kind,more,family", CASES)
def test_every_layout_gives_the_gradients_of_the_documents(folder, text, kind, more, family):
    keys = KEYS | FAMILIES[family] | layout_keys(text, kind) | more
    cfgs = [Layout(**keys | mode) for mode in MODES[1:]]
    if "msp" in more:
        cfgs = [replace(cfg, shares=even_shares(cfg)) for cfg in cfgs]
    first, other = on_ranks(text, cfgs, folder, work=packed_gradients)
    agree(first, expected(family, "best_fit", folder), (text, kind, more))
    assert other[:2] == first[:2]
    assert other[3] == first[3] == 0, "requests that missed the memory plan"
    assert all(torch.equal(t, first[2][name]) for name, t in other[2].items())


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("text,kind,more", [
    ("dp2", "ring", {}), ("tp2 cp2", "ring", dict(subsequences=4))])
def test_where_states_are_changes_no_bit_of_documents(folder, text, kind, more):
    size = degrees_of(text)  # sums of several micro batches are made in another order
    cfg = Layout(**KEYS | FAMILIES["qwen"] | layout_keys(text, kind) | more | dict(
        gradient_accumulation_steps=size["dp"], grad_clip=0.1))
    for device, *others in pool(size["tp"] * size["cp"] * size["dp"]).run(
            trained_anywhere, cfg, folder, ("device", "sharded", "host")):
        assert others == [device, device]
        assert len({norm for _, norm in device[0]}) == 3


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("lengths,subsequences", [
    ([3, 1, 14, 9, 5] * 25, 2), ([16] * 40, 1), ([40, 8, 3, 90, 30] * 7, 1), ([40, 8, 3, 90, 30] * 7, 2)])
def test_no_hop_is_made_that_no_rank_needs(tmp_path, lengths, subsequences):
    """Keys, or queries, go round 4 ranks as far as a document reaches: counted token by token."""
    folder, S, cp = write_folder(tmp_path / "d", lengths), 128, 4
    keys = KEYS | FAMILIES["qwen"] | dict(subsequences=subsequences, cp=cp)
    cfg = Layout(**keys | dict(activation="keep"))
    first, other = on_ranks("cp4", [cfg, Layout(**keys | dict(activation="recompute"))], folder,
                            work=packed_gradients)
    agree(first, of_documents(cfg, folder), (lengths, subsequences))
    assert other[:2] == first[:2]
    assert other[3] == first[3] == 0, "requests that missed the memory plan"
    # the chunks of a subsequence are dealt in a zigzag
    unit, chunk = S // subsequences, S // subsequences // (2 * cp)
    owner = [(r if (r := t % unit // chunk) < cp else 2 * cp - 1 - r) for t in range(S)]
    packing, hops = open_dataset(folder, S, packs=cfg.pack).packings["train"], 0
    numbers = packing.numbers(0, 4, cfg.seed)
    for pair in (numbers[:2], numbers[2:]):  # a batch goes round together
        edges = [np.cumsum([0, *[n for _, n, _ in packing.pieces(k)]]) for k in pair]
        document = [np.searchsorted(of, np.arange(S), "right") for of in edges]
        for i in range(subsequences):
            queries = range(i * unit, (i + 1) * unit)
            hops += len({(owner[q] - owner[k]) % cp for d, of in zip(document, edges, strict=True)
                         for q in queries for k in range(q) if q < of[-1] and d[q] == d[k]} - {0})
    rows, q, kv = 2 * unit // cp, 4 * 8, cfg.kv_heads * 8  # of both sequences; elements of a row
    elements = (q + q + 4) + (3 * q + 4 + q) if subsequences > 1 else 2 * kv + 2 * kv + 2 * kv
    assert first[4] == hops * rows * 4 * elements * cfg.n_layer
    assert hops <= 2 * subsequences * (cp - 1) - (max(lengths) <= chunk)


# --- many on a diagonal: by lengths ---

MANY = {"a batch at once": [24, 26, 25] * 9, "neighbours": [3, 1, 14, 9, 5] * 25,
        "a long one too": [100] + [1] * 28 + [128] * 3 + [2] * 64}


@pytest.mark.parametrize("lengths,cut", [("a batch at once", CUTS[0]), ("neighbours", CUTS[1]),
                                         ("a long one too", CUTS[0]), ("a long one too", CUTS[1])])
def test_many_documents_go_by_their_lengths(tmp_path, lengths, cut):
    """As each alone, from one plan, whichever of a step's batches have many."""
    folder = str(write_folder(tmp_path / "d", MANY[lengths]))
    cfgs = [Layout(**KEYS | FAMILIES["qwen"] | cut | mode) for mode in MODES[1:]]
    first, other = gradients_by_lengths(ALONE.host, cfgs, folder)
    agree((*first[:2], assembled([first[2]])), of_documents(cfgs[0], folder), (lengths, cut))
    assert other[:2] == first[:2]
    assert other[3] == first[3] == 0, "requests that missed the memory plan"
    assert max(first[-1]) == 16 and sum(n < 16 for n in first[-1]) >= cfgs[0].n_layer  # 16: of a rehearsal


@pytest.mark.parametrize("lengths", [[9, 7] * 8, [3, 1, 4] * 16, [5, 60, 1, 2] + [6] * 10])
def test_by_lengths_attention_is_what_it_is_tile_by_tile(lengths):
    """Of two sequences, with and without pieces before: out, lse and gradients."""
    for alone, many in attention_by_lengths(lengths):
        assert len(many) == len(alone) >= 3
        assert all((a - b).norm() <= 1e-6 * b.norm() for a, b in zip(many, alone, strict=True))


def test_few_documents_go_tile_by_tile():
    placed = []
    met, = RowOrder([(64,)], masks=[documents([8 * i for i in range(1, 9)])] * 2).meetings(
        0, 0, 64, place=placed.append)
    assert [tile.kind for tile in met.tiles()[0]] == [0] * 8 and placed == []


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("text,kind,more,family", [CASES[1], CASES[2], CASES[5], CASES[8], CASES[15]])
def test_every_layout_by_lengths(tmp_path, text, kind, more, family):
    folder = str(write_folder(tmp_path / "d", [3, 1, 14, 9, 5, 90] * 25))
    keys = KEYS | FAMILIES[family] | layout_keys(text, kind) | more
    cfgs = [Layout(**keys | mode) for mode in MODES[1:]]
    if "msp" in more:
        cfgs = [replace(cfg, shares=even_shares(cfg)) for cfg in cfgs]
    first, other = on_ranks(text, cfgs, folder, work=gradients_by_lengths)
    agree(first, of_documents(Layout(**KEYS | FAMILIES[family]), folder), (text, kind, more))
    assert other[:2] == first[:2]
    assert other[3] == first[3] == 0, "requests that missed the memory plan"


# --- influence ---

def rows_of_a_step(cfg, data, changed=None):
    """(the last layer's output, the gradient of the first layer's input), both (B, S, C), of a batch one of
    whose tokens, (sequence, place), may be `changed`."""
    model, _ = build(cfg, ALONE)
    batch = data.draw(cfg, "train", 0, 0, 1, row_order(cfg, cfg.block_size, ALONE))
    if changed:
        batch.tokens[changed] = (batch.tokens[changed] + 1) % cfg.vocab_size
        batch.targets[changed] = 0  # another target too
    tokens, targets, packed = model.on_device(batch)
    model.forward(tokens, targets, packed, scale=1.0, learned=100)
    model.backward(last=True)
    dx = [x.view(cfg.batch_size, -1, cfg.n_embd).clone()
          for x in model.swap.x[0].split([cfg.batch_size * n for n in model.lengths])]
    model.meet(packed)
    parts = model.hidden(tokens, lambda i, x: x.view(cfg.batch_size, -1, cfg.n_embd).clone())
    model.close()
    return torch.cat(parts, 1), torch.cat(dx, 1), packed


@pytest.mark.parametrize("cut", [dict(), dict(subsequences=4, unit_order="layer")], ids=["N1", "N4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_changes_no_bit_of_another_document(folder, family, cut):
    cfg = Layout(**KEYS | FAMILIES[family] | dict(activation="keep") | cut)
    data = open_dataset(folder, cfg.block_size, packs=cfg.pack)
    out, dx, packed = rows_of_a_step(cfg, data)
    for b, ends in enumerate(packed.ends):
        edges = [0, *ends]
        first, end = max(pairwise(edges), key=lambda edge: edge[1] - edge[0])  # the longest
        place = (first + end) // 2
        out_, dx_, _ = rows_of_a_step(cfg, data, (b, place))
        others = torch.ones(out.shape[:2], dtype=torch.bool)
        others[b, first:end] = False
        assert torch.equal(out_[others], out[others])
        assert torch.equal(dx_[others], dx[others])
        assert torch.equal(out_[b, first:place], out[b, first:place])
        assert (out_[b, place:end] != out[b, place:end]).any(-1).all()
        assert (dx_[b, first:end] != dx[b, first:end]).any()
