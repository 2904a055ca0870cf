"""GPT-2 in Hugging Face's format <-> memo checkpoints.

    python -m memo.convert from-hf <hf_folder> <out_dir>    a local GPT-2 -> a checkpoint, config.json
    python -m memo.convert to-hf <out_dir> <hf_folder>      a run -> a folder that transformers loads

GPT-2 keeps a linear as (in, out), memo as (out, in). GPT-2 keeps q, k and v side by side in one matrix. memo
pads the rows of the embedding to a multiple of 128.
"""

import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from memo.command import Arguments, answer_early, end_with_reader, run


def read_argv(argv: list[str]) -> Namespace:
    parser = Arguments(prog="python -m memo.convert",
                       description="GPT-2 of Hugging Face <-> memo checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, source, target, text in (
            ("from-hf", "hf_folder", "out_dir",
             "a local GPT-2 in safetensors -> a checkpoint to resume from"),
            ("to-hf", "out_dir", "hf_folder",
             "a checkpoint with learned positions -> a folder that transformers loads")):
        sub = commands.add_parser(command, help=text, description=text)
        sub.option(source, help="from where", least=1)
        sub.option(target, help="where to", least=1)
    return parser.parse_args(argv)


if __name__ == "__main__":  # before torch is imported, which takes seconds
    end_with_reader()
    answer_early(read_argv)

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from memo import checkpoint
from memo.config import Config, stored_config
from memo.errors import ConfigError, reason, warn
from memo.files import load_json, plain_name, regular, save_json
from memo.flat import whole
from memo.gpt2 import CONFIG, gpt2_model_keys, gpt2_parameters, hf_config
from memo.tokens import ENDS, load_tokenizer

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"


def transposed(there: str, w: torch.Tensor) -> torch.Tensor:
    """The matrix of a linear from (in, out) to (out, in) or back, as a view; all else as it is."""
    return w.t() if there.startswith("h.") and w.dim() == 2 else w


# --- from Hugging Face ---

def open_weights(folder: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """{GPT-2's name: function that reads the tensor}, from one file or from shards."""
    single, index = (folder / WEIGHTS).exists(), (folder / INDEX).exists()
    if not single and not index:
        pickled = (folder / "pytorch_model.bin").exists()
        raise ConfigError(f"{folder} holds no {WEIGHTS}; " + (
            "pytorch_model.bin could run code, so save the model again with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)" if pickled else
            "give a local folder of a GPT-2"))
    weights: dict[str, Callable[[], torch.Tensor]] = {}
    for path in [folder / WEIGHTS] if single else shards(folder / INDEX):
        with read_errors(path):
            regular(os.stat(path))
            opened = safe_open(path, "pt")
            names = opened.keys()
            weights |= {name.removeprefix("transformer."): partial(read_tensor, path, opened, name)
                        for name in names}
    return weights


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Errors: ConfigError where a file of weights is damaged."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as e:
        raise ConfigError(f"{path} cannot be read ({reason(e)}); download the folder again") from None


def read_tensor(path: Path, opened: Any, name: str) -> torch.Tensor:
    with read_errors(path):
        return opened.get_tensor(name)


def shards(path: Path) -> list[Path]:
    """The files that an index names, all of them in its folder. Errors: ConfigError."""
    files = load_json(path, "download the folder again").get("weight_map")
    if not isinstance(files, dict) or not files or not all(map(plain_name, files.values())):
        raise ConfigError(f"{path}: weight_map must give each tensor the name of a file in its folder; "
                          "download the folder again")
    return [path.with_name(name) for name in sorted(set(files.values()))]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal elements; NaN equals NaN."""
    alike = a.dtype in FLOATS and (a.shape, a.dtype) == (b.shape, b.dtype)
    return alike and torch.equal(a.nan_to_num(), b.nan_to_num())


def hf_tensors(folder: str | Path, cfg: Config) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (memo's name, fp32 tensor) of the GPT-2 in `folder`: positions cropped to cfg.block_size, the
    embedding padded with rows of zeros. Errors: ConfigError: a weight is missing, has another shape or kind,
    or is not GPT-2's."""
    folder = Path(folder)
    weights, rows = open_weights(folder), gpt2_parameters(cfg)
    head = weights.pop("lm_head.weight", None)
    if head and "wte.weight" in weights and not same(head(), weights["wte.weight"]()):
        raise ConfigError(f"{folder}: lm_head.weight differs from wte.weight; memo's head is tied to its "
                          "embedding")
    masks = (".attn.bias", ".attn.masked_bias")  # constants of old versions of transformers
    unknown = {name for name in weights if not name.endswith(masks)} - {there for _, there, _ in rows}
    if unknown:
        raise ConfigError(f"{folder}: {min(unknown)} is not a tensor of a GPT-2 with n_layer={cfg.n_layer}; "
                          "give the folder of a plain GPT-2")
    damaged = []
    for names, there, shape in rows:
        w = weights[there]() if there in weights else None
        if names == ["wpe"] and w is not None:
            w = w[:cfg.block_size]
        if w is None or tuple(w.shape) != shape or w.dtype not in FLOATS:
            found = "missing" if w is None else f"{tuple(w.shape)} {w.dtype}"
            raise ConfigError(f"{folder}: {there} is {found}, must be {shape} in fp32, fp16 or bf16; "
                              f"see its {CONFIG}")
        w = transposed(there, w).float()
        if not w.isfinite().all():
            damaged.append(there)
        if names == ["wte"]:
            w = torch.nn.functional.pad(w, (0, 0, 0, cfg.padded_vocab_size - len(w)))
        yield from zip(names, w.chunk(len(names)), strict=True)
    if damaged:
        n = len(damaged) - 1
        more = f" and in {n} more tensor{'s' if n > 1 else ''}" if n else ""
        warn(f"{folder}: there are NaN or infinities in {damaged[0]}{more}; the model cannot train")


def from_hf(hf_folder: Path, out_dir: Path) -> None:
    if checkpoint.latest(out_dir) or (out_dir / CONFIG).exists():
        raise ConfigError(f"out_dir={out_dir} holds a checkpoint or a {CONFIG} already; choose another "
                          "folder")
    cfg = Config(**gpt2_model_keys(hf_folder), out_dir=str(out_dir))
    tokenizer_in(hf_folder)  # refused now, not when it is needed
    pieces = [whole(f"params.{name}", w) for name, w in hf_tensors(hf_folder, cfg)]
    out_dir.mkdir(parents=True, exist_ok=True)
    save_json(asdict(cfg), out_dir / CONFIG)
    copy_tokenizer(hf_folder, out_dir)
    saver = checkpoint.Saver(out_dir)
    saver.save(pieces, cfg, 0)
    saver.wait()
    print(f"{out_dir}: train with --init_from=resume, generate with memo.sample")


# --- to Hugging Face ---

def to_hf(out_dir: Path, hf_folder: Path) -> None:
    if any(hf_folder.glob("model*.safetensors")) or (hf_folder / CONFIG).exists():
        raise ConfigError(f"{hf_folder} holds a {WEIGHTS} or a {CONFIG} already; choose another folder")
    cfg, mine = checkpoint.read_newest(
        out_dir, lambda ckpt: (stored_config(ckpt.config), dict(ckpt.tensors("params"))))
    if cfg.position != "learned":
        raise ConfigError(f"position={cfg.position} must be learned for to-hf (GPT-2 has no rotary "
                          "positions); train with --position=learned")
    tokenizer = tokenizer_in(out_dir)
    tensors = {}
    for names, there, shape in gpt2_parameters(cfg):
        absent = names[0] not in mine  # bias=False
        w = torch.zeros(shape) if absent else transposed(there, torch.cat(list(map(mine.pop, names))))
        tensors[f"transformer.{there}"] = w[:shape[0]].contiguous()  # without the embedding's padding
    hf_folder.mkdir(parents=True, exist_ok=True)
    (hf_folder / CONFIG).write_text(json.dumps(hf_config(cfg), indent=1) + "\n")
    if tokenizer:
        copy_tokenizer(out_dir, hf_folder)
        save_json(tokenizer_config(cfg, tokenizer), hf_folder / "tokenizer_config.json")
    save_weights(tensors, hf_folder / WEIGHTS)
    print(f"{hf_folder}: load it with transformers.GPT2LMHeadModel.from_pretrained")


def save_weights(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes the tensors under another name first. Errors: ConfigError: they cannot be written; then no file
    is left of them."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, temporary, {"format": "pt"})
        os.replace(temporary, path)
    except (OSError, SafetensorError) as e:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written ({reason(e)}); "
                          "free some space there or choose another folder") from None


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """The tokenizer beside the weights, None where there is none. Errors: it cannot be used."""
    return load_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).exists() else None


def copy_tokenizer(source: Path, target: Path) -> None:
    if (source / TOKENIZER).exists():
        shutil.copyfile(source / TOKENIZER, target / TOKENIZER)


def tokenizer_config(cfg: Config, tokenizer: Tokenizer) -> dict:
    """What transformers.AutoTokenizer needs beside a tokenizer.json."""
    end = next((token for token in ENDS if tokenizer.token_to_id(token) is not None), None)
    return dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=cfg.block_size,
                clean_up_tokenization_spaces=False) | (dict(bos_token=end, eos_token=end) if end else {})


def main(argv: list[str]) -> None:
    args = read_argv(argv)
    if args.command == "from-hf":
        from_hf(Path(args.hf_folder), Path(args.out_dir))
    else:
        to_hf(Path(args.out_dir), Path(args.hf_folder))


if __name__ == "__main__":
    sys.exit(run(main))
