"""What is fitted to MEMO's 7B rows: three speeds of the A800, PCIe's rate, the host memory."""

from dataclasses import replace
from math import ceil, log2

from scipy.optimize import least_squares

from memo.config.layer import tensors_of
from memo.estimate.arena import ArenaBytes, fast_arena
from memo.estimate.budget import estimate
from memo.system import hardware
from memo.system.hardware import Speeds
from research.papers.page import DRY, Part
from research.papers.rivals import A800
from testing.paper import HOST_BYTES, LONG, PAPER, paper_config, rows_of_table3

T4, T5 = PAPER["table4"], PAPER["table5"]
FITTED = [*T5["mfu_percent"]][:3]  # its lengths that the fit has seen
SHORT, FROM_64K = "4K to 32K", "from 64K on"
NODE_BYTES, BF16 = A800.node.host_memory_bytes, 2
PCIE = [n * 1e8 for n in range(80, 131)]  # bytes per second of a GPU that are tried


def with_parts(parts):
    """The A800 with {operation: part of its peak} as speeds."""
    table = {op: [(1, part * A800.peak_flops_per_s)] for op, part in parts.items()}
    return replace(A800, speeds=Speeds(A800.speeds.table | table, A800.speeds.overhead_s))


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
    return [(paper_config("7B", int(S), alpha=alpha), cell) for S in FITTED
            for alpha, cell in zip(T5["alpha"], T5["mfu_percent"][S], strict=True)]


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
                   for S in FITTED)
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
    """The figures that are fitted, beside what Table 5's cells would make of the speeds."""
    ran, more = ([(cfg, cell) for cfg, cell in every if not isinstance(cell, str)]
                 for every in (cells_of_speeds(), cells_of_table5()))
    found, other = fitted_speeds(ran), fitted_speeds(ran + more)
    assert found == hardware.AMPERE, f"memo/system/hardware.py uses {hardware.AMPERE}, the fit is {found}"
    rates, (least, most) = rates_with_papers_best(), hosts_with_papers_cells()
    pcie = A800.node.pcie_bytes_per_s
    assert pcie in rates and least < HOST_BYTES <= most
    blocks = [(in_blocks(cfg) > NODE_BYTES) == failed for cfg, failed in host_cells()]
    return dict(tables=[(["part of the GPU's peak", "the fit", "/Table 5 too"],
                         [[op, part, other[op]] for op, part in found.items()]),
                        (["set by hand", "used", "from", "/to"],
                         [["PCIe, GB/s of a GPU", pcie / 1e9, rates[0] / 1e9, rates[-1] / 1e9],
                          ["host memory of a node, TB", HOST_BYTES / 1e12, round(least / 1e12, 3),
                           round(most / 1e12, 3)]])], notes=[
        f"Speeds: least squares over the {len(ran)} cells of 7B that ran in Table 3 from 64K on and, with "
        f"the plan, in Table 4 (\"Table 5 too\": {len(more)} more). By hand: PCIe to Table 5's best alphas, "
        "the host memory to the cells of Tables 4 and 5 that ran out of it; anywhere in the ranges these "
        f"come out as in the paper. Half of 2 TB is what blocks of a power of two leave: so {sum(blocks)} of "
        f"{len(blocks)} of these cells end as in the paper with nothing fitted."])


PARTS = {"fit": Part("The fit", DRY, fit)}
