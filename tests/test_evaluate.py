"""Does the long context work: losses and needles beside brute force, in every layout, and the command."""

import io
import json
import re
from contextlib import redirect_stdout
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from memo import evaluate
from memo.config.layout import Layout
from memo.data.batch import open_dataset
from memo.errors import ConfigError, RunFailed
from memo.evaluate import (
    NEEDLE,
    VALUE,
    Questions,
    bucket_edges,
    draw_needle,
    measure_losses,
    measure_needles,
    needle_text,
    over_sequences,
    room_for,
    token_losses,
    token_scores,
    usual_tokens,
)
from memo.parallel.mesh import ALONE
from memo.states.passes import Model
from memo.system.axis import Axis
from memo.system.command import run
from memo.system.launch import Launch
from memo.verify.reference import Reference
from model import GPT, initial_weights
from testing.ranks import TIMEOUT_S, pool, start_ranks
from tests.helpers import CPU, VOCAB, argv, degrees_of, mesh_of, perturbed_weights

SHAPE = dict(n_layer=2, n_head=4, n_embd=32, vocab_size=VOCAB, block_size=256)
FAMILIES = dict(
    gpt=dict(position="learned", bias=True),
    llama=dict(norm="rmsnorm", mlp="swiglu", n_inner=48, n_kv_head=2, head_dim=16, tie_embeddings=False))


def quiet(text):
    pass


def built(cfg, mesh=ALONE, kind=Model):
    """A model whose weights tell tokens apart."""
    model = kind(GPT, cfg, CPU, torch.float32, grads=False, mesh=mesh)
    model.load((name, w * 8 if name.endswith(("q_w", "k_w", "wte", "wpe", "head_w")) else w)
               for name, w in perturbed_weights(cfg, CPU))
    return model


def reference_logits(cfg, tokens):
    """(B, T, V), of the independent model with the weights of built()'s."""
    reference = Reference(cfg).load(
        (name, w * 8 if name.endswith(("q_w", "k_w", "wte", "wpe", "head_w")) else w)
        for name, w in perturbed_weights(cfg, CPU))
    with torch.no_grad():
        return reference.logits(reference.hidden(tokens))


# --- beside brute force ---

@pytest.mark.parametrize("context", [64, 72, 250])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_each_token_in_its_window(family, context, monkeypatch):
    monkeypatch.setattr("memo.layer.edges.head_rows", lambda *_: 48)  # several chunks of logits
    cfg, S = Layout(**SHAPE, **FAMILIES[family]), 250
    ids = torch.randint(0, VOCAB, (S + 1,), generator=torch.Generator().manual_seed(2))
    losses = token_losses(built(cfg), ids, context)
    half, expected = context // 2, np.zeros(S)
    for t in range(S):  # the first window that reaches the token
        start = 0 if t < context else min(-(-(t + 1 - context) // half) * half, S - context)
        assert start + context > t and (start == 0 or t - start >= half)
        expected[t] = start
    for start in set(expected):
        window = slice(int(start), int(start) + context)
        logits = reference_logits(cfg, ids[window][None])[0]
        mine = expected[window] == start
        nll = F.cross_entropy(logits, ids[window.start + 1:window.stop + 1], reduction="none").numpy()
        assert np.abs(losses[window] - nll)[mine].max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_wanted_tokens_and_no_others_are_scored(family):
    cfg = Layout(**SHAPE, **FAMILIES[family])
    windows = torch.randint(0, VOCAB, (3, 81), generator=torch.Generator().manual_seed(2))
    logits = reference_logits(cfg, windows[:, :-1])
    windows[0, 1:] = logits[0].argmax(1)  # some are the likeliest
    logits = reference_logits(cfg, windows[:, :-1])
    wanted = torch.rand(3, 80, generator=torch.Generator().manual_seed(3)) < 0.3
    log_p, right = token_scores(built(cfg), windows, wanted)
    target = windows[:, 1:]
    expected = logits.log_softmax(2).gather(2, target[..., None])[..., 0] * wanted
    assert (log_p - expected).abs().max() < 1e-4
    assert torch.equal(right, ((logits.argmax(2) == target) & wanted).double())
    assert 0 < right.sum() < wanted.sum()


def test_the_training_loss_is_the_mean_of_all_tokens(dataset):
    model, data = built(Layout(**SHAPE)), open_dataset(str(dataset), 1)
    asked = Questions(data, [64, 256], [0.5], 3, 7)
    losses = measure_losses(model, asked, quiet)
    batches = [data.batch("val", 0, i, 1, 256, 7) for i in range(3)]
    mean = sum(model.forward(*batch) for batch in batches).item() / 3
    weights = np.subtract(losses["end"], losses["start"]) / 256
    assert abs(np.dot(losses["loss"], weights) - mean) < 1e-5
    short = sum(end <= 64 for end in losses["end"])
    assert losses["start"][short] == 64 and np.abs(losses["gain"][:short]).max() < 1e-6
    # beyond the cut, the mean of the buckets there
    assert abs(np.dot(losses["gain"], weights) * 256 / 192 - losses["gain_beyond_cut"]) < 1e-6
    assert np.allclose(np.subtract(losses["cut_loss"], losses["loss"]), losses["gain"], atol=1e-9)


def test_each_bucket_holds_as_many_positions_as_all_before_it():
    assert bucket_edges(4096) == [0, *(4 * 2**k for k in range(11))]
    assert bucket_edges(64) == [0, 1, 2, 4, 8, 16, 32, 64]
    assert bucket_edges(96) == [0, 1, 3, 6, 12, 24, 48, 96]


# --- needles ---

class Copier(Model):
    """Predicts what followed the token when it was last here, no more than `reach` tokens ago; else the token
    itself."""

    reach = 10**9

    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        self.gpt.edges.logits = lambda x: (None, None, None, x)

    def hidden(self, tokens, read):
        ids, last, x = tokens[0].tolist(), {}, torch.zeros(tokens.shape[1], self.cfg.padded_vocab_size)
        for t, token in enumerate(ids):
            at = last.get(token, -self.reach - 1)
            x[t, ids[at + 1] if t - at <= self.reach else token] = 20.0
            last[token] = t
        return [read(0, x)]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A dataset of many words, of which each text has some."""
    folder, rng = tmp_path_factory.mktemp("words"), np.random.default_rng(0)
    ids = rng.integers(200, size=(300, 1)) + rng.integers(300, size=(300, 16))
    for split in ("train", "val"):
        ids.astype(np.uint16).tofile(folder / f"{split}.bin")
    meta = dict(dtype="uint16", vocab_size=600, counts={s: dict(tokens=ids.size) for s in ("train", "val")})
    (folder / "meta.json").write_text(json.dumps(meta))
    return open_dataset(str(folder), 1)


def needles(words, kind, lengths=(64, 128, 512), depths=(0.0, 0.5, 1.0)):
    cfg = Layout(**SHAPE | dict(vocab_size=600, block_size=512))
    model = kind(GPT, cfg, CPU, torch.float32, grads=False)
    model.load(initial_weights(cfg, 0, CPU))
    found = measure_needles(model, Questions(words, list(lengths), list(depths), 3, 5), quiet)
    return np.array(found["score"]), np.array(found["gain"]), found


def test_a_model_that_copies_finds_all_needles_and_an_untrained_one_none(words):
    score, gain, found = needles(words, Copier)
    assert (score == 1.0).all() and found["mean_score"] == 1.0 and gain.min() > 10
    score, gain, found = needles(words, Model)
    assert found["mean_score"] <= 0.01 and np.abs(gain).max() < 0.5


def induction_weights(V, S):
    """(keys of a Layout, {name: weight}) of two layers that copy. The residual stream holds the token, the
    position, the token before (layer 0 looks one position back) and the prediction (layer 1 looks for places
    behind the present token)."""
    P, frequencies = 32, 2 * torch.rand(16, generator=torch.Generator().manual_seed(0)).double()
    C, token, before, out = 3 * V + P, slice(0, V), slice(V + P, 2 * V + P), slice(2 * V + P, None)
    cfg = dict(n_layer=2, n_head=1, head_dim=V, n_inner=1, n_embd=C, vocab_size=V, block_size=S,
               norm="rmsnorm", position="learned", tie_embeddings=False)
    w = {name: torch.zeros_like(w) for name, w in initial_weights(Layout(**cfg), 0, CPU)}
    for name in w:
        if name.endswith(("ln1_w", "ln2_w", "lnf_w")):
            w[name].fill_(1.0)
    one = torch.eye(V)
    w["wte"][:V, token] = one
    w["head_w"][:V, out] = one
    angles = torch.outer(torch.arange(S), frequencies)
    w["wpe"][:, V:V + P] = torch.stack((angles.cos(), angles.sin()), -1).flatten(1)
    back = torch.block_diag(*(torch.tensor([[f.cos(), f.sin()], [-f.sin(), f.cos()]]) for f in frequencies))
    w["h.0.q_w"][:P, V:V + P] = 100 * back.float()  # a turn by one position
    w["h.0.k_w"][:P, V:V + P] = torch.eye(P)
    w["h.0.v_w"][:, token] = w["h.1.v_w"][:, token] = one
    w["h.0.proj_w"][before] = w["h.1.proj_w"][out] = one
    w["h.1.q_w"][:, token] = 100 * one
    w["h.1.k_w"][:, before] = one
    return cfg, w


@pytest.mark.slow
def test_a_gpt_with_an_induction_head_finds_all_needles(words):
    keys, w = induction_weights(600, 256)
    model = Model(GPT, Layout(**keys), CPU, torch.float32, grads=False)
    model.load(w.items())
    found = measure_needles(model, Questions(words, [64, 256], [0.0, 0.6, 1.0], 2, 5), quiet)
    assert found["mean_score"] == 1.0 and np.min(found["gain"]) > 3
    w["h.0.q_w"].neg_()  # it looks anywhere but one position back
    model.load(w.items())
    found = measure_needles(model, Questions(words, [64], [0.0, 0.6, 1.0], 2, 5), quiet)
    assert found["mean_score"] < 0.1


def test_a_needle_is_where_it_is_said_to_be(words):
    """A model that remembers the last 100 tokens finds the needles that are as near, and no others."""
    near = type("Near", (Copier,), dict(reach=100))
    score, gain, _ = needles(words, near)
    distance = {(depth, length): length + 1 - NEEDLE - round(depth * (length + 1 - 2 * NEEDLE))
                for depth in (0.0, 0.5, 1.0) for length in (64, 128, 512)}
    expected = np.reshape([float(d <= 100) for d in distance.values()], (3, 3))
    assert 0 < expected.sum() < 9 and np.array_equal(score, expected)
    assert (gain[expected == 1] > 10).all() and np.abs(gain[expected == 0]).max() < 1e-6


def test_needles_are_of_usual_tokens_that_the_text_lacks(words):
    text, rng = torch.arange(101, dtype=torch.int64), np.random.default_rng(1)
    usual = usual_tokens(words)
    needle = draw_needle(usual, text, rng)
    assert set(needle.tolist()) <= set(usual.tolist()) - set(range(101))
    assert len(set(needle.tolist())) == NEEDLE > VALUE
    assert not torch.equal(needle, draw_needle(usual, text, rng))
    assert 599 not in usual  # nothing has it
    for depth, at in ((0.0, 0), (0.5, 34), (1.0, 101 - 2 * NEEDLE), (None, None)):
        made = needle_text(text, needle, depth)
        rest = [*range(101 - NEEDLE)] if at is None else [*range(at), *range(at + NEEDLE, 101 - NEEDLE)]
        assert torch.equal(made[rest], text[rest]) and torch.equal(made[-NEEDLE:], needle)
        assert at is None or torch.equal(made[at:at + NEEDLE], needle)


# --- layouts ---

def measured(host, folder, cfg):
    mesh = mesh_of(host, cfg)
    model = built(cfg, mesh)
    asked = Questions(open_dataset(str(folder), 1), [64, 160], [0.0, 0.7], 3, 1)
    made = measure_losses(model, asked, quiet), measure_needles(model, asked, quiet)
    windows = torch.randint(0, VOCAB, (1, 161), generator=torch.Generator().manual_seed(2))
    windows[0, 1:] = reference_logits(cfg, windows[:, :-1])[0].argmax(1)  # some are the likeliest

    def right(i):
        return token_scores(model, windows, torch.ones(1, 160, dtype=torch.bool))[1].numpy()
    likeliest = over_sequences(model, (1, 160), right)
    model.close()
    return *made, dict(likeliest=likeliest)


@cache
def measured_alone(family, folder):
    return measured(Axis("host"), folder, Layout(**SHAPE | FAMILIES[family]))


def flat(results):
    """All numbers of dicts."""
    return np.concatenate([np.ravel(result[name]) for result in results for name in sorted(result)])


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("text,kind,family", [
    ("tp2", "ring", "gpt"), ("cp2", "ring", "llama"), ("cp2", "ulysses", "gpt"), ("dp2", "ring", "llama"),
    ("tp2 cp2", "ring", "gpt"), ("tp2 cp2", "ulysses", "llama")])
def test_every_layout_gives_the_answers_of_one_process(text, kind, family, dataset):
    size, keys = degrees_of(text), SHAPE | FAMILIES[family]
    cfg = Layout(**keys, tp=size["tp"], cp=size["cp"], context_parallel=kind,
                 gradient_accumulation_steps=size["dp"])
    ranks = pool(size["tp"] * size["cp"] * size["dp"]).run(measured, dataset, cfg)
    alone = measured_alone(family, dataset)
    assert 0 < alone[2]["likeliest"].sum() < 160
    for rank in ranks:
        assert np.abs(flat(rank) - flat(alone)).max() <= 1e-5


# --- the command ---

@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "out"
    assert train.main(argv(dataset, out, block_size=128, max_iters=2, save_interval=0, eval_interval=0)) == 0
    return out


def ask(out, *options):
    return [str(out), "--device=cpu", "--batches=2", "--lengths=64,256", "--needle_depths=0,1", *options]


@pytest.fixture(scope="module")
def evaluated(trained):
    """(what one process prints, what it stores), of ask()."""
    with redirect_stdout(io.StringIO()) as out:
        assert run(evaluate.main, ask(trained)) == 0
    return out.getvalue(), json.loads((trained / "evaluate.json").read_text())


@pytest.mark.slow
def test_the_command_tells_draws_and_stores(trained, evaluated):
    out, found = evaluated
    assert "longer than the 128 tokens that the model was trained at: 256" in out
    assert re.search(r"^ +128 to +256 +\d\.\d{4} +\d\.\d{4} +-?\d\.\d{4}$", out, re.M)
    assert f"needles: {found['needles']['mean_score']:.1%} of the values' tokens are found" in out
    assert found["iter"] == 2 and found["loss_by_position"]["end"][-1] == 256
    assert np.shape(found["needles"]["score"]) == np.shape(found["needles"]["gain"]) == (2, 2)
    for name in ("loss_by_position.png", "needles.png"):
        assert (trained / name).read_bytes().startswith(b"\x89PNG")
    assert run(evaluate.main, ask(trained)) == 0
    assert json.loads((trained / "evaluate.json").read_text()) == found  # the same texts and needles
    # one length, one sequence: nothing to compare with, no error of a mean
    assert run(evaluate.main, [*ask(trained)[:2], "--batches=1", "--lengths=64", "--needle_depths=0.5"]) == 0
    assert "gain" not in json.loads((trained / "evaluate.json").read_text())["loss_by_position"]


@pytest.mark.slow
@pytest.mark.ranks
def test_as_ranks_of_torchrun_it_gives_the_same(trained, evaluated, tmp_path):
    _, alone = evaluated
    for process in (ranks := start_ranks(evaluate.main, ask(trained, "--cp=2"), 2, tmp_path)):
        process.join(TIMEOUT_S)
    assert [process.exitcode for process in ranks] == [0, 0], (tmp_path / "0.err").read_text()
    assert ["needles: " in (tmp_path / f"{rank}.out").read_text() for rank in (0, 1)] == [True, False]
    found = json.loads((trained / "evaluate.json").read_text())
    assert found["layout"] == dict(tp=1, cp=2, dp=1, context_parallel="ring")
    both = [flat((result["loss_by_position"], result["needles"])) for result in (found, alone)]
    assert np.abs(both[0] - both[1]).max() <= 1e-5


def test_default_lengths_are_parts_of_the_trained_one():
    layout = partial(evaluate.default_lengths, evaluate.read_argv(["out", "--cp=3"]))
    assert layout(Layout(block_size=4096)) == [252, 1020, 4092]
    assert layout(Layout(block_size=128)) == [126]
    assert layout(Layout(block_size=8)) == [66]


@pytest.mark.parametrize("options,world,message", [
    (["--lengths=64,65"], 1, None),  # one rank takes any length
    (["--lengths=32"], 1, "lengths=32 must be at least 64 (needle and query take half of that)"),
    (["--lengths=64,130", "--cp=2"], 2, "lengths=130 % (2*cp*tp)=4 != 0 (the tokens are shared out)"),
    (["--lengths=65", "--tp=2"], 2, "lengths=65 % (cp*tp)=2 != 0 (the tokens are shared out); try 66"),
    (["--lengths=2000"], 1, "lengths=2000 + 1 must be <= 2000, the tokens of"),
    (["--lengths=64,"], 1, "lengths='' must be int"),
    (["--lengths=0"], 1, "lengths=0 must be at least 1"),
    (["--needle_depths=0,1.5"], 1, "needle_depths=1.5 must be at most 1.0 (1 is just before the query)"),
    (["--needle_depths=nan"], 1, "needle_depths=nan must be at least 0.0"),
    (["--batches=0"], 1, "batches=0 must be at least 1"),
    (["--tp=2"], 1, "dp(1)*cp(1)*tp(2) != WORLD_SIZE(1); start it with torchrun"),
    (["--tp=4"], 4, "n_head=2 % tp=4 != 0"),
    (["--dataset=nowhere"], 1, "dataset=nowhere must be a folder's name under data/ or a path"),
    (["--context_parallel=star"], 1, "context_parallel='star' must be one of ring, ulysses"),
])
def test_mistakes_are_told_in_a_line(trained, options, world, message):
    given = [str(trained), "--device=cpu", *options]
    launch = Launch(0, world, 0, world)
    if message is None:
        assert evaluate.check_evaluation(given, launch, {}).questions.lengths == [64, 65]
        return
    with pytest.raises(ConfigError) as e:
        evaluate.check_evaluation(given, launch, {})
    assert message in str(e.value) and "\n" not in str(e.value)


@pytest.mark.slow
def test_other_mistakes_too(trained, dataset, tmp_path, capsys):
    assert run(evaluate.main, [str(tmp_path)]) == 2
    assert re.fullmatch("error: .* holds no checkpoint; .*\n", capsys.readouterr().err)
    folder = tmp_path / "no_val"
    folder.mkdir()
    for name in ("train.bin", "meta.json"):
        (folder / name).write_bytes((dataset / name).read_bytes())
    assert run(evaluate.main, [str(trained), f"--dataset={folder}", "--device=cpu"]) == 2
    assert re.fullmatch("error: .*val.bin is missing.*\n", capsys.readouterr().err)
    learned = argv(dataset, tmp_path / "learned", position="learned", max_iters=2, eval_interval=0)
    assert train.main(learned) == 0
    capsys.readouterr()
    assert run(evaluate.main, [str(tmp_path / "learned"), "--lengths=64,128", "--device=cpu"]) == 2
    assert "lengths=128 must be at most block_size=64, the positions that" in capsys.readouterr().err


def test_a_lack_of_memory_is_a_line():
    with pytest.raises(RunFailed, match="out of memory .* at 1 x 64; try more ranks"), room_for("1 x 64"):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
    with pytest.raises(RuntimeError, match="^other$"), room_for("anything"):
        raise RuntimeError("other")
