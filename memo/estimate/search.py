"""The fastest layout, the longest context, and the changes that would make a run fit."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

from memo.config.config import Config, as_keys
from memo.config.keys import Keys, Value
from memo.config.layout import Layout
from memo.decide.alpha import AlphaProblem
from memo.decide.choose import LEAST_TOKENS, Judged, degrees_of, stage_keys, stage_numbers
from memo.decide.where import Room, place_rows, problem_of, ways_of, with_buffers
from memo.errors import ConfigError
from memo.estimate.arena import ArenaOf, fast_arena, traced_arena
from memo.estimate.budget import Estimate, choose_fastest, choose_numbers, estimate
from memo.estimate.regions import granting
from memo.estimate.roofline import SampleOf
from memo.memory.sizes import Sizes
from memo.system.command import progress
from memo.system.hardware import Machine

MULTIPLE = 1024  # times cp * tp: what a longest context is a multiple of
LONGEST = 2**27  # tokens; where the search for the longest context stops
# the last one does what is best of the others, and is the one that several stages have
MODES: tuple[Keys, ...] = (
    dict(activation="keep"), dict(activation="recompute"), dict(activation="swap"),
    dict(activation="memo", alpha_mode="paper"), dict(activation="memo", alpha_mode="per_tensor"))
MOST_RANKS, MOST_WORK = 2**14, 2**18  # of a search; layers of all its layouts
FARTHEST = MODES[1], MODES[-1]  # with the longest contexts: recompute where the host is small
Suits = Callable[[Estimate], bool]


def config_with(cfg: Config, **keys: Value) -> Config | None:
    """Changes keys of a config; None where these cannot be. With auto a Layout becomes a Config."""
    try:
        return Config(**as_keys(cfg) | keys) if "auto" in keys.values() else replace(cfg, **keys)
    except ConfigError:
        return None


def estimate_or_none(cfg: Config | None, machine: Machine, world: int, arena: ArenaOf,
                     documents: SampleOf | None = None) -> Estimate | None:
    """Makes the Estimate; None: the config cannot be, or no number of subsequences that is auto fits."""
    try:
        if cfg and cfg.undecided:
            got, judged = choose_numbers(cfg, machine, world, fast_arena, judge_room, documents)
            return None if judged.lacking else got.on(machine, arena)
        return estimate(cfg, machine, world, arena, documents) if cfg else None
    except ConfigError:
        return None


def judge_room(got: Estimate) -> Judged:
    """Judges an Estimate without seconds: whether device and host have room for as little as its mode allows.
    Takes a small part of the time of placing all stages, but on a CPU and where alpha is given."""
    cfg = got.decided
    if got.machine.cpu or (cfg.activation == "memo" and not cfg.finds_alpha):
        return got.untimed.judged
    states = got.node_bytes([sum(line.host_bytes for line in got.besides[stage.stage_kind].lines)
                             for stage in cfg.every_stage])
    if states > got.host_capacity:
        return Judged(states - got.host_capacity, where="the host")
    return max(judge_stage(stage, got.itemsize, got.besides[stage.stage_kind].room)
               for stage in {stage.stage_kind: stage for stage in cfg.every_stage}.values())


def judge_stage(cfg: Layout, itemsize: int, room: Room) -> Judged:
    """Judges, as judge_room(), a stage in the best of its ways."""
    found = list[Judged]()
    for way in sorted(ways_of(cfg), key=lambda way: way.get("keys") == "made"):
        problem = problem_of(cfg, itemsize, None, room, **way)
        # it takes more of the device, but where layers slide, which may need a place less
        if problem.placement.keys == "made" and not problem.placement.near and all(
                judged.device_alone for judged in found):
            break
        found.append(lacking(cfg, problem, room))
        if not found[-1].lacking:
            break
    return min(found)


def lacking(cfg: Layout, problem: AlphaProblem, room: Room) -> Judged:
    """Judges, as judge_room(), one of the ways_of() a stage, whose problem has two buffers."""
    swaps = cfg.activation in ("swap", "memo")
    if swaps:
        device = problem.device_bytes_at(0 if cfg.finds_alpha else problem.placement.n_rows)
    else:
        device = Sizes(place_rows(cfg, problem)[0], problem.tensors).device_bytes
    if device > room.spare_bytes:
        return Judged(device - room.spare_bytes, where="the device", device_alone=True)
    if not swaps or not problem.n_swapped:
        return Judged()

    def host_bytes(problem: AlphaProblem) -> int:
        return problem.least_bytes if cfg.finds_alpha else problem.needed_bytes(1.0)
    if host_bytes(problem) > room.host_bytes:  # with more buffers fewer units are swapped
        problem = with_buffers(cfg, problem, room)
    return Judged(max(0, host_bytes(problem) - room.host_bytes), where="the host")


def layout_values(cfg: Config) -> tuple[object, ...]:
    """Makes a key that is equal for configs of one layout."""
    return cfg.pp, cfg.tp, cfg.cp, cfg.tensor_parallel, cfg.context_parallel


def likeness(got: Estimate) -> tuple[object, ...]:
    """Makes a key that is equal for modes that come to the same."""
    return layout_values(got.decided), got.lines, got.tgs


def fastest_of(fit: Sequence[Estimate], best: int) -> list[Estimate]:
    """Picks those of Estimates that fit without seconds that may be among the `best`, where they fit with
    these, too: schedules, which take long, run for those first that may be fastest, and for no others."""
    most, rates = [got.most_tgs for got in fit], dict[tuple[object, ...], float]()
    found: dict[int, Estimate] = {}
    for k in sorted(range(len(fit)), key=lambda k: -most[k]):
        if len(rates) >= best and most[k] < sorted(rates.values())[-best]:
            break
        if fit[k].fits:
            found[k], rates[likeness(fit[k])] = fit[k], fit[k].tgs or 0.0
    return [found[k] for k in sorted(found)]


def with_the_fastest(got: Estimate, arena: ArenaOf, bound: ArenaOf = fast_arena) -> Estimate:
    """Takes the fastest of the subsequences that fit, where these are auto, found by `bound`."""
    if not got.asked.undecided:
        return got
    fastest = choose_fastest(got.asked, got.machine, got.world, bound, got.documents)
    if fastest.decided == got.decided:
        return got.but(chosen=fastest.chosen)
    fastest = fastest.on(got.machine, arena)
    return fastest if fastest.fits else got


def with_help(got: Estimate, arena: ArenaOf) -> Estimate:
    """Lets stages help each other, where that is faster."""
    with suppress(ConfigError):  # one stage, too few subsequences, a trace that fails
        helped = estimate(replace(got.decided, msp=True), got.machine, got.world, arena, got.documents)
        if helped.fits and speed(helped) > speed(got):
            return helped.but(asked=replace(got.asked, msp=True), chosen=got.chosen)
    return got


def speed(got: Estimate) -> float:
    """Makes the key that compares Estimates: tokens per second, or less memory where speeds are not known."""
    return got.tgs * got.world if got.tgs else -got.device_bytes


def layouts(cfg: Config, machine: Machine, world: int, modes: Sequence[Keys] = MODES) -> list[Config]:
    """Lists every config that differs in layout, mode or optimizer's place. Errors: ConfigError: too many."""
    if world > MOST_RANKS:
        raise ConfigError(f"--gpus={world} must be at most {MOST_RANKS} for --search (else each layout "
                          "takes seconds); leave --search out")
    every = list[Config | None]()
    widths = [tp for tp in degrees_of(world) if tp <= machine.node.gpus_per_node and cfg.n_head % tp == 0]
    for pp, tp, mode in product(stage_numbers(cfg, world), widths, modes):
        if world % (pp * tp) or (pp > 1 and mode != modes[-1]):
            continue
        for cp in degrees_of(world // (pp * tp)):
            kinds = ("ring", "ulysses") if cp > 1 else (cfg.context_parallel,)
            uses = [*(("megatron", kind) for kind in kinds), ("metp", "ring")]
            for (use, kind), where in product(uses, ("auto", "cpu")):
                keys = dict(tp=tp, cp=cp, tensor_parallel=use, head_groups="auto", context_parallel=kind,
                            optimizer_device=where, alpha="auto") | mode | stage_keys(cfg, pp)
                every.append(config_with(cfg, **keys))
    found = [*filter(None, every)]
    if (work := len(found) * cfg.n_layer) > MOST_WORK:
        raise ConfigError(f"n_layer={cfg.n_layer} * {len(found)} layouts = {work} must be at most "
                          f"{MOST_WORK} for --search (each takes time); leave --search out, or "
                          "lower --gpus or --n_layer")
    return found


def search(cfg: Config, machine: Machine, world: int, arena: ArenaOf = traced_arena,
           best: int = 5, documents: SampleOf | None = None) -> list[Estimate]:
    """Finds the `best` fastest Estimates that fit, fastest first; judged by the fast bound, then by `arena`.
    Where none fits, the one that takes the least. Errors: ConfigError: no layout for so many ranks."""
    seen: set[tuple[object, ...]] = set()
    every, judged = layouts(cfg, machine, world), 0
    with progress(lambda: f"--search: {judged} of {len(every)} layouts tried, {len(seen)} of the fastest "
                          "looked at closely"):
        fit, taken = list[Estimate](), list[Estimate]()
        for one in every:
            got = estimate_or_none(one, machine, world, fast_arena, documents)
            if got and not judge_room(got).lacking:
                fit.append(got)
            judged += 1
        for got in sorted(fastest_of(fit, best), key=speed, reverse=True):
            if likeness(got) in seen:
                continue
            seen.add(likeness(got))
            with suppress(ConfigError):  # a trace that fails
                if (exact := got.on(machine, arena)).fits:
                    taken.append(with_the_fastest(exact, arena))
            if len(taken) == best:
                break
        if taken:  # of stages that help each other only these are looked at: it takes long
            return sorted((with_help(one, arena) for one in taken), key=speed, reverse=True)
        nearest = list[Estimate]()
        for one in every:
            with suppress(ConfigError):
                nearest.append(choose_fastest(one, replace(machine, speeds=None), world,
                                                  documents=documents))
        if nearest:
            return [min(nearest, key=lambda got: got.device_bytes).on(machine, arena)]
    raise ConfigError(f"--gpus={world}: no layout divides them (tp must divide n_head={cfg.n_head}, "
                      f"2*cp*tp block_size={cfg.block_size}, dp gradient_accumulation_steps="
                      f"{cfg.gradient_accumulation_steps}); try another number, or "
                      "--gradient_accumulation_steps=auto")


def longest(cfg: Config, machine: Machine, world: int, arena: ArenaOf = traced_arena,
            suits: Suits = lambda got: True, documents: SampleOf | None = None) -> Estimate | None:
    """Finds the Estimate of the greatest block_size up to LONGEST that `suits`; None where none does."""
    most = longest_by_bound(cfg, machine, world, suits, documents=documents)
    return most and with_seconds(most, arena, suits)


def longest_by_bound(cfg: Config, machine: Machine, world: int, suits: Suits, bound: ArenaOf = fast_arena,
                     start: Estimate | None = None, documents: SampleOf | None = None) -> Estimate | None:
    """Finds the longest that suits without seconds, where `bound` gives the temporary tensors, from `start`
    on, one that does. Steps double until none suits, then bisection, for memory grows with the sequence."""
    unit, best = MULTIPLE * cfg.cp * cfg.tp, start
    least = -(-cfg.n_subsequences * cfg.block_multiple // unit)  # units: each subsequence has a multiple
    low = start.decided.block_size // unit if start else least - 1
    most, step = max(least, LONGEST // unit), max(1, low // 16)
    high = low + step

    def suit(n: int) -> bool:
        nonlocal best
        got = estimate_or_none(config_with(cfg, block_size=n * unit), machine, world, bound, documents)
        if not (got and not judge_room(got).lacking and suits(got.untimed)):
            return False
        best = got
        return True
    with progress(lambda: f"looking for the greatest block_size that fits: trying {unit * high:,}"):
        while high <= most and suit(high):
            low, high, step = high, high + step, 2 * step
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if suit(middle) else (low, middle)
    return best


def with_seconds(most: Estimate, arena: ArenaOf, suits: Suits) -> Estimate | None:
    """Looks near the longest by the bound for the longest that suits with seconds, and with `arena`."""
    cfg, machine, bound = most.decided, most.machine, fast_arena
    unit, works = MULTIPLE * cfg.cp * cfg.tp, "bounding" if arena is fast_arena else "tracing"
    with progress(lambda: f"{works} a step of {cfg.block_size:,} tokens"):
        if arena is not fast_arena:  # the bound is a little above the trace: scale it, then check
            scale = sum(arena(most.cfg, machine)) / sum(fast_arena(most.cfg, machine))
            bound = partial(fast_arena, scale=scale)
            most = longest_by_bound(most.asked, machine, most.world, suits, bound, most,
                                    most.documents) or most
        n = most.decided.block_size // unit
        while n > 0 and (one := config_with(most.decided, block_size=n * unit)):
            got = estimate(one, machine, most.world, arena, most.documents)
            if got.fits and suits(got):
                got = got.but(asked=replace(most.asked, block_size=n * unit), chosen=most.chosen)
                return with_the_fastest(got, arena, bound)
            n -= max(1, n // 100)
    return None


def longest_of_layouts(cfg: Config, machine: Machine, world: int, arena: ArenaOf = traced_arena,
                       best: int = 5, modes: Sequence[Keys] = FARTHEST,
                       suits: Suits = lambda got: True,
                       documents: SampleOf | None = None) -> list[Estimate]:
    """Finds the Estimates of the `best` layouts with the longest contexts that `suits`, the longest first."""
    every, tried = layouts(cfg, machine, world, modes), 0
    # first what is likely to be long: for others one estimate says that they are shorter
    every.sort(key=lambda one: (one.activation == "recompute", not one.metp, one.pp, -one.cp * one.tp))
    found: dict[tuple[object, ...], Estimate] = {}

    def length(got: Estimate) -> tuple[int, float]:
        return got.decided.block_size, speed(got)
    with progress(lambda: f"--search --max_context: {tried} of {len(every)} layouts tried"):
        for one in every:
            tried += 1
            layout = layout_values(one)
            others = sorted((got.decided.block_size for key, got in found.items() if key != layout),
                            reverse=True)
            least = max([*others[best - 1:best], found[layout].decided.block_size if layout in found else 0])
            unit, start = MULTIPLE * one.cp * one.tp, None
            if least:  # most layouts end here: with one estimate
                at_least = config_with(one, block_size=-(-least // unit) * unit)
                start = estimate_or_none(at_least, machine, world, fast_arena, documents)
                if not (start and not judge_room(start).lacking and suits(start.untimed)):
                    continue
            most = longest_by_bound(one, machine, world, suits, start=start, documents=documents)
            if most and (layout not in found or length(most.untimed) > length(found[layout].untimed)):
                found[layout] = most
        taken = sorted(found.values(), key=lambda got: length(got.untimed), reverse=True)[:best]
        exact = (with_seconds(got, fast_arena if n else arena, suits) for n, got in enumerate(taken))
        return sorted(filter(None, exact), key=length, reverse=True)


def with_more_host(got: Estimate) -> list[tuple[str, Estimate]]:
    """Finds what a node would have to grant, where host memory alone lacks -> [(option, Estimate)] or []."""
    if any(lack.where != "the host" for lack in got.lacks):
        return []
    step = 10 ** (len(str(got.host_bytes)) - 2)
    nbytes = -(-got.host_bytes // step) * step
    cfg, machine = granting(got.asked, got.machine, got.world, nbytes)
    other = estimate_or_none(cfg, machine, got.world, fast_arena, got.documents)
    return [(f"--host_memory_bytes={nbytes / 1e9:g}e9", other)] if other and other.fits else []


def remedies(got: Estimate, most: int = 3) -> list[tuple[str, Estimate]]:
    """Lists [(what to change, Estimate)] with which it would fit, fastest first, last a shorter context."""
    cfg, machine, world, cpu = got.asked, got.machine, got.world, dict(optimizer_device="cpu")
    changes: list[Keys] = [
        dict(activation="memo", alpha="auto"), dict(activation="recompute", alpha="auto"),
        dict(context_parallel="ulysses"), dict(batch_size=cfg.batch_size // 2), dict(cp=2 * cfg.cp),
        dict(tp=2 * cfg.tp), dict(tp=cfg.tp // 2, cp=2 * cfg.cp), dict(tp=2 * cfg.tp, cp=cfg.cp // 2)]
    deeper = stage_keys(cfg, 2 * cfg.pp) if cfg.pp != "auto" else {}  # else they have been tried
    changes += [deeper, deeper | dict(cp=cfg.cp // 2), deeper | dict(tp=cfg.tp // 2)]
    metp = dict(tensor_parallel="metp", context_parallel="ring")
    changes += [metp, metp | dict(tp=2 * cfg.tp, cp=cfg.cp // 2), metp | dict(tp=cfg.cp * cfg.tp, cp=1)]
    changes += [dict(unit_order="layer")] * (cfg.n_subsequences > 1 and cfg.unit_order == "subsequence")
    if cfg.states != "auto":  # else other places have been tried
        changes += [dict(states="sharded"), dict(states="host")]
    if cfg.subsequences != "auto":  # else more have been tried
        changes += [dict(subsequences=n * cfg.subsequences) for n in (4, 16)
                    if cfg.block_size >= LEAST_TOKENS * n * cfg.subsequences]
    if cfg.deterministic:  # flash and flash_attn_2 take much memory for it
        changes += [dict(attention="flash_attn_4"), dict(attention="flash_attn_3"), dict(deterministic=False)]
    options = [(world, keys) for keys in [cpu, *changes, *(keys | cpu for keys in changes)]]
    options += [(n * world, {name: n * getattr(cfg, name)})
                for n, name in ((2, "cp"), (2, "tp"), (4, "cp"), (8, "cp"))]
    options += [(2 * world, metp | dict(tp=2 * cfg.tp)), (2 * world, deeper)]
    fits = {}
    for gpus, keys in options:
        if {"tp", "tensor_parallel"} & set(keys):  # a number of groups is a multiple of tp
            keys = keys | dict(head_groups="auto")
        keys = {name: value for name, value in keys.items() if getattr(cfg, name) != value}
        if (not keys and gpus == world) or keys.get("tp", 1) > machine.node.gpus_per_node:
            continue
        other = estimate_or_none(config_with(cfg, **keys), machine, gpus, fast_arena, got.documents)
        if other and other.fits:
            more = [f"--gpus={gpus}"] if gpus > world else []
            fits[" ".join(more + [f"--{name}={value}" for name, value in keys.items()])] = other
    found = sorted(fits.items(), key=lambda item: (item[1].world > world, -(item[1].mfu or 0), len(item[0])))
    shorter = longest(cfg, machine, world, fast_arena, documents=got.documents)
    if shorter is None or shorter.cfg.block_size >= cfg.block_size:
        return found[:most]
    return [*found[:most - 1], (f"--block_size={shorter.cfg.block_size}", shorter)]
