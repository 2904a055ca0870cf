"""Silent errors that tests must find: each is put into a copy of memo's own code, and the tests that are to
find it run there.

    python -m tests.mutations [NAME ...]

Prints a table; exit code 1 if one is missed, does not apply, or takes too long, or if a test fails without
any.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300.0  # of the tests of one mutation
PASSED, FAILED = 0, 1  # pytest's exit codes; others: it could not run
MODEL, PARALLEL, LAUNCH = "tests/test_model.py", "tests/test_parallel.py", "tests/test_launch.py"
GRADIENTS = f"{MODEL}::test_gradients_match_autograd"
LAYOUT = f"{PARALLEL}::test_every_layout_gives_the_gradients_of_one_process"


@dataclass(frozen=True)
class Mutation:
    """A silent error: `old`, which stands once in `file`, becomes `new`; at least one of `tests`, pytest's
    node ids, must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, tree: Path) -> None:
        """Put the error into a copy of the tree. Errors: ValueError: `old` does not stand there once."""
        path = tree / self.file
        text = path.read_text()
        if (n := text.count(self.old)) != 1:
            raise ValueError(f"its old text stands {n} times in {self.file}, must stand there once")
        path.write_text(text.replace(self.old, self.new))


MUTATIONS = [
    Mutation("ring-stale-keys", "memo/layer/cp.py",  # each hop attends to the rank's own keys again
             "            kv = next(coming)\n",
             "            next(coming)\n            kv = [*pieces[0]]\n",
             ("tests/test_cp.py::test_attention_over_ranks_is_that_of_one_process[dtype0-1e-05-4-ring-2]",)),
    Mutation("recompute-without-rotation", "model.py",
             "            if rows[name] != NO_ROWS:\n",
             "            if rows[name] == EVERY_ROW:\n",
             (f"{MODEL}::test_recompute_gives_the_same_bits",)),
    Mutation("clip-of-one-rank", "memo/states/optim.py",
             "self.norm.copy_(world.sum(torch.cat(squares).sum()).sqrt())",
             "self.norm.copy_(torch.cat(squares).sum().sqrt())",
             (f"{LAYOUT}[rope-dp2-ring]",)),
    Mutation("rolled-labels", "memo/data/batch.py",  # the last target of each window is its first token
             "torch.stack((windows[:, :-1], windows[:, 1:]))",
             "torch.stack((windows[:, :-1], windows[:, :-1].roll(-1, 1)))",
             ("tests/test_data.py::test_batches_depend_on_seed_and_step_only",)),
    Mutation("gradients-times-cp", "train.py",  # the loss that is shown is right
             "loss += run.model.forward(*one, scale=part, learned=learned) * part",
             "loss += run.model.forward(*one, scale=part * cfg.cp, learned=learned) * part",
             (f"{LAUNCH}::test_a_run_in_any_layout_is_the_run_of_one_process[2-keys1-model1]",)),
    Mutation("a-token-sees-the-next", "memo/kernels/attention.py",
             "device=q.device).triu_(1)",
             "device=q.device).triu_(2)",
             ("tests/test_attention.py::test_backends_agree_with_the_mathematics",)),
    Mutation("rotations-of-tp-rank-0", "model.py",
             "mine = positions[tp.rank::tp.size] if cfg.metp else positions",
             "mine = positions[::tp.size] if cfg.metp else positions",
             (f"{LAYOUT}[rope-tp2-metp]",)),
    Mutation("mean-of-a-chunk", "memo/layer/edges.py",
             "return log_p.sum() / -N",
             "return log_p.sum() / -len(log_p)",
             (f"{MODEL}::test_gradients_over_several_head_chunks",)),
    Mutation("no-gradient-of-a-bias", "model.py",
             "        bias_backward(dy, dw.proj_b)\n",
             "",
             (f"{GRADIENTS}[fp32-rope-True-1-64-cpu]",)),
    Mutation("shared-keys-sum-over-the-wrong-heads", "memo/kernels/attention.py",
             "(g.unflatten(2, (k.shape[2], -1)).sum(3) for g in (dk, dv))",
             "(g.unflatten(2, (-1, k.shape[2])).sum(2) for g in (dk, dv))",
             ("tests/test_attention.py::test_backends_agree_with_the_mathematics",)),
    Mutation("padding-has-a-probability", "memo/layer/edges.py",
             "logits[:, padding:] = torch.finfo(logits.dtype).min",
             "logits[:, padding:] = logits[:, padding:]",
             (f"{GRADIENTS}[fp32-rope-False-1-64-cpu]",)),
    Mutation("prefetch-writes-nothing", "memo/schedule/access.py",
             "else Access(there, here)",
             "else Access(there, [])",
             ("tests/test_schedule.py::test_every_schedule_that_is_made_is_valid",)),
    Mutation("states-saved-as-another-ranks", "memo/states/optim.py",
             "first = [n * tp.rank if i == dim else 0 for i, n in enumerate(p.shape)]",
             "first = [n * (tp.size - 1 - tp.rank) if i == dim else 0 for i, n in enumerate(p.shape)]",
             (f"{LAUNCH}::test_a_checkpoint_is_resumed_in_any_other_layout[tp2 cp2 sharded]",)),
    Mutation("data-from-the-start-after-resume", "train.py",
             'batches = [batch(run, "train", it, i) for i in',
             'batches = [batch(run, "train", it - run.first, i) for i in',
             ("tests/test_train.py::test_a_resumed_run_continues_bitwise[float32]",)),
    Mutation("scales-of-another-ranks-rows", "memo/kernels/fp8.py",
             "torch._scaled_mm(a[i], by.q.t(), scale[i][:, None].contiguous(), columns,",
             "torch._scaled_mm(a[i], by.q.t(), scale[0][:, None].contiguous(), columns,",
             ("tests/test_fp8.py::test_products_against_fp64",)),
]


# --- the runner ---

def copy_tree(to: Path) -> None:
    """Copy the tracked files, as they lie in the working tree, into the folder `to`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def run_tests(tree: Path, tests: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Run `tests` in a copy of the tree up to the first failure -> (pytest's exit code, None where they took
    longer than `timeout_s`; what it printed)."""
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rf", "--tb=no", "-p", "no:cacheprovider", *tests]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, cwd=tree, env=env, stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:  # with the ranks that it has started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        return code, out.read()


def verdict(mutation: Mutation, timeout_s: float = TIMEOUT_S) -> tuple[str, str]:
    """Run a mutation's tests in a copy that has it -> ("found", "missed" or "not run"; the test that has
    found it, or why it was not run)."""
    with tempfile.TemporaryDirectory(prefix="memo-mutation-") as folder:
        copy_tree(Path(folder))
        try:
            mutation.apply(Path(folder))
        except ValueError as e:
            return "not run", str(e)
        code, said = run_tests(Path(folder), mutation.tests, timeout_s)
    lines = [line for line in said.splitlines() if line] or [""]
    failed = [line.split(" - ")[0].removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    if code == FAILED and failed:
        return "found", failed[0]
    if code == PASSED:
        return "missed", " ".join(mutation.tests)
    return "not run", f"no end within {timeout_s:g} s" if code is None else f"pytest: {lines[-1]:.200}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named mutations, or all, and print a table -> the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {m.name: m for m in MUTATIONS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    names = parser.parse_args(argv).names or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no mutation {unknown[0]}; there are {', '.join(known)}")
    tests = list(dict.fromkeys(test for name in names for test in known[name].tests))
    with tempfile.TemporaryDirectory(prefix="memo-mutation-") as folder:
        copy_tree(Path(folder))
        start = time.monotonic()
        code, said = run_tests(Path(folder), tests, TIMEOUT_S * len(names))
    if code != PASSED:
        print(f"{said}\nwithout any mutation a test fails, or none ends: nothing is found by it")
        return 1
    print(f"without any: their tests pass, {time.monotonic() - start:.0f} s\n")
    print(f"{'mutation':38} {'file':22} {'':8} {'s':>4}  by")
    found = 0
    for name in names:
        start = time.monotonic()
        word, what = verdict(known[name])
        found += word == "found"
        print(f"{name:38} {known[name].file:22} {word:8} {time.monotonic() - start:4.0f}  {what}", flush=True)
    print(f"\n{found} of {len(names)} found")
    return 0 if found == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
