"""SPPO (arXiv 2503.10377) beside memo: who helps whom, its activations, the speed of subsequences; sizes and
ratios are in sppo_sizes.py, its configurations in sppo_speed.py."""

from math import ceil

from memo.config.formulas import layer_forward_flops, parameters
from memo.config.layer import KEYS_VALUES, layer_of
from memo.config.msp import helped_units
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.unit_seconds import modelled_rates
from memo.system.hardware import GIB
from research.papers import sppo_sizes, sppo_speed
from research.papers.page import COUNTED, DRY, SIMULATED, Part
from research.papers.sppo_speed import gpus, sppo_config
from testing.paper import SPPO

NAME = "SPPO"
ABOUT = """arXiv 2503.10377. Nodes of eight A100 of 80 GB, 2 TB and four links of 200 Gb/s, 12.5 GB/s for
each GPU's copies; states on the device (65B at a million tokens: the optimizer on the host). The text has no
MFU and no batch ("MFU", "global batch", "batch size of"); its section 3.1 argues from one micro batch. memo
runs 16 sequences a step. """
BF16 = 2


def kept():
    """The tensors of a layer in units of B S H elements, and what becomes of each."""
    cfg, told = sppo_config("65B", 8, 1, 131072, 8), SPPO["elsewhere"]
    unit = cfg.block_size * cfg.n_embd * BF16
    units = {name: t.nbytes / unit for name, t in layer_of(cfg).tensors(1, cfg.block_size, BF16).items()}
    stays = sum(units[name] for name in KEYS_VALUES)
    goes = sum(units.values()) - stays
    rows = [["keys and values, which stay", told["kept_bsh"], round(BF16 * stays, 2)],
            ["all else, which may leave", told["offloaded_bsh"], round(BF16 * goes, 2)]]
    return dict(tables=[(["BSH bytes of a layer", "paper", "/here"], rows)], stays=stays, notes=[
        f"Two tensors in bf16 are {BF16 * stays:g} bytes: the printed {told['kept_bsh']} is of elements, so "
        f"the printed bytes contradict themselves. MEMO counts {16 * BF16} bytes in all, as memo does but "
        "for attention's statistics. The backward adds gradients of keys and values, in fp32."])


def table2():
    """Bytes of a model and of its activations by memo's count: 18 bytes a parameter, 16 units a token."""
    rows, tokens, told, room = [], SPPO["table2"]["tokens"], SPPO["elsewhere"], 80
    for model in SPPO["models"]:
        *_, states, activations, least = SPPO["table2"][model]
        cfg = sppo_config(model, 1, 1, tokens, 1)
        here = 18 * parameters(cfg) / 1e9, 16 * cfg.n_layer * cfg.n_embd * tokens * BF16 / GIB
        rows.append([model, states, round(here[0]), activations, round(here[1]), f"{least}+",
                     ceil(sum(here) * GIB / 1e9 / room)])
    hours = []
    for world, pp in sppo_speed.STAGES.items():
        cfg = sppo_config("7B", 8, pp, SPPO["max_tokens"]["gpus"][str(world)], "auto", activation="swap")
        hours.append(f"{1e9 / estimate(cfg, gpus(world), world, fast_arena).tgs / world / 3600:.0f}")
    head = ["4M tokens", "model, GB, paper", "/here", "activations, paper", "/here", "GPUs, paper", "/here"]
    return dict(tables=[(head, rows)], notes=[
        f"Here: 18 bytes a parameter, 16 units a token, and GPUs of {room} GB that hold both. 7B and 65B are "
        "16 units to the GB; 13B is printed with about twice that, and 7B's GPUs are more than twice what "
        f"the bytes need. Nor do these go together: {told['activation_gb_7b_4m']:,} GB on "
        f"{told['gpus_7b_4m']} GPUs (section 1), which have {room * told['gpus_7b_4m']:,}; 65B at 1M with "
        f"{told['activation_tb_65b_1m']} TB on {told['gpus_65b_1m']} (2.2), a quarter of Table 2's being "
        f"{SPPO['table2']['65B'][4] / 4:,.0f} GB.",
        f"Figure 1, a billion tokens of 7B: {told['hours_1b_tokens']} hours on {told['gpus_7b_4m']} H100 at "
        f"4M are printed, all else only drawn; memo in SPPO's form on A100: {', '.join(hours)} hours on "
        f"{', '.join(map(str, sppo_speed.STAGES))} GPUs at 1M, 2M, 4M."])


def table3():
    facts, right = SPPO["table3_msp"], 0
    p, n = facts["pp"], facts["n"]
    for side, before in (("left", True), ("right", False)):
        for stage in range(p):
            helped = {x: those for (home, x), those in helped_units(p, n).items()
                      if home == stage and (home + x < p - 1) == before}
            stages = {stage, *(k for those in helped.values() for k in those)} if helped else set()
            printed = facts[f"{side}_ids"][stage], facts[f"{side}_stages"][stage]
            right += printed == (sorted(helped), sorted(stages))
    return dict(tables=[], right=right, notes=[
        f"{p} stages, {n} subsequences: of {2 * p} lines, subsequences helped left and right with the stages "
        f"that compute them, {right} are the paper's. Its Definition 6.1 is not: it gives x = PP - 1 - i to "
        "two phases."])


NUMBERS = 1, 2, 4, 8, 16, 32, 64, 128


def layer_seconds(model, sp, pp, tokens, N):
    """(cfg, seconds of a layer's forward, of both passes)"""
    cfg = sppo_config(model, sp, pp, tokens, N)
    layer = modelled_rates(cfg, gpus(sp * pp), BF16)
    return cfg, layer.forward_s, layer.forward_s + layer.backward_s


def figure7():
    """Time of a layer by the number of subsequences, the bubble, and the step that the solver's formula makes
    of both."""
    rows, best, pp, tokens = [], {}, 4, SPPO["figure7"]["tokens"]
    _, _, alone = layer_seconds("7B", 1, pp, tokens, 1)
    for N in NUMBERS:
        cfg, forward, both = layer_seconds("7B", 1, pp, tokens, N)
        rows.append([N, tokens // N, round(layer_forward_flops(cfg, tokens) / forward / 1e12, 1),
                     round(both / alone, 3), round((pp - 1) / N, 3),
                     round((pp - 1 + N) / N * both / alone, 3)])
    for one in SPPO["table4"]:
        model, sp, pp = one["model"], one["sp"], one["pp"]
        steps = {N: (pp - 1 + N) / N * layer_seconds(model, sp, pp, 524288, N)[2] for N in (*NUMBERS, 256)}
        best[model] = [min(steps, key=steps.__getitem__), one["tokens_n"]["524288"]]
    head = ["N", "/tokens", "TFLOP/s, forward", "F(N) over F(1)", "/bubble, p = 4", "/T"]
    return dict(tables=[(head, rows)], best=best, notes=[
        "A layer with hidden size 4,096 at 128K tokens, as the paper's, whose points are only drawn. "
        f"Printed: 3/16 of bubble at p = 4, N = 16, here {rows[4][4]}; the best subsequence has 2K to 16K "
        f"tokens of a layer, by this T {min(rows, key=lambda row: row[-1])[1]:,} of 128K. The rates have one "
        "speed of attention for all lengths: what N costs here are merges and messages, in the paper kernels "
        "too. At 512K in Table 4's layouts T is least at N = " + ", ".join(f"{ours} ({model}; paper "
                                       f"{paper})" for model, (ours, paper) in best.items())
        + "."])


PARTS = {
    "table2": Part("Table 2 and Figure 1: sizes", COUNTED, table2),
    "kept": Part("Section 5.1: what stays on the device", COUNTED, kept),
    "table3": Part("Table 3: who helps whom", SIMULATED, table3),
    "figure5": sppo_sizes.PART,
    "figure7": Part("Figure 7: the number of subsequences", DRY, figure7),
    "figure8": Part("Figure 8: units on the device", SIMULATED, sppo_sizes.figure8),
    **sppo_speed.PARTS}
