"""The command that measures this machine for memo.estimate (memo/run/measure.py):

    python -m memo.profiler --calibrate                             one rank
    torchrun --nproc_per_node=8 -m memo.profiler --calibrate        eight at once, and their messages
"""

import sys
from argparse import Namespace

from memo.system.command import Arguments, answer_early, run


def read_argv(argv: list[str]) -> Namespace:
    parser = Arguments(ranks=True, prog="python -m memo.profiler",
                       description="Measures this machine for memo.estimate --gpu=here; under torchrun "
                       "with all its ranks at once.")
    parser.add_argument("--calibrate", action="store_true", required=True,
                        help="takes a minute or two, and stores it")
    parser.keys("device", "dtype")
    return parser.parse_args(argv)


if __name__ == "__main__":  # before torch is imported, which takes seconds
    answer_early(read_argv)

from memo.config.config import Config
from memo.parallel.mesh import open_mesh
from memo.run.measure import calibrate, counted
from memo.system.device import pick_device
from memo.system.hardware import calibration_path
from memo.system.launch import connected, read_launch


def main(argv: list[str]) -> None:
    """Measures, stores and prints what --calibrate asks for. Errors: ConfigError."""
    args, launch = read_argv(argv), read_launch()
    device, dtype = pick_device(Config(device=args.device, dtype=args.dtype), launch.local_rank)
    if launch.rank == 0:
        calibration_path(launch.world)  # an error now rather than after the measuring
    launch.take(device)
    with connected(launch) as host:
        mesh = open_mesh(host, 1, host.size, device)
        measured = calibrate(mesh.weights, host, device, dtype, launch.local_world)
        mesh.close()
    if launch.rank == 0:
        ranks = measured["ranks"]
        print(f"{measured['device']}, {ranks} rank{'s' * (ranks > 1)}: slowest and fastest")
        for op, points in sorted(measured["speeds"].items()):
            if op in ("link", "network", "memory"):
                continue
            rates = [rate for _, rate in points]
            unit = "GFLOPs" if counted(op) == "FLOPs" else "GB"
            print(f"  {op:20}{min(rates) / 1e9:>12.2f}{max(rates) / 1e9:>12.2f}  {unit}/s")
        print(f"stored in {calibration_path(measured['ranks'])}")


if __name__ == "__main__":
    sys.exit(run(main))
