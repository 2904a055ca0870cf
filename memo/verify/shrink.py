"""A run cut to a size at which a CPU verifies it in seconds, with its structure as it was."""

import json
from dataclasses import replace
from math import gcd, lcm, prod
from typing import NamedTuple

from memo.config.config import Config, as_keys
from memo.config.keys import Keys
from memo.config.rope import FACTORS, attention_factor, parse_scaling
from memo.config.settings import Settings

MOST_RANKS = 8
# where units want more tokens, rows are split more finely. Attention grows with their square: four ranks take
# 135 s of CPU with 4096 of them, so eight with 8192 would be far above the 240 s that they may take
MOST_TOKENS = 4096
UNIT_ROWS, FINE_ROWS = 256, 32  # rows are swapped in multiples of UNIT_ROWS: see layer.SPLIT_ROWS
LEAST_TOKENS = 1536  # more than the head takes at once
UNPLANNED: Keys = dict(memory_plan="off", memory_plan_check=False, solver="auto")  # a plan takes seconds
# of one process: what is left of a config without them is the model
PLAIN: Keys = UNPLANNED | dict(tp=1, cp=1, pp=1, msp=False, tensor_parallel="megatron", head_groups="auto",
                   context_parallel="ring", subsequences=1, subsequence_cut="auto", unit_order="auto",
                   states="device", optimizer_device="auto", activation="keep", alpha="auto")


def cut_degrees(degrees: dict[str, int], most: int = MOST_RANKS) -> dict[str, int]:
    """Lowers the largest degrees to divisors of theirs, above one, until at most so many ranks are left."""
    cut = dict(degrees)
    while prod(cut.values()) > most:
        lower = {n: name for name, n in cut.items() if any(n % k == 0 for k in range(2, n))}
        if not lower:
            break
        n = max(lower)
        cut[lower[n]] = max(k for k in range(2, n) if n % k == 0)
    return cut


def cut_widths(cfg: Config, tp: int) -> Keys:
    """Cuts heads, hidden size, MLP and vocabulary, in proportion; how many heads there are stays."""
    H, D, C, fp8 = cfg.n_head, cfg.head_width, cfg.n_embd, cfg.matmul == "fp8"
    multiple = 16 if fp8 else 2  # FP8 products take multiples of 16; rotary positions turn pairs
    least = max(16 if fp8 else 4 if H > 16 and not cfg.rope_scaling else 8, 64 // H)
    width = min(D, -(-least // multiple) * multiple) if D % 2 == 0 else D
    while width < D and int(width * cfg.partial_rotary_factor) not in range(2, D + 1, 2):
        width += multiple
    hidden = H * width if not cfg.head_dim else max(16, round(C * width / D / 16) * 16)
    columns = lcm(16, tp) * (tp if fp8 else 1)
    inner = max(1, round(cfg.inner_width / C * hidden / columns)) * columns
    padded = lcm(128, tp) * (2 if tp == 1 or 128 % tp == 0 else 1)
    return dict(head_dim=width if cfg.head_dim else 0, n_embd=min(C, hidden) if not cfg.head_dim else hidden,
                n_inner=inner, vocab_size=padded - 6 * (not cfg.vocab_size or cfg.vocab_size % 128 > 0))


def cut_factors(cfg: Config, keys: Keys) -> Keys:
    """Cuts LongRoPE's lists to the pairs that are left, and the length by which S chooses between them."""
    scaling, S = parse_scaling(cfg.rope_scaling), keys["block_size"]
    if scaling.get("rope_type") != "longrope":
        return {}
    pairs = Settings(**as_keys(cfg) | keys).rotary_width // 2
    lists = {name: scaling[name][:pairs] for name in FACTORS}
    length = scaling["original_max_position_embeddings"]
    length = min(length, S // 2) if cfg.block_size > length else max(length, S)
    given = dict(original_max_position_embeddings=length, attention_factor=attention_factor(scaling))
    return dict(rope_scaling=json.dumps(json.loads(cfg.rope_scaling) | lists | given))


def most_pieces(cfg: Config, ranks: int) -> int:
    """Counts the subsequences of a cut run of so many ranks that share a sequence: one before, between and
    behind others; two where METP would send messages for 400 s of CPU."""
    return 2 if cfg.metp and ranks > 4 else 3


def cut_tokens(cfg: Config, keys: Keys) -> tuple[int, int]:
    """Finds (block_size, the rows that units are swapped in multiples of): the shortest with which each unit
    is swapped in part, and the head takes several chunks."""
    ranks, N, B = keys["tp"] * keys["cp"], keys["subsequences"], keys["batch_size"]
    N, split = most_pieces(cfg, ranks) if N == "auto" else N, UNIT_ROWS
    tokens = max(LEAST_TOKENS, 2 * split * N * ranks if N > 1 else split * ranks)
    if tokens > MOST_TOKENS and N > 1:
        split = FINE_ROWS
        tokens = max(LEAST_TOKENS, 2 * split * N * ranks)
    multiple = lcm(128, 16 * keys["cp"] * keys["tp"] * N)
    wanted = -(-tokens // B // multiple) * multiple
    return (wanted if wanted <= cfg.block_size else cfg.block_size), split


class Cut(NamedTuple):
    """Holds a run cut to verify: `cfg`, in fp32; `low`: keys of its own precision, {} where that is fp32;
    `split`: rows that units are swapped in multiples of; its ranks; what was cut, in words."""

    cfg: Config
    low: Keys
    split: int
    ranks: int
    words: list[str]


def shrink(cfg: Config, world: int, full: bool = False) -> Cut:
    """Cuts a run of `world` ranks. `full`: widths stay. Errors: ConfigError."""
    pp = 1 if cfg.pp == "auto" else cfg.pp
    given = dict(tp=cfg.tp, cp=cfg.cp, pp=pp, dp=world // (cfg.tp * cfg.cp * pp))
    degrees = cut_degrees(given)
    dp, N = degrees["dp"], cfg.subsequences
    keys: Keys = {name: degrees[name] for name in ("tp", "cp", "pp")}
    most = max(degrees["pp"] * cfg.msp, most_pieces(cfg, degrees["tp"] * degrees["cp"]))
    keys["subsequences"] = min(N, most) if N != "auto" else most if cfg.msp else N
    wanted = 2 * degrees["pp"] if degrees["pp"] > 1 else 4 if keys["subsequences"] == 1 else 3
    types = [*dict.fromkeys(cfg.types)] if cfg.layer_types else []  # one layer of each kind will do
    keys |= dict(n_layer=min(cfg.n_layer, max(wanted, len(types))), layer_types=",".join(types),
                 batch_size=min(cfg.batch_size, 2))
    if cfg.gradient_accumulation_steps != "auto":
        keys["gradient_accumulation_steps"] = dp * min(2, cfg.gradient_accumulation_steps // given["dp"])
    if cfg.held_kv_heads > cfg.kv_heads:  # as many ranks hold each head of keys, as far as there are some
        keys["n_kv_head"] = gcd(degrees["tp"], max(1, cfg.kv_heads * degrees["tp"] // cfg.tp))
    keys |= {} if full else cut_widths(cfg, degrees["tp"])
    keys["block_size"], split = cut_tokens(cfg, keys)
    factors = cut_factors(cfg, keys)
    if cfg.window:
        keys["sliding_window"] = min(cfg.window, keys["block_size"] // 3)
    before = {name: getattr(cfg, name) for name in keys} | dict(head_dim=cfg.head_width, dp=given["dp"],
                                                                n_inner=cfg.inner_width)
    after = keys | dict(head_dim=keys.get("head_dim") or keys.get("n_embd", cfg.n_embd) // cfg.n_head, dp=dp)
    cut = [f"{name} {before[name]} -> {value}" for name, value in after.items() if before[name] != value]
    if split != UNIT_ROWS:
        cut.append(f"rows split by {split} in place of {UNIT_ROWS}: modes agree to 1e-6, not to the last bit")
    if cfg.pp == "auto":
        cut.append("pp=auto -> 1: give --pp= of the run")
    cut += ["rope_scaling has fewer factors and another original length"] * bool(factors)
    exact, low = precisions(cfg)
    keys |= factors | steps_of(cfg) | exact
    return Cut(replace(cfg, **keys), low, split, prod(degrees.values()), cut)


def steps_of(cfg: Config) -> Keys:
    """Lists the keys of three steps of a run that shows, evaluates and saves what it must."""
    faster = max(1.0, 1e-3 / cfg.learning_rate) if cfg.learning_rate else 1.0  # above the rounding of weights
    return dict(init_from="scratch", eval_interval=2, eval_iters=2, save_interval=2, max_iters=3,
                warmup_iters=min(2, cfg.warmup_iters), lr_decay_iters=0, log_interval=1, keep_checkpoints=3,
                stall_timeout=0.0, wandb_log=False, check_data=False, min_lr=cfg.min_lr * faster,
                learning_rate=cfg.learning_rate * faster, memory_plan_check=cfg.memory_plan != "off",
                host_memory_gb="auto" if cfg.host_memory_gb == "auto" else 16.0)


def precisions(cfg: Config) -> tuple[Keys, Keys]:
    """Lists (the keys of a run in fp32, on a device that is there; those of its own precision, or {})."""
    low, cuda = Keys(), cfg.device == "cuda"
    if cfg.matmul == "fp8" or cfg.dtype == "bfloat16" or (cuda and cfg.dtype == "auto"):
        low = dict(dtype="bfloat16" if cfg.dtype != "float32" else "float32", matmul=cfg.matmul)
        low |= dict(attention=cfg.attention) if cuda else {}
    return dict(device="cuda" if cuda else "cpu", dtype="float32", matmul="bf16",
                ops=cfg.ops if cuda else "auto",
                attention=cfg.attention if cfg.attention == "math" else "auto"), low
