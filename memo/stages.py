"""Which layers, and how many parameters, a stage of the pipeline has. No torch. Source: SPPO 3.3."""

from functools import lru_cache

from memo.formulas import layer_forward_flops, percent
from memo.layer import layer_of
from memo.settings import Settings
from memo.subsequences import subsequence_lengths


def stage_layers(cfg: Settings, stage: int) -> range:
    """The layers of a stage, as numbers in the whole model: the stages have as equal FLOPs as whole layers
    allow, the head counted with the last one. Looking up the embedding takes none."""
    counts = layers_of_stages(cfg.n_layer, cfg.pp, head_share(cfg))
    return range(sum(counts[:stage]), sum(counts[:stage + 1]))


def head_share(cfg: Settings) -> float:
    """FLOPs of the head over those of a layer."""
    return 2 * cfg.block_size * cfg.vocab_size * cfg.n_embd / layer_forward_flops(cfg, cfg.block_size)


def stage_parameters(cfg: Settings, stage: int) -> int:
    """Those of formulas.parameters() that a stage holds. The first stage and the last one may hold the same
    matrix."""
    first, last = stage == 0, stage == cfg.pp - 1
    tables = first or last if cfg.tie_embeddings else first + last
    return (len(stage_layers(cfg, stage)) * layer_of(cfg).matrix_elements
            + tables * cfg.vocab_size * cfg.n_embd)


def pipeline_line(cfg: Settings) -> str:
    """The layers of each stage, and how long the stages wait for each other; empty where there is one."""
    if cfg.pp == 1:
        return ""
    layers, N = (len(stage_layers(cfg, stage)) for stage in range(cfg.pp)), len(subsequence_lengths(cfg))
    s = "s" * (N > 1)
    return (f"pipeline    {cfg.pp} stages of {', '.join(map(str, layers))} layers, {N} subsequence{s}: "
            f"bubble {cfg.pp - 1}/{N} = {percent((cfg.pp - 1) / N)} of the computing")


@lru_cache(64)
def layers_of_stages(layers: int, pp: int, head: float) -> tuple[int, ...]:
    """How many of the layers each of `pp` stages has, at least one. `head`: its FLOPs over a layer's."""
    if pp == 1:
        return layers,

    def longest(last: int) -> float:
        return max(-(-(layers - last) // (pp - 1)), last + head)
    # of equally good ones that where the last stage has the most
    last = min(range(layers - pp + 1, 0, -1), key=longest)
    each, more = divmod(layers - last, pp - 1)
    return *(each + (k < more) for k in range(pp - 1)), last
