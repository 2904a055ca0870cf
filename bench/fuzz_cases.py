"""The kinds of cases of bench/fuzz.py: functions (case, there) that draw from case.rng, write files, and run commands.

`there`: what prepare() made once: a dataset, a run with its checkpoints, a GPT-2 of Hugging Face, a cache, the
losses of a run that nobody disturbed, the keys that each command's --help lists.
"""

import copy
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import zipfile
import zlib
from functools import partial
from pathlib import Path

ITERS = 40
TINY = dict(n_layer=2, n_head=2, n_embd=16, block_size=64, batch_size=1, gradient_accumulation_steps=1, max_iters=ITERS,
            lr_decay_iters=ITERS, warmup_iters=4, eval_interval=10, eval_iters=1, save_interval=5, device="cpu")
ESTIMATE = ("-m", "memo.estimate", "--gpu=a800-80gb", "--gpus=1", "--fast")
WORDS = "the a of memory token swap layer plan host device buffer é 東京 def main ( ) : return x = 1 \n".split(" ")
ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # a run saves, then ends
INTEGERS = ("-1", "0", "1", "2", "3", str(-10**12), str(10**12), str(2**63), str(-2**63 - 1), str(2**64), str(10**30), "9" * 400,
            "9" * 5000)
VALUES = (*INTEGERS, "", " ", "abc", "None", "[]", "{}", "true", "False", "nan", "-nan", "inf", "-inf", "1.5", "-0.0", "1e-320",
          "1e308", "1e400", "0x10", "1_0", "\uff11\uff12", "\u0663", "é", "\udcff", "\x1b[31m", "\n", "a\nb", "\t", "\x7f", "\u202e",
          "\U0001f600", "a" * 10000, "../x", "nowhere/x", "%s%n", "{0}", "$(touch ../canary)", "'", '"', "-", "--", "=", "auto",
          "cpu", "cuda", "resume", "hf:nowhere", "train:10", "train:1" + "0" * 30, "a\\b", "*")
PATHS = ("/dev/null", "/dev/zero", "/proc/self/mem", "/", "/dev/full", "nowhere", ".", "/nonexistent/x")  # read, never written
OUTPUTS = {"out_dir", "o", "output", "plot"}


# --- what is there ---

def flags(**keys):
    return [f"--{k}={v}" for k, v in keys.items()]


def train(case, out, **keys):
    return ["train.py", *flags(**TINY | dict(dataset=case.there.dataset, out_dir=out) | keys)]


def documents(rng, n=60):
    return [" ".join(rng.choices(WORDS, k=rng.randrange(40, 200))) for _ in range(n)]


def must(ended):
    if ended.code:
        raise SystemExit(f"the bench cannot prepare: {ended.program}: {ended.err or ended.out}")
    return ended


def prepare(there, case, kinds):
    """Makes what cases of these `kinds` start from, with the project's own commands."""
    there.cache.mkdir(mode=0o700)
    calibration = calibrate(case) if "json" in kinds else None
    for name in ("dataset", "out", "alone", "learned", "hf", "sharded"):
        setattr(there, name, there.scratch / name)
    text = there.scratch / "text.jsonl"
    text.write_text("".join(json.dumps(dict(text=d)) + "\n" for d in documents(case.rng)))
    must(case.run("data/text/prepare.py", f"--source={text}", "--tokenizer=train:300", f"--out_dir={there.dataset}"))
    must(case.run(*train(case, there.out, max_iters=ITERS // 2)))
    must(case.run(*train(case, there.alone)))
    there.losses = losses(there.alone)
    must(case.run(*train(case, there.learned, max_iters=2, warmup_iters=1, position="learned")))
    must(case.run("-m", "memo.convert", "to-hf", there.learned, there.hf))
    shutil.copytree(there.hf, there.sharded)
    (there.sharded / "model.safetensors").rename(there.sharded / "model-1.safetensors")
    weights = (there.sharded / "model-1.safetensors").read_bytes()
    names = json.loads(weights[8:8 + int.from_bytes(weights[:8], "little")])
    index = dict(metadata={}, weight_map={n: "model-1.safetensors" for n in names if n != "__metadata__"})
    (there.sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    there.samples = set()
    for saved in checkpoints(there.out):
        only = there.scratch / f"only{saved.name}"
        shutil.copytree(there.out, only, ignore=lambda d, names, s=saved: [n for n in names if n.isdecimal() and n != s.name])
        there.samples.add(must(case.run(*sample(only))).out)
    there.keys = {}
    for command in COMMANDS:
        ended = case.run(*command.split(), "--help")
        there.keys[command] = sorted(set(re.findall(r"--(\w+)", ended.out)) - {"help"}) or there.keys["train.py"]
    if calibration is not None:
        if calibration.wait():
            raise SystemExit("the bench cannot prepare: --calibrate failed")
        must(case.run("-m", "memo.estimate", "--gpu=here", *flags(**TINY, dataset=there.dataset)))


def calibrate(case):
    """Half a minute, longer than a case may take: a process beside."""
    env = os.environ | dict(XDG_CACHE_HOME=str(case.cache), PYTHONPATH=str(case.there.sources))
    return subprocess.Popen([sys.executable, "-m", "memo.profiler", "--calibrate", "--device=cpu"], env=env, cwd=case.cwd,
                            stdout=subprocess.DEVNULL)


def losses(out):
    """{iter: (loss, grad_norm)} of a run's metrics.jsonl."""
    found = {}
    path = out / "metrics.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
            found[row["iter"]] = row["loss"], row["grad_norm"]
        except (ValueError, KeyError, TypeError):
            pass
    return found


def checkpoints(out):
    return sorted((p for p in (out / "ckpt").glob("*") if re.fullmatch("[0-9]+", p.name)), key=lambda p: int(p.name))


def sample(out):
    return ["-m", "memo.sample", str(out), "--prompt=the memory", "--max_new_tokens=8", "--temperature=0"]


def go_on(case, out, complete=True):
    """Takes up the run in `out` and ends it: its losses must be those of the run that nobody disturbed."""
    first = max((int(p.name) for p in checkpoints(out)), default=0)
    resume = dict(init_from="resume") if first else {}
    ended = case.run(*train(case, out, **resume))
    if ended.code:
        case.breaks("loss", f"a run with {'checkpoint ' + str(first) if first else 'no checkpoint'} cannot go on: "
                            f"exit code {ended.code}, {ended.err[-200:]}")
        return
    there, alone = losses(out), case.there.losses
    wrong = [i for i in (alone if complete else set(there) | set(range(first, ITERS))) if there.get(i) != alone[i]]
    if wrong and first < ITERS:
        case.breaks("loss", f"after going on from {first} the loss of step {wrong[0]} is {there.get(wrong[0])}, "
                            f"must be {alone[wrong[0]]}")


def kept_all(case, out, ended):
    """A run that could save had to save the last step that it did."""
    done, saved = max(losses(out), default=-1) + 1, max((int(p.name) for p in checkpoints(out)), default=0)
    if done != saved and not ended.hung:
        case.breaks("loss", f"{done} steps were done, the last checkpoint is {saved}; exit code {ended.code}, "
                            f"{(ended.err or ended.out).strip()[-150:]}")


# --- mutations ---

class Planted:
    """Runs a command where it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def odd_file(rng, path):
    """Something else in the place of a file."""
    path = Path(path)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    what = rng.choice(("missing", "fifo", "folder", "/dev/zero", "/dev/null", "loop", "empty"))
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "empty":
        path.write_bytes(b"")
    elif what != "missing":
        path.symlink_to(path.name if what == "loop" else what)
    return what


def odd_bytes(rng, data):
    """`data` damaged as disks, editors and people do."""
    i, j = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    noise = bytes(rng.randrange(256) for _ in range(rng.choice((1, 20, 3000))))
    flipped = data[:i] + bytes([data[i] ^ 1 << rng.randrange(8)]) + data[i + 1:] if i < len(data) else data + b"\0"
    return rng.choice((data[:i], data[i:], data[:i] + data[j:], data[:j] + data[i:], data[:i] + noise + data[i:],
                       data[:i] + noise + data[j:], flipped, b"\xef\xbb\xbf" + data, data + data, noise, b" \n",
                       data.replace(b"\n", b"\r\n"), data[:i] + b"\0" * (j - i) + data[j:], data.decode("latin1").encode("utf-16")))


def odd_value(rng):
    return copy.deepcopy(rng.choice((
        None, True, False, -1, 0, 1, 2, 1.5, -0.5, 1e30, 1e308, 10**12, 10**25, -10**25, 2**63, "", "x", "0", "../x", "/dev/zero",
        "\ud800", "\0", "a" * 100000, [], {}, [[]], [None], {"a": None}, float("nan"), float("inf"), -float("inf"), "DEEP", "HUGE",
        ["x", 1, None], "float32", "uint16", "/etc/passwd", "a\nb", "__class__")))


def places(value, path=()):
    """The paths of all values inside a JSON value; of long lists and objects the first 40."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:40]:
        yield from places(inner, (*path, key))


def odd_json(rng, value):
    """`value` with one to three places changed."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        path = rng.choice(list(places(value)))
        if not path:
            if rng.random() < 0.1:
                value = odd_value(rng)
            continue
        inside = value
        for key in path[:-1]:
            inside = inside[key]
        key, old = path[-1], inside[path[-1]]
        what = rng.choice(("odd", "odd", "odd", "delete", "number", "wrap", "double", "rename"))
        if what == "delete":
            del inside[key]
        elif what == "number" and isinstance(old, int | float):
            inside[key] = rng.choice((old + 1, -old, old * 10**6, old * 1.0, str(old), old - 1, 1 / (abs(old) + 1e-9)))
        elif what == "wrap":
            inside[key] = [old]
        elif what == "double":
            inside.insert(key, old) if isinstance(inside, list) else inside.update({f"{key} ": old})
        elif what == "rename" and isinstance(inside, dict):
            inside[rng.choice(("x", "", key + "_", key.upper()))] = inside.pop(key)
        else:
            inside[key] = odd_value(rng)
    return value


def odd_json_bytes(rng, data):
    """A JSON text, changed in its values or in its bytes."""
    if rng.random() < 0.25:
        return odd_bytes(rng, data)
    n = rng.choice((40, 900, 5000, 100000))
    deep = rng.choice(("[" * n + "]" * n, "[" * n, '{"a":' * n + "1" + "}" * n))
    return json.dumps(odd_json(rng, json.loads(data))).replace('"DEEP"', deep).replace('"HUGE"', "9" * 5000).encode()


def sealed(stored):
    return json.dumps(stored | {"crc32": zlib.crc32(json.dumps(stored).encode())})


def spoil(rng, path, change):
    """Changes a file's bytes, or puts something odd in its place."""
    if rng.random() < 0.12:
        return odd_file(rng, path)
    path.write_bytes(change(rng, path.read_bytes()))
    return "changed"


# --- kinds ---

COMMANDS = {  # (arguments that are right or fail soon, in the case's folder; where an input stands among them)
    "train.py": [*flags(**TINY | dict(max_iters=2, lr_decay_iters=2, warmup_iters=1)), "--out_dir=out"],
    "trace_step.py": flags(**TINY),
    "-m memo.estimate": [*ESTIMATE[2:], *flags(**TINY)],
    "-m memo.sample": ["OUT", "--prompt=the", "--max_new_tokens=3"],
    "-m memo.dsa": ["requests.csv", "--time_limit=1", "-o", "plan.csv"],
    "-m memo.planner": ["requests.log", "--time_limit=1", "-o", "plan.json"],
    "-m memo.convert": ["from-hf", "HF", "converted"],
    "-m memo.profiler": ["--calibrate", "--dtype=float64"],
    "data/stdlib/prepare.py": ["--out_dir=made", "--vocab_size=1"],
    "data/text/prepare.py": ["--source=text.txt", "--tokenizer=train:300", "--out_dir=made"],
}
ENDS = {"-m memo.profiler": ["--dtype=float64"], "data/stdlib/prepare.py": ["--vocab_size=1"]}  # not for half a minute


def argv(case, there):
    rng = case.rng
    command = rng.choice([*COMMANDS, "train.py", "train.py", "-m memo.estimate"])
    args = [dict(OUT=str(there.out), HF=str(there.hf)).get(a, a) for a in COMMANDS[command]]
    if command in ("train.py", "trace_step.py", "-m memo.estimate"):
        args.append(f"--dataset={there.dataset}")
    (case.cwd / "requests.csv").write_text("id,lower,upper,size\na,0,2,10\nb,1,3,20\n")
    (case.cwd / "requests.log").write_text("malloc a 10\nmalloc b 20\nfree a 10\nfree b 20\n")
    (case.cwd / "text.txt").write_text("\n".join(documents(rng, 5)))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        key = rng.choice([*there.keys[command], *(a[2:].partition("=")[0] for a in args if a.startswith("--"))])
        value = rng.choice(VALUES if key in OUTPUTS or rng.random() < 0.8 else PATHS)
        what = rng.choice(("value", "value", "value", "value", "typo", "loose", "bare", "drop", "split", "help"))
        if what == "value":
            args = [a for a in args if not a.startswith(f"--{key}=")]
            args.append(f"--{key}={value}")
        elif what == "typo":
            i = rng.randrange(len(key) + 1)
            args.append(f"--{key[:i] + rng.choice(('', 'x', '-', 'é')) + key[i + 1:]}={value}")
        elif what == "loose":
            args.insert(rng.randrange(len(args)), rng.choice(VALUES))
        elif what == "bare":
            args.append(f"--{key}")
        elif what == "drop" and command not in ("train.py", "trace_step.py", "-m memo.estimate"):
            args.pop(rng.randrange(len(args)))
        elif what == "split":
            args += [f"--{key}", value]
        else:
            args.append(rng.choice(("--help", "-h")))
    args += ENDS.get(command, [])
    writes = [a for a in args if a.startswith(("-o/", "/dev", "/proc")) or a == "/"]
    case.run(*command.split(), *(a for a in args if a not in writes))


ATTACKS = (
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0].__init__.__globals__['system']"
    "('touch CANARY')",
    "(lambda: ().__class__.__mro__[1].__subclasses__())()[0].__init__.__globals__",
    "(x := [c for c in ''.__class__.__mro__[1].__subclasses__() if 'wrap_close' in c.__name__]) and x[0].__init__."
    "__globals__['popen']('touch CANARY').read()",
    "__import__('os').system('touch CANARY')", "open('CANARY', 'w')", "eval('1')", "f'{().__class__.__base__}'",
    "f'{open(\"CANARY\", \"w\")}'", "{**{'a': (lambda: 1)()}}", "(lambda f: f(f))(lambda f: f(f))", "n_layer.__class__")
HEAVY = ("9**9**9", "10**10**10", "2**10**12 % 7", "1 << 10**11", "'a' * 10**10", "[0] * 10**11", "(1,) * 10**9", "-1 ** 0.5",
         "1 / 0", "1 // 0", "1 % 0", "1e308 * 10", "0.0 ** -1", "(-8) ** 0.5", "sum(range(10**12))", "[i for i in range(10**12)]")


def expression(rng, depth=0):
    e = partial(expression, rng, depth + 1)
    if depth > 3 or rng.random() < 0.3:
        return rng.choice(("1", "0", "2.5", "1e9", "'x'", "b'x'", "True", "None", "n_layer", "x", "...", "1j", "''", "'auto'",
                           "0x7fffffffffffffffffff", "-1", "__builtins__", "__file__", "_", "1_000", "'\\ud800'", "'\\0'"))
    return rng.choice((lambda: f"({e()} {rng.choice('+ - * / // % ** @ << >> & | ^ < == and or in is'.split())} {e()})",
                       lambda: f"{rng.choice(('-', '+', '~', 'not '))}({e()})", lambda: f"({e()},)", lambda: f"[{e()}, {e()}]",
                       lambda: f"{{{e()}: {e()}}}", lambda: f"({e()}).{rng.choice(('real', 'x', '__class__'))}",
                       lambda: f"({e()})({e()})", lambda: f"({e()})[{e()}:{e()}]", lambda: f"(lambda x=1: {e()})",
                       lambda: f"f'{{{e()}!r:>{rng.choice((3, 10**10))}}}'", lambda: f"(y := {e()})",
                       lambda: f"({e()} if {e()} else {e()})", lambda: f"[{e()} for x in {e()}]", lambda: f"(yield {e()})",
                       lambda: f"(await {e()})", lambda: f"[*{e()}]", lambda: rng.choice(ATTACKS), lambda: rng.choice(HEAVY)))()


def config_text(rng, keys):
    lines = ['"""A config."""', "n_layer = 2"]
    for _ in range(rng.randrange(1, 5)):
        key = rng.choice([*keys, "x", "n_layre", "__builtins__", "é"])
        n = rng.choice((10, 100, 1000, 20000))
        lines.append(rng.choice((
            f"{key} = {expression(rng)}", f"{key} = {expression(rng)}", f"{key} = {rng.choice(ATTACKS)}",
            f"{key} = {rng.choice(HEAVY)}", f"{key} = {rng.choice(VALUES)!r}", f"{key} = {'(' * n}1{')' * n}", f"{key} = {'-' * n}1",
            f"{key} = {'[' * n}{']' * n}", f"{key} = {'1+' * n}1", f"{key} = {'9' * n}", f"{key} = '{'a' * n}' * {n}",
            f"{key} = {key}", f"{key}, n_head = 1, 2", f"{key} = n_head = 2", f"{key} += 1", f"{key}: int = 1", f"del {key}",
            f"import os; os.system('touch CANARY'); {key} = 1", "while True: pass", "def f(): pass", "@print\nclass A: pass",
            f"{key}[0] = 1", f"{key}.x = 1", "pass", "exec('1')", "(", "\t x = 1", f"{key} = 1 # \x00", f"{key} = 1\x0c",
            "'a doc' + 'string'", f"{key} = print", "raise SystemExit(0)", "assert 0", f"{key} = 08", f"{key} = '\\N{{x}}'")))
    return "\n".join(lines) + "\n"


def config(case, there):
    rng = case.rng
    file = case.cwd / rng.choice(("c.py", "c.py", "c", "c d.py", "é.py"))
    text = config_text(rng, there.keys["train.py"]).replace("CANARY", str(case.canary))
    file.write_bytes(text.encode(errors="surrogateescape"))
    if rng.random() < 0.1:
        file.write_bytes(rng.choice((b"# -*- coding: " + rng.choice((b"latin1", b"utf-7", b"x", b"hex", b"utf-16")) + b" -*-\n",
                                     b"\xef\xbb\xbf", b"\xff\xfe", b"")) + text.encode())
    elif rng.random() < 0.25:
        spoil(rng, file, odd_bytes)
    keys = flags(**TINY | dict(max_iters=1, lr_decay_iters=1, warmup_iters=0, dataset=there.dataset))
    case.run(*rng.choice((["train.py", file, *keys, "--out_dir=out"], [*ESTIMATE, file, *keys], [*ESTIMATE, file, *keys],
                          ["trace_step.py", file, *keys])))


def copied(case, folder, name):
    return Path(shutil.copytree(folder, case.cwd / name))


def json_files(case, there):
    rng = case.rng
    target = rng.choice(("meta", "tokenizer", "hf config", "index", "broken", "resealed", "resealed", "resealed", "calibration",
                         "calibration", "arena", "plan", "metrics"))
    if target in ("meta", "tokenizer"):
        data = copied(case, there.dataset, "data")
        spoil(rng, data / f"{target}.json", odd_json_bytes)
        commands = [train(case, "out", dataset=data, max_iters=2, warmup_iters=1)]
        if target == "meta":
            commands.append([*ESTIMATE, *flags(**TINY, dataset=data)])
        else:
            (case.cwd / "text.txt").write_text("\n".join(documents(rng, 5)))
            out = copied(case, there.out, "out")
            shutil.copy(data / "tokenizer.json", out) if (data / "tokenizer.json").is_file() else odd_file(rng, out / "tokenizer.json")
            hf = copied(case, there.hf, "hf")
            if (data / "tokenizer.json").is_file():
                shutil.copy(data / "tokenizer.json", hf)
            commands += [sample("out"), ["-m", "memo.convert", "from-hf", "hf", "converted"],
                         ["data/text/prepare.py", "--source=text.txt", f"--tokenizer={data}", "--out_dir=made"]]
        case.run(*rng.choice(commands))
    elif target in ("hf config", "index"):
        hf = copied(case, there.sharded, "hf")
        spoil(rng, hf / ("config.json" if target == "hf config" else "model.safetensors.index.json"), odd_json_bytes)
        case.run(*rng.choice((["-m", "memo.convert", "from-hf", "hf", "converted"],
                              ["train.py", "--init_from=hf:hf", f"--dataset={there.dataset}", "--out_dir=new", "--max_iters=1"])))
    elif target in ("broken", "resealed"):
        out = copied(case, rng.choice((there.out, there.learned)), "out")
        file = checkpoints(out)[-1] / "checkpoint.json"
        if target == "broken":
            spoil(rng, file, odd_json_bytes)
        else:
            stored = json.loads(file.read_text())
            stored.pop("crc32")
            while not isinstance(odd := odd_json(rng, stored), dict):
                pass
            file.write_text(sealed(odd))
        case.run(*rng.choice((sample("out"), train(case, "out", init_from="resume"), train(case, "out", init_from="resume"),
                              ["-m", "memo.convert", "to-hf", "out", "hf"])))
    elif target == "metrics":
        out = copied(case, there.out, "out")
        spoil(rng, out / "metrics.jsonl", lambda r, data: b"".join(
            odd_json_bytes(r, line) + b"\n" * (r.random() < 0.95) if r.random() < 0.2 else line for line in data.splitlines(True)))
        case.run(*train(case, "out", init_from="resume"))
        if losses(out).get(ITERS - 1) != there.losses[ITERS - 1]:
            case.breaks("loss", f"the loss of the last step is {losses(out).get(ITERS - 1)}")
    else:
        case.cache = copied(case, there.cache, "cache")
        os.chmod(case.cache, 0o700)
        files = sorted(case.cache.rglob(f"{target}-*.json"))
        for file in files if rng.random() < 0.5 else [rng.choice(files)] if files else []:
            spoil(rng, file, odd_json_bytes)
        estimate = ["-m", "memo.estimate", "--gpu=here", *flags(**TINY, dataset=there.dataset)]
        fast = [*estimate, "--fast", rng.choice(("--json", "--max_context", "--gpus=1", "--alpha_mode=paper"))]
        case.run(*rng.choice((train(case, "out", max_iters=2, warmup_iters=1), fast if target == "calibration" else estimate)))


def odd_number(rng):
    return rng.choice((*INTEGERS, "1.0", "1e3", "nan", "inf", "", " 1 ", "x", "+1", "0x1", "1_0", "\u0663", "-0", "1,1", '"', "\0"))


def csv(case, there):
    rng = case.rng
    n = rng.choice((0, 1, 2, 20, 20, 200, 5000))
    rows = [[f"b{i}", (low := rng.randrange(100)), low + rng.randrange(1, 50), rng.randrange(1, 10**rng.randrange(1, 10))]
            for i in range(n)]
    header = ["id", "lower", "upper", "size"]
    for row in rng.sample(rows, min(n, rng.randrange(3))):
        row[rng.randrange(4)] = odd_number(rng)
    if rng.random() < 0.2:
        i = rng.randrange(4)
        header[i] = rng.choice(("id", "size", "", "Lower", "start", " size", "\ufeffid", "x" * 200000))
    if rng.random() < 0.2:
        rows = [row[:rng.randrange(6)] + ["more"] * rng.randrange(3) for row in rows]
    if rows and rng.random() < 0.1:
        rng.choice(rows).append(rng.choice(('"' + "x\n" * 100, "y" * 200000)))
    text = "\n".join(",".join(map(str, row)) for row in [header, *rows]) + "\n"
    file = case.cwd / "requests.csv"
    file.write_bytes(text.encode())
    if rng.random() < 0.3:
        spoil(rng, file, odd_bytes)
    options = [f"--{key}={odd_number(rng)}" for key in ("capacity", "alignment") if rng.random() < 0.15]
    options += [f"--solver={rng.choice(('greedy', 'mip', 'cpsat', 'x', ''))}"] * (rng.random() < 0.4)
    output = rng.choice(("plan.csv",) * 8 + ("nowhere/plan.csv", ".", "requests.csv"))
    case.run("-m", "memo.dsa", "requests.csv", f"--time_limit={rng.choice((0, 0.01, 1, 2))}", "-o", output, *options)


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
        lines[i:i] = [f"begin {label}"]
        j = rng.randrange(i + 1, len(lines) + 1)
        lines[j:j] = [f"end {label}"]
    for _ in range(rng.randrange(3) if lines else 0):
        i = rng.randrange(len(lines))
        words = lines[i].split()
        words[rng.randrange(len(words))] = rng.choice((odd_number(rng), "malloc", "free", "keep", "begin", "end", "t1", "#"))
        lines[i] = rng.choice((" ".join(words), lines[i] + " more", "", "# x", lines[i].replace(" ", "\t"), "\x85".join(words)))
    file = case.cwd / "requests.log"
    file.write_bytes(("\n".join(lines) + "\n").encode())
    if rng.random() < 0.3:
        spoil(rng, file, odd_bytes)
    options = [f"--alignment={odd_number(rng)}"] * (rng.random() < 0.2) + ["--one_level"] * (rng.random() < 0.3)
    options += [f"--solver={rng.choice(('greedy', 'mip', 'cpsat', 'x'))}"] * (rng.random() < 0.4)
    output = rng.choice(("plan.json",) * 8 + ("nowhere/plan.json", ".", "requests.log"))
    case.run("-m", "memo.planner", "requests.log", f"--time_limit={rng.choice((0, 0.01, 1))}", "-o", output, *options)


def plant(rng, folder, canary):
    """A pickle that runs a command in a checkpoint's .metadata or shard, sized and sealed as the real one."""
    file = folder / rng.choice((".metadata", *(p.name for p in folder.glob("*.distcp"))))
    data = pickle.dumps(Planted(canary))
    if rng.random() < 0.3:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/version", "3\n")
        data = file.read_bytes()
    elif rng.random() < 0.5 and (size := file.stat().st_size) > len(data):
        data += file.read_bytes()[-(size - len(data)):]
    file.write_bytes(data)
    stored = json.loads((folder / "checkpoint.json").read_text())
    stored.pop("crc32")
    stored["files"][file.name] = [len(data), zlib.crc32(data)]
    (folder / "checkpoint.json").write_text(sealed(stored))


def checkpoint(case, there):
    rng, out = case.rng, copied(case, there.out, "out")
    saved = checkpoints(out)
    newest, others = saved[-1], saved[:-1]
    files = sorted(newest.iterdir())
    file = rng.choice(files)
    what = rng.choice(("bytes", "bytes", "bytes", "odd", "odd", "swap", "plant", "plant", "names", "folder", "newer", "junk"))
    if what == "bytes":
        file.write_bytes(odd_bytes(rng, file.read_bytes()))
    elif what == "odd":
        odd_file(rng, file)
    elif what == "swap":
        other = rng.choice(files)
        a, b = file.read_bytes(), other.read_bytes()
        file.write_bytes(b), other.write_bytes(a)
    elif what == "plant":
        plant(rng, newest, case.canary)
    elif what == "names":
        stored = json.loads((newest / "checkpoint.json").read_text())
        stored.pop("crc32")
        name = rng.choice(("../../tokenizer.json", "/dev/zero", "/etc/passwd", "..", "", "\0", "a" * 5000, "fifo", ".metadata/x"))
        os.mkfifo(newest / "fifo")
        stored["files"][name] = rng.choice(([0, 0], [4, 5], [None, 1], ["x"], {}, 7))
        (newest / "checkpoint.json").write_text(sealed(stored))
    elif what == "folder":
        newest.rename(newest.with_name(rng.choice(("7", "00020", "99", "9" * 200, "9" * 5000 if rng.random() < 0 else "0", "\uff12\uff10",
                                                   "-3", "x", "20.tmp", "1_0"))))
    elif what == "newer":
        newer = newest.with_name(rng.choice(("99", "9" * 30, "\u0663\u0663\u0663", "21.tmp", "x")))
        rng.choice((newer.mkdir, newer.touch, lambda: newer.symlink_to("nowhere"), lambda: newer.symlink_to(newest.name),
                    lambda: os.mkfifo(newer), lambda: shutil.copytree(newest, newer)))()
    else:
        shutil.rmtree(out / "ckpt")
        odd_file(rng, out / "ckpt")
    command = rng.choice(("sample", "resume", "resume", "to-hf"))
    if command == "sample":
        ended = case.run(*sample(out))
        if ended.code == 0 and ended.out not in there.samples and what != "plant":
            case.breaks("loss", "damaged weights were used without a word")
    elif command == "to-hf":
        ended = case.run("-m", "memo.convert", "to-hf", out, "hf")
    else:
        ended = case.run(*train(case, out, init_from="resume"))
        if ended.code == 0 and losses(out).get(ITERS - 1) != there.losses[ITERS - 1] and what not in ("plant", "folder", "newer"):
            case.breaks("loss", "the resumed run is not the undisturbed one")
    if others and what in ("bytes", "odd", "swap") and command != "to-hf" and ended.code:
        case.breaks("loss", f"{what} {file.name}: did not fall back to checkpoint {others[-1].name}: {ended.err[-150:]}")
    if ended.code and [p for p in others if not (p / "checkpoint.json").is_file()]:
        case.breaks("loss", "another checkpoint was removed")


def dataset(case, there):
    rng, data, at = case.rng, copied(case, there.dataset, "data"), []
    out = case.cwd / "out"
    file = data / rng.choice(("train.bin", "val.bin"))
    bad = rng.random() < 0.6
    what = rng.choice(("ids", "bytes", "odd", "counted") if bad else ("truncate", "remove", "all", "out", "ckpt", "out file", "metrics"))
    ids = bytearray(file.read_bytes())
    if what == "ids":
        for _ in range(rng.choice((1, 10, 1000))):
            i = 2 * rng.randrange(len(ids) // 2)
            ids[i:i + 2] = rng.choice((b"\xff\xff", b"\x2d\x01", b"\x00\x80"))
        file.write_bytes(ids)
    elif what == "bytes":
        file.write_bytes(odd_bytes(rng, bytes(ids)))
    elif what == "odd":
        odd_file(rng, file)
    elif what == "counted":
        n = rng.choice((0, 1, 2, 63, 64, 65, 66))
        file.write_bytes(ids[:2 * n])
        meta = json.loads((data / "meta.json").read_text())
        meta["counts"][file.stem]["tokens"] = n
        (data / "meta.json").write_text(json.dumps(meta))
    else:
        path = {"truncate": file, "remove": file, "all": data, "ckpt": out / "ckpt", "metrics": out / "metrics.jsonl"}.get(what, out)
        does = "truncate" if what == "truncate" else "replace" if what == "out file" else "remove"
        at = [(rng.uniform(0.3, 2.5), does, str(path))]
    ended = case.run(*train(case, out, dataset=data), at=at)
    touched = what in ("out", "ckpt", "out file", "metrics")
    if not touched:
        kept_all(case, out, ended)
    elif ended.code == 0 and what in ("out", "ckpt") and not checkpoints(out) and ended.happened:
        case.breaks("loss", "the run ended well and there is no checkpoint")


def signals(case, there):
    rng, out = case.rng, case.cwd / "out"
    real, end = rng.random() < 0.12, {}
    span = (0.15, 9.0) if real else (0.03, 2.6)
    sent = [rng.choice((*ASKED, *ASKED, signal.SIGKILL)) for _ in range(rng.choice((0, 1, 1, 1, 1, 2)))]
    first = rng.uniform(*span)
    at = [(first + i * rng.choice((0, 0.002, 0.1, 0.5)), "signal", int(s)) for i, s in enumerate(sent)]
    if rng.random() < 0.25 or not at:
        end = rng.choice((dict(stdout="/dev/full"), dict(stdout="/dev/full", stderr="/dev/full"), dict(stdout="pipe", head=0),
                          dict(stdout="pipe", head=1), dict(stdout="pipe", stderr="pipe", head=rng.randrange(20)),
                          dict(file_bytes=rng.choice((0, 500, 2000, 20000, 60000)))))
    resumed = rng.random() < 0.3
    if resumed:
        copied(case, there.out, "out")
    ended = case.run(*train(case, out, **dict(init_from="resume") if resumed else {}), at=at, real=real,
                     watch=out / "metrics.jsonl", **end)
    many = [event for event, _ in ended.happened]
    if "file_bytes" not in end and signal.SIGKILL not in ended.sent and len(many) < 2:
        if all(size for _, size in ended.happened) or end and not many:
            kept_all(case, out, ended)
        if not many and ended.code:
            case.breaks("loss", f"a console that failed ended the run: exit code {ended.code}")
    if resumed and not checkpoints(out):
        case.breaks("loss", "the checkpoint that was there is gone")
    go_on(case, out, complete="file_bytes" not in end)


def text_of(rng):
    word = rng.choice(("a", "é", "東", "\u0300", "\U0001f600", "\0", "\x85", "<|endoftext|>", "\ufffd"))
    return rng.choice((lambda: "", lambda: word, lambda: " " * rng.choice((1, 10**6)), lambda: "\n" * rng.choice((3, 10**5)),
                       lambda: word * rng.choice((10, 10**5, 10**6)), lambda: (word + " ") * rng.choice((1, 30000)),
                       lambda: "\r\n".join(documents(rng, 3)), lambda: " ".join(documents(rng, 10)), lambda: " ".join(documents(rng))))()


def parquet(rng, file):
    import pyarrow as pa
    import pyarrow.parquet
    texts = [text_of(rng)[:1000] for _ in range(rng.choice((0, 1, 30)))]
    column = rng.choice((texts, texts, texts, [len(t) for t in texts], [None for _ in texts], [[t] for t in texts],
                         [t.encode() for t in texts], [None if i % 3 else t for i, t in enumerate(texts)]))
    name = rng.choice(("text", "text", "text", "Text", "é"))
    pa.parquet.write_table(pa.table({name: column, "other": list(range(len(texts)))}), file)


def text(case, there):
    rng, source = case.rng, case.cwd / "source"
    source.mkdir()
    for i in range(rng.choice((0, 1, 1, 2, 5))):
        file = source / (f"f{i}" + rng.choice((".txt", ".txt", ".jsonl", ".jsonl", ".parquet", ".md", ".TXT")))
        if file.suffix == ".parquet":
            parquet(rng, file)
        elif file.suffix == ".jsonl":
            lines = [json.dumps(dict(text=text_of(rng)[:20000])).encode() for _ in range(rng.choice((1, 5, 50)))]
            file.write_bytes(b"\n".join(odd_json_bytes(rng, x) if rng.random() < 0.05 else x for x in lines))
        else:
            file.write_bytes(text_of(rng).encode(errors="surrogateescape"))
        if rng.random() < 0.2:
            spoil(rng, file, odd_bytes)
    tokenizer = rng.choice(("train:257", "train:300", "train:300", "train:400", "train:256", there.dataset, there.dataset))
    files = sorted(source.iterdir())
    target = rng.choice((source, source, *files))
    ended = case.run("data/text/prepare.py", f"--source={target}", f"--tokenizer={tokenizer}", "--out_dir=made",
                     *[f"--text_key={rng.choice(('other', 'x', ''))}"] * (rng.random() < 0.1))
    if ended.code == 0 and rng.random() < 0.5:
        case.run(*train(case, "out", dataset="made", max_iters=2, warmup_iters=1, block_size=8))


KINDS = dict(argv=argv, config=config, json=json_files, csv=csv, log=log, checkpoint=checkpoint, dataset=dataset, signals=signals,
             text=text)
