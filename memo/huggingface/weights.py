"""Weights in safetensors, as Hugging Face keeps them, from and to memo's parameters, a few at once. Hugging
Face's Llama rotates elements j and j + R/2 of a head, memo its neighbours 2j and 2j + 1: see alike(). Both
leave elements from R on as they are (partial_rotary_factor); else R is D, the head."""

import errno
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from memo.config.config import Config
from memo.config.layout import Layout
from memo.data.tokenizer import OtherForm, check_vocab_size, find_tokenizer
from memo.errors import ConfigError, DataError, elsewhere, reason
from memo.huggingface.families import FAMILIES, GPT2
from memo.huggingface.huggingface import CONFIG, family_of
from memo.huggingface.layers import GIVE_FOLDER
from memo.memory.flat import model_parameters
from memo.system.files import MOST_JSON_CHARS, load_json, open_file, plain_name, reading, replacing, save_json

HEAD = "lm_head.weight"  # the one tensor whose name has no prefix
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
AGAIN = "download the folder again"
DAMAGED = OSError, RuntimeError, MemoryError, SafetensorError  # what reading a file may raise
SHARD_BYTES = 5 * 10**9
COMPARED_ROWS = 2**12  # at once
ROTATED = ("q", "k", "q_norm", "k_norm")  # Llama's parameters whose rows are pairs that rotate
# of a Gemma 3 that sees pictures, as old and new versions of transformers name its parts
OF_TEXT = re.compile(r"^(language_model\.model|model\.language_model)\.")
OF_PICTURES = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # of old versions of transformers


@dataclass(frozen=True)
class Weight:
    """Places memo's parameter `name` in transformers' tensor `there` of `shape`."""

    name: str
    there: str
    shape: tuple[int, ...]
    first: int = 0  # row, or if transposed column
    transposed: bool = False  # to (in, out)
    D: int = 1  # elements of its heads, where these rotate
    R: int = 0  # of which the first so many do
    more: float = 0.0  # what memo's elements are more


def weights_of(cfg: Config, kind: str) -> list[Weight]:
    """Lists the Weights of all stages in a model of `kind`. Parameters whose tensor has the same name are its
    rows one behind the other. GPT-2 has all biases, and linears (in, out)."""
    family, C, weights, rows = FAMILIES[kind], cfg.n_embd, list[Weight](), Counter[str]()
    for name, p in model_parameters(Layout.whole(cfg, bias=family is GPT2)).items():
        layer, _, last = name.rpartition(".")
        base = last.removesuffix("_w").removesuffix("_b")
        within = layer.replace("h.", f"{family.layers}.") + "." if layer else ""
        place = f"{within}{family.names[base]}.{'bias' if last.endswith('_b') else 'weight'}"
        shape = (cfg.vocab_size, C) if base in ("wte", "head") else p.shape  # without memo's padding
        D, R = (cfg.head_width, cfg.rotary_width) if base in ROTATED and family is not GPT2 else (1, 0)
        transposed = family is GPT2 and layer > "" and len(shape) == 2
        more = family.gain * (p.init == "ones")
        weights.append(Weight(name, place, shape, rows[place], transposed, D, R, more))
        rows[place] += shape[0]
    full = [(w, (rows[w.there], *w.shape[1:])) for w in weights]
    return [replace(w, shape=shape[::-1] if w.transposed else shape) for w, shape in full]


def alike(w: Weight, own: torch.Tensor, stored: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views rows, of whole heads, of memo's and of transformers' parameter in pairs whose elements
    correspond."""
    if not w.R:
        return [(own, stored.t() if w.transposed else stored)]
    own, stored = (t.unflatten(0, (-1, w.D)) for t in (own, stored))
    turned = own[:, :w.R].unflatten(1, (-1, 2)), stored[:, :w.R].unflatten(1, (2, -1)).transpose(1, 2)
    return [turned, (own[:, w.R:], stored[:, w.R:])]


@dataclass(frozen=True)
class Stored:
    """Reads a tensor in a file of safetensors part by part."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    file: safe_open  # its header is parsed once

    def __str__(self) -> str:
        return f"{self.name:.200} in {self.path.name}"

    def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor:
        with reading(self.path, AGAIN, DAMAGED):
            return self.file.get_slice(self.name)[part]


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Finds the files of weights -> {path: the tensors that an index takes from it, None: all}."""
    if (folder / WEIGHTS).exists():
        return {folder / WEIGHTS: None}
    if (folder / INDEX).exists():
        files = load_json(folder / INDEX, AGAIN).get("weight_map")
        if not isinstance(files, dict) or not files or not all(map(plain_name, files.values())):
            raise ConfigError(f"{folder / INDEX}: weight_map must give each tensor the name of a file in its "
                              f"folder; {AGAIN}")
        return {folder / path: {name for name, file in files.items() if file == path}
                for path in sorted({*files.values()})}
    pickled = any(folder.glob("pytorch_model*.bin"))
    raise ConfigError(f"{folder} holds no {WEIGHTS}; " + (
        "pytorch_model.bin could run code, so save the model again with transformers: "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)" if pickled else GIVE_FOLDER))


def tensors_in(path: Path) -> list[Stored]:
    """Lists the tensors of a file of safetensors; only its header is read. Errors: ConfigError."""
    with reading(path, AGAIN, DAMAGED):
        with open(open_file(path), "rb") as begin:
            if (n := int.from_bytes(begin.read(8), "little")) > MOST_JSON_CHARS:
                raise OSError(errno.EFBIG, f"its header of {n:,} bytes must have at most {MOST_JSON_CHARS:,}")
        file = safe_open(path, "pt")
        parts = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118  it is no dict
        return [Stored(path, name, tuple(p.get_shape()), str(p.get_dtype()), file) for name, p in parts]


def stored_weights(folder: Path | str, cfg: Config) -> dict[str, Stored]:
    """Finds {transformers' name without its prefix: Stored}, from headers alone. Errors: ConfigError."""
    folder, kind = Path(folder), family_of(cfg, Path(folder))
    stored: dict[str, Stored] = {}
    for path, indexed in weight_files(folder).items():
        for tensor in tensors_in(path):
            indexed = indexed and indexed - {tensor.name}
            name = OF_TEXT.sub("model.", tensor.name) if kind == "gemma3_text" else tensor.name
            if kind == "gemma3_text" and OF_PICTURES.match(name):
                continue
            name = name.removeprefix(FAMILIES[kind].prefix)
            if name in stored:
                raise ConfigError(f"{folder}: {name:.200} must be there once, not as {stored[name]} "
                                  f"and as {tensor}; {AGAIN}")
            stored[name] = tensor
        if indexed:
            raise ConfigError(f"{path} has no tensor {min(indexed):.200}, which {INDEX} finds there; {AGAIN}")
    wanted = {w.there: w for w in weights_of(cfg, kind)}
    wte = next(iter(wanted))
    if cfg.tie_embeddings and wte not in stored and HEAD in stored:  # one matrix, stored under its other name
        stored[wte] = stored.pop(HEAD)
    for name in sorted(stored):
        if name not in wanted and not name.endswith(CONSTANTS) and (name, cfg.tie_embeddings) != (HEAD, True):
            raise ConfigError(f"{folder}: {name:.200} is not a tensor of a {kind} model with "
                              f"n_layer={cfg.n_layer} as in its {CONFIG}; {GIVE_FOLDER}")
    for name, w in wanted.items():
        s: Stored | None = stored.get(name)
        if s and w.name == "wpe" and s.shape[0] > w.shape[0]:  # a shorter context crops the positions
            s = replace(s, shape=(w.shape[0], *s.shape[1:]))
        if s is None or s.dtype not in FLOATS or s.shape != w.shape:
            what = "missing" if s is None else f"{s.shape} {s.dtype}"
            raise ConfigError(f"{folder}: {name} is {what}, must be {w.shape} in {', '.join(FLOATS)}; see "
                              f"its {CONFIG}")
    return stored


class HfWeights:
    """Reads the weights of the model in `folder`, by memo's names, fp32: the part of a rank of `ranks`."""

    def __init__(self, folder: Path | str, cfg: Layout, rank: int = 0, ranks: int = 1):
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.found, self.parameters = stored_weights(folder, cfg), model_parameters(cfg)
        self.weights = {w.name: w for w in weights_of(cfg, family_of(cfg, Path(folder)))}

    def read(self, name: str) -> torch.Tensor:
        """Reads memo's parameter `name`, zeros for rows that memo adds. Errors: DataError: not finite."""
        w, p = self.weights[name], self.parameters[name]
        stored, shape = self.found[w.there], p.local_shape(self.ranks)
        number = self.rank // p.copies(self.ranks)
        begins = [n * number if dim == p.split_dim else 0 for dim, n in enumerate(shape)]
        before = begins[0] % w.D  # rows of its first head that another rank has, as METP shares them out
        heads = torch.zeros(-(-(before + shape[0]) // w.D) * w.D, *shape[1:])
        part = heads[before:before + shape[0]]
        begins[0] += w.first - before
        n = max(0, min(len(heads), stored.shape[-1 if w.transposed else 0] - begins[0]))  # rows there are
        if n:
            at = [slice(b, b + size) for b, size in zip(begins, (n, *shape[1:]), strict=True)]
            for own, theirs in alike(w, heads[:n], stored[tuple(at[::-1] if w.transposed else at)]):
                own.copy_(theirs)
            if w.more:
                part += w.more
        if not all(map(torch.isfinite, torch.aminmax(part))):
            raise DataError(f"{self.folder}: there are NaN or infinities in {w.there}, a model with them "
                            f"cannot train; {AGAIN}")
        return part

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.read(name)) for name in self.parameters)


def export_tensor(ws: list[Weight], read: Callable[[str], torch.Tensor | None],
                  dtype: torch.dtype) -> torch.Tensor:
    """Makes transformers' tensor of these Weights. read(memo's name): fp32, or None."""
    tensor = torch.zeros(ws[0].shape, dtype=dtype)
    for w in ws:
        if (own := read(w.name)) is not None:
            n = min(len(own), w.shape[-1 if w.transposed else 0])  # without memo's padding
            part = tensor[:, w.first:w.first + n] if w.transposed else tensor[w.first:w.first + n]
            for mine, theirs in alike(w, own[:n], part):
                theirs.copy_(mine - w.more if w.more else mine)
    return tensor


def file_names(sizes: dict[str, int], most_bytes: int) -> dict[str, list[str]]:
    """Shares tensors out -> {file: names}, in order. A file has at most `most_bytes`, or a single tensor."""
    files: list[list[str]] = [[]]
    room = most_bytes
    for name, size in sizes.items():
        if size > room and files[-1]:
            files.append([])
            room = most_bytes
        files[-1].append(name)
        room -= size
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}


def save_weights(folder: Path, cfg: Config, kind: str, read: Callable[[str], torch.Tensor | None],
                 dtype: torch.dtype) -> None:
    """Writes all tensors in turn, with an index for several files. If that fails, no file is left."""
    prefix = FAMILIES[kind].prefix
    parts = {name if name == HEAD else prefix + name: [*ws]
             for name, ws in groupby(weights_of(cfg, kind), key=lambda w: w.there)}
    sizes = {name: prod(ws[0].shape) * dtype.itemsize for name, ws in parts.items()}
    files = file_names(sizes, SHARD_BYTES)
    try:
        with ExitStack() as stack:  # each takes its name once all are written
            for path, names in files.items():
                file = stack.enter_context(replacing(folder / path))
                write_header(file, {name: (parts[name][0].shape, sizes[name]) for name in names}, dtype)
                for name in names:
                    file.write(export_tensor(parts[name], read, dtype).view(torch.uint8).numpy().data)
        if len(files) > 1:
            place = {name: path for path, names in files.items() for name in names}
            save_json(dict(metadata=dict(total_size=sum(sizes.values())), weight_map=place), folder / INDEX)
    except BaseException as e:
        for path in files:
            (folder / path).unlink(missing_ok=True)
        if not isinstance(e, OSError):
            raise
        raise ConfigError(f"{folder / next(iter(files))} cannot be written ({reason(e)}); "
                          f"{elsewhere(e, 'folder')}") from None


def write_header(file: BinaryIO, tensors: dict[str, tuple[tuple[int, ...], int]], dtype: torch.dtype) -> None:
    """Writes what a file of safetensors begins with; tensors {name: (shape, bytes)} then follow one by one:
    the library's own function wants all of them at once."""
    kind = next(name for name, known in FLOATS.items() if known == dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places = pairwise(accumulate((nbytes for _, nbytes in tensors.values()), initial=0))
    for (name, (shape, _)), place in zip(tensors.items(), places, strict=True):
        header[name] = dict(dtype=kind, shape=shape, data_offsets=place)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    file.write(len(text).to_bytes(8, "little") + text)


def tokenizer_in(folder: Path, cfg: Config) -> Tokenizer | None:
    """Reads the tokenizer beside the weights; None: none that memo reads. Errors: ConfigError: unusable."""
    with suppress(OtherForm):
        if tokenizer := find_tokenizer(folder):
            check_vocab_size(tokenizer, folder, cfg.vocab_size)
        return tokenizer
    return None


def check_folder(hf_folder: Path | str, cfg: Config) -> Tokenizer | None:
    """Checks the files beside config.json in `hf_folder` -> its tokenizer or None. Errors: ConfigError: also
    where a tied head is there too, with other elements than the embedding."""
    stored = stored_weights(hf_folder, cfg)
    if cfg.tie_embeddings and HEAD in stored:
        head, wte = stored[HEAD], stored[weights_of(cfg, family_of(cfg, Path(hf_folder)))[0].there]
        if (head.shape, head.dtype) != (wte.shape, wte.dtype) or not all(
                torch.equal(*(s[k:k + COMPARED_ROWS].contiguous().view(torch.uint8) for s in (head, wte)))
                for k in range(0, head.shape[0], COMPARED_ROWS)):
            raise ConfigError(f"{hf_folder}: {HEAD} differs from {wte.name}, but tie_word_embeddings in its "
                              f"{CONFIG} says that they are one; set it to false")
    return tokenizer_in(Path(hf_folder), cfg)
