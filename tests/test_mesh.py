"""The mesh: who is where, what ranks say to each other, what that costs, what stops a run at its start."""

import io
import os
import re
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from memo.config.config import Config
from memo.config.layout import communicators, degrees
from memo.errors import ConfigError
from memo.parallel.mesh import ALONE, open_mesh
from memo.planner.allocator import Arena
from memo.run.load_config import load_config
from memo.system import axis as axis_module
from memo.system import command, launch
from memo.system.axis import ALL_GATHER, REDUCE_SCATTER, Axis
from memo.system.launch import Agreed, Launch, read_launch, same_everywhere, start_pulse, together
from testing.ranks import TIMEOUT_S, Ranks, pool
from tests.helpers import ROOT

CPU = torch.device("cpu")


def launch_of(given):
    with patch.dict(os.environ, given, clear=True):
        return read_launch()


def test_torchruns_environment():
    assert launch_of({}) == Launch(0, 1, 0, 1)
    given = dict(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert launch_of(given) == Launch(5, 8, 1, 4)
    cores = len(os.sched_getaffinity(0))
    assert launch_of(given | dict(OMP_NUM_THREADS="1")).threads == max(1, cores // 4)  # torchrun's default
    assert launch_of(given | dict(OMP_NUM_THREADS="2")).threads == 0


@pytest.mark.parametrize("name,value,range", [
    ("RANK", "8", "0 to 7"), ("RANK", "-1", "0 to 7"), ("RANK", "x", "0 to 7"),
    ("WORLD_SIZE", "0", "1 to 1048576"), ("WORLD_SIZE", "1e9", "1 to"), ("LOCAL_RANK", "4", "0 to 3"),
    ("LOCAL_WORLD_SIZE", "9", "1 to 8")])
def test_an_environment_that_cannot_be_is_a_line(name, value, range):
    given = dict(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4") | {name: value}
    with pytest.raises(ConfigError,
                       match=f"^{name}={value} in the environment must be a whole number from {range}"):
        launch_of(given)


def test_a_rank_that_does_not_come_is_waited_for_aloud(monkeypatch, capfd):
    monkeypatch.setattr(command, "FIRST_S", 0.1)
    store, told = dist.TCPStore("localhost", 0, 3, True, wait_for_workers=False), threading.Event()
    monkeypatch.setattr(command, "print", lambda *args, **how: print(*args, **how) or told.set(),
                        raising=False)

    def late(rank):
        told.wait()
        launch.meeting(dist.TCPStore("localhost", store.port), rank, 3)
    others = [threading.Thread(target=late, args=[rank]) for rank in (1, 2)]
    for other in others:
        other.start()
    assert launch.meeting(store, 0, 3)
    for other in others:
        other.join()
    assert re.match(r"waiting for 2 of 3 ranks: \[1, 2\], \d+ s so far\n", capfd.readouterr().err)


@pytest.mark.parametrize("keys,world,message", [
    (dict(cp=2, tp=3, n_head=6, n_embd=36, block_size=24), 8,
     r"^dp\(1\)\*cp\(2\)\*tp\(3\) != WORLD_SIZE\(8\); "
     r"start it with torchrun --nproc_per_node=6 \(or a multiple\)"),
    (dict(cp=2, tp=4), 1,
     r"^dp\(1\)\*cp\(2\)\*tp\(4\) != WORLD_SIZE\(1\); start it with torchrun --nproc_per_node=8"),
    (dict(gradient_accumulation_steps=3), 2,
     r"^gradient_accumulation_steps=3 % dp=2 != 0 .*; try auto, or --gradient_accumulation_steps=4$"),
    (dict(pp=2), 1,
     r"^pp\(2\)\*dp\(1\)\*cp\(1\)\*tp\(1\) != WORLD_SIZE\(1\); start it with torchrun "
     r"--nproc_per_node=2 \(or a multiple\) on one node, or change pp, tp or cp$"),
    (dict(pp=2, tp=2), 6, r"^pp\(2\)\*dp\(1\)\*cp\(1\)\*tp\(2\) != WORLD_SIZE\(6\); start it with "
     r"torchrun --nproc_per_node=4 \(or a multiple\)"),
    (dict(pp=2, gradient_accumulation_steps=3), 4, "^gradient_accumulation_steps=3 % dp=2 != 0 "),
])
def test_layouts_that_do_not_fill_the_world(keys, world, message):
    with pytest.raises(ConfigError, match=message):
        degrees(Config(**keys), world)


def test_layouts_that_do():
    for tp, cp, accumulation, world, dp in ((1, 1, 1, 1, 1), (2, 2, 1, 4, 1), (2, 1, 4, 8, 4),
                                            (1, 4, 6, 8, 2)):
        assert degrees(Config(tp=tp, cp=cp, gradient_accumulation_steps=accumulation), world) == dp
    for preset in sorted((ROOT / "config").glob("*.py")):  # each starts on any multiple of its ranks
        cfg = load_config([str(preset)])
        for n in (1, 2, 3, 5, 16):
            dp = degrees(cfg, n * cfg.pp * cfg.tp * cfg.cp)
            assert dp == n and cfg.micro_batches(dp) % dp == 0


def places(host):
    mesh = open_mesh(host, 2, 2, CPU)
    assert mesh.world.size == 8 and mesh.world.rank == host.rank
    members = {a.name: a.objects(host.rank) for a in (mesh.weights, mesh.tokens, mesh.replicas, mesh.world)}
    return (mesh.dp.rank, mesh.tokens.rank, mesh.weights.rank), members


@pytest.mark.slow
@pytest.mark.ranks
def test_tp_is_innermost_and_data_are_the_ranks_with_the_same_parameters():
    for rank, (where, members) in enumerate(pool(8).run(places)):
        dp, cp, tp = where
        assert rank == (dp * 2 + cp) * 2 + tp
        assert members == dict(tp=[rank - tp, rank - tp + 1], cp=[4 * dp + tp, 4 * dp + 2 + tp],
                               data=list(range(tp, 8, 2)), world=list(range(8)))


def told_by_stages(host):
    mesh = open_mesh(host, 1, 1, CPU, pp=2)
    value = host.rank if mesh.peers.rank == 0 else lambda: "nobody can send this"
    found = mesh.of_stages(value)
    mesh.close()
    return found


@pytest.mark.ranks
def test_the_first_rank_of_a_stage_alone_sends_to_rank_0():
    assert pool(4).run(told_by_stages) == [[0, 2], [], [], []]


def test_axes_of_the_same_ranks_share_a_communicator_where_one_is_quiet():
    for tp, cp, dp in product((1, 2, 3), repeat=3):
        ranks = list(product(range(dp), range(cp), range(tp)))
        lines = dict(tp={r for r in ranks if r[:2] == (0, 0)}, cp={r for r in ranks if r[::2] == (0, 0)},
                     data={r for r in ranks if r[2] == 0}, world=set(ranks))  # of the first rank
        got = communicators(tp, cp, dp)
        assert list(got) == [name for name, line in lines.items() if len(line) > 1]
        for name, carrier in got.items():
            assert lines[name] == lines[carrier] and got[carrier] == carrier
            others = [other for other in ("tp", "data") if lines[other] == lines["world"]]
            assert carrier == (others[0] if name == "world" and others else name)


def opened(host, cp, tp, kind):
    """(groups, {axis: {message: how often it was sent at the start}}, seconds that any group waits)."""
    sent, start = {}, axis_module.start_collective

    def noting(call, group):
        members = tuple(dist.get_process_group_ranks(group))
        sent.setdefault(members, []).append(call)
    with pytest.MonkeyPatch.context() as m:
        def started(call, *args):
            if call.__name__ != "<lambda>":  # a sum, which is noted below
                noting(call.__name__, args[-1])
            return start(call, *args)
        m.setattr(axis_module, "start_collective", started)
        reduce, batch = dist.all_reduce, dist.batch_isend_irecv
        m.setattr(dist, "all_reduce",
                  lambda *args, group, **how: noting("all_reduce", group) or reduce(
                      *args, group=group, **how))
        m.setattr(dist, "batch_isend_irecv", lambda ops: noting("shift", ops[0].group) or batch(ops))
        mesh = open_mesh(host, cp, tp, CPU, kind)
    axes = [a for a in (mesh.weights, mesh.tokens, mesh.replicas, mesh.world) if a.size > 1]
    assert all(a.sent_bytes == 0 for a in axes) and all(a.sum(torch.ones(1)).item() == a.size for a in axes)
    groups = {a.group for a in axes}
    waits = {g._get_backend(CPU).options._timeout for g in (*groups, host.group, host.another().group)}
    mesh.close()
    return len(groups), sent, waits


@pytest.mark.ranks
@pytest.mark.parametrize("cp,tp,kind", [(1, 2, "ring"), (2, 1, "ring"), (2, 1, "ulysses"), (1, 1, "ring")])
def test_the_first_messages_of_every_axis_are_sent_when_it_is_made(cp, tp, kind):
    shared = [ALL_GATHER.__name__, REDUCE_SCATTER.__name__, "all_reduce"]
    hop = [] if cp == 1 else ["shift"] if kind == "ring" else ["all_to_all_single"]
    for groups, sent, waits in pool(2).run(opened, cp, tp, kind):
        assert groups == len(set(communicators(tp, cp, 2 // (cp * tp)).values())) == (2 if cp == 2 else 1)
        assert sent == {(0, 1): [*hop, *shared, "all_reduce"]}
        assert min(waits) >= timedelta(days=7)  # a rank may wait for another's forward of hours


def faulty(host, path, fault):
    """One rank of two, whose network does not carry its messages: what it says lies in `path`."""
    sys.stderr = io.TextIOWrapper(io.FileIO(f"{path}/{host.rank}", "w"))
    if fault == "interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    elif host.rank == 1:
        if fault == "gone":
            axis_module.Axis.warm = lambda *args: os._exit(9)
        else:
            axis_module.Axis.warm = lambda *args: time.sleep(600)
    # rank 1 shall not be the first
    launch.CONNECT_S = 5 if fault == "silent" and host.rank == 0 else TIMEOUT_S
    open_mesh(host, 1, 2, CPU)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("fault,said,interface", [
    ("interface", r".*nosuch0.*", "nosuch0"), ("gone", r".*[Cc]onnection.*", "not set"),
    ("silent", "no answer within 5 s", "not set")])
def test_a_network_that_does_not_carry_the_first_messages_is_one_line(tmp_path, fault, said, interface):
    ranks = Ranks(2)
    ranks.start(faulty, str(tmp_path), fault)
    ranks.processes[0].join(TIMEOUT_S)
    assert ranks.processes[0].exitcode == 1
    ranks.processes[1].join(TIMEOUT_S)
    assert ranks.processes[1].exitcode == (9 if fault == "gone" else 1)
    [line] = (tmp_path / "0").read_text().splitlines()
    assert re.fullmatch(rf"error: rank 0 \({socket.gethostname()}\): axis tp \(2 ranks, 0 to 1\) over gloo: "
                        rf"{said}; check "
                        r"that their hosts reach each other, past firewalls and over the right interface "
                        rf"\(GLOO_SOCKET_IFNAME is {interface}\)", line), line


def suspended(host, path):
    sys.stderr = io.TextIOWrapper(io.FileIO(f"{path}/{host.rank}", "w"))
    launch.LOST_S, launch.BEAT_S = 6, 0.2
    start_pulse(host.rank, host.size)
    time.sleep(7)  # it is well: nothing happens
    print(f"{host.rank} lives", file=sys.stderr, flush=True)
    if host.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_says_nothing_for_long_is_lost(tmp_path):
    ranks = Ranks(2)
    ranks.start(suspended, str(tmp_path))
    ranks.processes[0].join(TIMEOUT_S)
    assert ranks.processes[0].exitcode == 1
    ranks.processes[1].kill()
    lines = (tmp_path / "0").read_text().splitlines()
    assert lines == ["0 lives",
                     f"error: rank 0 ({socket.gethostname()}): lost rank 1; what is saved is whole"]


def talk(host, dtype):
    """Every call gives what it says; with nobody at the other ends bytes are counted and shapes given."""
    axis = Axis("tp", host.size, host.rank, host.group)
    silent = Axis("tp", host.size, host.rank)
    n, r = axis.size, axis.rank
    everybody = torch.stack([torch.arange(12.) + 3 * i for i in range(n)]).to(dtype)  # (n, 12): of each rank
    mine, table = everybody[r].clone(), torch.stack([everybody[r] + i for i in range(n)])
    calls = dict(gather=(lambda a: a.gather(mine.view(3, 4)), everybody.view(n, 3, 4)),
                 scatter_sum=(lambda a: a.scatter_sum(table), everybody.sum(0) + n * r),
                 sum=(lambda a: a.sum(mine.clone()), everybody.sum(0)),
                 exchange=(lambda a: a.exchange(table), everybody + r),
                 shift=(lambda a: torch.stack(a.shift(mine, mine * 2).wait()),
                        torch.stack([everybody[r - 1], 2 * everybody[r - 1]])))
    for name, (call, wanted) in calls.items():
        axis.sent_bytes = silent.sent_bytes = 0
        got, shape = call(axis), call(silent).shape
        assert torch.equal(got, wanted) and shape == got.shape, name
        factor = dict(gather=n - 1, scatter_sum=n - 1, sum=2 * (n - 1) / n, exchange=n - 1, shift=2)[name]
        assert axis.sent_bytes == silent.sent_bytes == int(mine.nbytes * factor), name
    here = torch.zeros(n, 12, dtype=dtype)
    here[r] = mine
    assert torch.equal(axis.start_gather(here[r], here).wait(), everybody)  # in place
    assert torch.equal(axis.start_scatter_sum(here, here[r]).wait(), everybody[r] * n)
    assert axis.max(r, -r) == [n - 1, 0] and axis.objects({"r": r}) == [{"r": i} for i in range(n)]
    assert axis.gather(mine[:0]).shape == (n, 0)
    first = axis.shift(mine)
    assert torch.equal(axis.shift(*first.received).wait()[0], everybody[r - 2])  # before the first is there
    assert torch.equal(first.wait()[0], everybody[r - 1])


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_the_ranks_say_to_each_other(size, dtype):
    pool(size).run(talk, dtype)


def test_one_rank_talks_to_nobody():
    x = torch.ones(3)
    a = ALONE.weights
    assert a.sum(x) is x and a.exchange(x) is x and a.max(1, 2) == (1, 2) and a.objects(5) == [5]
    assert a.gather(x).data_ptr() == x.data_ptr() == a.scatter_sum(x[None]).data_ptr()
    assert ALONE.take_sent_bytes() == {}


def stuck(host):
    """As in a kernel that waits for a rank which is gone."""
    if host.rank == 1:
        os._exit(9)
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_end_when_the_one_before_them_is_gone_whatever_they_do():
    ranks = Ranks(3)
    assert ranks.run(fail, [], True) == [0, 1, 2]
    ranks.start(stuck)
    for process in ranks.processes:
        process.join(TIMEOUT_S)
    assert [process.exitcode for process in ranks.processes] == [1, 9, 1]


def fail(host, ranks, same):
    def work():
        if host.rank in ranks:
            raise ConfigError("n_layer=0 must be at least 1" if same
                              else f"out_dir={host.rank} cannot be written")
        return host.rank
    try:
        return together(host, work)
    except Agreed as e:
        return str(e)


@pytest.mark.ranks
def test_an_error_on_one_rank_is_one_line_on_all():
    assert pool(2).run(fail, [], True) == [0, 1]
    assert pool(2).run(fail, [0, 1], True) == ["n_layer=0 must be at least 1"] * 2
    said = f"rank 1 ({socket.gethostname()}): out_dir=1 cannot be written"
    assert pool(2).run(fail, [1], False) == [said] * 2


def differ(host, what):
    try:
        same_everywhere(host, what[host.rank], "start all ranks alike")
    except Agreed as e:
        return str(e)


@pytest.mark.ranks
def test_ranks_that_were_told_different_things_are_found_out():
    assert pool(2).run(differ, [dict(seed=1, n_layer=2)] * 2) == [None, None]
    wanted = f"rank 1 ({socket.gethostname()}) has n_layer=3, rank 0 n_layer=2; start all ranks alike"
    assert pool(2).run(differ, [dict(seed=1, n_layer=2), dict(seed=1, n_layer=3)]) == [wanted] * 2


@pytest.mark.cuda
def test_a_single_rank_over_nccl_inside_a_planned_segment(tmp_path):
    """What size 1 leaves out, done all the same: collectives over NCCL, in the arena, in place if allowed."""
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        axis = Axis("tp", 1, 0, dist.new_group([0], backend="nccl"))
        arena, x = Arena(device, guard=True), torch.arange(2**20, device=device, dtype=torch.float32)

        def segment():
            for call in (ALL_GATHER, REDUCE_SCATTER, dist.all_to_all_single):
                out = torch.zeros_like(x)
                assert torch.equal(axis.start("", 0, call, out, x).wait(), x)
                assert torch.equal(axis.start("", 0, call, x, x).wait(), x)  # in place
            k, v = axis.shift(x, x + 1).wait()
            assert torch.equal(k, x) and torch.equal(v, x + 1)
        for _ in range(3):
            arena.run("talk", segment)
            arena.settle()
        assert arena.stats().misses == 0
    finally:
        dist.destroy_process_group()
