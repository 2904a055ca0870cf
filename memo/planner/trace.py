"""The memory requests of a training step, and the text format that they are kept in. Source: MEMO 4.2."""

from collections.abc import Iterable
from dataclasses import dataclass

from memo.errors import ConfigError

OUTSIDE = ""  # the segment of what is requested between segments
WHOLE = "step"  # the one segment of a log that marks none
VERBS = {"malloc": 2, "free": 2, "keep": 2, "begin": 1, "end": 1}  # and how many words follow
Entry = tuple[str, str, int]  # of a log: (verb, tensor, bytes), or ("begin" or "end", segment, 0)


@dataclass(frozen=True)
class Trace:
    """Holds a step's memory requests in order. A name may come again after its free."""

    events: tuple  # of Entry; `keep` is the malloc of what outlives the step, and is not planned

    @property
    def text(self) -> str:
        return "".join(f"{verb} {name} {nbytes}\n" if VERBS[verb] == 2 else f"{verb} {name}\n"
                       for verb, name, nbytes in self.events)

    @property
    def segments(self) -> dict[str, list[Entry]]:
        """Lists {label: [events], marks included}, in their order. Each begin has its end."""
        begins, ends = ([i for i, event in enumerate(self.events) if event[0] == mark]
                        for mark in ("begin", "end"))
        return {self.events[i][1]: [*self.events[i:k + 1]] for i, k in zip(begins, ends, strict=True)}

    def repeated(self, order: Iterable[tuple[str, str]]) -> "Trace":
        """Repeats the segments of `order`, [(label, its like)]. What is not freed outlives the step."""
        segments = {label: Trace(tuple(its)).settled().events for label, its in self.segments.items()}
        return checked_trace([(verb, label if VERBS[verb] == 1 else f"{number}.{name}", nbytes)
                              for number, (label, like) in enumerate(order)
                              for verb, name, nbytes in segments[like]])

    def settled(self) -> "Trace":
        """Marks what is never freed as `keep`."""
        never_freed = iter([r.upper == len(self.events) for r in requests_of(self)[0]])
        return Trace(tuple(
            ("keep" if verb in ("malloc", "keep") and next(never_freed) else verb, name, nbytes)
            for verb, name, nbytes in self.events))


def checked_trace(events: list[Entry], lines: list[int] | None = None, where: str = "requests") -> Trace:
    """Checks (verb, name, bytes), read from `lines` -> Trace; WHOLE if unmarked. Errors: ConfigError."""
    live: dict[str, int] = {}
    total, segment, seen = 0, OUTSIDE, set()
    for i, (verb, name, nbytes) in enumerate(events):
        at = f"{where}:{lines[i] if lines else i}: {verb} {name}" + f" {nbytes}" * (VERBS[verb] == 2)
        if VERBS[verb] == 2 and nbytes <= 0:
            raise ConfigError(f"{at}: bytes={nbytes} must be at least 1")
        if verb in ("malloc", "keep") and name in live:
            raise ConfigError(f"{at}: it is allocated already, {live[name]} bytes; free it first")
        if verb == "malloc":
            live[name] = nbytes
            total += nbytes
            if total >= 10**18:
                raise ConfigError(f"{at}: bytes in use at one time must stay below 1e18")
        elif verb == "free":
            if name not in live:
                raise ConfigError(f"{at}: it is not allocated here; a free needs a malloc of its own before "
                                  "it")
            if nbytes != (allocated := live.pop(name)):
                raise ConfigError(f"{at}: bytes={nbytes} must be {allocated}, as in its malloc")
            total -= nbytes
        elif verb == "begin":
            if segment != OUTSIDE:
                raise ConfigError(f"{at}: segment {segment!r} must end first, segments do not nest")
            if name in seen:
                raise ConfigError(f"{at}: there was a segment of this name already; give each its own")
            segment = name
            seen.add(name)
        elif verb == "end":
            if segment != name:
                why = f"the segment that began must end, {segment!r}" if segment else "it did not begin"
                raise ConfigError(f"{at}: {why}")
            segment = OUTSIDE
    if segment != OUTSIDE:
        raise ConfigError(f"{where}: segment {segment!r} must end before the log does")
    if events and not seen:
        return Trace((("begin", WHOLE, 0), *events, ("end", WHOLE, 0)))
    return Trace(tuple(events))


@dataclass
class Request:
    """Describes request k of a segment."""

    segment: str
    k: int
    bytes: int
    planned: bool  # in a segment, and not kept
    lower: int  # alive from this number of the trace's requests, frees counted too,
    upper: int  # to this one
    freed_in: str = OUTSIDE  # the segment that frees it


def requests_of(trace: Trace) -> tuple[list[Request], dict[str, tuple[int, int]]]:
    """Lists the Requests in order, and {segment: (lower, upper)}, its request numbers."""
    requests: list[Request] = []
    live: dict[str, Request] = {}
    spans: dict[str, tuple[int, int]] = {}
    segment, k, now = OUTSIDE, 0, 0
    for verb, name, nbytes in trace.events:
        if verb == "begin":
            segment, k, spans[name] = name, 0, (now, now)
        elif verb == "end":
            segment, spans[name] = OUTSIDE, (spans[name][0], now)
        elif verb == "free":
            if request := live.pop(name, None):  # of a part of a trace, another part may have requested it
                request.upper, request.freed_in = now, segment
        else:
            planned = verb == "malloc" and segment != OUTSIDE
            requests.append(Request(segment, k, nbytes, planned, now, len(trace.events)))
            if verb == "malloc":
                live[name] = requests[-1]
            k += 1
        now += VERBS[verb] == 2  # marks are no requests
    return requests, spans


def parse_trace(text: str, where: str = "requests") -> Trace:
    """Parses a text log; empty lines and what follows # are skipped. Errors: ConfigError."""
    events: list[Entry] = []
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        verb, *words = line.partition("#")[0].split() or [""]
        if not verb:
            continue
        at = f"{where}:{number}"
        if verb not in VERBS:
            raise ConfigError(f"{at}: {verb!r} must be one of {', '.join(VERBS)}")
        if VERBS[verb] == 1:
            if not words:
                raise ConfigError(f"{at}: {verb} needs the name of a segment")
            events.append((verb, " ".join(words), 0))
        else:
            if len(words) != 2:
                raise ConfigError(f"{at}: {line.strip()!r} must be {verb} <tensor> <bytes>")
            if not words[1].removeprefix("-").isdecimal():
                raise ConfigError(f"{at}: bytes={words[1]!r} must be a whole number")
            if len(words[1]) > 18:
                raise ConfigError(f"{at}: bytes={words[1]} must be below 1e18")
            events.append((verb, words[0], int(words[1])))
        lines.append(number)
    return checked_trace(events, lines, where)
