"""Dry runs of the configurations of SPPO's Table 4 (arXiv 2503.10377), in two forms: SPPO's own, which
recomputes nothing (activation=swap: rows whose copies do not hide stay on the device), and MEMO's, which
recomputes them (activation=memo). Nothing is run.

    python -m bench.sppo_table4

Models, GPUs, SP, PP, N and lengths are the paper's; its SP is tp inside a node, with cp where that is not
enough. Subsequences have equal FLOPs. The GPUs are A100 with 80 GB, eight a node with 2 TB and four links of
200 Gb/s; a copy runs at the PCIe rate of memo's dgx-a100, which is that of the paper's figure 5. The arena of
temporary tensors is a bound. Writes bench/results/sppo_table4.json.
"""

import time
from pathlib import Path

from bench.machine import machine
from memo.config import Config
from memo.estimate import hardware
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.hardware import GIB
from memo.files import save_json
from memo.formulas import percent

RESULTS = Path(__file__).parent / "results"
MODELS = {"7B": dict(n_layer=32, n_embd=4096, n_head=32), "13B": dict(n_layer=40, n_embd=5120, n_head=40),
          "65B": dict(n_layer=80, n_embd=8192, n_head=64)}
# model, SP, PP, {length in units of 1,024 tokens: N}
TABLE4 = [("7B", 8, 4, {512: 32, 640: 64, 768: 80, 896: 128, 1024: 160}),
          ("13B", 8, 8, {512: 32, 640: 48, 768: 64, 1024: 80, 1280: 160}),
          ("65B", 16, 8, {512: 32, 600: 64, 640: 80, 768: 96, 1024: 128})]
FORMS = "swap", "memo"
NODE = dict(network_bytes_per_s=4 * 25e9 / 8, host_memory_bytes=2_000_000_000_000)


def row(model: str, sp: int, pp: int, tokens: int, N: int) -> dict:
    """What both forms take and give."""
    tp, found = min(sp, 8), {}
    for form in FORMS:
        cfg = Config(**MODELS[model], vocab_size=50257, block_size=tokens, tp=tp, cp=sp // tp, pp=pp,
                     subsequences=N, subsequence_cut="flops", unit_order="subsequence", activation=form,
                     dtype="bfloat16")
        start = time.perf_counter()
        got = estimate(cfg, hardware.machine("a100-80gb", ranks=sp * pp, **NODE), sp * pp, fast_arena)
        found[form] = dict(fits=got.fits, reason=got.reason, why=got.why, mfu=got.mfu, tgs=got.tgs,
                           step_s=got.seconds["step"], parts=got.seconds, device_bytes=got.device_bytes,
                           host_bytes=got.host_bytes, alphas=[one.alpha for one in got.stages],
                           estimate_s=time.perf_counter() - start)
    return dict(model=model, gpus=sp * pp, sp=sp, pp=pp, tokens=tokens, N=N, **found)


def lines(rows: list[dict]) -> list[str]:
    head = f"{'':30}" + "".join(f"{form:>11}{'MFU':>8}{'TGS':>8}{'bubble':>8}{'GiB':>7}{'host':>7}"
                                for form in FORMS)
    table = [f"{head}   faster"]
    for one in rows:
        text = f"{one['model']:>4}{one['gpus']:>5} GPUs{one['tokens']:>10,}{one['N']:>5}  "
        for form in FORMS:
            got = one[form]
            text += f"{'fits' if got['fits'] else got['reason']:>11}"
            text += f"{percent(got['mfu']):>8}{got['tgs']:>8.1f}"
            text += f"{got['parts']['bubble'] / got['step_s']:>8.1%}"
            text += f"{got['device_bytes'] / GIB:>7.1f}{got['host_bytes'] / GIB:>7.0f}"
        rates = {form: one[form]["tgs"] for form in FORMS if one[form]["fits"]}
        alike = len(rates) == 2 and max(rates.values()) < 1.001 * min(rates.values())
        fastest = "equal" if alike else max(rates, key=rates.__getitem__, default="none fits")
        table.append(f"{text}   {fastest}")
    return table


def main() -> None:
    rows = [row(model, sp, pp, 1024 * k, N) for model, sp, pp, lengths in TABLE4 for k, N in lengths.items()]
    print("\n".join(lines(rows)))
    save_json(dict(machine=machine(), node=NODE, rows=rows), RESULTS / "sppo_table4.json")


if __name__ == "__main__":
    main()
