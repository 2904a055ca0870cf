"""What several tests begin with."""

import json
import os
import signal

import numpy as np
import pytest
import torch

import memo.run.prepare
from memo.run import report
from memo.system import command
from tests.helpers import VOCAB, bound_arena, no_picture


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """No test finds a plan that another run made, none leaves one behind. xdist's workers share one cache: to
    build the allocator's library takes seconds."""
    temporary = tmp_path_factory.getbasetemp()
    cache = (temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary) / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as m:
        m.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_takes_long():
    """Nothing in this process tells how far it is, however busy the machine."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(command, "FIRST_S", 10**6)
        yield


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session", autouse=True)
def draw_picture():
    """The real one. Runs in this process draw no pictures: these take longer than all else of a small run."""
    real = report.draw_picture
    with pytest.MonkeyPatch.context() as m:
        m.setattr(report, "draw_picture", no_picture)
        yield real


@pytest.fixture(scope="session")
def no_matplotlib(tmp_path_factory):
    """Of the environment of processes that shall draw no pictures."""
    folder = tmp_path_factory.mktemp("nothing")
    (folder / "matplotlib.py").write_text("raise ImportError('not here')")
    return dict(PYTHONPATH=str(folder))


@pytest.fixture
def pictures(draw_picture, monkeypatch):
    """Runs draw their pictures."""
    monkeypatch.setattr(report, "draw_picture", draw_picture)


@pytest.fixture(scope="session", autouse=True)
def arena_here():
    """The real one. Runs in this process bound their arena: a trace takes longer than all else of a small
    run."""
    real = memo.run.prepare.arena_here
    with pytest.MonkeyPatch.context() as m:
        bound_arena(m)
        yield real


@pytest.fixture
def traces(arena_here, monkeypatch):
    """Runs estimate their arena by a trace."""
    monkeypatch.setattr("memo.run.prepare.arena_here", arena_here)


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


def pytest_collection_modifyitems(items):
    """Tests of several ranks come first: xdist gives all of them to its first worker, so that few pools of
    processes are made, and the ranks of two tests do not compete for the cores."""
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
