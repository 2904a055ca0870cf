"""What a committed result says about where it comes from; results in parts."""

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch


def first_line(*command):
    try:
        out = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout
    except OSError:
        return ""
    return out.split("\n")[0].strip()


def machine():
    """GPU and driver (or the processor), torch, Python, commit and command of this run."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        driver = first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    else:
        cpuinfo = Path("/proc/cpuinfo")
        rows = cpuinfo.read_text().split("\n") if cpuinfo.exists() else []
        names = [row.split(":")[1].strip() for row in rows if row.startswith("model name")]
        device, driver = f"{names[0] if names else platform.processor()} x {len(names) or '?'}", None
    command = " ".join(["python -m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]])
    return dict(device=device, driver=driver, torch=torch.__version__, python=platform.python_version(),
                commit=first_line("git", "rev-parse", "HEAD"), command=command)


def store_parts(doc, path, parts):
    """{part: what it found}, after the command line's parts of {name: function(rounds)} have run; `path`
    gets each as it is found, and keeps what was found of the others."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *parts], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    result = json.loads(path.read_text()) if path.exists() else {}
    for name in args.parts or parts:
        result |= {name: dict(machine=machine(), found=parts[name](args.rounds))}
        path.write_text(json.dumps(result, indent=1) + "\n")
    return {name: part["found"] for name, part in result.items()}
