"""Where a configuration comes from: command line, config file, checkpoint, model of Hugging Face. Config
files are assignments that are evaluated, never run. A value is a literal, a name assigned before, or
arithmetic on numbers, within bounds: no file can run code, block a command or fill its memory."""

import ast
import difflib
import operator
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field
from math import isfinite
from pathlib import Path

from memo.checkpoint.manifest import newest
from memo.config.config import KEYS, MODEL_KEYS, POSITION_KEYS, Config
from memo.config.keys import Keys, Value, check_value, columns, typed
from memo.config.rope import parse_scaling
from memo.config.settings import Settings
from memo.errors import ConfigError, reason
from memo.huggingface.huggingface import OWN, check_reach, model_keys
from memo.system.files import read_text

MOST_CONFIG_CHARS = 2**16  # of a config file
MOST_INT = 2**63           # integers are below it
ARITHMETIC: dict[type, Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg}
VALUES = "a value is a number, a string, True, False, a key assigned above, or + - * / // ** of numbers"


# --- a config file ---

def statements(path: str | Path) -> list[ast.stmt]:
    """Parses a Python file into statements. Errors: ConfigError."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes in strings, say
            return ast.parse(read_text(path, MOST_CONFIG_CHARS)).body
    except FileNotFoundError:
        raise ConfigError(f"config file {path!r} does not exist; see config/") from None
    except SyntaxError as e:
        raise ConfigError(f"{path}:{e.lineno or 1}: {e.msg}") from None
    except (MemoryError, RecursionError):  # what Python's parser says then
        raise ConfigError(f"{path}:1: it is nested too deep") from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"config file {path!r} cannot be read ({reason(e)}); give one like those in "
                          "config/") from None


def value_of(node: ast.expr, known: Keys) -> Value:
    """Evaluates a syntax tree, within bounds. Errors: ConfigError, ArithmeticError, RecursionError."""
    value: object = None
    if isinstance(node, ast.Name):
        if node.id not in known:
            raise ConfigError(f"{node.id!r} is not assigned above; {VALUES}")
        return known[node.id]
    if isinstance(node, ast.Constant):
        value = node.value
    elif isinstance(node, ast.UnaryOp | ast.BinOp) and type(node.op) in ARITHMETIC:
        operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        values = [value_of(operand, known) for operand in operands]
        if any(type(value) not in (int, float) for value in values):
            raise ConfigError(f"+ - * / // ** take numbers; {VALUES}")
        match node.op, values:
            case ast.Pow(), [int(base), int(exponent)]:
                if (abs(base).bit_length() - 1) * exponent >= MOST_INT.bit_length():  # not computed: 9**9**9
                    raise ConfigError(f"{base}**{exponent} must be below 2**63")
        value = ARITHMETIC[type(node.op)](*values)
    if not isinstance(value, (int, float, str)):
        raise ConfigError(VALUES)
    if type(value) is int and not -MOST_INT < value < MOST_INT:
        raise ConfigError("a whole number must be below 2**63")
    if type(value) is float and not isfinite(value):
        raise ConfigError("a number must be finite")
    return value


# --- all sources ---

def known_key(name: str, where: str, others: Collection[str] = ()) -> Field:
    """Looks up a key. Errors: ConfigError, with the nearest one, or of `others`, which are no keys."""
    if name not in KEYS:
        near = difflib.get_close_matches(name, [*KEYS, *others], n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]!r}?" if near else "see --help"
        raise ConfigError(f"{where}: unknown key {name!r}; {remedy}")
    return KEYS[name]


def read_file(path: str) -> Keys:
    """Reads {key: value} of a config file. Errors: ConfigError, with the line: not only known keys."""
    assigned, given = Keys(), Keys()  # as they stand there, and in the keys' own types
    for node in statements(path):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            continue  # a docstring
        where = f"{path}:{node.lineno}"
        names = [t.id for t in getattr(node, "targets", ()) if isinstance(t, ast.Name)]
        if not isinstance(node, ast.Assign) or len(names) < len(node.targets):
            raise ConfigError(f"{where}: a config file holds assignments only, as in n_layer = 12")
        try:
            value = value_of(node.value, assigned)
        except (ConfigError, ArithmeticError, RecursionError) as e:
            why = "it is nested too deep" if isinstance(e, RecursionError) else reason(e)
            raise ConfigError(f"{where}: {why}") from None
        for name in names:
            key = known_key(name, where)
            assigned[name], given[name] = value, typed(key, value, where)
            try:
                check_value(key, given[name])
            except ConfigError as e:
                raise ConfigError(f"{where}: {e}") from None
    return given


def read_keys(argv: list[str]) -> tuple[str | None, Keys]:
    """Reads (config file or None, {key: value}) of a command line."""
    path, values = None, {}
    for arg in argv:
        if not arg.startswith("-"):
            if path is not None:
                raise ConfigError(f"{arg!r}: there is a config file already, {path!r}; keys are given as "
                                  "--key=value")
            path = arg
            continue
        name, equals, value = arg[2:].partition("=")
        if not arg.startswith("--") or not equals:
            raise ConfigError(f"{arg!r} must have the form --key=value; see --help")
        values[name] = typed(known_key(name, arg), value, arg)
    return path, values


def stored_config(stored: Keys, **changes: Value) -> Config:
    """Makes the Config of a checkpoint's keys that this memo knows, with `changes`. Errors: ConfigError."""
    return Config(**{k: typed(KEYS[k], v, "") for k, v in stored.items() if k in KEYS} | changes)


def meaning(keys: Keys, name: str) -> Value:
    """Says what a key means beside the others: n_kv_head=0 and n_kv_head=4 are the same with 4 heads."""
    implied = dict(n_kv_head="kv_heads", head_dim="head_width", n_inner="inner_width")
    model = Settings(**{k: v for k, v in keys.items() if k in KEYS})
    value = getattr(model, implied.get(name, name))
    return parse_scaling(value) if name == "rope_scaling" else value


def starting_keys(given: Keys, typed_in: Collection[str], passed_over: Mapping[Path, str]) -> Keys:
    """Finds the keys that `init_from` gives, and checks `given`; `typed_in` are on the command line."""
    init_from, out_dir = given.get("init_from", ""), given.get("out_dir", KEYS["out_dir"].default)
    if init_from == "resume":
        folder, stored = newest(out_dir, passed_over)
        # out_dir's config.json is for people
        base = stored["config"] | stored["config"].get("asked", {})  # not what was chosen
        if int(folder.name) == 0:  # from memo.convert: nobody has chosen how to train
            base = {k: v for k, v in base.items() if k in MODEL_KEYS}
        fixed = {k: base.get(k, KEYS[k].default) for k in MODEL_KEYS}  # of before a key: its default
    elif init_from.startswith("hf:"):
        base = fixed = model_keys(init_from.removeprefix("hf:"))
        if given.get("block_size", 0) < base["block_size"]:  # a shorter context only crops the positions
            fixed = {k: v for k, v in fixed.items() if k != "block_size"}
    else:
        return {}
    if base.get("position") == "rope":  # no weight depends on the positions: the context may grow
        # and they may turn otherwise, but not because a config file was written for other weights
        free = {"block_size", *(name for name in POSITION_KEYS if name in typed_in)}
        fixed = {k: v for k, v in fixed.items() if k not in free}
    for name, value in fixed.items():
        if name in given and meaning({**base, **given}, name) != meaning(base, name):
            remedy = "leave it out, or start a new run in another --out_dir"
            if name in POSITION_KEYS and name not in typed_in:
                remedy = f"--{name}={given[name]} on the command line changes it, --{name}={value} keeps it"
            raise ConfigError(f"{name}={given[name]} differs from {value} of the weights that "
                              f"init_from={init_from} loads; {remedy}")
    model = Path(out_dir) / OWN if init_from == "resume" else Path(init_from.removeprefix("hf:"))
    check_reach(model, given.get("block_size", base["block_size"]), base.get("sliding_window", 0))
    return {k: v for k, v in base.items() if k in KEYS and k != "allow_other_data"}  # it is for one command


def load_keys(argv: list[str], passed_over: Mapping[Path, str] = {}) -> Keys:
    """Reads {key: value} of --key=value, else the config file, else `init_from`. warmup_iters is always
    there: a command line that gives a shorter run and no warmup cuts it to the length of the decay."""
    path, values = read_keys(argv)
    for name, value in values.items():
        check_value(KEYS[name], value)
    given = {**({} if path is None else read_file(path)), **values}
    if given.get("vocab_size") == 0:
        del given["vocab_size"]
    base = starting_keys(given, values, passed_over)
    for mode, its in (("activation", ("alpha",)), ("memory_plan", ("memory_plan_check", "solver")),
                      ("tensor_parallel", ("head_groups",)), ("tp", ("head_groups",))):
        for name in its if mode in given else ():
            base.pop(name, None)  # the value of another mode
    for name, value in base.items():
        check_value(KEYS[name], value)
    keys = {**base, **given}
    if "warmup_iters" not in (values if {"max_iters", "lr_decay_iters"} & set(values) else keys):
        length = keys.get("lr_decay_iters") or keys.get("max_iters", KEYS["max_iters"].default)
        keys["warmup_iters"] = min(keys.get("warmup_iters", KEYS["warmup_iters"].default), length)
    return keys


def load_config(argv: list[str]) -> Config:
    """Reads argv -> Config: defaults, then load_keys()."""
    return Config(**load_keys(argv))


def read_run(argv: list[str], passed_over: Mapping[Path, str] = {}) -> tuple[Config, bool]:
    """Reads what train.py is given -> (Config, whether to --force a start although memory lacks).
    `passed_over`: as in manifest.newest()."""
    return Config(**load_keys([arg for arg in argv if arg != "--force"], passed_over)), "--force" in argv


def keys_help() -> str:
    rows: list[tuple[str, str | None]] = []
    for f in KEYS.values():
        m = f.metadata
        if m["section"]:
            rows.append((m["section"], None))
        choices = f" ({' | '.join(m['choices'])})" if m["choices"] else ""
        rows.append((f"--{f.name}={f.default!s}", m["help"] + choices))
    return f"The keys, with their defaults\n\n{columns(rows)}"
