"""Kinds of layers in a config.json: which of them slide, which rotate positions in. Without torch."""

from collections.abc import Mapping, Sequence
from itertools import cycle, groupby, islice
from pathlib import Path

from memo.config.settings import MOST_LAYERS, Settings, slides
from memo.errors import ConfigError
from memo.system.files import Json, JsonObject

GIVE_FOLDER, GIVE_OTHER = "give a local folder of a model in safetensors", "give the folder of another model"
FULL, SLIDING = "full_attention", "sliding_attention"
FIELDS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
NOPE = "-nope"
ALIKE = ("mistral", "phi3")  # families where all layers slide that have a sliding_window
SWITCHED = ("qwen2", "qwen3", "smollm3")  # where use_sliding_window says whether any layer slides
BY_LAYER = (*SWITCHED, "gemma3_text", "olmo3")  # where layer_types say which


def wrong(path: Path, name: str, value: Json, rule: str, remedy: str = GIVE_FOLDER) -> ConfigError:
    """Makes the error of a field that breaks a rule."""
    return ConfigError(f"{path}: {name}={value!r:.100} must be {rule}; {remedy}")


def window_of(path: Path, hf: Mapping[str, Json], default: Json) -> int:
    """Finds the tokens that a layer sees which slides; 0: none slides. Errors: ConfigError."""
    kind, window = hf["model_type"], hf.get("sliding_window", default)
    off = kind in SWITCHED and hf.get("use_sliding_window") in (None, False)
    if window is None or kind == "gpt2" or off:
        return 0
    if type(window) is not int or window < 1:
        raise wrong(path, "sliding_window", window, "null, or at least 1")
    return window


def without_positions(path: Path, hf: Mapping[str, Json], L: int) -> list[bool]:
    """Says of each layer whether it rotates no positions in. Errors: ConfigError."""
    if hf["model_type"] != "smollm3":
        return [False] * L
    if (given := hf.get("no_rope_layers")) is None:
        every = hf.get("no_rope_layer_interval", 4)
        if type(every) is not int or every < 1:
            raise wrong(path, "no_rope_layer_interval", every, "a whole number, at least 1")
        return [(k + 1) % every == 0 for k in range(L)]
    if not isinstance(given, list) or len(given) != L or any(n not in (0, 1) for n in given):
        raise wrong(path, "no_rope_layers", given, f"a list of 0 or 1 for each of {L} layers")
    return [not n for n in given]


def kinds_of(path: Path, hf: Mapping[str, Json], L: int, window: int, pattern: int) -> list[str]:
    """Lists the kinds of L layers, as layer_types of memo has them. `window`: window_of(); `pattern`: of so
    many layers the last one is full, where layer_types do not say. Errors: ConfigError."""
    kind, types, nope = hf["model_type"], hf.get("layer_types"), without_positions(path, hf, L)
    if types is not None:
        if not isinstance(types, list) or len(types) != L or {*map(str, types)} - {FULL, SLIDING}:
            raise wrong(path, "layer_types", types, f"{FULL} or {SLIDING} for each of {L} layers", GIVE_OTHER)
        if kind not in BY_LAYER and window and FULL in types:
            raise wrong(path, "layer_types", types, f"absent: sliding_window={window} is that of every layer",
                        GIVE_OTHER)
        sliding = [name == SLIDING for name in types]
    elif pattern:
        sliding = [(k + 1) % pattern != 0 for k in range(L)]
    elif kind.startswith("qwen"):
        first = hf.get("max_window_layers", 28)
        if window and (type(first) is not int or first < 0):
            raise wrong(path, "max_window_layers", first, "a whole number, at least 0")
        sliding = [bool(window) and k >= first for k in range(L)]
    else:
        sliding = nope if kind == "smollm3" else [kind in ALIKE] * L
    return [("sliding" if of and window else "full") + NOPE * without
            for of, without in zip(sliding, nope, strict=True)]


def in_short(names: Sequence[str]) -> str:
    """Writes kinds of layers as the key layer_types has them: the shortest stretch that comes over and over,
    each kind with how often it follows itself."""
    length = next(n for n in range(1, len(names) + 1)
                  if [*islice(cycle(names[:n]), len(names))] == [*names])
    counts = [(name, len([*same])) for name, same in groupby(names[:length])]
    return ",".join(f"{name}*{n}" if n > 1 else name for name, n in counts)


def kind_keys(path: Path, hf: Mapping[str, Json], L: int, default: Json, pattern: int) -> JsonObject:
    """Finds sliding_window and layer_types of memo. `default`: a sliding_window that is not given."""
    if L > MOST_LAYERS:
        raise wrong(path, "the number of layers", L, f"at most {MOST_LAYERS}", GIVE_OTHER)
    window = window_of(path, hf, default)
    names = kinds_of(path, hf, L, window, pattern)
    if not any(map(slides, names)):
        window = 0
    alike = {*names} <= {"sliding"} or {*names} <= {"full"}  # as memo has them where nothing is said
    return dict(sliding_window=window, layer_types="" if alike else in_short(names))


def check_kinds(cfg: Settings, kind: str, like: str) -> None:
    """Raises ConfigError where family `kind`, which is `like` one of transformers, has not cfg's layers."""
    types = [*dict.fromkeys(cfg.types)]
    if any(name.endswith(NOPE) for name in types) and kind != "smollm3":
        raise ConfigError(f"layer_types={cfg.layer_types:.100} must rotate positions in everywhere for to-hf "
                          f"({like} of transformers has nothing else); leave {NOPE} out")
    if kind not in BY_LAYER and (len(types) > 1 or (kind not in ALIKE and types != ["full"])):
        rule = "that of every layer" if kind in ALIKE else "0"
        raise ConfigError(f"sliding_window={cfg.sliding_window} must be {rule} for to-hf ({like} of "
                          "transformers has nothing else); train without layer_types" + (
                              "" if kind in ALIKE else " and sliding_window"))


def kind_fields(cfg: Settings, kind: str) -> JsonObject:
    """Makes the fields of a config.json of family `kind` that say what kinds of layers there are."""
    W, names = cfg.sliding_window, cfg.types
    types = [SLIDING if slides(name) else FULL for name in names]
    if kind in ALIKE:
        return dict(sliding_window=W or None)
    if kind not in BY_LAYER:
        return {}
    fields: JsonObject = dict(layer_types=types, sliding_window=W or None)
    if kind in SWITCHED:
        fields["use_sliding_window"] = bool(W)
        if not W and kind != "smollm3":
            return dict(use_sliding_window=False)
    if kind.startswith("qwen"):
        fields["max_window_layers"] = types.index(SLIDING)
    if kind == "smollm3":
        fields["no_rope_layers"] = [int(not name.endswith(NOPE)) for name in names]
    return fields
