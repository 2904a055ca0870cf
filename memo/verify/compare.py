"""How far tensors are apart, where, and in words what is wrong."""

from collections.abc import Iterable, Mapping
from math import isnan
from typing import NamedTuple

import torch

CONSTANT = 0.1  # of an error may be left where it is that of a constant factor


class Finding(NamedTuple):
    """Holds what a check has found, in words, with the worst figure and its bound."""

    check: str
    right: bool
    text: str
    worst: float = 0.0
    bound: float = 0.0


def within(check: str, what: str, worst: float, bound: float, words: str) -> Finding:
    """Makes the Finding of a figure with a bound. `words`: what is wrong where it is above, or NaN."""
    right = worst <= bound
    return Finding(check, right, f"{what}: {worst:.1e}, at most {bound:.0e}" if right else
                   f"{words} ({worst:.1e}, at most {bound:.0e})", worst, bound)


def none_of(check: str, faults: list[str], what: str) -> Finding:
    """Makes the Finding of faults: the first of them, or what is right."""
    return Finding(check, not faults, faults[0] if faults else what)


def place_of(name: str) -> str:
    """Names a parameter for people: h.3.k_w is layer 3 k_w."""
    return "layer {} {}".format(*name.split(".")[1:]) if name.startswith("h.") else name


def factor_words(got: float, want: float, degrees: Mapping[str, int]) -> str:
    """Says what a constant factor is: it has a name where it is a degree of the layout, say."""
    factor = got / want if want else 0.0
    named = {"half": 0.5, "double": 2.0, "zero": 0.0, "of other sign": -1.0}
    for name, n in degrees.items():
        named |= {f"1/{name}": 1 / n, f"{name} times": float(n)} if n > 1 else {}
    words = [word for word, value in named.items() if abs(factor - value) <= 1e-3 * max(1.0, value)]
    if factor <= 0 and words:
        return words[0]
    return f"{', '.join(words) or f'{factor:.6g} times'} what it must be"


def largest(errors: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """Finds the largest of (error, where), NaN before all; (0, "") where there is none."""
    return max(errors, key=lambda error: (isnan(error[0]), error[0]), default=(0.0, ""))


def wrong(got: torch.Tensor, want: torch.Tensor, degrees: Mapping[str, int]) -> str:
    """Says in words how `got` differs from `want`: by a constant factor, else by how much."""
    got, want = got.double().flatten(), want.double().flatten()
    size = want.norm().clamp(min=1e-30)
    factor = (got @ want / size**2).item()
    if not got.isfinite().all():
        return "not finite"
    if (got - factor * want).norm() <= CONSTANT * (got - want).norm():
        return factor_words(factor, 1.0, degrees)
    return f"off by {((got - want).norm() / size).item():.2g} of its size"


def relative(got: torch.Tensor, want: torch.Tensor, like: torch.Tensor | None = None) -> float:
    """Computes the error of `got`, relative in the 2-norm to `like`, by default to `want`."""
    size = (want if like is None else like).double().norm().clamp(min=1e-30)
    return ((got.double() - want.double()).norm() / size).item()


def worst_of(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], degrees: Mapping[str, int],
             split: Mapping[str, int | None]) -> tuple[float, str, str]:
    """Finds (the largest relative error, the parameter, what is wrong with it). `split`: the dim along which
    tp ranks share each."""
    # no loss depends on a bias of k without rotary positions: its gradient is noise beside q's
    error, first = largest((relative(got[name], g, want[name.replace("k_b", "q_b")]), name)
                           for name, g in want.items())
    words, tp, dim = wrong(got[first], want[first], degrees), degrees["tp"], split[first]
    parts = [] if dim is None else [*zip(got[first].chunk(tp, dim), want[first].chunk(tp, dim), strict=True)]
    bad = [rank for rank, part in enumerate(parts) if relative(*part) > error / 4]
    if 0 < len(bad) < tp:
        words = f"{wrong(*parts[bad[0]], degrees)} on tp rank {', '.join(map(str, bad))}"
    elif want[first].dim() == 2:
        rows = (got[first] - want[first]).norm(dim=1) > 1e-4 * want[first].norm(dim=1).max()
        if 0 < rows.sum() < len(rows):
            words += f" ({rows.sum()} of {len(rows)} rows, from {rows.nonzero()[0].item()} on)"
    return error, place_of(first), words
