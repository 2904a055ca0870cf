"""In virtual time: the estimate held against what train.py does, both with the same machine's figures."""

import pytest

from tests.nullcuda.modelled import LENGTHS, modelled_run, row


@pytest.fixture(scope="session")
def run_of(dataset_of, tmp_path_factory):
    runs = {}

    def run(name):
        if name not in runs:
            data = dataset_of(50257, max(S for S, *_ in LENGTHS.values()) + 4096)
            runs[name] = modelled_run(name, tmp_path_factory.mktemp("modelled"), data)
        return runs[name]
    return run


@pytest.mark.parametrize("name", ["64K", "256K", "1M"])
def test_the_step_takes_what_the_estimate_says(run_of, name):
    got = row(run_of(name))
    assert got["step_s"] == pytest.approx(got["estimated_step_s"], rel=0.05)
    assert got["stall_s"] < 0.001 * got["step_s"]
    assert run_of(name).report["races"] == []


@pytest.mark.parametrize("name", ["64K", "256K", "1M"])
def test_the_run_chooses_the_estimates_alpha(run_of, name):
    got = row(run_of(name))
    assert got["alpha"] == pytest.approx(got["estimated_alpha"], abs=0.02)


def test_a_slow_link_stalls_as_estimated(run_of):
    got = row(run_of("slow link"))
    assert got["alpha"] == got["estimated_alpha"] == 0
    assert got["stall_s"] == pytest.approx(got["estimated_stall_s"], rel=0.05)
    assert got["stall_s"] > 0.2 * got["step_s"]
    assert got["step_s"] == pytest.approx(got["estimated_step_s"], rel=0.05)
