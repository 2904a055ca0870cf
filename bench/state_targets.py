"""Dry runs of large models with their states in each place: a part of bench.states. The longest contexts with
states=device, sharded and host, and the fastest layout at a context asked for."""

from dataclasses import replace
from itertools import product

from memo.estimate.arena import fast_arena
from memo.estimate.budget import choose_fastest, estimate
from memo.estimate.regions import granting
from memo.estimate.report import layout_of, limit_of
from memo.estimate.search import config_with, estimate_or_none, longest_by_bound, with_seconds
from memo.run.load_config import load_config
from memo.system import hardware

PLACES = "device", "sharded", "host"
# name of a machine: (GPU, GPUs, bytes of host memory that a node grants: nine tenths of what it has)
MACHINES = {
    "1 x RTX 4090, 256 GB": ("rtx4090", 1, 0.9 * 256e9), "1 x H100-80GB, 2 TB": ("h100-80gb", 1, 1.8e12),
    "8 x A800-80GB, 2 TB": ("a800-80gb", 8, 1.8e12), "64 x A800-80GB, 2 TB": ("a800-80gb", 64, 1.8e12),
    "8 x H100-80GB, 2 TB": ("h100-80gb", 8, 1.8e12)}
# (machine, preset, tokens asked for)
TARGETS = [("1 x RTX 4090, 256 GB", "llama3_8b_1m", 2**18), ("1 x H100-80GB, 2 TB", "llama2_70b_1m", 2**18),
           ("8 x A800-80GB, 2 TB", "65b_1m", 2**19), ("64 x A800-80GB, 2 TB", "65b_1m", 9 * 2**18),
           ("8 x H100-80GB, 2 TB", "7b_1m", 2**20)]
NUMBERS = 1, 16  # of subsequences; then 64 in the best layout


def config_of(preset, **keys):
    """A preset, one sequence a step."""
    cut = dict(subsequence_cut="equal", unit_order="layer")
    return replace(load_config([f"config/{preset}.py"]), **dict(
        tp=1, cp=1, activation="memo", alpha_mode="per_tensor", head_groups="auto") | cut | keys)


def layouts(cfg, world):
    """The config in all layouts of tp and cp, tp inside a node of eight."""
    for tp in (1, 2, 4, 8):
        if world % tp == 0:
            keys = dict(tp=tp, cp=world // tp)
            for kind in (dict(), dict(context_parallel="ulysses"), dict(tensor_parallel="metp")):
                one = config_with(cfg, **keys, **kind)
                if one and (world > tp or "context_parallel" not in kind):
                    yield one


def figures(got):
    """A line of the table."""
    p = got.placement
    return dict(states=got.cfg.states, optimizer_on_host=got.cfg.optimizer_on_host, tokens=got.cfg.block_size,
                subsequences=got.cfg.subsequences, layout=layout_of(got), mfu=got.mfu,
                step_s=got.seconds.get("step"), alpha=got.alpha, binds=got.binds, limit=limit_of(got)[0],
                repeated=p.input_only / p.n_units, device_share=got.device_bytes / got.capacity,
                host_share=got.host_bytes / got.host_capacity)


def places(world):
    """Keys of the places of states, the optimizer beside the device's on either side."""
    yield dict(states="device", optimizer_device="auto")
    yield dict(states="device", optimizer_device="cpu")
    if world > 1:
        yield dict(states="sharded")
    yield dict(states="host")


def fits(got):
    return bool(got and got.fits)


def longest_of(cfg, machine, world):
    """The Estimate of the longest context, over layouts and numbers of subsequences; None without one."""
    best = None

    def tried():
        yield from (replace(one, subsequences=n) for one, n in product(layouts(cfg, world), NUMBERS))
        if best:
            yield replace(best.cfg, subsequences=64)
    for one in tried():
        start, unit = None, 1024 * one.cp * one.tp
        if best:
            known = replace(one, block_size=max(1, best.decided.block_size // unit) * unit)
            start = estimate_or_none(known, machine, world, fast_arena)
            if not (start and fits(start.untimed)):
                continue
        got = longest_by_bound(one, machine, world, fits, start=start)
        if got and (best is None or got.decided.block_size > best.decided.block_size):
            best = got
    return best and with_seconds(best, fast_arena, fits)


def fastest_of(cfg, machine, world):
    """The Estimate with the highest MFU at the config's context; None where nothing fits."""
    every = [replace(one, subsequences=n) for one, n in product(layouts(cfg, world), NUMBERS)]
    found = [estimate(one, machine, world, fast_arena) for one in every
             if (got := estimate_or_none(one, machine, world, fast_arena)) and fits(got.untimed)]
    return max((got for got in found if got.fits), key=lambda got: got.mfu, default=None)


def taken_by_auto(cfg, machine, world):
    """What a run decides in the preset's layout, beside the same with a place given."""
    found = {}
    for where in ("auto", *PLACES):
        one = replace(cfg, states=where, subsequences="auto", subsequence_cut="auto", unit_order="auto")
        got = choose_fastest(one, machine, world)
        found[where] = figures(got) | dict(fits=got.fits, why=got.chosen)
    return found


def targets(_):
    out = []
    for name, preset, tokens in TARGETS:
        gpu, world, granted = MACHINES[name]
        rows = []
        for keys in places(world):
            cfg, machine = granting(config_of(preset, **keys, block_size=tokens),
                                    hardware.machine(gpu, None, world), world, granted)
            most, fastest = (of(cfg, machine, world) for of in (longest_of, fastest_of))
            rows.append(dict(keys, longest=most and figures(most), at_tokens=fastest and figures(fastest)))
            print(name, preset, keys, *(got and [layout_of(got), got.cfg.subsequences, got.cfg.block_size,
                                                 round(got.mfu, 3), got.binds] for got in (most, fastest)),
                  flush=True)
        own = load_config([f"config/{preset}.py"])
        layout = dict(tp=own.tp, cp=own.cp) if own.tp * own.cp == world else dict(tp=world, cp=1)
        cfg, machine = granting(config_of(preset, **layout, block_size=tokens), machine, world, granted)
        auto = taken_by_auto(cfg, machine, world)
        print("   ", {where: (one["states"], one["subsequences"], one["mfu"], one["device_share"])
                      for where, one in auto.items()}, flush=True)
        out.append(dict(machine=name, preset=preset, host_bytes=granted, wanted_tokens=tokens, places=rows,
                        decided=dict(layout=layout, of=auto)))
    return out
