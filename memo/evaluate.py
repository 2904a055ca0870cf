"""Does a model use its long context? python -m memo.evaluate out_dir [--lengths=4096,65536] ...
on several GPUs: torchrun --nproc_per_node=8 -m memo.evaluate out_dir --cp=8 ...

Loss by position, in sequences of the greatest length, and the gain over that of the same tokens where the
model sees no more than the least length. Needles: random tokens, a key and a value, stand in a text, and the
key again at its end. Does the model predict the value, and how much likelier than without the needle?"""

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

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from memo.checkpoint import checkpoint
from memo.config.config import MODEL_KEYS, Config, block_rule
from memo.config.layout import degrees
from memo.config.rope import parse_scaling, said_factors
from memo.data.batch import Data, open_dataset
from memo.errors import ConfigError, warn
from memo.huggingface.huggingface import OWN, check_reach
from memo.kernels.rows import own_ids
from memo.layer.tiles import row_order
from memo.parallel.mesh import open_mesh
from memo.plots.figures import loss_by_position, needle_map
from memo.run.load_config import stored_config
from memo.run.prepare import check_ranks, check_same_tokenizer
from memo.run.reserve import explaining
from memo.states.passes import Model, with_place
from memo.system.axis import Axis
from memo.system.command import interruptible, progress
from memo.system.device import pick_device
from memo.system.files import JsonObject, save_json
from memo.system.launch import Launch, connected, rank_errors, read_launch, same_everywhere, together
from memo.system.origin import code
from model import GPT

VALUE = 8  # tokens
NEEDLE = 2 * VALUE  # a key and a value
LEAST_LENGTH = 4 * NEEDLE  # half of the text is text then, the rest needle and query
POSITION_BUCKETS = 11  # of positions
COUNTED = 2**24  # tokens of the split, which tell the usual ones from the rest


class Questions(NamedTuple):
    """Holds what is asked. `lengths`, in tokens, and `depths`, from 0 to 1, ascend."""

    data: Data
    lengths: list[int]
    depths: list[float]
    batches: int  # sequences of each length
    seed: int

    def sequence(self, i: int, length: int) -> torch.Tensor:
        """Reads (length + 1,): the ids of the i-th sequence of a length."""
        tokens, targets = self.data.batch("val", 0, i, 1, length, self.seed)
        return torch.cat((tokens[0], targets[0, -1:]))


def room_for(what: str) -> AbstractContextManager[None]:
    """Raises RunFailed where the device's memory ends while `what` takes some."""
    return explaining(lambda text: f"out of memory ({text}) at {what}; try more ranks with a larger --cp or "
                      "--tp, or shorter --lengths")


def target_scores(model: Model, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Scores (2, tp * n), fp32, from own rows x (n, C) of the last layer and the targets (tp * n,) of all tp
    ranks' rows: the target's log-probability, and 1 where no token is likelier."""
    tp = model.mesh.weights
    *_, logits = model.gpt.edges.logits(x)  # (tp * n, V/tp)
    own, held = own_ids(tp, target[:, None], logits.shape[1])
    of_target = tp.sum(logits.gather(1, own).float() * held)  # (tp * n, 1): one of the ranks has it
    best = tp.gather(logits.amax(1).float()).amax(0)  # of the columns of all ranks
    log_p, _ = model.gpt.edges.ops.cross_entropy(tp, logits, target, gradient=False)
    return torch.stack((log_p, (of_target[:, 0] >= best).float()))


def token_scores(model: Model, windows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Computes (2, B, length), fp64, on the host: target_scores() of the tokens behind the first of ids (B,
    length + 1), where they are `wanted` and this rank of cp has them; else 0. Errors: RunFailed."""
    B, length = wanted.shape
    tp, device = model.mesh.weights, model.device
    with room_for(f"{B} x {length:,} tokens"):
        if model.shape != (shape := (B, length // model.mesh.tokens.size)):
            model.reserve_forward(*shape)  # of one layer, whose memory all layers use in turns
        positions = row_order(model.cfg, length, model.mesh).positions()  # of each sequence, by subsequence
        table = torch.zeros(2, B * length, dtype=torch.float64)

        def read(i: int, x: torch.Tensor) -> None:  # (n_i, C)
            at = (length * torch.arange(B)[:, None] + positions[i]).flatten()  # places in (B, length)
            targets = windows[:, 1:].flatten()[at].to(device).view(-1, tp.size)  # (n_i, tp)
            # the same on all tp ranks, which make their logits together
            rows = wanted.flatten()[at].view(-1, tp.size).any(1).nonzero()[:, 0].to(device)
            part_scores = torch.zeros(2, *targets.shape, device=device)
            # chunk by chunk, like the training's head; another rank of cp may have all that is wanted
            for part in rows.split(model.gpt.edges.own_head_rows) if len(rows) else ():
                # rows of a gather come rank by rank, tokens by turns
                scores = target_scores(model, x[part], targets[part].t().reshape(-1))
                part_scores[:, part] = scores.view(2, tp.size, -1).transpose(1, 2)
            table[:, at] = part_scores.flatten(1).double().cpu()
        model.hidden(windows[:, torch.cat(positions)].to(device), read)
    return table.view(2, B, length) * wanted


def over_sequences(model: Model, shape: tuple[int, ...], work: Callable[[int], np.ndarray]) -> np.ndarray:
    """Computes work(i), each i below shape[0], dealt out to dp ranks; sums parts of cp ranks, else 0."""
    mesh, every = model.mesh, torch.zeros(shape, dtype=torch.float64)
    for i in range(mesh.dp.rank, len(every), mesh.dp.size):
        every[i] = torch.from_numpy(work(i))
    return mesh.replicas.sum(every.to(model.device)).cpu().numpy()


def bucket_edges(length: int) -> list[int]:
    """Finds where buckets of positions begin, and the last ends. Each holds as many as all before it."""
    return sorted({0, *(length >> k for k in range(POSITION_BUCKETS))})


def token_losses(model: Model, ids: torch.Tensor, context: int) -> np.ndarray:
    """Computes (S,), fp64: the losses of ids (S + 1,) behind the first, seen in windows of `context` tokens,
    which overlap by half: before a token the model sees all, or at least context/2."""
    S = len(ids) - 1
    starts = [*range(0, S - context, context // 2), S - context]
    ends = [0, *(start + context for start in starts[:-1])]  # of what the windows before have scored
    losses, B = np.zeros(S), S // context  # as many tokens at once as a whole sequence has
    for first in range(0, len(starts), B):
        group = [*zip(starts, ends, strict=True)][first:first + B]
        group += [(0, context)] * (B - len(group))  # nothing is wanted of these
        windows = torch.stack([ids[start:start + context + 1] for start, _ in group])
        wanted = torch.tensor([end - start for start, end in group])[:, None] <= torch.arange(context)
        log_p, _ = token_scores(model, windows, wanted)
        for (start, _), window in zip(group, log_p.numpy(), strict=True):
            losses[start:start + context] -= window
    return losses


def measure_losses(model: Model, asked: Questions, tell: Callable[[str], None]) -> JsonObject:
    """Measures losses by position, and what a longer context than the least gains. tell(what is done)."""
    S, cut, n = asked.lengths[-1], asked.lengths[0], asked.batches
    edges = bucket_edges(S)
    counts = np.array([*np.diff(edges), max(1, S - cut)])

    def means(context: int, i: int) -> np.ndarray:
        tell(f"loss by position, context {context:,}, sequence {i + 1} of {n}")
        losses = token_losses(model, asked.sequence(i, S), context)
        return np.array([*np.add.reduceat(losses, edges[:-1]), losses[cut:].sum()]) / counts
    full = over_sequences(model, (n, len(counts)), partial(means, S))
    answer = dict(length=S, start=edges[:-1], end=edges[1:], loss=full.mean(0).tolist()[:-1])
    if cut == S:
        return answer
    without = over_sequences(model, (n, len(counts)), partial(means, cut))
    gains = without - full
    *gain, beyond = gains.mean(0).tolist()
    *error, beyond_error = (gains.std(0, ddof=1) / n**0.5).tolist() if n > 1 else [None] * len(counts)
    return answer | dict(cut_length=cut, cut_loss=without.mean(0).tolist()[:-1], gain=gain, gain_error=error,
                         gain_beyond_cut=beyond, gain_beyond_cut_error=beyond_error)


def usual_tokens(data: Data) -> np.ndarray:
    """Finds ids that the split has an eighth of the mean or more of: a model knows these; NEEDLE at least."""
    counts = np.bincount(data.tokens["val"][:COUNTED], minlength=data.vocab_size)
    usual = np.count_nonzero(8 * data.vocab_size * counts >= counts.sum())
    return np.argsort(-counts, kind="stable")[:max(NEEDLE, usual)]


def draw_needle(usual: np.ndarray, ids: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Draws (NEEDLE,), in random order, of the `usual` tokens that the text has least: these lead astray."""
    usual = rng.permutation(usual)
    in_text = np.bincount(ids.numpy(), minlength=usual.max() + 1)[usual]
    return torch.from_numpy(rng.permutation(usual[np.argsort(in_text, kind="stable")[:NEEDLE]]))


def needle_text(ids: torch.Tensor, needle: torch.Tensor, depth: float | None) -> torch.Tensor:
    """Puts the needle at the end of `ids` and at `depth`: 0 start, 1 before the query, None nowhere."""
    text = ids.clone()
    text[-NEEDLE:] = needle
    if depth is not None:
        at = round(depth * (len(ids) - 2 * NEEDLE))
        text[at:at + NEEDLE] = needle
    return text


def measure_needles(model: Model, asked: Questions, tell: Callable[[str], None]) -> JsonObject:
    """Measures `score`, the fraction of the value's tokens that are found, and `gain`, what a needle adds to
    their mean log-probability: for each depth a list with an item for each length. tell(what is done now)."""
    usual, n = usual_tokens(asked.data), asked.batches

    def needle_scores(length: int, i: int) -> np.ndarray:
        tell(f"needles, length {length:,}, sequence {i + 1} of {n}")
        ids, rng = asked.sequence(i, length), np.random.default_rng((asked.seed, length, i))
        needle, wanted = draw_needle(usual, ids, rng), torch.zeros(1, length, dtype=torch.bool)
        wanted[:, -VALUE:] = True
        texts = [needle_text(ids, needle, depth) for depth in (None, *asked.depths)]
        scores = [token_scores(model, text[None], wanted) for text in texts]
        return torch.stack(scores).sum((2, 3)).numpy() / VALUE
    shape = n, 1 + len(asked.depths), 2
    means = [over_sequences(model, shape, partial(needle_scores, length)).mean(0) for length in asked.lengths]
    log_p, right = np.array(means).transpose(2, 1, 0)  # (1 + depths, lengths) each
    score, gain = right[1:], log_p[1:] - log_p[0]
    return dict(lengths=asked.lengths, depths=asked.depths, score=score.tolist(), gain=gain.tolist(),
                mean_score=score.mean().item(), mean_gain=gain.mean().item())


# --- the command ---

class Evaluation(NamedTuple):
    """Holds what is asked of which model."""

    args: Namespace
    cfg: Config  # the model's keys, in the layout of this command
    questions: Questions
    ckpt: checkpoint.Checkpoint
    device: torch.device
    dtype: torch.dtype


def default_lengths(args: Namespace, trained: Config) -> list[int]:
    """Picks a sixteenth, a quarter and all of the trained length, as far as the layout divides them."""
    unit = 2 * args.cp * args.tp
    parts = {trained.block_size // n // unit * unit for n in (16, 4, 1)}
    return sorted(n for n in parts if n >= LEAST_LENGTH) or [-(-LEAST_LENGTH // unit) * unit]


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
    n, longest, part = lengths[0], lengths[-1], cfg.block_multiple
    if n < LEAST_LENGTH:
        raise ConfigError(f"lengths={n} must be at least {LEAST_LENGTH} (needle and query take half of that)")
    if n := next((n for n in lengths if n % part), 0):
        raise ConfigError(f"lengths={n} % ({block_rule(cfg)[0]})={part} != 0 (the tokens are shared out); "
                          f"try {-(-n // part) * part}")
    if cfg.position == "learned" and longest > cfg.block_size:
        raise ConfigError(f"lengths={longest} must be at most block_size={cfg.block_size}, the positions "
                          "that the model has learned; give shorter ones")
    if longest + 1 > (n := len(data.tokens["val"])):
        raise ConfigError(f"lengths={longest} + 1 must be <= {n}, the tokens of {data.folder / 'val'}.bin; "
                          "give shorter ones, or a --dataset with more text")
    check_reach(Path(args.out_dir) / OWN, longest, cfg.sliding_window, "--lengths")
    if not NEEDLE <= data.vocab_size <= cfg.vocab_size:
        raise ConfigError(f"dataset={cfg.dataset}: vocab_size={data.vocab_size} must be at least {NEEDLE} "
                          f"(a needle's tokens differ) and at most {cfg.vocab_size}, the model's; give a "
                          "--dataset of the model's tokenizer")
    check_same_tokenizer(data, args.out_dir, f"the weights of out_dir={args.out_dir}")
    questions = Questions(data, lengths, args.needle_depths, args.batches, args.seed)
    return Evaluation(args, cfg, questions, ckpt, *pick_device(cfg, launch.local_rank))


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
    trained = stored_config(evaluation.ckpt.config).block_size
    if speaks:
        print(f"step {evaluation.ckpt.iter:,} of {evaluation.args.out_dir}: sequences of "
              f"{questions.data.folder.name}/val.bin, {questions.batches} of each length", flush=True)
        for line in said_factors(parse_scaling(cfg.rope_scaling), cfg.block_size):
            print(f"positions: {line}", flush=True)
        if longer := [f"{n:,}" for n in questions.lengths if n > trained]:
            print(f"longer than the {trained:,} tokens that the model was trained at: {', '.join(longer)}",
                  flush=True)
    with progress(lambda: doing[-1], speaks):
        losses = measure_losses(model, questions, doing.append)
        needles = measure_needles(model, questions, doing.append)
    layout = dict(tp=cfg.tp, cp=cfg.cp, dp=model.mesh.dp.size, context_parallel=cfg.context_parallel)
    return dict(iter=evaluation.ckpt.iter, trained_length=trained, dataset=cfg.dataset,
                batches=questions.batches, seed=questions.seed, layout=layout, device=model.device.type,
                dtype=str(model.dtype).removeprefix("torch."), loss_by_position=losses, needles=needles)


def tell_answers(evaluation: Evaluation, result: dict) -> None:
    """Prints the tables of losses, and of needles at depths and lengths; writes evaluate.json, pictures."""
    losses, needles, out = result["loss_by_position"], result["needles"], Path(evaluation.args.out_dir)
    cut = losses.get("cut_length")
    print(f"{'position':>25}{'loss':>10}" + (f"{f'seen {cut:,}':>18}{'gain':>10}" if cut else ""))
    for i, (start, end) in enumerate(zip(losses["start"], losses["end"], strict=True)):
        line = f"{start:>11,} to {end:>10,}{losses['loss'][i]:>10.4f}"
        print(line + (f"{losses['cut_loss'][i]:>18.4f}{losses['gain'][i]:>10.4f}" if cut else ""))
    if cut:
        error = losses["gain_beyond_cut_error"]
        print(f"tokens at {cut:,} and beyond gain {losses['gain_beyond_cut']:.4f}"
              f"{'' if error is None else f' +- {error:.4f}'} nats each by a context of more than {cut:,}")
    print(f"\n{'needle at':>12}" + "".join(f"{n:>20,}" for n in needles["lengths"]))
    for depth, score, gain in zip(needles["depths"], needles["score"], needles["gain"], strict=True):
        cells = (f"{f'{s:.0%} {g:+.2f} nats':>20}" for s, g in zip(score, gain, strict=True))
        print(f"{depth:>12.0%}" + "".join(cells))
    print(f"needles: {needles['mean_score']:.1%} of the values' tokens are found; a needle adds "
          f"{needles['mean_gain']:.2f} nats to their log-probability")
    save_json(result, out / "evaluate.json")
    title = f"{out.name}, step {result['iter']:,}, {evaluation.questions.data.folder.name}"
    loss_by_position(losses, result["trained_length"], out / "loss_by_position.png", title)
    needle_map(needles, out / "needles.png", title)
    print(f"{out}/ holds evaluate.json, loss_by_position.png, needles.png")


def main(argv: list[str]) -> None:
    launch = read_launch()
    with interruptible(), connected(launch) as host, rank_errors(host):
        asked, model = set_up_evaluation(argv, launch, host)
        result = answers(asked, model, launch.rank == 0)
        model.close()
        model.mesh.close()
        if launch.rank == 0:
            tell_answers(asked, result)


if __name__ == "__main__":
    sys.exit(run(main))
