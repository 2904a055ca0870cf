"""How a config is laid out: what was decided, which layers a stage has, how many ranks share what, and the
communicators that they need. No torch; memo/parallel/mesh.py puts ranks on axes."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Self

from memo.config.config import CHOSEN_KEYS, Config, as_keys
from memo.config.formulas import head_share, layer_forward_terms, percent, squares_met
from memo.config.keys import Value
from memo.config.msp import Shares
from memo.config.settings import Kind
from memo.errors import ConfigError

# torch's pool has 32 streams of that priority, one for a checkpoint's copies; streams.py has the other pool
MOST_COMMUNICATORS = 31
LANES = 2  # communicators of two stages that compute for each other: one for each direction

StageKind = tuple[bool, bool, tuple[Kind, ...]]


@dataclass(frozen=True)
class Layout(Config):
    """Holds a config with what was decided: stages, subsequences, where states are, this rank's stage, what
    stages compute for each other. Where it still says "auto", cuts are equal, and one stage goes by layer."""

    pp: int = 1
    subsequences: int = 1
    states: str = "device"
    stage: int = 0
    shares: Shares = ()
    leads: tuple[int, ...] = ()  # of a next sequence: subsequences that each stage computes before a backward

    @classmethod
    def of(cls, config: Config, **decided: Value) -> Self:
        """Lays out `config` with keys `decided`; else stage 0 of 1, 1 subsequence, states on the device."""
        keys = {name: value for name, value in (as_keys(config) | decided).items()
                if name not in CHOSEN_KEYS or value != "auto"}
        return cls(**keys)

    @classmethod
    def whole(cls, config: Config, **changed: Value) -> Self:
        """Lays out the model of `config` in one stage, with the keys that are `changed`."""
        return cls.of(config, pp=1, msp=False, **changed)

    def of_rank(self, rank: int, world: int) -> Self:
        """Lays out one of `world` ranks, of which those of a stage follow each other."""
        return replace(self, stage=rank // (world // self.pp))

    @cached_property
    def every_stage(self) -> tuple[Self, ...]:
        return tuple(self if stage == self.stage else replace(self, stage=stage) for stage in range(self.pp))

    @property
    def depths(self) -> tuple[int, ...]:
        """Counts the layers of each stage."""
        return layers_of_stages(self.n_layer, self.pp, head_share(self))

    @cached_property
    def stage_kinds(self) -> tuple[Kind, ...]:
        """Lists the Kind of each layer of this rank's stage."""
        return tuple(self.kinds[k] for k in self.layers)

    @property
    def layers_alike(self) -> bool:
        return len({*self.stage_kinds}) == 1

    @property
    def layers(self) -> range:
        """Numbers the layers of this rank's stage in the whole model."""
        depths, k = self.depths, self.stage
        return range(sum(depths[:k]), sum(depths[:k + 1]))

    @property
    def lead(self) -> int:
        """Counts the subsequences of a next sequence that this stage computes before a backward."""
        return self.leads[self.stage] if self.leads else 0

    @property
    def early(self) -> int:
        """Counts those that it receives during it: the stage before leads them."""
        return self.leads[self.stage - 1] - self.lead if self.leads and self.stage else 0

    @property
    def has_embedding(self) -> bool:
        return self.stage == 0

    @property
    def has_head(self) -> bool:
        """Says whether this rank's stage is the last, which has the final norm and the head."""
        return self.stage == self.pp - 1

    @property
    def stage_kind(self) -> StageKind:
        """Tells stages apart: (has it the embedding, has it the head, which layers)."""
        return self.has_embedding, self.has_head, self.stage_kinds

    @property
    def ties_stages(self) -> bool:
        """Says whether the first and the last stage hold the same matrix, the embedding's and the head's."""
        return self.pp > 1 and self.tie_embeddings

    @property
    def by_layer(self) -> bool:
        return self.subsequences == 1 or (self.unit_order != "subsequence" and self.pp == 1)

    @property
    def layers_come(self) -> bool:
        """Says whether a layer's parameters come to the device for each pass, and its gradients leave."""
        return self.states != "device"

    @property
    def edges_come(self) -> bool:
        """Says whether embedding and head come: not where one matrix is both; see program.py: coming."""
        return self.layers_come and not self.tie_embeddings

    @property
    def optimizer_on_host(self) -> bool:
        """Says whether master weights, moments and steps are the host's."""
        return self.optimizer_device == "cpu" or self.states == "host"


@lru_cache(64)
def layers_of_stages(layers: int, pp: int, head: float) -> tuple[int, ...]:
    """Counts the layers of `pp` stages, at least one each, for equal FLOPs: the last stage has the head,
    worth `head` layers; looking up the embedding takes none. Source: SPPO 3.3."""
    if pp == 1:
        return layers,

    def longest(last: int) -> float:
        return max(-(-(layers - last) // (pp - 1)), last + head)
    # of equally good cuts, take the one where the last stage has most
    last = min(range(layers - pp + 1, 0, -1), key=longest)
    each, more = divmod(layers - last, pp - 1)
    return *(each + (k < more) for k in range(pp - 1)), last


def degrees(cfg: Config, world: int) -> int:
    """Finds dp. Errors: ConfigError: the layout does not fill the world, or batches cannot be shared out."""
    ranks = cfg.pp * cfg.cp * cfg.tp  # that share a model
    dp = max(1, world // ranks)
    if dp * ranks != world:
        pp, also = (text * (cfg.pp > 1) for text in (f"pp({cfg.pp})*", "pp, "))
        raise ConfigError(f"{pp}dp({dp})*cp({cfg.cp})*tp({cfg.tp}) != WORLD_SIZE({world}); start it with "
                          f"torchrun --nproc_per_node={ranks} (or a multiple) on one node, or "
                          f"change {also}tp or cp")
    if (given := cfg.micro_batches(dp)) % dp:
        raise ConfigError(f"gradient_accumulation_steps={given} % dp={dp} != 0 (a step's micro batches are "
                          f"dealt to the dp ranks); try auto, or "
                          f"--gradient_accumulation_steps={-(-given // dp) * dp}")
    return dp


def communicators(tp: int, cp: int, dp: int, metp: bool = False, pp: int = 1,
                  layers_come: bool = False) -> dict[str, str]:
    """Lists {axis: the axis whose communicator carries its messages} of the axes with several ranks, but for
    a pipeline's neighbours. Each has its own, for a communicator does what it is given in order; only `world`
    shares that of an axis with the same ranks: it sums scalars when the other has nothing under way."""
    sizes = dict(tp=tp, hops=tp if metp else 1, cp=cp * tp if metp else cp, data=dp * cp,
                 shards=dp * cp if layers_come else 1, world=pp * dp * cp * tp)
    carriers = {name: name for name, size in sizes.items() if size > 1}
    for name in ("tp", "data"):
        if 1 < sizes[name] == sizes["world"]:
            carriers["world"] = name
    return carriers


def n_communicators(cfg: Layout, world: int) -> int:
    """Counts a rank's communicators between GPUs: of its axes; two with each neighbour of a pipeline; one for
    gradients of a matrix that the first and last stage hold. LANES for each helper are made later."""
    dp, neighbours = world // (cfg.pp * cfg.cp * cfg.tp), (not cfg.has_embedding) + (not cfg.has_head)
    carriers = set(communicators(cfg.tp, cfg.cp, dp, cfg.metp, cfg.pp, cfg.layers_come).values())
    return len(carriers) + 2 * neighbours + (cfg.ties_stages and neighbours < 2)


def check_streams(cfg: Layout, world: int) -> None:
    """Raises ConfigError where communicators outnumber streams: two on one might wait in a circle."""
    if not cfg.msp:  # without it a stage has few
        return
    most = LANES * (cfg.pp - 1) + max(n_communicators(stage, world) for stage in cfg.every_stage)
    if most > MOST_COMMUNICATORS:
        fits = cfg.pp - -(-(most - MOST_COMMUNICATORS) // LANES)
        raise ConfigError(f"pp={cfg.pp} with msp=True needs {most} communicators on a GPU, there are streams "
                          f"for {MOST_COMMUNICATORS} (each needs one of its own); try pp={fits} or less, or "
                          "leave msp out")


# --- where a sequence is cut into subsequences ---

# At multiples of 128 * cfg.layout_multiple, so that products are aligned; where these are too few, or do not
# fill the sequence, of cfg.block_multiple

ALIGNED = 128  # multiples of what the layout needs


@lru_cache(64)
def subsequence_lengths(cfg: Layout, S: int | None = None) -> tuple[int, ...]:
    """Counts the tokens of each subsequence of S, a multiple of cfg.block_multiple (default: block_size).
    Another length may have fewer, none shorter than 128 * cfg.layout_multiple."""
    S, aligned = S or cfg.block_size, ALIGNED * cfg.layout_multiple
    N = max(1, min(cfg.subsequences, S // (cfg.block_multiple if cfg.block_size == S else aligned)))
    multiple = aligned if S % aligned == 0 and N * aligned <= S else cfg.block_multiple
    count = S // multiple
    counts = (equal_flops(*layer_forward_terms(cfg), cfg.windows, count, multiple, N)
              if cfg.subsequence_cut == "flops"
              else [count // N + (i < count % N) for i in range(N)])  # the earlier ones have one more
    return tuple(n * multiple for n in counts)


def pieces_near(cfg: Layout, S: int | None = None) -> tuple[int, ...]:
    """Counts for each layer of a stage how many subsequences' keys a unit reads at most, its own among them;
    (): all up to its own, in all layers. Stages that compute for each other lend all of them."""
    lengths = subsequence_lengths(cfg, S)

    def near(window: int) -> int:
        if not window:
            return len(lengths)
        ends = [*accumulate(lengths, initial=0)]
        oldest = (max(0, first - window + 1) for first in ends[:-1])  # token that is seen
        return max(i + 2 - bisect_right(ends, token) for i, token in enumerate(oldest))
    found = {window: near(window) for window in {kind.window for kind in cfg.stage_kinds}}
    alone = all(cfg.stage not in (piece.stage, piece.helper) for piece in cfg.shares)
    slides = alone and min(found.values()) < len(lengths)
    return tuple(found[kind.window] for kind in cfg.stage_kinds) if slides else ()


def slice_lengths(cfg: Layout, S: int | None = None) -> list[tuple[int, ...]]:
    """Counts each subsequence's tokens by slices, each dealt by itself to the ranks that share it. Slices end
    where helped rows end, so that what comes before them on a rank comes before them on all."""
    lengths = subsequence_lengths(cfg, S)
    if cfg.token_ranks == 1 or S not in (None, cfg.block_size):
        return [(n,) for n in lengths]
    ends = [{n} for n in lengths]
    for piece in cfg.shares:
        ends[piece.subsequence] |= {rows * cfg.cp * cfg.tp // cfg.batch_size
                                    for rows in (piece.first, piece.end)}
    return [tuple(end - first for first, end in pairwise(sorted({0} | inner))) for inner in ends]


def unit_rows(cfg: Layout, B: int, T: int) -> tuple[int, ...]:
    """Counts a rank's own rows of each subsequence, of B sequences with T tokens on a rank of cp."""
    return tuple(B * n // (cfg.cp * cfg.tp) for n in subsequence_lengths(cfg, T * cfg.cp))


@lru_cache(512)  # configs that differ in other keys alone have the same
def equal_flops(linear: int, square: int, window: tuple[int, float], count: int, multiple: int,
                N: int) -> list[int]:
    """Deals `count` multiples to N subsequences, at least one each, with equal FLOPs of a layer's forward.
    `window`: as squares_met() takes it."""
    def flops(k: int) -> float:  # asked for thousands of times
        return N * (linear * multiple * k + square * squares_met(multiple * k, *window))
    ends = [0]
    for i in range(1, N):
        wanted = i * flops(count) // N
        k = bisect_left(range(count), wanted, key=flops)  # the first that has as many
        nearest = min((max(0, k - 1), k), key=lambda k: abs(flops(k) - wanted))
        ends.append(min(max(nearest, ends[-1] + 1), count - (N - i)))
    return [end - first for first, end in pairwise([*ends, count])]


def pipeline_line(cfg: Layout, sequences: int) -> str:
    """Describes the layers of each stage, and how long stages wait for each other in a step of so many
    sequences; "" for one stage."""
    if cfg.pp == 1:
        return ""
    N, follow = len(subsequence_lengths(cfg)), any(cfg.leads)
    s, slots = "s" * (N > 1), N * (sequences if follow else 1)
    return (f"pipeline    {cfg.pp} stages of {', '.join(map(str, cfg.depths))} layers, {N} subsequence{s}: "
            f"bubble {cfg.pp - 1}/{slots} = {percent((cfg.pp - 1) / slots)} of the computing"
            + f", {sequences} sequences follow each other" * follow)


def subsequences_line(cfg: Layout, chosen: str = "") -> str:
    """Describes how a sequence is cut, and its units' order; "" where it is not cut. `chosen`: why so."""
    lengths, why = subsequence_lengths(cfg), f": {chosen}" * bool(chosen)
    if len(lengths) == 1:
        return f"sequence    1 subsequence{why}" * bool(chosen)
    shortest, most = min(lengths), max(lengths)
    each = f"{most:,}" if shortest == most else f"{shortest:,} to {most:,}"
    order = "layer by layer" if cfg.by_layer else "subsequence by subsequence"
    return f"sequence    {len(lengths)} subsequences of {each} tokens, {order}{why}"
