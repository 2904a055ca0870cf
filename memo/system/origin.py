"""The origin of a run's numbers beside its keys: memo's sources, torch, kernels, data. All ranks must have
the same; a checkpoint keeps it, and a run that resumes says what has changed."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from memo import __version__
from memo.config.keys import shown
from memo.system.files import Json


def code() -> dict[str, str]:
    """Names this process's code: memo's version, 16 digits of the sha256 of its files, torch's version."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    names = ("memo/**/*.py", "memo/**/*.cpp", "model.py", "train.py")
    for path in sorted(path for name in names for path in root.glob(name)):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode() + path.read_bytes())
    return {"memo": f"{__version__}, sources {digest.hexdigest()[:16]}", "torch": torch.__version__}


def differences(was: Mapping[str, Json], now: Mapping[str, Json]) -> dict[str, str]:
    """Finds {name: both values} of what differs from what it `was`; older data has half a fingerprint."""
    changed = {}
    for name, value in now.items():
        before = was.get(name, value)
        half = name.endswith((" data", " documents", " weights")) and 16 in (len(value), len(str(before)))
        if (value[:16] != str(before)[:16]) if half else value != before:
            changed[name] = f"{name}={shown(value)}, was {shown(before)}"
    return changed
