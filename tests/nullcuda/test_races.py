"""Every wait that memo has is needed: without it two streams touch the same bytes with no order between them,
and null CUDA says so; with all of them nothing is said. One process stands for rank 0 of several: NCCL's
other ends are never there."""

from functools import cache

import pytest

from tests.nullcuda.runs import in_process

LAYOUTS = {"one": {}, "tp2": dict(tp=2), "ring": dict(cp=2), "dp2": {},
           "ulysses": dict(cp=2, context_parallel="ulysses"), "host": dict(optimizer_device="cpu"),
           "metp": dict(tp=4, tensor_parallel="metp", block_size=2048)}
WINDOW = dict(sliding_window=300, layer_types="sliding,full")
LAYOUTS |= {"ring, window": LAYOUTS["ring"] | WINDOW}
FOUR = dict(subsequences=4, n_layer=4, block_size=4096)
SLIDING = FOUR | dict(sliding_window=300, attention="cudnn")
IN_ORDER = FOUR | dict(unit_order="subsequence")
LAYOUTS |= {"four": FOUR, "four, cudnn": FOUR | dict(attention="cudnn"),
            "four, six buffers": FOUR, "four, keys made": FOUR, "four in order": IN_ORDER,
            "four, stream copied": FOUR, "four, keys made, stream copied": FOUR,
            "four in order, stream copied": IN_ORDER, "four, sliding": SLIDING,
            "four in order, keys copied": IN_ORDER | WINDOW, "four in order, keys made": IN_ORDER | WINDOW,
            "four, ring": FOUR | dict(cp=4, block_size=16384),
            "four, ring, window": FOUR | dict(cp=4, block_size=16384) | WINDOW,
            "four, ulysses": FOUR | dict(cp=2, context_parallel="ulysses"),
            "four, metp": FOUR | LAYOUTS["metp"] | dict(block_size=16384),
            "stage": IN_ORDER | dict(n_layer=12, pp=3, stage=1),
            "last stage": IN_ORDER | dict(n_layer=12, pp=3, stage=2),
            "leading stage": IN_ORDER | dict(n_layer=12, pp=3, stage=1, leads=(3, 1, 0),
                                             gradient_accumulation_steps=4),
            "helping stage": IN_ORDER | dict(n_layer=8, pp=2, msp=True)}
COME = dict(states="host", gradient_accumulation_steps=2)
ENDS_COME = COME | dict(tie_embeddings=False)
LAYOUTS |= {"states host": COME, "four, states host, keys made": FOUR | ENDS_COME,
            "states host, tp2": COME | dict(tp=2), "states sharded, dp2": ENDS_COME | dict(states="sharded")}
PLACED = {"four, six buffers": dict(n_buffers=6), "four, keys made": dict(keys="made"),
          "four, stream copied": dict(stream="copied"), "four in order, stream copied": dict(stream="copied"),
          "four, keys made, stream copied": dict(keys="made", stream="copied"),
          "four in order, keys copied": dict(keys="copied"), "four in order, keys made": dict(keys="made"),
          "four, states host, keys made": dict(keys="made")}
# {layout: {what the swap waits for: the two sides of the race without}}
COPIES = {"forward": ("offload", "forward"), "offload": ("offload", "forward"),
          "backward": ("prefetch", "backward"), "prefetch": ("prefetch", "backward")}
UNITS = {"forward": ("offload keys", "forward"), "backward": ("prefetch keys", "backward")}
KEYS = UNITS | {"offload": ("offload keys", "forward"), "prefetch": ("prefetch keys", "backward")}
STREAM = {"offload stream": ("offload stream", "prefetch stream"),
          "prefetch stream": ("prefetch stream", "forward"),
          "offload gradient": ("offload gradient", "prefetch gradient"),
          "prefetch gradient": ("prefetch gradient", "backward"),
          "head": ("offload stream", "head")}
MADE = {"prefetch input": ("prefetch input", "sweep"), "sweep": ("prefetch input", "sweep")}
SWAP_WAITS = {"one": COPIES, "four": KEYS, "four, cudnn": KEYS, "four in order": COPIES,
              "four, sliding": KEYS, "four in order, keys copied": KEYS, "four in order, keys made": MADE,
              "four, six buffers": UNITS | {"offload keys": ("offload keys", "forward"),
                                            "prefetch keys": ("prefetch keys", "backward")},
              "four, keys made": COPIES | MADE,
              "four, stream copied": STREAM | {"forward": ("offload stream", "forward"),
                                               "backward": ("offload gradient", "backward")},
              "stage": {"forward": ("send", "forward"), "receive": ("receive", "forward"),
                        "receive gradient": ("receive gradient", "backward"),
                        "backward": ("send gradient", "backward"), "send": ("receive", "send"),
                        "send gradient": ("receive", "send gradient")},
              "last stage": {"head": ("receive", "head")},
              "leading stage": COPIES | {"receive": ("receive", "forward"), "send": ("receive", "send")},
              "helping stage": {"borrow 1 back": ("borrow 1 back", "recompute"),
                                "take 1": ("take 1", "forward"),
                                "return 1": ("return 1", "forward"),
                                "fetch 1": ("fetch 1", "forward"),
                                "collect 1 back": ("collect 1 back", "add"),
                                "repay 1 back": ("repay 1 back", "backward")},
              "states host": {"prefetch weights": ("prefetch weights", "forward"),
                              "forward": ("forward", "prefetch weights"),
                              "backward": ("backward", "offload weight gradients"),
                              "offload weight gradients": ("offload weight gradients",
                                                                "prefetch weight gradients back"),
                              "prefetch weight gradients back": ("offload weight gradients",
                                                                      "backward")},
              "four, states host, keys made": {
                  "prefetch weights back": ("prefetch weights back", "sweep"),
                  "prefetch weight gradients": ("prefetch weight gradients of the head",
                                                     "offload weight gradients of the head"),
                  "embedding": ("embedding", "prefetch weights"),
                  "prefetch weight gradients back": ("prefetch weight gradients back", "backward")},
              "states host, tp2": {"clip": ("all-reduce", "offload scale")},
              "states sharded, dp2": {"prefetch weights": ("all-gather", "forward"),
                                      "prefetch weight gradients": ("of the head (all-gather)", "head"),
                                      "embedding": ("embedding", "all-gather"),
                                      "compute offload weight gradients": ("offload", "compute"),
                                      "adamw": ("compute", "prefetch weights")},
              "four in order, stream copied": {"head": ("offload stream", "head"),
                                               "prefetch gradient": ("prefetch gradient", "backward")}}
# of an optimizer on the host: {stream that waits and event: the two sides of the race without}
STAGING_WAITS = {"offload backward": ("offload", "backward"),
                 "compute offload weight gradients": ("offload", "backward"),
                 "compute prefetch weights": ("prefetch", "forward"), "offload clip": ("offload", "compute")}
# (layout, axis, message): memo waits for each of these before the bytes that come are used
MESSAGES = (("tp2", "tp", "gather"), ("tp2", "tp", "scatter_sum"), ("ring", "cp", "shift"),
            ("ring, window", "cp", "shift"), ("four, ring, window", "cp", "shift"),
            ("ulysses", "cp", "exchange"), ("dp2", "data", "scatter_sum"), ("dp2", "data", "gather"),
            ("metp", "hops", "shift"), ("metp", "tp", "broadcast"), ("metp", "tp", "reduce"),
            ("metp", "cp", "shift"), ("four, ring", "cp", "shift"), ("four, ulysses", "cp", "exchange"),
            ("four, metp", "tp", "broadcast"), ("four, metp", "tp", "reduce"), ("four, metp", "cp", "shift"),
            ("states sharded, dp2", "shards", "gather"), ("states sharded, dp2", "data", "scatter_sum"))


def step_races(layout):
    """{what is left out: races} of two steps of a small model; every wait is left out once."""
    import torch
    import torch.distributed as dist

    from memo.system import hardware
    from memo.system.axis import Axis
    from tests.nullcuda.watch import NULL, watching
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=4)
    found, messages = {}, [m for m in MESSAGES if m[0] == layout]

    @cache
    def axis_of(name, size):  # with a communicator of its own, as in a run: its stream is its own too
        return Axis(name, size, 0, dist.new_group(range(size)) if size > 1 else None)
    with watching(hardware.machine("h100-80gb").speeds):
        for what in [None, *(SWAP_WAITS | dict(host=STAGING_WAITS)).get(layout, ()), *messages]:
            torch.cuda.synchronize()
            NULL.races(clear=True)
            with without(what):
                two_steps(layout, axis_of)
            torch.cuda.synchronize()
            found[str(what)] = NULL.races(clear=True)
    return found


def two_steps(layout, axis_of):
    """Of a small model; where the stream is copied, which evaluations do too, with evaluations."""
    from dataclasses import replace
    from unittest.mock import patch

    import torch

    from memo.config.layer import layer_of
    from memo.config.layout import Layout
    from memo.decide.pipeline import even_shares
    from memo.decide.where import placed
    from memo.layer.tiles import Batch
    from memo.parallel.mesh import Mesh
    from memo.states.optim import Optimizer
    from memo.states.passes import Model
    from model import GPT
    cfg = Layout(**dict(n_layer=5, n_embd=128, n_head=4, block_size=1024, vocab_size=512,
                        attention="flash", alpha=0.5, subsequences=1, subsequence_cut="equal",
                        unit_order="layer", gradient_accumulation_steps=1) | LAYOUTS[layout])
    visiting = cfg.tp if cfg.metp else 1  # ranks that matrices visit
    other, replicas = 1 - cfg.stage, 2 if layout.endswith("dp2") or cfg.metp else cfg.cp
    neighbours = ["send", "receive", "send back", "receive back"] if cfg.pp > 1 else []
    helpers = [f"to {other}", f"from {other}"] if cfg.msp else []
    lanes = {lane: axis_of(lane, 2) for lane in (*neighbours, *helpers)}
    if cfg.msp:
        cfg = replace(cfg, shares=even_shares(cfg))
    mesh = Mesh(lanes=lanes, weights=axis_of("tp", cfg.tp),
                hops=axis_of("hops", visiting), tokens=axis_of("cp", cfg.cp * visiting),
                replicas=axis_of("data", replicas), shards=axis_of("shards", replicas))
    device = torch.device("cuda:0")
    model = Model(GPT, cfg, device, torch.bfloat16, mesh=mesh)
    optimizer = Optimizer(model, cfg)
    B, T = 1, cfg.block_size // cfg.cp
    rows = T // cfg.tp
    half = {t.name: rows // 2 // 256 * 256 if t.group else rows for t in layer_of(cfg).skeletal}
    model.reserve(B, T, replace(placed(cfg, **dict(n_buffers=2) | PLACED.get(layout, {})), kept=half))
    tokens = torch.zeros(B, T, dtype=torch.int64, device=device)
    copied = model.swap.placement.stream == "copied"
    for _ in range(2):
        if copied or cfg.pp > 1:
            model.forward(tokens, tokens)  # an evaluation
        for left in reversed(range(cfg.gradient_accumulation_steps)):
            model.forward(tokens, tokens, scale=1.0, following=[Batch(tokens, tokens)] * (left > 0))
            model.backward(left == 0)
        optimizer.clip(1.0)
        optimizer.step(1e-3)
    if copied:
        with patch("memo.states.passes.free_bytes", lambda device: (0, 0)):  # too little for the stream whole
            model.reserve_forward(B, T)
        assert model.swap.placement.stream == "copied"
        model.forward(tokens, tokens)
    model.close()


def without(what):
    """Leaves a kind of wait out: a swap's, by its event's name, or a message's, by layout, axis and call."""
    from contextlib import ExitStack, nullcontext
    from unittest.mock import patch

    from memo.schedule.streams import CudaStream
    from memo.system.axis import Axis, Works
    if what is None:
        return nullcontext()
    if isinstance(what, str):
        def wait(self, event, label="", real=CudaStream.wait):
            names = event.name, f"{self.name} {event.name}"  # with the number of a unit, or of a bucket
            if not any(what in (name, name.rpartition(" ")[0]) or
                       (name.startswith(f"{what} ") and " of " in name) for name in names):
                real(self, event, label)
        return patch.object(CudaStream, "wait", wait)
    _, axis, call = what
    kept = []  # as the wait would: its tensors stay, lest another error be found than the missing order

    def careless(self, real=Works.wait):
        if getattr(self, "careless", False):
            kept.append((self.works, self.sent))
            self.works = ()
        return real(self)
    stack = ExitStack()
    name = call if call == "shift" else "start" if call == "exchange" else f"start_{call}"
    real_begin = getattr(Axis, name)

    def begin(self, *args, **more):
        works = real_begin(self, *args, **more)
        works.careless = self.name == axis
        return works
    stack.enter_context(patch.object(Axis, name, begin))
    stack.enter_context(patch.object(Works, "wait", careless))
    return stack


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("races")  # a process each: after 32 streams torch gives the first again
    return {layout: in_process(folder, step_races, layout) for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_all_its_waits_memo_has_no_race(found, layout):
    assert found[layout]["None"] == []


@pytest.mark.parametrize("layout,wait", [(layout, wait) for layout in SWAP_WAITS
                                         for wait in SWAP_WAITS[layout]])
def test_every_wait_of_the_swap_is_needed(found, layout, wait):
    lines, sides = found[layout][wait], SWAP_WAITS[layout][wait]
    assert any(all(side in line for side in sides) for line in lines), lines


@pytest.mark.parametrize("wait", STAGING_WAITS)
def test_every_wait_of_an_optimizer_on_the_host_is_needed(found, wait):
    lines = found["host"][wait]
    assert any(all(side in line for side in STAGING_WAITS[wait]) for line in lines), lines


@pytest.mark.parametrize("message", MESSAGES, ids=" ".join)
def test_every_wait_for_a_message_is_needed(found, message):
    lines = found[message[0]][str(message)]
    assert any("nccl: " in line and ("compute: " in line or "offload: " in line) for line in lines), lines


@pytest.mark.parametrize("layout,axis,message,way,use", [
    ("metp", "hops", "shift", "forward", "product"), ("metp", "hops", "shift", "backward", "product"),
    ("metp", "hops", "shift", "backward", "_foreach_add_"), ("metp", "tp", "broadcast", "forward", "product"),
    ("metp", "tp", "broadcast", "backward", "product"), ("metp", "tp", "reduce", "backward", "add_"),
    # queries that pass a ring, and the sums that follow them
    ("four, ring", "cp", "shift", "forward", "_scaled_dot_product_flash_attention"),
    ("four, ring", "cp", "shift", "forward", "launch_merge"),
    ("four, ring", "cp", "shift", "backward", "_scaled_dot_product_flash_attention_backward"),
    ("four, ring", "cp", "shift", "backward", "add_")])
def test_whoever_uses_a_message_has_waited_for_it(found, layout, axis, message, way, use):
    lines, here = found[layout][str((layout, axis, message))], ("nccl: ", f"compute: {way} ", f"({use})")
    assert any(all(word in line for word in here) for line in lines), lines


def test_arrive_is_needed(found):
    """The parameters of the next forward come with the gather of the optimizer's step before."""
    lines = found["dp2"][str(("dp2", "data", "gather"))]
    assert any("forward" in line and "all-gather" in line for line in lines), lines
