"""How many stages and subsequences, which cut and order, and where the states are: what a config leaves to
"auto", chosen by whoever can judge a config with numbers: the estimate. No torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isqrt
from typing import NamedTuple

from memo.config.config import Config
from memo.config.keys import Keys
from memo.config.layout import ALIGNED, Layout, degrees
from memo.errors import ConfigError

LEAST_TOKENS = 2048  # of a subsequence that is proposed; with fewer the kernels are slow
MOST_SUBSEQUENCES = 256  # that are chosen; more save hardly any memory, and their simulation takes seconds
LEAST_BUBBLE, MOST_BUBBLE = 1 / 64, 1 / 16  # of a pipeline's computing; less is not worth more subsequences
# times the seconds of the fastest: what is modelled is off by as much
EQUALLY_FAST = 1.03
SHRINKS = 0.95  # at most so much of what lacks is left where four times the subsequences help


# --- how many stages ---

class Judged(NamedTuple):
    """Says how a config with numbers was judged, less is better: bytes that lack; a step's seconds for each
    of its micro batches, 0: not known; where bytes lack; whether copies, or stages, make more subsequences
    fast."""

    lacking: float = 0
    seconds: float = 0.0
    where: str = ""
    copies: bool = True
    device_alone: bool = False  # whether it is a GPU's memory, and no other, that lacks


def degrees_of(n: int) -> list[int]:
    """Lists the divisors of n."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def stage_numbers(cfg: Config, world: int) -> list[int]:
    """Lists the numbers of stages to choose from: powers of two."""
    return [pp for pp in degrees_of(world) if pp.bit_count() == 1 and pp <= cfg.n_layer]


def stage_keys(cfg: Config, pp: int) -> Keys:
    """Makes the keys of so many stages; several are fed with subsequences, of equal FLOPs if that is free."""
    if pp == 1:
        return dict(pp=1)
    keys: Keys = dict(pp=pp, unit_order="subsequence")
    if cfg.subsequences == 1:
        keys["subsequences"] = "auto"
    if cfg.subsequences == 1 or cfg.subsequence_cut == "auto":
        keys["subsequence_cut"] = "flops"
    return keys


def with_stages(cfg: Config, world: int) -> list[Config]:
    """Gives a config each number of stages that pp=auto may become. Errors: ConfigError: there is none."""
    if cfg.pp != "auto":
        degrees(cfg, world)
        return [cfg]
    found = []
    for pp in stage_numbers(cfg, world):
        keys = {name: value for name, value in stage_keys(cfg, pp).items() if getattr(cfg, name) == "auto"}
        with suppress(ConfigError):
            one = replace(cfg, **keys)
            degrees(one, world)
            replace(one, subsequences=numbers_of(one)[-1])  # too few for msp?
            found.append(one)
    if not found:
        each, more = divmod(world, cfg.cp * cfg.tp)
        if cfg.msp and each <= 1:
            replace(cfg, pp=1)  # says that msp needs more
        remedy = (f"{max(1, each) * cfg.cp * cfg.tp} ranks" if more else
                  "--gradient_accumulation_steps=auto, or another tp or cp")
        rule = (f"pp*dp*cp({cfg.cp})*tp({cfg.tp}) must "
                f"be WORLD_SIZE({world}), pp a power of two up to n_layer={cfg.n_layer}, and dp must "
                f"divide gradient_accumulation_steps={cfg.gradient_accumulation_steps}"
                + "; with msp=True pp > 1, and at least pp subsequences" * cfg.msp)
        remedy += ", or more --subsequences" * cfg.msp
        raise ConfigError(f"pp=auto has no room for any number of stages: {rule}; try {remedy}")
    return found


def choose(cfg: Config, judge: Callable[[Layout], Judged], world: int) -> tuple[Layout, str]:
    """Chooses (the Layout with numbers in place of auto, why these, in words), as `judge` sees it: of each
    number of stages what choose_place() takes; of these the fastest that fits, the fewest stages among those
    EQUALLY_FAST. Where none fits, the one that lacks least. Errors: as with_stages()."""
    if cfg.pp != "auto":
        return choose_place(cfg, judge, world)
    whys = dict(choose_place(one, judge, world) for one in with_stages(cfg, world))
    best = best_of({one: judge(one) for one in whys})
    if judge(best).lacking:
        said = "no number of stages fits" if len(whys) > 1 else "no other is possible; it does not fit"
        return best, f"pp={best.pp} chosen, {said} {judge(best).where}"
    said = "no other fits" if len(whys) > 1 else "no other is possible"
    if others := [one for one in whys if one != best and not judge(one).lacking]:
        other = min(others, key=lambda one: judge(one).seconds)
        said = f"pp={other.pp} fits too"
        if seconds := judge(best).seconds:
            times = judge(other).seconds / seconds
            said = f"with pp={other.pp} the same tokens take {times:.2f} times as long"
    n, why = best.subsequences, whys[best]
    return best, f"pp={best.pp} chosen, {said}" + f"; {n} subsequence{'s' * (n > 1)} {why}" * bool(why)


# --- where states are ---

def choose_place(cfg: Config, judge: Callable[[Layout], Judged], world: int) -> tuple[Layout, str]:
    """Chooses the states' place, the device where that fits, else the fastest, and subsequences there."""
    if cfg.states != "auto":
        return choose_subsequences(cfg, judge)
    found = [choose_subsequences(replace(cfg, states="device"), judge)]
    on_device = judge(found[0][0])
    if not on_device.lacking:
        return found[0]
    for where in ("sharded", "host"):
        with suppress(ConfigError):  # of several stages, or of an order of units, that needs all layers
            if where != "sharded" or world > cfg.pp * cfg.tp:
                found.append(choose_subsequences(replace(cfg, states=where), judge))
    best, why = min(found, key=lambda one: judge(one[0])[:2])
    if best.states == "device":
        return best, why
    said = f"states={best.states} chosen, states=device does not fit {on_device.where}"
    return best, f"{why}; {said}" if why else said


# --- how many subsequences ---

def numbers_of(cfg: Config) -> list[int]:
    """Lists the numbers of subsequences to choose from: powers of two, with LEAST_TOKENS or more each, and
    aligned; for several stages those with a bubble between the bounds, or the most."""
    if cfg.subsequences != "auto":
        return [cfg.subsequences]
    most = cfg.block_size // max(LEAST_TOKENS, ALIGNED * cfg.layout_multiple)
    numbers = [2**k for k in range(max(1, min(most, MOST_SUBSEQUENCES)).bit_length())]
    if cfg.pp in (1, "auto"):
        return numbers
    return [n for n in numbers if LEAST_BUBBLE <= (cfg.pp - 1) / n <= MOST_BUBBLE] or numbers[-1:]


def orders_of(cfg: Config) -> tuple[str, ...]:
    """Lists the orders of units to choose from."""
    if cfg.unit_order != "auto":
        return (cfg.unit_order,)
    if cfg.pp != 1:  # a stage hands a subsequence on when all its layers are done with it
        return ("subsequence",)
    return ("layer",) if cfg.states in ("sharded", "host") else ("layer", "subsequence")


def choose_subsequences(cfg: Config, judge: Callable[[Layout], Judged]) -> tuple[Layout, str]:
    """Chooses (the Layout with numbers in place of auto, why these): the best_of() those tried. Numbers grow
    until one fits that copies nothing, a step has become slower twice in a row, or more do not help. The
    order "subsequence", which needs more memory, is tried with that number; with all where none fits."""
    if not cfg.undecided:
        return Layout.of(cfg), ""
    cuts = ("equal", "flops") if cfg.subsequence_cut == "auto" else (cfg.subsequence_cut,)
    numbers, orders = numbers_of(cfg), orders_of(cfg)
    if numbers == [1]:
        return Layout.of(cfg, subsequences=1, subsequence_cut=cuts[0], unit_order=orders[0]), ""
    found, tried = dict[Layout, Judged](), numbers
    for order in orders:
        found |= judged_numbers(cfg, judge, order, cuts, tried)
        best = best_of(found)
        more = numbers if found[best].lacking else [best.subsequences] * (not is_enough(found[best]))
        tried = [n for n in more if n > 1]  # one alone has no order
    return best, why_chosen(best, found)


def judged_numbers(cfg: Config, judge: Callable[[Layout], Judged], order: str, cuts: Sequence[str],
                   numbers: Sequence[int]) -> Iterator[tuple[Layout, Judged]]:
    """Tries numbers of subsequences in an order, with all cuts, until one is enough or more do not help."""
    seen: list[Judged] = []
    for n in numbers:
        here: list[Judged] = []
        for cut in cuts if n > 1 else cuts[:1]:
            one = Layout.of(cfg, subsequences=n, subsequence_cut=cut, unit_order=order)
            here.append(judge(one))
            yield one, here[-1]
            if is_enough(here[-1]):
                return
            if here[-1].device_alone:  # it also lacks with a cut whose longest subsequence is longer
                break
        seen.append(min(here))
        if len(seen) < 3:
            continue
        a, b, c = seen[-3:]
        slower = not (a.lacking or b.lacking or c.lacking) and a.seconds <= b.seconds <= c.seconds
        # one alone keeps no layer's keys and values: two may lack more than it, where more lack less
        if slower or (c.lacking > SHRINKS * a.lacking and numbers[len(seen) - 3] > 1):
            return


def best_of(found: dict[Layout, Judged]) -> Layout:
    """Takes the fastest that fits, of those EQUALLY_FAST the one with the fewest stages, then subsequences,
    layer by layer, of equal length; where none fits, the one that lacks least."""
    fits = [one for one, got in found.items() if not got.lacking]
    if not fits:
        return min(found, key=lambda one: found[one].lacking)
    most = EQUALLY_FAST * min(found[one].seconds for one in fits)
    return min((one for one in fits if found[one].seconds <= most), key=lambda one: (
        one.pp, one.subsequences, one.unit_order != "layer", one.subsequence_cut != "equal"))


def fewest(cfg: Config, world: int) -> Layout:
    """Makes the Layout with the fewest stages and subsequences, for want of a judge."""
    return choose(cfg, lambda one: Judged(), world)[0]


def is_enough(got: Judged) -> bool:
    """Says whether it fits, and nothing says that others are faster."""
    return not got.lacking and not (got.seconds and got.copies)


def why_chosen(best: Layout, found: dict[Layout, Judged]) -> str:
    """Says why choose_subsequences() took `best` of those that it has found."""
    if found[best].lacking:
        return f"chosen, none fits {found[best].where}"
    fewer = [one for one in found if one.subsequences < best.subsequences]
    if not fewer:
        faster = f"none is {EQUALLY_FAST - 1:.0%} faster"
        return "chosen, " + ("it fits" if is_enough(found[best]) else faster)
    n = max(one.subsequences for one in fewer)
    least = min(found[one] for one in fewer if one.subsequences == n)
    if least.lacking:
        return f"chosen, {n} does not fit {least.where}"
    return f"chosen, {least.seconds / found[best].seconds - 1:.1%} faster than {n}"
