"""Plays the items one after the other, each in a process of its own, and reports after each. Nothing here
imports torch: whatever an item does to its device, this process goes on."""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from bench.gpu_hour.report import write_report
from memo.system.files import save_json

ROOT = Path(__file__).parents[2]
PASSED_ON = ("attention", "n_embd", "longest", "host_memory_gb")
GRACE_S = 15  # for a killed process to leave the device


def read(path):
    """The JSON of a file; {} where it is not there or is no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def command_of(item, args):
    options = [f"--{name}={getattr(args, name)}" for name in PASSED_ON]
    return [sys.executable, "-m", "bench.gpu_hour", f"--item={item.name}", f"--function={item.function}",
            f"--out={args.out}", *options]


def start(item, args, log):
    """The process of an item, a group of its own: all that it starts ends with it."""
    return subprocess.Popen(command_of(item, args), cwd=ROOT, env=os.environ | dict(PYTHONUNBUFFERED="1"),
                            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                            start_new_session=True)


def end(process):
    """Kills a process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        print(f"warning: process {process.pid} hangs in the driver, and is left", flush=True)


def verdict(found, code, limit_s):
    """In a line: pass, or fail, skipped, timed out with the reason. `code`: None where the limit was over."""
    lines = found.get("lines", [])
    if code is None:
        return f"timed out after {limit_s:.0f} s, with {len(lines)} lines"
    if found.get("skipped"):
        return f"skipped: {found['skipped']}"
    if code:
        died = f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with {code}"
        return f"fail: {found.get('error') or died}"
    if wrong := [line["what"] for line in lines if line["ok"] is False]:
        return f"fail: {len(wrong)} of {len(lines)} lines, first {wrong[0]}"
    if lines and all("skipped" in line for line in lines):
        return f"skipped: {lines[0]['skipped']}"
    return "pass"


def play_item(item, args):
    """Runs an item to its end, or its limit, and adds the verdict to what it found."""
    path, began = args.out / "items" / f"{item.name}.json", time.monotonic()
    path.unlink(missing_ok=True)
    with open(path.with_suffix(".log"), "wb") as log:
        process = start(item, args, log)
        try:
            code = process.wait(item.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    found = read(path)
    found |= dict(item=item.name, question=item.question, limit_s=item.limit_s,
                  seconds=time.monotonic() - began, verdict=verdict(found, code, item.limit_s))
    found.setdefault("lines", [])
    save_json(found, path)
    return found


def chosen(items, args):
    """The items that were asked for, A1 always: without it nobody knows what the figures are of."""
    names = [name for name in items if not args.which or name in args.which or name[0] in args.which]
    return list(dict.fromkeys([*(["A1"] if "A1" in items else []), *names]))


def play(items, args):
    """Plays what was asked for and is not finished. -> 0, whatever happens to an item."""
    def interrupt(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, interrupt)
    (args.out / "items").mkdir(parents=True, exist_ok=True)
    names, began, late = chosen(items, args), time.monotonic(), []
    again = names if args.again == "all" else args.again.split(",")
    paths = {name: args.out / "items" / f"{name}.json" for name in items}
    todo = [name for name in names if name in again or "verdict" not in read(paths[name])]
    print(f"{len(todo)} items, at most {sum(items[name].limit_s for name in todo) / 60:.0f} minutes, into "
          f"{args.out}; Ctrl-C leaves what is there")
    for name in todo:
        print(f"  {name}  at most {items[name].limit_s:4.0f} s  {items[name].question}", flush=True)

    def report():
        done = {name: found for name in items if "verdict" in (found := read(paths[name]))}
        try:
            write_report(done, [name for name in items if name not in done], args.out)
        except Exception:  # what is odd in an item's figures must not end the others
            traceback.print_exc()
    try:
        for name in todo:
            if args.seconds and time.monotonic() - began + items[name].limit_s > args.seconds:
                late.append(name)
                continue
            found = play_item(items[name], args)
            print(f"{name}  {found['seconds']:6.1f} s  {found['verdict']}", flush=True)
            report()
        if late:
            print(f"not started, for want of seconds: {', '.join(late)}; call again to go on")
    except KeyboardInterrupt:
        print("interrupted; call again to go on", flush=True)
    report()
    print(f"report in {args.out / 'report.md'}")
    return 0
