"""The host slab: what there is, taking it to the byte, locking it, giving it back."""

import random
import re
import resource
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from memo.errors import OutOfHostMemory
from memo.memory import slab
from memo.memory.slab import HostSlab, cgroup_available, host_bytes, meminfo_available, prefer_node
from tests.helpers import resident_bytes

CPU = torch.device("cpu")
MIB = 2**20


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_meminfo(tmp_path):
    write(tmp_path, {"proc/meminfo": "MemTotal:  4000 kB\nMemFree: 1 kB\nMemAvailable:    3000 kB\n"
                                     "HugePages_Total: 0\n"})
    assert meminfo_available(tmp_path) == 3000 * 1024
    assert 0 < meminfo_available() < 2**50


def test_control_groups_the_tightest_of_all_above_counts_and_file_cache_is_free(tmp_path):
    top = "sys/fs/cgroup"
    write(tmp_path, {"proc/self/cgroup": "0::/slice/job\n",
                     f"{top}/slice/job/memory.max": "max\n", f"{top}/slice/job/memory.current": "100\n",
                     f"{top}/slice/memory.max": "1000\n", f"{top}/slice/memory.current": "700\n",
                     f"{top}/slice/memory.stat": "anon 500\ninactive_file 150\nactive_file 7\n"})
    assert cgroup_available(tmp_path) == 1000 - 700 + 150
    write(tmp_path, {f"{top}/slice/job/memory.max": "160\n"})
    assert cgroup_available(tmp_path) == 60


def test_control_groups_of_version_1(tmp_path):
    top = "sys/fs/cgroup/memory"
    write(tmp_path,
          {"proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n", f"{top}/a/memory.limit_in_bytes": "5000\n",
           f"{top}/a/memory.usage_in_bytes": "3000\n", f"{top}/a/memory.stat": "total_inactive_file 500\n"})
    assert cgroup_available(tmp_path) == 2500


def test_no_control_group_limits_nothing(tmp_path):
    assert cgroup_available(tmp_path) == float("inf")
    write(tmp_path, {"proc/self/cgroup": "0::/\n"})
    assert cgroup_available(tmp_path) == float("inf")


def test_a_ranks_share_of_the_host(monkeypatch):
    monkeypatch.setattr(slab, "meminfo_available", lambda: 1000 * 10**9)
    monkeypatch.setattr(slab, "cgroup_available", lambda: 800 * 10**9)
    assert host_bytes("auto") == 720 * 10**9
    assert host_bytes("auto", local_ranks=8) == 90 * 10**9
    assert host_bytes(80.0, local_ranks=8) == 10 * 10**9
    with pytest.raises(OutOfHostMemory,
                       match=r"^host_memory_gb=721 must be at most 720, 90% of what is free on this host; "
                             r"try host_memory_gb=auto$"):
        host_bytes(721.0)


def test_the_slab_is_there_from_the_start_and_gone_at_the_end_whoever_holds_a_view():
    HostSlab(64 * MIB, CPU).close()  # starts torch's threads
    before = resident_bytes()
    block = HostSlab(64 * MIB + 13, CPU)
    assert block.bytes.nbytes == 64 * MIB + 13 and not block.bytes.any()
    assert abs(resident_bytes() - before - 64 * MIB) < 4 * MIB
    view = block.bytes[-13:]
    view.fill_(7)
    block.close()
    assert resident_bytes() - before < 4 * MIB
    assert view.shape == (13,)


def test_memory_that_the_system_refuses():
    with pytest.raises(OutOfHostMemory,
                       match=r"host memory of 5.\d+e\+08 GiB cannot be had \(.*\); try a smaller alpha"):
        HostSlab(2**59, CPU)


@pytest.fixture
def fake_cuda(monkeypatch):
    calls = []
    driver = SimpleNamespace(errors=[], cudaGetErrorString=lambda error: {2: "out of memory"}[error])

    def register(address, nbytes, flags):
        calls.append(("register", address, nbytes))
        return driver.errors.pop(0) if driver.errors else 0
    driver.cudaHostRegister = register
    driver.cudaHostUnregister = lambda address: calls.append(("unregister", address))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(slab, "numa_node", lambda device: None)
    return driver, calls


def test_a_gpus_slab_is_registered_once_to_the_byte_and_let_go(fake_cuda):
    _, calls = fake_cuda
    block = HostSlab(3 * MIB + 1, torch.device("cuda"))
    address = block.bytes.data_ptr()
    assert calls == [("register", address, 3 * MIB + 1)]
    block.close()
    block.close()
    assert calls[1:] == [("unregister", address)]
    forgotten = HostSlab(MIB, torch.device("cuda"))
    address = forgotten.bytes.data_ptr()
    del forgotten
    assert calls[-1] == ("unregister", address)


def test_without_pinning_nothing_is_registered(fake_cuda):
    HostSlab(MIB, torch.device("cuda"), pin=False).close()
    assert fake_cuda[1] == []


def test_a_slab_is_locked_piece_by_piece(fake_cuda, monkeypatch):
    _, calls = fake_cuda
    monkeypatch.setattr(slab, "PIECE_BYTES", MIB)
    block = HostSlab(3 * MIB + 1, torch.device("cuda"))
    address = block.bytes.data_ptr()
    assert calls == [("register", address + k * MIB, n) for k, n in enumerate((MIB, MIB, MIB, 1))]
    calls.clear()
    block.close()
    block.close()
    assert sorted(calls) == [("unregister", address + k * MIB) for k in range(4)]
    whole = HostSlab(2 * MIB, torch.device("cuda"))
    assert calls[-1] == ("register", whole.bytes.data_ptr() + MIB, MIB)  # no empty piece behind it


def test_copies_are_cut_where_pieces_end():
    assert slab.PIECE_BYTES <= 64 * 2**30 and slab.PIECE_BYTES % 2**21 == 0  # of any page
    assert slab.split(0, 700 * 2**30, slab.PIECE_BYTES)[-1] == slice(640 * 2**30, 700 * 2**30)
    rng = random.Random(0)
    for _ in range(300):
        piece, ends = rng.randint(1, 50), [0]
        for _ in range(rng.randint(1, 10)):
            ends.append(ends[-1] + rng.randint(0, 120))
        locked = {byte: k for k, s in enumerate(slab.split(0, ends[-1], piece))
                  for byte in range(s.start, s.stop)}
        assert sorted(locked) == list(range(ends[-1]))
        assert max(Counter(locked.values()).values(), default=0) <= piece
        assert all(s.start % piece == 0 for s in slab.split(0, ends[-1], piece))
        for first, end in pairwise(ends):
            parts = [range(s.start, s.stop) for s in slab.split(first, end, piece)]
            assert [byte for part in parts for byte in part] == list(range(first, end))
            # none is empty, none crosses
            assert all(len({locked[byte] for byte in part}) == 1 for part in parts)
            assert len({locked[byte] for byte in range(first, end)}) == len(parts)  # no more than it takes


@pytest.mark.parametrize("limit,shown,remedy", [
    (64 * 1024, "64 KiB", "a smaller --host_memory_gb, `ulimit -l unlimited`, or --pin_memory=false"),
    (2**40, "1073741824 KiB", "a smaller --host_memory_gb, or --pin_memory=false"),
    (resource.RLIM_INFINITY, "unlimited", "a smaller --host_memory_gb, or --pin_memory=false")])
def test_a_page_lock_that_is_refused_names_piece_and_remedy(fake_cuda, monkeypatch, limit, shown, remedy):
    driver, calls = fake_cuda
    driver.errors = [0, 0, 2]

    def reported_again(*args, **kw):
        calls.append(("launch",))
        raise RuntimeError("CUDA error: out of memory")
    monkeypatch.setattr(torch, "zeros", reported_again)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(slab, "PIECE_BYTES", MIB)
    with pytest.raises(OutOfHostMemory) as e:
        HostSlab(5 * MIB // 2, torch.device("cuda"))
    assert str(e.value) == ("page-locking 0.0004883 GiB (piece 3 of 3) of the host slab's 0.002441 GiB "
                            f"failed (CUDA error 2: out of memory; ulimit -l is {shown}); try {remedy}, "
                            "which copies more slowly")
    assert [c[0] for c in calls] == ["register"] * 3 + ["launch"] + ["unregister"] * 2
    assert {c[1] for c in calls[4:]} == {c[1] for c in calls[:2]}  # the two that had been locked


def test_pages_come_from_the_node_that_was_asked_for():
    block = HostSlab(8 * MIB, CPU)
    address = block.bytes.data_ptr()
    if not prefer_node(address, 8 * MIB, 0):
        pytest.skip("this system does not let a process choose its NUMA node")
    with open("/proc/self/numa_maps") as f:
        policies = {int(m[1], 16): m[2] for m in re.finditer(r"^([0-9a-f]+) (\S+)", f.read(), re.M)}
    assert policies[address] == "prefer:0"
    block.close()
