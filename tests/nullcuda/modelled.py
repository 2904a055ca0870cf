"""7B-shaped layers on one H100 that is modelled: virtual time, nothing is computed or measured.

    make test-cuda-bench        writes bench/results/nullcuda.json and bench/results/nullcuda_timeline.png
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.nullcuda.runs import ROOT, random_dataset, trained

# {name: (tokens, subsequences, layers, figures of the machine)}. Two buffers of a million tokens are larger
# than any H100: there the device has 400 GB; layers are as many as keep the slab under 512 GiB
LENGTHS = {"64K": (2**16, 1, 8, {}), "256K": (2**18, 1, 8, {}),
           "1M": (2**20, 1, 5, dict(device_memory_bytes=400 * 10**9)),
           "256K in 4": (2**18, 4, 8, {}), "256K in 16": (2**18, 16, 8, {}),
           "slow link": (2**16, 1, 8, dict(pcie_bytes_per_s=1.5e9, device_memory_bytes=60 * 10**9))}


def modelled_run(name, folder, dataset):
    S, N, layers, figures = LENGTHS[name]
    return trained(folder, "--attention=auto",  # cuDNN's, which an H100 takes
                   f"--subsequences={N}", "--subsequence_cut=equal", "--unit_order=layer",
                   f"--n_layer={layers}", "--n_head=32", "--n_embd=4096", "--vocab_size=50257",
                   f"--block_size={S}", f"--dataset={dataset}", "--max_iters=2", "--warmup_iters=1",
                   "--eval_interval=0", "--save_interval=0",
                   job=dict(figures=figures, host_bytes=2 * 10**12, sparse=True, saves=False))


def row(run):
    """The run beside its own estimate. Seconds are virtual."""
    assert run.report["exit"] == 0, run.text[-2000:]
    estimate, rates = run.plan["estimate"], run.plan["rates"]
    return dict(step_s=median(m["step_s"] for m in run.metrics[1:]),
                estimated_step_s=estimate["seconds"]["step"], stall_s=run.metrics[-1]["stall_s"],
                estimated_stall_s=estimate["seconds"]["parts"]["stall"], alpha=run.plan["alpha"],
                estimated_alpha=estimate["alpha"], alphas=run.report["alphas"],
                estimated_alphas=run.report["estimated_alphas"], limits=run.plan["alpha_limits"],
                estimated_limits=estimate["alpha_limits"], forward_s=rates["forward_s"],
                estimated_forward_s=estimate["seconds"]["layer_forward"], backward_s=rates["backward_s"],
                mfu=run.metrics[-1]["mfu"], estimated_mfu=estimate["mfu"], races=len(run.report["races"]))


def main():
    results, rows = ROOT / "bench" / "results", []
    note = ("virtual time of null CUDA: a machine that is modelled; nothing was computed, "
            "nothing was measured on a GPU")
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        dataset = random_dataset(scratch / "data", 50257, 2**20 + 4096)
        for name, (S, N, layers, figures) in LENGTHS.items():
            run = modelled_run(name, scratch / name, dataset)
            rows.append(dict(what=name, tokens=S, subsequences=N, layers=layers, figures=figures, **row(run)))
            shown = ("what", "step_s", "estimated_step_s", "alpha", "estimated_alpha", "stall_s")
            print({k: rows[-1][k] for k in shown}, flush=True)
            if name == "64K":
                draw(run.out / "timeline.json", results / "nullcuda_timeline.png")
            written = json.dumps(dict(note=note, gpu="h100-80gb", rows=rows), indent=1)
            (results / "nullcuda.json").write_text(written + "\n")


def draw(trace, png):
    """The timeline of a run once more, with what it is above it."""
    from memo.plots.figures import STREAMS, timeline
    from memo.schedule.spans import Span
    spans = [Span(STREAMS[e["tid"]], e["cat"], e["name"].removeprefix("stall: "), e["ts"] / 1e6,
                  (e["ts"] + e["dur"]) / 1e6)
             for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    timeline(spans, trace, png,
             "virtual time, null CUDA: 8 layers of a 7B model, context 65,536, one H100 as modelled")


if __name__ == "__main__":
    sys.exit(main())
