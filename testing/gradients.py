"""How far memo's gradients are from those of the reference (memo/verify/reference.py)."""

import math
import re
from collections.abc import Mapping
from itertools import groupby

import torch

from memo.verify.reference import Reference


def worst_gradient(model: Reference, gradients: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """(The largest relative error of memo's `gradients`, in the 2-norm of a parameter of the model, q, k and
    v as one, NaN where there is one; memo's names of that). Errors: KeyError: a name is missing."""
    want, errors = model.gradients(), dict[str, float]()

    def part(name: str) -> str:
        return re.sub(r"\.[qkv]_(?=.$)", ".qkv_", name)
    # no loss depends on a bias of k without rotary positions
    for names in (list(group) for _, group in groupby(sorted(want, key=part), part)):
        ours, theirs = (torch.cat([g[name].double().flatten() for name in names])
                        for g in (want, gradients))
        errors[", ".join(names)] = ((theirs - ours).norm() / ours.norm()).item()
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    return errors[worst], worst
