"""Does a model use its long context? python -m memo.evaluate out_dir [--lengths=4096,65536] ...
on several GPUs: torchrun --nproc_per_node=8 -m memo.evaluate out_dir --cp=8 ..."""

import os
import sys
from argparse import Namespace
from dataclasses import Field

from memo.config.config import as_keys
from memo.config.keys import check_value, option, typed
from memo.system.command import Arguments, answer_early, run

HOW = ("tp", "cp", "context_parallel", "subsequences", "subsequence_cut", "unit_order", "attention", "ops",
       "device", "dtype")  # keys of the evaluation, not of the model


def numbers(f: Field, text: str) -> list:
    """Reads a list such as 4096,65536 of what the option `f` takes -> each number once, ascending."""
    values = [typed(f, part, "--") for part in text.split(",")]
    for value in values:
        check_value(f, value)
    return sorted({*values})


def read_argv(argv: list[str]) -> Namespace:
    parser = Arguments(ranks=True, prog="python -m memo.evaluate",
                       description="Does a model use its long context? Loss by position, and "
                       "needles that it finds again.")
    parser.option("out_dir", help="the folder of a run; the answers go there too", least=1)
    parser.option("--lengths", help="tokens in a sequence, as in 4096,65536; the default is a sixteenth, a "
                  "quarter and all of the trained length")
    parser.option("--needle_depths", str, "0,0.25,0.5,0.75,1",
                  "places of needles: 0 is the text's start, 1 its end")
    parser.option("--batches", int, 8, "sequences of each length", least=1, most=10**6,
                  why="at a second each these take 11 days")
    parser.option("--dataset", help="a folder's name under data/, or a path; the default is the run's",
                  least=1)
    parser.option("--seed", int, 1337, "of places in the split, and of needles", least=0, below=2**63,
                  why="seeds have 63 bits")
    parser.keys(*HOW)
    args = parser.parse_args(argv)
    if args.lengths is not None:
        length = option("lengths", int, least=1, most=2**31, why="rows are counted in 32 bits")
        args.lengths = numbers(length, args.lengths)
    depth = option("needle_depths", float, least=0.0, most=1.0, why="1 is just before the query")
    args.needle_depths = numbers(depth, args.needle_depths)
    return args


if __name__ == "__main__":  # before torch is imported, which takes seconds
    answer_early(read_argv)

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from memo.checkpoint import checkpoint
from memo.config.config import MODEL_KEYS, Config, block_rule
from memo.config.layout import degrees
from memo.data.batch import Data, open_dataset
from memo.errors import ConfigError, warn
from memo.huggingface.huggingface import OWN, check_reach
from memo.parallel.mesh import open_mesh
from memo.plots.figures import loss_by_position, needle_map
from memo.run.load_config import stored_config
from memo.run.long_context import LEAST_LENGTH, NEEDLE, Questions, measure_losses, measure_needles, room_for
from memo.run.prepare import check_ranks, check_same_tokenizer
from memo.states.passes import Model
from memo.states.staging import with_place
from memo.system.axis import Axis
from memo.system.command import progress
from memo.system.device import pick_device
from memo.system.files import save_json
from memo.system.launch import Launch, connected, rank_errors, read_launch, same_everywhere, together
from memo.system.origin import code
from memo.system.signals import interruptible
from model import GPT


@dataclass(frozen=True)
class Evaluation:
    """Holds what is asked of which model."""

    args: Namespace
    cfg: Config  # the model's keys, in the layout of this command
    trained_length: int
    questions: Questions
    ckpt: checkpoint.Checkpoint
    device: torch.device
    dtype: torch.dtype


def default_lengths(args: Namespace, trained: Config) -> list[int]:
    """Picks a sixteenth, a quarter and all of the trained length, as far as the layout divides them."""
    unit = 2 * args.cp * args.tp
    parts = {trained.block_size // n // unit * unit for n in (16, 4, 1)}
    return sorted(n for n in parts if n >= LEAST_LENGTH) or [-(-LEAST_LENGTH // unit) * unit]


def check_lengths(lengths: list[int], cfg: Config, data: Data) -> None:
    """Raises ConfigError where the layout, the model or the data do not take a length."""
    if lengths[0] < LEAST_LENGTH:
        raise ConfigError(f"lengths={lengths[0]} must be at least {LEAST_LENGTH} (needle and query take half "
                          "of that)")
    for n in lengths:
        if n % cfg.block_multiple:
            rule, _ = block_rule(cfg)
            more = -(-n // cfg.block_multiple) * cfg.block_multiple
            raise ConfigError(f"lengths={n} % ({rule})={cfg.block_multiple} != 0 (the tokens are shared "
                              f"out); try {more}")
    if cfg.position == "learned" and lengths[-1] > cfg.block_size:
        raise ConfigError(f"lengths={lengths[-1]} must be at most block_size={cfg.block_size}, the positions "
                          "that the model has learned; give shorter ones")
    if lengths[-1] + 1 > (n := len(data.tokens["val"])):
        raise ConfigError(f"lengths={lengths[-1]} + 1 must be <= {n}, the tokens of "
                          f"{data.folder / 'val'}.bin; give shorter ones, or a --dataset with more text")


def check_evaluation(argv: list[str], launch: Launch, passed_over: dict[Path, str]) -> Evaluation:
    """Checks all that can be wrong before the device is touched. Errors: ConfigError; Damaged."""
    args = read_argv(argv)
    ckpt = checkpoint.load(args.out_dir, launch.rank, launch.world, passed_over)
    if not os.access(args.out_dir, os.W_OK):
        raise ConfigError(f"out_dir={args.out_dir} cannot be written, where the answers go; copy the run to "
                          "another folder")
    trained = stored_config(ckpt.config)
    lengths = args.lengths or default_lengths(args, trained)
    unit = 2 * args.cp * args.tp
    # beside learned positions, block_size is only a bound
    S = trained.block_size if trained.position == "learned" else -(-lengths[-1] // unit) * unit
    keys = {k: getattr(trained, k) for k in MODEL_KEYS} | {k: getattr(args, k) for k in HOW}
    cfg = Config(**keys | dict(block_size=S, dataset=args.dataset or trained.dataset))
    degrees(cfg, launch.world)
    data = open_dataset(cfg.dataset, 1)
    check_lengths(lengths, cfg, data)
    check_reach(Path(args.out_dir) / OWN, lengths[-1], "--lengths")
    if not NEEDLE <= data.vocab_size <= cfg.vocab_size:
        raise ConfigError(f"dataset={cfg.dataset}: vocab_size={data.vocab_size} must be at least {NEEDLE} "
                          f"(a needle's tokens differ) and at most {cfg.vocab_size}, the model's; give a "
                          "--dataset of the model's tokenizer")
    check_same_tokenizer(data, args.out_dir, f"the weights of out_dir={args.out_dir}")
    questions = Questions(data, lengths, args.needle_depths, args.batches, args.seed)
    device, dtype = pick_device(cfg, launch.local_rank)
    return Evaluation(args, cfg, trained.block_size, questions, ckpt, device, dtype)


def set_up_evaluation(argv: list[str], launch: Launch, host: Axis) -> tuple[Evaluation, Model]:
    """Sets up what is asked, the same on all ranks, and the model. Errors: ConfigError, RunFailed."""
    asked, passed_over = check_ranks(host, partial(check_evaluation, argv, launch))
    cfg, device = asked.cfg, asked.device
    facts = code() | asked.questions.data.fingerprints | dict(
        device=device.type, dtype=str(asked.dtype), checkpoint=asked.ckpt.iter)
    same_everywhere(host, as_keys(cfg) | vars(asked.args) | facts)
    for why in passed_over.values():
        warn(f"checkpoint passed over: {why}")
    launch.take(device)
    mesh = open_mesh(host, cfg.cp, cfg.tp, device, cfg.context_parallel)
    with room_for("the parameters"):
        model = Model(GPT, with_place(cfg, device, asked.dtype), device, asked.dtype, grads=False, mesh=mesh)
    together(host, checkpoint.restore, asked.ckpt, model)
    return asked, model


def answers(evaluation: Evaluation, model: Model, speaks: bool) -> dict:
    """Measures what evaluate.json holds, the same on all ranks. Errors: RunFailed."""
    cfg, questions, doing = evaluation.cfg, evaluation.questions, ["the first sequence"]
    with progress(lambda: doing[-1], speaks):
        losses = measure_losses(model, questions, doing.append)
        needles = measure_needles(model, questions, doing.append)
    layout = dict(tp=cfg.tp, cp=cfg.cp, dp=model.mesh.dp.size, context_parallel=cfg.context_parallel)
    return dict(iter=evaluation.ckpt.iter, trained_length=evaluation.trained_length, dataset=cfg.dataset,
                batches=questions.batches, seed=questions.seed, layout=layout, device=model.device.type,
                dtype=str(model.dtype).removeprefix("torch."), loss_by_position=losses, needles=needles)


def loss_lines(losses: dict) -> Iterator[str]:
    """Yields the table of the losses by position."""
    cut = losses.get("cut_length")
    yield f"{'position':>25}{'loss':>10}" + (f"{f'seen {cut:,}':>18}{'gain':>10}" if cut else "")
    for i, (start, end) in enumerate(zip(losses["start"], losses["end"], strict=True)):
        line = f"{start:>11,} to {end:>10,}{losses['loss'][i]:>10.4f}"
        yield line + (f"{losses['cut_loss'][i]:>18.4f}{losses['gain'][i]:>10.4f}" if cut else "")
    if cut:
        error = losses["gain_beyond_cut_error"]
        yield (f"tokens at {cut:,} and beyond gain {losses['gain_beyond_cut']:.4f}"
               f"{'' if error is None else f' +- {error:.4f}'} nats each by a context of more than {cut:,}")


def needle_lines(needles: dict) -> Iterator[str]:
    """Yields the table of the needles: depth against length."""
    yield f"{'needle at':>12}" + "".join(f"{n:>20,}" for n in needles["lengths"])
    for depth, score, gain in zip(needles["depths"], needles["score"], needles["gain"], strict=True):
        cells = (f"{f'{s:.0%} {g:+.2f} nats':>20}" for s, g in zip(score, gain, strict=True))
        yield f"{depth:>12.0%}" + "".join(cells)
    yield (f"needles: {needles['mean_score']:.1%} of the values' tokens are found; a needle adds "
           f"{needles['mean_gain']:.2f} nats to their log-probability")


def print_question(e: Evaluation) -> None:
    questions, n = e.questions, e.trained_length
    print(f"step {e.ckpt.iter:,} of {e.args.out_dir}: sequences of {questions.data.folder.name}/val.bin, "
          f"{questions.batches} of each length")
    if longer := [f"{s:,}" for s in questions.lengths if s > n]:
        print(f"longer than the {n:,} tokens that the model was trained at: {', '.join(longer)}")
    sys.stdout.flush()


def tell_answers(evaluation: Evaluation, result: dict) -> None:
    """Prints the answers, and writes evaluate.json and the pictures."""
    losses, needles, out = result["loss_by_position"], result["needles"], Path(evaluation.args.out_dir)
    print("\n".join((*loss_lines(losses), "", *needle_lines(needles))))
    save_json(result, out / "evaluate.json")
    title = f"{out.name}, step {result['iter']:,}, {evaluation.questions.data.folder.name}"
    loss_by_position(losses, evaluation.trained_length, out / "loss_by_position.png", title)
    needle_map(needles, out / "needles.png", title)
    print(f"{out}/ holds evaluate.json, loss_by_position.png, needles.png")


def main(argv: list[str]) -> None:
    launch = read_launch()
    with interruptible(), connected(launch) as host, rank_errors(host):
        asked, model = set_up_evaluation(argv, launch, host)
        if launch.rank == 0:
            print_question(asked)
        result = answers(asked, model, launch.rank == 0)
        model.close()
        model.mesh.close()
        if launch.rank == 0:
            tell_answers(asked, result)


if __name__ == "__main__":
    sys.exit(run(main))
