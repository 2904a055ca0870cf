"""What is odd: values, bytes, JSON, config files, checkpoints, texts. For bench/fuzz_cases.py."""

import copy
import json
import os
import pickle
import re
import shutil
import zipfile
import zlib
from functools import partial
from pathlib import Path

INTEGERS = ("-1", "0", "1", "2", "3", str(-10**12), str(10**12), str(2**63), str(-2**63 - 1), str(2**64),
            str(10**30), "9" * 400, "9" * 5000)  # small, or beyond every bound: none rightly takes long
VALUES = (*INTEGERS, "", " ", "abc", "None", "[]", "{}", "true", "False", "nan", "-nan", "inf", "-inf",
          "1.5", "-0.0", "1e-320", "1e308", "1e400", "0x10", "1_0", "\uff11\uff12", "\u0663", "é", "\udcff",
          "\x1b[31m", "\n", "a\nb", "\t", "\x7f", "\u202e", "\U0001f600", "a" * 10000, "../x", "nowhere/x",
          "%s%n", "{0}", "'", '"', "-", "--", "=", "$(touch ../canary)", "auto", "cpu", "cuda", "resume",
          "hf:nowhere", "train:10", "train:1" + "0" * 30, "a\\b", "*")
PATHS = ("/dev/null", "/dev/zero", "/proc/self/mem", "/dev/full", ".", "/nonexistent/x")  # only read
WORDS = ("the a of memory token swap layer plan host device buffer é 東京 "
         "def main ( ) : return x = 1 \n").split(" ")


# --- values, bytes, files ---

def number(rng):
    return rng.choice((*INTEGERS, "1.0", "1e3", "nan", "inf", "", " 1 ", "x", "+1", "0x1", "1_0", "\u0663",
                       "-0", "1,1", '"', "\0"))


def replace(rng, path):
    """Something else in the place of a file or folder."""
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


def damaged(rng, data):
    """`data` as disks, editors and people damage it."""
    i, j = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    noise = bytes(rng.randrange(256) for _ in range(rng.choice((1, 20, 3000))))
    flipped = (data[:i] + bytes([data[i] ^ 1 << rng.randrange(8)]) + data[i + 1:] if i < len(data)
               else data + b"\0")
    return rng.choice((
        data[:i], data[i:], data[:i] + data[j:], data[:j] + data[i:], data[:i] + noise + data[i:],
        flipped, flipped, data[:i] + noise + data[j:], data + data, noise, b" \n",
        data[:i] + b"\0" * (j - i) + data[j:], b"\xef\xbb\xbf" + data, data.replace(b"\n", b"\r\n"),
        data.decode("latin1").encode("utf-16")))


def spoil(rng, path, change=damaged):
    """Changes a file's bytes, or puts something odd in its place."""
    if rng.random() < 0.12:
        replace(rng, path)
    else:
        path.write_bytes(change(rng, path.read_bytes()))


# --- JSON ---

def value(rng):
    return copy.deepcopy(rng.choice((
        None, True, False, -1, 0, 1, 2, 1.5, -0.5, 1e30, 1e308, 10**12, 10**25, -10**25, 2**63, "", "x",
        "0", "../x", "/dev/zero", "\ud800", "\0", "a" * 100000, [], {}, [[]], [None], {"a": None},
        float("nan"), float("inf"), -float("inf"), "DEEP", "HUGE", ["x", 1, None], "float32", "uint16",
        "/etc/passwd", "a\nb", "__class__")))


def places(value, path=()):
    """The paths of all values inside a JSON value; of long lists and objects the first 40."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:40]:
        yield from places(inner, (*path, key))


def changed(rng, whole):
    """A JSON value with one to three places changed."""
    whole = copy.deepcopy(whole)
    for _ in range(rng.choice((1, 1, 2, 3))):
        *path, key = rng.choice(list(places(whole))) or (None,)
        if key is None:
            if rng.random() < 0.1:
                whole = value(rng)
            continue
        inside = whole
        for step in path:
            inside = inside[step]
        old, what = (inside[key],
                     rng.choice(("odd", "odd", "odd", "delete", "number", "wrap", "double", "rename")))
        if what == "delete":
            del inside[key]
        elif what == "number" and isinstance(old, int | float):
            inside[key] = rng.choice((old + 1, -old, old * 10**6, old * 1.0, str(old), old - 1,
                                      1 / (abs(old) + 1e-9)))
        elif what == "wrap":
            inside[key] = [old]
        elif what == "double":
            inside.insert(key, old) if isinstance(inside, list) else inside.update({f"{key} ": old})
        elif what == "rename" and isinstance(inside, dict):
            inside[rng.choice(("x", "", key + "_", key.upper()))] = inside.pop(key)
        else:
            inside[key] = value(rng)
    return whole


def json_bytes(rng, data):
    """A JSON text, changed in its values or in its bytes."""
    if rng.random() < 0.25:
        return damaged(rng, data)
    n = rng.choice((40, 900, 5000, 100000))
    deep = rng.choice(("[" * n + "]" * n, "[" * n, '{"a":' * n + "1" + "}" * n))
    text = json.dumps(changed(rng, json.loads(data)))
    return text.replace('"DEEP"', deep).replace('"HUGE"', "9" * 5000).encode()


# --- checkpoints ---

class Planted:
    """Runs a command where it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def stored(folder):
    """What the checkpoint.json of a checkpoint holds, without its crc32."""
    return {k: v for k, v in json.loads((folder / "checkpoint.json").read_text()).items() if k != "crc32"}


def seal(folder, stored):
    """Writes a checkpoint.json whose crc32 is right, whatever it holds."""
    text = json.dumps(stored | {"crc32": zlib.crc32(json.dumps(stored).encode())})
    (folder / "checkpoint.json").write_text(text)


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
    all_of = stored(folder)
    seal(folder, all_of | {"files": all_of["files"] | {file.name: [len(data), zlib.crc32(data)]}})


# --- config files ---

SUBCLASSES = "().__class__.__base__.__subclasses__()"
ATTACKS = (
    f"[c for c in {SUBCLASSES} if c.__name__ == '_wrap_close']"
    "[0].__init__.__globals__['system']('touch CANARY')",
    f"(x := [c for c in {SUBCLASSES} if 'wrap_close' in c.__name__]) and "
    "x[0].__init__.__globals__['popen']('touch CANARY')",
    f"(lambda: {SUBCLASSES})()[0].__init__.__globals__", "__import__('os').system('touch CANARY')",
    "eval('1')", "open('CANARY', 'w')", f"f'{{{SUBCLASSES}}}'", "f'{open(\"CANARY\", \"w\")}'",
    "{**{'a': (lambda: 1)()}}", "(lambda f: f(f))(lambda f: f(f))", "n_layer.__class__")
HEAVY = ("9**9**9", "10**10**10", "2**10**12 % 7", "1 << 10**11", "'a' * 10**10", "[0] * 10**11",
         "(1,) * 10**9", "-1 ** 0.5", "1 / 0", "1 // 0", "1 % 0", "1e308 * 10", "0.0 ** -1", "(-8) ** 0.5",
         "sum(range(10**12))", "[i for i in range(10**12)]", "2 ** 0.5", "10**4000", "7 // 0.0", "1e308 ** 2")
LEAVES = ("1", "0", "2.5", "1e9", "'x'", "b'x'", "True", "None", "n_layer", "x", "...", "1j", "''", "'auto'",
          "-1", "0x7fffffffffffffffffff", "__builtins__", "__file__", "_", "1_000", "'\\ud800'", "'\\0'")
FORMS = (  # E: an expression
    "(E + E)", "(E - E)", "(E * E)", "(E / E)", "(E // E)", "(E % E)", "(E ** E)", "(E @ E)",
    "(E << E)", "(E | E)", "(E < E)", "(E == E)", "(E and E)", "(E in E)", "-(E)", "+(E)", "~(E)", "not (E)",
    "(E,)", "[E, E]", "{E: E}", "{E}", "(E).real", "(E).__class__", "(E)(E)", "(E)[E:E]", "(lambda x=1: E)",
    "f'{E!r:>9}'", "f'{E:>99999999999}'", "(y := E)", "(E if E else E)", "[E for x in E]", "(yield E)",
    "(await E)", "[*E]", "{**E}", *ATTACKS, *HEAVY)
STATEMENTS = (  # K: a key, E: an expression, N: a count
    *("K = E",) * 8, "K, n_head = 1, 2", "K = n_head = 2", "K += 1", "K: int = 1", "del K", "K = K", "pass",
    "exec('1')", "import os; os.system('touch CANARY'); K = 1", "while True: pass", "def f(): pass",
    "@print\nclass A: pass", "K[0] = 1", "K.x = 1", "(", "\t x = 1", "K = 1 # \x00", "K = 1\x0c",
    "'a doc' + 'string'", "K = print", "assert 0", "raise SystemExit(0)", "K = 08", "K = '\\N{x}'",
    "K = 1 if", "for K in 1, 2: pass", "with K: pass", "\ufeffK = 1")


def expression(rng, depth=0):
    if depth > 3 or rng.random() < 0.3:
        return rng.choice(LEAVES)
    return re.sub(r"\bE\b", lambda _: expression(rng, depth + 1), rng.choice(FORMS))


def config_text(rng, keys):
    lines = ['"""A config."""', "n_layer = 2"]
    for _ in range(rng.randrange(1, 5)):
        key, n = rng.choice([*keys, "x", "n_layre", "__builtins__", "é"]), rng.choice((10, 100, 1000, 20000))
        if rng.random() < 0.25:
            lines.append(f"{key} = " + rng.choice((
                "(" * n + "1" + ")" * n, "-" * n + "1", "[" * n + "]" * n, "1+" * n + "1", "9" * n,
                f"'{'a' * n}' * {n}", repr(rng.choice(VALUES)), rng.choice(ATTACKS), rng.choice(HEAVY))))
        else:
            statement = rng.choice(STATEMENTS)
            lines.append(re.sub(r"\bK\b", key, re.sub(r"\bE\b", lambda _: expression(rng), statement)))
    return "\n".join(lines) + "\n"


def config_bytes(rng, keys, canary):
    data = config_text(rng, keys).replace("CANARY", str(canary)).encode(errors="surrogateescape")
    if rng.random() < 0.1:
        cookie = b"# -*- coding: " + rng.choice((b"latin1", b"utf-7", b"x", b"hex", b"utf-16")) + b" -*-\n"
        return rng.choice((cookie, b"\xef\xbb\xbf", b"\xff\xfe")) + data
    return data


# --- texts ---

def documents(rng, n=60):
    return [" ".join(rng.choices(WORDS, k=rng.randrange(40, 200))) for _ in range(n)]


def text(rng):
    word = rng.choice(("a", "é", "東", "\u0300", "\U0001f600", "\0", "\x85", "<|endoftext|>", "\ufffd"))
    return rng.choice((
        lambda: "", lambda: word, lambda: " " * rng.choice((1, 10**6)), lambda: "\n" * rng.choice((3, 10**5)),
        lambda: word * rng.choice((10, 10**5, 10**6)), lambda: (word + " ") * rng.choice((1, 30000)),
        lambda: "\r\n".join(documents(rng, 3)), lambda: " ".join(documents(rng, 10)),
        lambda: " ".join(documents(rng))))()


def parquet(rng, file):
    import pyarrow as pa
    import pyarrow.parquet
    texts = [text(rng)[:1000] for _ in range(rng.choice((0, 1, 30)))]
    column = rng.choice((texts, texts, texts, [len(t) for t in texts], [None for _ in texts],
                         [[t] for t in texts], [t.encode() for t in texts],
                         [None if i % 3 else t for i, t in enumerate(texts)]))
    name = rng.choice(("text", "text", "text", "Text", "é"))
    pa.parquet.write_table(pa.table({name: column, "other": list(range(len(texts)))}), file)


def jsonl(rng):
    lines = [json.dumps(dict(text=text(rng)[:20000])).encode() for _ in range(rng.choice((1, 5, 50)))]
    return b"\n".join(map(partial(json_bytes, rng), lines) if rng.random() < 0.2 else lines)
