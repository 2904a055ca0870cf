"""A layer: its parameters, the skeletal activations that it keeps from its forward for its backward,
and the operation that makes each of them. One value per family of models; all else reads it. No torch.

Rows are tokens: of the N = B*T tokens of a rank's sequences, in order, n = N/tp are a rank's own. What is
split by heads or columns is (n, tp, width/tp), the rest (n, width), see parallel/tp.py. So in every
skeletal tensor but `lse` a range of rows is contiguous. Source: MEMO 3.1 and 4.1."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import gcd, prod

from memo.config.settings import Kind, Settings

# what bounds the temporary tensors of a layer and of the head
CHUNK_ROWS = 2**16  # rows of all tp ranks, in what is done row by row; indices stay below 2^31 too
GROUP_ELEMENTS = 2**26  # elements of a (B, T, heads, D) tensor in attention, which goes by groups of heads
METP_ELEMENTS = 2**24  # of q in a group of heads of METP; with the ring's tensors about 8 times as many
METP_ROWS = 2**14  # of METP's products; fewer would read and write the matrices' fp32 gradients too often
HEAD_ROWS = 1024  # tokens whose logits exist at once, on a CPU; on a GPU up to MORE_HEAD_ROWS times as many
MORE_HEAD_ROWS = 8  # the head's gradient, fp32, is read and written once for so many tokens
HEAD_BYTES = 2**30  # of the logits of more than HEAD_ROWS tokens, with their softmax and gradient
SPLIT_ROWS = 256  # rows are swapped and recomputed in multiples: smaller products may differ in their bits

# the skeletal tensors that every family has: the layer's input, attention's output
INPUT, ATTENTION = "x", "attn_out"
KEYS_VALUES = "k", "v"  # what later tokens read; with several subsequences it has memory of its own


@dataclass(frozen=True)
class Parameter:
    """Describes a parameter. `shape`: whole. `split_dim`: the dim along which the tp ranks share it; None:
    each holds all of it. `init`: normal; residual (normal, divided by sqrt(2 L)); ones; zeros. `most`: parts
    that it can be cut into; of more ranks neighbours hold copies of the same part. None: any number."""

    shape: tuple[int, ...]
    split_dim: int | None = None
    init: str = "normal"
    most: int | None = None

    def copies(self, tp: int) -> int:
        """Counts the neighbours of tp ranks that hold the same: part number rank // copies."""
        return tp if self.split_dim is None else max(1, tp // (self.most or tp))

    def local_shape(self, tp: int) -> tuple[int, ...]:
        parts = tp // self.copies(tp)
        return tuple(n // parts if dim == self.split_dim else n for dim, n in enumerate(self.shape))


@dataclass(frozen=True)
class Operation:
    """Describes what makes a skeletal tensor, or the layer's output. `kind`: norm; column (x w^T, each tp
    rank has some columns of the result); row (x w^T, each tp rank has a part of the sum; + residual, unless
    behind follows); behind (residual + norm(x)); activation. `reads`: what goes in, `takes` and `gives`:
    elements a token that go in and come out.
    `rotary`: positions are rotated in. `gated`: silu(first), or gelu, * second goes in, made in each pass."""

    kind: str
    reads: str
    takes: int
    gives: int
    rotary: bool = False
    gated: bool = False


@dataclass(frozen=True)
class Skeletal:
    """Describes a skeletal tensor. `width`: elements a token, over all tp ranks; 0: one fp32
    statistic a token, or with `per_head` one a head. `split`: among the tp ranks by heads or columns,
    otherwise by tokens; a statistic then is one of each rank's columns. `fp8`: kept as FP8 products take it,
    with the statistic <name>_scale (memo/kernels/fp8.py). `group`: the "others" of MEMO, which are token-wise
    in what is always swapped, are rebuilt group by group, each from what is there by then. None: always
    swapped. `made_by`: the operation that makes the group, on its first tensor."""

    name: str
    width: int = 0
    split: bool = False
    per_head: bool = False
    group: str | None = None
    made_by: Operation | None = None
    fp8: bool = False


@dataclass(frozen=True)
class Tensor:
    """A skeletal tensor of one layer at the shape of a run. `dtype`: as torch names it; empty: the run's."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    group: str | None


@dataclass(frozen=True)
class Layer:
    """Describes a layer. `parameters`: {name: Parameter}. `skeletal`: in the order in which the forward
    makes the tensors. `operations`: of the forward, in order, but for attention; the last one makes the
    next layer's input. `heads`: of queries; `kv_heads`: of keys and values, with all copies that tp ranks
    hold; `head_dim`: elements of each."""

    parameters: dict[str, Parameter]
    skeletal: tuple[Skeletal, ...]
    operations: tuple[Operation, ...]
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def groups(self) -> dict[str, Operation]:
        """Finds {group: the operation that rebuilds it}, in the order of the forward."""
        return {t.group: t.made_by for t in self.skeletal if t.group and t.made_by}

    @property
    def keys(self) -> tuple[Operation, ...]:
        """Lists what makes keys and values where these are in no group."""
        return tuple(t.made_by for t in self.skeletal if t.name in KEYS_VALUES and not t.group and t.made_by)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names the tensors that go into q, k, v, and into the MLP's first products."""
        return tuple(dict.fromkeys(op.reads for op in self.operations if op.kind == "column"))

    @property
    def projected(self) -> str:
        """Names the tensor that attention's projection makes: mid, or what is normed before mid."""
        return next(t.name for t in self.skeletal if t.made_by and t.made_by.reads == ATTENTION)

    @property
    def qk_norms(self) -> bool:
        """Says whether q and k are normed, each time that attention takes them."""
        return "q_norm_w" in self.parameters

    @cached_property
    def matrix_elements(self) -> int:
        return sum(prod(p.shape) for p in self.parameters.values() if len(p.shape) == 2)

    def tensors(self, B: int, T: int, itemsize: int, tp: int = 1) -> dict[str, Tensor]:
        """Finds {name: Tensor} of B sequences, T tokens of each on a rank of cp; `itemsize` in bytes."""
        tensors, N, sizes = {}, B * T // tp, {"": itemsize, "float32": 4, "float8_e4m3fn": 1}
        for t in self.skeletal:
            dtype = "float8_e4m3fn" if t.fp8 else "" if t.width else "float32"
            whole_rows = (N, *[tp] * t.split, *[t.width // (tp if t.split else 1)] * (t.width > 0))
            per_head = (B, self.heads // tp, T) if t.split else (B, self.heads, T // tp)
            shape = per_head if t.per_head else whole_rows
            tensors[t.name] = Tensor(prod(shape) * sizes[dtype], shape, dtype, t.group)
        return tensors


# --- the families ---

def decoder_parameters(C: int, Q: int, KV: int, D: int, F: int, mlp: str, bias: bool, qkv_bias: bool,
                       qk_norm: str, norms: list[str], most: int | None) -> dict[str, Parameter]:
    """Lists {name: Parameter} of a decoder_layer, queries Q and keys KV wide, these in at most so many parts.
    What all ranks hold is last."""
    qkv = {"q": (Q, None), "k": (KV, most), "v": (KV, most)}
    first, last = (["fc1"], "fc2") if mlp == "gelu" else (["gate", "up"], "down")
    parameters = {f"{name}_w": Parameter((n, C), 0, most=most) for name, (n, most) in qkv.items()}
    parameters["proj_w"] = Parameter((C, Q), 1, "residual")
    parameters |= {f"{name}_w": Parameter((F, C), 0) for name in first}
    parameters[f"{last}_w"] = Parameter((C, F), 1, "residual")
    if bias or qkv_bias:
        parameters |= {f"{name}_b": Parameter((n,), 0, "zeros", most) for name, (n, most) in qkv.items()}
    if qk_norm == "all":
        parameters |= {f"{name}_norm_w": Parameter((n,), 0, "ones", most)
                       for name, (n, most) in qkv.items() if name != "v"}
    if bias:
        parameters["fc1_b"] = Parameter((F,), 0, "zeros")
        parameters |= {f"{name}_b": Parameter((C,), init="zeros") for name in ("proj", "fc2", *norms)}
    parameters |= {f"{name}_w": Parameter((C,), init="ones") for name in norms}
    if qk_norm == "head":  # over the D elements of each head, the same for all heads
        parameters |= {f"{name}_norm_w": Parameter((D,), init="ones") for name in "qk"}
    return parameters


def decoder_tensors(C: int, Q: int, KV: int, F: int, norm: str, mlp: str, rotary: bool, norms: str,
                    fp8: bool) -> tuple[tuple[Skeletal, ...], Operation]:
    """Lists the skeletal tensors of a decoder_layer, and what makes its output. `rotary`: positions are
    rotated into q and k as they are made."""
    statistics = ("mean", "rstd") if norm == "layernorm" else ("rstd",)
    front, behind = norms != "behind", norms != "before"
    into = ("ln1_out", "ln2_out") if front else (INPUT, "mid")

    def product_input(name: str, width: int, made_by: Operation, split: bool = False) -> list[Skeletal]:
        scale = Skeletal(f"{name}_scale", split=split, group=name)
        return [Skeletal(name, width, split, group=name, made_by=made_by, fp8=fp8), *[scale] * fp8]

    def normed(number: int, reads: str) -> list[Skeletal]:
        name = f"ln{number}_out"
        return [*product_input(name, C, Operation("norm", reads, C, C)),
                *(Skeletal(f"ln{number}_{statistic}", group=name) for statistic in statistics)]

    def columns(name: str, reads: str, gives: int, rotary: bool = False) -> Skeletal:
        return Skeletal(name, gives, True, group=name, made_by=Operation("column", reads, C, gives, rotary))

    def branch(name: str, product: Operation) -> tuple[list[Skeletal], Operation]:
        # what attention or the MLP adds to the stream: what is kept of it, and what makes the sum
        if not behind:
            return [], product
        return [Skeletal(name, C, group=name, made_by=product)], Operation("behind", name, C, C)
    if mlp == "gelu":
        hidden = [columns("fc1_out", into[1], F),
                  *product_input("gelu_out", F, Operation("activation", "fc1_out", F, F), split=True)]
        output = Operation("row", "gelu_out", F, C)
    else:
        hidden = [columns(name, into[1], F) for name in ("gate_out", "up_out")]
        output = Operation("row", "gate_out up_out", F, C, gated=True)
    attended, make_mid = branch("proj_out", Operation("row", ATTENTION, Q, C))
    computed, output = branch("mlp_out", output)
    return (Skeletal(INPUT, C),
            Skeletal(ATTENTION, Q, split=True),  # attention is what costs to compute again
            Skeletal("lse", split=True, per_head=True),
            *(normed(1, INPUT) if front else ()),
            columns("q", into[0], Q, rotary), columns("k", into[0], KV, rotary), columns("v", into[0], KV),
            *attended,
            Skeletal("mid", C, group="mid", made_by=make_mid),  # x + attention's branch
            *(normed(2, "mid") if front else ()),
            *hidden, *computed), output


@cache  # a search asks for the same one thousands of times
def decoder_layer(C: int, H: int, Hkv: int, D: int, F: int, norm: str = "layernorm", mlp: str = "gelu",
                  bias: bool = False, qkv_bias: bool = False, qk_norm: str = "", rope: bool = False,
                  metp: bool = False, subsequences: bool = False, fp8: bool = False,
                  norms: str = "before", held: int = 0) -> Layer:
    """Describes x -> mid = x + attention(norm x) -> mid + mlp(norm mid), Hkv heads of keys for H of queries,
    of which tp ranks hold so many in all, by default each once.
    norms=behind: mid = x + norm(attention(x)), and so on; both: x + norm(attention(norm x)). What a norm
    behind takes is kept. qk_norm: of q and k, over each "head", or "all" heads.
    mlp=gelu: fc2 gelu(fc1 x). mlp=swiglu: down (silu(gate x) * (up x)), geglu: with gelu for silu; the
    product of gate and up is made again from both wherever it is read: it costs no matrix product, and would
    be F elements a token more.
    metp: of what is made from matrices that travel, and travel again in the backward, only `mid` is kept, and
    what norms behind take.
    subsequences: there are several, so that keys and values are kept whole until the layer's last unit, and
    are no part of what alpha shares out. fp8: inputs of products that nothing else reads are kept in FP8."""
    Q, held = H * D, held or Hkv
    turned = rope and not qk_norm  # with norms q and k are kept as they were before these
    skeletal, output = decoder_tensors(C, Q, held * D, F, norm, mlp, turned, norms, fp8)
    operations = (*(t.made_by for t in skeletal if t.made_by), output)
    if subsequences:
        skeletal = tuple(replace(t, group=None) if t.name in KEYS_VALUES else t for t in skeletal)
    if metp:  # tokens are shared by the ranks that share the matrices: nothing is split
        kept = INPUT, ATTENTION, "lse", "proj_out", "mid", "mlp_out", *(KEYS_VALUES if subsequences else ())
        skeletal = tuple(replace(t, split=False) for t in skeletal if t.name in kept)
    places = [*["ln1", "ln2"] * (norms != "behind"), *["post1", "post2"] * (norms != "before")]
    parameters = decoder_parameters(C, Q, Hkv * D, D, F, mlp, bias, qkv_bias, qk_norm, places,
                                    None if metp else Hkv)
    return Layer(parameters, skeletal, operations, H, held, D)


def layer_of(cfg: Settings, kind: Kind | None = None) -> Layer:
    """Describes a layer, of `kind` where it matters whether that rotates positions in."""
    rope = kind.rope is not None if kind else cfg.position == "rope"
    return decoder_layer(cfg.n_embd, cfg.n_head, cfg.kv_heads, cfg.head_width, cfg.inner_width, cfg.norm,
                         cfg.mlp, cfg.bias, cfg.qkv_bias, cfg.qk_norm_over * cfg.qk_norm, rope, cfg.metp,
                         cfg.n_subsequences > 1, cfg.matmul == "fp8", cfg.norms, cfg.held_kv_heads)


# --- the shape of a run ---

def tensors_of(cfg: Settings, itemsize: int) -> dict[str, Tensor]:
    """Finds {name: Tensor} of one layer on one rank of a config."""
    return layer_of(cfg).tensors(cfg.batch_size, cfg.block_size // cfg.cp, itemsize, cfg.tp)


def groups_of(tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    """Lists the tensors of each group: {group: names}, in their order."""
    groups = dict.fromkeys(t.group for t in tensors.values() if t.group)
    return {group: [name for name, t in tensors.items() if t.group == group] for group in groups}


def n_rows(cfg: Settings) -> int:
    return cfg.batch_size * cfg.block_size // (cfg.cp * cfg.tp)


def logit_bytes(itemsize: int, fused: bool) -> int:
    """Counts the bytes of a logit with its softmax and its gradient, on a GPU. Fused kernels make all of them
    in one place, in the run's dtype; torch's have the softmax in fp32, which in fp32 becomes the gradient."""
    return itemsize if fused else 8


def head_rows(V: float, nbytes: int, cpu: bool) -> int:
    """Says for how many tokens logits exist at once: V columns on a rank, `nbytes` each."""
    if cpu:
        return HEAD_ROWS
    return HEAD_ROWS * min(MORE_HEAD_ROWS, max(1, int(HEAD_BYTES // (V * nbytes * HEAD_ROWS))))


def heads_at_once(rows: int, D: int, heads: int, multiple: int = 1, sharing: int = 1) -> int:
    """Counts the query heads that attention takes at a time: GROUP_ELEMENTS bounds (rows, heads, D)."""
    if rows * D * heads <= GROUP_ELEMENTS:
        return heads
    fitting = [n for n in range(multiple, heads + 1, multiple) if shares_heads(n, sharing)]
    return max((n for n in fitting if rows * D * n <= GROUP_ELEMENTS), default=fitting[0])


def head_groups(cfg: Settings) -> int:
    """Counts METP's groups of query heads, whose q, k, v exist one after the other: cfg.head_groups, or the
    fewest with METP_ELEMENTS in q, two of a tp rank if it has two heads of keys: the first hides nowhere."""
    if cfg.head_groups != "auto":
        return cfg.head_groups
    possible = possible_groups(cfg.n_head, cfg.kv_heads, cfg.tp)
    least = max(cfg.tp, min(2 * cfg.tp, cfg.kv_heads))
    elements = n_rows(cfg) // cfg.n_subsequences * cfg.n_head * cfg.head_width  # of a unit
    return next((n for n in possible if n >= least and elements // n <= METP_ELEMENTS), possible[-1])


def makes_queries_early(cfg: Settings) -> bool:
    """Says whether METP's backward, in a ring of two, makes queries a group ahead, keys and values two."""
    return cfg.token_ranks == 2 < head_groups(cfg)


def possible_groups(H: int, Hkv: int, tp: int = 1) -> list[int]:
    """Lists into how many groups H query heads can be cut: of one tp rank, sharing heads of keys evenly."""
    return [n for n in range(tp, H + 1, tp) if H % n == 0 and shares_heads(H // n, H // Hkv)]


def travelling(cfg: Settings) -> tuple[dict[str, int], dict[str, int]]:
    """Counts what METP sends between the ranks of tp: ({parameter: elements of a rank's part} of the MLP,
    {parameter: elements of a group of heads}); {} where it sends none."""
    if not cfg.metp or cfg.tp == 1:
        return {}, {}
    layer, groups = layer_of(cfg), head_groups(cfg)
    elements = {name: prod(p.shape) for name, p in layer.parameters.items() if p.split_dim is not None}
    part = {name: n // cfg.tp for name, n in elements.items() if name[0] not in "qkvp"}
    key_groups = min(groups, layer.kv_heads)
    return part, {name: n // (key_groups if name[0] in "kv" else groups) for name, n in elements.items()
                  if name not in part}


def keys_dealt(cfg: Settings) -> int:
    """Counts how often each head of keys lies in the pieces of all ranks of cp: Ulysses deals whole heads."""
    ranks = cfg.cp if cfg.context_parallel == "ulysses" else 1
    return ranks // gcd(cfg.held_kv_heads // cfg.tp, ranks)


def shares_heads(heads: int, sharing: int) -> bool:
    """Says whether a group of query heads has whole heads of keys, of `sharing` each, or part of one."""
    return heads % sharing == 0 or sharing % heads == 0


def group_heads(cfg: Settings, S: int | None = None) -> int:
    """Counts the query heads that attention takes at a time, of S tokens of each sequence, by default all."""
    rows = cfg.batch_size * (S or cfg.block_size) // cfg.cp
    if cfg.metp:
        return heads_at_once(rows // cfg.tp, cfg.head_width, cfg.n_head // head_groups(cfg),
                             sharing=cfg.n_head // cfg.kv_heads)
    multiple = cfg.cp if cfg.context_parallel == "ulysses" else 1
    return heads_at_once(rows, cfg.head_width, cfg.n_head // cfg.tp, multiple,
                         cfg.n_head // cfg.held_kv_heads)
