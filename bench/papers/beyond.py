"""The same jobs by each paper's method alone, and by memo's best combination of all: dry runs on one
machine."""

from bench.papers.memo import A800, whole
from bench.papers.page import DRY, MILLION, Part, points
from memo.choose import degrees_of
from memo.config import Config
from memo.estimate.arena import fast_arena
from memo.estimate.hardware import GIB
from memo.estimate.report import layout_of, limit_of
from memo.estimate.search import config_with, estimate_or_none, longest, longest_of_layouts, search
from testing.paper import PAPER, SEQUENCES

NAME = "Beyond the papers"
ABOUT = """The same jobs on the same A800 nodes of MEMO's, nine tenths of whose 2 TB of host memory can be
used: by each paper's method as published, and by the fastest, or longest, of everything that memo combines
(--search). """
NODE = 8
METHODS = {
    "MEMO": dict(activation="memo", alpha_mode="paper", subsequences=1),
    "METP": dict(activation="keep", tensor_parallel="metp", subsequences=1),
    "SPPO": dict(activation="swap", subsequences="auto", subsequence_cut="flops", unit_order="subsequence")}


def config(model, tokens, **keys):
    shape = {name: PAPER["models"][model][name] for name in ("n_layer", "n_embd", "n_head", "vocab_size")}
    return Config(**shape, block_size=tokens, dtype="bfloat16", gradient_accumulation_steps=SEQUENCES, **keys)


def published(method, model, world, tokens=MILLION):
    """The configs of a method's layouts: tp (METP's ranks, SPPO's SP) inside a node. Other nodes: MEMO and
    METP have a ring or replicas over them, SPPO stages."""
    keys = METHODS[method] | dict(states="device")
    if method == "SPPO":
        every = [dict(tp=NODE, pp=world // NODE)]
    else:
        tps = [NODE] if method == "METP" else [tp for tp in degrees_of(NODE) if tp > 1]
        every = [dict(tp=tp, cp=cp) for tp in tps for cp in degrees_of(world // tp)]
    first = config(model, tokens, states="device")
    return [one for more in every if (one := config_with(first, **keys, **more))]


def told(job, who, got, binds=""):
    """A line; got: None where no layout has room."""
    if got is None:
        return [job, who, MILLION, "no", *[None] * 5]
    return [job, who, got.cfg.block_size, points(got.mfu) if got.fits else got.reason,
            layout_of(got).replace("=", ""), got.cfg.n_subsequences, round(got.device_bytes / GIB, 1),
            round(got.host_bytes / GIB), binds or got.binds]


def make():
    head = ["job", "by", "tokens", "MFU, %", "layout", "N", "device, GiB", "host", "bound by"]
    rows = []
    for model, world in (("7B", 8), ("65B", 64)):
        job = f"{model} at 1M, {world} GPUs"
        for method in METHODS:
            every = [got for one in published(method, model, world)
                     if (got := estimate_or_none(one, A800, world, fast_arena))]
            best = max(every, key=lambda got: (whole(got), got.mfu if whole(got) else -got.device_bytes),
                       default=None)
            rows.append(told(job, method, best))
        rows.append(told(job, "memo", search(config(model, MILLION), A800, world, fast_arena, best=1)[0]))
    for world in (8, 32, 128):
        job = f"7B, longest, {world} GPUs"
        for method in METHODS:
            every = (longest(one, A800, world, fast_arena, whole) for one in published(method, "7B", world))
            best = max(filter(None, every), key=lambda got: (got.cfg.block_size, got.mfu), default=None)
            rows.append(told(job, method, best, limit_of(best)[0]))
        most = longest_of_layouts(config("7B", MILLION), A800, world, fast_arena, 1)[0]
        rows.append(told(job, "memo", most, limit_of(most)[0]))
    return dict(tables=[(head, rows)], notes=[
        "N: subsequences; GiB of a rank's device and of a node's host. As published: MEMO keeps what "
        "attention gives of all layers, METP keeps all on the device, SPPO recomputes nothing and keeps keys "
        "and values on the device. \"no\": no layout has room. The longest contexts are METP's layout with "
        "MEMO's use of the host, where most layers keep their input alone and attention is repeated: hence "
        "the MFU."])


PARTS = {"jobs": Part("The same jobs", "the three papers' methods", DRY, make)}
