"""The two edges of the model, forward and backward written out by hand: the embedding in front of the layers;
the final norm and the head behind them, with logits, loss and the gradient of both made chunk by chunk. Both
share the vocabulary out over the tp ranks: see memo/parallel/tp.py.

    N         rows of all subsequences; n of them are the rank's own
    V         vocabulary, padded in memory to a multiple of 128 (the padding never gets a probability)
"""

from dataclasses import dataclass
from functools import cache

import torch

from memo.config.config import Config
from memo.config.layer import head_rows, logit_bytes
from memo.kernels.matmul import accumulate_product
from memo.kernels.ops import Ops
from memo.kernels.rows import chunks
from memo.layer.activations import Weights
from memo.layer.tiles import UNLEARNED, Learned
from memo.parallel.tp import embedding_backward, embedding_forward
from memo.system.axis import Axis


@cache
def rounded_root(n: int, dtype: torch.dtype) -> float:
    """Rounds the square root of n to a dtype, as transformers does."""
    return torch.tensor(n**0.5, dtype=dtype).item()


@dataclass
class Edges:
    """Computes the edges. `w` and `dw`: this stage's parameters and their gradients."""

    cfg: Config
    w: Weights
    dw: Weights
    ops: Ops
    tp: Axis

    def __post_init__(self) -> None:
        _ = self.scale  # now: in a step all memory is planned

    @property
    def scale(self) -> float:
        """Finds what embeddings are multiplied by."""
        return rounded_root(self.cfg.n_embd, self.w.wte.dtype) if (
            self.cfg.scale_embeddings and self.w.wte is not None) else 1.0

    # --- embedding ---

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        # (N,), (N,) -> (n, C)
        tp = self.tp
        # each rank has some rows of wte
        embedding_forward(tp, tokens.view(-1, tp.size), self.w.wte, out, self.scale)
        if self.w.wpe is not None:
            for out_, positions_ in chunks(out, positions[tp.rank::tp.size]):
                out_ += self.w.wpe[positions_]  # (n, C): own rows, tokens rank, rank + tp, ...
        return out

    def embed_backward(self, tokens: torch.Tensor, positions: torch.Tensor, dx: torch.Tensor) -> None:
        # (N,), (N,), (n, C)
        tp = self.tp
        # the head has added to the same gradient: the embedding's matrix serves twice
        embedding_backward(tp, tokens.view(-1, tp.size), dx, self.dw.wte, self.scale)
        if self.dw.wpe is not None:  # learned positions; rotations have no parameters
            for dx_, positions_ in chunks(dx, positions[tp.rank::tp.size]):
                # own rows only: the tp ranks' parts are summed in the optimizer
                self.dw.wpe.index_add_(0, positions_, dx_.float())

    # --- head ---

    @staticmethod
    def head_matrix(w: Weights) -> torch.Tensor:
        """Finds the head's (V/tp, C) of parameters or gradients: the embedding's where they are tied."""
        return w.wte if w.head_w is None else w.head_w

    def logits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes from x (n, C) all tp ranks' normed rows (tp * n, C), own mean, rstd, and their logits."""
        h = torch.empty_like(x)  # x stays for the norm's backward
        mean, rstd = torch.empty(2, len(x), dtype=torch.float32, device=x.device)
        mean = mean if self.cfg.norm == "layernorm" else None  # RMSNorm has none
        self.ops.norm_forward(x, self.w.lnf_w, self.w.lnf_b, h, mean, rstd, self.cfg.norm_eps)
        # each rank has some columns of the vocabulary, and needs all rows for these
        h = self.tp.gather(h).flatten(0, 1)  # (tp * n, C)
        logits = h @ self.head_matrix(self.w).t()  # (tp * n, V/tp)
        padding = max(0, self.cfg.vocab_size - self.tp.rank * logits.shape[1])
        logits[:, padding:] = torch.finfo(logits.dtype).min  # not -inf: a rank may have nothing else
        return h, mean, rstd, logits

    def head(self, x: torch.Tensor, targets: torch.Tensor | Learned, N: int, scale: float | None,
             loss: torch.Tensor) -> None:
        """Adds this subsequence's part of the mean loss of N rows to `loss`, and with `scale` writes the
        gradient of scale * loss over x (n, C). More than head_rows() rows of logits never exist."""
        rows = self.own_head_rows  # a few thousand: the logits of a million tokens would fill the device
        if isinstance(targets, Learned):
            self.head_of_some(x, targets, N, scale, loss)
            return
        for x_, target in zip(x.split(rows), targets.view(-1, self.tp.size).split(rows), strict=True):
            # rows of a gather come rank by rank, tokens by turns: so do the targets then
            loss += self.head_chunk(x_, target.t().reshape(-1), N, scale)

    def learned(self, targets: torch.Tensor) -> Learned:
        """Finds the Learned of the targets (N,) of all tp ranks' rows of a subsequence, on the host."""
        tp, known = self.tp, targets.view(-1, self.tp.size)
        n, learned = len(known), known != UNLEARNED
        chunk, counts = min(self.own_head_rows, n), learned.sum(0)
        order = (~learned).byte().argsort(dim=0, stable=True)  # of each rank first what is learned
        m = -(-int(counts.max()) // chunk) * chunk
        rows = torch.cat([order[:m], order.new_zeros(max(0, m - n), tp.size)])
        filled = torch.arange(m)[:, None] < counts
        own = int(counts[tp.rank])
        return Learned(rows[:, tp.rank].contiguous(), known.gather(0, rows).where(filled, UNLEARNED), own,
                       order[own:, tp.rank].contiguous())

    def head_of_some(self, x: torch.Tensor, learned: Learned, N: int, scale: float | None,
                     loss: torch.Tensor) -> None:
        """Computes as head() those rows that are learned; the gradient of the others is 0."""
        rows, left = min(self.own_head_rows, len(x)), learned.own
        for own, target in zip(learned.rows.split(rows), learned.targets.split(rows), strict=True):
            x_ = x[own]
            loss += self.head_chunk(x_, target.t().reshape(-1), N, scale, some=True)
            if scale is not None:
                x.index_copy_(0, own[:max(0, left)], x_[:max(0, left)])
            left -= rows
        if scale is not None:
            x.index_fill_(0, learned.rest, 0.0)

    @property
    def own_head_rows(self) -> int:
        matrix = self.head_matrix(self.w)
        nbytes = logit_bytes(matrix.itemsize, self.ops.name != "torch")
        return max(1, head_rows(len(matrix), nbytes, matrix.device.type == "cpu") // self.tp.size)

    def head_chunk(self, x: torch.Tensor, target: torch.Tensor, N: int, scale: float | None,
                   some: bool = False) -> torch.Tensor:
        """Computes a chunk's part of the mean loss of N rows, from own rows x (n, C) and targets (tp * n,)
        of all tp ranks, and with `scale` the gradients. `some`: of the targets some may be UNLEARNED."""
        w, dw, tp = self.w, self.dw, self.tp
        h, mean, rstd, logits = self.logits(x)
        log_p, dlogits = self.ops.cross_entropy(tp, logits, target, scale is not None)
        if some:
            learned = target != UNLEARNED
            log_p = log_p.mul_(learned)
            dlogits = dlogits if dlogits is None else dlogits.mul_(learned[:, None])
        if scale is not None:
            # the gradient of the logits lacks the factor scale / N, which h and dh get: they are smaller
            accumulate_product(self.head_matrix(dw), dlogits.t(), h.mul_(scale / N))
            dh = (dlogits @ self.head_matrix(w)).unflatten(0, (tp.size, -1))
            dh = tp.scatter_sum(dh).mul_(scale / N)
            self.ops.norm_backward(None, dh, x, mean, rstd, w.lnf_w, w.lnf_b, dw.lnf_w, dw.lnf_b, out=x)
        return log_p.sum() / -N
