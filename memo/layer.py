"""The skeletal activations of one layer: the one table of what is kept between its forward and its backward, and where.

Rows are tokens: of the B*T tokens of a rank's sequences, one after the other, N = B*T/tp are a rank's own. What is split
by heads or columns is (N, tp, width/tp), the rest (N, width), see parallel/tp.py: so in everything here but `lse` a range of
rows is contiguous, and whatever is token-wise can be done on any range.
Source: MEMO 3.1 and 4.1; DESIGN section 2.
"""

from dataclasses import dataclass
from math import prod

# what bounds the temporary tensors of a layer and of the head
CHUNK_ROWS = 2**16  # of all tp ranks, in what is done row by row; indices stay below 2^31 too
GROUP_ELEMENTS = 2**26  # of a (B, T, heads, D) tensor in attention, which goes by groups of heads
HEAD_ROWS = 1024  # tokens whose logits exist at once, on a CPU; on a GPU up to MORE_HEAD_ROWS times as many
MORE_HEAD_ROWS = 4  # the head's gradient, fp32, is read and written once for so many tokens
HEAD_ELEMENTS = 2**27  # of the logits of more than HEAD_ROWS tokens, which with softmax and gradient take 8 bytes each


def head_rows(V, cpu):
    """Tokens whose logits exist at once where a rank has V columns of them."""
    if cpu:
        return HEAD_ROWS
    return HEAD_ROWS * min(MORE_HEAD_ROWS, max(1, int(HEAD_ELEMENTS // (V * HEAD_ROWS))))


def heads_at_once(rows, D, heads, multiple=1):
    """Of so many heads those that attention takes at a time, a multiple: GROUP_ELEMENTS bounds (rows, heads, D)."""
    return min(heads, max(1, GROUP_ELEMENTS // (rows * D * multiple)) * multiple)


@dataclass(frozen=True)
class Skeletal:
    """One row of the table. Its elements per token, over tp: units * C, or one per head (`lse`), or one (a statistic)."""

    name: str
    units: int = 0
    split: bool = False  # by heads or columns; otherwise by tokens
    per_head: bool = False
    other: bool = True  # one of the "others": token-wise in x and attn_out, so it can be recomputed from them


TABLE = (
    Skeletal("x", 1, other=False),  # layer input
    Skeletal("attn_out", 1, split=True, other=False),  # recomputing attention is what costs
    Skeletal("lse", per_head=True, other=False),
    Skeletal("ln1_out", 1),
    Skeletal("ln1_mean"),
    Skeletal("ln1_rstd"),
    Skeletal("q", 1, split=True),
    Skeletal("k", 1, split=True),
    Skeletal("v", 1, split=True),
    Skeletal("mid", 1),  # x + attention branch
    Skeletal("ln2_out", 1),
    Skeletal("ln2_mean"),
    Skeletal("ln2_rstd"),
    Skeletal("fc1_out", 4, split=True),
    Skeletal("gelu_out", 4, split=True),
)


@dataclass(frozen=True)
class Tensor:
    """A skeletal tensor of one layer."""

    nbytes: int
    shape: tuple
    fp32: bool  # statistics and the logsumexp are fp32 whatever the dtype of the run


def layout(B, T, C, H, itemsize, tp=1):
    """{name: Tensor} of one layer; T: the tokens that a rank of cp holds. `itemsize` in bytes."""
    tensors = {}
    for t in TABLE:
        N, width = B * T // tp, t.units * C
        shape = (B, H // tp, T) if t.per_head else (N, tp, width // tp) if t.split else (N, width) if width else (N,)
        tensors[t.name] = Tensor(prod(shape) * (itemsize if t.units else 4), shape, fp32=not t.units)
    return tensors


def tensors_of(cfg, itemsize):
    """The layout() of a rank of a config."""
    return layout(cfg.batch_size, cfg.block_size // cfg.cp, cfg.n_embd, cfg.n_head, itemsize, cfg.tp)


def n_rows(cfg):
    """Rows of a rank's own."""
    return cfg.batch_size * cfg.block_size // (cfg.cp * cfg.tp)


def group_heads(cfg):
    """Heads of a rank of a config that attention takes at a time."""
    rows, multiple = cfg.batch_size * cfg.block_size // cfg.cp, cfg.cp if cfg.context_parallel == "ulysses" else 1
    return heads_at_once(rows, cfg.n_embd // cfg.n_head, cfg.n_head // cfg.tp, multiple)
