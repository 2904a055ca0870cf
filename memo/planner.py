"""The memory plan: from the requests of a training step to an address for each of them.

A Trace is the step's log, `malloc <tensor> <bytes>` and `free <tensor> <bytes>`, with `begin <segment>` and `end <segment>`
around the pieces of the step: the embedding, a layer's forward, the head, a layer's backward, the optimizer. Level 1
solves each piece by itself, and equal pieces (the layers) once; level 2 puts one pseudo block in the place of each and
solves the whole step. Source: MEMO 4.2 and 4.3.2.

    python -m memo.planner requests.log -o plan.json
"""

import hashlib
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from memo import dsa, dsa_solvers
from memo.command import Arguments, end_with_reader, progress, run
from memo.errors import ConfigError, reason
from memo.files import keep_json, parse_json, read_text, readable_json

OUTSIDE = ""  # the segment of what is requested between the segments
WHOLE = "step"  # the one segment of a log that marks none
ALIGNMENT = {"cpu": 64, "cuda": 512}  # bytes; what torch's own blocks have
PLANNING_S = 10.0  # for each of a run's problems; what is found by then is used
LEVEL = dict(segment=str, n=int, lower_bound=int, peak=int, proven=bool, solver=str, seconds=float)  # of Plan.levels
MOST_ABOVE = 2  # lower bounds that a kept arena may take: a hole in the places could make it any size. What is planned
#                 is at its bound or a few percent above (bench/planner.py); beyond twice it is planned at every start
VERBS = {"malloc": 2, "free": 2, "keep": 2, "begin": 1, "end": 1}  # and how many words follow


class LogError(ConfigError):
    """A request log that cannot be. One line: file, line, value, rule."""


@dataclass(frozen=True)
class Trace:
    """The memory requests of a step in their order: (verb, tensor, bytes), or ("begin" or "end", segment, 0).

    A tensor's name may come again after its free. What is never freed lives to the end of the log; `keep` stands for the
    malloc of a tensor that outlives the step and so is not planned.
    """

    events: tuple

    @property
    def text(self):
        return "".join(f"{verb} {name} {nbytes}\n" if VERBS[verb] == 2 else f"{verb} {name}\n"
                       for verb, name, nbytes in self.events)

    @property
    def segments(self):
        """{label: [events], marks included}, in their order."""
        out, label = {}, OUTSIDE
        for event in self.events:
            label = event[1] if event[0] == "begin" else label
            if label != OUTSIDE:
                out.setdefault(label, []).append(event)
            label = OUTSIDE if event[0] == "end" else label
        return out

    def repeated(self, order):
        """The Trace of the segments of `order`, [(label, the label here that makes the same requests)]. What a segment does
        not free itself outlives the step."""
        segments, events = {label: Trace(tuple(its)).settled().events for label, its in self.segments.items()}, []
        for number, (label, like) in enumerate(order):
            for verb, name, nbytes in segments[like]:
                events.append((verb, label if VERBS[verb] == 1 else f"{number}.{name}", nbytes))
        return check(events)

    def settled(self):
        """What is never freed, as `keep`."""
        last = {}
        for i, (verb, name, _) in enumerate(self.events):
            if verb == "malloc":
                last[name] = i
            elif verb == "free":
                last.pop(name, None)
        kept = set(last.values())
        return Trace(tuple(("keep" if i in kept else verb, name, nbytes)
                           for i, (verb, name, nbytes) in enumerate(self.events)))


def check(events, lines=None, where="requests"):
    """The Trace of (verb, name, bytes), read from those `lines` of a file. Errors: LogError where a tensor is freed twice,
    freed before it was allocated or with other bytes, allocated twice; where segments are nested, repeated or left open."""
    live, total, segment, seen = {}, 0, OUTSIDE, set()
    for i, (verb, name, nbytes) in enumerate(events):
        at = f"{where}:{lines[i] if lines else i}: {verb} {name}"
        if VERBS[verb] == 2 and nbytes <= 0:
            raise LogError(f"{at} {nbytes}: bytes={nbytes} must be at least 1")
        total += nbytes if verb == "malloc" else -nbytes if verb == "free" else 0
        if total >= 10**18:
            raise LogError(f"{at} {nbytes}: bytes in use at one time must stay below 1e18")
        if verb in ("malloc", "keep"):
            if name in live:
                raise LogError(f"{at} {nbytes}: it is allocated already, {live[name]} bytes; free it first")
            if verb == "malloc":
                live[name] = nbytes
        elif verb == "free":
            if name not in live:
                raise LogError(f"{at} {nbytes}: it is not allocated here; a free needs a malloc of its own before it")
            if nbytes != (allocated := live.pop(name)):
                raise LogError(f"{at} {nbytes}: bytes={nbytes} must be {allocated}, as in its malloc")
        elif verb == "begin":
            if segment != OUTSIDE:
                raise LogError(f"{at}: segment {segment!r} must end first, segments do not nest")
            if name in seen:
                raise LogError(f"{at}: there was a segment of this name already; give each its own")
            segment = name
            seen.add(name)
        elif segment != name:
            raise LogError(f"{at}: the segment that began must end, {segment!r}" if segment else f"{at}: it did not begin")
        else:
            segment = OUTSIDE
    if segment != OUTSIDE:
        raise LogError(f"{where}: segment {segment!r} must end before the log does")
    return Trace(tuple(events))


def parse(text, where="requests"):
    """The Trace of a text log; empty lines and what follows # are skipped. Errors: LogError."""
    events, lines = [], []
    for number, line in enumerate(text.split("\n"), 1):
        verb, *words = line.partition("#")[0].split() or [""]
        if not verb:
            continue
        at = f"{where}:{number}"
        if verb not in VERBS:
            raise LogError(f"{at}: {verb!r} must be one of {', '.join(VERBS)}")
        if VERBS[verb] == 1:
            if not words:
                raise LogError(f"{at}: {verb} needs the name of a segment")
            event = verb, " ".join(words), 0
        else:
            if len(words) != 2:
                raise LogError(f"{at}: {line.strip()!r} must be {verb} <tensor> <bytes>")
            if not words[1].removeprefix("-").isdecimal():
                raise LogError(f"{at}: bytes={words[1]!r} must be a whole number")
            if len(words[1]) > 18:
                raise LogError(f"{at}: bytes={words[1]} must be below 1e18")
            event = verb, words[0], int(words[1])
        events.append(event)
        lines.append(number)
    return check(events, lines, where)


# --- the plan ---

@dataclass(frozen=True)
class Plan:
    """Where each request of each segment gets its memory: request k of `segments[label]` is (bytes, offset in the arena),
    the offset None where it is left to torch. `lower_bound` is the greatest sum of bytes in use at one time; `levels`
    tells what was solved: [{segment, n, lower_bound, peak, proven, solver, seconds}].
    """

    arena_bytes: int
    lower_bound: int
    alignment: int
    solver: str
    seconds: float
    segments: dict
    levels: tuple

    @property
    def proven(self):
        """Whether no plan of the whole step can be smaller."""
        return self.arena_bytes == self.lower_bound

    def __hash__(self):
        return hash(readable_json(asdict(self)))

    @classmethod
    def from_json(cls, text):
        plan = parse_json(text)
        plan["segments"] = {label: tuple(tuple(r) for r in requests) for label, requests in plan["segments"].items()}
        return cls(**{**plan, "levels": tuple(plan["levels"])})


@dataclass
class Request:
    """One tensor to plan: request k of a segment, alive from event `lower` of the trace to `upper`. `freed_in`: the segment
    that frees it; OUTSIDE where none does."""

    segment: str
    k: int
    bytes: int
    lower: int
    upper: int
    freed_in: str = OUTSIDE


def requests_of(trace):
    """([Request], {segment: [bytes of all its requests]}, {segment: (lower, upper)})."""
    requests, live, sizes, spans, segment = [], {}, {}, {}, OUTSIDE
    for now, (verb, name, nbytes) in enumerate(trace.events):
        if verb == "begin":
            segment, sizes[name], spans[name] = name, [], (now, now)
        elif verb == "end":
            spans[segment], segment = (spans[segment][0], now + 1), OUTSIDE
        elif verb == "free" and name in live:
            live[name].upper, live.pop(name).freed_in = now, segment
        elif segment != OUTSIDE and verb in ("malloc", "keep"):
            if verb == "malloc":
                live[name] = Request(segment, len(sizes[segment]), nbytes, now, len(trace.events))
                requests.append(live[name])
            sizes[segment].append(nbytes)
    return requests, sizes, spans


class Levels:
    """Solves what it is given, equal problems once (a layer's, or a chunk's of the head), and remembers what it took."""

    def __init__(self, alignment, solver, time_limit):
        self.alignment, self.how, self.solutions, self.rows = alignment, (solver, time_limit), {}, []

    def problem(self, lives):
        """The dsa.Problem of [(lower, upper, bytes)], the times replaced by their ranks."""
        ranks = {t: rank for rank, t in enumerate(sorted({t for lower, upper, _ in lives for t in (lower, upper)}))}
        buffers = (dsa.Buffer(str(i), ranks[lower], ranks[upper], n) for i, (lower, upper, n) in enumerate(lives))
        return dsa.Problem(tuple(buffers), alignment=self.alignment)

    def solve(self, name, lives):
        """(offsets, peak)."""
        offsets, peak = [0] * len(lives), 0
        for group in dsa.components((lower, upper) for lower, upper, _ in lives):
            solution = self.solution(name, self.problem([lives[i] for i in group]))
            peak = max(peak, solution.peak)
            for i, offset in zip(group, solution.offsets, strict=True):
                offsets[i] = offset
        return offsets, peak

    def solution(self, name, problem):
        if problem not in self.solutions:
            s = self.solutions[problem] = dsa.solve(problem, *self.how)
            self.rows.append(dict(segment=name, n=len(problem.buffers), lower_bound=s.lower_bound, peak=s.peak,
                                  proven=s.proven, solver=s.solver, seconds=s.seconds))
        return self.solutions[problem]


def compose(trace, solver, alignment, time_limit, by_segment):
    """The validated Plan of a trace, in two levels or in one."""
    start = time.perf_counter()
    requests, sizes, spans = requests_of(marked(trace))
    levels, inside, blocks = Levels(alignment, solver, time_limit), {}, []
    for r in requests:
        if by_segment and r.freed_in == r.segment:
            inside.setdefault(r.segment, []).append(r)
        elif by_segment:  # to level 2 a segment is one moment: what crosses its border is there throughout
            blocks.append(([r], (0,), (spans[r.segment][0], spans[r.freed_in][1] if r.freed_in else r.upper, r.bytes)))
        else:
            blocks.append(([r], (0,), (r.lower, r.upper, r.bytes)))
    for label, mine in inside.items():
        offsets, peak = levels.solve(label, [(r.lower, r.upper, r.bytes) for r in mine])
        blocks.append((mine, offsets, (*spans[label], peak)))  # the pseudo block
    bases, arena_bytes = levels.solve(WHOLE, [life for *_, life in blocks])
    segments = {label: [(n, None) for n in nbytes] for label, nbytes in sizes.items()}
    for (mine, offsets, _), base in zip(blocks, bases, strict=True):
        for r, offset in zip(mine, offsets, strict=True):
            segments[r.segment][r.k] = (r.bytes, base + offset)
    plan = Plan(arena_bytes, dsa.lower_bound(levels.problem([(r.lower, r.upper, r.bytes) for r in requests])), alignment,
                solver, time.perf_counter() - start, {label: tuple(s) for label, s in segments.items()}, tuple(levels.rows))
    validate(trace, plan)
    return plan


def validate(trace, plan):
    """Raises ValueError where `plan` is not one of `trace`: other segments or requests, tensors that overlap, a place for
    what is left to torch, another lower bound."""
    requests, sizes, _ = requests_of(marked(trace))
    if {label: [n for n, _ in segment] for label, segment in plan.segments.items()} != sizes:
        raise ValueError("the plan's requests are not the trace's")
    places = {(label, k) for label, segment in plan.segments.items() for k, (_, at) in enumerate(segment) if at is not None}
    if places != {(r.segment, r.k) for r in requests}:
        raise ValueError("the plan has places for other requests")
    problem = Levels(plan.alignment, None, None).problem([(r.lower, r.upper, r.bytes) for r in requests])
    offsets = tuple(plan.segments[r.segment][r.k][1] for r in requests)
    if plan.lower_bound != dsa.lower_bound(problem):
        raise ValueError("the plan's lower bound is not the trace's")
    dsa.validate(problem, dsa.Solution(offsets, plan.arena_bytes, plan.lower_bound, plan.solver, plan.seconds))


def marked(trace):
    """The trace itself, or where it marks no segments, as one."""
    if any(verb == "begin" for verb, *_ in trace.events):
        return trace
    return Trace((("begin", WHOLE, 0), *trace.events, ("end", WHOLE, 0)))


def bilevel(trace, solver="auto", alignment=1, time_limit=60.0):
    """The Plan of a trace in two levels: equal segments are solved once, then the step with a pseudo block for each.
    Source: MEMO 4.2."""
    return compose(trace, solver, alignment, time_limit, by_segment=True)


def one_level(trace, solver="auto", alignment=1, time_limit=60.0):
    """The Plan of a trace, all its requests solved at once."""
    return compose(trace, solver, alignment, time_limit, by_segment=False)


def cached(trace, folder, solver="auto", alignment=1, time_limit=60.0):
    """The bilevel Plan of a trace, from `folder` where it was made before; a folder that cannot be used, or None, costs
    time only."""
    key = hashlib.sha256(f"{trace.text}{solver} {alignment} {time_limit}".encode())
    for module in (__file__, dsa.__file__, dsa_solvers.__file__):  # a better solver's plan is another
        key.update(Path(module).read_bytes())
    name = f"plan-{key.hexdigest()[:16]}.json"
    try:
        return believed(Plan.from_json(read_text(folder / name)), trace, solver, alignment)
    except Exception:  # not there, or not what was written: whatever it is, it is made again
        plan = bilevel(trace, solver, alignment, time_limit)
    keep_json(asdict(plan), folder, name)
    return plan


def believed(plan, trace, solver, alignment):
    """`plan`, from a file. Raises what it may where it is not one that was asked for."""
    kinds = [type(getattr(plan, f.name)) is f.type for f in fields(plan)]
    kinds += [type(n) is int for segment in plan.segments.values() for n, _ in segment]
    kinds += [{name: type(value) for name, value in row.items()} == LEVEL for row in plan.levels]
    if not all(kinds) or (plan.solver, plan.alignment) != (solver, alignment):
        raise ValueError("it is not the plan that was asked for")
    if plan.arena_bytes > MOST_ABOVE * plan.lower_bound:
        raise ValueError("its arena is too large")
    validate(trace, plan)
    return plan


def read_argv(argv):
    parser = Arguments(prog="python -m memo.planner", description="Plans the addresses of a request log: malloc <tensor> "
                       "<bytes>, free <tensor> <bytes>, begin <segment>, end <segment>.")
    parser.option("log", help="the request log", least=1)
    parser.option("--output", help="the plan, JSON", short=["-o"], required=True, least=1)
    parser.option("--solver", default="auto", help="which one", choices=dsa.SOLVERS)
    parser.option("--alignment", int, 512, "bytes; torch has 512 on CUDA", **dsa.ALIGNMENT)
    parser.option("--time_limit", float, 60.0, "seconds for each problem", **dsa.TIME_LIMIT)
    parser.add_argument("--one_level", action="store_true", help="solve all requests at once")
    return parser.parse_args(argv)


def main(argv):
    """The command line. Errors: ConfigError, bad input."""
    args = read_argv(argv)
    with progress(lambda: f"reading {args.log}"):
        try:
            text = read_text(args.log)
        except (OSError, ValueError) as e:
            raise LogError(f"{args.log} cannot be read ({reason(e)}); give a request log") from None
        trace = parse(text, args.log)
    if not requests_of(marked(trace))[0]:
        raise LogError(f"{args.log} must hold at least one malloc, inside its segments if it marks any")
    with progress(lambda: f"planning {len(trace.events):,} requests, --time_limit={args.time_limit:g} for each problem"):
        plan = (one_level if args.one_level else bilevel)(trace, args.solver, args.alignment, args.time_limit)
    try:
        Path(args.output).write_text(readable_json(asdict(plan)))
    except OSError as e:
        raise ConfigError(f"{args.output} cannot be written ({e.strerror}); choose another -o") from None
    for row in plan.levels:
        print(f"{row['segment']}: {row['n']} blocks, peak {row['peak']:,} bytes, lower bound {row['lower_bound']:,}, "
              f"{'proven optimal' if row['proven'] else 'not proven'}, {row['solver']}, {row['seconds']:.2f} s")
    gap = plan.arena_bytes / plan.lower_bound - 1
    print(f"{len(plan.segments)} segments in an arena of {plan.arena_bytes:,} bytes, "
          f"{'proven optimal' if plan.proven else f'{gap:.2%} above the lower bound'}, {plan.seconds:.2f} s: {args.output}")


if __name__ == "__main__":
    end_with_reader()
    sys.exit(run(main))
