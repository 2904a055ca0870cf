"""The loss of conversations beside TRL's: one step of its SFTTrainer (assistant_only_loss), on padded rows,
and of train.py, on the same rows packed; the same weights, in fp32. Writes bench/results/trl_loss.json.

    pip install trl
    python -m bench.trl_loss
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from bench.machine import machine
from memo.data.batch import open_dataset
from memo.data.tokens import train_tokenizer

ROOT, RESULTS = Path(__file__).parents[1], Path(__file__).parent / "results"
TEXTS = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
ROWS, S = 19, 1024  # the last row is validation's
LAYOUTS = {"one process": [], "cp2": ["--cp=2"], "tp2, METP": ["--tp=2", "--tensor_parallel=metp"],
           "cp2, 4 subsequences": ["--cp=2", "--subsequences=4"]}


def conversations():
    """Turns of one to seven stretches of the pages, the assistant's every other one."""
    text, at = " ".join(TEXTS), 0
    for row in range(ROWS):
        turns = []
        for turn in range(2 + row % 6):
            n = 20 + 37 * (row * 7 + turn * 3) % 400
            turns.append(dict(role=("user", "assistant")[turn % 2], content=text[at:at + n]))
            at += n
        yield turns


def make_model(folder):
    tokenizer = train_tokenizer(TEXTS, 600)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (ROOT / "tests/chat_templates/chatml.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template,
        tokenizer_class="PreTrainedTokenizerFast")))
    torch.manual_seed(1)
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=Tokenizer.from_file(
                             str(folder / "tokenizer.json")).get_vocab_size(), max_position_embeddings=S)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def of_trl(folder, rows, out):
    """The loss of a step over all rows, in three batches whose gradients add up."""
    settings = trl.SFTConfig(
        output_dir=str(out), assistant_only_loss=True, per_device_train_batch_size=len(rows) // 3, bf16=False,
        gradient_accumulation_steps=3, max_steps=1, learning_rate=1e-9, max_length=S, report_to=[],
        use_cpu=True, gradient_checkpointing=False, save_strategy="no")
    trainer = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), settings,
        train_dataset=Dataset.from_list([dict(messages=row) for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(folder))
    return trainer.train().training_loss


def of_memo(folder, dataset, out, options):
    """The same of train.py, whose step is an epoch; and the tokens that are learned."""
    n = len(open_dataset(str(dataset), S, ("train",), packs="best_fit").packings["train"])
    ranks = 2 if options else 1
    start = [sys.executable] if ranks == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    subprocess.run([*start, "train.py", f"--init_from=hf:{folder}", f"--dataset={dataset}",
                    "--documents=true", f"--block_size={S}", f"--gradient_accumulation_steps={n}",
                    "--max_iters=1", "--eval_interval=0", "--save_interval=0", "--device=cpu",
                    "--dtype=float32", f"--out_dir={out}", *options],
                   cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    [step] = [json.loads(line) for line in lines if '"loss"' in line]
    return step["loss"], step["target_tokens"]


def main():
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        make_model(folder := scratch / "model")
        rows = [*conversations()]
        source, dataset = scratch / "rows.jsonl", scratch / "dataset"
        source.write_text("".join(json.dumps(dict(messages=row)) + "\n" for row in rows))
        subprocess.run([sys.executable, "data/chat/prepare.py", f"--source={source}",
                        f"--tokenizer=hf:{folder}", f"--out_dir={dataset}"], cwd=ROOT, check=True)
        theirs = of_trl(folder, rows[:-1], scratch / "trl")
        found = {name: of_memo(folder, dataset, scratch / f"run{i}", options)
                 for i, (name, options) in enumerate(LAYOUTS.items())}
    result = dict(machine=machine(), trl=trl.__version__, rows=len(rows) - 1, trl_loss=theirs,
                  memo_loss={name: loss for name, (loss, _) in found.items()},
                  target_tokens={name: tokens for name, (_, tokens) in found.items()},
                  worst=max(abs(loss / theirs - 1) for loss, _ in found.values()))
    (RESULTS / "trl_loss.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
