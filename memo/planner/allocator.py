"""Record and replay of memory requests inside torch's allocator interface: the Python side of allocator.cpp.

Without a plan the requests of a segment (a layer's forward, say) are served by torch and recorded, once. With
one a request gets the address of the next planned one of its size, among the next few. If there is none, or
its place is taken, it is a miss, which torch serves; it is reported once for each segment. A wrong plan costs
speed, never data. Source: MEMO 4.3.4."""

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import weakref
from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch

from memo.errors import ConfigError, Unusable, warn
from memo.planner.plan import ALIGNMENT, Plan, cached_plan
from memo.planner.trace import Trace, parse_trace
from memo.system.command import progress
from memo.system.files import cache_place, keep, kept, open_file, regular

Result = TypeVar("Result")
SOURCE = Path(__file__).with_suffix(".cpp")
BROKEN = OSError, ValueError, AttributeError  # what opening a library may raise
Planned = namedtuple("Planned", "trace plan")
Stats = namedtuple("Stats", "requests misses peak_bytes arena_bytes live_blocks")


def open_library(path: Path) -> ctypes.CDLL:
    """Opens the library. Errors: OSError, ValueError: broken, or not ours alone; AttributeError: another."""
    descriptor = open_file(path)
    try:
        kept(descriptor)  # whole, and what the compiler wrote: the loader would die of less
        through = f"/proc/self/fd/{descriptor}"  # the file that was checked, whatever has its name by now
        lib = ctypes.CDLL(through if os.path.exists(through) else str(path))
    except (OSError, ValueError):
        os.close(descriptor)
        raise
    # it stays open: the loader takes a name that it knows, /proc/self/fd/7, for the library that it was
    handle, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    numbers = ctypes.POINTER(ctypes.c_int64)
    for name, result, arguments in (
            ("install", text, [number]), ("open", handle, [number, number]), ("close", None, [handle]),
            ("begin", number, [handle, text]), ("end", None, [number]), ("take", text, [handle, number]),
            ("reserve", text, [handle, ctypes.c_int64]), ("fence", ctypes.c_int64, [number]),
            ("again", None, [ctypes.c_int64]),
            ("plan", None, [handle, text, ctypes.c_int64, numbers, numbers]),
            ("stats", None, [handle, number, numbers])):
        function = getattr(lib, f"memo_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


def library_of(folder: str | Path, *flags: str) -> ctypes.CDLL:
    """Opens the library in `folder`; builds it with g++, in seconds, where there is none that can be opened.
    Errors: Unusable; as open_library()."""
    where = Path(torch.__file__).parent
    command = ["g++", "-O2", "-std=c++20", "-shared", "-fPIC", str(SOURCE), f"-I{where / 'include'}",
               f"-L{where / 'lib'}", "-lc10",
               f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *flags]
    made_from = SOURCE.read_bytes() + repr((torch.__version__, platform.machine(), command)).encode()
    library = Path(folder) / f"allocator-{hashlib.sha256(made_from).hexdigest()[:16]}.so"
    with suppress(*BROKEN):
        return open_library(library)
    if os.path.lexists(library):
        regular(library.lstat())  # nothing else is replaced
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # two runs may start at once
        built = Path(scratch) / library.name
        try:
            with progress(lambda: "building the memory plan's library with g++, once"):
                done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True)
        except OSError as e:
            raise Unusable(f"there is no C++ compiler, g++ ({e.strerror})") from None
        if done.returncode or not built.exists():
            why = next(iter(done.stderr.splitlines()), f"exit code {done.returncode}")
            raise Unusable(f"g++ failed: {why}")
        keep(built.read_bytes(), library)
    return open_library(library)


@cache
def load_library(*flags: str) -> ctypes.CDLL:
    """Loads the compiled library. Errors: Unusable."""
    folder, why = cache_place()
    if folder is None:
        warn(f"compiled code is not kept from run to run: {why}")
    try:
        with suppress(OSError):  # a folder that cannot be written, say
            if folder is not None:
                return library_of(folder, *flags)
        with tempfile.TemporaryDirectory(prefix="memo-", ignore_cleanup_errors=True) as private:
            return library_of(private, *flags)  # some seconds at every start
    except BROKEN as e:
        raise Unusable(f"its library cannot be built or loaded ({e})") from None


class NoArena:
    """Stands for memory_plan=off: every request goes to torch, as if there were no segments."""

    plans = ()

    def run(self, label: str, work: Callable[..., Result], *args: object) -> Result:
        return work(*args)

    def settle(self) -> bool:
        return False

    close = settle

    def fence(self, varies: bool) -> Callable[[], object]:
        """Marks a place in a segment. `varies`: work begins that is done for each of some parts -> what to
        call before each: its requests may be no larger than those of the part that was rehearsed."""
        return lambda: None

    def stats(self, reset_peak: bool = False) -> Stats:
        return Stats(0, 0, None, 0, 0)


class Arena:
    """Records and places a model's temporary tensors: `run(label, work, *args)` is a segment, settle() the
    boundary of a step, `plans` all that was planned so far, [(trace, plan)]. A segment stays on one stream,
    and on the device that was current when the plan came: a free place may be given away at once. `guard`:
    check live blocks on every request, and on the CPU fill what is freed with NaN. Errors: Unusable."""

    def __init__(self, device: torch.device, solver: str = "auto", guard: bool = False,
                 flags: Sequence[str] = ()) -> None:
        self.device, self.solver, self.lib = device, solver, load_library(*flags)
        self.plans: list[Planned] = []
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.init()
        if why := self.lib.memo_install(cuda):
            raise Unusable(why.decode())
        self.handle = self.lib.memo_open(cuda, guard)
        # the arena's memory is given back with the last tensor in it
        self.close = weakref.finalize(self, self.lib.memo_close, self.handle)
        self.run("probe", partial(torch.empty, 1, device=device))
        self.recorded()
        if self.stats().requests != 1:
            raise Unusable("this torch's allocator has another interface")

    def run(self, label: str, work: Callable[..., Result], *args: object) -> Result:
        """Calls work(*args) as the segment `label`, words with single spaces between. Segments do not nest. A
        closed arena calls it alone."""
        if not self.close.alive:
            return work(*args)
        if not self.lib.memo_begin(self.handle, label.encode()):
            raise RuntimeError(f"segment {label!r} may not begin inside another one")
        failed = True
        try:
            result = work(*args)
            failed = False
            return result
        finally:
            self.lib.memo_end(failed)

    def fence(self, varies: bool) -> Callable[[], object]:
        """Marks a place, as NoArena.fence() says."""
        return partial(self.lib.memo_again, self.lib.memo_fence(varies))

    def stats(self, reset_peak: bool = False) -> Stats:
        """Counts Stats since the start; peak_bytes, since a reset, of the arena, or of what is recorded."""
        out = (ctypes.c_int64 * len(Stats._fields))()
        if self.close.alive:
            self.lib.memo_stats(self.handle, reset_peak, out)
        return Stats(*out)

    def recorded(self) -> Trace:
        """Takes the Trace recorded since the last call; what is not freed outlives the step."""
        return parse_trace(self.lib.memo_take(self.handle, False).decode(), "recorded").settled()

    def settle(self) -> bool:
        """Plans, between two steps, what the last recorded, and warns of misses -> is a plan new?"""
        for line in self.lib.memo_take(self.handle, True).decode().splitlines():
            print(f"warning: memory plan: {line}; torch serves what the plan does not have", file=sys.stderr)
        try:
            if not (trace := self.recorded()).events:
                return False
            self.replay(trace)
        except (ConfigError, Unusable) as e:
            print(f"warning: memory plan: {e}; torch serves these segments", file=sys.stderr)
            return False
        return True

    def replay(self, trace: Trace) -> None:
        """Plans `trace`, or finds its plan in the cache, and installs that. Errors: Unusable."""
        plan = cached_plan(trace, cache_place()[0], self.solver, ALIGNMENT[self.device.type])
        self.install(plan)
        self.plans.append(Planned(trace, plan))

    def install(self, plan: Plan) -> None:
        """Gives the segments of `plan` its addresses. Errors: Unusable: no memory for the arena."""
        if plan.arena_bytes > (before := self.stats().arena_bytes):
            self.lib.memo_reserve(self.handle, 0)
            torch.cuda.empty_cache()  # of the old arena, and of what the recorded step left behind
            if why := self.lib.memo_reserve(self.handle, plan.arena_bytes):
                why = why.decode().splitlines()[0]
                self.lib.memo_reserve(self.handle, before)
                raise Unusable(f"no memory for an arena of {plan.arena_bytes / 2**30:.4g} GiB ({why})")
        for label, requests in plan.segments.items():
            columns = [n for n, _ in requests], [-1 if offset is None else offset for _, offset in requests]
            array = ctypes.c_int64 * len(requests)
            self.lib.memo_plan(self.handle, label.encode(), len(requests), *(array(*c) for c in columns))
