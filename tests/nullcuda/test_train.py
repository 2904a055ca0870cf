"""train.py from start to end on null CUDA, in every mode and layout: what it asks of the device, and what it
says when that is refused. See also tests/nullcuda/test_races.py and test_time.py."""

import json
import re

import pytest

from tests.nullcuda.runs import in_process, trained

FOUR, IN_ORDER = ("--subsequences=4",), ("--subsequences=4", "--unit_order=subsequence")
MODES = {"keep": ["--activation=keep"], "recompute": ["--activation=recompute"],
         "swap": ["--activation=swap"], "memo": ["--activation=memo"], "alpha=0.5": ["--alpha=0.5"],
         "host": ["--alpha=0.5", "--optimizer_device=cpu"],
         "states host": ["--alpha=0.5", "--states=host", "--tie_embeddings=false", *FOUR],
         "subsequences": ["--alpha=0.5", *FOUR], "in order": ["--alpha=0.5", *IN_ORDER],
         "swept": ["--activation=recompute", *FOUR], "measured": ["--activation=memo", *FOUR],
         "auto keep": ["--attention=auto", "--activation=keep"],  # it takes cuDNN on a Hopper
         "cudnn subsequences": ["--attention=cudnn", "--alpha=0.5", *FOUR],
         "windows": ["--attention=cudnn", "--alpha=0.5", "--sliding_window=100", *FOUR]}
LLAMA = ("--position=rope", "--norm=rmsnorm", "--mlp=swiglu", "--n_kv_head=2", "--head_groups=4",
         "--bias=false")
LAYOUTS = {"tp2": (2, "--tp=2"), "cp2": (2, "--cp=2"), "ulysses": (2, "--cp=2", "--context_parallel=ulysses"),
           "dp2 host": (2, "--gradient_accumulation_steps=2", "--optimizer_device=cpu"),
           "dp2 states sharded": (2, "--gradient_accumulation_steps=4", "--states=sharded",
                                  "--tie_embeddings=false"),
           "tp2 states host": (2, "--tp=2", "--gradient_accumulation_steps=2", "--states=host"),
           "tp2 cp2": (4, "--tp=2", "--cp=2"), "metp4": (4, "--tensor_parallel=metp", "--tp=4"),
           "metp2 cp2 llama": (4, "--tensor_parallel=metp", "--tp=2", "--cp=2", *LLAMA),
           "ring subsequences": (2, "--cp=2", *FOUR), "ring in order": (2, "--cp=2", *IN_ORDER),
           "ulysses subsequences": (2, "--cp=2", "--context_parallel=ulysses", *FOUR),
           "metp2 subsequences": (2, "--tensor_parallel=metp", "--tp=2", *FOUR),
           "pp2": (2, "--pp=2", *IN_ORDER),
           "pp2 msp": (2, "--pp=2", "--msp=true", "--batch_size=1", "--deterministic=true", *IN_ORDER),
           "pp2 tp2 host": (4, "--pp=2", "--tp=2", "--optimizer_device=cpu", *IN_ORDER),
           "cudnn ring": (2, "--cp=2", "--attention=cudnn"),
           "cudnn ring windows": (2, "--cp=2", "--attention=cudnn", "--sliding_window=100",
                                  "--layer_types=sliding,full", *IN_ORDER),
           "cudnn metp2 llama": (2, "--tensor_parallel=metp", "--tp=2", "--attention=cudnn", *LLAMA)}


@pytest.fixture(scope="session")
def run_of(small, tmp_path_factory):
    """run_of(mode or layout) -> its Run, made once."""
    runs = {}

    def run(name):
        if name not in runs:
            ranks, *argv = LAYOUTS.get(name) or (1, *MODES[name])
            argv = [*small, *["--alpha=0.5"] * (ranks > 1), *argv]
            runs[name] = trained(tmp_path_factory.mktemp("run"), *argv, ranks=ranks)
        return runs[name]
    return run


EVERY = [*MODES, *LAYOUTS]


def calm(counts, phases, *names):
    """{phase: {count: n}} of those that are not zero."""
    return {phase: found for phase in phases
            if (found := {n: counts[phase][n] for n in names if counts[phase][n]})}


@pytest.mark.parametrize("name", EVERY)
def test_it_trains_without_a_race_or_a_bad_launch(run_of, name):
    run = run_of(name)
    assert [r["exit"] for r in run.reports] == [0] * len(run.reports), run.text
    assert len(run.metrics) == 3 and "warning" not in run.text
    for report in run.reports:
        assert report["races"] == []
        assert all(n["bad launches"] == 0 for n in report["counts"].values())
        assert report["counts"]["step"]["products"] > 100


@pytest.mark.parametrize("name", EVERY)
def test_nothing_in_a_steps_forward_and_backward_holds_the_host_up(run_of, name):
    for report in run_of(name).reports:
        assert calm(report["counts"], ("step",), "syncs", "pageable copies", "frees") == {}
        # what the offload stream computes of gradients that leave has a segment of its own, taken once
        assert report["counts"]["step"]["mallocs"] <= ("host" in name or "states" in name)
        assert calm(report["counts"], ("clip",), "syncs", "pageable copies") == {}


@pytest.mark.parametrize("name", EVERY)
def test_nothing_in_the_optimizer_holds_the_host_up_but_where_the_host_does_it(run_of, name):
    for report in run_of(name).reports:
        assert calm(report["counts"], ("optimizer",), "pageable copies") == {}
        if "host" not in name:
            assert calm(report["counts"], ("optimizer",), "syncs") == {}


@pytest.mark.parametrize("name", ["memo", "tp2 cp2"])
def test_the_batchs_ids_come_from_page_locked_memory(run_of, name):
    assert calm(run_of(name).report["counts"], ("batch",), "syncs", "pageable copies") == {}


@pytest.mark.parametrize("name", EVERY)
def test_a_step_ends_with_one_wait(run_of, name):
    assert run_of(name).report["counts"]["between"]["syncs"] <= 3 + 1  # and the last one's, before it saves


@pytest.mark.parametrize("name", EVERY)
def test_the_recorded_arena_is_the_estimates_to_the_byte(run_of, name):
    plan = run_of(name).plan
    estimated, regions = plan["estimate"]["device_bytes"], {}
    for line in plan["regions"]:
        regions[line["region"]] = regions.get(line["region"], 0) + line["device_bytes"]
    assert regions["transient"] == estimated["transient"] + estimated["head"] > 0
    held = ("rounding_buffers", "keys", "key_gradients", "stream", "sweep", "guest_weights", "guest_keys",
            "guest_gradients", "repaid")
    assert sum(regions.get(region, 0) for region in held) == plan["device_bytes"]
    for region in ("params", "grads", "optimizer", "positions", *held[1:]):
        assert regions.get(region, 0) == estimated.get(region, 0), region


@pytest.mark.parametrize("name", [name for name in EVERY if "cudnn" in name or "auto" in name])
def test_cudnn_runs_where_it_is_asked_for_and_where_auto_takes_it(run_of, name):
    assert re.search(r"attention=(ring of 2, )?cudnn 9\.", run_of(name).text)
    for report in run_of(name).reports:  # a kernel is compiled for each shape: before the first step
        plans = {phase: n["plans"] for phase, n in report["counts"].items() if n["plans"]}
        assert set(plans) == {"startup"} and plans["startup"] >= 2


def test_a_run_that_is_resumed_goes_on(small, tmp_path):
    first = trained(tmp_path, *small, "--alpha=0.5", "--max_iters=2")
    assert first.report["exit"] == 0 and len(first.metrics) == 2
    second = trained(tmp_path, *small, "--alpha=0.5", "--max_iters=4", "--init_from=resume")
    assert second.report["exit"] == 0 and [row["iter"] for row in second.metrics] == [0, 1, 2, 3]
    assert "steps 2 to 4" in second.text and second.report["races"] == []


# --- what a user sees when there is not enough ---

TOO_LONG = ("--activation=keep", "--block_size=32768")
TOO_SMALL = dict(figures=dict(device_memory_bytes=9 * 10**8))

def test_a_device_that_is_too_small_is_said_before_it_is_touched(small, tmp_path):
    run = trained(tmp_path, *small, *TOO_LONG, job=TOO_SMALL)
    error = run.report["error"]
    assert run.report["exit"] == 1 and "does not fit: it needs" in error and "device memory" in error
    assert "--force" in error and run.report["peak_bytes"] == 0


def test_a_device_that_is_full_all_the_same_is_named_with_its_region(small, tmp_path):
    run = trained(tmp_path, *small, *TOO_LONG, "--force", job=TOO_SMALL)
    assert run.report["exit"] == 1 and "memory" in run.report["error"] and "\n" not in run.report["error"]
    assert "Traceback" not in run.text


def test_a_host_that_is_too_small_is_oohm(small, tmp_path):
    run = trained(tmp_path, *small, "--activation=swap", "--n_layer=12", "--alpha_mode=paper",
                  job=dict(host_bytes=10**7))
    assert run.report["exit"] == 1 and "host" in run.report["error"] and "GiB" in run.report["error"]


def test_a_refused_page_lock_names_the_remedy(small, tmp_path):
    run = trained(tmp_path, *small, "--activation=swap", environment=dict(NULL_LOCKABLE_BYTES=str(10**6)))
    assert (run.report["exit"] == 1 and "page-locking" in run.report["error"]
            and "ulimit -l" in run.report["error"])
    assert "--pin_memory=false" in run.report["error"]


def lock_700_gib():
    """Takes, locks and copies to a host slab of 700 GiB, of which no page is touched."""
    import torch

    from memo.memory.slab import HostSlab
    from tests.nullcuda.driver import as_modelled
    from tests.nullcuda.watch import NULL
    with as_modelled(dict(sparse=True)):
        slab = HostSlab(700 * 2**30, torch.device("cuda:0"))
        x = torch.ones(2**20, dtype=torch.uint8, device="cuda")
        before = NULL.counts()["pageable copies"]
        for at in range(0, slab.bytes.nbytes, 2**35):
            slab.bytes[at:at + 2**20].copy_(x, non_blocking=True)
        pageable = NULL.counts()["pageable copies"] - before
        slab.close()
    return dict(registrations=NULL.counts()["registrations"], pageable=pageable)


def test_a_slab_of_700_gib_is_locked_in_pieces(tmp_path):
    seen = in_process(tmp_path, lock_700_gib)
    assert seen["registrations"] >= 11 and seen["pageable"] == 0  # of 64 GiB or less


def test_the_report_holds_what_the_tests_ask_for(run_of):
    report = run_of("memo").report
    phases = {"startup", "between", "batch", "step", "clip", "optimizer"}
    assert set(report["counts"]) == phases, json.dumps(report)
