"""Does reading end, whatever a file holds?

    python -m bench.bombs [a part of the names]      under six minutes on two cores

Each bomb is a small file, or one of zeros that are not on the disk, which asks for much: time, memory, or a
stack without end. A child, forked once the libraries are imported, reads it with the command that would. It
must end within CPU_S seconds of a processor and MEMORY bytes beyond the imports, with exit code 0, or with 1
or 2 and one line `error: ...`. Its own processes, which try out tokenizers and read Parquet, have limits of
their own. Writes bench/results/bombs.json.
"""

import gzip
import importlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.machine import machine
from memo.system.command import run

ROOT = Path(__file__).parents[1]
CPU_S, MEMORY, WALL_S = 5, 2**30, 60
MORE_S, GUARD = 3, 12 * 2**30  # seconds, and address space: the machine must outlive a bomb that works
MiB = 2**20
LIBRARIES = ("matplotlib.pyplot", "matplotlib.backends.backend_agg", "ortools.sat.python.cp_model", "highspy",
             "scipy.sparse", "scipy.optimize", "torch.distributed.checkpoint", "safetensors.torch")
TINY = ("--norm=rmsnorm --mlp=swiglu --bias=false --device=cpu --n_layer=2 --n_head=2 --n_embd=32 "
        "--block_size=64 --eval_interval=0 --warmup_iters=0 --memory_plan=off --dataset=data").split()
PREPARE = ["data.text.prepare", "--tokenizer=train:300", "--out_dir=new", "--source={}"]
TRAIN = ["train", *TINY, "--max_iters=1", "--lr_decay_iters=1", "--out_dir=new"]
RESUME = ["train", *TINY, "--max_iters=3", "--lr_decay_iters=3", "--out_dir=run", "--init_from=resume"]
TO_TRAIN = ["train", *TINY[3:4], *TRAIN[-4:], "--init_from=hf:hf"]
FROM_HF = ["memo.convert", "from-hf", "hf", "new"]
BY_HF = [*PREPARE[:1], *PREPARE[2:3], "--tokenizer=hf", "--source=hf/a.txt"]
PLAN, DSA = (["memo." + name, "{}", "-o", "made", "--time_limit=1"] for name in ("planner", "dsa"))
SAMPLE = ["memo.sample", "run", "--prompt=@{}", "--device=cpu"]
BOMBS: dict[str, tuple[Callable[[Path], object], list[str]]] = {}


def bomb(name: str, command: list[str], write: Callable[[Path], object]) -> None:
    """Enter a function that writes a bomb into a folder, and the command that meets it there."""
    BOMBS[name] = write, [word.format(name) for word in command]


def plant(name: str, command: list[str], content: Callable[[], bytes | str], path: str = "") -> None:
    """A bomb that is the content of one file, `path`, or one with the bomb's name."""
    def write(folder: Path) -> None:
        data = content()
        (folder / (path or name)).write_bytes(data.encode() if isinstance(data, str) else data)
    bomb(name, command, write)


def zeros(name: str, command: list[str], paths: list[str], nbytes: int) -> None:
    """Files of so many zeros, which take no room on the disk."""
    bomb(name, command, lambda folder: [os.truncate(os.open(folder / path, os.O_RDWR | os.O_CREAT), nbytes)
                                        for path in paths])


def change(name: str, command: list[str], path: str, **fields: object) -> None:
    """Other fields in a JSON file."""
    bomb(name, command, lambda folder: (folder / path).write_text(
        json.dumps(json.loads((folder / path).read_text()) | fields)))


def sources() -> None:
    """Of datasets."""
    packings = dict(gz=gzip.compress, zst=partial(pa.compress, codec="zstd", asbytes=True))
    for packing, pack in packings.items():
        for name, begin, part in (
                ("a line of zeros.jsonl", b" ", bytes(16 * MiB)), ("words.md", b"", b"words and " * MiB),
                ("a text without end.jsonl", b'{"text":"', b"a" * 16 * MiB), ("a.txt", b"", b"a" * 16 * MiB),
                ("lines.jsonl", b"", b"\n" * 16 * MiB), ("rows.jsonl", b"", b'{"text":"ab"}\n' * MiB),
                ("lists.json", b"[[]", b",[]" * 2**22), ("a row.jsonl", b'{"text":[0', b',{"":0}' * 2**21)):
            plant(f"{name}.{packing}", PREPARE, lambda p=pack, b=begin, t=part: p(b) + p(t) * 64)
    plant("a row of objects.jsonl", PREPARE, lambda: b'{"text":"a","x":[0' + b',{"":0}' * 2**23 + b"]}\n")
    plant("a list of objects.json", PREPARE, lambda: b'[{"text":"a","x":[0' + b',{"":0}' * 2**21 + b"]}]\n")
    plant("a long line.txt", PREPARE, lambda: b"a" * 64 * MiB)
    plant("a long line.jsonl", PREPARE, lambda: b'{"text":"' + "é".encode() * 31 * MiB + b'"}\n')
    plant("a deep list.json", PREPARE, lambda: b"[" * 16 * MiB)

    def parquet(name: str, made: Callable[[], object], **how: object) -> None:
        bomb(f"{name}.parquet", PREPARE, lambda folder: pq.write_table(
            pa.table(dict(text=["a"]) | made()), folder / f"{name}.parquet", **how))
    once, deep = dict(compression="zstd", use_dictionary=False), pa.string()
    for _ in range(90):
        deep = pa.struct([("a", deep)])
    parquet("one text many times", lambda: dict(text=pa.DictionaryArray.from_arrays(
        np.zeros(2**24, np.int8), pa.array(["a" * 2**18]))))
    parquet("a page of zeros", lambda: dict(text=["\0" * 300 * MiB]), **once)
    parquet("pages of zeros", lambda: dict(text=["\0" * 8 * MiB] * 80), **once)
    parquet("rows of nothing", lambda: dict(text=pa.nulls(2**26, pa.string())))
    parquet("a deep column", lambda: dict(x=pa.array([None], deep)), store_schema=False)
    parquet("columns", lambda: {f"c{i}": pa.nulls(1, pa.int8()) for i in range(50_000)})


def models() -> None:
    """Of Hugging Face, and their tokenizers."""
    def weights(name: str, header: Callable[[], bytes], length: int | None = None, rest: int = 0) -> None:
        def write(folder: Path) -> None:
            text, file = header(), folder / "hf/model.safetensors"
            file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text)
            os.truncate(file, file.stat().st_size + rest)
        bomb(f"safetensors: {name}", FROM_HF, write)

    def entries(rows: list[tuple[str, list[int], int]]) -> bytes:
        return json.dumps({name: dict(dtype="F32", shape=shape, data_offsets=[0, n])
                           for name, shape, n in rows}, separators=(",", ":")).encode()
    weights("a header of 2^60 bytes", lambda: b"{}", 2**60)
    weights("a header of zeros", lambda: b"", 2**24, 2**24)
    weights("a quarter of a million tensors", lambda: entries([(f"t{i}", [0], 0) for i in range(250_000)]))
    weights("all tensors at one place", lambda: entries([(f"t{i}", [1], 4) for i in range(250_000)]), rest=4)
    weights("2^40 bytes that are not there", lambda: entries([("t", [2**38], 2**40)]), rest=2**40)
    weights("no elements, 2^124 rows", lambda: entries([("t", [2**62, 2**62, 0], 0)]))
    weights("a name of 16 MB", lambda: entries([("t" * 16 * 10**6, [0], 0)]))
    weights("four million dimensions", lambda: entries([("t", [1] * 2**22, 4)]), rest=4)
    bomb("an index of a quarter of a million tensors", FROM_HF, lambda folder: (
        (folder / "hf/model.safetensors").rename(folder / "hf/model.safetensors.index.json").write_text(
            json.dumps(dict(weight_map={i: f"f{i}" for i in range(250_000)})))))
    for key in ("num_hidden_layers", "hidden_size", "max_position_embeddings", "vocab_size", "head_dim"):
        change(f"config.json: {key}", FROM_HF, "hf/config.json", **{key: 2**31 - 1})
        change(f"config.json: {key}, to train", TO_TRAIN, "hf/config.json", **{key: 2**31 - 1})
    for what, n in (("objects", 2**20 * 3), ("as many objects as may be", 2**18 // 5)):
        text = '{"eos_token":"a","x":[' + '{"":{"":0}},' * n + "0]}"
        for name in ("config", "special_tokens_map", "tokenizer_config", "generation_config", "added_tokens"):
            for how, command in (("convert", FROM_HF), ("prepare", BY_HF)):
                plant(f"{name}.json of {what}, {how}", command, lambda t=text: t, f"hf/{name}.json")
    zeros("a model's folder of large files", FROM_HF, [f"hf/{i}.txt" for i in range(64)], 256 * MiB)
    zeros("templates", BY_HF, [f"hf/{i}.jinja" for i in range(200)], 16 * MiB - 1)
    for name, pattern in (("on any text", r"(.*)*\d{12}"), ("on runs", "(a+a+)+b")):
        cut = dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)
        change(f"tokenizer: an expression that is slow {name}", BY_HF, "hf/tokenizer.json", pre_tokenizer=cut)
    change("tokenizer: half a million words", BY_HF, "hf/tokenizer.json",
           model=dict(type="BPE", vocab={f"{i}": i for i in range(500_000)}, merges=[]))
    added = [dict(id=i, content="a" * (i % 97) + f"{i}" if i else "<|endoftext|>", special=not i,
                  lstrip=False, rstrip=False, single_word=False, normalized=False) for i in range(30_000)]
    change("tokenizer: added tokens", BY_HF, "hf/tokenizer.json", added_tokens=added)
    bomb("tokenizer: vocab.json and merges.txt", FROM_HF, lambda folder: (
        (folder / "hf/tokenizer.json").unlink(),
        (folder / "hf/merges.txt").write_text("#version: 0.2\n" + "a b\n" * 10**7),
        (folder / "hf/vocab.json").write_text(json.dumps({f"{i}": i for i in range(2 * 10**6)}))))


def runs() -> None:
    """Datasets, runs, prompts, logs of requests and tables."""
    step, objects = '{"iter":0,"loss":0,"tgs":0,"tokens":0,"step_s":0', '{"x":[' + "{}," * 5 * 10**6 + "0]}"
    change("meta.json: vocab_size", TRAIN, "data/meta.json", vocab_size=2**32)
    many = dict(train=dict(tokens=2**39), val=dict(tokens=2**39))
    change("meta.json: counts", TRAIN, "data/meta.json", counts=many)
    bomb("tokens of zeros", TRAIN, lambda folder: (
        [os.truncate(folder / f"data/{split}.bin", 2**40) for split in many],
        (folder / "data/meta.json").write_text(json.dumps(dict(
            dtype="uint16", vocab_size=300, counts=many)))))
    plant("meta.json of objects", TRAIN, lambda: objects, "data/meta.json")
    plant("checkpoint.json of objects", RESUME, lambda: objects, "run/ckpt/1/checkpoint.json")
    for name in ("metrics.jsonl", "ckpt/1/checkpoint.json", "ckpt/1/.metadata"):
        zeros(f"{name} of zeros", RESUME, [f"run/{name}"], 2**37)
    plant("metrics.jsonl of junk", RESUME, lambda: (step + ',"x":[' + "[]," * 20_000 + "0]}\n") * 500,
          "run/metrics.jsonl")
    plant("metrics.jsonl of one step", RESUME, lambda: (step + "}\n") * 60_000, "run/metrics.jsonl")
    zeros("prompt of zeros", SAMPLE, ["prompt of zeros"], 64 * MiB - 1)
    plant("prompt of words", SAMPLE, lambda: b"and some more " * 4 * MiB)
    plant("config.py", [*TRAIN, "config.py"], lambda: "seed = 9\n" + "seed = seed * seed\n" * 3000)
    zeros("log of zeros", PLAN, ["log of zeros"], 64 * MiB - 1)
    plant("log of lines", PLAN, lambda: b"\n" * (64 * MiB - 1))
    for name, row in (("segments", "begin {0}\nend {0}\n"), ("requests", "malloc {0} 1\nmalloc {0}b 1\n")):
        plant(f"log of {name}", PLAN,
              lambda row=row: "".join(map(row.format, range(2**19 - 9))) + "free a 1\n")
    plant("log of 40,000 requests", PLAN, lambda: "".join(
        f"malloc {i} {i % 997 + 1}\n" + f"free {i - 400} {(i - 400) % 997 + 1}\n" * (i >= 400)
        for i in range(40_000)))
    plant("columns.csv", DSA, lambda: b"," * (64 * MiB - 1))
    head = "id,lower,upper,size\n"
    plant("rows.csv", DSA, lambda: head + "".join(f"{i},0,1,1\n" for i in range(2**20 - 9)) + "a,a,a,a")
    for n in (500, 2000, 9_999, 100_000):
        for shape, row in (("at once", lambda i, n: (i % 7, n + i % 11)),
                           ("nested", lambda i, n: (i, 2 * n - i)),
                           ("in a row", lambda i, n: (i, i + 40 + i * i % 61))):
            for solver in ("auto", "mip", "cpsat"):
                plant(f"{n} buffers {shape}, {solver}", [*DSA, f"--solver={solver}"],
                      lambda n=n, row=row: head + "".join("{},{},{},{}\n".format(
                          i, *row(i, n), i * i % 9973 + 1) for i in range(n)))


def main_of(name: str) -> Callable:
    """A command's main(); its module is imported once."""
    if name in sys.modules and hasattr(sys.modules[name], "main"):
        return sys.modules[name].main
    if name.startswith("data."):
        spec = importlib.util.spec_from_file_location(name, ROOT / f"{name.replace('.', '/')}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        return sys.modules[name].main
    module = importlib.import_module(name)
    return module.main if hasattr(module, "main") else importlib.import_module(f"{name}.__main__").main


def become(command: list[str], folder: Path) -> None:
    """What a child does: the command, in `folder`, whose files `used` and `said` tell of it."""
    code, size = 99, [int(n) * resource.getpagesize() for n in Path("/proc/self/statm").read_text().split()]
    os.chdir(folder)
    Path("there").write_text(f"{size[1]}")
    for number, name in ((1, "printed"), (2, "said")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (open(number, "w", 1, closefd=False) for number in (1, 2))  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (size[0] + GUARD, size[0] + GUARD))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S + MORE_S, CPU_S + MORE_S))
    try:
        code = run(main_of(command[0]), command[1:])
    except BaseException:  # libraries have some that are no Exception
        traceback.print_exc()
    finally:
        used = resource.getrusage(resource.RUSAGE_SELF)
        Path("used").write_text(f"{used.ru_utime + used.ru_stime}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def try_out(command: list[str], folder: Path) -> dict:
    """Read what lies in `folder` in a child -> what it took, the last line it said, and what is wrong."""
    main_of(command[0])
    if not (pid := os.fork()):
        become(command, folder)
    deadline = time.monotonic() + WALL_S
    while not (done := os.wait4(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    code, said = os.waitstatus_to_exitcode(done[1]), (folder / "said").read_text(errors="replace")
    used = folder / "used"
    seconds = float(used.read_text()) if used.exists() else CPU_S + MORE_S  # where it was killed
    nbytes = done[2].ru_maxrss * 1024 - int((folder / "there").read_text())
    errors = sum(line.startswith("error: ") for line in said.splitlines())
    wrong = [f"exit code {code}"] * (code not in (0, 1, 2)) + ["a traceback"] * ("Traceback" in said)
    wrong += [f"{errors} lines of error"] * (errors != (code != 0))
    wrong += [f"{seconds:.1f} s"] * (seconds > CPU_S) + [f"{nbytes >> 20} MiB"] * (nbytes > MEMORY)
    line = (said.strip().splitlines() or [""])[-1]
    return dict(exit=code, cpu_s=round(seconds, 2), mib=nbytes >> 20, line=line[:200], wrong=", ".join(wrong))


def main() -> int:
    for library in LIBRARIES:
        importlib.import_module(library)
    for enter in (sources, models, runs):
        enter()
    found, base, here = {}, *(Path(tempfile.mkdtemp()) / name for name in ("base", "here"))
    os.environ |= dict(XDG_CACHE_HOME=str(base.parent))
    base.mkdir()
    (base / "words.txt").write_text("\n".join(f"{i} words and {i * i} more" for i in range(2000)))
    for command in ([*PREPARE[:2], "--source=words.txt", "--out_dir=data"], [*TRAIN[:-1], "--out_dir=run"],
                    ["memo.convert", "to-hf", "run", "hf"]):  # what the bombs are planted into
        assert try_out(command, base)["exit"] == 0, (base / "said").read_text()
    (base / "hf/a.txt").write_text("a" * 100_000 + "\nb c" * 9999)
    for name, (write, command) in BOMBS.items():
        if all(word in name for word in sys.argv[1:]):
            shutil.copytree(base, here, ignore=shutil.ignore_patterns("used"))
            write(here)
            found[name] = row = try_out(command, here)
            shutil.rmtree(here)
            print(name, *row.values(), sep=" | ", flush=True)
    shutil.rmtree(base.parent)
    wrong = [name for name, row in found.items() if row["wrong"]]
    print(f"{len(found)} bombs, {len(wrong)} wrong: {wrong}")
    if not sys.argv[1:]:
        result = json.dumps(dict(machine=machine(), bombs=found), indent=1)
        (ROOT / "bench/results/bombs.json").write_text(f"{result}\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
