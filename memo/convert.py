"""Models of Hugging Face <-> memo checkpoints: GPT-2, Llama, Mistral, Qwen 2, 2.5, 3 (dense), SmolLM3,
Olmo 2, Olmo 3, Gemma 3 (text), Phi-3, 3.5 and 4.

    python -m memo.convert from-hf <hf_folder> <out_dir>    a local model -> a checkpoint, config.json
    python -m memo.convert to-hf <out_dir> <hf_folder>      a run -> a folder that transformers loads

Both ways go tensor by tensor: a few are in memory at once. The files of the tokenizer go along."""

import sys
from argparse import Namespace
from pathlib import Path

from memo.system.command import Arguments, answer_early, run


def read_argv(argv: list[str]) -> Namespace:
    parser = Arguments(prog="python -m memo.convert",
                       description="Models of Hugging Face <-> memo checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, source, target, text in (
        ("from-hf", "hf_folder", "out_dir", "a local model in safetensors -> a checkpoint to resume from"),
        ("to-hf", "out_dir", "hf_folder", "a checkpoint -> a folder that transformers loads"),
    ):
        sub = commands.add_parser(command, help=text, description=text)
        sub.option(source, help="from where", least=1)
        sub.option(target, help="where to", least=1)
        if command == "to-hf":
            sub.option("--dtype", default="float32", help="of the weights; a checkpoint's are float32",
                       choices=("float32", "bfloat16"))
    return parser.parse_args(argv)


if __name__ == "__main__":  # before torch is imported, which takes seconds
    answer_early(read_argv)

import torch
from tokenizers import Tokenizer

from memo.checkpoint import checkpoint
from memo.config.config import Config, as_keys
from memo.config.layout import Layout
from memo.config.rope import parse_scaling
from memo.data.tokenizer import TOKENIZER, TOKENIZER_CONFIG
from memo.errors import CheckpointError, ConfigError, warn
from memo.huggingface import huggingface, weights
from memo.huggingface.huggingface import (
    CONFIG,
    OWN,
    check_reach,
    family_of,
    model_keys,
    own_files,
    save_own_files,
)
from memo.memory.flat import model_parameters
from memo.memory.parameters import whole
from memo.run.load_config import stored_config
from memo.system.files import JsonObject, check_folder, json_bytes, load_json, save_bytes, save_json


def from_hf(hf_folder: Path, out_dir: Path) -> None:
    check_folder(out_dir, "out_dir")
    if checkpoint.latest(out_dir) or (out_dir / CONFIG).exists():
        raise ConfigError(f"out_dir={out_dir} holds a checkpoint or a {CONFIG} already; choose another "
                          "folder")
    cfg = Config(**model_keys(hf_folder), out_dir=str(out_dir))
    check_reach(hf_folder, 1)  # the length of a run is compared when one starts
    tokenizer, layout = weights.check_folder(hf_folder, cfg), Layout.of(cfg)
    stored = weights.HfWeights(hf_folder, layout)
    save_own_files(own_files(hf_folder), out_dir, OWN)
    # the pieces have shapes only: a tensor is read when it is written
    saver = checkpoint.Saver(out_dir, read=lambda piece: stored.read(piece.name.removeprefix("params.")))
    saver.save([whole(f"params.{name}", torch.empty(p.shape, device="meta"))
                for name, p in model_parameters(layout).items()], as_keys(cfg), 0)
    saver.wait()
    if tokenizer:  # memo's commands read this one
        save_bytes(tokenizer.to_str().encode(), out_dir / TOKENIZER)
    save_json(as_keys(cfg), out_dir / CONFIG)
    print(f"{out_dir}: train with --init_from=resume, generate with memo.sample")


def to_hf(out_dir: Path, hf_folder: Path, dtype: str = "float32") -> None:
    check_folder(hf_folder, "hf_folder")
    if any(hf_folder.glob("model*.safetensors")) or (hf_folder / CONFIG).exists():
        raise ConfigError(f"{hf_folder} holds weights or a {CONFIG} already; choose another folder")

    def export(ckpt: checkpoint.Checkpoint) -> Layout:
        cfg = Layout.whole(stored_config(ckpt.config))
        tokenizer = weights.tokenizer_in(out_dir, cfg)
        stored = ckpt.shapes("params")
        if stored != {f"params.{name}": p.shape for name, p in model_parameters(cfg).items()}:
            raise CheckpointError(f"{ckpt.path} does not hold the parameters of its config; take another "
                                  "checkpoint")

        def read(name: str) -> torch.Tensor | None:
            return ckpt.tensor(f"params.{name}") if f"params.{name}" in stored else None
        end = (ckpt.config.get("tokenizer") or {}).get("end_of_document")
        files = description(out_dir, cfg, dtype, tokenizer, end)
        hf_folder.mkdir(parents=True, exist_ok=True)
        weights.save_weights(hf_folder, cfg, family_of(cfg, out_dir / OWN), read, getattr(torch, dtype))
        save_own_files(files, hf_folder)
        return cfg
    cfg = checkpoint.read_newest(out_dir, export)
    scaling = parse_scaling(cfg.rope_scaling)
    if scaling.get("rope_type") == "yarn" and (
            cfg.block_size != scaling["factor"] * scaling["original_max_position_embeddings"]):
        warn(f"rope_scaling's factor={scaling['factor']} is not block_size={cfg.block_size} / "
             f"{scaling['original_max_position_embeddings']}, which some versions of transformers 4 take "
             "instead; use transformers 5")
    print(f"{hf_folder}: load it with transformers.AutoModelForCausalLM.from_pretrained")


def description(out_dir: Path, cfg: Config, dtype: str, tokenizer: Tokenizer | None,
                end: str | None) -> dict[str, bytes]:
    """Makes {name: content} of what transformers needs beside the weights: the model's files, or new ones."""
    source, files, of_tokenizer = out_dir / OWN, own_files(out_dir / OWN), JsonObject()
    if CONFIG in files:
        config = huggingface.overlaid(source, cfg, dtype)
        if TOKENIZER_CONFIG in files and cfg.block_size != model_keys(source)["block_size"]:
            of_tokenizer = load_json(source / TOKENIZER_CONFIG, "remove it")
            of_tokenizer |= dict(model_max_length=cfg.block_size)
    else:
        ids: dict[str, int | None] = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
        if tokenizer:
            files[TOKENIZER] = (out_dir / TOKENIZER).read_bytes()
            of_tokenizer = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False,
                                model_max_length=cfg.block_size)
            tokens = dict(bos_token=begin_of_text(tokenizer), eos_token=end)
            of_tokenizer |= {name: token for name, token in tokens.items() if token}
            ids |= {f"{name}_id": tokenizer.token_to_id(token) for name, token in tokens.items() if token}
        config = huggingface.hf_config(cfg, dtype, ids)
    if of_tokenizer:
        files[TOKENIZER_CONFIG] = json_bytes(of_tokenizer)
    files.pop(CONFIG, None)
    return files | {CONFIG: json_bytes(config)}  # written last: a folder without it is no model


def begin_of_text(tokenizer: Tokenizer) -> str | None:
    """Finds the token that the tokenizer's own template puts before each text, or None."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    begins = whole[:1] != plain[:1] and whole[1:1 + len(plain)] == plain
    return tokenizer.id_to_token(whole[0]) if begins else None


def main(argv: list[str]) -> None:
    args = read_argv(argv)
    if args.command == "from-hf":
        from_hf(Path(args.hf_folder), Path(args.out_dir))
    else:
        to_hf(Path(args.out_dir), Path(args.hf_folder), args.dtype)


if __name__ == "__main__":
    sys.exit(run(main))
