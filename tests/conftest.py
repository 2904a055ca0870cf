"""What several tests begin with."""

import inspect
import json
import re
import signal
import sys
import threading

import numpy as np
import pytest
import torch

from tests.helpers import ROOT, VOCAB


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


@pytest.fixture
def one_thread():
    """On matrices this small two threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


# --- pytest --each_module: a function of each module of memo/ must be called in this process ---

CALLED = set()  # paths
NEEDS_TRITON = ROOT / "memo" / "kernels.py"  # make test-cuda runs it


def pytest_addoption(parser):
    parser.addoption("--each_module", action="store_true", help="fail where a module of memo/ is not tested")


def note_call(frame, event, arg):
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function, no module and no class
        CALLED.add(frame.f_code.co_filename)


def pytest_configure(config):
    if config.option.each_module:
        threading.setprofile(note_call)
        sys.setprofile(note_call)


def pytest_sessionfinish(session):
    if session.config.option.each_module:
        sys.setprofile(None)
        has_functions = re.compile(r"^ *def ", re.M)
        modules = (path for path in (ROOT / "memo").rglob("*.py") if has_functions.search(path.read_text()))
        missed = sorted(str(path.relative_to(ROOT)) for path in modules
                        if str(path) not in CALLED and path != NEEDS_TRITON)
        if missed:
            print(f"\nno test called a function of {', '.join(missed)}", file=sys.stderr)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
