"""Runs of train.py on null CUDA, each a process of its own: forked for one rank, by torchrun for several."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
from collections import namedtuple
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
Run = namedtuple("Run", "report reports metrics plan out text")  # rank 0's, all ranks'; text: as printed

# a server that has torch and memo loaded forks the processes: each begins within a moment
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.nullcuda.driver"])


def serve(path, argv, job, environment):
    os.environ.update(environment)
    log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["NULL_JOB"] = json.dumps(job)
    from tests.nullcuda.driver import main
    main(path, *argv)


def call(path, work, *args):
    """Runs in the forked process: work(*args) as JSON in `path`, what it raises in path.log."""
    try:
        Path(path).write_text(json.dumps(work(*args)))
    except BaseException:
        Path(f"{path}.log").write_text(traceback.format_exc())


def in_process(folder, work, *args):
    """work(*args), which gives something that JSON can hold, in a process of its own."""
    path = Path(folder) / f"{work.__name__}.json"
    path.unlink(missing_ok=True)
    process = processes.Process(target=call, args=(str(path), work, *args))
    process.start()
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
    assert path.exists(), Path(f"{path}.log").read_text() if Path(f"{path}.log").exists() else "no answer"
    return json.loads(path.read_text())


def trained(folder, *argv, ranks=1, job=None, environment=None):
    """A Run of train.py with `argv`, in out_dir `folder`/out."""
    folder.mkdir(exist_ok=True)
    path, job, environment = str(folder / "report.json"), job or {}, environment or {}
    argv = ["--attention=flash", *argv, "--device=cuda", f"--out_dir={folder / 'out'}"]
    if ranks == 1:
        process = processes.Process(target=serve, args=(path, argv, job, environment))
        process.start()
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
        text, names = Path(f"{path}.log").read_text(), [path]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                   "-m", "tests.nullcuda.driver", path, *argv]
        mine = dict(NULL_JOB=json.dumps(job), NULL_DEVICES=str(ranks), OMP_NUM_THREADS="1")
        done = subprocess.run(command, cwd=ROOT, env=os.environ | mine | environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S)
        text, names = done.stdout, [f"{path}.{rank}" for rank in range(ranks)]
    missing = [name for name in names if not Path(name).exists()]
    assert not missing, f"no report of {missing}:\n{text[-3000:]}"
    reports = [json.loads(Path(name).read_text()) for name in names]
    for name in names:
        Path(name).unlink()
    out = folder / "out"

    def read(name, parse):
        return parse((out / name).read_text()) if (out / name).exists() else None
    metrics = read("metrics.jsonl", lambda text: [json.loads(line) for line in text.splitlines()])
    return Run(reports[0], reports, metrics, read("plan.json", json.loads), out, re.sub(r".*\r", "", text))


def random_dataset(folder, vocab_size, tokens):
    """A dataset of random ids: what they are matters to no null kernel."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        rng.integers(vocab_size, size=tokens).astype(np.uint16).tofile(folder / f"{split}.bin")
    counts = {split: dict(tokens=tokens) for split in ("train", "val")}
    (folder / "meta.json").write_text(json.dumps(dict(dtype="uint16", vocab_size=vocab_size, counts=counts)))
    return folder
