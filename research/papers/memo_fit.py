"""What is fitted to MEMO's 7B rows: three speeds of the A800, PCIe's rate, the host memory; and a speed of
products by their rows, which the dry run does not have."""

from dataclasses import replace
from math import ceil, inf, log2

from scipy.optimize import least_squares

from memo.config.layer import tensors_of
from memo.estimate.arena import ArenaBytes, fast_arena
from memo.estimate.budget import estimate
from memo.system import hardware
from memo.system.hardware import Speeds
from research.papers.page import DRY, Part, off, thousands
from research.papers.rivals import A800, MODELS
from testing.paper import (
    HOST_BYTES,
    LONG,
    PAPER,
    SEQUENCES,
    of_that_width,
    paper_config,
    rows_of_table3,
)

T4, T5 = PAPER["table4"], PAPER["table5"]
SHORT, FROM_64K = "4K to 32K", "from 64K on"
NODE_BYTES, BF16 = A800.node.host_memory_bytes, 2
PCIE = [n * 1e8 for n in range(80, 131)]  # bytes per second of a GPU that are tried


def with_speeds(flops_per_s):
    """The A800 with other speeds of some operations."""
    known = A800.speeds
    table = known.table | {op: [(1, speed)] for op, speed in flops_per_s.items()}
    return replace(A800, speeds=Speeds(table, known.overhead_s))


def with_parts(parts):
    """The A800 with {operation: part of its peak} as speeds."""
    return with_speeds({op: part * A800.peak_flops_per_s for op, part in parts.items()})


# --- Table 3 ---

def cells_that_ran():
    """{(model, tokens): (the paper's MFU in percent, the Estimates in its width that fit)}"""
    return {(model, S): (paper, [got for got in of_that_width(model, S) if got.fits]) for model in MODELS
            for S, paper in rows_of_table3(model).items() if not isinstance(paper, str)}


def with_mfu(cells, mfu_of, models=MODELS):
    """{(model, tokens): (the paper's, ours)} of cells_that_ran(), by mfu_of(Estimate) in percent."""
    return {cell: (paper, max(map(mfu_of, every))) for cell, (paper, every) in cells.items()
            if cell[0] in models}


def gap(found, models, length):
    """off() of some of with_mfu()."""
    return off([pair for (model, S), pair in found.items() if model in models
                and (S < LONG) == (length == SHORT)])


def both_gaps(both, groups):
    """Lines of how far each of two with_mfu() is off, for each of [(models, length)]."""
    return [[f"{', '.join(models)}, {length}", *(gap(found, models, length)[what] for found in both
                                                 for what in ("mean", "worst"))]
            for models, length in groups]


# --- the five figures ---

def cells_of_speeds():
    """[(cfg, the paper's cell)] of 7B that the speeds are fitted to: of Table 3 from 64K on, and of Table 4
    with the plan."""
    cells = [(paper_config("7B", S), cell) for S, cell in rows_of_table3("7B").items() if S >= LONG]
    return cells + [(paper_config("7B", S, activation=mode), cell)
                    for name, mode in (("full_recompute+plan", "recompute"), ("full_swap+plan", "swap"))
                    for S, cell in zip(T4["seq_tokens"], T4["mfu_percent"][name], strict=True)]


def cells_of_table5():
    """[(cfg, the paper's cell)]: the host memory is set to those that ran out of it, PCIe to the best."""
    return [(paper_config("7B", int(S), alpha=alpha), cell) for S, every in T5["mfu_percent"].items()
            for alpha, cell in zip(T5["alpha"], every, strict=True)]


def fitted_speeds(cells):
    """{operation: part of the GPU's peak}, to three digits, that comes nearest to [(cfg, MFU in percent)]."""
    def misses(parts):
        machine = with_parts(dict(zip(hardware.AMPERE, parts, strict=True)))
        return [100 * estimate(cfg, machine, 8, lambda cfg, machine: ArenaBytes(0, 0)).mfu - mfu
                for cfg, mfu in cells]
    found = least_squares(misses, [0.7, 0.65, 0.6], diff_step=0.01).x
    return {op: round(float(part), 3) for op, part in zip(hardware.AMPERE, found, strict=True)}


def papers_best(S):
    """The alpha with the highest MFU of Table 5."""
    return max((mfu, alpha) for alpha, mfu in zip(T5["alpha"], T5["mfu_percent"][S], strict=True)
               if not isinstance(mfu, str))[1]


def eighths(got):
    """The alpha of an Estimate, in the eighths of Table 5."""
    return int(got.alpha * 8) / 8


def rates_with_papers_best():
    """Those of PCIE with which alpha is the paper's best at all lengths of Table 5."""
    def right(rate):
        machine = replace(A800, node=replace(A800.node, pcie_bytes_per_s=rate))
        return all(eighths(estimate(paper_config("7B", int(S)), machine, 8, fast_arena)) == papers_best(S)
                   for S in T5["mfu_percent"])
    return [rate for rate in PCIE if right(rate)]


def host_cells():
    """[(cfg, whether the paper's run lacks host memory)] of what is swapped in Tables 4 and 5."""
    return [(cfg, cell == "oohm") for cfg, cell in cells_of_speeds() + cells_of_table5()
            if cfg.activation != "recompute" and not cfg.finds_alpha]


def hosts_with_papers_cells():
    """(least, most) bytes of a node's host with which those cells run out of it that do in the paper."""
    needs = [(failed, estimate(cfg, A800, 8, fast_arena).host_bytes) for cfg, failed in host_cells()]
    return max(n for failed, n in needs if not failed), min(n for failed, n in needs if failed)


def in_blocks(cfg):
    """Bytes of a node's host if each tensor of a layer, or alpha of it, is a block that is rounded up to a
    power of two, as torch's own cache does."""
    alpha = 1.0 if cfg.activation == "swap" else cfg.alpha
    parts = (t.nbytes * (alpha if t.group else 1.0) for t in tensors_of(cfg, BF16).values())
    return A800.node.gpus_per_node * (cfg.n_layer - 2) * sum(2 ** ceil(log2(n)) for n in parts if n)


def fit():
    """The figures that are fitted, beside what Table 5's cells would make of the speeds, and how far both
    are off."""
    ran, more = ([(cfg, cell) for cfg, cell in every if not isinstance(cell, str)]
                 for every in (cells_of_speeds(), cells_of_table5()))
    found, other, cells = fitted_speeds(ran), fitted_speeds(ran + more), cells_that_ran()
    assert found == hardware.AMPERE, f"memo/system/hardware.py uses {hardware.AMPERE}, the fit is {found}"
    both = [with_mfu(cells, lambda got, on=on: 100 * got.on(on, fast_arena).mfu)
            for on in (A800, with_parts(other))]
    offs = both_gaps(both, [([model], length) for model in MODELS for length in (SHORT, FROM_64K)])
    rates, (least, most) = rates_with_papers_best(), hosts_with_papers_cells()
    pcie = A800.node.pcie_bytes_per_s
    assert pcie in rates and least < HOST_BYTES <= most
    blocks = [(in_blocks(cfg) > NODE_BYTES) == failed for cfg, failed in host_cells()]
    return dict(tables=[(["part of the GPU's peak", "the fit", "Table 5 too"],
                         [[op, part, other[op]] for op, part in found.items()]),
                        (["points off Table 3", "the fit: mean", "worst", "Table 5 too: mean", "worst"],
                         offs),
                        (["set by hand", "used", "from", "to"],
                         [["PCIe, GB/s of a GPU", pcie / 1e9, rates[0] / 1e9, rates[-1] / 1e9],
                          ["host memory of a node, TB", HOST_BYTES / 1e12, round(least / 1e12, 3),
                           round(most / 1e12, 3)]])], notes=[
        f"Five figures are fitted. The three speeds: least squares over the {len(ran)} cells of 7B that ran "
        f"in Table 3 from 64K on and, with the plan, in Table 4, {SEQUENCES} sequences a step, to three "
        "digits. Table 5 is not among them: where its copies do not hide, PCIe's rate is in its MFU. The "
        f"columns \"Table 5 too\" are the fit with the {len(more)} cells of it that ran.",
        "Two are set by hand: PCIe to Table 5's best alphas, and the part of 2 TB of host memory that can be "
        "used, to the cells of Tables 4 and 5 that ran out of it. Anywhere in their ranges, PCIe in steps of "
        "0.1, all of these come out as in the paper. In torch's own cache, "
        "blocks of a power of two for each tensor, with all of 2 TB and nothing fitted, "
        f"{sum(blocks)} of {len(blocks)} of these cells run out of host memory, or not, as in the paper."])


# --- products by their rows, which the dry run does not have ---

def by_rows(got, half):
    """MFU in percent of an Estimate, if products of n rows had n/(n + half) of their speed."""
    n = got.cfg.batch_size * got.cfg.block_size // got.cfg.cp
    slower = with_speeds({"matmul": A800.speeds.rate("matmul") * n / (n + half)})
    return 100 * got.on(slower, fast_arena).mfu


def products():
    """Table 3 in its width with such a speed, whose `half` is fitted to 7B's rows."""
    cells = cells_that_ran()

    def found(half, models=MODELS):
        return with_mfu(cells, lambda got: by_rows(got, half), models)

    def misses(x):
        return [ours - paper for paper, ours in found(x[0], ["7B"]).values()]
    half = int(least_squares(misses, [500.0], bounds=(0, inf), diff_step=0.05).x[0])
    both = found(0), found(half)
    rows = [[thousands(S), *(value for model in MODELS for value in (
        both[0][model, S][0], *(round(mine[model, S][1], 1) for mine in both)))]
        for S in rows_of_table3("7B") if S < LONG]
    offs = both_gaps(both, [(models, length) for models in [*([model] for model in MODELS), MODELS[1:]]
                            for length in (SHORT, FROM_64K)])
    alone = estimate(paper_config("7B", 4096, tp=1, cp=1), A800, 8, fast_arena)
    fitted, others = ([gap(mine, models, SHORT)["mean"] for mine in both] for models in (["7B"], MODELS[1:]))
    assert others[1] > others[0], "speeds by rows are better: use them"
    return dict(tables=[
        (["", *(column for model in MODELS for column in (f"{model}, paper", "one speed", "by rows"))], rows),
        (["points off", "one speed: mean", "worst", "by rows: mean", "worst"], offs)], half=half, notes=[
        f"If products of n rows, a micro batch's of all tp ranks, had n/(n + {half}) of their speed, fitted "
        f"to 7B's {sum(model == '7B' for model, _ in cells)} rows alone, 7B's own short rows would be "
        f"{fitted[1]} points off in the mean instead of {fitted[0]}. Those of 13B and 30B, "
        f"which the fit has not seen, would be {others[1]} off instead of {others[0]}: so "
        "this is left out of the dry run. 7B at 4K without tp, which the search finds, would have "
        f"{by_rows(alone, half):.1f}% instead of {100 * alone.mfu:.1f}; the paper has {rows[0][1]}."])


PARTS = {"fit": Part("The fit", "fitted to MEMO's 7B rows", DRY, fit),
         "products": Part("Products by their rows", "MEMO's Table 3", DRY, products)}
