"""Where a sequence is cut into subsequences, and which of their tokens a rank has."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from memo import sample
from memo.config.formulas import flops_per_sample, layer_forward_flops
from memo.config.layer import head_groups
from memo.config.layout import ALIGNED, Layout, subsequence_lengths
from memo.data.batch import open_dataset
from memo.errors import ConfigError
from memo.kernels.ops import rotations
from memo.layer.tiles import row_order
from memo.parallel.mesh import Mesh
from memo.run.load_config import load_config
from memo.states.passes import Model
from memo.system.axis import Axis
from model import GPT
from tests.helpers import CPU, VOCAB, error, perturbed_weights, random_batch, save_header

LAYOUTS = [dict(), dict(tp=2), dict(cp=2), dict(cp=4, tp=2), dict(cp=2, context_parallel="ulysses"),
           dict(cp=4, tp=2, context_parallel="ulysses"), dict(tp=2, tensor_parallel="metp"),
           dict(tp=2, cp=2, tensor_parallel="metp")]
LLAMA = dict(norm="rmsnorm", mlp="swiglu", n_kv_head=2)


def made(S, N, cut="equal", **keys):
    return Layout(**dict(n_layer=2, n_head=8, n_embd=64, vocab_size=VOCAB, block_size=S, subsequences=N,
                         subsequence_cut=cut) | keys)


def multiple_of(cfg):
    """Tokens: what the lengths must be multiples of."""
    aligned = ALIGNED * cfg.block_multiple
    return aligned if not cfg.block_size % aligned and cfg.block_size // aligned >= cfg.subsequences else (
        cfg.block_multiple)


def many():
    """Configs of many lengths, numbers and layouts, some of which are as tight as can be."""
    rng = np.random.default_rng(5)
    for keys in LAYOUTS:
        for family in ({}, LLAMA):
            m = made(2048, 1, **keys).block_multiple
            for n, unit in [(1, 1), (7, 1), (7, 128), (16, 128), *rng.integers(1, 60, (3, 2)).tolist()]:
                N = int(rng.integers(1, n + 1))
                yield from (made(n * unit * m, k, **keys, **family) for k in {1, N, n})


# --- lengths ---

def test_equal_lengths_differ_by_a_multiple_at_most():
    for cfg in many():
        lengths, m = subsequence_lengths(cfg), multiple_of(cfg)
        assert len(lengths) == cfg.subsequences and sum(lengths) == cfg.block_size
        assert all(n % m == 0 for n in lengths) and min(lengths) >= m
        assert max(lengths) - min(lengths) <= m and list(lengths) == sorted(lengths, reverse=True)


def test_equal_flops_are_as_near_as_multiples_allow():
    for cfg in map(lambda cfg: replace(cfg, subsequence_cut="flops"), many()):
        lengths, m, N = subsequence_lengths(cfg), multiple_of(cfg), cfg.subsequences
        assert len(lengths) == N and sum(lengths) == cfg.block_size and min(lengths) >= m
        # token t, in the formula, sees t + 1/2 tokens, with 2 C operations in each of two products
        t, C = np.arange(cfg.block_size), cfg.n_embd
        matrices = 2 * (12 * C**2 if cfg.mlp == "gelu" else C * (2 * C + C // 2 + 3 * cfg.inner_width))
        done = np.concatenate(([0], (matrices + 4 * C * t + 2 * C).cumsum()))[::m]
        ends = [0]
        for i in range(1, N):
            nearest = np.abs(done - done[-1] * i / N).argmin()
            ends.append(min(max(int(nearest), ends[-1] + 1), len(done) - 1 - (N - i)))
        assert [n // m for n in lengths] == [b - a for a, b in pairwise([*ends, len(done) - 1])]


def test_some_lengths_in_figures():
    assert subsequence_lengths(made(1000, 3)) == (334, 333, 333)
    assert subsequence_lengths(made(1024, 3)) == (384, 384, 256)
    assert subsequence_lengths(made(1024, 16)) == (64,) * 16  # 8 times 128 are too few
    assert subsequence_lengths(made(2048, 3, cp=2)) == (1024, 512, 512)
    assert subsequence_lengths(made(96, 5, cp=2, tp=2)) == (24, 24, 16, 16, 16)
    # by attention alone it would be 65536/2^0.5 = 46341
    assert subsequence_lengths(made(65536, 2, "flops")) == (46208, 19328)


def test_another_sequence_has_as_many_as_fit():
    cfg = made(4096, 16, cp=2)
    assert subsequence_lengths(cfg, 8192) == (512,) * 16
    assert subsequence_lengths(cfg, 1536) == (512,) * 3  # 128 times 4
    assert subsequence_lengths(cfg, 1028) == (516, 512)
    assert subsequence_lengths(cfg, 64) == (64,)
    assert subsequence_lengths(replace(cfg, cp=1), 1) == (1,)


def test_groups_of_heads_are_as_large_as_a_unit_allows():
    cfg = Layout(n_layer=2, n_head=32, n_embd=4096, vocab_size=128, block_size=2**18, tp=4,
                 tensor_parallel="metp")
    assert [head_groups(replace(cfg, subsequences=N)) for N in (1, 2, 16)] == [16, 8, 8]


def test_the_flops_are_those_of_a_step():
    for keys in ({}, LLAMA):
        cfg = made(512, 1, **keys)
        head = 6 * 512 * cfg.vocab_size * cfg.n_embd
        assert 3 * cfg.n_layer * layer_forward_flops(cfg, 512) + head == flops_per_sample(cfg)


def test_the_activations_of_the_paper():
    """SPPO, figure 5: largest and smallest activations in GB, here with causal FLOPs: 8.7 and 3.2, 4.8 and
    1.6 (the paper counts the masked half of the scores, too)."""
    shape = dict(n_layer=80, n_head=64, n_embd=8192)
    eight, sixteen = (subsequence_lengths(made(131072, N, "flops", **shape)) for N in (8, 16))
    found = [max(eight), min(eight), max(sixteen), min(sixteen)]
    assert [round(n * 8.7 / found[0], 1) for n in found] == [8.7, 3.2, 4.8, 1.6]


# --- keys ---

@pytest.mark.parametrize("S,N,keys,says", [
    (64, 65, {}, r"subsequences=65 must be at most 64 \(each gets at least \(cp\*tp\)=1 of block_size=64 "
                 r"tokens\); try subsequences=64"),
    (64, 9, dict(cp=2, tp=2), r"=9 must be at most 8 \(each gets at least \(2\*cp\*tp\)=8 of block_size=64"),
    (64, 9, dict(tp=4, tensor_parallel="metp"), "=9 must be at most 8 "),
    (64, 17, dict(cp=2, tp=2, context_parallel="ulysses"), r"at most 16 .*\(cp\*tp\)=4 of"),
    (64, 0, {}, "subsequences=0 must be at least 1"),
    (64, 2**20, {}, "subsequences=1048576 must be at most 65536"),
    (64, "2", {}, "must be of type int"),
    (64, 2, dict(subsequence_cut="even"), "subsequence_cut='even' must be one of auto, equal, flops"),
    (64, 2, dict(unit_order="both"), "unit_order='both' must be one of auto, layer, subsequence")])
def test_what_cannot_be_cut_is_told_in_a_line(S, N, keys, says):
    with pytest.raises(ConfigError, match=says) as e:
        made(S, N, **keys)
    assert "\n" not in str(e.value)


def test_a_run_may_resume_with_another_cut(tmp_path):
    save_header(tmp_path, made(4096, 8, "flops", unit_order="subsequence"))
    resume = ["--init_from=resume", f"--out_dir={tmp_path}"]
    cfg = load_config(resume)
    assert (cfg.subsequences, cfg.subsequence_cut, cfg.unit_order) == (8, "flops", "subsequence")
    cfg = load_config([*resume, "--subsequences=3", "--subsequence_cut=equal", "--unit_order=layer"])
    assert (cfg.subsequences, cfg.subsequence_cut, cfg.unit_order) == (3, "equal", "layer")


# --- the tokens of a rank ---

def meshes(cfg):
    """The Mesh of each rank that shares a sequence."""
    for cp in range(cfg.cp):
        for tp in range(cfg.tp):
            tokens = Axis("cp", cfg.token_ranks, cp * cfg.tp + tp if cfg.metp else cp)
            yield Mesh(weights=Axis("tp", cfg.tp, tp), tokens=tokens)


CUTS = [(1, "equal"), (3, "equal"), (4, "flops")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("N,cut", CUTS)
def test_the_ranks_have_each_token_of_a_subsequence_once(layout, N, cut):
    cfg = made(32 * 16, N, cut, **layout)
    every = [row_order(cfg, cfg.block_size, mesh).positions() for mesh in meshes(cfg)]
    start = 0
    for i, length in enumerate(subsequence_lengths(cfg)):
        # the ranks of tp have a (B, T) in common, of which each owns the rows rank, rank + tp, ...
        own = [positions[i][mesh.weights.rank::cfg.tp]
               for positions, mesh in zip(every, meshes(cfg), strict=True)]
        assert torch.cat(own).sort().values.equal(torch.arange(start, start + length))
        assert {len(t) for t in own} == {length // (cfg.cp * cfg.tp)}
        if cfg.zigzag:  # an early and a late chunk, equally far from both ends: equal causal work
            shares = own if cfg.metp else [positions[i] for positions in every]
            assert {2 * int(t.sum()) for t in shares} == {(2 * start + length - 1) * len(shares[0])}
        start += length
    whole = replace(cfg, subsequences=1)
    for mesh in meshes(cfg):
        columns = row_order(cfg, start, mesh).columns()
        assert len(columns) == N and (N > 1 or columns == row_order(whole, start, mesh).columns())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("N,cut", CUTS)
def test_the_batches_of_the_ranks_are_the_sequences(layout, N, cut, dataset):
    cfg, B = made(32 * 16, N, cut, **layout), 2
    S, data = cfg.block_size, open_dataset(dataset, cfg.block_size)
    whole = data.batch("train", 1, 0, B, S, 7)
    for mesh in meshes(cfg):
        order = row_order(cfg, S, mesh)
        mine = data.batch("train", 1, 0, B, S, 7, order)
        here = torch.cat(order.positions())
        for part, full in zip(mine, whole, strict=True):
            assert part.dtype == torch.int64 and part.equal(full[:, here])


def test_one_subsequence_lies_as_without_subsequences():
    cfg = made(64, 1, tp=2, cp=2, tensor_parallel="metp")
    (mine,) = row_order(cfg, 64, Mesh(weights=Axis("tp", 2, 1), tokens=Axis("cp", 4, 3))).positions()
    # ranks 2 and 3 of four: of eight chunks the third and the sixth, the fourth and the fifth
    columns = torch.tensor([[*range(16, 24), *range(40, 48)], [*range(24, 40)]])
    assert mine.equal(columns.t().flatten())


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_model_has_positions_and_rotations_by_subsequence(position):
    cfg, B = made(96, 3, position=position, cp=2), 2
    model = Model(GPT, cfg, CPU, torch.float32, mesh=Mesh(tokens=Axis("cp", 2, 1)))
    for S, N in ((96, 3), (48, 1)):
        model.reserve(B, S // 2)
        here = row_order(cfg, S, model.mesh).positions()
        [rows] = model.rows
        assert [t.tolist() for t in rows.positions] == [t.tolist() * B for t in here] and len(here) == N
        for positions, turn in zip(rows.positions, *rows.turns.values(), strict=True):
            want = rotations(positions, cfg.head_width, cfg.rope_theta)[:, None]
            assert turn is None if position == "learned" else turn.equal(want)
    model.close()


@pytest.mark.parametrize("keys", [dict(n_head=4), LLAMA | dict(n_head=4, qk_norm=True)], ids=["gpt", "qwen"])
def test_a_prompt_is_read_by_subsequences(keys, monkeypatch):
    prompt, seen = random_batch(made(640, 1), 1, 640, CPU)[0][0].tolist(), []
    for N, stream in ((1, "whole"), (5, "whole"), (5, "copied")):
        monkeypatch.setattr("memo.states.passes.with_stream",
                            lambda p, *a, stream=stream: replace(p, stream=stream))
        model = Model(GPT, made(768, N, **keys), CPU, torch.float32, grads=False)
        model.load(perturbed_weights(model.cfg, CPU))
        cache = sample.open_cache(model, 641)
        logits = [sample.prefill(model, cache, prompt)]
        assert len(model.lengths) == N
        # the slab: layers take turns
        assert model.swap.host_bytes == (stream == "copied") * 640 * 64 * 4
        model.reserve_forward(1, 1)
        seen.append(torch.stack([*logits, sample.decode(model, cache, 7, 640)]))
        model.close()
    assert error(seen[1], seen[0]) < 1e-5 and seen[2].equal(seen[1])
