"""In virtual time: the estimate held against what train.py does, both with the same machine's figures."""

import pytest

from tests.nullcuda.modelled import LENGTHS, modelled_run, row

HIDDEN = [name for name in LENGTHS if name != "slow link"]  # copies hide, or memo would swap less


@pytest.fixture(scope="session")
def run_of(dataset_of, tmp_path_factory):
    runs = {}

    def run(name):
        if name not in runs:
            data = dataset_of(50257, max(S for S, *_ in LENGTHS.values()) + 4096)
            runs[name] = modelled_run(name, tmp_path_factory.mktemp("modelled"), data)
        return runs[name]
    return run


@pytest.mark.parametrize("name", HIDDEN)
def test_the_step_takes_what_the_estimate_says(run_of, name):
    got = row(run_of(name))
    assert got["step_s"] == pytest.approx(got["estimated_step_s"], rel=0.05)
    assert got["stall_s"] < 0.001 * got["step_s"]
    assert run_of(name).report["races"] == []


@pytest.mark.parametrize("name", HIDDEN)
def test_the_run_chooses_the_estimates_alphas(run_of, name):
    got = row(run_of(name))
    assert got["alpha"] == pytest.approx(got["estimated_alpha"], abs=0.02)
    assert len(got["alphas"]) == LENGTHS[name][1]  # of each subsequence
    assert got["alphas"] == pytest.approx(got["estimated_alphas"], abs=0.02)


@pytest.mark.parametrize("name", LENGTHS)
def test_what_is_modelled_takes_no_memory_of_this_machine(run_of, name):
    """A slab of hundreds of GB has no pages, and nothing is saved."""
    run = run_of(name)
    assert run.report["host_peak_bytes"] < 4 * 2**30 and not any((run.out / "ckpt").iterdir())


def test_a_slow_link_stalls_as_estimated(run_of):
    got = row(run_of("slow link"))
    assert got["alpha"] == got["estimated_alpha"] == 0
    assert got["stall_s"] == pytest.approx(got["estimated_stall_s"], rel=0.05)
    assert got["stall_s"] > 0.2 * got["step_s"]
    assert got["step_s"] == pytest.approx(got["estimated_step_s"], rel=0.05)
