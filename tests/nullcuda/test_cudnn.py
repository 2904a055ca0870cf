"""cuDNN's attention on null CUDA: what torch requests around it, what is refused, time and races."""

import re
from functools import partial

import pytest

from memo.kernels.backends import workspaces
from tests.nullcuda.runs import in_process, trained

# {case: (queries (B, T, H, D), heads of keys, keys, causal)}
CASES = {"own": ((1, 256, 4, 64), 4, 256, True), "no multiple": ((2, 250, 4, 72), 4, 250, True),
         "shared": ((1, 256, 8, 128), 2, 256, True), "block of a ring": ((1, 256, 4, 64), 2, 512, False)}
WORKSPACE = "NULL_CUDNN_WORKSPACE_BYTES"  # of a plan, whatever its shapes


def tensors(shape, kv_heads, keys):
    import torch
    B, _, _, D = shape
    shapes = shape, *2 * [(B, keys, kv_heads, D)]
    return [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]


def backwards():
    """{case: (bytes of each request of a backward, its counts)}."""
    import torch

    from memo.kernels.attention import resolve_attention
    from tests.nullcuda.watch import NULL
    kernel, found = resolve_attention("cudnn", torch.device("cuda:0"), torch.bfloat16, 64), {}
    for case, (shape, kv_heads, keys, causal) in CASES.items():
        q, k, v = tensors(shape, kv_heads, keys)
        out, lse = kernel.forward(q, k, v, causal)
        torch.cuda.memory._record_memory_history(max_entries=1000)
        before = NULL.counts()
        kernel.backward(out, q, k, v, out, lse, causal)
        after = NULL.counts()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        found[case] = ([e["size"] for e in trace if e["action"] == "alloc"],
                       {name: n - before[name] for name, n in after.items() if name != "mallocs"})
    return found


def test_what_torch_requests_around_it_is_what_the_plan_assumes(tmp_path):
    """One request for cudnn-frontend's part, which is in torch, and for the rest that is guessed."""
    found = in_process(tmp_path, backwards)
    for case, ((B, T, H, D), kv_heads, keys, _) in CASES.items():
        sizes, counts = found[case]
        gradients = [2 * B * n * heads * D for n, heads in ((T, H), (keys, kv_heads), (keys, kv_heads))]
        assert sizes[1:] == gradients + workspaces("cudnn", (B, T, H, D), (B, keys, kv_heads, D)), case
        assert counts.pop("launches") == 2 and counts.pop("plans") == 1, case  # zeros for a seed, the kernel
        assert not any(counts.values()), case


def refusals():
    """{what is wrong: what torch says}."""
    import torch

    from memo.kernels.attention import resolve_attention
    kernel, found = resolve_attention("cudnn", torch.device("cuda:0"), torch.bfloat16, 64), {}

    def said(name, q):
        try:
            kernel.forward(q, q, q, True)
        except RuntimeError as e:
            found[name] = str(e)
    said("wide", tensors((1, 256, 4, 136), 4, 256)[0])
    said("odd", tensors((1, 256, 4, 68), 4, 256)[0])
    said("apart", tensors((1, 256, 64, 4), 4, 256)[0].transpose(2, 3))
    said("rows", tensors((1, 256, 4, 68), 4, 256)[0][..., :64])
    said("address", torch.empty(256 * 256 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(1, 256, 4, 64))
    said("right", tensors((1, 256, 4, 128), 4, 256)[0])
    return found


def test_what_cudnn_refuses_is_refused(tmp_path):
    found = in_process(tmp_path, refusals)
    assert set(found) == {"wide", "odd", "apart", "rows", "address"}


def work():
    """Virtual seconds of a causal and of a full forward, and of a backward; races of a forward whose keys
    another stream writes, without a wait and with one."""
    import torch

    from memo.kernels.attention import resolve_attention
    from memo.system import hardware
    from tests.nullcuda.watch import NULL, watching
    kernel, seconds = resolve_attention("cudnn", torch.device("cuda:0"), torch.bfloat16, 128), []
    with watching(hardware.machine("h100-80gb").speeds):
        q, k, v = tensors((1, 16384, 8, 128), 8, 16384)
        out, lse = kernel.forward(q, k, v, True)
        for run in (partial(kernel.forward, q, k, v, True), partial(kernel.forward, q, k, v, False),
                    partial(kernel.backward, out, q, k, v, out, lse, True)):
            torch.cuda.synchronize()
            start = NULL.now()
            run()
            torch.cuda.synchronize()
            seconds.append(NULL.now() - start)
        other, races = torch.cuda.Stream(), []
        for waits in (False, True):
            NULL.races(clear=True)
            with torch.cuda.stream(other):
                k.zero_()
            if waits:
                torch.cuda.current_stream().wait_stream(other)
            kernel.forward(q, k, v, True)
            torch.cuda.synchronize()
            races.append(NULL.races(clear=True))
    return dict(seconds=seconds, races=races)


def test_it_takes_its_time_and_touches_its_operands(tmp_path):
    found, flops = in_process(tmp_path, work), 4 * 16384**2 * 8 * 128
    rates = (633e12, 640e12, 539e12)  # of memo/system/hardware.py, at 16K keys
    wanted = [flops / 2 / rates[0], flops / rates[1], 2.5 * flops / 2 / rates[2]]
    assert found["seconds"] == pytest.approx(wanted, rel=0.02, abs=20e-6)
    unordered, ordered = found["races"]
    assert any(line.endswith("cuDNN reads") for line in unordered) and ordered == [], unordered


@pytest.mark.parametrize("extra", [0, 2**22])
def test_whatever_workspace_cudnn_takes_is_rehearsed_and_planned(small, tmp_path, extra):
    run = trained(tmp_path, *small, "--attention=cudnn", "--alpha=0.5", environment={WORKSPACE: str(extra)})
    assert run.report["exit"] == 0 and re.search(r"attention=cudnn 9\.", run.text), run.text
    assert "warning" not in run.text and run.report["races"] == []  # of a request that the plan has not
    assert run.report["counts"]["step"]["mallocs"] == 0
    planned = sum(line["device_bytes"] for line in run.plan["regions"] if line["region"] == "transient")
    estimated = run.plan["estimate"]["device_bytes"]
    assert planned == estimated["transient"] + estimated["head"] + extra
