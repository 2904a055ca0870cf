"""The configuration: one frozen dataclass, whose keys obey the rules before a device is touched. A rule names
the keys, what they must obey, why, and a remedy. memo/config/settings.py says what a key may be by itself."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import takewhile

from memo.config.formulas import parameters
from memo.config.keys import Keys, Value, check_value, shown
from memo.config.layer import head_groups, possible_groups
from memo.config.rope import FACTORS, parse_scaling
from memo.config.settings import FP8_MULTIPLE, Settings, layer_names, slides
from memo.errors import ConfigError


@dataclass(frozen=True)
class Config(Settings):
    """Holds keys that obey the rules. Errors: ConfigError: one that does not."""

    def __post_init__(self) -> None:
        for name, f in KEYS.items():
            if (value := getattr(self, name)) is not f.default:  # a search makes thousands of configs
                check_value(f, value)
        for broken in broken_rules(self):
            raise ConfigError(broken)


KEYS = {f.name: f for f in fields(Config) if f.metadata}
# that the weights of a checkpoint depend on: the first section
MODEL_KEYS = tuple(takewhile(lambda name: name != "dataset", KEYS))
# that choose.choose() replaces by numbers and places, and on what of a run's layout these depend
SUBSEQUENCE_KEYS = ("subsequences", "subsequence_cut", "unit_order")
CHOSEN_KEYS = (*SUBSEQUENCE_KEYS, "pp", "states")
LAYOUT_KEYS = ("block_size", "batch_size", "tp", "tensor_parallel", "cp", "context_parallel", "pp")
# may change where positions are rotary
POSITION_KEYS = ("block_size", "rope_theta", "rope_scaling", "rope_local_theta")


def as_keys(cfg: Config) -> Keys:
    return {name: getattr(cfg, name) for name in KEYS}


# --- rules ---

def broken_rules(cfg: Settings) -> Iterator[str]:
    """Yields a line for each rule that the keys break. Only the first is sure: a rule may rest on others."""
    yield from broken_by_heads(cfg)
    if cfg.bias and (cfg.norm, cfg.mlp) != ("layernorm", "gelu"):
        yield (f"bias=True goes with norm=layernorm and mlp=gelu only, not norm={cfg.norm} and "
               f"mlp={cfg.mlp}; leave it out, or give qkv_bias=True")
    if cfg.gelu != "exact" and cfg.mlp != "gelu":
        yield f"gelu={cfg.gelu} goes with mlp=gelu only; leave one of them out"
    if cfg.qk_norm_over != "head" and not cfg.qk_norm:
        yield f"qk_norm_over={cfg.qk_norm_over} goes with qk_norm=True only; leave one of them out"
    scaling, part = parse_scaling(cfg.rope_scaling), cfg.partial_rotary_factor
    if scaling.get("rope_type") == "yarn" and cfg.rope_theta == 1:
        yield ("rope_theta=1.0 must be above 1 for rope_type=yarn (all pairs turn equally fast); raise it, "
               "or give rope_type linear")
    if (scaling or part != 1) and cfg.position != "rope":
        name = "rope_scaling" if scaling else f"partial_rotary_factor={part}"
        yield f"{name} goes with position=rope only, not position={cfg.position}; leave one of them out"
    yield from broken_by_factors(cfg, scaling)
    yield from broken_by_kinds(cfg)
    yield from broken_by_sizes(cfg)
    yield from broken_by_layout(cfg)
    if cfg.min_lr > cfg.learning_rate:
        yield f"min_lr={cfg.min_lr} must be <= learning_rate={cfg.learning_rate}; lower min_lr"
    if cfg.decay_iters < cfg.warmup_iters:
        name = "lr_decay_iters" if cfg.lr_decay_iters else "max_iters"
        yield (f"warmup_iters={cfg.warmup_iters} must be <= {name}={cfg.decay_iters}; lower warmup_iters, or "
               f"raise {name}")
    if cfg.alpha != "auto" and cfg.activation != "memo":
        yield (f"alpha={cfg.alpha} goes with activation=memo only, not activation={cfg.activation}; leave "
               "one of them out")
    if cfg.states not in ("auto", "device"):
        yield from broken_by_states(cfg)
    if cfg.pack != "best_fit" and not cfg.documents:
        yield f"pack={cfg.pack} goes with documents=true only; leave it out, or add --documents=true"
    if cfg.memory_plan == "off" and (cfg.memory_plan_check or cfg.solver != "auto"):
        name = "memory_plan_check" if cfg.memory_plan_check else "solver"
        yield f"{name}={getattr(cfg, name)} goes with memory_plan=bilevel only; leave one of them out"
    if cfg.init_from not in ("scratch", "resume") and not cfg.init_from.startswith("hf:"):
        yield f"init_from={cfg.init_from!r} must be scratch, resume or hf:<folder>"


def indivisible(what: str, value: int, by: str, n: int, why: str, remedy: str) -> Iterator[str]:
    """Yields the rule that `n`, which is called `by`, must divide `value`, where it does not."""
    if value % n:
        yield f"{what}={value} % {by}={n} != 0 ({why}); try {remedy}"


def broken_by_heads(cfg: Settings) -> Iterator[str]:
    """Checks that heads share the hidden size, or have their own width; query heads share those of keys."""
    C, H, Hkv = cfg.n_embd, cfg.n_head, cfg.kv_heads
    if not cfg.head_dim and H > C:
        yield f"n_head={H} must be at most n_embd={C} (each head has columns of its own); lower n_head"
    if not cfg.head_dim:
        nearest = next(h for k in range(H) for h in (H - k, H + k) if h > 0 and C % h == 0)
        yield from indivisible("n_embd", C, "n_head", H, "heads share the hidden size equally",
                               f"n_head={nearest}, or give head_dim")
    nearest = next(h for k in range(Hkv) for h in (Hkv - k, Hkv + k) if h > 0 and H % h == 0)
    yield from indivisible("n_head", H, "n_kv_head", Hkv, "each head of keys and values serves equally many "
                           "of queries", f"n_kv_head={nearest}")
    if cfg.position == "rope" and cfg.head_width % 2:
        name, key = ("head_dim", "head_dim") if cfg.head_dim else ("n_embd/n_head", "n_head")
        yield (f"{name}={cfg.head_width} must be even for position=rope (it rotates pairs); try another "
               f"{key} or position=learned")


def broken_by_kinds(cfg: Settings) -> Iterator[str]:
    """Checks that layer_types are kinds of layers, and that what is of some kinds has layers of these."""
    given, L, W, local = cfg.layer_types, cfg.n_layer, cfg.sliding_window, cfg.rope_local_theta
    try:
        names = layer_names(given or ("sliding" if W else "full"))
    except ValueError:
        yield (f"layer_types={shown(given)} must be kinds of layers, sliding or full or either with -nope, "
               "each with how often it follows itself, as in sliding*5,full")
        return
    some = any(map(slides, names))
    if len(names) > L:
        yield (f"layer_types={shown(given)} has {len(names)} layers, more than n_layer={L}; leave some out, "
               "for they come over and over")
    if given and some != bool(W):
        yield (f"layer_types={shown(given)} has {'a' if some else 'no'} sliding layer and sliding_window="
               f"{W}; " + ("give the tokens that it sees" if some else "leave one of them out"))
    if (local or any("-" in name for name in names)) and cfg.position != "rope":
        key = f"rope_local_theta={local}" if local else f"layer_types={shown(given)}"
        yield f"{key} goes with position=rope only, not position={cfg.position}; leave one of them out"
    if local and not some:
        yield (f"rope_local_theta={local} goes with sliding layers only, and there is none; leave it out, or "
               "give a sliding_window")
    if cfg.query_scalar and (cfg.position != "rope" or any("-" in name for name in names)
                             or cfg.partial_rotary_factor != 1):
        yield (f"query_scalar={cfg.query_scalar} goes with positions rotated into all elements by every "
               "layer only (queries are scaled there); leave it out")
    if 0 < local < 1:
        yield f"rope_local_theta={local} must be 0 or at least 1; raise it"


def broken_by_factors(cfg: Settings, scaling: Mapping[str, Value]) -> Iterator[str]:
    """Checks that pairs of elements rotate, and that each has its factor."""
    R, part = cfg.rotary_width, cfg.partial_rotary_factor
    if part != 1 and (R < 2 or R % 2):
        yield (f"partial_rotary_factor={part} of head_dim={cfg.head_width} elements are {R}, which must be "
               f"even and at least 2 (they rotate in pairs); try {max(2, R - R % 2) / cfg.head_width}")
    for name in FACTORS:
        if name in scaling and len(scaling[name]) != R // 2:
            yield (f"rope_scaling's {name} has {len(scaling[name])} numbers, must have {R // 2} (one for "
                   "each pair of a head's elements that rotates); give the model's own")


def broken_by_sizes(cfg: Settings) -> Iterator[str]:
    """Refuses what nothing could hold, before anything of that size is planned: keys within their bounds may
    be too much together."""
    B, S = cfg.batch_size, cfg.block_size
    for what, value, most, why in (
            ("batch_size*block_size/cp", B * S // cfg.cp, 2**31, "rows of a rank are counted in 32 bits"),
            ("gradient_accumulation_steps*batch_size*block_size", cfg.micro_batches(1) * B * S, 2**40,
             "the ids of a step's tokens alone take 16 TiB"),
            ("parameters", parameters(cfg) + (S * cfg.n_embd if cfg.position == "learned" else 0), 10**14,
             "their states take 1.6e15 bytes; lower n_layer, n_embd, vocab_size or block_size"),
            ("n_layer*subsequences", cfg.n_layer * cfg.n_subsequences if cfg.n_subsequences > 1 else 0, 10**5,
             "each unit of a step is planned; lower subsequences")):
        if value > most:
            yield f"{what}={value} must be at most {most} ({why})"


def broken_by_layout(cfg: Settings) -> Iterator[str]:
    """Checks that tp and cp divide what they share out."""
    H, Hkv, F, S, tp, cp = cfg.n_head, cfg.kv_heads, cfg.inner_width, cfg.block_size, cfg.tp, cfg.cp
    yield from indivisible("n_head", H, "tp", tp, "the heads are shared out", f"tp={math.gcd(H, tp)}")
    if Hkv % tp and tp % Hkv:
        fits = max(n for n in possible_groups(H, Hkv) if n < tp)
        yield (f"n_kv_head={Hkv} and tp={tp}: one must divide the other (a rank has whole heads of keys and "
               f"values, or equally many ranks share one); try tp={fits} with more cp")
    if cfg.metp:
        yield from broken_by_metp(cfg)
    elif cfg.head_groups != "auto":
        yield f"head_groups={cfg.head_groups} goes with tensor_parallel=metp only; leave it out"
    yield from indivisible("n_inner", F, "tp", tp, "the MLP's columns are shared out",
                           f"tp={math.gcd(H, F, tp)}")
    if cfg.context_parallel == "ulysses":
        yield from indivisible("n_head/tp", H // tp, "cp", cp, "context_parallel=ulysses shares out a tp "
                               "rank's heads again", f"cp={math.gcd(H // tp, cp)} or context_parallel=ring")
    (rule, why), unit = block_rule(cfg), cfg.block_multiple
    most = S // unit
    yield from indivisible("block_size", S, f"({rule})", unit, why, f"block_size={max(1, most) * unit}")
    if cfg.n_subsequences > most:
        yield (f"subsequences={cfg.subsequences} must be at most {most} (each gets at least ({rule})={unit} "
               f"of block_size={S} tokens); try subsequences={most}")
    if cfg.pp != "auto":
        yield from broken_by_stages(cfg)
    if cfg.matmul == "fp8":
        yield from broken_by_fp8(cfg)
    V = cfg.padded_vocab_size
    yield from indivisible("V", V, "tp", tp, f"vocab_size={cfg.vocab_size}, padded to a multiple of 128, is "
                           "shared out", f"tp={math.gcd(V, tp)}")


def broken_by_fp8(cfg: Settings) -> Iterator[str]:
    """Checks the widths: a GPU's FP8 products take multiples of 16 only; of rows see block_rule."""
    D, tp = cfg.head_width, cfg.tp
    by, parts = ("head_groups", head_groups(cfg)) if cfg.metp else ("tp", tp)
    widths = {"n_embd": cfg.n_embd, "n_embd/tp": cfg.n_embd / (tp if cfg.metp else 1),
              "n_inner/tp": cfg.inner_width / tp, f"n_head*head_dim/{by}": cfg.n_head * D / parts,
              f"n_kv_head*head_dim/{by}": cfg.kv_heads * D / min(parts, cfg.kv_heads)}
    for name, width in widths.items():
        if width % FP8_MULTIPLE:
            yield (f"{name}={width:g} % {FP8_MULTIPLE} != 0 (matmul=fp8: a GPU's FP8 products take such "
                   "widths only); try --matmul=bf16")


def broken_by_stages(cfg: Settings) -> Iterator[str]:
    """Checks that each stage has a layer, and goes over its layers subsequence by subsequence."""
    if cfg.pp > cfg.n_layer:
        yield (f"pp={cfg.pp} must be at most n_layer={cfg.n_layer} (each stage has whole layers); try "
               f"pp={cfg.n_layer}")
    if cfg.pp > 1 and cfg.subsequences != 1 and cfg.unit_order == "layer":
        yield (f"pp={cfg.pp} goes with unit_order=subsequence only, not layer (a stage hands on what all its "
               "layers are done with); try --unit_order=subsequence")
    rule = "stages that have nothing to compute help others"
    if cfg.msp and cfg.pp == 1:
        yield f"msp=True goes with pp > 1 only, not pp=1 ({rule}); try --pp=2, or leave it out"
    if cfg.msp and cfg.subsequences != "auto" and cfg.subsequences < cfg.pp:
        yield (f"msp=True needs at least pp={cfg.pp} subsequences, not {cfg.subsequences} ({rule}, each only "
               f"before or only behind its own); try --subsequences={cfg.pp}")


def broken_by_states(cfg: Settings) -> Iterator[str]:
    """Checks that layers that come, which take turns in two places, come once in a pass."""
    if cfg.pp != 1:
        yield (f"states={cfg.states} goes with pp=1 only, not pp={cfg.pp} (a stage needs all its layers for "
               "each subsequence, so they stay); try --pp=1 with more tp or cp, or --states=device")
    if cfg.unit_order == "subsequence" and cfg.subsequences != 1:
        yield (f"states={cfg.states} goes with unit_order=layer only, not subsequence (all layers would come "
               "for each subsequence); try --unit_order=layer")
    if cfg.states == "sharded" and cfg.optimizer_device == "cpu":
        yield ("states=sharded goes with optimizer_device=auto only, not cpu (shards stay on the device, "
               "beside the optimizer's); try --states=host")


def broken_by_metp(cfg: Settings) -> Iterator[str]:
    """Checks that groups have equally many heads, of one tp rank, that share heads of keys evenly."""
    H, Hkv, tp, G = cfg.n_head, cfg.kv_heads, cfg.tp, cfg.head_groups
    columns = Hkv * cfg.head_width
    if cfg.qk_norm_over != "head":
        yield (f"tensor_parallel=metp goes with qk_norm_over=head only, not {cfg.qk_norm_over} (a group of "
               "heads has a part of what is normed); try tensor_parallel=megatron")
    if cfg.context_parallel == "ulysses" and cfg.cp * tp > 1:
        yield ("tensor_parallel=metp goes with context_parallel=ring only, not ulysses (its keys and values "
               "go round all ranks that share a sequence); try context_parallel=ring")
    yield from indivisible("n_kv_head*head_dim", columns, "tp", tp, "the columns of keys and values are "
                           "shared out", f"tp={math.gcd(H, columns, tp)}")
    if G != "auto" and G not in (possible := possible_groups(H, Hkv, tp)):
        yield (f"head_groups={G} must be a multiple of tp={tp} that divides n_head={H}, and divide "
               f"n_kv_head={Hkv} or be a multiple of it (each group has equally many heads of one rank); try "
               f"head_groups={min(possible, key=lambda n: abs(n - G))}, or auto")


def block_rule(cfg: Settings) -> tuple[str, str]:
    """Says what block_size, and each subsequence, must be a multiple of, in words, and why."""
    if cfg.matmul == "fp8":
        return f"{FP8_MULTIPLE}*cp*tp", f"matmul=fp8: a rank's rows come in multiples of {FP8_MULTIPLE}"
    if cfg.zigzag:
        return "2*cp*tp", "zigzag gives each rank two chunks"
    return "cp*tp", "the tokens are shared out"
