"""Config files: assignments that are evaluated, never run.

A value is a literal, a name that the file assigned before, or arithmetic on numbers, and stays within bounds:
no file can run code, block a command or fill its memory.
"""

import ast
import operator
import warnings
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path

from memo.errors import ConfigError, reason
from memo.files import read_text

MOST_CONFIG_CHARS = 2**16  # of a config file
MOST_STRING = 2**12        # characters: the longest path
MOST_INT = 2**63           # integers are below it
ARITHMETIC: dict[type, Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg}
Value = int | float | str | bool
VALUES = "a value is a number, a string, True, False, a key assigned above, or + - * / // ** of numbers"


class Refused(ValueError):
    """A value that a config file cannot have."""


def assignments(path: str | Path) -> Iterator[tuple[int, str, Value]]:
    """Yields (line, name, value) of a config file, in order. Errors: ConfigError, with the line."""
    known: dict[str, Value] = {}
    for node in statements(path):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            continue  # a docstring
        names = [t.id for t in getattr(node, "targets", ()) if isinstance(t, ast.Name)]
        if not isinstance(node, ast.Assign) or len(names) < len(node.targets):
            raise ConfigError(f"{path}:{node.lineno}: a config file holds assignments only, as in n_layer = "
                              "12")
        try:
            value = value_of(node.value, known)
        except (Refused, ArithmeticError, RecursionError) as e:
            why = "it is nested too deep" if isinstance(e, RecursionError) else reason(e)
            raise ConfigError(f"{path}:{node.lineno}: {why}") from None
        for name in names:
            known[name] = value
            yield node.lineno, name, value


def statements(path: str | Path) -> list[ast.stmt]:
    """The syntax trees of a Python file's statements. Errors: ConfigError."""
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


def value_of(node: ast.expr, known: dict[str, Value]) -> Value:
    """The value of an expression's syntax tree. Errors: Refused, ArithmeticError, RecursionError."""
    if isinstance(node, ast.Constant):
        return check_bounds(node.value)
    if isinstance(node, ast.Name):
        if node.id not in known:
            raise Refused(f"{node.id!r} is not assigned above; {VALUES}")
        return known[node.id]
    if not isinstance(node, ast.UnaryOp | ast.BinOp) or type(node.op) not in ARITHMETIC:
        raise Refused(VALUES)
    operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    values = [value_of(operand, known) for operand in operands]
    if any(type(value) not in (int, float) for value in values):
        raise Refused(f"+ - * / // ** take numbers; {VALUES}")
    match node.op, values:
        case ast.Pow(), [int(base), int(exponent)]:
            if (abs(base).bit_length() - 1) * exponent >= MOST_INT.bit_length():  # not computed: 9**9**9
                raise Refused(f"{base}**{exponent} must be below 2**63")
    return check_bounds(ARITHMETIC[type(node.op)](*values))


def check_bounds(value: object) -> Value:
    """`value`, an int, float, str or bool within bounds. Errors: Refused."""
    if not isinstance(value, (int, float, str)):
        raise Refused(VALUES)
    if type(value) is int and not -MOST_INT < value < MOST_INT:
        raise Refused("a whole number must be below 2**63")
    if type(value) is float and not isfinite(value):
        raise Refused("a number must be finite")
    if type(value) is str and (len(value) > MOST_STRING or not value.isprintable()):
        raise Refused(f"a string must be at most {MOST_STRING} characters, all of them printable")
    return value
