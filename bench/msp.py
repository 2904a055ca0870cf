"""What is left of a pipeline's bubbles where stages that have nothing of their own to compute help others?

    python -m bench.msp

With free messages, in the simulator of all stages' schedules; and in gloo runs whose units sleep in the place
of computing, by their rows. Writes bench/results/msp.json.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from unittest.mock import patch

from bench.machine import machine
from memo.schedule.spans import busy_s, length_s
from testing.ranks import pool
from testing.stages import LAYERS, helped_config, simulated_bubble, slept

# stages, subsequences, seconds that a unit sleeps, twice as long in the backward: more where more processes
# send each other messages on the same cores
PIPELINES = (4, 8, 0.1), (4, 16, 0.1), (8, 32, 0.5), (8, 64, 0.5)


def measured(cfg, forward_s):
    """(the bubble, what the ranks oversleep) over the computing, in ranks that sleep."""
    with patch("testing.ranks.TIMEOUT_S", 3600):
        found = pool(cfg.pp).run(slept, cfg, forward_s)
    computing = 3 * cfg.n_layer // cfg.pp * cfg.n_subsequences * forward_s
    busy = mean(map(busy_s, found))
    return max(map(length_s, found)) / busy - 1, busy / computing - 1


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rows = []
    for p, N, forward_s in PIPELINES:
        cfg = helped_config(p, N)
        bubble, late = measured(cfg, forward_s)
        rows.append(dict(pp=p, subsequences=N, forward_s=forward_s, formula=(p - 1) / N,
                         simulated=simulated_bubble(cfg), bubble=bubble, oversleeping=late))
        print(rows[-1], flush=True)
    path = Path(__file__).parent / "results/msp.json"
    result = dict(machine=machine(), layers=LAYERS, bubbles=rows)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
