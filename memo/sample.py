"""Generates text from a checkpoint: python -m memo.sample out_dir --prompt="def main(" [--top_k=200] ..."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path

from memo.system.command import Arguments, answer_early, run


def read_argv(argv: list[str]) -> Namespace:
    parser = Arguments(prog="python -m memo.sample", description="Generate text from a checkpoint.")
    parser.option("out_dir", help="the folder a run wrote its checkpoint to", least=1)
    parser.add_argument("--prompt", required=True, help="text, or @file")
    parser.option("--max_new_tokens", int, 200, "with the prompt at most the model's block_size", least=1,
                  most=2**31, why="rows are counted in 32 bits")
    parser.option("--temperature", float, 0.8, "0 takes the likeliest token each time", least=0.0, most=1e6,
                  why="all tokens are equally likely by then")
    parser.option("--top_k", int, 200, "draw among the k likeliest; 0 among all", least=0, most=2**32,
                  why="no vocabulary is larger")
    parser.option("--parse_special", bool, help="special tokens in the prompt are special, or ordinary text; "
                  "by default as in the run's dataset")
    parser.option("--seed", int, 1337, "of what is drawn", least=0, below=2**63, why="seeds have 63 bits")
    parser.keys("device", "dtype")
    return parser.parse_args(argv)


if __name__ == "__main__":  # before torch is imported, which takes seconds
    answer_early(read_argv)

import torch
from tokenizers import Tokenizer

from memo.checkpoint import checkpoint
from memo.data.tokenizer import check_vocab_size, encode_text, load_tokenizer, said_in
from memo.data.tokens import PIECE_CHARS, encode
from memo.errors import ConfigError
from memo.huggingface.huggingface import OWN, check_reach
from memo.run.load_config import stored_config
from memo.states.passes import Model, with_place
from memo.system.device import pick_device
from memo.system.files import read_text, reading
from model import GPT, Block


def open_cache(model: Model, tokens: int) -> torch.Tensor:
    """Takes memory for the keys and values of one sequence: (L, 2, 1, tokens, Hkv, D)."""
    cfg = model.cfg
    return torch.empty(cfg.n_layer, 2, 1, tokens, cfg.kv_heads, cfg.head_width, dtype=model.dtype,
                       device=model.device)


def prefill(model: Model, cache: torch.Tensor, prompt: list[int]) -> torch.Tensor:
    """Computes the logits (V,), fp32, of the token behind a prompt of several tokens; fills the cache."""
    model.reserve_forward(1, len(prompt))
    ends = [0, *accumulate(model.lengths)]
    for (layer, i), s in model.swap.units.items():
        k, v = cache[layer]
        s.pieces = [(k[:, first:end], v[:, first:end]) for first, end in pairwise(ends[:i + 2])]
    tokens = torch.tensor([prompt], device=model.device)
    return model.hidden(tokens, lambda i, x: last_logits(model, x))[-1]


def decode(model: Model, cache: torch.Tensor, token: int, position: int) -> torch.Tensor:
    """Computes the logits (V,), fp32, behind one token more. The cache has all positions before."""
    swap, positions = model.swap, torch.tensor([position], device=model.device)
    kinds, end = model.cfg.kinds, position + 1
    turns = {kind.rope: model.gpt.rotations_of(positions, kind.rope) for kind in kinds}
    model.bring(0)
    model.gpt.edges.embed(torch.tensor([token], device=model.device), positions, out=swap.x[0])
    layers = zip(model.gpt.blocks, swap.layers, cache, swap.x[1:], strict=True)
    for i, (block, s, (k, v), y) in enumerate(layers):
        assert isinstance(block, Block)  # METP serves several ranks
        model.bring(i + 1)  # which may have the place of another one
        s.turn = turns[kinds[i].rope]
        seen = slice(max(0, end - (kinds[i].window or end)), end)
        block.extend(s, k[:, seen], v[:, seen], y)
    model.bring(len(model.gpt.blocks) + 1)
    return last_logits(model, swap.x[-1])


def last_logits(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Computes the logits (V,), fp32, of the last row of x (n, C)."""
    return model.gpt.edges.logits(x[-1:])[3][0, :model.cfg.vocab_size].float()


def generate(model: Model, prompt: list[int], max_new_tokens: int, temperature: float = 1.0,
             top_k: int | None = None, seed: int = 0) -> Iterator[int]:
    """Yields up to `max_new_tokens` token ids behind the ids `prompt`. temperature=0 takes the likeliest."""
    length = len(prompt) + max_new_tokens
    if not prompt or max_new_tokens < 1 or length > model.cfg.block_size:
        raise ConfigError(f"prompt of {len(prompt)} tokens + max_new_tokens={max_new_tokens} must be at "
                          f"least 1 each and at most block_size={model.cfg.block_size} together; change "
                          "one of them")
    cache, generator = open_cache(model, length), torch.Generator(model.device).manual_seed(seed)
    logits = prefill(model, cache, prompt) if len(prompt) > 1 else None
    model.reserve_forward(1, 1)
    token = prompt[0]
    for end in range(len(prompt), length):
        logits = decode(model, cache, token, end - 1) if logits is None else logits
        token, logits = drawn(logits.double(), temperature, top_k, generator), None
        yield token


def drawn(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
    logits -= logits.max()  # no temperature is too low then: the likeliest one stays at 0
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))


def load_model(out_dir: str | Path, device: str = "auto", dtype: str = "auto") -> Model:
    """Loads the model of a checkpoint, for evaluation only."""
    def read(ckpt: checkpoint.Checkpoint) -> Model:
        # one process, which keeps all keys and values: those of METP exist for a group of heads only
        cfg = stored_config(ckpt.config, device=device, dtype=dtype, attention="auto", matmul="bf16", tp=1,
                            cp=1, tensor_parallel="megatron", head_groups="auto")
        where = pick_device(cfg)
        model = Model(GPT, with_place(cfg, *where), *where, grads=False)
        checkpoint.restore(ckpt, model)
        return model
    return checkpoint.read_newest(out_dir, read)


def read_prompt(given: str) -> str:
    """Reads the text of --prompt. Errors: ConfigError where it is a file that cannot be read."""
    if not given.startswith("@"):
        return given.encode(errors="replace").decode()  # an argument can hold what is no UTF-8
    with reading(f"prompt={given}", "give a text file in UTF-8"):
        return read_text(given[1:], newline="")


def prompt_ids(tokenizer: Tokenizer, prompt: str, special: bool, most: int) -> list[int]:
    """Encodes a prompt, of more than `most` ids only the first ones, one too many."""
    if len(prompt) <= PIECE_CHARS:
        return encode_text(tokenizer, prompt, special)
    pieces = (piece.ids for piece in encode([prompt], tokenizer, 0, special))  # a 0 ends the last one
    return list(islice(chain.from_iterable(pieces), most + 2))[:-1]


def main(argv: list[str]) -> None:
    args = read_argv(argv)
    path = Path(args.out_dir) / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"out_dir={args.out_dir} holds no tokenizer.json; give the out_dir of a run, or "
                          "copy one there")
    tokenizer, prompt = load_tokenizer(path), read_prompt(args.prompt)
    rule, special = said_in(Path(args.out_dir), "config.json").get("tokenizer"), args.parse_special
    if special is None:
        special = isinstance(rule, dict) and rule.get("parse_special") is True
    model = load_model(args.out_dir, args.device, args.dtype)
    check_vocab_size(tokenizer, path, model.cfg.vocab_size)
    ids = prompt_ids(tokenizer, prompt, special, model.cfg.block_size)
    check_reach(Path(args.out_dir) / OWN, len(ids) + args.max_new_tokens, model.cfg.sliding_window,
                "--max_new_tokens")
    shown = ""
    for token in generate(model, ids, args.max_new_tokens, args.temperature, args.top_k, args.seed):
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may take several tokens
            print(text[len(shown):], end="", flush=True)
            shown = text
    print()


if __name__ == "__main__":
    sys.exit(run(main))
