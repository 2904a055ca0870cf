"""The dry run of a pipeline: bytes of every stage beside real ranks', seconds, JSON, search, remedies."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import train
from memo.config.config import Config
from memo.config.layout import Layout
from memo.decide.choose import numbers_of, with_stages
from memo.decide.where import Decision
from memo.estimate import __main__ as estimate_main
from memo.estimate import budget, pipeline_seconds, regions, report, search
from memo.estimate.arena import fast_arena, head_bytes, traced_arena
from memo.memory.placement import Placement
from memo.parallel.mesh import Mesh
from memo.run import reserve
from memo.run.load_config import load_config
from memo.run.trace_step import trace_step
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system import command as commands
from memo.system import hardware
from memo.system.axis import Axis
from memo.system.launch import Launch
from model import GPT
from testing.ranks import pool
from tests.helpers import LLAMA, ROOT, argv, choosing

H100 = hardware.machine("h100-80gb")
STAGES = dict(unit_order="subsequence", subsequences=4, subsequence_cut="equal")
SHAPE = dict(n_layer=7, n_head=4, n_embd=64, block_size=1024, vocab_size=300)
NODE = replace(hardware.NODES["workstation"], host_memory_bytes=2**40)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


# --- bytes ---

@pytest.mark.parametrize("keys", [
    dict(pp=2), dict(STAGES, pp=2, activation="swap", bias=True, position="learned"),
    dict(STAGES, **LLAMA, pp=3, tp=2, alpha=0.5, subsequence_cut="flops"),
    dict(STAGES, pp=4, activation="recompute", optimizer_device="cpu"),
    dict(STAGES, pp=3, activation="keep", tensor_parallel="metp", tp=2)])
def test_lines_are_the_bytes_of_each_stage(keys):
    cfg = Config(**SHAPE | dict(gradient_accumulation_steps=2) | keys)
    world = 2 * cfg.pp * cfg.tp
    got = budget.estimate(cfg, hardware.Machine("CPU", NODE, None, None, None), world, fast_arena)
    for one in (got.but(shown=stage) for stage in got.stages):
        mesh = Mesh(weights=Axis("tp", cfg.tp), hops=Axis("hops", cfg.tp), tokens=Axis("cp", cfg.token_ranks),
                    dp=Axis("dp", 2), replicas=Axis("data", 2))
        model = Model(GPT, one.cfg, torch.device("cpu"), torch.float32, mesh=mesh)
        optimizer = Optimizer(model, one.cfg)
        model.reserve(cfg.batch_size, cfg.block_size // cfg.cp, one.placement)
        lines = reserve.where_it_lives(one.cfg, Decision(one.placement, one.plan, None, 0), model, optimizer)
        assert [line for line in lines if line not in one.lines and line.region != "transient"] == []
        assert model.swap.host_bytes == one.bytes_of("swap")[1]
        model.close()
    assert len({one.lines for one in got.stages}) >= 2  # embedding, head, an uneven number of layers


def held(host, args):
    """(this rank's lines, {region: bytes} that its Estimate has) of a run that is ready to train."""
    with pytest.MonkeyPatch.context() as m:
        choosing(m)
        run = train.set_up(args, Launch(host.rank, host.size, host.rank, host.size), host)
    regions = [line.region for line in run.lines]
    found = run.lines, {name: run.expected.bytes_of(name) for name in regions}, run.expected.alpha
    alpha = run.decision.alpha
    run.close()
    return (*found, alpha)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks,keys", [
    pytest.param(2, dict(STAGES, pp=2, alpha=0.5), marks=pytest.mark.slow),
    (2, dict(STAGES, pp="auto", alpha=0.5)),
    (3, dict(STAGES, **LLAMA, pp=3, subsequences=3, activation="swap", subsequence_cut="flops"))])
def test_a_run_finds_what_was_estimated_of_each_stage(dataset, tmp_path, ranks, keys):
    shape = dict(n_layer=5, block_size=768, n_head=4, n_embd=64, batch_size=1)
    args = argv(dataset, tmp_path, **shape | keys)
    for lines, expected, guessed_alpha, alpha in pool(ranks).run(held, args):
        measured = dict.fromkeys(expected, (0, 0))
        for line in lines:
            device, host = measured[line.region]
            measured[line.region] = device + line.device_bytes, host + line.host_bytes
        for region, pair in measured.items():
            assert pair == pytest.approx(expected[region], rel=0.01), region
        assert alpha == guessed_alpha and alpha is not None


@pytest.mark.parametrize("gpus_per_node", [8, 4, 3])
def test_a_nodes_host_memory_is_that_of_the_ranks_on_it(gpus_per_node):
    machine = replace(H100, node=replace(H100.node, gpus_per_node=gpus_per_node))
    cfg = load_config(["config/7b_1m.py", "--tp=1", "--cp=2", "--pp=4", "--unit_order=subsequence",
                       "--subsequences=8", "--subsequence_cut=equal", "--gradient_accumulation_steps=2",
                       "--block_size=262144", "--optimizer_device=cpu"])
    got = budget.estimate(cfg, machine, 16, fast_arena)
    nodes = [0] * -(-16 // gpus_per_node)
    for rank in range(16):
        nodes[rank // gpus_per_node] += got.stages[rank // 4].host_bytes
    assert got.host_bytes == max(nodes)


def test_a_stage_has_the_arena_of_its_own_ends(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is known yet
    cfg = load_config(["config/7b_1m.py", "--tp=8", "--cp=1", "--pp=4", "--unit_order=subsequence",
                       "--subsequences=4", "--subsequence_cut=equal", "--block_size=262144"])
    labels, arenas = {}, []
    for one in Layout.of(cfg).every_stage:
        def trace(cfg, device, threads, multiprocessors, one=one):
            found = trace_step(replace(one, attention=cfg.attention), device)
            kinds = {label.split("/")[1].rpartition(" ")[0] for label in found.segments}
            labels[cfg.pp, cfg.stage, cfg.n_layer] = kinds
            return found
        arenas.append(traced_arena(one, H100, trace))
        bound = fast_arena(one, H100)
        assert sum(arenas[-1]) <= sum(bound) <= 1.7 * sum(arenas[-1])
        assert (head_bytes(one, 2) > 0) == (one.stage == 3)
    layers = {"forward", "backward"}
    assert labels == {(2, 0, 2): layers | {"embedding", "embedding backward"}, (3, 1, 3): layers,
                      (2, 1, 2): layers | {"head", "evaluation head"}}  # stages 1 and 2 are alike
    assert arenas[1] == arenas[2]


# --- seconds ---

def fed(pp, N, layers=2, **keys):
    """The parts of a step of equal stages whose units all take as long, with free messages."""
    cfg = Layout(**SHAPE | dict(n_layer=pp * layers, pp=pp, subsequences=N, unit_order="subsequence",
                                vocab_size=1, n_embd=512, batch_size=4) | keys)
    unit = SimpleNamespace(forward_s=1.0, backward_s=2.0, sweep_s=0.0, recompute_s=lambda missing: 0.0,
                           of=lambda kind: unit,
                           attention_kernels_s=1.0, messages_s=0.0)
    layer = SimpleNamespace(units=[unit] * N, learned=1.0)
    stages = []
    for one in cfg.every_stage:
        assert len(one.layers) == layers
        p = Placement(layers, layers * N, 4096, cuts=(4096 // N,) * N, order="subsequence",
                      stream="whole" if one.has_head else "passed", receives=not one.has_embedding,
                      sends=not one.has_head)
        stages.append(regions.Stage(one, 10**6, (), p, None, None, None))
    free = dict.fromkeys(("hop_s", "head_s", "embedding_s"), lambda *_: 0.0)
    with patch.multiple(pipeline_seconds, **free):
        return pipeline_seconds.step_s(stages, H100, pp, 2, layer)


@pytest.mark.parametrize("pp,N", [(2, 2), (2, 8), (3, 4), (4, 16)])
def test_the_bubble_of_equal_stages(pp, N):
    parts = fed(pp, N)
    compute = parts["attention"] + parts["rest of the layers"]
    assert compute == pytest.approx(2 * N * 3.0) and parts["stall"] == 0
    assert parts["bubble"] == pytest.approx((pp - 1) / N * compute)
    assert sum(s for name, s in parts.items() if name != "step") == pytest.approx(parts["step"])
    # SPPO's T = (p - 1 + N) / N F(N), with the seconds F(N) of a stage's layers
    assert compute + parts["bubble"] == pytest.approx((pp - 1 + N) / N * 2 * N * 3.0)
    more = fed(pp, N, gradient_accumulation_steps=3)
    assert more["bubble"] == pytest.approx(3 * parts["bubble"])


def pipeline(pp, *keys, tp=8, cut="equal", machine=H100):
    cfg = load_config(["config/7b_1m.py", f"--tp={tp}", "--cp=1", f"--pp={pp}", "--unit_order=subsequence",
                       "--subsequences=16", f"--subsequence_cut={cut}", "--block_size=262144", *keys])
    return budget.estimate(cfg, machine, tp * pp, fast_arena)


def test_seconds_of_all_stages_are_those_of_one():
    one, two, three = (pipeline(pp, "--activation=keep").seconds for pp in (1, 2, 3))
    for got, pp in ((two, 2), (three, 3)):
        for part in ("attention", "messages", "rest of the layers", "head and embedding"):
            assert pp * got[part] == pytest.approx(one[part]), part
        assert got["bubble"] > 0 and "bubble" not in one
        assert sum(got.values()) == pytest.approx(2 * got["step"])
    even = pipeline(2, "--activation=keep", cut="flops").seconds
    assert even["bubble"] < two["bubble"]  # the last subsequence of equal length takes longest


def test_a_slow_network_delays_stages_that_no_node_holds():
    machines = [replace(H100, node=replace(H100.node, network_bytes_per_s=rate)) for rate in (50e9, 1e9)]
    apart = [pipeline(2, machine=machine).seconds["bubble"] for machine in machines]
    inside = [pipeline(2, tp=4, machine=machine).seconds["bubble"] for machine in machines]
    assert apart[1] > apart[0] and inside[1] == inside[0]
    # of six stages of three ranks on nodes of eight, the first two are on one node
    node = replace(H100, node=replace(H100.node, nvlink_bytes_per_s=1e12, network_bytes_per_s=1e9))
    hops = [pipeline_seconds.hop_s(node, 18, 6, stage, 1e9) for stage in range(5)]
    assert [hop > 0.5 for hop in hops] == [False, True, True, False, True]


def test_stages_that_are_auto_are_the_fastest():
    cfg = load_config(["config/7b_1m.py", "--n_layer=6", "--block_size=131072", "--n_embd=2048",
                       "--n_head=16", "--pp=auto", "--tp=1", "--cp=1", "--gradient_accumulation_steps=4",
                       "--subsequences=16"])
    machine = hardware.machine("h100-80gb", gpus_per_node=4)
    got = budget.estimate(cfg, machine, 4, fast_arena)
    given = {one.pp: budget.estimate(one, machine, 4, fast_arena) for one in with_stages(cfg, 4)}
    assert set(given) == {1, 2, 4} and got.seconds == given[got.cfg.pp].seconds and got.asked == cfg
    assert got.tgs * 1.03 >= max(other.tgs for other in given.values() if other.fits)
    assert got.chosen.startswith(f"pp={got.cfg.pp} chosen, ")


# --- what is told ---

def test_table_and_json_of_stages(capsys):
    command = ["config/7b_1m.py", "--gpu=h100-80gb", "--tp=4", "--cp=1", "--pp=4", "--fast",
               "--unit_order=subsequence", "--subsequences=16", "--subsequence_cut=equal",
               "--block_size=524288"]
    assert commands.run(estimate_main.main, [*command, "--json", "--max_context"]) == 0
    out = json.loads(capsys.readouterr().out)
    got = budget.estimate(load_config(command[:1] + command[2:5] + command[6:]), H100, 16, fast_arena)
    assert out["layout"]["pp"] == 4 and out["layout"]["dp"] == 1 and len(out["stages"]) == 4
    assert out["seconds"]["parts"]["bubble"] == got.seconds["bubble"] > 0
    assert sum(out["seconds"]["parts"].values()) == pytest.approx(out["seconds"]["step"])
    assert sum((one["layers"] for one in out["stages"]), []) == list(range(32))
    assert out["device_bytes"]["total"] == max(one["device_bytes"] for one in out["stages"])
    assert out["stages"][out["stage"]]["device_bytes"] == out["device_bytes"]["total"]
    assert out["tgs"] == pytest.approx(524288 / (16 * out["seconds"]["step"]))
    assert out["max_block_size"] > 524288
    text = "\n".join(report.table(got))
    assert "pp=4 tp=4 cp=1 dp=1" in text and f"memory of a rank of stage {got.cfg.stage}, GiB" in text
    assert "and embedding" in text and "and head" in text and "bubble" in text


def test_it_is_only_tight_where_each_stage_would_fit_without_its_margin():
    got = pipeline(2, "--activation=keep")
    tight, full = (replace(stage, lacks=None, lines=(regions.Line("margin", "", margin),
                                                     regions.Line("params", "", params)))
                   for stage, margin, params in zip(got.stages, (10, 1), (95, 103), strict=True))

    def only_tight(*stages):
        small = got.on(replace(got.machine, memory_bytes=100), fast_arena)
        return small.but(stages=stages, shown=tight).only_tight
    assert not only_tight(tight, full)  # 5 and 4 bytes lack
    assert only_tight(tight, tight) and not only_tight(tight, replace(tight, lacks="host"))


# --- search ---

@pytest.mark.slow
def test_the_search_tries_stages_and_the_fastest_may_have_some():
    machine = hardware.machine("rtx4090", "pcie-server", network_bytes_per_s=1e9, gpus_per_node=1)
    cfg = load_config(["config/7b_1m.py", "--n_layer=6", "--block_size=131072", "--n_embd=2048",
                       "--n_head=16", "--gradient_accumulation_steps=1"])
    tried = {one.pp for one in search.layouts(cfg, machine, 4)}
    assert tried == {1, 2, 4} and {one.pp for one in search.layouts(cfg, machine, 12)} == {1, 2, 4}
    found = search.search(cfg, machine, 4, fast_arena)
    best = found[0]
    assert best.fits and best.cfg.pp > 1 and best.cfg.subsequences > 1 and best.seconds["bubble"] > 0
    assert [got.tgs for got in found] == sorted((got.tgs for got in found), reverse=True)


def test_numbers_of_subsequences_keep_the_bubble_small():
    keys = dict(SHAPE, n_layer=8, unit_order="subsequence", subsequences="auto")
    assert numbers_of(Config(**keys | dict(block_size=2**17, pp=2))) == [16, 32, 64]
    assert numbers_of(Config(**keys | dict(block_size=2**17, pp=8))) == [64]
    assert numbers_of(Config(**keys | dict(block_size=2**14, pp=8))) == [8]  # 2,048 tokens each
    assert numbers_of(Config(**keys | dict(block_size=2**12, pp=1))) == [1, 2]


def test_remedies_propose_stages():
    machine = hardware.machine("rtx4090", gpus_per_node=1)
    model = ["config/7b_1m.py", "--n_layer=6", "--tp=1", "--cp=1", "--block_size=16384",
             "--states=device"]
    got = budget.estimate(load_config(model), machine, 1, fast_arena)
    assert got.reason == "oom"
    deeper = {text: other for text, other in search.remedies(got, most=99) if "--pp=2" in text}
    assert deeper and all(other.fits and other.cfg.pp == 2 for other in deeper.values())
    for text, other in deeper.items():
        keys = [arg for arg in text.split() if not arg.startswith("--gpus=")]
        assert load_config([*model, *keys]) == other.asked
