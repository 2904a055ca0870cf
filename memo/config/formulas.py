"""The formulas of MEMO, section 5.1: parameters, model FLOPs, TGS and MFU."""

from memo.config.layer import layer_of
from memo.config.settings import Settings


def parameters(cfg: Settings) -> int:
    """Counts P, all matrices' elements, a tied head's once; for GPT 12 L C^2 + V C. Source: MEMO 5.1."""
    tables = 1 if cfg.tie_embeddings else 2
    return cfg.n_layer * layer_of(cfg).matrix_elements + tables * cfg.vocab_size * cfg.n_embd


def model_flops(cfg: Settings, tokens: int, learned: int, squares: float) -> float:
    """Counts model FLOPs, forward and backward: 6 P of all layers a token, 6 V C a learned one, 12 L H D a
    pair of a query and a key that meet: half of `squares`, the sum of squares_of() over documents. Source:
    MEMO 5.1."""
    layers = 6 * cfg.n_layer * layer_of(cfg).matrix_elements * tokens
    head = 6 * cfg.vocab_size * cfg.n_embd * learned
    return layers + head + 6 * cfg.n_layer * cfg.n_head * cfg.head_width * squares


def flops_per_sample(cfg: Settings) -> float:
    """Counts the model FLOPs of a sequence that is one document, all of it learned."""
    return model_flops(cfg, cfg.block_size, cfg.block_size, squares_of(cfg, cfg.block_size))


def squares_met(n: int, window: int, part: float = 1) -> float:
    """Counts twice the pairs of a query and a key that meet in a document of n tokens: n^2, for the mask is
    causal; with a sliding window W that is shorter 2 n W - W^2. `part`: only in this part of the layers, from
    0 to 1, there is one: the mean of all layers."""
    return n**2 - part * (n - window)**2 if 0 < window < n else n**2


def squares_of(cfg: Settings, n: int) -> float:
    """Counts squares_met() in the mean of a config's layers."""
    return squares_met(n, *cfg.windows)


def layer_forward_flops(cfg: Settings, tokens: int) -> float:
    """Counts a layer's FLOPs, forward, on t tokens: 2 E t of matrices, 2 H D t^2 of attention, or with
    windows the mean of squares_of(). Source: MEMO 5.1."""
    linear, square = layer_forward_terms(cfg)
    return linear * tokens + square * squares_of(cfg, tokens)


def layer_forward_terms(cfg: Settings) -> tuple[int, int]:
    """Computes (2 E, 2 H D), see layer_forward_flops."""
    return 2 * layer_of(cfg).matrix_elements, 2 * cfg.n_head * cfg.head_width


def head_share(cfg: Settings) -> float:
    """Divides the FLOPs of the head by those of a layer."""
    return 2 * cfg.block_size * cfg.vocab_size * cfg.n_embd / layer_forward_flops(cfg, cfg.block_size)


def tgs(tokens: int, gpus: int, seconds: float) -> float:
    """Computes tokens per GPU and second. Source: MEMO 5.1."""
    return tokens / (gpus * seconds)


def mfu(cfg: Settings, tgs: float, peak_flops_per_s: float | None,
        flops_a_token: float | None = None) -> float | None:
    """Computes the model FLOPs utilisation, 1 is all of the peak; None without a peak. `flops_a_token`: by
    default those of one document a sequence. Source: MEMO 5.1."""
    if peak_flops_per_s is None:
        return None
    if flops_a_token is None:
        return tgs * flops_per_sample(cfg) / cfg.block_size / peak_flops_per_s
    return tgs * flops_a_token / peak_flops_per_s


def percent(fraction: float | None) -> str:
    return "n/a" if fraction is None else f"{100 * fraction:.1f}%"
