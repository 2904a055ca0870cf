"""Rows of a config's placement, from what the alpha program finds. No torch. Source: MEMO 4.1; SPPO 5.2."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf

from memo.config.layer import INPUT, SPLIT_ROWS, Tensor, keys_dealt
from memo.config.layout import Layout
from memo.config.subsequences import unit_rows
from memo.decide import alpha
from memo.memory.placement import Placement, Rows, rows


def rests(cfg: Layout) -> bool:
    """Says whether rows whose copies do not hide stay on the device, as far as that has room."""
    return cfg.activation == "swap" and cfg.subsequences > 1


def resting(problem: alpha.AlphaProblem) -> Rows:
    """Finds Placement.stays where recompute is forbidden: of each tensor but x the rows beyond what the
    link carries while the next unit computes; fewer, in the same proportion, where the device has less
    room. Source: SPPO 5.2, whose alpha_i A_i is what travels of subsequence i."""
    p, x = problem.placement, problem.nbytes[INPUT]
    room = problem.device_bytes - p.device_bytes(problem.tensors)
    whole = problem.always_bytes + problem.others_bytes
    idle = [(1 - a) * problem.others_bytes / (whole - x) for a in problem.overlap]
    parts = [min(part, 1.0) if c else 0.0 for part, c in zip(idle, problem.swapped, strict=True)]
    needs = sum(c * n * part for c, n, part in zip(problem.swapped, problem.parts, parts, strict=True))
    needs *= whole - x
    if not needs or room <= 0:
        return {}
    if needs <= room:
        stay = tuple(ceil(part * n) for part, n in zip(parts, problem.cuts, strict=True))
    else:
        stay = tuple(int(part * n * room / needs) for part, n in zip(parts, problem.cuts, strict=True))
    return {name: stay for name in problem.tensors if name != INPUT and not p.apart(name)}


def swaps_layers(cfg: Layout) -> bool:
    """Says whether the mode swaps any layers."""
    return cfg.activation in ("swap", "memo") and len(cfg.layers) * cfg.subsequences > 2


def all_kept(cfg: Layout, B: int, T: int) -> Placement:
    """Makes the Placement of B sequences, of which a rank of cp holds T tokens each, in as many buffers as
    units: nobody takes turns, nothing is copied."""
    cuts = unit_rows(cfg, B, T)
    placement = Placement(len(cfg.layers), 1, B * T // cfg.tp, cuts=cuts if len(cuts) > 1 else (),
                          order="layer" if cfg.by_layer else "subsequence", dealt=keys_dealt(cfg),
                          receives=not cfg.has_embedding, sends=not cfg.has_head,
                          guests=tuple(piece for piece in cfg.shares if piece.helper == cfg.stage),
                          lent=tuple(piece for piece in cfg.shares if piece.stage == cfg.stage),
                          layers_come=cfg.layers_come, edges_come=cfg.edges_come)
    return replace(placement, n_buffers=placement.n_units)


def placed(cfg: Layout, n_buffers: int, kept: Rows | None = None, input_only: int = 0, x_stays: bool = False,
           keys: str = "copied", stream: str = "") -> Placement:
    """Places the units of a config in so many buffers, at most one a unit. `keys`: what becomes of keys
    and values that give way to the next layer's; `stream`: of what lies between layers, by default whole,
    or passed on to the next stage."""
    whole = all_kept(cfg, cfg.batch_size, cfg.block_size // cfg.cp)
    stay = whole.n_units == whole.n_layer or n_buffers >= whole.n_units or not cfg.by_layer
    return replace(whole, n_buffers=min(whole.n_units, n_buffers), kept=kept or {}, input_only=input_only,
                   x_stays=x_stays, keys="stay" if stay else keys,
                   stream=stream or ("whole" if cfg.has_head else "passed"))


def with_stream(placement: Placement, tensors: dict[str, Tensor], spare_bytes: float) -> Placement:
    """Places the stream whole where buffers and regions then fit so many bytes of the device; else copied,
    if that takes fewer. Modes that copy nothing have it whole; all stages but the last one pass it on."""
    if placement.sends:
        return replace(placement, stream="passed")
    whole, copied = replace(placement, stream="whole"), replace(placement, stream="copied")
    nbytes, fewer = (p.device_bytes(tensors) for p in (whole, copied))
    return copied if whole.program.copied and fewer < nbytes and nbytes > spare_bytes else whole


def kept_rows(chosen: alpha.Fractions, most: alpha.Fractions, cuts: Sequence[int],
              granularity: int) -> dict[str, tuple[int, ...]]:
    """Rounds {tensor: rows of each subsequence} down to multiples of `granularity`; what that leaves of a
    subsequence the next one has, up to its fraction of `most`. There are no fewer earlier units than later
    ones, so that no more rows are swapped than were chosen."""
    found = {}
    for name, fractions in chosen.items():
        kept, left = [], 0.0
        for n, f, highest in zip(cuts, fractions, most[name], strict=True):
            kept.append(rows(min(f + left / n, highest), n, granularity))
            left += f * n - kept[-1]
        found[name] = tuple(kept)
    return found


def place_rows(cfg: Layout, problem: alpha.AlphaProblem,
               recompute_s: dict[str, float] | None = None) -> tuple[Placement, alpha.SwapPlan | None]:
    """Makes rows of cfg.activation, cfg.alpha and cfg.alpha_mode, for the problem that a config poses. The
    SwapPlan is None in the modes that copy nothing. `recompute_s` as for per_tensor, which needs it. Errors:
    OutOfHostMemory, before anything is allocated."""
    N, cuts = problem.placement.n_rows, problem.cuts
    if cfg.activation == "keep":
        return placed(cfg, problem.placement.n_units), None
    if cfg.activation == "recompute":
        only_input = {name: N if name == INPUT else 0 for name in problem.tensors}
        return placed(cfg, 1, only_input, problem.placement.n_units, x_stays=True, keys="made"), None
    on_any_host = replace(problem, host_bytes=alpha.ANY_HOST)
    if not cfg.finds_alpha:
        given = 1.0 if cfg.activation == "swap" else cfg.alpha
        chosen = most = alpha.fixed_alpha(problem, given, cfg.block_size, cfg.block_multiple)
    elif cfg.alpha_mode == "per_tensor" and problem.n_swapped:
        assert recompute_s is not None  # per_tensor needs it
        chosen, most = (alpha.per_tensor(p, recompute_s) for p in (problem, on_any_host))
    else:
        chosen, most = alpha.paper(problem), alpha.paper(on_any_host)
    if not chosen.fits:
        longest = alpha.largest_block_size(problem, cfg.block_size, cfg.block_multiple)
        remedy = f"the largest block_size that fits is {longest}" if longest else "no block_size fits"
        if fewer := int(problem.host_bytes) * cfg.batch_size // problem.least_bytes:
            remedy = f"--batch_size={fewer} fits, {remedy}"
        raise alpha.out_of_host_memory(problem, f"block_size={cfg.block_size}", problem.least_bytes, remedy)
    granularity = SPLIT_ROWS if len(cuts) > 1 else max(1, min(SPLIT_ROWS, N // 16))
    by_unit = kept_rows({name: chosen.fractions[name] for name in problem.others}, most.fractions, cuts,
                        granularity)
    chosen = replace(alpha.plan(problem, {name: tuple(k / n for k, n in zip(kept, cuts, strict=True))
                                    for name, kept in by_unit.items()}), binds=chosen.binds)
    kept: Rows = {name: N if name not in by_unit else by_unit[name] if len(cuts) > 1 else by_unit[name][0]
                  for name in problem.tensors}
    placement = replace(problem.placement, kept=kept, input_only=chosen.input_only)
    if rests(cfg) and problem.device_bytes < inf and (stays := resting(problem)):
        placement = replace(placement, stays=stays)
        here = sum(placement.survivor_bytes(problem.tensors, resident=True).values())
        chosen = replace(chosen, host_bytes=chosen.host_bytes - here,
                         layer_bytes=chosen.layer_bytes - here * N // problem.swapped_rows)
    return placement, chosen
