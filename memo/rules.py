"""The rules that keys of a Config must obey together: each names the keys, the rule, why, and a remedy. What
a key may be by itself is said at the key (memo/config.py)."""

import math

from memo.errors import ConfigError
from memo.formulas import parameters
from memo.layer import head_groups, possible_groups
from memo.rope import parse_scaling
from memo.settings import FP8_MULTIPLE, Settings

MOST_TOGETHER = {  # keys within their bounds may be too much together
    "batch_size*block_size/cp": (2**31, "rows of a rank are counted in 32 bits"),
    "gradient_accumulation_steps*batch_size*block_size":
        (2**40, "the ids of a step's tokens alone take 16 TiB"),
    "parameters": (10**14, "their states take 1.6e15 bytes; lower n_layer, n_embd, vocab_size or block_size"),
    "n_layer*subsequences": (10**5, "each unit of a step is planned; lower subsequences")}


def check_rules(cfg: Settings) -> None:
    """Errors: ConfigError: the keys of `cfg` do not go together."""
    check_heads(cfg)
    if cfg.bias and (cfg.norm, cfg.mlp) != ("layernorm", "gelu"):
        raise ConfigError(f"bias=True goes with norm=layernorm and mlp=gelu only, not norm={cfg.norm} "
                          f"and mlp={cfg.mlp}; leave it out, or give qkv_bias=True")
    if cfg.gelu != "exact" and cfg.mlp != "gelu":
        raise ConfigError(f"gelu={cfg.gelu} goes with mlp=gelu only; leave one of them out")
    scaling = parse_scaling(cfg.rope_scaling)
    if scaling.get("rope_type") == "yarn" and cfg.rope_theta == 1:
        raise ConfigError("rope_theta=1.0 must be above 1 for rope_type=yarn (all pairs turn equally "
                          "fast); raise it, or give rope_type linear")
    if scaling and cfg.position != "rope":
        raise ConfigError(f"rope_scaling goes with position=rope only, not position={cfg.position}; "
                          "leave one of them out")
    check_sizes(cfg)
    check_layout(cfg)
    if cfg.min_lr > cfg.learning_rate:
        raise ConfigError(f"min_lr={cfg.min_lr} must be <= learning_rate={cfg.learning_rate}; lower "
                          "min_lr")
    if cfg.decay_iters < cfg.warmup_iters:
        name = "lr_decay_iters" if cfg.lr_decay_iters else "max_iters"
        raise ConfigError(f"warmup_iters={cfg.warmup_iters} must be <= {name}={cfg.decay_iters}; lower "
                          f"warmup_iters, or raise {name}")
    if cfg.alpha != "auto" and cfg.activation != "memo":
        raise ConfigError(f"alpha={cfg.alpha} goes with activation=memo only, not "
                          f"activation={cfg.activation}; leave one of them out")
    check_states(cfg)
    if cfg.memory_plan == "off" and (cfg.memory_plan_check or cfg.solver != "auto"):
        name = "memory_plan_check" if cfg.memory_plan_check else "solver"
        raise ConfigError(f"{name}={getattr(cfg, name)} goes with memory_plan=bilevel only; leave one "
                          "of them out")
    if cfg.init_from not in ("scratch", "resume") and not cfg.init_from.startswith("hf:"):
        raise ConfigError(f"init_from={cfg.init_from!r} must be scratch, resume or hf:<folder>")


def check_heads(cfg: Settings) -> None:
    """Heads share the hidden size, or have a width of their own; query heads share those of keys."""
    C, H, Hkv = cfg.n_embd, cfg.n_head, cfg.kv_heads
    if not cfg.head_dim and H > C:
        raise ConfigError(f"n_head={H} must be at most n_embd={C} (each head has columns of its own); "
                          "lower n_head")
    if not cfg.head_dim and C % H:
        nearest = next(h for k in range(C) for h in (H - k, H + k) if h > 0 and C % h == 0)
        raise ConfigError(f"n_embd={C} % n_head={H} != 0 (heads share the hidden size equally); try "
                          f"n_head={nearest}, or give head_dim")
    if H % Hkv:
        nearest = next(h for k in range(H) for h in (Hkv - k, Hkv + k) if h > 0 and H % h == 0)
        raise ConfigError(f"n_head={H} % n_kv_head={Hkv} != 0 (each head of keys and values serves "
                          f"equally many of queries); try n_kv_head={nearest}")
    if cfg.position == "rope" and cfg.head_width % 2:
        name = "head_dim" if cfg.head_dim else "n_embd/n_head"
        raise ConfigError(f"{name}={cfg.head_width} must be even for position=rope (it rotates pairs); "
                          f"try another {'head_dim' if cfg.head_dim else 'n_head'} or position=learned")


def check_sizes(cfg: Settings) -> None:
    """What nothing could hold is refused here, before anything of that size is planned."""
    B, S = cfg.batch_size, cfg.block_size
    steps = 1 if cfg.gradient_accumulation_steps == "auto" else cfg.gradient_accumulation_steps
    found = (B * S // cfg.cp, steps * B * S,
             parameters(cfg) + (S * cfg.n_embd if cfg.position == "learned" else 0),
             cfg.n_layer * cfg.n_subsequences if cfg.n_subsequences > 1 else 0)
    for (what, (most, why)), value in zip(MOST_TOGETHER.items(), found, strict=True):
        if value > most:
            raise ConfigError(f"{what}={value} must be at most {most} ({why})")


def check_layout(cfg: Settings) -> None:
    """tp and cp must divide what they share out."""
    H, S, tp, cp = cfg.n_head, cfg.block_size, cfg.tp, cfg.cp
    if H % tp:
        raise ConfigError(f"n_head={H} % tp={tp} != 0 (the heads are shared out); try "
                          f"tp={math.gcd(H, tp)}")
    if cfg.metp:
        check_metp(cfg)
    elif cfg.head_groups != "auto":
        raise ConfigError(f"head_groups={cfg.head_groups} goes with tensor_parallel=metp only; leave it "
                          "out")
    elif cfg.kv_heads % tp:
        raise ConfigError(f"n_kv_head={cfg.kv_heads} % tp={tp} != 0 (the heads of keys and values are "
                          f"shared out); try tp={math.gcd(H, cfg.kv_heads, tp)} with more cp"
                          + ", or tensor_parallel=metp" * may_be_metp(cfg))
    if cfg.inner_width % tp:
        raise ConfigError(f"n_inner={cfg.inner_width} % tp={tp} != 0 (the MLP's columns are shared "
                          f"out); try tp={math.gcd(H, cfg.inner_width, tp)}")
    if cfg.context_parallel == "ulysses" and H // tp % cp:
        raise ConfigError(f"n_head/tp={H // tp} % cp={cp} != 0 (context_parallel=ulysses shares out a tp "
                          f"rank's heads again); try cp={math.gcd(H // tp, cp)} or context_parallel=ring")
    if S % cfg.block_multiple:
        rule, why = block_rule(cfg)
        most = max(1, S // cfg.block_multiple) * cfg.block_multiple
        raise ConfigError(f"block_size={S} % ({rule})={cfg.block_multiple} != 0 ({why}); try "
                          f"block_size={most}")
    if cfg.n_subsequences > (most := S // cfg.block_multiple):
        rule, _ = block_rule(cfg)
        raise ConfigError(f"subsequences={cfg.subsequences} must be at most {most} (each gets at least "
                          f"({rule})={cfg.block_multiple} of block_size={S} tokens); try "
                          f"subsequences={most}")
    check_stages(cfg)
    if cfg.matmul == "fp8":
        check_fp8(cfg)
    if cfg.vocab_size and cfg.padded_vocab_size % tp:
        raise ConfigError(f"V={cfg.padded_vocab_size} % tp={tp} != 0 (vocab_size={cfg.vocab_size}, "
                          "padded to a multiple of 128, is shared out); try "
                          f"tp={math.gcd(cfg.padded_vocab_size, tp)}")


def check_fp8(cfg: Settings) -> None:
    """A GPU's FP8 products take widths that are multiples of 16; of rows see block_rule."""
    D, tp = cfg.head_width, cfg.tp
    by, parts = ("head_groups", head_groups(cfg)) if cfg.metp else ("tp", tp)
    widths = {"n_embd": cfg.n_embd, "n_embd/tp": cfg.n_embd / (tp if cfg.metp else 1),
              "n_inner/tp": cfg.inner_width / tp, f"n_head*head_dim/{by}": cfg.n_head * D / parts,
              f"n_kv_head*head_dim/{by}": cfg.kv_heads * D / min(parts, cfg.kv_heads)}
    for name, width in widths.items():
        if width % FP8_MULTIPLE:
            raise ConfigError(f"{name}={width:g} % {FP8_MULTIPLE} != 0 (matmul=fp8: a GPU's FP8 products "
                              "take such widths only); try --matmul=bf16")


def check_stages(cfg: Settings) -> None:
    """Each stage has a layer, and goes over its layers subsequence by subsequence."""
    if cfg.pp == "auto":
        return
    if cfg.pp > cfg.n_layer:
        raise ConfigError(f"pp={cfg.pp} must be at most n_layer={cfg.n_layer} (each stage has whole "
                          f"layers); try pp={cfg.n_layer}")
    if cfg.pp > 1 and cfg.subsequences != 1 and cfg.unit_order == "layer":
        raise ConfigError(f"pp={cfg.pp} goes with unit_order=subsequence only, not layer (a stage hands "
                          "on what all its layers are done with); try "
                          "--unit_order=subsequence")
    if cfg.msp:
        check_msp(cfg)


def check_msp(cfg: Settings) -> None:
    rule = "stages that have nothing to compute help others"
    if cfg.pp == 1:
        raise ConfigError(f"msp=True goes with pp > 1 only, not pp=1 ({rule}); try --pp=2, or leave "
                          "it out")
    if cfg.subsequences != "auto" and cfg.subsequences < cfg.pp:
        raise ConfigError(f"msp=True needs at least pp={cfg.pp} subsequences, not {cfg.subsequences} "
                          f"({rule}, each only before or only behind its own); try "
                          f"--subsequences={cfg.pp}")


def check_states(cfg: Settings) -> None:
    """Layers that come take turns in two places: each comes once in a pass."""
    if cfg.states in ("auto", "device"):
        return
    if cfg.pp != 1:
        raise ConfigError(f"states={cfg.states} goes with pp=1 only, not pp={cfg.pp} (a stage needs "
                          "all its layers for each subsequence, so they stay); try --pp=1 with more tp "
                          "or cp, or --states=device")
    if cfg.unit_order == "subsequence" and cfg.subsequences != 1:
        raise ConfigError(f"states={cfg.states} goes with unit_order=layer only, not subsequence (all "
                          "layers would come for each subsequence); try --unit_order=layer")
    if cfg.states == "sharded" and cfg.optimizer_device == "cpu":
        raise ConfigError("states=sharded goes with optimizer_device=auto only, not cpu (shards stay on "
                          "the device, beside the optimizer's); try --states=host")


def check_metp(cfg: Settings) -> None:
    """Groups of heads must have equally many, of one tp rank, that share heads of keys evenly."""
    H, Hkv, tp, G = cfg.n_head, cfg.kv_heads, cfg.tp, cfg.head_groups
    if cfg.context_parallel == "ulysses" and cfg.cp * tp > 1:
        raise ConfigError("tensor_parallel=metp goes with context_parallel=ring only, not ulysses (its "
                          "keys and values go round all ranks that share a sequence); try "
                          "context_parallel=ring")
    if Hkv % tp and tp % Hkv:
        fits = max(n for n in possible_groups(H, Hkv) if n < tp)
        raise ConfigError(f"n_kv_head={Hkv} and tp={tp}: one must divide the other for "
                          "tensor_parallel=metp (a rank has whole heads of keys and values, or an equal "
                          f"part of one); try tp={fits} with more cp")
    if Hkv * cfg.head_width % tp:
        raise ConfigError(f"n_kv_head*head_dim={Hkv * cfg.head_width} % tp={tp} != 0 (the columns of "
                          "keys and values are shared out); try "
                          f"tp={math.gcd(H, Hkv * cfg.head_width, tp)}")
    if G == "auto":
        return
    possible = possible_groups(H, Hkv, tp)
    if G not in possible:
        nearest = min(possible, key=lambda n: abs(n - G))
        raise ConfigError(f"head_groups={G} must be a multiple of tp={tp} that divides n_head={H}, and "
                          f"divide n_kv_head={Hkv} or be a multiple of it (each group has equally many "
                          f"heads of one rank); try head_groups={nearest}, or auto")


def may_be_metp(cfg: Settings) -> bool:
    """Whether tensor_parallel=metp would do with more tp ranks than heads of keys."""
    return (cfg.tp % cfg.kv_heads == 0 and cfg.kv_heads * cfg.head_width % cfg.tp == 0
            and cfg.context_parallel == "ring")


def block_rule(cfg: Settings) -> tuple[str, str]:
    """What block_size, and each subsequence, must be a multiple of, in words, and why."""
    if cfg.matmul == "fp8":
        return f"{FP8_MULTIPLE}*cp*tp", f"matmul=fp8: a rank's rows come in multiples of {FP8_MULTIPLE}"
    if cfg.zigzag:
        return "2*cp*tp", "zigzag gives each rank two chunks"
    return "cp*tp", "the tokens are shared out"
