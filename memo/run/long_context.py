"""Does a model use its long context? Two measurements, on text of the validation split.

Loss by position: the mean loss of tokens by their position in sequences of the greatest length, and the gain
over that of the same tokens where the model sees no more than the least length.
Needles: random tokens, a key and a value, take the place of some tokens of a text, and the key stands again
at its end. Which of the value's tokens does the model predict, and how much likelier than without the needle?

docs/evaluate.md says more. What a rank of cp does not hold is 0 until over_sequences() has the sum."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from memo.data.batch import Data
from memo.kernels.rows import own_ids
from memo.layer.row_order import row_order
from memo.run.reserve import explaining
from memo.states.passes import Model
from memo.system.files import JsonObject

VALUE = 8  # tokens
NEEDLE = 2 * VALUE  # a key and a value
LEAST_LENGTH = 4 * NEEDLE  # half of the text is text then, the rest needle and query
POSITION_BUCKETS = 11  # of positions
COUNTED = 2**24  # tokens of the split, which tell the usual ones from the rest


@dataclass(frozen=True)
class Questions:
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


def over_sequences(model: Model, n: int, work: Callable[[int], np.ndarray]) -> np.ndarray:
    """Sums [work(i) for i in range(n)] over the ranks of cp. The dp ranks deal the sequences out."""
    mesh, results = model.mesh, {i: work(i) for i in range(model.mesh.dp.rank, n, model.mesh.dp.size)}
    shapes = mesh.host.objects(next((result.shape for result in results.values()), None))
    every = torch.zeros(n, *next(shape for shape in shapes if shape is not None), dtype=torch.float64)
    for i, result in results.items():
        every[i] = torch.from_numpy(result)
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
    full = over_sequences(model, n, partial(means, S))  # (n, buckets + 1)
    answer = dict(length=S, start=edges[:-1], end=edges[1:], loss=full.mean(0).tolist()[:-1])
    if cut == S:
        return answer
    without = over_sequences(model, n, partial(means, cut))
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
        return torch.stack(scores).sum((2, 3)).numpy() / VALUE  # (1 + depths, 2)
    means = [over_sequences(model, n, partial(needle_scores, length)).mean(0) for length in asked.lengths]
    log_p, right = np.array(means).transpose(2, 1, 0)  # (1 + depths, lengths) each
    score, gain = right[1:], log_p[1:] - log_p[0]
    return dict(lengths=asked.lengths, depths=asked.depths, score=score.tolist(), gain=gain.tolist(),
                mean_score=score.mean().item(), mean_gain=gain.mean().item())
