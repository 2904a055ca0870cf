"""Packed documents on null CUDA: many short ones are one call by lengths for each layer and group of heads,
from the memory plan, and the host waits for nothing."""

from math import ceil

import pytest

from memo.kernels.backends import most_documents
from tests.nullcuda.runs import in_process, trained
from tests.packed import write_folder

S, LAYERS, GROUPS = 16384, 3, 2


def steps_of(folder, attention, B, lengths):
    """[{operation of attention: calls, count of null CUDA: n}] of two steps of packed documents, the requests
    that missed the memory plan, races and the kernel's label."""
    from collections import Counter
    from unittest.mock import patch

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from memo.config import layer
    from memo.config.layout import Layout
    from memo.data.batch import open_dataset
    from memo.planner.allocator import Arena
    from memo.run import reserve
    from memo.states.passes import Model
    from memo.system import hardware
    from model import GPT
    from tests.nullcuda.watch import NULL, watching

    calls = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "attention" in (name := func._schema.name):
                calls[name.removeprefix("aten::").removeprefix("_scaled_dot_product")] += 1
            return func(*args, **kwargs or {})
    cfg = Layout(n_layer=LAYERS, n_embd=256, n_head=8, block_size=S, vocab_size=97, batch_size=B, alpha=0.5,
                 documents=True, attention=attention, gradient_accumulation_steps=1, subsequences=1)
    data = open_dataset(write_folder(folder, lengths), S, packs="best_fit")
    device, found = torch.device("cuda:0"), []
    with (patch.object(layer, "GROUP_ELEMENTS", B * S * 256 // GROUPS),
          watching(hardware.machine("h100-80gb").speeds)):
        model = Model(GPT, cfg, device, torch.bfloat16)
        model.reserve(B, S)
        arena = Arena(device, "greedy", guard=True)
        arena.replay(reserve.requests_of_a_step(model, arena))
        model.arena = arena
        for step in range(2):
            torch.cuda.synchronize()
            calls.clear()
            before = NULL.counts()
            with Count():
                documents = one_step(model, cfg, data, step)
            after = NULL.counts()
            found.append(calls | {name: n - before[name] for name, n in after.items()} | documents)
        torch.cuda.synchronize()
        label, stats = model.gpt.attention.label, arena.stats()
        model.close()
    return found, stats.misses, NULL.races(), label


def one_step(model, cfg, data, step):
    from memo.layer.tiles import row_order
    batch = data.draw(cfg, "train", step, 0, 1, row_order(cfg, cfg.block_size, model.mesh))
    model.forward(*model.on_device(batch), scale=1.0, learned=100)
    model.backward(last=True)
    return dict(documents=[len(starts) + 1 for starts in batch.packed.starts])


@pytest.mark.parametrize("attention", ["flash", "cudnn"])
@pytest.mark.parametrize("B,lengths", [(1, [40, 3, 90] * 400), (2, [200, 150] * 200), (2, [30, 70] * 900)])
def test_many_short_documents_are_few_calls(tmp_path, attention, B, lengths):
    found, misses, races, label = in_process(tmp_path, steps_of, tmp_path / "d", attention, B, lengths)
    assert misses == 0 and races == []
    assert ("documents by flash" in label) == (attention == "cudnn")
    assert found[1]["mallocs"] == 0  # in the first torch's cache grows
    for step in found:
        documents = step["documents"]  # of each sequence
        together = sum(documents) <= most_documents(B * S)
        calls = 1 if together else sum(ceil(n / most_documents(S)) for n in documents)
        assert min(documents) > 10 * calls
        for way in ("forward", "backward"):
            assert step[f"_flash_attention_{way}"] == calls * LAYERS * GROUPS
        assert not step.keys() & {"_flash_attention", "_cudnn_attention"}  # of a document alone
        assert {name: n for name in ("syncs", "pageable copies", "bad launches")
                if (n := step[name])} == {}


# of few documents, alone, torch's flash kernel splits the keys of short ones, for which it takes memory
@pytest.mark.parametrize("attention,lengths", [("flash", [40, 3, 90] * 400),
                                               ("cudnn", [40, 3, 90, 5000] * 40)])
def test_a_run_of_documents_holds_the_host_up_nowhere(small, tmp_path, attention, lengths):
    folder = write_folder(tmp_path / "d", lengths)
    run = trained(tmp_path / "run", *small, f"--dataset={folder}", "--documents=true", "--alpha=0.5",
                  f"--attention={attention}", "--eval_interval=2", "--eval_iters=1")
    assert run.report["exit"] == 0 and "warning" not in run.text, run.text
    assert run.report["races"] == [] and len(run.metrics) == 3
    for phase in ("batch", "step"):
        assert not any(run.report["counts"][phase][n] for n in ("syncs", "pageable copies", "bad launches"))
