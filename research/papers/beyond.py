"""The same jobs by each paper's method alone, and by memo's best combination of all: dry runs on one
machine."""

from dataclasses import replace

from memo.decide.choose import degrees_of
from memo.estimate.arena import fast_arena
from memo.estimate.budget import choose_fastest
from memo.estimate.report import layout_of
from memo.estimate.search import (
    config_with,
    estimate_or_none,
    longest,
    longest_of_layouts,
    search,
    speed,
)
from research.papers.memo_lengths import whole
from research.papers.page import DRY, MILLION, Part, points
from research.papers.rivals import A800
from testing.paper import PAPER, SPPO, config_of, rows_of_table3

NAME = "Beyond the papers"
ABOUT = """On MEMO's A800 nodes, nine tenths of whose 2 TB of host memory can be used: by each paper's method
alone, and by the fastest, or longest, of all that memo combines (--search). """
NODE, ALL = 8, "all (memo)"
METHODS = {
    "MEMO": dict(activation="memo", alpha_mode="paper", subsequences=1),
    "METP": dict(activation="keep", tensor_parallel="metp", subsequences=1),
    "SPPO": dict(activation="swap", subsequences="auto", subsequence_cut="flops", unit_order="subsequence")}


def layouts_of(method, model, world, tokens=MILLION):
    """The configs of a method's layouts: tp (METP's ranks, SPPO's SP) inside a node. Other ranks: MEMO and
    METP have a ring or replicas over them, SPPO stages."""
    widths = degrees_of(NODE)
    if method == "SPPO":
        every = [dict(tp=tp, pp=world // tp) for tp in widths]
    else:
        every = [dict(tp=tp, cp=cp) for tp in (widths[-1:] if method == "METP" else widths[1:])
                 for cp in degrees_of(world // tp)]
    first = config_of(model, tokens, states="device")
    return [one for more in every if (one := config_with(first, **METHODS[method], **more))]


def best_of(every, world):
    """Of a method's configs the Estimate of the fastest that fits, else of that which lacks least memory."""
    found = [got for one in every if (got := estimate_or_none(one, A800, world, fast_arena)) and whole(got)]
    return max(found, key=speed, default=None) or min(
        (choose_fastest(one, replace(A800, speeds=None), world) for one in every),
        key=lambda got: got.judged.lacking)


def lacks(got):
    return got.judged.where.replace("the ", "").replace(" and", ",") + " memory"


def at_1m(model, world):
    return f"{model} at 1M, {world} GPUs"


def at_most(world):
    return f"7B, longest, {world} GPUs"


LONGEST = {at_most(world): world for world in (8, 32, 128)}


def published():
    """{(job, method): what the paper itself measured}; None where it has no such job."""
    found = {(at_1m(model, world), "MEMO"): rows_of_table3(model)[MILLION] for model, world in JOBS}
    of = {"MEMO": PAPER["scalability"]["memo_max_tokens"], "SPPO": SPPO["max_tokens"]["gpus"]}
    for paper, most in of.items():
        found |= {(at_most(int(world)), paper): f"{tokens / MILLION:g}M" for world, tokens in most.items()}
    jobs = [*(at_1m(*job) for job in JOBS), *LONGEST]
    return {(job, paper): found.get((job, paper)) for job in jobs for paper in PUBLISHING}


JOBS = ("7B", 8), ("65B", 64)


def make():
    found = {}
    for model, world in JOBS:
        of = found[at_1m(model, world)] = {
            method: best_of(layouts_of(method, model, world), world) for method in METHODS}
        of[ALL] = search(config_of(model, MILLION), A800, world, fast_arena, best=1)[0]
    for job, world in LONGEST.items():
        of = found[job] = {}
        for method in METHODS:
            every = (longest(one, A800, world, fast_arena, whole) for one in layouts_of(method, "7B", world))
            of[method] = max(filter(None, every), key=lambda got: (got.cfg.block_size, got.mfu))
        of[ALL] = longest_of_layouts(config_of("7B", MILLION), A800, world, fast_arena, 1)[0]
    papers, rows = published(), []
    for job, of in found.items():
        row = [job]
        for method, got in of.items():
            tokens = f"{got.cfg.block_size / MILLION:.2f}M, " if job in LONGEST else ""
            here = f"{tokens}{points(got.mfu)}" if got.fits else f"{got.reason} ({lacks(got)})"
            row += [papers[job, method], here] if method in PUBLISHING else [here]
        rows.append(row)
    head = ["job", "MEMO, paper", "/here", "METP", "SPPO, paper", "/here", ALL]
    return dict(tables=[(head, rows)], layouts={job: {method: layout_of(got) for method, got in of.items()}
                                                for job, of in found.items()}, notes=[
        "MFU, or the longest context and its MFU; \"-\": no paper has such a job. MEMO keeps what attention "
        "gives of all layers, METP all on the device, SPPO keys and values there and recomputes nothing; "
        "these have their states on the device. memo mixes all three, may share states out or have them on "
        "the host, and repeat attention. MEMO's method ends later here than MEMO did ([why](#table-3-mfu))."])


PUBLISHING = "MEMO", "SPPO"
PARTS = {"jobs": Part("The same jobs", DRY, make)}
