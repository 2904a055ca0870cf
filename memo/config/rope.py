"""Rotary positions beyond the length that a model was trained at: `rope_scaling`, as a config.json of Hugging
Face writes it. Without torch.

Each scaling multiplies the frequency of every pair by a number of its own; YaRN and LongRoPE the rotated
vectors by one more. LongRoPE has two lists of numbers, and block_size chooses: long_factor above the original
length. (transformers chooses by the length of each input.) Source: position interpolation (arXiv 2306.15595),
YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753), Llama 3.1 (arXiv 2407.21783, and the reference code of
its release)."""

import json
import math
from collections.abc import Mapping

from memo.config.keys import Value
from memo.errors import ConfigError

# {rope_type: {what it needs and may have: default, or None where it must be given}}
SCALINGS: dict[str, dict[str, float | None]] = {
    "linear": dict(factor=None),
    "llama3": dict(factor=None, low_freq_factor=None, high_freq_factor=None,
                   original_max_position_embeddings=None),
    "yarn": dict(factor=None, original_max_position_embeddings=None, attention_factor=0.0, beta_fast=32.0,
                 beta_slow=1.0, mscale=0.0, mscale_all_dim=0.0, truncate=True),
    "longrope": dict(factor=None, original_max_position_embeddings=None, short_factor=None, long_factor=None,
                     attention_factor=0.0),
}
FACTORS = "short_factor", "long_factor"  # lists, a number for each pair
LEAST = dict(factor=1, original_max_position_embeddings=2)
ASCENDING = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
MAY_BE_0 = ("mscale", "mscale_all_dim")  # which then count for nothing
EXAMPLE = ('as in --rope_scaling=\'{"rope_type": "yarn", "factor": 4.0, '
          '"original_max_position_embeddings": 8192}\'')


def parse_scaling(text: str) -> dict[str, Value]:
    """Reads the key rope_scaling, JSON, fills in every default; {} where it is empty. Errors: ConfigError."""
    if not text:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"rope_scaling={text!r:.100} must be a JSON object, {EXAMPLE}")
    return checked_scaling(given, "rope_scaling")


def checked_scaling(given: Mapping[str, Value], where: str) -> dict[str, Value]:
    """Fills every default into `given`; {} where it scales nothing. Errors: ConfigError."""
    given = {k: v for k, v in given.items() if v is not None}
    kind = given.pop("rope_type", None) or given.pop("type", "default")
    given.pop("type", None)  # the older name of rope_type
    if kind == "default" and not given:
        return {}
    if kind == "default":
        raise ConfigError(f"{where}: {str(min(given))!r:.100} needs a rope_type, {EXAMPLE}")
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ConfigError(f"{where}: rope_type={kind!r:.100} must be one of {', '.join(SCALINGS)}")
    known = SCALINGS[kind]
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"{where}: rope_type={kind} has no {unknown[0]!r:.100}; leave it out")
    if lacking := [name for name, default in known.items() if default is None and name not in given]:
        example = "[a number for each pair]" if lacking[0] in FACTORS else "a number"
        raise ConfigError(f"{where}: rope_type={kind} needs {lacking[0]}; add it to the object: {example}")
    for name, value in given.items():
        if name == "truncate":
            right, rule = type(value) is bool, "true or false"
        else:
            least, numbers = LEAST.get(name, 0), value if name in FACTORS else [value]
            right = isinstance(numbers, list) and all(
                type(n) in (int, float) and least <= n < 2**31 and (n or name in MAY_BE_0) for n in numbers)
            bound = f"at least {least}" if least or name in MAY_BE_0 else "above 0"
            rule = f"{'a list of numbers' if name in FACTORS else 'a number'}, {bound} and below 2**31"
        if not right:
            raise ConfigError(f"{where}: {name}={value!r:.100} must be {rule}")
    scaling = dict(rope_type=kind, **known | given)
    if kind in ASCENDING:
        low, high = ASCENDING[kind]
        if not scaling[low] < scaling[high]:
            raise ConfigError(f"{where}: {low}={scaling[low]} must be below {high}={scaling[high]}")
    return scaling


def used_factors(scaling: Mapping[str, Value], S: int) -> str:
    """Chooses between LongRoPE's lists for sequences of S tokens."""
    return FACTORS[scaling["original_max_position_embeddings"] < S]


def said_factors(scaling: Mapping[str, Value], S: int) -> list[str]:
    """Lists a line that says which list it is, where there are two."""
    if scaling.get("rope_type") != "longrope":
        return []
    return [f"longrope's {used_factors(scaling, S)}: block_size={S} beside original_max_position_embeddings="
            f"{scaling['original_max_position_embeddings']}"]


def scaled(D: int, theta: float, scaling: Mapping[str, Value], S: int) -> tuple[list[float], float]:
    """Computes ([what multiplies the frequency theta^(-2j/D) of pair j], what multiplies rotated vectors), of
    heads of which D elements rotate, for sequences of S tokens."""
    pairs = range(D // 2)
    match scaling.get("rope_type"):
        case None:
            return [1.0] * len(pairs), 1.0
        case "linear":
            return [1 / scaling["factor"]] * len(pairs), 1.0
        case "llama3":
            return [llama3_multiplier(theta ** (-2 * j / D), scaling) for j in pairs], 1.0
        case "longrope":
            return [1 / slower for slower in scaling[used_factors(scaling, S)]], attention_factor(scaling)
    return yarn_multipliers(D, theta, scaling), attention_factor(scaling)


def llama3_multiplier(frequency: float, scaling: Mapping[str, Value]) -> float:
    """Slows slow pairs by `factor`, fast ones not, those between by a part."""
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    plain = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float(plain + (1 - plain) / scaling["factor"])


def yarn_multipliers(D: int, theta: float, scaling: Mapping[str, Value]) -> list[float]:
    """Slows pairs that turn less than beta_slow times in the original length by `factor`, fast ones not."""
    def pair_of(turns: float) -> float:  # the pair, not whole, that turns so often in the original length
        return D * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (
            2 * math.log(theta))
    first, last = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, D - 1)
    width = last - first or 0.001
    slowed = [min(1.0, max(0.0, (j - first) / width)) for j in range(D // 2)]
    return [1 - part + part / scaling["factor"] for part in slowed]


def attention_factor(scaling: Mapping[str, Value]) -> float:
    """Finds what multiplies rotated queries and keys: more tokens want a sharper softmax."""
    def sharper(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0
    if scaling["attention_factor"]:
        return float(scaling["attention_factor"])
    if scaling["rope_type"] == "longrope":
        longer, original = scaling["factor"], scaling["original_max_position_embeddings"]
        return math.sqrt(1 + math.log(longer) / math.log(original))
    if scaling["mscale"] and scaling["mscale_all_dim"]:
        return sharper(scaling["mscale"]) / sharper(scaling["mscale_all_dim"])
    return sharper(1.0)
