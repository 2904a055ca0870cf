"""Life, not progress: a run in which nothing happens ends, and names the rank that the others wait for.

A thread of each rank looks now and then at what its host came to last (a step, a message, a part of a save),
and at the newest work of a stream that is done. Ranks tell each other through the store by which they met.
"""

import json
import linecache
import sys
import threading
import time
import traceback
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from memo.checkpoint.manifest import SAVE
from memo.errors import OWN, reason, warn
from memo.run.state import Run
from memo.system.axis import CAME, WRITTEN
from memo.system.launch import leave, rank_name

LEAST_S, STEPS = 600, 10  # stall_timeout=auto: at least these seconds, and so many of the slowest steps
FIRST_S = 60  # more for the first step, which is planned
SAVED_PER_S = 5e6  # bytes that a slow disk takes
SILENT_S = 3  # a rank that tells nothing new for so long, or for a quarter of the limit, is stopped


def doing(thread: threading.Thread) -> str:
    """Names the line of memo's that a thread is at, and what it calls."""
    if (frame := sys._current_frames().get(thread.ident or 0)) is None:
        return "its end"
    name, line = frame.f_code.co_filename, frame.f_lineno or 0
    own = (f for f, _ in traceback.walk_stack(frame) if f.f_globals.get("__name__", "").split(".")[0] in OWN)
    at, code = next(own, frame), linecache.getline(name, line).strip(" :\n")[:80]
    return f"{at.f_code.co_filename.rpartition('/')[2]}:{at.f_lineno}, {at.f_code.co_name}: {code}"


def verdict(records: dict[int, dict], silent: Collection[int] = ()) -> str:
    """Says which ranks have not come to a message that others have, or tell nothing; else where all are."""
    late, early = dict[int, str](), set[int]()
    alive = [record for rank, record in records.items() if rank not in silent]
    every = {line for record in records.values() for line in record["came"]}
    lines = {SAVE} if any(record["trains"] for record in alive) else every
    newest = {next(reversed(record["came"]), "") for record in alive}  # where they wait
    for line in sorted(lines, key=lambda line: (line not in newest, line)):
        came = {rank: record["came"][line] for rank, record in records.items() if line in record["came"]}
        most, kind = max(came.values())
        behind = {rank for rank, (n, _) in came.items() if n < most}
        late = dict.fromkeys(behind, f"has not come to {kind} {most} of {line}, ") | late
        early |= came.keys() - behind if behind else set()
    named = sorted(silent or late.keys() - early or late or records)[:8]
    stopped = "says nothing: it is stopped, or its host is"
    return "; ".join(f"{records[rank]['name']} {late.get(rank, '')}"
                     f"{stopped if rank in silent else records[rank]['at']}" for rank in named)


class Watch:
    """Ends this process when nothing happens for the stall_timeout of `run` on any of its ranks."""

    def __init__(self, run: Run) -> None:
        self.run, self.host, self.over = run, run.mesh.host, threading.Event()
        self.store = self.host.store and self.host.store.clone()  # of this thread alone
        self.save_s = sum(4 * piece.tensor.numel() for piece in run.optimizer.pieces()) / SAVED_PER_S
        self.signs, self.still_s = dict[str, object](), dict(step=0.0, save=0.0)
        self.heard: dict[int, tuple[bytes, float]] = {}  # of each rank what it told last, and for how long
        with suppress(RuntimeError):  # no memory for a thread
            threading.Thread(target=self.watch, name="memo watch", daemon=True).start()

    def close(self) -> None:
        self.over.set()

    def limit_s(self) -> float:
        run = self.run
        step_s = max(run.slowest_s, run.expected.seconds.get("step", 0) if run.expected else 0)
        return max(LEAST_S, STEPS * step_s) if run.cfg.stall_timeout == "auto" else run.cfg.stall_timeout

    def watch(self) -> None:
        """Looks until the run is over. It counts looks, not seconds: a process that is stopped has none."""
        line: str | None = None
        caller, unanswered_s = ThreadPoolExecutor(1, "memo watch"), 0.0
        talk = caller.submit(lambda: line)
        try:
            while limit_s := self.limit_s():
                if self.over.wait(tick_s := min(15, limit_s / 50)):
                    return
                record, silent_s = self.record(tick_s, limit_s), max(SILENT_S, limit_s / 4)
                if talk.done():
                    line = None if talk.exception() else talk.result()  # without a store its rank is lost
                    talk, unanswered_s = caller.submit(self.talk, record, tick_s, silent_s), 0.0
                elif (unanswered_s := unanswered_s + tick_s) > silent_s and record["still"] >= 1:
                    line = "rank 0, or its torchrun, does not answer: it is stopped, or its host is"
                if line is not None and not self.over.is_set():
                    still_s = max(self.still_s.values())
                    leave(line and f"nothing has happened for {still_s:.0f} s: {line}; what is saved is whole"
                          "; --stall_timeout gives other seconds, 0 none",
                          tick_s + 1)  # until all ranks know: that others leave is no news then
        except Exception as e:
            warn(f"a hang would not be noticed any more ({type(e).__name__}: {reason(e)})")

    def record(self, tick_s: float, limit_s: float) -> dict:
        """Says where this rank is. `still`: how long nothing has happened, in parts of what is allowed."""
        run, came = self.run, dict(CAME)
        saving = next((t for t in threading.enumerate() if t.name == "memo checkpoint"), None)
        launched, done, label = run.model.swap.streams.timeline.newest()
        saved = came.pop(SAVE, (0, ""))
        signs = dict(step=(run.step, run.done, launched, done, came), save=(saved, WRITTEN[0]))
        for part, sign in signs.items():
            waits = sign == self.signs.get(part) and (saving or part == "step")
            self.still_s[part] = self.still_s[part] + tick_s if waits else 0.0
            self.signs[part] = sign
        limit_s += FIRST_S * (run.done <= run.first + 1) + (self.save_s if saving else 0)
        at = f"is in step {run.step}{f', behind {label},' * bool(label)} at {doing(threading.main_thread())}"
        if saving:
            at += f", its save at {doing(saving)}"
        return dict(name=rank_name(self.host.rank), at=at, still=max(self.still_s.values()) / limit_s,
                    trains=self.still_s["step"] < limit_s, came={SAVE: saved} | came, now=time.monotonic())

    def talk(self, record: dict, tick_s: float, silent_s: float) -> str | None:
        """Tells the other ranks where this one is -> why the run ends ("": another rank says it), or None."""
        if self.store is None:
            return verdict({0: record}) if record["still"] >= 1 else None
        store, me, run = self.store, self.host.rank, self.run.owner
        store.set(f"{run} {me}", json.dumps(record))
        if store.add(f"{run} ends", 0):
            return ""
        for rank in range(self.host.size) if record["still"] >= 0.5 else ():
            told = store.get(key) if store.check([key := f"{run} {rank}"]) else b"null"
            before, for_s = self.heard.get(rank, (b"", 0.0))
            self.heard[rank] = told, for_s + tick_s if told == before else 0.0
        if record["still"] < 1:
            return None
        records = {rank: json.loads(told) or dict(name=f"rank {rank}", at="is not here", still=0,
                                                  trains=False, came={})
                   for rank, (told, _) in self.heard.items()}
        silent = [rank for rank, (_, for_s) in self.heard.items() if for_s > silent_s]
        goes_on = any(records[rank]["still"] < 1 for rank in records if rank not in silent)
        if goes_on and record["still"] < STEPS:
            return None
        return verdict(records, silent) if store.add(f"{run} ends", 1) == 1 else ""
