"""How much do subsequences cost here, where auto takes the fewest that fit?

    python -m bench.choice [default] [gpt2] [--rounds=2]

default  the model and the context of config/stdlib.py, which `make train` trains.
gpt2     GPT-2 at 65,536 tokens, cut to 3 of 12 layers and 1 of 12 heads, for all of it takes an hour a step
         on two cores; on a host that grants less than half of what its activations take, so that it swaps.

Each is trained with 1, 4 and 16 subsequences, in turns, there and back. Seconds are the median of the steps,
all but the first where there are several. Writes bench/results/choice.json.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import train
from bench.machine import store_parts
from memo.run.loggers import read_metrics

RESULTS = Path(__file__).parent / "results"
RUN = dict(dataset="stdlib", device="cpu", warmup_iters=0, eval_interval=0, save_interval=0)
CASES = {"default": dict(n_layer=2, n_head=2, n_embd=192, block_size=4096, max_iters=9),
         "gpt2": dict(n_layer=3, n_head=1, n_embd=64, block_size=2**16, max_iters=1, bias=True, gelu="tanh",
                      position="learned", host_memory_gb=0.4)}
RIVALS = {str(N): dict(subsequences=N, subsequence_cut="equal", unit_order="layer") for N in (1, 4, 16)}


def a_run(keys):
    """(seconds of its steps, seconds before the first) of a run of train.py."""
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        train.main([f"--{k}={v}" for k, v in (RUN | keys | dict(out_dir=out)).items()])
        whole = time.perf_counter() - start
        steps = [row["step_s"] for row in read_metrics(Path(out) / "metrics.jsonl")]
    return steps[len(steps) > 1:], whole - sum(steps)


def compare(case, rounds):
    """{rival: its figures, with the ratio of its seconds to those of the fastest} of one case."""
    found = {name: dict(step_s=[], other_s=[]) for name in RIVALS}
    for i in range(rounds):
        for name in list(RIVALS)[::-1 if i % 2 else 1]:
            steps, other = a_run(CASES[case] | RIVALS[name])
            found[name]["step_s"] += steps
            found[name]["other_s"].append(other)
    best = min(median(row["step_s"]) for row in found.values())
    for name, row in found.items():
        seconds = median(row["step_s"])
        row["over_fastest"] = seconds / best
        print(f"{case:8} N={name:<3} {seconds:8.3f} s a step, "
              f"{row['over_fastest']:.3f} of the fastest; {median(row['other_s']):.1f} s beside the steps")
    return found


def main():
    store_parts(__doc__, RESULTS / "choice.json",
                {case: lambda rounds, case=case: compare(case, rounds) for case in CASES})


if __name__ == "__main__":
    main()
