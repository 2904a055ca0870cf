"""Generate text from a checkpoint: python -m memo.sample out_dir --prompt="def main(" [--max_new_tokens=200] ..."""

import argparse
import sys
from pathlib import Path

import torch

from memo import checkpoint
from memo.attention import BACKENDS
from memo.command import end_with_reader
from memo.config import stored_config
from memo.device import pick_device
from memo.errors import ConfigError
from memo.tokens import load_tokenizer
from memo.tp import row_linear_forward
from model import EVERY_ROW, GPT


def forward_rows(model, tokens, rows):
    """Runs the tokens at positions `rows` of the one reserved sequence; returns the last one's logits (V,) in fp32.

    The skeletal q, k, v of the layers are the cache: earlier rows are read from them. Either `rows` starts at 0, or
    it is a single row, for which the plain mathematics serves (not every kernel takes one query).
    """
    swap, tensors = model.swap, dict.fromkeys(EVERY_ROW, rows)
    model.embed(tokens, model.positions[rows], out=swap.x[0][rows])
    for block, s, out in zip(model.blocks, swap.layers, swap.x[1:], strict=True):
        block.before_attention(s, model.turn, tensors)
        q, k, v = (t.view(1, len(t), model.cfg.n_head, -1) for t in (s.q[rows], s.k[:rows.stop], s.v[:rows.stop]))
        attention = block.attention if len(tokens) > 1 else BACKENDS["math"]
        s.attn_out[rows].view(q.shape).copy_(attention.forward(q, k, v, rows.start == 0, block.scale)[0])
        block.after_attention(s, tensors)
        row_linear_forward(block.tp, s.mid[rows], s.gelu_out[rows], block.w.fc2_w, block.w.fc2_b, out=out[rows])
    return model.logits(swap.x[-1][rows][-1:])[3][0, :model.cfg.vocab_size].float()


def generate(model, prompt, max_new_tokens, temperature=1.0, top_k=None, seed=0):
    """Yields up to `max_new_tokens` token ids behind the ids `prompt`. temperature=0 takes the likeliest."""
    length = len(prompt) + max_new_tokens
    if not temperature >= 0 or (top_k or 0) < 0:
        raise ConfigError(f"temperature={temperature} and top_k={top_k} must be at least 0; 0 takes the likeliest, or all")
    if not prompt or max_new_tokens < 1 or length > model.cfg.block_size:
        raise ConfigError(f"prompt of {len(prompt)} tokens + max_new_tokens={max_new_tokens} must be at least 1 each and at "
                          f"most block_size={model.cfg.block_size} together; change one of them")
    model.reserve(1, length)
    generator = torch.Generator(model.device).manual_seed(seed)
    tokens, start = prompt, 0
    for end in range(len(prompt), length):
        logits = forward_rows(model, torch.tensor(tokens, device=model.device), slice(start, end))
        if temperature == 0:
            token = logits.argmax().item()
        else:
            if top_k:
                logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
            token = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator).item()
        yield token
        tokens, start = [token], end


def load_model(out_dir, device="auto", dtype="auto"):
    """The model of a checkpoint, for evaluation only."""
    def read(ckpt):
        cfg = stored_config(ckpt.config, device=device, dtype=dtype, attention="auto")
        model = GPT(cfg, *pick_device(cfg), grads=False)
        checkpoint.restore(ckpt, model)
        return model
    return checkpoint.read_newest(out_dir, read)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m memo.sample", description="Generate text from a checkpoint.")
    parser.add_argument("out_dir", help="the folder a run wrote its checkpoint to")
    parser.add_argument("--prompt", required=True, help="text, or @file")
    parser.add_argument("--max_new_tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time")
    parser.add_argument("--top_k", type=int, default=200, help="draw among the k likeliest; 0 among all")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    args = parser.parse_args(argv)
    path = Path(args.out_dir) / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"out_dir={args.out_dir} holds no tokenizer.json; give the out_dir of a run, or copy one there")
    tokenizer = load_tokenizer(path)
    prompt = Path(args.prompt[1:]).read_text(errors="replace") if args.prompt.startswith("@") else args.prompt
    model = load_model(args.out_dir, args.device, args.dtype)
    ids = tokenizer.encode(prompt).ids
    shown = ""
    for token in generate(model, ids, args.max_new_tokens, args.temperature, args.top_k, args.seed):
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may take several tokens
            print(text[len(shown):], end="", flush=True)
            shown = text
    print()


if __name__ == "__main__":
    end_with_reader()
    try:
        main()
    except (ConfigError, OSError) as e:
        sys.exit(f"error: {e}")
