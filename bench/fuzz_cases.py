"""The kinds of cases of bench/fuzz.py: functions (case, there) that draw from case.rng, write files, and run
commands.

`there`: what prepare() made once: a dataset, a run with its checkpoints, a GPT-2 of Hugging Face, a cache,
the losses of a run that nobody disturbed, the keys that each command's --help lists.
"""

import json
import os
import re
import shutil
import signal
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
ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # a run saves, then ends
OUTPUTS = {"out_dir", "o", "output", "plot"}


# --- what is there ---

def flags(**keys):
    return [f"--{k}={v}" for k, v in keys.items()]


def train(case, out, **keys):
    return ["train.py", *flags(**TINY | dict(dataset=case.there.dataset, out_dir=out) | keys)]


def sample(out):
    return ["-m", "memo.sample", str(out), "--prompt=the memory", "--max_new_tokens=8", "--temperature=0"]


def convert(what, source, target):
    return ["-m", "memo.convert", what, source, target]


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


# --- argv ---

COMMANDS = {  # arguments that are right, or fail soon
    "train.py": [*flags(**TINY | SHORT), "--dataset=DATA", "--out_dir=out"],
    "trace_step.py": [*flags(**TINY), "--dataset=DATA"],
    "-m memo.estimate": [*ESTIMATE[2:], *flags(**TINY), "--dataset=DATA"],
    "-m memo.sample": ["OUT", "--prompt=the", "--max_new_tokens=3"],
    "-m memo.dsa": ["requests.csv", "--time_limit=1", "-o", "plan.csv"],
    "-m memo.planner": ["requests.log", "--time_limit=1", "-o", "plan.json"],
    "-m memo.convert": ["from-hf", "HF", "converted"],
    "-m memo.profiler": ["--calibrate", "--dtype=float64"],
    "data/stdlib/prepare.py": ["--out_dir=made", "--vocab_size=1"],
    "data/text/prepare.py": ["--source=text.txt", "--tokenizer=train:300", "--out_dir=made"],
}
# else these take half a minute
ENDS = {"-m memo.profiler": ["--dtype=float64"], "data/stdlib/prepare.py": ["--vocab_size=1"]}
OF_CONFIG = ("train.py", "trace_step.py", "-m memo.estimate")


def argv(case, there):
    rng = case.rng
    command = rng.choice([*COMMANDS, "train.py", "train.py", "-m memo.estimate"])
    (case.cwd / "requests.csv").write_text("id,lower,upper,size\na,0,2,10\nb,1,3,20\n")
    (case.cwd / "requests.log").write_text("malloc a 10\nmalloc b 20\nfree a 10\nfree b 20\n")
    (case.cwd / "text.txt").write_text("\n".join(odd.documents(rng, 5)))
    stand_for = {"OUT": str(there.out), "HF": str(there.hf), "--dataset=DATA": f"--dataset={there.dataset}"}
    args = [stand_for.get(a, a) for a in COMMANDS[command]]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        key = rng.choice(there.keys[command])
        value = rng.choice(odd.VALUES if key in OUTPUTS or rng.random() < 0.8 else odd.PATHS)
        what = rng.choice(("value",) * 4 + ("typo", "loose", "bare", "drop", "split", "help"))
        if what == "value":
            args = [a for a in args if not a.startswith(f"--{key}=")] + [f"--{key}={value}"]
        elif what == "typo":
            i = rng.randrange(len(key) + 1)
            args.append(f"--{key[:i] + rng.choice(('', 'x', '-', 'é')) + key[i + 1:]}={value}")
        elif what == "loose":
            args.insert(rng.randrange(len(args) + 1), rng.choice(odd.VALUES))
        elif what == "bare":
            args.append(f"--{key}")
        elif what == "drop" and args and command not in OF_CONFIG:
            args.pop(rng.randrange(len(args)))
        elif what == "split":
            args += [f"--{key}", value]
        else:
            args.append(rng.choice(("--help", "-h")))
    case.run(*command.split(), *args, *ENDS.get(command, []))


def config(case, there):
    rng = case.rng
    file = case.cwd / rng.choice(("c.py", "c.py", "c", "c d.py", "é.py"))
    file.write_bytes(odd.config_bytes(rng, there.keys["train.py"], case.canary))
    if rng.random() < 0.2:
        odd.spoil(rng, file)
    keys = flags(**TINY | dict(max_iters=1, lr_decay_iters=1, warmup_iters=0, dataset=there.dataset))
    case.run(*rng.choice((["train.py", file, *keys, "--out_dir=out"], [*ESTIMATE, file, *keys],
                          [*ESTIMATE, file, *keys], ["trace_step.py", file, *keys])))


# --- JSON ---

def json_files(case, there):
    case.rng.choice((meta_json, tokenizer_json, hf_json, checkpoint_json, resealed_json, resealed_json,
                     resealed_json, cached_json, cached_json, cached_json, metrics_jsonl))(case, there)


def meta_json(case, there):
    data = copied(case, there.dataset, "data")
    odd.spoil(case.rng, data / "meta.json", odd.json_bytes)
    case.run(*case.rng.choice((train(case, "out", dataset=data, **SHORT),
                               [*ESTIMATE, *flags(**TINY, dataset=data)])))


def tokenizer_json(case, there):
    name = case.rng.choice(("dataset", "out", "hf"))
    folder = copied(case, getattr(there, name), name)
    shutil.copy(there.dataset / "tokenizer.json", folder)
    odd.spoil(case.rng, folder / "tokenizer.json", odd.json_bytes)
    (case.cwd / "text.txt").write_text("\n".join(odd.documents(case.rng, 5)))
    own = ["data/text/prepare.py", "--source=text.txt", f"--tokenizer={folder}", "--out_dir=made"]
    others = dict(dataset=train(case, "new", dataset=folder, **SHORT), out=sample("out"),
                  hf=convert("from-hf", "hf", "converted"))
    case.run(*case.rng.choice((own, others[name])))


def hf_json(case, there):
    hf = copied(case, there.hf, "hf")
    odd.spoil(case.rng, hf / case.rng.choice(("config.json", "model.safetensors.index.json")), odd.json_bytes)
    keys = flags(init_from="hf:hf", dataset=there.dataset, out_dir="new", max_iters=1, device="cpu")
    case.run(*case.rng.choice((convert("from-hf", "hf", "converted"), ["train.py", *keys])))


def checkpoint_json(case, there, reseal=False):
    out = copied(case, case.rng.choice((there.out, there.learned)), "out")
    newest = checkpoints(out)[-1]
    if reseal:
        stored = None
        while not isinstance(stored, dict):
            stored = odd.changed(case.rng, odd.stored(newest))
        odd.seal(newest, stored)
    else:
        odd.spoil(case.rng, newest / "checkpoint.json", odd.json_bytes)
    resume = train(case, "out", init_from="resume")
    case.run(*case.rng.choice((sample("out"), resume, resume, convert("to-hf", "out", "hf"))))


def resealed_json(case, there):
    checkpoint_json(case, there, reseal=True)


def cached_json(case, there):
    rng = case.rng
    case.cache, what = (copied(case, there.cache, "cache"),
                        rng.choice(("calibration", "calibration", "arena", "plan")))
    files = sorted(case.cache.rglob(f"{what}-*.json"))
    for file in files if rng.random() < 0.5 else rng.sample(files, min(1, len(files))):
        odd.spoil(rng, file, odd.json_bytes)
    estimate = ["-m", "memo.estimate", "--gpu=here", *flags(**TINY, dataset=there.dataset)]
    fast = [*estimate, "--fast", rng.choice(("--json", "--max_context", "--gpus=1", "--alpha_mode=paper"))]
    case.run(*rng.choice((train(case, "out", **SHORT), fast if what == "calibration" else estimate)))


def metrics_jsonl(case, there):
    rng, out = case.rng, copied(case, there.out, "out")

    def lines(rng, data):
        return b"".join(odd.json_bytes(rng, line) + b"\n" * (rng.random() < 0.95) if rng.random() < 0.2
                        else line for line in data.splitlines(True))
    odd.spoil(rng, out / "metrics.jsonl", lines)
    ended = case.run(*train(case, out, init_from="resume"))
    if ended.code or losses(out).get(ITERS - 1) != there.losses[ITERS - 1]:
        case.breaks("loss", f"odd metrics kept the run from going on: exit code {ended.code}, "
                            f"{ended.err[-200:]}")


# --- requests ---

def csv(case, there):
    rng, header = case.rng, ["id", "lower", "upper", "size"]
    n = rng.choice((0, 1, 2, 20, 20, 200, 5000))
    rows = [[f"b{i}", (low := rng.randrange(100)), low + rng.randrange(1, 50),
             rng.randrange(1, 10**rng.randrange(1, 10))] for i in range(n)]
    for row in rng.sample(rows, min(n, rng.randrange(3))):
        row[rng.randrange(4)] = odd.number(rng)
    if rng.random() < 0.2:
        header[rng.randrange(4)] = rng.choice(("id", "size", "", "Lower", "start", " size", "\ufeffid",
                                               "x" * 200000))
    if rng.random() < 0.2:
        rows = [row[:rng.randrange(6)] + ["more"] * rng.randrange(3) for row in rows]
    if rows and rng.random() < 0.1:
        rng.choice(rows).append(rng.choice(('"' + "x\n" * 100, "y" * 200000)))
    lines = "\n".join(",".join(map(str, row)) for row in [header, *rows]) + "\n"
    requests(case, "memo.dsa", "requests.csv", lines, "plan.csv")


def log(case, there):
    rng, live, lines = case.rng, [], []
    for i in range(rng.choice((0, 2, 30, 30, 400, 4000))):
        if live and rng.random() < 0.5:
            lines.append("free {} {}".format(*live.pop(rng.randrange(len(live)))))
        else:
            live.append((f"t{i}", rng.randrange(1, 10**rng.randrange(1, 10))))
            lines.append("malloc {} {}".format(*live[-1]))
    for label in rng.sample(("a", "b", "c", "a"), rng.randrange(4)):
        i = rng.randrange(len(lines) + 1)
        lines.insert(i, f"begin {label}")
        lines.insert(rng.randrange(i + 1, len(lines) + 1), f"end {label}")
    for i in rng.sample(range(len(lines)), min(len(lines), rng.randrange(3))):
        words = lines[i].split()
        words[rng.randrange(len(words))] = rng.choice((odd.number(rng), "malloc", "keep", "begin",
                                                       "end", "t1", "#"))
        lines[i] = rng.choice((" ".join(words), lines[i] + " more", "", "# x", lines[i].replace(" ", "\t"),
                               "\x85".join(words)))
    requests(case, "memo.planner", "requests.log", "\n".join(lines) + "\n", "plan.json",
             *["--one_level"] * (rng.random() < 0.3))


def requests(case, command, name, text, output, *options):
    """Runs memo.dsa or memo.planner on `text`, which may be spoiled more, with odd options."""
    rng, file = case.rng, case.cwd / name
    file.write_bytes(text.encode())
    if rng.random() < 0.3:
        odd.spoil(rng, file)
    keys = ["alignment"] + ["capacity"] * (command == "memo.dsa")
    options = [*options,
               *(f"--{key}={odd.number(rng)}".replace("\0", "") for key in keys if rng.random() < 0.15)]
    options += [f"--solver={rng.choice(('greedy', 'mip', 'cpsat', 'x', ''))}"] * (rng.random() < 0.4)
    case.run("-m", command, name, f"--time_limit={rng.choice((0, 0.01, 1, 2))}", "-o",
             rng.choice((output,) * 8 + (f"nowhere/{output}", ".", name)), *options)


# --- checkpoints and datasets ---

def rename(rng, newest):
    newest.rename(newest.with_name(rng.choice(("7", "00020", "99", "9" * 200, "0", "\uff12\uff10", "-3", "x",
                                               "20.tmp", "1_0"))))


def newer(rng, newest):
    path = newest.with_name(rng.choice(("99", "9" * 30, "\u0663\u0663\u0663", "21.tmp", "x")))
    rng.choice((path.mkdir, path.touch, lambda: path.symlink_to("nowhere"),
                lambda: path.symlink_to(newest.name), lambda: os.mkfifo(path),
                lambda: shutil.copytree(newest, path)))()


def names(rng, newest):
    stored = odd.stored(newest)
    name = rng.choice(("../../tokenizer.json", "/dev/zero", "/etc/passwd", "..", "", "\0", "a" * 5000,
                       "fifo", ".metadata/x"))
    os.mkfifo(newest / "fifo")
    sizes = rng.choice(([0, 0], [4, 5], [None, 1], ["x"], {}, 7))
    odd.seal(newest, stored | {"files": stored["files"] | {name: sizes}})


def swap(rng, newest):
    files = sorted(newest.iterdir())
    one, other = rng.choice(files), rng.choice(files)
    data = one.read_bytes(), other.read_bytes()
    other.write_bytes(data[0])
    one.write_bytes(data[1])


def checkpoint(case, there):
    rng, out = case.rng, copied(case, there.out, "out")
    *others, newest = checkpoints(out)
    what = rng.choice(("damage", "damage", "damage", "odd", "odd", "swap", "plant", "plant", "names",
                       "rename", "newer", "none"))
    file = rng.choice(sorted(newest.iterdir()))
    {"damage": lambda: file.write_bytes(odd.damaged(rng, file.read_bytes())),
     "odd": lambda: odd.replace(rng, file), "swap": lambda: swap(rng, newest),
     "plant": lambda: odd.plant(rng, newest, case.canary), "names": lambda: names(rng, newest),
     "rename": lambda: rename(rng, newest), "newer": lambda: newer(rng, newest),
     "none": lambda: odd.replace(rng, out / "ckpt")}[what]()
    command = rng.choice(("sample", "resume", "resume", "to-hf"))
    ended = case.run(*dict(sample=sample(out), resume=train(case, out, init_from="resume"),
                           **{"to-hf": convert("to-hf", out, "hf")})[command])
    bytes_only = what in ("damage", "odd", "swap")
    if command == "sample" and bytes_only and ended.code == 0 and ended.out not in there.samples:
        case.breaks("loss", "damaged weights were used without a word")
    if command == "resume" and bytes_only and ended.code == 0:
        same_losses(case, out, range(ITERS))
    if others and bytes_only and command != "to-hf" and ended.code:
        case.breaks("loss", f"{what} {file.name}: no fall back to checkpoint {others[-1].name}: "
                            f"{ended.err[-150:]}")
    if ended.code and what != "none" and not all((p / "checkpoint.json").is_file() for p in others):
        case.breaks("loss", "another checkpoint was removed")


def dataset(case, there):
    rng, data, out, at = case.rng, copied(case, there.dataset, "data"), case.cwd / "out", []
    file = data / rng.choice(("train.bin", "val.bin"))
    ids = bytearray(file.read_bytes())
    before = ("ids", "damage", "odd", "counted")
    during = ("cut", "bin", "data", "out", "ckpt", "out file", "metrics")
    what = rng.choice(before if rng.random() < 0.5 else during)
    if what == "ids":
        for _ in range(rng.choice((1, 10, 1000))):
            i = 2 * rng.randrange(len(ids) // 2)
            ids[i:i + 2] = rng.choice((b"\xff\xff", b"\x2d\x01", b"\x00\x80"))
        file.write_bytes(ids)
    elif what == "damage":
        odd.spoil(rng, file)
    elif what == "odd":
        odd.replace(rng, file)
    elif what == "counted":
        n, meta = rng.choice((0, 1, 2, 63, 64, 65, 66)), json.loads((data / "meta.json").read_text())
        file.write_bytes(ids[:2 * n])
        meta["counts"][file.stem]["tokens"] = n
        (data / "meta.json").write_text(json.dumps(meta))
    else:
        path = {"cut": file, "bin": file, "data": data, "ckpt": out / "ckpt",
                "metrics": out / "metrics.jsonl"}
        does = {"cut": "truncate", "out file": "replace"}.get(what, "remove")
        at = [(rng.uniform(0.3, there.alone_s), does, str(path.get(what, out)))]
    ended = case.run(*train(case, out, dataset=data), at=at, watch=out / "metrics.jsonl")
    in_loop = any(0 < rows < ITERS - 2 for _, rows in ended.happened)
    if what not in ("out", "ckpt", "out file", "metrics"):
        kept_all(case, out, ended)
    elif in_loop and what != "out file" and (ended.code or last_saved(out) != ITERS):
        case.breaks("loss", f"{what} went in mid-run: exit code {ended.code}, the last checkpoint is "
                            f"{last_saved(out)}; {ended.err.strip()[-150:]}")


# --- signals and consoles ---

def signals(case, there):
    rng, out, resumed = case.rng, case.cwd / "out", case.rng.random() < 0.3
    real = rng.random() < 0.12
    sent = [rng.choice((*ASKED, *ASKED, signal.SIGKILL)) for _ in range(rng.choice((0, 1, 1, 1, 1, 2)))]
    first = rng.uniform(0.15, 2 * there.alone_s + 4) if real else rng.uniform(0.03, 1.1 * there.alone_s)
    at = [(first + i * rng.choice((0, 0.002, 0.1, 0.5)), "signal", int(s)) for i, s in enumerate(sent)]
    console = {}
    if rng.random() < 0.25 or not at:
        console = rng.choice((dict(stdout="/dev/full"), dict(stdout="/dev/full", stderr="/dev/full"),
                              dict(stdout="pipe", head=0), dict(stdout="pipe", head=1),
                              dict(stdout="pipe", stderr="pipe", head=rng.randrange(20)),
                              dict(file_bytes=rng.choice((0, 500, 2000, 20000, 60000)))))
    if resumed:
        copied(case, there.out, "out")
    ended = case.run(*train(case, out, **dict(init_from="resume") if resumed else {}), at=at, real=real,
                     watch=out / "metrics.jsonl", **console)
    n, full_disk = len(ended.sent), "file_bytes" in console
    in_loop = [rows > 0 for _, rows in ended.happened]
    if n == 0 and ended.code and not full_disk:
        case.breaks("loss", f"a console that failed ended the run: exit code {ended.code}")
    elif n == 1 and in_loop[0] and signal.SIGKILL not in ended.sent and not full_disk:
        kept_all(case, out, ended)
    if resumed and not checkpoints(out):
        case.breaks("loss", "the checkpoint that was there is gone")
    go_on(case, out, complete=not full_disk)


# --- texts ---

def text(case, there):
    rng, source = case.rng, case.cwd / "source"
    source.mkdir()
    for i in range(rng.choice((0, 1, 1, 2, 5))):
        suffix = rng.choice((".txt", ".txt", ".jsonl", ".jsonl", ".parquet", ".md", ".TXT"))
        file = source / f"f{i}{suffix}"
        if suffix == ".parquet":
            odd.parquet(rng, file)
        else:
            file.write_bytes(odd.jsonl(rng) if suffix == ".jsonl" else odd.text(rng).encode())
        if rng.random() < 0.2:
            odd.spoil(rng, file)
    tokenizer = rng.choice(("train:257", "train:300", "train:300", "train:400", "train:256", there.dataset,
                            there.dataset))
    column = [f"--text_key={rng.choice(('other', 'x', ''))}"] * (rng.random() < 0.1)
    ended = case.run("data/text/prepare.py",
                     f"--source={rng.choice((source, source, *sorted(source.iterdir())))}",
                     f"--tokenizer={tokenizer}", "--out_dir=made", *column)
    if ended.code == 0 and rng.random() < 0.5:
        case.run(*train(case, "out", dataset="made", block_size=8, **SHORT))


KINDS = dict(argv=argv, config=config, json=json_files, csv=csv, log=log, checkpoint=checkpoint,
             dataset=dataset, signals=signals, text=text)
