"""The same jobs by each paper's method alone, and by memo's best combination of all: dry runs on one
machine."""

from dataclasses import replace

from memo.decide.choose import degrees_of
from memo.estimate.arena import fast_arena
from memo.estimate.budget import choose_fastest
from memo.estimate.report import layout_of, limit_of
from memo.estimate.search import (
    config_with,
    estimate_or_none,
    longest,
    longest_of_layouts,
    search,
    speed,
)
from memo.system.hardware import GIB
from research.papers.memo_lengths import whole
from research.papers.page import DRY, MILLION, Part, points
from research.papers.rivals import A800
from testing.paper import PAPER, SPPO, config_of, rows_of_table3

NAME = "Beyond the papers"
ABOUT = """The same jobs in memo's code on the same A800 nodes of MEMO's, nine tenths of whose 2 TB of host
memory can be used: by each paper's method alone, and by the fastest, or longest, of everything that memo
combines (--search). Only the column "published" is of a paper's own system. """
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
    """{(job, method): what the paper itself measured}, of the jobs that the facts at hand have."""
    found = {(at_1m("7B", 8), "MEMO"): f"{rows_of_table3('7B')[MILLION]:.2f}%"}
    found |= {(at_most(world), "MEMO"): f"{tokens:,}"
              for world, tokens in PAPER["scalability"]["memo_max_tokens"].items()}
    most = SPPO["max_tokens"]
    found |= {(at_most(world), "SPPO"): f"{part} of {most['normalised']['128']}"
              for world, part in most["normalised"].items()}
    return found | {(at_most(world), "SPPO"): f"{tokens:,}" for world, tokens in most["gpus"].items()}


def make():
    found = {}
    for model, world in (("7B", 8), ("65B", 64)):
        of = found[at_1m(model, world)] = {
            method: best_of(layouts_of(method, model, world), world) for method in METHODS}
        of[ALL] = search(config_of(model, MILLION), A800, world, fast_arena, best=1)[0]
    for job, world in LONGEST.items():
        of = found[job] = {}
        for method in METHODS:
            every = (longest(one, A800, world, fast_arena, whole) for one in layouts_of(method, "7B", world))
            of[method] = max(filter(None, every), key=lambda got: (got.cfg.block_size, got.mfu))
        of[ALL] = longest_of_layouts(config_of("7B", MILLION), A800, world, fast_arena, 1)[0]
    papers, speeds, sizes = published(), [], []
    for job, of in found.items():
        for method, got in of.items():
            cfg, binds = got.cfg, limit_of(got)[0] if job in LONGEST else got.binds
            speeds.append([job, method, papers.get((job, method)), cfg.block_size,
                           points(got.mfu) if got.fits else got.reason, binds if got.fits else lacks(got)])
            sizes.append([job, method, layout_of(got).replace("=", ""), cfg.n_subsequences,
                          "AdamW: host" if cfg.states == "device" and cfg.optimizer_on_host else cfg.states,
                          *(round(n / GIB, 1) for n in (got.device_bytes, got.capacity)),
                          *(round(n / GIB) for n in (got.host_bytes, got.host_capacity))])
    keys = [sum(found[at_1m(*job)]["SPPO"].bytes_of(region)[0] for region in ("keys", "key_gradients")) / GIB
            for job in (("7B", 8), ("65B", 64))]
    ran = {one["model"]: one["gpus"] for one in SPPO["table4"] if str(MILLION) in one["tokens_n"]}
    heads = (["job", "method of", "published", "tokens here", "MFU, %", "bound by"],
             ["job", "method of", "layout", "N", "states", "device, GiB", "of", "host, GiB", "of"])
    return dict(tables=[*zip(heads, (speeds, sizes), strict=True)], notes=[
        "Published: MFU, or tokens, as the paper measured it; nothing where the facts at hand have no such "
        "job. SPPO's figure 12 is normalised: [what that is](#figure-12-longest-contexts). Methods: MEMO "
        "keeps what attention gives of all layers, METP keeps all on the device, SPPO recomputes nothing "
        "and keeps keys and values on the device, SP inside a node, the rest stages. These three have "
        "parameters, gradients and optimizer on the device; memo may share them out (sharded), have them on "
        "the host, or step AdamW alone there. Where nothing fits, the layout that lacks least.",
        "N: subsequences; GiB of a rank's device and of a node's host, and how much there is: the host has a "
        "place for a checkpoint's copy of weights and moments, unless AdamW steps there.",
        "MEMO's method goes further here than MEMO did, which ended out of device memory: [what takes less "
        "here](#table-3-mfu). memo's longest contexts are METP's layout with MEMO's use of the host, where "
        "most layers keep their input alone and attention is repeated: hence the MFU.",
        "At 1M keys and values of all layers, with gradients in fp32, would take "
        f"{keys[0]:.0f} GiB of a device for 7B and {keys[1]:.0f} for 65B by SPPO's method, with gradients in "
        "bf16 two thirds of that; and what is not recomputed is more than the host has. The paper ran 7B at "
        f"1M on {ran['7B']} GPUs, 65B on {ran['65B']}."])


PARTS = {"jobs": Part("The same jobs", "the three papers' methods", DRY, make)}
