"""Published models, small: in, trained 4 steps in tp2 and in cp2, out again, beside transformers.

    python -m bench.published        writes bench/results/published.json; about ten minutes on two cores

Each has the fields of a public config.json, as its file has them; sizes alone are small. Its tokenizer comes
in one of the forms that are published. Compared are the losses of each step and the logits of what goes out
with those of transformers and torch's AdamW, each field of config.json, and each file, byte for byte.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from bench.machine import machine
from bench.published_models import MODELS
from memo.data.batch import open_dataset
from memo.data.tokens import write_dataset
from memo.run.load_config import load_config
from train import learning_rate

ROOT = Path(__file__).parents[1]
STEPS, S, TOKENS = 4, 64, 300
KEYS = dict(
    block_size=S,
    batch_size=2,
    max_iters=STEPS,
    lr_decay_iters=STEPS,
    warmup_iters=0,
    eval_interval=0,
    learning_rate=1e-3,
    device="cpu",
    memory_plan="off",
    grad_clip=1.0,
)
LAYOUTS = ["--tp=2"], ["--cp=2"]

BEGIN, END = "<|begin|>", "<|endoftext|>"


def tokenizer_files(folder: Path, number: int) -> Tokenizer:
    """Write a tokenizer in one of four forms into `folder`."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(
        ["the memory of the host and of the device"] * 9,
        trainers.BpeTrainer(
            vocab_size=TOKENS,
            special_tokens=[END, BEGIN],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    if number % 4 == 1:
        made.model.save(str(folder))
    else:
        made.save(str(folder / "tokenizer.json"))
    config = dict(
        bos_token=BEGIN, eos_token=END, tokenizer_class="PreTrainedTokenizerFast", model_max_length=10**30
    )
    if number % 4 != 0:
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    if number % 4 == 2:
        (folder / "special_tokens_map.json").write_text(json.dumps(dict(bos_token=BEGIN, eos_token=END)))
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    if number % 4 == 3:
        (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    return made


def published(folder: Path, fields: dict[str, Any], number: int) -> dict[str, bytes]:
    """Make the folder of a model with random weights -> {name: bytes} of its files beside the weights."""
    folder.mkdir()
    text = json.dumps(fields, indent=2)
    (folder / "config.json").write_text(text)
    torch.manual_seed(number)
    net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    for p in net.parameters():
        p.data += torch.randn_like(p) * 0.1
    net.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(text)
    tokenizer = tokenizer_files(folder, number)
    documents = [f"the memory of the host {i} and of the device {i * i}" * 4 for i in range(200)]
    write_dataset(folder.with_name("data"), documents, tokenizer)
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".safetensors"}


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def trained_by_transformers(folder: Path, cfg: Any) -> tuple[list[float], Any]:
    """Train by transformers and torch's AdamW -> (the loss of each step, the model)."""
    net, data = load(folder), open_dataset(cfg.dataset, S)
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):  # memo has none
            module.p = 0.0
    groups = [
        dict(params=[p for p in net.parameters() if p.dim() >= 2], weight_decay=cfg.weight_decay),
        dict(params=[p for p in net.parameters() if p.dim() < 2], weight_decay=0.0),
    ]
    optimizer, losses = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=1e-8), []
    for it in range(STEPS):
        tokens, targets = data.batch("train", it, 0, cfg.batch_size, S, cfg.seed)
        loss = torch.nn.functional.cross_entropy(net(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), cfg.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, it)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net


def command(*argv: object) -> None:
    done = subprocess.run(list(map(str, argv)), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, argv))}\n{done.stdout}{done.stderr}")


def same(path: Path, data: bytes) -> bool:
    """Whether a file came back: byte for byte, but for the length in tokenizer_config.json."""
    if path.name != "tokenizer_config.json":
        return path.read_bytes() == data
    return json.loads(path.read_text()) == json.loads(data) | dict(model_max_length=S)


def compare(name: str, fields: dict[str, Any], number: int) -> dict[str, Any]:
    """Compare one model in each layout -> what differs most."""
    row: dict[str, Any] = dict(loss=0.0, logits=0.0, fields=[], files=[])
    for keys in LAYOUTS:
        with tempfile.TemporaryDirectory() as scratch:
            there, out, back = (Path(scratch) / part for part in ("hf", "out", "back"))
            files = published(there, fields, number)
            argv = [
                f"--init_from=hf:{there}",
                f"--dataset={there.with_name('data')}",
                f"--out_dir={out}",
                *(f"--{k}={v}" for k, v in KEYS.items()),
                *keys,
            ]
            command(Path(sys.executable).with_name("torchrun"), "--nproc_per_node=2", "train.py", *argv)
            cfg = load_config(argv)
            losses, net = trained_by_transformers(there, cfg)
            mine = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
            row["loss"] = max(row["loss"], *(abs(a - b) for a, b in zip(mine, losses, strict=True)))
            command(sys.executable, "-m", "memo.convert", "to-hf", out, back)
            tokens, _ = open_dataset(cfg.dataset, S).batch("train", 99, 0, 2, S, 0)
            with torch.no_grad():
                a, b = (model.eval()(tokens).logits for model in (load(back), net))
            row["logits"] = max(row["logits"], (a - b).abs().max().item())
            got = json.loads((back / "config.json").read_text())
            wanted = (
                fields
                | dict(torch_dtype="float32")
                | {
                    field: S
                    for field in ("max_position_embeddings", "n_positions", "n_ctx")
                    if field in fields
                }
            )
            row["fields"] += [f for f in sorted({*got, *wanted}) if got.get(f) != wanted.get(f)]
            row["files"] += [
                f for f, data in files.items() if f != "config.json" and not same(back / f, data)
            ]
    print(
        f"{name:32} loss {row['loss']:.1e}  logits {row['logits']:.1e}  fields {row['fields']}  "
        f"files {row['files']}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    found = {
        name: compare(name, fields, i)
        for i, (name, fields) in enumerate(MODELS.items())
        if not sys.argv[1:] or name in sys.argv[1:]
    }
    if not sys.argv[1:]:
        worst = {key: max(row[key] for row in found.values()) for key in ("loss", "logits")}
        (ROOT / "bench/results/published.json").write_text(
            json.dumps(dict(machine=machine(), worst=worst, steps=STEPS, models=found), indent=1) + "\n"
        )
