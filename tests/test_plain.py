"""memo/plain.py beside the executor: the same bits, the same copies and waits in the same order; without any
of its waits, other bits."""

import pytest
import torch

from memo.config.layout import Layout
from memo.decide.where import Room, place_rows, problem_of
from memo.memory.placement import rows
from memo.plain import kept_rows, take_memory, training_step
from memo.schedule.streams import CpuStream, Streams, Timeline, close_streams, open_streams
from memo.states.passes import Model
from model import GPT
from testing.turns import COPIES, SHAPE, shuffle, streams_by_turns
from tests.helpers import LLAMA, OLMO, half_rotary, perturbed_weights, random_batch

CPU = torch.device("cpu")
FAMILIES = {
    "gpt2": dict(n_head=2, position="learned", bias=True, gelu="tanh"), "gpt2 rotary": dict(n_head=1),
    "llama": LLAMA | dict(n_head=4), "olmo": OLMO | dict(n_head=4),
    "normed heads": LLAMA | half_rotary(24) | dict(n_head=4, n_kv_head=1, qk_norm=True, qkv_bias=True)}
LAYERS, ALPHAS = (1, 2, 3, 5), (0.0, 0.5, 1.0)


class Noting(CpuStream):
    """A stream that notes the copies that it is handed."""

    def __init__(self, name, timeline):
        super().__init__(name, timeline)
        self.noted = []

    def launch(self, label, work, pairs):
        self.noted.append((label, pairs))
        super().launch(label, work, pairs)


def noting_streams():
    timeline = Timeline()
    return Streams(CpuStream("compute", timeline, threaded=False), Noting("offload", timeline),
                   Noting("prefetch", timeline), timeline)


def copied(stream, layers, slab):
    """[(label, [(tensor, first byte, bytes, first byte in the slab)])] of what a stream has copied."""
    found = []
    for label, pairs in stream.noted:
        tensors, places = layers[int(label.split()[1])].tensors, []
        for destination, source in pairs:
            here, there = (source, destination) if stream.name == "offload" else (destination, source)
            at = here.data_ptr()
            [(name, first)] = [(name, at - t.data_ptr()) for name, t in tensors.items()
                               if 0 <= at - t.data_ptr() < t.nbytes]
            assert here.nbytes == there.nbytes
            places.append((name, first, here.nbytes, there.data_ptr() - slab.bytes.data_ptr()))
        found.append((label, places))
    return found


def device_bytes(memory):
    held = [t.untyped_storage() for s in memory.layers for t in s.tensors.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def ran(streams):
    """[(stream, launch or wait, label)] in the order in which the host has asked for them; of a wait what it
    is for."""
    return [(stream, kind, label.rpartition(" waits for ")[2].partition(":")[0])
            for stream, kind, label, *_ in streams.timeline.spans]


def built(cfg):
    model = Model(GPT, cfg, CPU, torch.float32)
    model.load(perturbed_weights(cfg, CPU))
    return model


def executed(model, batch):
    """[loss, gradients] of the executor."""
    model.grads.zero_()
    loss = model.forward(*batch, scale=1.0)
    model.backward()
    return [loss, model.grads.clone()]


def plain(model, memory, streams, *batches):
    """[losses, gradients] of plain.py. The host runs ahead of the streams, through all batches."""
    model.grads.zero_()
    losses = [training_step(model.gpt, memory, streams, *batch) for batch in batches]
    for stream in streams[:3]:
        stream.synchronize()
    return [*losses, model.grads.clone()]


@pytest.mark.parametrize("L", LAYERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_copies_and_waits_are_the_executors(family, L, one_thread):
    for alpha in ALPHAS:
        cfg = Layout(n_layer=L, n_embd=32, vocab_size=64, block_size=256, batch_size=2, activation="memo",
                     alpha=alpha, subsequences=1, subsequence_cut="equal", **FAMILIES[family])
        model, batch = built(cfg), random_batch(cfg, 2, 256, CPU)
        model.reserve(2, 256)
        keep = executed(model, batch)
        placement, _ = place_rows(cfg, problem_of(cfg, 4, None, Room(2**40, cpu=True)))
        theirs, ours = noting_streams(), noting_streams()
        model.reserve(2, 256, placement, streams=theirs)
        memo, memory = executed(model, batch), take_memory(cfg, alpha, torch.float32, CPU)
        bits = plain(model, memory, ours, batch)
        assert all(torch.equal(a, b) and torch.equal(a, c)
                   for a, b, c in zip(keep, memo, bits, strict=True)), alpha
        assert memo[1].isfinite().all() and memo[1].any()
        assert ran(ours) == ran(theirs)
        for name in ("offload", "prefetch"):
            expected = copied(getattr(theirs, name), model.swap.layers, model.swap.slab)
            assert copied(getattr(ours, name), memory.layers, memory.slab) == expected
            assert len(expected) == max(0, L - 2)
        assert [s.dropped for s in memory.layers[:L]] == model.swap.missing
        assert (memory.slab.bytes.nbytes if memory.slab else 0) == model.swap.host_bytes
        assert L == 1 or device_bytes(memory) == model.swap.device_bytes  # plain.py always has two buffers
        close_streams(ours)
        model.close()


def test_as_many_rows_survive_as_in_the_trainer():
    for n in (1, 15, 16, 100, 512, 4096, 5000):
        for alpha in [*(i / 100 for i in range(101)), 1 / 3, 0.999999]:
            assert kept_rows(alpha, n) == rows(alpha, n, max(1, min(256, n // 16))), (alpha, n)


# --- races ---

# {each wait of five layers: who does what it is for}
WAITS = {f"{what} {k + 2 * (what == 'backward')}": late for what, late in COPIES.items() for k in range(3)}


class PlainRacing:
    """Two steps in a row of plain.py, with other batches, over streams that take turns."""

    def __init__(self):
        cfg = Layout(**SHAPE)
        self.model, self.streams = built(cfg), streams_by_turns()
        self.memory = take_memory(cfg, cfg.alpha, torch.float32, CPU)
        self.batches = [random_batch(cfg, 1, cfg.block_size, CPU, seed) for seed in range(2)]
        streams = open_streams(CPU)
        self.expected = plain(self.model, self.memory, streams, *self.batches)
        self.waits = {label for _, kind, label in ran(streams) if kind == "wait"}
        close_streams(streams)

    def is_right(self, seed, removed=""):
        shuffle(self.streams.compute.streams, seed, removed, WAITS.get(removed, ""))
        self.memory.slab.bytes.fill_(0xFF)  # NaN, lest the copies of the seed before be right by chance
        return all(map(torch.equal, plain(self.model, self.memory, self.streams, *self.batches),
                       self.expected))


@pytest.fixture
def racing(one_thread):
    return PlainRacing()


def test_the_streams_order_changes_nothing(racing):
    assert all(racing.is_right(seed) for seed in range(20))


def test_every_single_wait_is_needed(racing):
    assert racing.waits == set(WAITS)
    assert [wait for wait in WAITS if all(racing.is_right(seed, wait) for seed in range(20))] == []
    assert racing.is_right(0)  # with all of them, again
