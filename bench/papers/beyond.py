"""The same jobs by each paper's method alone, and by memo's best combination of all: dry runs on one
machine."""

from bench.papers.memo_lengths import whole
from bench.papers.page import DRY, MILLION, Part, points
from bench.papers.rivals import A800
from memo.choose import degrees_of
from memo.estimate.arena import fast_arena
from memo.estimate.budget import chosen, judged, untimed
from memo.estimate.hardware import GIB
from memo.estimate.report import layout_of, limit_of
from memo.estimate.search import (
    config_with,
    estimate_or_none,
    longest,
    longest_of_layouts,
    search,
    speed,
)
from testing.paper import config_of

NAME = "Beyond the papers"
ABOUT = """The same jobs on the same A800 nodes of MEMO's, nine tenths of whose 2 TB of host memory can be
used: by each paper's method as published, and by the fastest, or longest, of everything that memo combines
(--search). """
NODE = 8
METHODS = {
    "MEMO": dict(activation="memo", alpha_mode="paper", subsequences=1),
    "METP": dict(activation="keep", tensor_parallel="metp", subsequences=1),
    "SPPO": dict(activation="swap", subsequences="auto", subsequence_cut="flops", unit_order="subsequence")}


def published(method, model, world, tokens=MILLION):
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
        (chosen(one, untimed(A800), world) for one in every), key=lambda got: judged(got).lacking)


def lacks(got):
    return judged(got).where.replace("the ", "").replace(" and", ",") + " memory"


def told(job, who, got, binds):
    return [job, who, got.cfg.block_size, points(got.mfu) if got.fits else got.reason,
            layout_of(got).replace("=", ""), got.cfg.n_subsequences, round(got.device_bytes / GIB, 1),
            round(got.host_bytes / GIB), binds]


def make():
    head = ["job", "by", "tokens", "MFU, %", "layout", "N", "device, GiB", "host", "bound by"]
    rows, keys = [], []
    for model, world in (("7B", 8), ("65B", 64)):
        found = {method: best_of(published(method, model, world), world) for method in METHODS}
        found["memo"] = search(config_of(model, MILLION), A800, world, fast_arena, best=1)[0]
        rows += [told(f"{model} at 1M, {world} GPUs", who, got, got.binds if got.fits else lacks(got))
                 for who, got in found.items()]
        keys.append(sum(found["SPPO"].bytes_of(region)[0] for region in ("keys", "key_gradients")) / GIB)
    for world in (8, 32, 128):
        found = {}
        for method in METHODS:
            every = (longest(one, A800, world, fast_arena, whole) for one in published(method, "7B", world))
            found[method] = max(filter(None, every), key=lambda got: (got.cfg.block_size, got.mfu))
        found["memo"] = longest_of_layouts(config_of("7B", MILLION), A800, world, fast_arena, 1)[0]
        rows += [told(f"7B, longest, {world} GPUs", who, got, limit_of(got)[0]) for who, got in found.items()]
    node = found["memo"]
    return dict(tables=[(head, rows)], notes=[
        "N: subsequences; GiB of a rank's device and of a node's host, which has "
        f"{node.capacity / GIB:.1f} and {node.host_capacity / GIB:,.0f}. As published: MEMO keeps what "
        "attention gives of all layers, METP keeps all on the device, SPPO recomputes nothing and keeps keys "
        "and values on the device, SP inside a node, the rest stages. Where nothing fits, the layout that "
        "lacks least. The longest contexts are METP's layout with MEMO's use of the host, where most layers "
        "keep their input alone and attention is repeated: hence the MFU.",
        "SPPO at 1M lacks both. Keys and values of all layers, with gradients in fp32, would take "
        f"{keys[0]:.0f} GiB of a device for 7B and {keys[1]:.0f} for 65B, with gradients in bf16 two thirds "
        "of that; and what is not recomputed is more than the host has. The paper ran 7B at 1M on 32 GPUs, "
        "65B on 128."])


PARTS = {"jobs": Part("The same jobs", "the three papers' methods", DRY, make)}
