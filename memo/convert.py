"""Models of Hugging Face <-> memo checkpoints: GPT-2, Llama, Mistral, Qwen 2 and 2.5, Qwen 3 (dense).

    python -m memo.convert from-hf <hf_folder> <out_dir>    a local model -> a checkpoint, config.json
    python -m memo.convert to-hf <out_dir> <hf_folder>      a run -> a folder that transformers loads

Both ways go tensor by tensor: a few of them are in memory at once. The files of the tokenizer go along.
"""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from memo.command import Arguments, answer_early, end_with_reader, run


def read_argv(argv: list[str]) -> Namespace:
    parser = Arguments(prog="python -m memo.convert",
                       description="Models of Hugging Face <-> memo checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, source, target, text in (
            ("from-hf", "hf_folder", "out_dir",
             "a local model in safetensors -> a checkpoint to resume from"),
            ("to-hf", "out_dir", "hf_folder",
             "a checkpoint -> a folder that transformers loads")):
        sub = commands.add_parser(command, help=text, description=text)
        sub.option(source, help="from where", least=1)
        sub.option(target, help="where to", least=1)
        if command == "to-hf":
            sub.option("--dtype", default="float32", help="of the weights; a checkpoint's are float32",
                       choices=("float32", "bfloat16"))
    return parser.parse_args(argv)


if __name__ == "__main__":  # before torch is imported, which takes seconds
    end_with_reader()
    answer_early(read_argv)

import torch
from tokenizers import Tokenizer

from memo import checkpoint
from memo.config import Config, as_keys
from memo.errors import CheckpointError, ConfigError, warn
from memo.files import load_json, save_json
from memo.flat import whole
from memo.huggingface import CONFIG, hf_config, model_keys
from memo.layer import model_parameters
from memo.load_config import stored_config
from memo.rope import parse_scaling
from memo.tokens import (
    ENDS,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    carry_files,
    check_vocab_size,
    load_tokenizer,
)
from memo.weights import HfWeights, check_tied_head, export_tensors, hf_shapes, save_weights


def tokenizer_in(folder: Path, cfg: Config) -> Tokenizer | None:
    """The tokenizer beside the weights, None where there is none. Errors: ConfigError: it cannot be used, or
    has more tokens than the model."""
    if not (folder / TOKENIZER).exists():
        return None
    tokenizer = load_tokenizer(folder / TOKENIZER)
    check_vocab_size(tokenizer, folder / TOKENIZER, cfg.vocab_size)
    return tokenizer


# --- from Hugging Face ---

def check_folder(hf_folder: Path | str, cfg: Config) -> None:
    """Errors: ConfigError: what stands in `hf_folder` beside its config.json is not of the model `cfg`."""
    check_tied_head(hf_folder, cfg)
    tokenizer_in(Path(hf_folder), cfg)


def from_hf(hf_folder: Path, out_dir: Path) -> None:
    if checkpoint.latest(out_dir) or (out_dir / CONFIG).exists():
        raise ConfigError(f"out_dir={out_dir} holds a checkpoint or a {CONFIG} already; choose another "
                          "folder")
    cfg = Config(**model_keys(hf_folder), out_dir=str(out_dir))
    check_folder(hf_folder, cfg)
    weights = HfWeights(hf_folder, cfg)
    # the pieces have shapes only: a tensor is read when it is written
    saver = checkpoint.Saver(out_dir, read=lambda piece: weights.read(piece.name.removeprefix("params.")))
    saver.save([whole(f"params.{name}", torch.empty(p.shape, device="meta"))
                for name, p in model_parameters(cfg).items()], as_keys(cfg), 0)
    saver.wait()
    save_json(as_keys(cfg), out_dir / CONFIG)
    carry_files(hf_folder, out_dir)
    weights.warn_of_damage()
    print(f"{out_dir}: train with --init_from=resume, generate with memo.sample")


# --- to Hugging Face ---

def to_hf(out_dir: Path, hf_folder: Path, dtype: str = "float32") -> None:
    if any(hf_folder.glob("model*.safetensors")) or (hf_folder / CONFIG).exists():
        raise ConfigError(f"{hf_folder} holds weights or a {CONFIG} already; choose another folder")

    def export(ckpt: checkpoint.Checkpoint) -> Config:
        cfg = stored_config(ckpt.config).whole
        tokenizer = tokenizer_in(out_dir, cfg)
        shapes = hf_shapes(cfg)  # refuses what transformers has not
        stored = ckpt.shapes("params")
        if stored != {f"params.{name}": p.shape for name, p in model_parameters(cfg).items()}:
            raise CheckpointError(f"{ckpt.path} does not hold the parameters of its config; take another "
                                  "checkpoint")

        def read(name: str) -> torch.Tensor | None:
            if f"params.{name}" not in stored:
                return None
            tensor = torch.empty(stored[f"params.{name}"])
            ckpt.read([whole(f"params.{name}", tensor)])
            return tensor
        hf_folder.mkdir(parents=True, exist_ok=True)
        kind = getattr(torch, dtype)
        save_weights(hf_folder, shapes, export_tensors(cfg, read, kind), kind)
        carry_files(out_dir, hf_folder)
        save_json(hf_config(cfg, dtype, token_ids(out_dir, tokenizer)), hf_folder / CONFIG)
        if tokenizer:
            save_json(tokenizer_config(out_dir, cfg, tokenizer), hf_folder / TOKENIZER_CONFIG)
        return cfg
    cfg = checkpoint.read_newest(out_dir, export)
    scaling = parse_scaling(cfg.rope_scaling)
    if scaling.get("rope_type") == "yarn" and (
            cfg.block_size != scaling["factor"] * scaling["original_max_position_embeddings"]):
        warn(f"rope_scaling's factor={scaling['factor']} is not block_size={cfg.block_size} / "
             f"{scaling['original_max_position_embeddings']}, which some versions of transformers 4 take "
             "instead; use transformers 5")
    print(f"{hf_folder}: load it with transformers.AutoModelForCausalLM.from_pretrained")


def end_token(tokenizer: Tokenizer | None) -> str | None:
    """The token that ends a document."""
    return next((token for token in ENDS if tokenizer and tokenizer.token_to_id(token) is not None), None)


def token_ids(out_dir: Path, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Where generation begins and ends: as the model came, or the end of a document."""
    if (out_dir / GENERATION).exists():
        stored = load_json(out_dir / GENERATION, "remove it")
        return {name: stored.get(name) for name in ("bos_token_id", "eos_token_id")}
    end = end_token(tokenizer)
    found = tokenizer.token_to_id(end) if tokenizer and end else None
    return dict(bos_token_id=found, eos_token_id=found)


def tokenizer_config(out_dir: Path, cfg: Config, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What transformers.AutoTokenizer needs beside a tokenizer.json: as the model came, with the length of
    its context now."""
    if (out_dir / TOKENIZER_CONFIG).exists():
        stored = load_json(out_dir / TOKENIZER_CONFIG, "remove it")
    else:
        end = end_token(tokenizer)
        stored = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
        stored |= dict(bos_token=end, eos_token=end) if end else {}
    return stored | dict(model_max_length=cfg.block_size)


def main(argv: list[str]) -> None:
    args = read_argv(argv)
    if args.command == "from-hf":
        from_hf(Path(args.hf_folder), Path(args.out_dir))
    else:
        to_hf(Path(args.out_dir), Path(args.hf_folder), args.dtype)


if __name__ == "__main__":
    sys.exit(run(main))
