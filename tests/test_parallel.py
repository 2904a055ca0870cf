"""A layout gives the loss and gradients of one process; in it all modes and alphas give the same bits."""

from functools import cache

import pytest
import torch

from memo.config.layer import layer_of, n_rows
from memo.config.layout import Layout
from memo.layer.edges import Edges
from memo.memory.parameters import views
from memo.memory.placement import Placement
from memo.parallel.mesh import ALONE, Mesh
from memo.planner.allocator import Arena
from memo.planner.plan import plan_trace
from memo.run.load_config import load_config
from memo.run.rehearsal import FakeArena, rehearsed_requests, traced_requests
from memo.schedule.streams import open_streams
from memo.states.passes import Model
from memo.system.axis import Axis
from model import GPT
from testing.ranks import pool
from tests.helpers import GEMMA, LLAMA, OLMO, degrees_of, half_rotary, mesh_of, step
from tests.layouts import build, layout_keys, make_small, on_ranks, relative_error

CPU = torch.device("cpu")
S = 2048
KEYS = dict(n_layer=3, n_head=8, n_embd=64, vocab_size=150, block_size=S)
# sequences of 256 and 512 tokens, 2,048 in all: of short ones attention takes less time
FAMILIES = {"rope": dict(batch_size=8, block_size=256),
            "learned": dict(position="learned", bias=True, gelu="tanh", batch_size=8, block_size=256),
            # H D between C and F, and below C: the gradient of attention's output has another's place then
            "llama": LLAMA | half_rotary(12) | dict(n_kv_head=4, head_dim=12, qkv_bias=True, batch_size=8,
                                                    block_size=256),
            "qwen": LLAMA | half_rotary(4) | dict(n_kv_head=4, head_dim=4, qk_norm=True, batch_size=4,
                                                  block_size=512),
            "olmo": OLMO | dict(n_kv_head=4, batch_size=4, block_size=512),
            "gemma": GEMMA | dict(batch_size=4, block_size=512),
            "behind": OLMO | dict(qk_norm_over="head", batch_size=4, block_size=512)}
MODES = [dict(activation="keep"), dict(activation="recompute"), dict(activation="memo", alpha=0.5),
         dict(activation="memo", alpha_mode="per_tensor")]
ENDS = [dict(activation="memo", alpha=0.0), dict(activation="memo", alpha=1.0)]
LAYOUTS = {"rope": ["tp2", "tp4", "cp2", "cp4", "tp2 cp2", "dp2", "tp2 cp2 dp2"],
           "learned": ["tp2", "cp2", "tp2 cp2 dp2"], "llama": ["tp2", "cp2"], "qwen": ["tp4", "tp2 cp2"],
           "olmo": ["tp4", "tp2 cp2"], "gemma": ["tp2"],
           # tp ranks hold copies of keys and values
           "grouped": ["tp4", "tp4 cp2"], "one head of keys": ["tp4", "tp2 dp2"]}
FAMILIES["one head of keys"] = OLMO | dict(n_kv_head=1, batch_size=4, block_size=512)
FAMILIES["grouped"] = LLAMA | dict(qkv_bias=True, batch_size=8, block_size=256)  # two heads of keys
METP_LAYOUTS = {"rope": ["tp1", "tp2", "tp2 cp2 dp2"], "learned": ["tp4", "tp2 cp2"],
                "llama": ["tp2 dp2"], "qwen": ["tp2 cp2"], "grouped": ["tp1", "tp4"],
                "gemma": ["tp2", "tp4"], "behind": ["tp2 cp2"]}
KINDS = [(family, text, kind) for family, layouts in LAYOUTS.items() for text in layouts
         for kind in ("ring", "ulysses") if kind == "ring" or "cp" in text]
KINDS.remove(("learned", "tp2 cp2 dp2", "ulysses"))  # "rope" has both
KINDS += [(family, text, "metp") for family, layouts in METP_LAYOUTS.items() for text in layouts]


def micros(family, text):
    """Micro-batches of a step. A rank sums up the gradients of two in "rope" alone, which has all layouts."""
    return 2 if family == "rope" else degrees_of(text)["dp"]


@cache
def alone(family, micros):
    """(loss, norm, gradients) of one process."""
    cfg = Layout(**KEYS | FAMILIES[family], gradient_accumulation_steps=micros, activation="keep")
    model, optimizer = build(cfg, ALONE)
    loss = step(model, optimizer, cfg)
    return loss.item(), optimizer.clip(0.0).item(), views(model.layout, model.grads)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("family,text,kind", KINDS)
def test_every_layout_gives_the_gradients_of_one_process(family, text, kind):
    modes = MODES[1:3] if text in ("tp2", "cp2", "tp2 cp2") else MODES[2:3]
    if family == "rope" and len(modes) == 2:
        modes = MODES[1:] + ENDS[:1] if kind == "metp" else MODES
    summed = micros(family, text)
    keys = KEYS | FAMILIES[family] | layout_keys(text, kind) | dict(gradient_accumulation_steps=summed)
    first, *others = on_ranks(text, [Layout(**keys, **mode) for mode in modes], True)
    loss, norm, reference = alone(family, summed)
    assert abs(first[0] - loss) <= 1e-5 * loss
    assert abs(first[1] - norm) <= 1e-4 * norm  # torch sums squares on the CPU in fp32, one after the other
    assert set(first[2]) == set(reference)
    worst = max((relative_error(first[2], reference, name), name) for name in reference)
    assert worst[0] <= 1e-5, worst
    assert first[3] == 0, "requests that missed the memory plan"
    for mode, other in zip(modes[1:], others, strict=True):
        assert other[:2] == first[:2] and other[3] == 0, mode
        assert all(torch.equal(other[2][name], first[2][name]) for name in reference), mode


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("tp,cp", [(2, 1), (1, 2), (2, 2), (8, 1), (4, 2)])
@pytest.mark.parametrize("family,shared", [("rope", 1), ("grouped", 4)])
def test_a_layer_sends_what_the_formulas_say(tp, cp, kind, pieces, family, shared, monkeypatch):
    """`shared`: query heads that read one head of keys and values, of which only its own travel."""
    if pieces:
        make_small(monkeypatch)
    cfg = Layout(**KEYS | dict(batch_size=2, n_kv_head=KEYS["n_head"] // shared), tp=tp, cp=cp,
                 context_parallel=kind)
    mesh = Mesh(weights=Axis("tp", tp, tp - 1), tokens=Axis("cp", cp))
    model = Model(GPT, cfg, "meta", torch.bfloat16, mesh=mesh)
    model.reserve(2, S // cp, streams=open_streams(CPU))
    model.gpt.blocks[0].forward(model.swap.layers[0], model.swap.x[1])
    BTC = 2 * (S // cp) * cfg.n_embd * 2  # bytes, bf16
    assert mesh.weights.sent_bytes == 4 * BTC * (tp - 1) // tp  # two gathers, two scattered sums
    heads = max(1, KEYS["n_head"] // shared // tp)  # of keys, a rank: where there are few they have copies
    KV = 2 * BTC // KEYS["n_head"] * heads  # bytes of a block's keys and values
    if kind == "ulysses" and heads % cp:
        KV *= cp  # one head, to every rank
    if pieces:
        KV = 2 * BTC // tp  # groups of so few query heads that keys and values travel for every one of them
    exchanged = (2 * BTC // tp + KV) * (cp - 1) // cp
    assert mesh.tokens.sent_bytes == (KV * (cp - 1) if kind == "ring" else exchanged)
    mesh.take_sent_bytes()
    model.gpt.blocks[0].backward(model.swap.x[1], model.swap.layers[0])
    assert mesh.weights.sent_bytes == 6 * BTC * (tp - 1) // tp  # four gathers, two scattered sums
    home = 2 * KV * (cp - 1)  # a ring's gradients of keys and values, fp32
    exchanged = (4 * BTC // tp + 2 * KV) * (cp - 1) // cp
    assert mesh.tokens.sent_bytes == (KV * (cp - 1) + home if kind == "ring" else exchanged)


@pytest.mark.parametrize("groups", [1, 2], ids=["a group a rank", "two"])
@pytest.mark.parametrize("tp,cp", [
    (1, 1), (2, 1), (2, 2), (1, 4), pytest.param(8, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family,shared,matmul", [
    ("gelu", 1, "bf16"), ("swiglu", 1, "bf16"), ("swiglu", 4, "bf16"), ("swiglu", 4, "fp8")])
def test_a_layer_of_metp_sends_what_the_formulas_say(family, shared, matmul, tp, cp, groups):
    """Every rank: of the MLP's matrices all but a tp-th part, in the backward with gradients; of attention's
    too; keys and values of a rank's own tokens."""
    H, C, D, F = 16, 128, 16, 256
    cfg = Layout(n_layer=1, n_head=H, n_embd=C, n_inner=F, vocab_size=128, block_size=S, mlp=family, tp=tp,
                 cp=cp, n_kv_head=H // shared, head_dim=D, tensor_parallel="metp", head_groups=groups * tp,
                 matmul=matmul)
    e = 2 if matmul == "bf16" else 1  # bytes of a matrix's element; of each matrix in FP8 a scale, too
    scales = (2 - e) * 4 * (tp - 1) * (4 + (3 if family == "swiglu" else 2))
    times = max(1, groups * tp // (H // shared))  # keys and values of heads that several groups share
    KV = H * D // shared * times
    mlp, attention = (3 if family == "swiglu" else 2) * F * C, 2 * H * D * C + 2 * KV * C
    for rank in {0, tp - 1}:
        mesh = Mesh(weights=Axis("tp", tp, rank), hops=Axis("hops", tp, rank),
                    tokens=Axis("cp", tp * cp, rank))
        model = Model(GPT, cfg, "meta", torch.bfloat16, mesh=mesh)
        model.reserve(1, S // cp, streams=open_streams(CPU))
        axes = mesh.hops, mesh.weights, mesh.tokens
        model.gpt.blocks[0].forward(model.swap.layers[0], model.swap.x[1])
        away, block = (tp - 1) / tp, 2 * KV * S // (cp * tp) * (cp * tp - 1)
        sent = [axis.sent_bytes for axis in axes]
        assert sent == [e * mlp * away, e * attention * away + scales, 2 * block]
        model.gpt.blocks[0].backward(model.swap.x[1], model.swap.layers[0])
        sent = [axis.sent_bytes - n for axis, n in zip(axes, sent, strict=True)]
        # bf16 keys and values, and matrices where these are not in FP8; their gradients are fp32
        assert sent == [(e + 4) * mlp * away, (e + 4) * attention * away + scales, (2 + 4) * block]


def both_traces(host, cfg):
    """Requests of this rank's step, recorded and traced with nobody at the other ends, and the bytes sent."""
    mesh = mesh_of(host, cfg)
    model, _ = build(cfg, mesh)
    arena = Arena(CPU, "greedy")
    made, silent = [], mesh.silent()
    mesh.take_sent_bytes()
    for trace, m in ((rehearsed_requests(model, arena), mesh),
                     (traced_requests(lambda device: Model(GPT, cfg, device, torch.float32, mesh=silent),
                                      *model.shape, model.swap.missing, "cpu"), silent)):
        sizes = {label: [n for verb, _, n in events if verb == "malloc"]
                 for label, events in trace.segments.items()}
        made.append((sizes, m.take_sent_bytes()))
    model.close()
    return made


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["ring", "ulysses", "metp"])
def test_a_rank_can_be_traced_without_the_others(kind):
    cfg = Layout(**KEYS | FAMILIES["rope"] | layout_keys("tp2 cp2", kind), alpha=0.5)
    for (recorded, sent), (traced, would_send) in pool(4).run(both_traces, cfg):
        assert sent == would_send and list(recorded) == list(traced)
        for label, sizes in traced.items():
            rest = list(recorded[label])
            for n in sizes:  # in the same order; what is passed over are workspaces of kernels
                while rest.pop(0) != n:
                    pass


@pytest.mark.slow
def test_no_rank_ever_has_full_logits():
    cfg = Layout(n_layer=1, n_head=4, n_embd=16, vocab_size=50257, block_size=4096, tp=4)
    model = Model(GPT, cfg, "meta", torch.bfloat16, mesh=Mesh(weights=Axis("tp", 4, 1)))
    arena = FakeArena()
    model.arena = arena
    tokens = torch.zeros(1, 4096, dtype=torch.int64, device="meta")
    model.reserve(1, 4096, streams=open_streams(CPU))
    model.forward(tokens, tokens, scale=1.0)
    largest = max(n for events in arena.recorded().segments.values() for verb, _, n in events
                  if verb == "malloc")
    assert largest == 2 * 4096 * 50304 // 4  # the logits of a chunk of tokens, bf16, a quarter of the words


@pytest.mark.slow
@pytest.mark.parametrize("tp,cp,kind,S",
                         [(4, 2, "ring", 2**20), (4, 2, "ulysses", 2**20), (8, 1, "ring", 2**20),
                          (2, 4, "ring", 2**20), (1, 8, "ring", 2**20), (1, 8, "ulysses", 2**20),
                          (4, 2, "ring", 2**21), (1, 8, "ulysses", 2**21)])
def test_a_layer_takes_little_beside_its_buffers(tp, cp, kind, S, monkeypatch):
    """At a million tokens and more: all of a step's temporary tensors in units of one (n, C)."""
    monkeypatch.setattr(Edges, "head", lambda *args: None)  # its chunks take long to trace, little memory
    cfg = Layout.of(load_config(["config/7b_1m.py", f"--block_size={S}", f"--tp={tp}", f"--cp={cp}",
                                 f"--context_parallel={kind}", "--n_layer=3"]))
    mesh = Mesh(weights=Axis("tp", tp), tokens=Axis("cp", cp))
    N = n_rows(cfg)
    missing = [Placement(3, 1, N, {t.name: 0 for t in layer_of(cfg).skeletal if t.group}).missing(0)] * 3
    trace = traced_requests(lambda device: Model(GPT, cfg, device, torch.bfloat16, mesh=mesh), 1, S // cp,
                            missing)
    assert plan_trace(trace).arena_bytes <= 2.25 * N * cfg.n_embd * 2


def memory_of(S, **keys):
    """Bytes of a rank's activations in a layout, without ranks."""
    cfg = Layout(**KEYS | keys | dict(block_size=S))
    mesh = Mesh(weights=Axis("tp", cfg.tp), tokens=Axis("cp", cfg.cp))
    model = Model(GPT, cfg, "meta", torch.bfloat16, mesh=mesh)
    model.reserve(1, S // cfg.cp, streams=open_streams(CPU))
    return model.swap.device_bytes


def test_activations_fall_with_tp_and_cp():
    whole = memory_of(4096)
    for tp, cp in ((2, 1), (1, 4), (2, 2), (8, 8)):
        assert memory_of(4096, tp=tp, cp=cp) == whole // (tp * cp)
