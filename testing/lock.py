"""Write requirements-lock.txt: every package that requirements.txt brings, with the hashes of its wheels.

    python -m testing.lock

pip resolves requirements.txt for this Python; then it is asked for the wheel of each of these versions for
CPython 3.11 to 3.13 on Linux, x86-64 and ARM, and names its hash as the index lists it. torch, its compiler
and NVIDIA's libraries are left out: their builds differ from machine to machine.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
PYTHONS, MACHINES = ("3.11", "3.12", "3.13"), ("x86_64", "aarch64")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17",
             "manylinux2014")
HEADER = """\
# Made by python -m testing.lock from requirements.txt: the wheels for CPython 3.11 to 3.13 on Linux.
#     pip install torch==<the version in requirements.txt>
#     pip install --require-hashes -r requirements-lock.txt
# torch and NVIDIA's libraries are not here: docs/install.md says how they are chosen.
"""


def report(*argv: str) -> list[dict]:
    """Ask pip what it would install, without installing anything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
                        "--target", folder, "--report", str(path), "--only-binary=:all:", *argv], check=True)
        return json.loads(path.read_text())["install"]


def line_of(part: dict) -> str:
    """Name a package and its version as a file of requirements does."""
    name = re.sub(r"[-_.]+", "-", part["metadata"]["name"]).lower()
    return f"{name}=={part['metadata']['version']}"


def main() -> None:
    found = map(line_of, report("-r", str(ROOT / "requirements.txt")))
    wanted = sorted(line for line in found if not LEFT_OUT.fullmatch(line.partition("==")[0]))
    hashes = defaultdict[str, set[str]](set)
    for python in PYTHONS:
        for machine in MACHINES:
            tags = [f"--platform={platform}_{machine}" for platform in PLATFORMS]
            for part in report("--no-deps", f"--python-version={python}", *tags, *wanted):
                hashes[line_of(part)].add(part["download_info"]["archive_info"]["hashes"]["sha256"])
    rows = [" \\\n    ".join([line, *(f"--hash=sha256:{digest}" for digest in sorted(hashes[line]))])
            for line in wanted]
    (ROOT / "requirements-lock.txt").write_text(HEADER + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
