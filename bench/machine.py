"""What a committed result says about where it comes from."""

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
