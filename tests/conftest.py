"""What several tests begin with."""

import json
import signal

import numpy as np
import pytest
import torch

from tests.helpers import VOCAB


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """No test finds a plan that another run made, none leaves one behind."""
    with pytest.MonkeyPatch.context() as m:
        m.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A dataset folder of a language with structure: each token follows from the one before, mostly."""
    folder = tmp_path_factory.mktemp("dataset")
    rng = np.random.default_rng(0)
    follow = rng.permutation(VOCAB)
    counts = {}
    for split, n in (("train", 20000), ("val", 2000)):
        ids = [0]
        for noise in rng.random(n - 1):
            ids.append(int(rng.integers(VOCAB)) if noise < 0.1 else int(follow[ids[-1]]))
        np.array(ids, dtype=np.uint16).tofile(folder / f"{split}.bin")
        counts[split] = dict(tokens=n)
    (folder / "meta.json").write_text(json.dumps(dict(dtype="uint16", vocab_size=VOCAB, counts=counts)))
    return folder


@pytest.fixture
def hangup_is_heard():
    """SIGHUP is not ignored, as it is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
