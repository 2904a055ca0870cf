"""The kinds of cases of bench/fuzz.py: functions (case, there) that draw from case.rng, write files, and run
commands. `there`: see bench/fuzz_there.py."""

import json
import os
import shutil
import signal

from bench import fuzz_odd as odd
from bench.fuzz_there import (
    COMMANDS,
    ESTIMATE,
    ITERS,
    SHORT,
    TINY,
    checkpoints,
    convert,
    copied,
    flags,
    go_on,
    kept_all,
    last_saved,
    losses,
    same_losses,
    sample,
    train,
)

# --- argv ---

OUTPUTS = {"out_dir", "o", "output", "plot"}
# else these take half a minute
ENDS = {"-m memo.profiler": ["--dtype=float64"], "data/stdlib/prepare.py": ["--vocab_size=1"]}
OF_CONFIG = ("train.py", "-m memo.run.trace_step", "-m memo.estimate")


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
                          [*ESTIMATE, file, *keys], ["-m", "memo.run.trace_step", file, *keys])))


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

ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # a run saves, then ends


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
