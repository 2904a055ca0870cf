"""What every test on null CUDA begins with. `make test-cuda` loads null CUDA, `make test` leaves this out."""

import os

import pytest

NULL = "libnull.so" in os.environ.get("LD_PRELOAD", "")
collect_ignore_glob = [] if NULL else ["test_*.py"]

# A small model of four layers, of which two are swapped. torch's flash kernel pads heads to multiples of 32,
# and splits the keys where heads times queries / 64 is below 0.8 * 2 * SMs = 211; no trace knows what it asks
# for then. Here D is 32, and even the 4 heads and 4,096 queries of a step of the ring with tp=2 are enough.
# METP's groups of a head or two are not: their forward asks for more, but the backward's peak is above it
SMALL = ("--n_layer=4", "--n_embd=256", "--n_head=8", "--block_size=16384", "--max_iters=3",
         "--subsequences=1", "--subsequence_cut=equal", "--unit_order=layer", "--solver=greedy",
         "--warmup_iters=1", "--eval_interval=0", "--save_interval=0", "--learning_rate=1e-3")


@pytest.fixture(scope="session")
def small(dataset_of):
    """Command line of a small run."""
    return (*SMALL, f"--dataset={dataset_of(50, 2**19)}")


@pytest.fixture(scope="session")
def dataset_of(tmp_path_factory):
    """dataset_of(vocabulary, tokens) -> its folder."""
    from tests.nullcuda.runs import random_dataset
    return lambda *args: random_dataset(tmp_path_factory.mktemp("dataset"), *args)
