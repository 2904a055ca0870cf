"""Every mode and alpha gives the same bits, whatever the streams' timing; without any of the waits, not."""

import gc
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from memo.config.layer import groups_of
from memo.config.layout import Layout, unit_rows
from memo.decide.step_seconds import UnitRates, step_seconds
from memo.decide.where import Room, place_rows, placed, problem_of, with_stream
from memo.estimate.regions import activation_lines
from memo.memory.buffers import Swap
from memo.memory.placement import Placement
from memo.memory.sizes import Sizes
from memo.memory.slab import HostSlab
from memo.run.report import placement_record
from memo.schedule.periods import totals_of
from memo.schedule.simulate import times_of
from memo.schedule.spans import stall_s
from memo.schedule.step import Moved, Op, Step, Unit
from memo.schedule.streams import CpuStream, Streams, Timeline, open_streams
from memo.states.optim import Optimizer
from memo.states.passes import Model
from model import GPT
from testing.notes import noted_mesh
from testing.turns import RACES, WAITS, Racing, kind_of
from tests.helpers import (
    GEMMA,
    LLAMA,
    OLMO,
    costs_of,
    error,
    gpt_layer,
    half_rotary,
    perturbed_weights,
    random_batch,
    resident_bytes,
)

CPU = torch.device("cpu")
MODEL = dict(n_layer=5, n_head=1, n_embd=32, vocab_size=64)
EIGHTHS = [i / 8 for i in range(9)]



def placement(cfg, B, S, dtype, host=1.0, hidden=1.0):
    """The Placement of `cfg` where host and copy's time are these parts of what swapping all needs."""
    problem = problem_of(cfg, dtype.itemsize, None, Room(0, cpu=True))
    whole = sum(problem.nbytes.values())
    p = replace(problem, forward_s=tuple(hidden * whole * part for part in problem.parts),
                offload_bytes_per_s=1.0, host_bytes=int(host * max(0, problem.needed_bytes(1))))
    assert cfg.n_subsequences > 1 or set(costs_of(p.tensors)) == set(groups_of(p.tensors))
    return place_rows(cfg, p, costs_of(p.tensors))[0]


def build(B, S, dtype, device="cpu", streams=None, limits=None, changed=None, **keys):
    """`changed`: fields of the Placement that are others than the config's."""
    cfg = Layout(**{**MODEL, "block_size": S, "batch_size": B, **keys})
    model = Model(GPT, cfg, device, dtype)
    optimizer = Optimizer(model, cfg)
    optimizer.load(perturbed_weights(cfg, device))
    placed = replace(placement(cfg, B, S, dtype, **(limits or {})), **(changed or {}))
    model.reserve(B, S, placed, streams=streams)
    return cfg, model, optimizer


def run_pass(model, batch):
    """Loss of one forward and backward, once every stream is done."""
    loss = model.forward(*batch, scale=1.0)
    model.backward()
    for stream in model.swap.streams[:3]:
        stream.synchronize()
    return loss


def trained(B, S, dtype, steps, **keys):
    """Losses and gradients of every step, and the parameters behind the last, in one list of tensors."""
    cfg, model, optimizer = build(B, S, dtype, **keys)
    seen = []
    for i in range(steps):
        seen.append(model.forward(*random_batch(cfg, B, S, "cpu", seed=i), scale=1.0))
        model.backward()
        seen.append(model.grads.clone())
        optimizer.step(1e-3)
    model.close()
    return [*seen, model.params]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


MODES = [dict(activation="recompute"), dict(activation="swap"),
         *(dict(activation="memo", alpha=a) for a in EIGHTHS),
         dict(activation="memo", alpha_mode="per_tensor", limits=dict(hidden=0.6)),
         dict(activation="memo", alpha_mode="paper", limits=dict(hidden=0.6))]
FEWER_MODES = [*MODES[:2], *MODES[2:-2:2], *MODES[-2:]]  # every other eighth
FEWEST_MODES = [MODES[0], MODES[5], MODES[-2]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype, B, modes", [(torch.float32, 8, MODES), (torch.bfloat16, 1, FEWER_MODES)],
                         ids=["fp32", "bf16"])
def test_every_mode_and_alpha_is_bitwise_equal(dtype, B, modes):
    S = 2048 // B  # 2,048 rows: each eighth of them is another number of 256 rows
    keep = trained(B, S, dtype, 2, n_layer=4, activation="keep")
    for mode in modes:
        assert same(trained(B, S, dtype, 2, n_layer=4, **mode), keep), mode


@pytest.mark.slow
@pytest.mark.parametrize("S,dtype", [(512, torch.bfloat16), (750, torch.float32)],
                         ids=["512-bf16", "750-fp32"])
def test_chunk_by_chunk_and_group_by_group_alike(S, dtype, monkeypatch):
    keys = dict(n_layer=4, n_head=4, bias=True)
    whole = trained(2, S, dtype, 1, activation="keep", **keys)
    monkeypatch.setattr("memo.kernels.rows.CHUNK_ROWS", 600)
    monkeypatch.setattr("memo.config.layer.GROUP_ELEMENTS", 3 * 2 * S * 8)  # three of the four heads, and one
    keep = trained(2, S, dtype, 2, activation="keep", **keys)
    assert torch.equal(keep[0], whole[0])
    assert error(keep[1], whole[1]) < (1e-5 if dtype == torch.float32 else 1e-2)
    for mode in FEWEST_MODES:
        assert same(trained(2, S, dtype, 2, **mode, **keys), keep), mode


@pytest.mark.slow
@pytest.mark.parametrize("keys", [
    dict(position="learned", bias=True, gelu="tanh"), dict(position="learned"), dict(bias=True),
    LLAMA | dict(n_head=4), LLAMA | half_rotary(24) | dict(n_head=4, qk_norm=True, qkv_bias=True),
    OLMO | dict(n_head=4), GEMMA | dict(n_head=4, matmul="fp8"),
    dict(bias=True, matmul="fp8"), LLAMA | dict(n_head=4, matmul="fp8")], ids=str)
def test_other_families_alike(keys):
    keep = trained(8, 256, torch.float32, 2, activation="keep", **keys)
    for mode in (dict(activation="recompute"), dict(activation="memo", alpha=0.5),
                 dict(activation="memo", limits=dict(hidden=0.5))):
        assert same(trained(8, 256, torch.float32, 2, **mode, **keys), keep), mode


@pytest.mark.slow
def test_below_alpha_0_some_layers_keep_only_their_input():
    keep = trained(8, 256, torch.float32, 2, activation="keep")
    cfg = Layout(**MODEL, block_size=256, batch_size=8)
    seen = []
    for host in (0.13, 0.11, 0.08, 0.0625):  # x and attn_out are an eighth, x a sixteenth
        seen.append(placement(cfg, 8, 256, torch.float32, host=host).input_only)
        assert same(trained(8, 256, torch.float32, 2, activation="memo", limits=dict(host=host)), keep), host
    assert seen == [0, 1, 3, 3]


HALF = dict(activation="memo", alpha=0.5)
# of four subsequences: modes; and what no mode says by itself
FATES = [dict(activation="recompute"), dict(activation="swap"), HALF, HALF | dict(alpha=0.0),
         *(HALF | dict(changed=changed) for changed in (
             dict(keys="made"), dict(input_only=5), dict(keys="made", input_only=9), dict(n_buffers=1),
             dict(n_buffers=7), dict(x_stays=True), dict(x_stays=True, keys="made", input_only=4),
             dict(stays=dict(q=1024, fc1_out=512, gate_out=2048)), dict(kept={}, stays=dict(attn_out=1024)))),
         *(HALF | dict(changed=dict(stream="copied") | changed) for changed in (
             {}, dict(keys="made", input_only=9), dict(n_buffers=7), dict(x_stays=True),
             dict(stays=dict(x=1024, q=512))))]

SLIDES = LLAMA | dict(n_head=4, sliding_window=90, layer_types="sliding,full,sliding")
SLID = FATES[::3] + [HALF | dict(changed=dict(keys="copied") | more)
                     for more in ({}, dict(n_buffers=7), dict(stream="copied"), dict(x_stays=True))]


@pytest.mark.slow
@pytest.mark.parametrize("order, S, keys, fates", [  # own rows of a unit: 512, and with S = 313 others
    ("layer", 256, dict(n_head=4), FATES), ("subsequence", 313, LLAMA | dict(n_head=4), FATES),
    ("layer", 313, LLAMA | dict(n_head=4, n_kv_head=1, qk_norm=True), FATES[::2]),
    ("layer", 313, OLMO | dict(n_head=4, norms="both"), FATES[1::3]),
    ("layer", 256, dict(n_head=4, sliding_window=65), FATES), ("subsequence", 313, SLIDES, SLID)], ids=str)
def test_every_fate_of_several_subsequences_alike(order, S, keys, fates):
    one = trained(8, S, torch.float32, 1, n_layer=3, activation="keep", **keys)
    keys = keys | dict(n_layer=3, subsequences=4, subsequence_cut="equal" if S == 256 else "flops",
                       unit_order=order)
    keep = trained(8, S, torch.float32, 1, activation="keep", **keys)
    assert abs(keep[0] - one[0]) < 1e-5 and error(keep[1], one[1]) < 1e-5
    for fate in fates:
        if order == "layer" or "layer_types" in keys or "keys" not in fate.get("changed", {}):
            assert same(trained(8, S, torch.float32, 1, **fate, **keys), keep), fate


def test_where_all_rows_of_some_subsequences_survive():
    keys = dict(n_layer=2, subsequences=2)
    keep = trained(1, 1024, torch.float32, 1, activation="keep", **keys)
    for kept in ((512, 0), (0, 512)):  # the last unit's neighbour is rebuilt, or not
        assert same(trained(1, 1024, torch.float32, 1, **HALF, **keys, changed=dict(kept=dict(q=kept))), keep)


@pytest.mark.slow
def test_sixteen_subsequences_alike():
    keys = LLAMA | dict(n_head=4, n_layer=2)
    one = trained(1, 512, torch.float32, 1, activation="keep", **keys)
    for order, cut, mode in (("layer", "equal", FATES[0]), ("layer", "flops", FATES[1]),
                             ("subsequence", "equal", FATES[1]), ("subsequence", "flops", FATES[2])):
        found = trained(1, 512, torch.float32, 1, subsequences=16, subsequence_cut=cut, unit_order=order,
                        **keys | mode)
        assert abs(found[0] - one[0]) < 1e-5 and error(found[1], one[1]) < 1e-5, (order, cut, mode)


@pytest.mark.slow
def test_every_eighth_of_a_unit_alike():
    """2,048 own rows of a unit: each eighth of them is another number of 256 rows."""
    orders = [dict(n_layer=2, subsequences=2, unit_order=order) for order in ("layer", "subsequence")]
    keep, rows = [trained(16, 256, torch.float32, 1, activation="keep", **keys) for keys in orders], []
    for i, alpha in enumerate(EIGHTHS):
        keys = orders[i % 2] | dict(activation="memo", alpha=alpha)
        assert same(trained(16, 256, torch.float32, 1, **keys), keep[i % 2]), alpha
        cfg = Layout(**MODEL | keys, block_size=256, batch_size=16)
        rows.append(placement(cfg, 16, 256, torch.float32).first_kept(0, "q")[0])
    assert rows == list(range(0, 2049, 256))


@pytest.mark.parametrize("N, order, cut, changed", [
    (2, "layer", "flops", dict(n_buffers=1)), (3, "layer", "equal", dict(keys="made")),
    (5, "layer", "flops", dict(input_only=4)), (5, "subsequence", "equal", {})])
def test_a_copied_stream_gives_the_same_bits_in_three_places(N, order, cut, changed):
    keys = dict(n_layer=3, n_head=2, subsequences=N, unit_order=order, subsequence_cut=cut)
    mode = dict(activation="memo", alpha=0.0)

    def run(**changed):
        cfg, model, _ = build(2, 320, torch.float32, changed=changed, **mode, **keys)
        p, tensors, swap = model.swap.placement, model.swap.tensors, model.swap
        seen = [model.forward(*random_batch(cfg, 2, 320, "cpu", seed=i), scale=None if i else 1.0)
                for i in range(2)]
        run_pass(model, random_batch(cfg, 2, 320, "cpu", seed=2))
        need = Sizes(p, tensors)
        assert need.device_bytes == sum(b.nbytes for b in swap.buffers.values()) == swap.device_bytes
        assert need.host_bytes == swap.slab.bytes.nbytes
        lines = activation_lines(cfg, p, 4)
        assert sum(line.device_bytes for line in lines) == need.device_bytes
        assert sum(line.host_bytes for line in lines) == need.host_bytes
        times = times_of(p.schedule(), lambda step: 1e3 if step.stream == "compute" else sum(
            h.nbytes for _, h in swap.pairs.get(step, [])))
        units = [UnitRates(1.0, 0.0, 0.0, 0.0, 0.0, {})] * p.subsequences
        copied_s = step_seconds(p, tensors, units, 1.0)
        *passes, stall_s = totals_of(p.program, lambda step: 1e3 if step.computes else copied_s(step))
        last = times.spans[Step(Op.BACKWARD, Unit(0, 0), back=True)]
        assert (sum(passes), stall_s) == (last[1], times.stall_s)
        copied = [h for step, pairs in swap.pairs.items() if step.op is Op.OFFLOAD for _, h in pairs]
        # gradients go where inputs were; nothing else is written twice, and nothing is left out
        places = {(h.data_ptr(), h.nbytes) for h in copied}
        assert sum(n for _, n in places) == need.host_bytes
        sizes = need.region_bytes["stream"], need.host_bytes
        model.close()
        return [*seen, model.grads], sizes
    (whole, (all_rows, host)), (copied, (places, more)) = run(**changed), run(**changed, stream="copied")
    assert same(whole, copied)
    cuts, x = unit_rows(Layout(**MODEL | keys | dict(block_size=320)), 2, 320), 32 * 4
    assert (all_rows, places) == (640 * x, 3 * max(cuts) * x)
    # the gradients of the head; layer by layer the inputs of the units that are not swapped
    n = changed.get("n_buffers", 2) if order == "layer" else 0
    assert more - host == x * (sum(cuts[:max(0, N - 3)]) + sum(cuts[N - n:]))


def test_keys_go_to_the_host_as_often_as_ranks_read_them():
    """Two heads of keys over the three ranks of Ulysses, each of which has two."""
    cfg = Layout(**MODEL | dict(n_layer=3, n_head=6, n_embd=48, n_kv_head=2, cp=3, context_parallel="ulysses",
                                subsequences=3, unit_order="layer", block_size=576, activation="swap"))
    mesh, _ = noted_mesh(0, 1, 3, 1, False)
    model = Model(GPT, cfg, "meta", torch.float32, mesh=mesh)
    model.reserve(1, 192, placed(cfg, 2), streams=open_streams(torch.device("cpu")))
    p, tensors, pairs = model.swap.placement, model.swap.tensors, model.swap.pairs
    sent = {step.unit: sum(here.nbytes for here, _ in copies) for step, copies in pairs.items()
            if step.op is Op.OFFLOAD and step.moved is Moved.KEYS}
    # of five units; the last layer's stay, and the first piece of the one below, which has a place more
    assert sum(sent.values()) == Sizes(p, tensors).keys_bytes == (
        3 * 5 * (tensors["k"].nbytes + tensors["v"].nbytes) // 3)
    assert problem_of(cfg, 4, None, Room(2**40)).sizes.layer_keys_bytes == sum(sent[0, i] for i in range(3))
    model.close()


def test_the_stream_is_whole_where_it_fits():
    p = Placement(3, 2, 640, cuts=(128,) * 5, keys="copied")
    tensors = gpt_layer(32, 1).tensors(1, 640, 4)
    need, saved = Sizes(p, tensors).device_bytes, 2 * 128 * 32 * 4
    assert with_stream(p, tensors, need) == p
    copied = replace(p, stream="copied")
    assert with_stream(p, tensors, need - 1) == with_stream(copied, tensors, 0) == copied
    assert Sizes(copied, tensors).device_bytes == need - saved
    assert placement_record(copied)["stream"] == "copied"
    others = Placement(3, 1, 640, {"x": 640}, 15, x_stays=True, cuts=(128,) * 5, keys="made")
    for q in (others, replace(p, cuts=(256, 256, 128)), Placement(3, 15, 640, cuts=(128,) * 5)):
        assert with_stream(q, tensors, 0) == q  # copies nothing; three places are no less
    assert "stream" not in placement_record(Placement(3, 2, 640))


@pytest.mark.parametrize("n_buffers", [1, 2, 3, 4, 5])
def test_any_number_of_rounding_buffers(n_buffers):
    keep = trained(1, 512, torch.float32, 1, activation="keep")
    cfg, model, _ = build(1, 512, torch.float32)
    tensors = gpt_layer(32, 1).tensors(1, 512, 4)
    kept = {name: 256 if t.group else 512 for name, t in tensors.items()}
    p = Placement(5, n_buffers, 512, kept)
    model.reserve(1, 512, p)
    loss = model.forward(*random_batch(cfg, 1, 512, "cpu", seed=0), scale=1.0)
    model.backward()
    assert same([loss, model.grads], keep[:2])
    always = sum(tensors[n].nbytes for n in ("x", "attn_out", "lse"))
    others = sum(t.nbytes for t in tensors.values()) - always
    assert model.swap.host_bytes == (5 - n_buffers) * (always + others // 2)
    assert model.swap.device_bytes == (n_buffers * always + tensors["x"].nbytes
                                       + (1.5 if n_buffers == 2 else n_buffers) * others)
    model.close()


@pytest.mark.parametrize("L", [1, 2])
def test_with_up_to_two_layers_nothing_is_swapped(L):
    for activation in ("swap", "memo"):
        _, model, _ = build(1, 256, torch.float32, n_layer=L, activation=activation)
        assert model.swap.host_bytes == 0 and model.swap.slab is None
        assert same(trained(1, 256, torch.float32, 1, n_layer=L, activation=activation),
                    trained(1, 256, torch.float32, 1, n_layer=L, activation="keep"))


def test_evaluations_and_several_micro_batches_in_between():
    def run(**keys):
        cfg, model, optimizer = build(1, 512, torch.float32, **keys)
        seen = []
        for i in range(3):
            seen.append(model.forward(*random_batch(cfg, 1, 512, "cpu", seed=10 + i)))
            for micro in range(3):
                seen.append(model.forward(*random_batch(cfg, 1, 512, "cpu", seed=3 * i + micro), scale=1 / 3))
                model.backward()
            seen.append(model.grads.clone())
            optimizer.step(1e-2)
        model.close()
        return seen
    assert same(run(activation="memo", alpha=0.5), run(activation="keep"))


def test_the_memory_of_another_shape_is_taken_anew():
    cfg, model, _ = build(1, 512, torch.float32, activation="memo", alpha=0.5)
    first = model.swap
    loss = model.forward(*random_batch(cfg, 1, 256, "cpu"))
    assert not first.buffers and first.slab is None and model.swap.host_bytes == 0
    assert torch.equal(loss, GPT_loss(cfg, 256))


def GPT_loss(cfg, S):
    model = Model(GPT, cfg, "cpu", torch.float32)
    model.load(perturbed_weights(cfg, "cpu"))
    return model.forward(*random_batch(cfg, 1, S, "cpu"))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_every_mode_on_a_gpu_within_the_kernels_noise(dtype, limit):
    def gradients(**keys):
        cfg, model, _ = build(1, 4096, dtype, device="cuda", n_embd=128, **keys)
        for _ in range(3):  # the later passes race with the earlier ones' copies, if anything does
            model.grads.zero_()
            loss = model.forward(*random_batch(cfg, 1, 4096, "cuda"), scale=1.0)
            model.backward()
        loss.item()
        assert stall_s(model.swap.streams.timeline.take()) >= 0
        grads = model.grads.clone()
        model.close()
        return grads
    keep = gradients(activation="keep")
    for mode in MODES:
        assert error(gradients(**mode), keep) <= limit, mode


# --- where the rows live ---

class Poison(CpuStream):
    """An offload stream that leaves nothing but NaN of what it copied: all rows of a buffer but those it
    shares with the other one, in which the next layer is at work already."""

    def __init__(self, timeline):
        super().__init__("offload", timeline)
        self.model, self.layers = None, 0

    def launch(self, label, work, *args):
        super().launch(label, work, *args)
        *kind, unit = label.split()
        if kind == ["offload"]:  # later subsequences still read keys and values
            super().launch("poison", self.poison, (*map(int, unit.split(".")), 0)[:2])

    def poison(self, unit):
        self.layers += 1
        for device, _ in self.model.swap.pairs[Step(Op.OFFLOAD, unit, Moved.ACTIVATIONS)]:
            device.fill_(0xFF)  # NaN in fp32 and bf16


@pytest.mark.slow
@pytest.mark.parametrize("keys", [*FEWER_MODES[1:], dict(activation="memo", limits=dict(host=0.11)),
                                  *(keys | dict(subsequences=2) for keys in MODES[1:4])], ids=str)
def test_swapped_rows_live_on_the_host_only_and_the_others_nowhere(keys, monkeypatch):
    N = keys.get("subsequences", 1)
    keep = trained(8, 256, torch.float32, 2, activation="keep", subsequences=N)
    timeline = Timeline()
    offload = Poison(timeline)
    streams = Streams(CpuStream("compute", timeline, threaded=False), offload,
                      CpuStream("prefetch", timeline), timeline)
    cfg, model, optimizer = build(8, 256, torch.float32, streams=streams, **keys)
    offload.model, recomputed = model, []
    for block in model.gpt.blocks:
        def recompute(s, rows, block=block, real=block.recompute):
            if rows is not block.every_row:  # the forward's own
                for name, r in rows.items():
                    getattr(s, name)[r].fill_(float("nan"))
                recomputed.append(rows)
            return real(s, rows)
        monkeypatch.setattr(block, "recompute", recompute)
    seen = []
    for i in range(2):
        seen.append(model.forward(*random_batch(cfg, 8, 256, "cpu", seed=i), scale=1.0))
        model.backward()
        seen.append(model.grads.clone())
        optimizer.step(1e-3)
    assert same([*seen, model.params], keep)
    assert offload.layers == 2 * (5 * N - 2)
    whole = keys.get("activation") == "swap" or keys.get("alpha") == 1
    # the last but one shares rows with the last, though it is not swapped
    assert len(recomputed) == (0 if whole else 2 * (5 * N - 1))
    model.close()


def test_the_host_slab_is_as_large_as_what_is_swapped_to_the_byte():
    B, S, L, H = 2, 512, 5, 1
    N, row = B * S, 32 * 4
    for alpha in EIGHTHS:
        _, model, _ = build(B, S, torch.float32, activation="memo", alpha=alpha)
        always, others = N * (2 * row + 4 * H), int(alpha * N) * (14 * row + 4 * 4)
        assert model.swap.host_bytes == model.swap.slab.bytes.nbytes == (L - 2) * (always + others)
        left = [pair for key, pairs in model.swap.pairs.items() if key.kind == "offload" for pair in pairs]
        copied = sorted((h.data_ptr(), h.nbytes) for _, h in left)
        assert copied[0][0] == model.swap.slab.bytes.data_ptr()
        assert sum(n for _, n in copied) == model.swap.host_bytes
        # neither gaps nor overlaps
        assert all(a + n == b for (a, n), (b, _) in zip(copied, copied[1:], strict=False))
        assert all(d.nbytes == h.nbytes for d, h in left)
        model.close()


def test_no_copy_goes_over_the_edge_of_a_locked_piece(monkeypatch):
    keep = trained(2, 512, torch.float32, 2, activation="keep")
    monkeypatch.setattr("memo.memory.slab.PIECE_BYTES", 3 * 2**12)
    made, swap = [], Swap.swapped_pairs
    monkeypatch.setattr(Swap, "swapped_pairs", lambda self: made.append((self, swap(self))) or made[-1][1])
    assert same(trained(2, 512, torch.float32, 2, activation="memo", alpha=0.5), keep)
    (model_swap, pairs), = made
    copies = [(h.data_ptr(), h.nbytes, d.nbytes) for key, some in pairs.items() if key.kind == "offload"
              for d, h in some]
    first = min(at for at, *_ in copies)
    assert all((at - first) // 12288 == (at - first + n - 1) // 12288 for at, n, _ in copies)
    assert all(n == m for _, n, m in copies) and sum(n for _, n, _ in copies) == model_swap.host_bytes
    assert len(copies) >= model_swap.host_bytes // 12288 > 50


# --- memory on the device ---

def allocations(call):
    """Bytes of every allocation and, negative, every free that torch made on the CPU during call()."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = call()
    return [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"], result


def peak(sizes):
    held = highest = 0
    for n in sizes:
        held += n
        highest = max(highest, held)
    return highest


@pytest.mark.slow
def test_the_activations_device_memory_is_the_tables_and_constant_in_L():
    taken, steps = {}, {}
    B, S, C, H = 2, 512, 32, 1
    tensors = gpt_layer(C, H).tensors(B, S, 4)
    whole, x = sum(t.nbytes for t in tensors.values()), tensors["x"].nbytes
    always = 2 * x + tensors["lse"].nbytes
    for L in (4, 7):
        for activation in ("keep", "recompute", "swap", "memo"):
            cfg, model, _ = build(B, S, torch.float32, n_layer=L, activation=activation, alpha_mode="paper",
                                  limits=dict(hidden=0.5))
            p = model.swap.placement
            model.close()
            sizes, swap = allocations(partial(Swap, p, gpt_layer(C, H), B, S, torch.float32, CPU))
            assert sum(sizes) == peak(sizes) == sum(swap.sizes.buffer_bytes.values()) == swap.device_bytes
            taken[activation, L] = sum(sizes)
            swap.close()
            model.reserve(B, S, p)
            batch = [t.contiguous() for t in random_batch(cfg, B, S, "cpu")]
            run_pass(model, batch)
            gc.collect()
            steps[activation, L] = peak(allocations(lambda: run_pass(model, batch))[0])  # noqa: B023
            model.close()
    for L in (4, 7):
        assert taken["swap", L] == 2 * whole + x
        # the paper's alpha there, in rows of 128
        assert taken["memo", L] == 2 * always + x + (1 + 3 / 8) * (whole - always)
        assert taken["keep", L] == L * whole + x
        assert taken["recompute", L] == whole + L * x
    assert len(set(steps.values())) <= 3, steps  # what a step takes on top: whole, in rows, neither
    for activation in ("keep", "swap", "memo", "recompute"):
        assert len({steps[activation, L] for L in (4, 7)}) == 1


# --- races ---

@pytest.fixture
def racing(request):
    made = Racing(request.param)
    yield made
    made.model.close()


@pytest.mark.slow
@pytest.mark.parametrize("racing, seeds", [(race, 40 if "states" in race else 10) for race in RACES],
                         indirect=["racing"])
def test_the_streams_order_changes_nothing(racing, seeds):
    """bench/states.py has more of them."""
    assert all(racing.is_right(seed) for seed in range(seeds))


@pytest.mark.slow
@pytest.mark.parametrize("racing, wait", [(race, wait) for race, waits in WAITS.items()
                                          for wait in waits], indirect=["racing"])
def test_every_single_wait_is_needed(racing, wait):
    assert not all(racing.is_right(seed, removed=wait) for seed in range(20))
    assert racing.is_right(0)  # with it, again


@pytest.mark.slow
@pytest.mark.parametrize("race", RACES)
def test_there_is_no_wait_that_the_race_test_does_not_know(race):
    model = Racing(race).model
    assert {kind_of(e.name) for e in model.swap.executor.events.values()} == set(WAITS[race])
    model.close()


# --- leaks, and stopping in the middle ---

@pytest.mark.slow
def test_a_hundred_steps_leak_nothing():
    cfg, model, optimizer = build(1, 256, torch.float32, n_layer=3, activation="memo", alpha=0.5)
    seen, threads = [], set()
    for i in range(100):  # a tensor of (256, 32) that each leaves behind would be 3 MiB
        model.forward(*random_batch(cfg, 1, 256, "cpu", seed=i), scale=1.0)
        model.backward()
        optimizer.step(1e-3)
        model.swap.streams.timeline.take()
        seen.append(resident_bytes())
        threads.add(threading.active_count())
    assert max(seen[3:]) - seen[3] < 2 * 2**20, (seen[3], max(seen[3:]))
    assert len(threads) == 1
    model.close()


def memo_threads():
    return [t for t in threading.enumerate() if t.name.startswith("memo ")]


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward", "recompute"])
def test_an_exception_in_a_layer_ends_everything_without_a_hang(where, threaded, monkeypatch):
    before = memo_threads()
    timeline = Timeline()
    streams = Streams(CpuStream("compute", timeline, threaded), CpuStream("offload", timeline),
                      CpuStream("prefetch", timeline), timeline)
    cfg, model, _ = build(1, 512, torch.float32, streams=streams, activation="memo", alpha=0.5)
    closed = []
    monkeypatch.setattr(HostSlab, "close",
                        lambda slab, real=HostSlab.close: closed.append(slab) or real(slab))

    real = getattr(model.gpt.blocks[2], where)

    def broken(*args):
        if where == "recompute" and args[-1] is model.gpt.blocks[2].every_row:  # the forward's own
            return real(*args)
        raise FloatingPointError("broken")
    monkeypatch.setattr(model.gpt.blocks[2], where, broken)
    with pytest.raises(FloatingPointError, match="broken"):
        run_pass(model, random_batch(cfg, 1, 512, "cpu"))
    slab = model.swap.slab
    model.close()
    assert closed == [slab] and model.taken is None
    assert memo_threads() == before


def test_a_copy_that_fails_is_an_error_of_the_step(monkeypatch):
    cfg, model, _ = build(1, 512, torch.float32, activation="swap")
    pairs = model.swap.pairs[Step(Op.OFFLOAD, Unit(1, 0), Moved.ACTIVATIONS)]
    pairs[0] = pairs[0][0], torch.empty(1, dtype=torch.uint8).expand(3)
    with pytest.raises(RuntimeError):
        run_pass(model, random_batch(cfg, 1, 512, "cpu"))
    model.close()
