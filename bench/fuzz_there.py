"""What the cases of bench/fuzz.py start from, and what must not be lost in them: the commands on a tiny
model, the state that prepare() makes once, checks of a run that went on.

`there`: what prepare() made: a dataset, a run with its checkpoints, a GPT-2 of Hugging Face, a cache, the
losses of a run that nobody disturbed, the keys that each command's --help lists.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from bench import fuzz_odd as odd

ITERS = 40
TINY = dict(n_layer=2, n_head=2, n_embd=16, block_size=64, batch_size=1, gradient_accumulation_steps=1,
            max_iters=ITERS, lr_decay_iters=ITERS, warmup_iters=4, eval_interval=10, eval_iters=1,
            save_interval=5, device="cpu")
SHORT = dict(max_iters=2, lr_decay_iters=2, warmup_iters=1)
ESTIMATE = ("-m", "memo.estimate", "--gpu=a800-80gb", "--gpus=1", "--fast")


# --- what is there ---

def flags(**keys):
    return [f"--{k}={v}" for k, v in keys.items()]


def train(case, out, **keys):
    return ["train.py", *flags(**TINY | dict(dataset=case.there.dataset, out_dir=out) | keys)]


def sample(out):
    return ["-m", "memo.sample", str(out), "--prompt=the memory", "--max_new_tokens=8", "--temperature=0"]


def convert(what, source, target):
    return ["-m", "memo.convert", what, source, target]


COMMANDS = {  # arguments that are right, or fail soon
    "train.py": [*flags(**TINY | SHORT), "--dataset=DATA", "--out_dir=out"],
    "-m memo.run.trace_step": [*flags(**TINY), "--dataset=DATA"],
    "-m memo.estimate": [*ESTIMATE[2:], *flags(**TINY), "--dataset=DATA"],
    "-m memo.sample": ["OUT", "--prompt=the", "--max_new_tokens=3"],
    "-m memo.dsa": ["requests.csv", "--time_limit=1", "-o", "plan.csv"],
    "-m memo.planner": ["requests.log", "--time_limit=1", "-o", "plan.json"],
    "-m memo.convert": ["from-hf", "HF", "converted"],
    "-m memo.profiler": ["--calibrate", "--dtype=float64"],
    "data/stdlib/prepare.py": ["--out_dir=made", "--vocab_size=1"],
    "data/text/prepare.py": ["--source=text.txt", "--tokenizer=train:300", "--out_dir=made"],
}


def must(ended):
    if ended.code:
        raise SystemExit(f"the bench cannot prepare: {ended.program}: {ended.err or ended.out}")
    return ended


def prepare(there, case, kinds):
    """Makes what cases of these `kinds` start from, with the project's own commands."""
    there.cache.mkdir(mode=0o700)
    calibration = calibrate(case) if "json" in kinds else None
    for name in ("dataset", "out", "alone", "learned", "hf"):
        setattr(there, name, there.scratch / name)
    text = there.scratch / "text.jsonl"
    text.write_text("".join(json.dumps(dict(text=d)) + "\n" for d in odd.documents(case.rng)))
    must(case.run("data/text/prepare.py", f"--source={text}", "--tokenizer=train:300",
                  f"--out_dir={there.dataset}"))
    must(case.run(*train(case, there.out, max_iters=ITERS // 2)))
    there.alone_s = must(case.run(*train(case, there.alone))).seconds
    there.losses = losses(there.alone)
    must(case.run(*train(case, there.learned, max_iters=2, warmup_iters=1, position="learned")))
    must(case.run(*convert("to-hf", there.learned, there.hf)))
    weights = (there.hf / "model.safetensors").rename(there.hf / "model-1.safetensors").read_bytes()
    names = json.loads(weights[8:8 + int.from_bytes(weights[:8], "little")])
    index = dict(metadata={}, weight_map={n: "model-1.safetensors" for n in names if n != "__metadata__"})
    (there.hf / "model.safetensors.index.json").write_text(json.dumps(index))
    there.samples = set()  # of each checkpoint alone
    for saved in checkpoints(there.out):
        only = Path(shutil.copytree(there.out, there.scratch / f"only{saved.name}"))
        for other in {p.name for p in checkpoints(only)} - {saved.name}:
            shutil.rmtree(only / "ckpt" / other)
        there.samples.add(must(case.run(*sample(only))).out)
    there.keys = {}
    for command in COMMANDS:
        ended = case.run(*command.split(), "--help")
        keys = sorted(set(re.findall(r"--(\w+)", ended.out)) - {"help"})
        there.keys[command] = keys or there.keys["train.py"]
    if calibration is not None:
        if calibration.wait():
            raise SystemExit("the bench cannot prepare: --calibrate failed")
        must(case.run("-m", "memo.estimate", "--gpu=here", *flags(**TINY, dataset=there.dataset)))


def calibrate(case):
    """Half a minute, longer than a case may take: a process beside."""
    env = os.environ | dict(XDG_CACHE_HOME=str(case.cache), PYTHONPATH=str(case.there.sources))
    return subprocess.Popen([sys.executable, "-m", "memo.profiler", "--calibrate", "--device=cpu"], env=env,
                            cwd=case.cwd, stdout=subprocess.DEVNULL)


def losses(out):
    """{iter: (loss, grad_norm)} of a run's metrics.jsonl."""
    found, path = {}, out / "metrics.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
            found[row["iter"]] = row["loss"], row["grad_norm"]
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
    return found


def checkpoints(out):
    return sorted((p for p in (out / "ckpt").glob("*") if re.fullmatch("[0-9]+", p.name)),
                  key=lambda p: int(p.name))


def last_saved(out):
    return max((int(p.name) for p in checkpoints(out)), default=0)


def copied(case, folder, name):
    return Path(shutil.copytree(folder, case.cwd / name))


# --- nothing is lost ---

def go_on(case, out, complete=True):
    """Takes up the run in `out` and ends it: its losses must be those of the run that nobody disturbed."""
    first = last_saved(out)
    ended = case.run(*train(case, out, **dict(init_from="resume") if first else {}))
    if ended.code:
        case.breaks("loss", f"a run with checkpoint {first} cannot go on: exit code {ended.code}, "
                            f"{ended.err[-200:]}")
    elif first < ITERS:
        same_losses(case, out, range(ITERS) if complete else range(first, ITERS))


def same_losses(case, out, steps):
    there, alone = losses(out), case.there.losses
    wrong = [i for i in sorted({*steps, *there}) if there.get(i) != alone.get(i)]
    if wrong:
        case.breaks("loss",
                    f"{len(wrong)} losses are not those of the undisturbed run; first step {wrong[0]}: "
                            f"{there.get(wrong[0])}, must be {alone.get(wrong[0])}")


def kept_all(case, out, ended):
    """A run that could save had to save the last step that it did."""
    done, saved = max(losses(out), default=-1) + 1, last_saved(out)
    if done != saved and not ended.hung:
        case.breaks("loss",
                    f"{done} steps were done, the last checkpoint is {saved}; exit code {ended.code}, "
                            f"{(ended.err or ended.out).strip()[-150:]}")
