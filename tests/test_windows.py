"""Layers with a sliding window: kernels within a band, every layout, the reach of a token, the estimate."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from memo.config.config import Config
from memo.config.formulas import squares_met
from memo.config.layer import tensors_of
from memo.config.layout import Layout, pieces_near, subsequence_lengths
from memo.decide.pipeline import even_shares
from memo.decide.where import placed
from memo.estimate.arena import fast_arena, shortest
from memo.estimate.budget import estimate
from memo.estimate.packed import met_by_ranks
from memo.estimate.unit_seconds import modelled_rates
from memo.kernels.attention import BACKENDS, facts_of, said
from memo.kernels.backends import missing, windows_words
from memo.kernels.bands import Band
from memo.layer.masks import CAUSAL, documents
from memo.layer.tiles import RowOrder
from memo.memory.sizes import Sizes
from memo.planner.allocator import NoArena
from memo.states.passes import Model
from memo.system.hardware import machine
from model import GPT
from tests.helpers import CPU, perturbed_weights
from tests.layouts import agree, layout_keys, on_ranks, step_alone
from tests.packed import FAMILIES, KEYS, of_documents, packed_gradients, write_folder

H100 = machine("h100-80gb")


@pytest.mark.parametrize("band", [Band(0, 0), Band(6, 0), Band(300, 0), Band(0, -1)])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("n", [1, 37, 600])
@pytest.mark.parametrize("name", [name for name in BACKENDS if BACKENDS[name].bands])
def test_a_band_is_what_the_mathematics_masks(name, n, kv_heads, band):
    device = torch.device("cuda" if torch.cuda.is_available() and name != "cpu" else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if missing(name, facts_of(device, dtype, 16, aligned=True)[0]):
        pytest.skip("it cannot run here")
    g = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (torch.randn(2, n, h, 16, generator=g, device=device).to(dtype)
                     for h in (6, kv_heads, kv_heads, 6))
    leaves = q_, k_, v_ = [t.double().requires_grad_() for t in (q, k, v)]
    seen = torch.ones(n, n, dtype=torch.bool, device=device).triu(-band.left)
    seen = seen.tril(band.right) if band.right >= 0 else seen
    scores = torch.einsum("bqhd,bkhd->bhqk", q_, k_.repeat_interleave(6 // kv_heads, 2)) / 4
    scores = scores.masked_fill(~seen, -torch.inf)
    want = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v_.repeat_interleave(6 // kv_heads, 2))
    gradients = torch.autograd.grad(want, leaves, dout.double())
    forward, backward = BACKENDS[name].bands
    out, lse = forward(q, k, v, band)
    got = out, lse, *backward(dout, q, k, v, out, lse, band)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for mine, exact in zip(got, (want, scores.logsumexp(-1), *gradients), strict=True):
        assert mine.shape == exact.shape
        torch.testing.assert_close(mine.double(), exact, rtol=limit, atol=limit)


# windows shorter and longer than the chunks of the ranks; each other layout has documents and kinds of layers
KINDS = dict(gpt=dict(layer_types="sliding,full"),
             qwen=dict(layer_types="sliding,full-nope,full", rope_local_theta=500.0,
                       rope_scaling='{"rope_type": "linear", "factor": 4.0}'))
LAYOUTS = [("dp1", "ring", {}, 20), ("dp1", "ring", dict(subsequences=3), 33),
           ("dp1", "ring", dict(subsequences=8), 5),
           ("cp4", "ring", {}, 9), ("cp4", "ring", {}, 50), ("cp2", "ring", dict(subsequences=3), 40),
           ("cp2", "ulysses", {}, 20), ("cp2", "ulysses", dict(subsequences=3), 30), ("tp2", "ring", {}, 20),
           ("tp2", "metp", dict(subsequences=4), 11), ("tp2 cp2", "metp", {}, 70), ("tp2", "metp", {}, 1),
           ("tp2 cp2", "ring", dict(subsequences=2), 7), ("pp2", "ring", dict(subsequences=4), 45),
           ("pp2 cp2", "ring", dict(subsequences=4, msp=True), 20),
           ("cp2", "ring", dict(subsequences=8, unit_order="subsequence"), 12)]
MODES = [dict(activation="recompute"), dict(activation="memo", alpha=0.5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    lengths = [1, 300, 45, 128, 64, 1, 1, 200, 31, 77, 2, 19, 129, 50, 3, 17, 90, 24, 8, 1, 15]
    return str(write_folder(tmp_path_factory.mktemp("windows") / "d", lengths))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("text,kind,more,window,documents", [
    *((*case, False) for case in LAYOUTS), *((*case, True) for case in LAYOUTS[1::2])])
def test_every_layout_gives_the_gradients_of_one_process(folder, text, kind, more, window, documents):
    """Of one process without documents, where memo.verify compares that with fp64; with them of fp64."""
    family = "qwen" if window % 2 else "gpt"
    model = KEYS | FAMILIES[family] | dict(documents=documents, sliding_window=window)
    model |= KINDS[family] if documents else {}
    keys = model | layout_keys(text, kind) | more
    cfgs = [Layout(**keys | mode) for mode in MODES]
    if "msp" in more:
        cfgs = [replace(cfg, shares=even_shares(cfg)) for cfg in cfgs]
    how = dict(work=packed_gradients) if documents else {}
    first, other = on_ranks(text, cfgs, folder if documents else True, **how)
    one = of_documents(Layout(**model), folder) if documents else step_alone(
        Layout(**model, activation="keep"))
    agree(*map(without_scores if window == 1 else tuple, (first, one)), (text, kind, more))
    assert other[:2] == first[:2] and other[3] == first[3] == 0  # no request missed the memory plan
    assert all(torch.equal(t, first[2][name]) for name, t in other[2].items())


def without_scores(found):
    """Gradients that are not 0 but for noise where a token sees itself alone."""
    loss, norm, gradients, *more = found
    named = {name: t for name, t in gradients.items() if name.split(".")[-1][0] not in "qk"}
    return loss, norm, named, *more


def test_a_token_reaches_as_far_as_the_windows_of_all_layers():
    """L (W - 1) tokens, and not one more."""
    cfg = Layout(n_layer=3, n_head=2, n_embd=32, vocab_size=64, block_size=64, sliding_window=6)
    model = Model(GPT, cfg, CPU, torch.float32, grads=False)
    model.load(perturbed_weights(cfg, CPU))
    tokens = torch.arange(64)[None] % 61
    changed = tokens.clone()
    changed[0, 10] = 62
    model.reserve_forward(1, 64)
    one, two = (model.hidden(t, lambda i, x: x.clone())[0] for t in (tokens, changed))
    assert (one != two).any(1).nonzero().flatten().tolist() == [*range(10, 10 + 3 * 5 + 1)]


def test_a_ring_makes_the_hops_that_a_window_needs():
    for window, hops in ((8, [1, 7]), (9, [1, 7]), (10, [1, 2, 6, 7]), (128, [*range(1, 8)])):
        order = RowOrder([(128,)], "ring", 8, masks=(CAUSAL.near(window),))
        [met] = order.meetings(0, 0, 16)
        assert met.distances == hops, window
    [met] = RowOrder([(128,)], "ring", 8, masks=(CAUSAL.near(6),)).meetings(0, 0, 16)
    assert [met.halo(*pair) for pair in ((1, 0), (0, 1), (0, 7), (7, 0))] == [  # W - 1 rows each way
        [((3, 8),)], [((11, 16),)], [()], [()]]


@pytest.mark.parametrize("S,W", [(4096, 512), (4096, 4095), (4096, 4096), (100, 1)])
def test_pairs_of_a_window_are_counted(S, W):
    cfg = Config(block_size=S, sliding_window=W, n_embd=64)
    exact = sum(min(i + 1, W) for i in range(S))
    assert abs(squares_met(S, cfg.window) / 2 - exact) <= S / 2
    assert squares_met(S, cfg.window) == (2 * S * W - W**2)


@pytest.mark.parametrize("keys", [dict(), dict(cp=4), dict(cp=4, subsequences=3), dict(tp=2, cp=2,
    context_parallel="ulysses"), dict(tp=2, cp=2, tensor_parallel="metp"), dict(subsequences=4)])
def test_the_estimate_counts_what_the_window_leaves(keys):
    S, W = 768 * 512, 30000
    cfg = Layout(**dict(n_layer=2, n_head=8, n_embd=512, block_size=S, vocab_size=512, sliding_window=W,
                        subsequences=1) | keys)
    layer, flops = modelled_rates(cfg, H100, 2), 0.0
    cuts = [unit.unit.S for unit in layer.units]
    same = cfg.tp * (cfg.cp if cfg.context_parallel == "ulysses" else 1) // (cfg.tp if cfg.metp else 1)
    for i, unit in enumerate(layer.units):
        flops += same * sum(calls.times * calls.flops for of in met_by_ranks(unit.unit, i, cuts, ((S,),))
                            for calls in (*of.own, *of.earlier))
    assert flops == pytest.approx(2 * cfg.n_embd * squares_met(S, W), rel=1e-4)
    whole = modelled_rates(replace(cfg, sliding_window=0), H100, 2)
    assert layer.forward_s < whole.forward_s / 3


def test_calls_by_lengths_go_from_document_to_document():
    """Those longer than the window, too, which are other tiles."""
    ends = list(accumulate([10, 300] * 6))
    starts = []

    def place(t):
        starts.append(t.tolist())
        return t
    order = RowOrder([(ends[-1],)], masks=[documents(ends, 64)])
    [met] = order.meetings(0, 0, ends[-1], NoArena().fence, place)
    (call,), = met.tiles()
    assert starts == [[0, *ends]] and call.causal.left == 63 and call.causal.longest == 300


def test_an_open_side_of_a_band_is_said_as_each_package_says_it():
    assert said(Band(0, -1)) == dict(window_size_left=0, window_size_right=-1, causal=False)
    assert said(Band(0, -1), None)["window_size_right"] is None
    assert said(Band(5, 0), None) == dict(window_size_left=5, window_size_right=0, causal=True)


def test_full_layers_have_the_fastest_kernel_and_windows_one_that_has_them():
    assert all(BACKENDS[name].bands for name in BACKENDS)
    cfg = Layout(**dict(n_layer=2, block_size=65536, n_embd=4096, n_head=32, vocab_size=512,
                        sliding_window=4096, layer_types="sliding,full", subsequences=4))
    full, flash = (modelled_rates(replace(cfg, **keys), H100, 2) for keys in (
        dict(sliding_window=0, layer_types=""), dict(attention="flash")))
    for unit, alone, slow in zip(modelled_rates(cfg, H100, 2).units, full.units, flash.units, strict=True):
        sliding, whole = cfg.stage_kinds
        assert unit.of(whole).forward_s == alone.forward_s < slow.of(whole).forward_s
        assert 0.8 * slow.of(sliding).forward_s < unit.of(sliding).forward_s <= slow.of(sliding).forward_s
    assert windows_words("cudnn", True) == " (windows by flash)" and not windows_words("flash", True)


def test_stages_of_other_kinds_of_layers_are_decided_for_by_themselves():
    """Copies of full layers hide behind their longer units."""
    cfg = Layout(**dict(n_layer=32, n_head=32, n_embd=4096, block_size=2**18, vocab_size=512, pp=4,
                        subsequences=1, sliding_window=1024, layer_types="sliding*16,full*16",
                        norm="rmsnorm", mlp="swiglu"))
    alphas = [stage.alpha for stage in estimate(cfg, H100, 4, fast_arena).stages]
    assert max(alphas[:2]) < 0.2 and min(alphas[2:]) > 0.4, alphas


@pytest.mark.parametrize("types", ["sliding*10,full", "sliding,full", "full"])
def test_the_shortest_stage_has_the_kinds_of_its_own(types):
    """However heavy the head is, which leaves the last stage few layers."""
    cfg = Layout(**dict(n_layer=24, n_head=8, n_embd=256, block_size=4096, vocab_size=262144, pp=4,
                        sliding_window=1024 * ("s" in types), layer_types=types))
    for stage in (*cfg.every_stage, *replace(cfg, msp=True, subsequences=4).every_stage):
        short, kinds = shortest(stage), cfg.kinds if stage.msp else stage.stage_kinds  # it may help any stage
        assert {*short.stage_kinds} == {*kinds} and short.has_head == stage.has_head


@pytest.mark.parametrize("W", [1, 2, 64, 65, 66, 150, 4096])
@pytest.mark.parametrize("keys", [dict(subsequences=4), dict(subsequences=7, cp=2), dict(
    subsequences=6, unit_order="subsequence", subsequence_cut="equal")])
def test_a_unit_reads_the_pieces_that_its_windows_reach(W, keys):
    cfg = Layout(**dict(n_layer=2, n_head=8, n_embd=512, block_size=512, vocab_size=512, sliding_window=W,
                        layer_types="sliding,full", subsequence_cut="flops") | keys)
    lengths = subsequence_lengths(cfg)
    owner = [i for i, n in enumerate(lengths) for _ in range(n)]
    most = max(owner[t] - owner[max(0, t - W + 1)] + 1 for t in range(cfg.block_size))
    assert pieces_near(cfg) == ((most, len(lengths)) if most < len(lengths) else ())


@pytest.mark.parametrize("keys", ["copied", "made"])
@pytest.mark.parametrize("order", ["layer", "subsequence"])
def test_what_a_sliding_layer_has_on_the_device_does_not_grow(order, keys):
    """The slab grows by inputs, attn_out and lse alone where keys are made again."""
    L, found = 8, []
    for N in (8, 16, 32):
        cfg = Layout(**dict(n_layer=L, n_head=8, n_embd=512, n_kv_head=2, block_size=2048 * N, vocab_size=512,
                            sliding_window=1000, subsequences=N, subsequence_cut="equal", unit_order=order,
                            activation="memo", alpha=0.0))
        p, tensors = placed(cfg, 2, keys), tensors_of(cfg, 2)
        kept = {name: 0 if t.group else p.n_rows for name, t in tensors.items()}
        sizes = Sizes(replace(p, kept=kept), tensors)
        always = sum(t.nbytes for name, t in tensors.items() if not t.group and name not in ("k", "v"))
        sent = L * 2 * tensors["k"].nbytes * (keys == "copied")
        found.append((sizes.region_bytes["keys"], sizes.region_bytes["key_gradients"]))
        assert sizes.host_bytes == pytest.approx(L * always + sent, rel=0.1), N
    piece = 2 * 2048 * 2 * 64  # elements of keys and values
    arriving, layers = order == "layer" and keys == "copied", L if order == "subsequence" else 1
    assert found == [(2 * piece * (2 + arriving) * layers, 4 * piece * 2 * layers)] * 3
