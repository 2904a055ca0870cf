"""Subsequence by subsequence with nothing recomputed: the device's memory by SPPO's recursion."""

import pytest

from memo.config.layout import Layout
from memo.schedule.streams import open_streams
from testing.sppo import on_device, recursion, reserved, sizes_of, spans_of, streams_at_last
from tests.helpers import CPU, LLAMA

STAYS = dict(x=0.5, attn_out=0.25, q=0.75)
APART = "keys", "key_gradients", "stream"


def on_device_of(cfg, n_buffers, streams):
    """(bytes on the device at the end of each subsequence, bytes allocated) of a run."""
    model = reserved(cfg, n_buffers, STAYS, streams)
    found = on_device(model.swap, spans_of(model))
    allocated = sum(b.nbytes for name, b in model.swap.buffers.items() if name not in APART)
    model.close()
    return found, allocated


@pytest.mark.slow
@pytest.mark.parametrize("cut, family", [("equal", {}), ("flops", LLAMA)], ids=["equal", "flops"])
def test_memory_follows_the_recursion(cut, family):
    cfg = Layout(**dict(n_layer=3, n_head=4, n_embd=32, vocab_size=64, block_size=4096, subsequences=4,
                        subsequence_cut=cut, unit_order="subsequence", activation="swap") | family)
    L, (sizes, alphas) = cfg.n_layer, sizes_of(cfg, STAYS)
    expected = recursion(sizes, alphas)
    assert all(0.5 < alpha < 1 for alpha in alphas) and (len(set(alphas)) > 1) == (cut == "flops")
    # a buffer for each unit of a subsequence: its copies have left when the next one is done
    found, allocated = on_device_of(cfg, L, streams_at_last())
    assert found == expected
    stay = [size - round(alpha * size) for size, alpha in zip(sizes, alphas, strict=True)]
    assert allocated == sum(stay[:-1]) + max(sizes)
    assert cut == "flops" or allocated == max(expected)
    # the schedule allows no more; copies that come earlier leave less
    sooner, _ = on_device_of(cfg, L, open_streams(CPU))
    assert all(a <= b for a, b in zip(sooner, expected, strict=True))
    # with fewer buffers units of the same subsequence have left, too
    found, _ = on_device_of(cfg, 2, streams_at_last())
    assert found == [m - round((L - 2) / L * alpha * size)
                     for m, alpha, size in zip(expected, alphas, sizes, strict=True)]
