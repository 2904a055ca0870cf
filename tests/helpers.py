"""What several tests use."""

import json
import re
import resource
from pathlib import Path

import pytest
import torch

from memo import convert
from memo.checkpoint import checkpoint
from memo.checkpoint.manifest import FORMAT, METADATA, manifest_text
from memo.config.config import as_keys
from memo.config.layer import decoder_layer
from memo.config.layout import Layout
from memo.config.msp import helping_pairs
from memo.estimate.arena import fast_arena
from memo.huggingface.weights import HfWeights
from memo.layer.tiles import Batch, row_order
from memo.memory.flat import model_parameters
from memo.parallel.mesh import open_lanes, open_mesh
from memo.run.loggers import read_metrics
from memo.schedule.simulate import times_of_stages
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.command import run
from model import GPT, initial_weights

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
VOCAB = 50  # of the fixture `dataset`
COSTS = dict(ln1_out=1, q=8, k=8, v=8, mid=8, ln2_out=1, fc1_out=32, gelu_out=2)  # of recomputing, GPT's
LLAMA_COSTS = dict(ln1_out=1, q=8, k=4, v=4, proj_out=8, mid=8, ln2_out=1, gate_out=24, up_out=24, mlp_out=24)
# a family whose widths all differ: keys and values narrower than queries, these wider than the hidden size
LLAMA = dict(norm="rmsnorm", mlp="swiglu", n_inner=112, n_kv_head=2, head_dim=24, tie_embeddings=False)
# norms behind attention and MLP, and of all heads together
OLMO = LLAMA | dict(norms="behind", qk_norm=True, qk_norm_over="all")
# norms on both sides, GeGLU, scaled embeddings and queries
GEMMA = LLAMA | dict(norms="both", mlp="geglu", qk_norm=True, scale_embeddings=True, query_scalar=40,
                     tie_embeddings=True)


def half_rotary(D, original=64):
    """Keys of rotary positions as in Phi-4-mini: in half of the elements of heads of D, with LongRoPE."""
    scaling = dict(rope_type="longrope", factor=4.0, original_max_position_embeddings=original,
                   short_factor=[1.1] * (D // 4), long_factor=[1.5 + j for j in range(D // 4)])
    return dict(partial_rotary_factor=0.5, rope_scaling=json.dumps(scaling))


def gpt_layer(C, H):
    """The Layer of GPT-2's widths, without biases."""
    return decoder_layer(C, H, H, C // H, 4 * C)


def costs_of(tensors):
    """{group: cost of recomputing} of the family with these skeletal tensors."""
    costs = LLAMA_COSTS if "gate_out" in tensors else COSTS
    return {name: cost for name, cost in costs.items() if name in tensors}

# --- runs of train.py ---

def argv(folder, out, **keys):
    """The command line of a small run of train.py."""
    keys = dict(dataset=folder, out_dir=out, n_layer=2, n_head=2, n_embd=32, block_size=64, batch_size=4,
                max_iters=12, warmup_iters=2, learning_rate=1e-2, eval_interval=6, eval_iters=2,
                save_interval=4, device="cpu") | keys
    return [f"--{k}={v}" for k, v in keys.items()]


def told(stderr):
    """What a command has told, without the lines of what takes long on a busy machine."""
    return re.sub(r"^.*, \d+ s so far\n", "", stderr, flags=re.MULTILINE)


def losses(out):
    """[(iter, loss)] of a run."""
    return [(r["iter"], r["loss"]) for r in read_metrics(Path(out) / "metrics.jsonl")]


def no_picture(run, name, work):
    """In the place of memo.run.report.draw_picture."""


def bound_arena(m):
    """Runs bound their arena, and trace nothing."""
    m.setattr("memo.run.prepare.arena_here", fast_arena)


def choosing(m):
    """Runs choose from several subsequences at small lengths."""
    m.setattr("memo.decide.choose.LEAST_TOKENS", 128)


# --- models ---

def perturbed_weights(cfg, device):
    """Initial weights in which no bias is zero and no gain is one, so that a forgotten one shows."""
    g = torch.Generator(device).manual_seed(1)
    mine = model_parameters(cfg)  # of a stage
    for name, w in initial_weights(Layout.whole(cfg), 0, device):
        w = w + torch.zeros_like(w).normal_(0.0, 0.1, generator=g) if w.dim() == 1 else w
        if name in mine:
            yield name, w


def random_batch(cfg, B, T, device, seed=3):
    """(tokens, targets), each (B, T)."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, cfg.vocab_size, (B, T + 1), generator=g).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def batches(n, vocab_size, S):
    """n batches (2, S + 1) of random tokens."""
    g = torch.Generator().manual_seed(2)
    return [torch.randint(vocab_size, (2, S + 1), generator=g) for _ in range(n)]


def trained_beside(net, folder, cfg, batches):
    """(model, optimizer) with the weights in `folder`, those of transformers' `net`, after a step on each of
    the batches. Losses and norms are those of `net` under torch's AdamW."""
    model = Model(GPT, cfg, "cpu", torch.float32)
    optimizer = Optimizer(model, cfg)
    optimizer.load(HfWeights(folder, cfg))
    groups = [dict(params=[p for p in net.parameters() if p.dim() >= 2], weight_decay=cfg.weight_decay),
              dict(params=[p for p in net.parameters() if p.dim() < 2], weight_decay=0.0)]
    theirs = torch.optim.AdamW(groups, lr=1e-3, betas=(cfg.beta1, cfg.beta2), eps=1e-8)
    losses = []
    for batch in batches:
        tokens, targets = batch[:, :-1], batch[:, 1:].contiguous()
        wanted = torch.nn.functional.cross_entropy(net(tokens).logits.flatten(0, 1), targets.flatten())
        losses.append(model.forward(tokens, targets, scale=1.0).item())
        assert abs(losses[-1] - wanted.item()) < 1e-4
        wanted.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
        model.backward()
        assert optimizer.clip(1.0).item() == pytest.approx(norm.item(), rel=1e-4)
        optimizer.step(1e-3)
    assert losses[-1] < losses[0] - 0.5
    return model, optimizer


def memo_logits(model, tokens):
    """(B, T, V) of a batch of tokens."""
    model.forward(tokens, tokens)
    return model.gpt.edges.logits(model.swap.x[-1])[3][:, :model.cfg.vocab_size].view(*tokens.shape, -1)


def save_states(out_dir, optimizer, cfg, iter):
    """A checkpoint of the optimizer's states."""
    saver = checkpoint.Saver(out_dir)
    saver.save(optimizer.pieces(saved=True), as_keys(cfg), iter)
    saver.wait()


def error(a, b):
    """Relative error of the tensor `a` against `b`."""
    return ((a - b).norm() / b.norm()).item()


# --- conversion ---

def fails(capsys, message, *argv):
    """memo.convert with `argv` says one line on stderr, which matches, and ends with code 2."""
    assert run(convert.main, [str(a) for a in argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    assert re.search(message, captured.err), captured.err
    assert captured.out == ""


# --- ranks ---

MESHES = {}  # of this process, the last one alone: each group has a thread that never sleeps for long


def mesh_of(host, cfg):
    """The Mesh of a layout, which stays until another one is asked for."""
    helping = *helping_pairs(cfg.shares),
    key = host.size, cfg.cp, cfg.tp, cfg.metp, cfg.pp, cfg.ties_stages, cfg.layers_come, helping
    if key not in MESHES:
        for mesh in MESHES.values():
            mesh.close()
        MESHES.clear()
        MESHES[key] = open_mesh(host, cfg.cp, cfg.tp, CPU, metp=cfg.metp, pp=cfg.pp, tied=cfg.ties_stages,
                                layers_come=cfg.layers_come)
        open_lanes(MESHES[key], cfg.shares, CPU)
    return MESHES[key]


def degrees_of(text):
    """"tp2 cp2" -> dict(tp=2, cp=2, dp=1, pp=1)."""
    return dict(tp=1, cp=1, dp=1, pp=1) | {name: int(n) for name, n in re.findall(r"(\w\w)(\d)", text)}


def step(model, optimizer, cfg):
    """Loss of a step, as all ranks know it; gradients are reduced."""
    mesh, loss = model.mesh, torch.zeros(())
    micro_batches = cfg.micro_batches(mesh.dp.size)
    part = 1 / (micro_batches * cfg.cp)
    mine = torch.cat(row_order(cfg, cfg.block_size, mesh).positions())
    batches = []
    for micro in range(mesh.dp.rank, micro_batches, mesh.dp.size):
        whole = random_batch(cfg, cfg.batch_size, cfg.block_size, CPU, 3 + micro)
        batches.append(Batch(*(t[:, mine].contiguous() for t in whole)))
    for i, batch in enumerate(batches):
        loss += model.forward(*batch, scale=part, following=batches[i + 1:i + 2]) * part
        model.backward(last=i == len(batches) - 1)
    return mesh.mean_loss(loss)


# --- schedules ---

def validate_stages(schedules):
    """Errors: ValueError: as times_of_stages()."""
    times_of_stages(schedules, lambda stage, step: 0.0)


def validate_queues(schedules):
    """Errors: ValueError: as times_of_stages(), of stages that do one message after the other."""
    def in_a_queue(steps):
        before = {}
        for step, waits in steps.items():
            yield step, waits | before if step.is_message else waits
            before = {step: None} if step.is_message else before
    validate_stages([dict(in_a_queue(steps)) for steps in schedules])


def unaware(steps, step, wait):
    """The schedule, of which one step does not wait for another."""
    return steps | {step: {other: place for other, place in steps[step].items() if other != wait}}


def changed_places(steps, a, b):
    """The schedule, of which two steps are in each other's place."""
    other = {a: b, b: a}
    return {step: steps[step] for step in (other.get(step, step) for step in steps)}


def lacking(steps, gone):
    """The schedule without a step, for which nobody waits."""
    return {step: {other: place for other, place in waits.items() if other != gone}
            for step, waits in steps.items() if step != gone}


def refusal(check, *what):
    """The rule that `what` violates, None if there is none."""
    try:
        check(*what)
    except ValueError as e:
        return str(e).partition(":")[0]
    return None


# --- this process ---

def resident_bytes():
    """Bytes of host memory that the process has now."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def save_header(folder, cfg, iter=5):
    """A checkpoint of which nothing but the first file is there."""
    path = folder / "ckpt" / str(iter) / "checkpoint.json"
    path.parent.mkdir(parents=True)
    path.write_text(manifest_text(dict(format=FORMAT, iter=iter, config=as_keys(cfg),
                                       files={METADATA: [0, 0]})))
