"""Does this working tree compute what another commit computes, to the last bit?

    python -m bench.same_losses [BASE [NAME ...]] [--one]        make same-losses [BASE=commit] [ONE=1]

BASE (default: the commit where this branch left main; on main itself the last commit) is unpacked into a
temporary folder. Short CPU runs and dry runs take place in BASE and in this tree, with separate caches.
Compared are losses, gradient norms and counted bytes of metrics.jsonl; placement, bytes and memory plan of
plan.json; all that memo.estimate --json prints. Checkpoints of BASE are resumed in both trees. Prints a line
for each run; exit code 1 if any differs or fails. NAMEs select runs ("resume x" comes after x). Nothing is
stored: losses depend on the CPU.

--one: losses, gradient norms and counted bytes alone must be the same, and these only where both trees have
one subsequence. What else differs is told. Writes what was found to bench/results/same_losses.json.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.machine import machine
from memo.errors import ConfigError
from memo.system.command import run
from memo.system.files import save_json

ROOT = Path(__file__).resolve().parent.parent
MEASURED = {"step_s", "tgs", "mfu", "stall_s", "bubble_s", "device_peak_bytes", "rates", "alpha_limits",
            "binds", "seconds", "host_limit_bytes", "capacity"}  # keys whose values change from run to run
# of a step, with --one
COUNTED = ("iter", "loss", "grad_norm", "val_loss", "tokens", "offload_bytes", "host_bytes", "sent_bytes")

KEYS = ("config/stdlib.py --n_layer=4 --n_embd=128 --n_head=4 --block_size=1024 --max_iters=3 "
        "--warmup_iters=1 --gradient_accumulation_steps=2 --eval_interval=3 --eval_iters=2 "
        f"--host_memory_gb=1 --dataset={ROOT}/data/stdlib")
RUNS = {  # name: (ranks, keys)
    "keep": (1, "--activation=keep"),
    "recompute": (1, "--activation=recompute"),
    "swap": (1, "--activation=swap"),
    "alpha 0": (1, "--alpha=0"),
    "alpha 0.5": (1, "--alpha=0.5"),
    "learned": (1, "--alpha=0.5 --position=learned --bias=true --gelu=tanh"),
    "bfloat16": (1, "--alpha=0.5 --dtype=bfloat16"),
    "optimizer on host": (1, "--alpha=0.5 --optimizer_device=cpu"),
    "tp2": (2, "--alpha=0.5 --tp=2"),
    "cp2 ring": (2, "--alpha=0.5 --cp=2"),
    "cp2 ulysses": (2, "--alpha=0.5 --cp=2 --context_parallel=ulysses"),
    "dp2": (2, "--alpha=0.5"),
    "tp2 cp2 dp2": (8, "--alpha=0.5 --tp=2 --cp=2 --batch_size=2"),
    "metp": (2, "--alpha=0.5 --tp=2 --tensor_parallel=metp"),
    "states host": (2, "--alpha=0.5 --states=host"),
    "states sharded": (2, "--alpha=0.5 --states=sharded --tie_embeddings=false"),
    "optimizer on host, dp2 tp2": (4, "--alpha=0.5 --tp=2 --optimizer_device=cpu"),
    "fp8": (1, "--alpha=0.5 --matmul=fp8"),
    "pp2": (2, "--alpha=0.5 --pp=2 --subsequences=4 --batch_size=1"),
    **{f"{N} {order}": (1, f"--alpha=0.5 --subsequences={N} --unit_order={order}")
       for N in (3, 8) for order in ("layer", "subsequence")},
    "pp2 msp": (2, "--alpha=0.5 --pp=2 --subsequences=4 --batch_size=1 --msp=true --deterministic=true"),
}
RESUMED = {"resume alpha 0.5": "alpha 0.5", "resume tp2 cp2 dp2": "tp2 cp2 dp2"}  # both in one process
GPT2 = "config/gpt2_124m.py --gradient_accumulation_steps=32"
ESTIMATES = f"""\
config/stdlib.py --vocab_size=4096 --gpu=rtx4090 --max_context
config/swap_demo.py --vocab_size=4096 --gpu=l40s
{GPT2} --gpu=rtx4090
{GPT2} --gpus=8 --gpu=a100-80gb --block_size=65536 --position=rope --search
config/7b_1m.py --gpus=8 --gpu=a800-80gb --max_context
config/7b_1m.py --gpus=8 --gpu=a800-80gb --host_memory_bytes=1.035e12 --max_context
config/7b_1m.py --gpus=8 --gpu=a800-80gb --alpha_mode=per_tensor
config/7b_1m.py --gpus=8 --gpu=h800-80gb --activation=keep --block_size=65536
config/7b_1m.py --gpus=8 --gpu=a800-80gb --activation=swap --block_size=32768
config/7b_1m.py --gpus=8 --gpu=a800-80gb --alpha=0.5 --block_size=16384
config/7b_1m.py --gpus=8 --gpu=a800-80gb --activation=recompute
config/7b_1m.py --gpus=8 --gpu=a800-80gb --activation=swap --host_memory_bytes=4e12
config/7b_1m.py --gpus=8 --gpu=a800-80gb --context_parallel=ulysses --block_size=262144 --alpha=0.25
config/7b_1m.py --gpus=8 --gpu=a800-80gb --gradient_accumulation_steps=1 --search
config/7b_1m.py --gpus=8 --gpu=h100-80gb --block_size=3145728
config/7b_1m.py --gpus=8 --gpu=h200-141gb --tp=8 --cp=1 --optimizer_device=cpu --max_context
config/7b_1m.py --gpus=16 --gpu=gh200-96gb --deterministic=true --alpha=0.5 --gradient_accumulation_steps=2
config/13b_1m.py --gpus=16 --gpu=a800-80gb --max_context
config/13b_1m.py --gpus=16 --gpu=b200 --gradient_accumulation_steps=1 --search
config/30b_1m.py --gpus=32 --gpu=a800-80gb --block_size=1441792
config/65b_1m.py --gpus=64 --gpu=h800-80gb --max_context
config/65b_1m.py --gpus=128 --gpu=b300 --batch_size=2 --gradient_accumulation_steps=4 --max_context
""".splitlines()


class Tree:
    """A checkout to run commands in. `folder`: temporary, for its cache and its runs."""

    def __init__(self, root, folder):
        self.root, self.folder = root, folder
        self.env = os.environ | dict(PYTHONPATH=str(root), XDG_CACHE_HOME=str(folder), OMP_NUM_THREADS="1",
                                     CUDA_VISIBLE_DEVICES="")
        folder.mkdir()

    def output(self, command):
        """What a Python command prints. Errors: RuntimeError, the command's last line."""
        done = subprocess.run([sys.executable, *command.split()], cwd=self.root, env=self.env,
                              capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        return done.stdout

    def figures(self, name, saved_by):
        """The figures of the run or dry run `name`. Tree `saved_by` has the checkpoints to resume from."""
        if name in ESTIMATES:
            return json.loads(self.output(f"-m memo.estimate --json --fast {name}"))
        ranks, keys = RUNS.get(name, (1, "--init_from=resume --max_iters=5 --tp=1 --cp=1"))
        out = self.folder / name.replace(" ", "_")
        if name in RESUMED:
            shutil.copytree(saved_by.folder / RESUMED[name].replace(" ", "_"), out)
        torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={ranks}" if ranks > 1 else ""
        self.output(f"{torchrun} train.py {KEYS * (name in RUNS)} {keys} --out_dir={out}")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return reproducible({"step": rows, "plan.json": json.loads((out / "plan.json").read_text())})


def reproducible(value):
    """A JSON value without its MEASURED keys."""
    if type(value) is dict:
        return {key: reproducible(part) for key, part in value.items() if key not in MEASURED}
    return [reproducible(part) for part in value] if type(value) is list else value


def first_difference(old, new, where=""):
    """The first place where two JSON values differ, and how; None if they are equal to the last bit. A key
    that a tree does not know yet counts as 0."""
    if type(old) is type(new) is dict and old.keys() != new.keys():
        if others := sorted(key for key in old.keys() ^ new.keys() if (old | new)[key]):
            return f"{where}: only one tree has {', '.join(others)}"
        old, new = ({key: value for key, value in one.items() if key in old and key in new}
                    for one in (old, new))
    if type(old) is type(new) is dict:
        parts = [(old[key], new[key], f"{where} {key}".strip()) for key in old]
    elif type(old) is type(new) is list and len(old) == len(new):
        parts = [(*both, f"{where}[{i}]") for i, both in enumerate(zip(old, new, strict=True))]
    else:  # repr shows each float to its last bit
        return None if repr(old) == repr(new) else f"{where}: {old!r:.200} is now {new!r:.200}"
    return next(filter(None, (first_difference(*part) for part in parts)), None)


def counted(figures):
    """The part of a run's figures, or of a dry run's, that --one holds to; None with several subsequences."""
    if "step" not in figures:
        one = figures["layout"]["subsequences"] == 1
        return {key: figures[key] for key in ("device_bytes", "host_bytes")} if one else None
    if len(figures["plan.json"]["placement"].get("cuts", ())) > 1:
        return None
    return [{key: row.get(key) for key in COUNTED} for row in figures["step"]]


def verdict(name, base, here, pool, one, stored):
    """'same', or how the two trees differ. `one`: where it matters with --one; what differs beside that goes
    into `stored`."""
    both = [pool.submit(tree.figures, name, base) for tree in (base, here)]
    errors = [future.exception() for future in both]
    if any(errors):
        return f"fails in BASE: {errors[0] or 'no'}; in this tree: {errors[1] or 'no'}"
    old, new = (future.result() for future in both)
    difference = first_difference(old, new)
    if one:
        parts, otherwise = (counted(old), counted(new)), difference
        difference = None if None in parts else first_difference(*parts)
        stored[name] = dict(compared=None not in parts, differs=difference, otherwise=otherwise)
        if otherwise and not difference:
            print(f"{name}: otherwise {otherwise}", flush=True)
    return f"differs: {difference}" if difference else "same"


def git(*command):
    """What git prints. Errors: ConfigError."""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"git {' '.join(command)}: {done.stderr.strip()}; give the commit to compare with")
    return done.stdout.strip()


def main(argv):
    """The command line -> exit code. Errors: ConfigError."""
    one, argv = "--one" in argv, [arg for arg in argv if arg != "--one"]
    base, *names = argv or [git("merge-base", "main", "HEAD")]
    verdicts, all_names, stored = [], [*RUNS, *RESUMED, *ESTIMATES], {}
    if unknown := set(names) - set(all_names):
        raise ConfigError(f"{unknown.pop()!r} is none of {all_names}; leave it out for all")
    with tempfile.TemporaryDirectory(prefix="memo-same-") as temporary, ThreadPoolExecutor(2) as pool:
        folder = Path(temporary)
        git("archive", f"--output={folder / 'base.tar'}", base)
        shutil.unpack_archive(folder / "base.tar", folder / "tree")
        trees = Tree(folder / "tree", folder / "base"), Tree(ROOT, folder / "here")
        for name in names or all_names:
            verdicts.append(verdict(name, *trees, pool, one, stored))
            print(f"{name}: {verdicts[-1]}", flush=True)
    if one and not names:
        save_json(dict(machine=machine(), base=base, runs=stored), ROOT / "bench/results/same_losses.json")
    print(f"{verdicts.count('same')} of {len(verdicts)} are the same as in {base}")
    return verdicts.count("same") < len(verdicts)


if __name__ == "__main__":
    sys.exit(run(main))
