"""transformer-engine itself on null CUDA: train.py with ops=te, and what a layer launches with it."""

import pytest

from tests.nullcuda.runs import in_process, trained

pytest.importorskip("transformer_engine")
LLAMA = ("--position=rope", "--norm=rmsnorm", "--mlp=swiglu", "--n_kv_head=2", "--bias=false")
FAMILIES = {"GPT": (), "Llama": LLAMA}
MODES = {"keep": ["--activation=keep"], "memo": ["--activation=memo"], "alpha=0.5": ["--alpha=0.5"]}
RANKS = {"tp2": (2, "--tp=2"), "metp2": (2, "--tensor_parallel=metp", "--tp=2"),
         "pp2": (2, "--pp=2", "--subsequences=4", "--unit_order=subsequence")}


@pytest.fixture(scope="module")
def run_of(small, tmp_path_factory):
    """run_of(family, matmul, mode or layout) -> its Run, made once."""
    runs = {}

    def run(family, matmul, mode):
        if (family, matmul, mode) not in runs:
            ranks, *argv = RANKS.get(mode) or (1, *MODES[mode])
            argv = [*small, *["--alpha=0.5"] * (ranks > 1), *argv, *FAMILIES[family], f"--matmul={matmul}",
                    "--ops=te"]
            runs[family, matmul, mode] = trained(tmp_path_factory.mktemp("run"), *argv, ranks=ranks)
        return runs[family, matmul, mode]
    return run


EVERY = [(family, matmul, mode) for family in FAMILIES for matmul in ("bf16", "fp8") for mode in MODES]
EVERY += [("GPT", "bf16", "tp2"), ("Llama", "fp8", "tp2"), ("GPT", "fp8", "metp2"), ("Llama", "fp8", "pp2")]


@pytest.mark.parametrize("what", EVERY, ids=" ".join)
def test_it_trains_and_says_so(run_of, what):
    run = run_of(*what)
    assert [r["exit"] for r in run.reports] == [0] * len(run.reports), run.text
    assert "ops=te: transformer-engine 2." in run.text and "warning" not in run.text
    for report in run.reports:
        assert report["races"] == []
        assert all(n["bad launches"] == 0 for n in report["counts"].values())


@pytest.mark.parametrize("what", EVERY, ids=" ".join)
def test_nothing_in_a_step_holds_the_host_up(run_of, what):
    for report in run_of(*what).reports:
        step = report["counts"]["step"]
        assert [step[n] for n in ("syncs", "pageable copies", "mallocs", "frees")] == [0] * 4


@pytest.mark.parametrize("what", EVERY, ids=" ".join)
def test_the_recorded_arena_is_the_estimates_to_the_byte(run_of, what):
    plan = run_of(*what).plan
    estimated = plan["estimate"]["device_bytes"]
    recorded = sum(line["device_bytes"] for line in plan["regions"] if line["region"] == "transient")
    assert recorded == estimated["transient"] + estimated["head"] > 0


# --- launches ---

def launches():
    """{family, matmul: {kernels: what a step launches more of with one layer more}}"""
    import torch

    from memo.config.layout import Layout
    from memo.states.passes import Model
    from model import GPT
    from tests.nullcuda.watch import NULL

    def of_a_step(layers, **keys):
        cfg = Layout(n_layer=layers, n_embd=1024, n_head=8, block_size=8192, vocab_size=1000,
                     attention="flash", activation="keep", **keys)
        model = Model(GPT, cfg, torch.device("cuda:0"), torch.bfloat16)
        model.reserve(1, 8192)
        ids = torch.zeros(1, 8192, dtype=torch.int64, device="cuda")
        for _ in range(2):  # the first one compiles
            before = NULL.counts()["launches"]
            model.forward(ids, ids, scale=1.0)
            model.backward()
        made = NULL.counts()["launches"] - before
        model.close()
        return made
    llama = dict(position="rope", norm="rmsnorm", mlp="swiglu", n_kv_head=2, bias=False)
    return {f"{name} {matmul}": {ops: of_a_step(2, ops=ops, matmul=matmul, **family)
                                 - of_a_step(1, ops=ops, matmul=matmul, **family)
                                 for ops in ("torch", "triton", "te")}
            for name, family in (("GPT", {}), ("Llama", llama)) for matmul in ("bf16", "fp8")}


def test_a_layer_launches_less_than_with_torchs_operations(tmp_path, capsys):
    found = in_process(tmp_path, launches)
    with capsys.disabled():
        print("\nlaunches of a layer, forward and backward")
        for what, counts in found.items():
            print(f"{what:12}" + "".join(f"{ops:>9} {n:3}" for ops, n in counts.items()))
    assert all(counts["te"] < counts["torch"] for counts in found.values())
