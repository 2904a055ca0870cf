"""Training steps of memo and of its rivals, beside each other on one GPU: the same model, loss in chunks of
tokens, bf16 parameters, fp32 master weights and moments.

`Ours` is memo in any mode. `Rival` is the autograd twin with torch.utils.checkpoint on every layer, or with
every saved tensor of its layers offloaded by save_on_cpu(pin_memory=True). `Llama` is transformers'
LlamaForCausalLM with gradient checkpointing, or offloaded alike, its head in the twin's chunks.
"""

import os
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from bench.floor import Kernels
from bench.gpu_hour.notes import Skip, device, fitting, free_memory, is_oom, named, tensor_bytes, why_of
from memo.config.formulas import mfu, tgs
from memo.config.layer import head_rows, logit_bytes
from memo.decide.where import Room, place_rows, problem_of
from memo.errors import ConfigError, OutOfHostMemory
from memo.memory.parameters import views
from memo.memory.placement import Placement
from memo.memory.slab import host_bytes
from memo.plots.figures import timeline
from memo.run import reserve
from memo.schedule.spans import stall_s
from memo.states.optim import Optimizer
from memo.states.passes import Model
from memo.system.device import device_name, synchronize
from memo.system.hardware import peak_flops_per_s
from memo.system.launch import read_launch
from memo.verify.reference import Reference
from model import GPT, initial_weights
from testing.gradients import worst_gradient

LEARNING_RATE = 1e-5


def clock():
    synchronize(device())
    return time.perf_counter()


# --- the cases ---

class Ours:
    """memo as a run has it, with its memory plan."""

    def __init__(self, cfg, tokens, targets):
        self.model = Model(GPT, cfg, device(), torch.bfloat16)
        self.optimizer = Optimizer(self.model, cfg)
        self.optimizer.load(initial_weights(cfg, 0, device()))
        self.batch = tokens, targets
        limit = reserve.host_limit(cfg, read_launch(), 2)
        self.decision = reserve.reserve_activations(cfg, self.model, limit)
        reserve.plan_memory(cfg, self.model)

    def step(self):
        """-> the loss, the norm of the gradients."""
        self.model.swap.streams.timeline.clear()
        loss = self.model.forward(*self.batch, scale=1.0)
        self.model.backward()
        norm = self.model.arena.run("clip", self.optimizer.clip, 1.0)
        self.model.arena.run("optimizer", self.optimizer.step, LEARNING_RATE)
        self.model.arena.settle()
        return loss, norm

    def figures(self, png):
        d, swap, stats = self.decision, self.model.swap, self.model.arena.stats()
        spans = swap.streams.timeline.take()
        if png and spans:
            try:
                timeline(spans, png.with_suffix(".json"), png, png.stem)
            except Exception as e:  # no matplotlib, say: a picture is not worth a row
                print(f"no {png.name}: {why_of(e)}")
        return dict(alpha=d.alpha, limits=d.swap_plan and d.swap_plan.limits, stall_s=stall_s(spans),
                    host_bytes=swap.host_bytes, buffer_bytes=swap.device_bytes,
                    attention=self.model.gpt.attention.name, rates=d.rates and d.rates.as_dict(),
                    arena_bytes=stats.arena_bytes, misses=stats.misses)

    def floor_s(self):
        """Seconds of the bare kernels of a step: one layer's L times, one head chunk's as often as there are
        chunks."""
        m, swap = self.model, self.model.swap
        s, x, y = swap.layers[0], swap.x[0], swap.x[1]
        x.normal_()
        with Kernels() as layer:
            m.gpt.blocks[0].forward(s, y)
            m.gpt.blocks[0].backward(y, s)
        rows = m.gpt.edges.own_head_rows
        targets, loss = self.batch[1].reshape(-1)[:rows], torch.zeros((), device=device())
        with Kernels() as head:
            m.gpt.edges.head(x[:rows], targets, len(x), 1.0, loss)
        seconds = []
        for kernels in (layer, head):
            kernels.run()
            start = clock()
            kernels.run()
            seconds.append(clock() - start)
        return m.cfg.n_layer * seconds[0] + len(x) / rows * seconds[1]

    def close(self):
        self.model.close()


class Counted(torch.autograd.graph.save_on_cpu):
    """save_on_cpu that raises OutOfHostMemory instead of taking more of the host than `limit` bytes."""

    def __init__(self, pin, limit):
        super().__init__(pin_memory=pin)
        self.nbytes, pack = 0, self.pack_hook

        def counted(t):
            self.nbytes += 1 << (t.nbytes - 1).bit_length()  # what torch's pinned cache takes for it
            if self.nbytes > limit:
                raise OutOfHostMemory(f"save_on_cpu needs more than the host's {limit / 2**30:.4g} GiB")
            return pack(t)
        self.pack_hook = counted


class Plain(Reference):
    """The autograd twin with its layers checkpointed or offloaded, and its head in checkpointed chunks of
    tokens."""

    def set(self, kind):
        self.kind, self.host = kind, 0
        self.limit = host_bytes(self.cfg.host_memory_gb)  # before torch's pinned cache holds any of it
        return self

    def forward(self, tokens, targets):
        x, turns = self.embed(tokens, torch.arange(tokens.shape[1], device=tokens.device)[None])
        if self.kind == "plain":
            for block in self.h:
                x = block(x, turns)
        elif self.kind == "checkpoint":
            for block in self.h:
                x = checkpoint(block, x, turns, use_reentrant=False)
        else:
            hooks = Counted(True, self.limit)
            with hooks:
                for block in self.h:
                    x = block(x, turns)
            self.host = hooks.nbytes
        return loss_in_chunks(self.loss_sum, x, targets, self.wte.weight.shape[0])


def loss_in_chunks(head, x, targets, vocabulary):
    """The mean of head(rows of x, targets), a sum of losses, over checkpointed chunks as large as memo's."""
    n = head_rows(vocabulary, logit_bytes(x.itemsize, fused=False), x.is_cpu)
    rows = zip(x.flatten(0, 1).split(n), targets.reshape(-1).split(n), strict=True)
    return sum(checkpoint(head, *chunk, use_reentrant=False) for chunk in rows) / targets.numel()


class Rival:
    def __init__(self, kind, cfg, tokens, targets):
        self.model, self.batch = self.made(kind, cfg), (tokens, targets)
        named = dict(flash=SDPBackend.FLASH_ATTENTION, cudnn=SDPBackend.CUDNN_ATTENTION).get(cfg.attention)
        self.kernel = partial(sdpa_kernel, named) if named else nullcontext  # otherwise torch's own choice
        self.params = list(self.model.parameters())
        self.master = [p.detach().float() for p in self.params]
        self.adamw = torch.optim.AdamW(self.master, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)

    def made(self, kind, cfg):
        """A module of (tokens, targets) -> loss; its `host`: bytes that it has offloaded."""
        with torch.device(device()):
            twin = Plain(cfg, torch.bfloat16)
        return twin.set(kind).load(initial_weights(cfg, 0, device()))

    def step(self):
        """-> the loss, the norm of the gradients."""
        with self.kernel():
            loss = self.model(*self.batch)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for m, p in zip(self.master, self.params, strict=True):
            m.grad, p.grad = p.grad.float(), None
        self.adamw.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.params, strict=True):
                p.copy_(m)
                m.grad = None
        return loss.detach(), norm

    def figures(self, png):
        return dict(host_bytes=self.model.host)

    def close(self):
        self.model = self.params = self.master = self.adamw = None


class OffloadedLlama(torch.nn.Module):
    """transformers' Llama as (tokens, targets) -> loss."""

    def __init__(self, kind, cfg):
        super().__init__()
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        # causal without a mask: no S x S elements
        AttentionInterface.register("unmasked_sdpa", sdpa_attention_forward)
        self.kind, self.host, self.limit = kind, 0, host_bytes(cfg.host_memory_gb)
        with torch.device(device()):
            self.llama = LlamaForCausalLM._from_config(LlamaConfig(
                hidden_size=cfg.n_embd, intermediate_size=cfg.inner_width, num_hidden_layers=cfg.n_layer,
                num_attention_heads=cfg.n_head, num_key_value_heads=cfg.kv_heads, vocab_size=cfg.vocab_size,
                max_position_embeddings=cfg.block_size, tie_word_embeddings=True, use_cache=False,
                attn_implementation="unmasked_sdpa"), dtype=torch.bfloat16)
        self.llama.train()
        if kind == "checkpoint":
            self.llama.gradient_checkpointing_enable(dict(use_reentrant=False))

    def chunk_loss(self, x, targets):
        return F.cross_entropy(self.llama.lm_head(x).float(), targets, reduction="sum")

    def forward(self, tokens, targets):
        hooks = nullcontext() if self.kind == "checkpoint" else Counted(True, self.limit)
        with hooks:
            x = self.llama.model(input_ids=tokens, use_cache=False).last_hidden_state
        self.host = getattr(hooks, "nbytes", 0)
        return loss_in_chunks(self.chunk_loss, x, targets, self.llama.config.vocab_size)


class Llama(Rival):
    def made(self, kind, cfg):
        try:
            return OffloadedLlama(kind, cfg)
        except ImportError as e:
            raise Skip(f"transformers cannot be used ({e})") from None


MEMO = {"memo": {}, "memo keep": dict(activation="keep"), "memo recompute": dict(activation="recompute"),
        "memo without plan": dict(memory_plan="off")}
RIVALS = {"torch": (Rival, "plain"), "torch checkpoint": (Rival, "checkpoint"),
          "torch save_on_cpu": (Rival, "save_on_cpu"), "transformers checkpoint": (Llama, "checkpoint"),
          "transformers save_on_cpu": (Llama, "save_on_cpu")}


def build(case, cfg):
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(0, cfg.vocab_size, (2, 1, cfg.block_size), generator=generator).to(device())
    if case in RIVALS:
        rival, kind = RIVALS[case]
        return rival(kind, cfg, *batch)
    return Ours(replace(cfg, **MEMO[case]), *batch)


def reason_of(e):
    """A word and a line for what a case fails with."""
    if isinstance(e, Skip):
        return "skipped", str(e)
    if isinstance(e, OutOfHostMemory):
        return "oohm", str(e)
    return ("oom" if is_oom(e) or isinstance(e, ConfigError) else "error"), why_of(e)


def expand_segments(on):
    """torch's allocator at its best for torch's own steps, as it is for memo's; not where the user decides,
    nor where torch has no such call any more."""
    switch = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if switch and not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & {*os.environ}:
        switch(f"expandable_segments:{on}")


def measured(case, cfg, steps=2, png=None, floor=False):
    """Figures of a case: seconds of `steps` steps, behind one that warms up; or dict(failed=, why=)."""
    run, why = None, None
    free_memory()
    try:
        expand_segments(case in RIVALS)
        run = build(case, cfg)
        seconds, losses = [], []
        for _ in range(steps + 1):
            start = clock()
            loss, norm = run.step()
            losses.append(loss.item())
            seconds.append(clock() - start)
        step_s = max(1e-9, min(seconds[1:] or seconds))
        rate = tgs(cfg.block_size, 1, step_s)
        row = dict(step_s=step_s, seconds=seconds, losses=losses, grad_norm=norm.item(), tokens_per_s=rate,
                   mfu=mfu(cfg, rate, peak_flops_per_s(device_name(device()))),
                   device_peak_bytes=torch.cuda.max_memory_allocated(),
                   device_reserved_bytes=torch.cuda.max_memory_reserved(), **run.figures(png))
        if floor:
            row["floor_s"] = run.floor_s()
    except Exception as e:
        why = reason_of(e)
    if run is not None:
        run.close()
    del run
    free_memory()
    return row if why is None else dict(failed=why[0], why=why[1])


def beside(notes, cfg, cases, steps=2, again=True):
    """A line for each case at a shape that fits, memo's beside its estimate; memo once more at the end, so
    that a card that grows hot is seen."""
    got = fitting(cfg)
    cfg = got.decided
    for case in [*cases, *(["memo"] if again else [])]:
        memo, what = case == "memo", f"{named(cfg)} {case}"
        png = notes.path.parents[1] / f"{notes.found['item']}.png" if memo else None
        row = measured(case, cfg, steps, png, floor=memo and got.seconds.get("step", 0) < 2)
        if row.get("failed") == "skipped":
            notes.skip(what, row["why"])
            continue
        if "failed" in row:  # what does not fit is an answer, but not of memo
            ok = False if memo or row["failed"] == "error" else None
            notes.line(what, f"{row['failed']}: {row['why']}", ok=ok, case=case, shape=named(cfg), **row)
            continue
        expected = got.seconds.get("step") if memo else None
        notes.line(what, row["step_s"], expected, "s", case=case, expected_mfu=got.mfu, shape=named(cfg),
                   expected_bytes=tensor_bytes(got), expected_alpha=got.alpha, **row)


# --- checking ---

def placements(cfg):
    """{name: Placement}, of every kind: the modes, alphas, layers that keep only their input, more than two
    buffers."""
    L, N = cfg.n_layer, cfg.block_size
    problem = problem_of(cfg, 2, None, Room(2**60))
    made = {a: place_rows(replace(cfg, activation=a), problem)[0] for a in ("keep", "recompute", "swap")}
    made |= {f"alpha {a}": place_rows(replace(cfg, alpha=a), problem)[0] for a in (0.0, 0.5)}
    half = made["alpha 0.5"].kept
    finer = {name: N * (i % 4) // 4 if name in problem.others else N for i, name in enumerate(half)}
    # one group with their output
    ln = {f"ln{j}_{what}": finer[f"ln{j}_out"] for j in (1, 2) for what in ("mean", "rstd")}
    return made | {"one input only": replace(made["alpha 0.5"], input_only=1),
                   "per tensor": Placement(L, 2, N, finer | ln), "three buffers": Placement(L, 3, N, half)}


def check(notes, cfg):
    """Lines: how far gradients, summed over three batches, are from autograd's in fp32, for each kind of
    placement; and the rivals' losses from the same."""
    S, name = cfg.block_size, f"{cfg.mlp} {named(cfg)}"
    batches = torch.randint(0, cfg.vocab_size, (3, 2, 1, S), device=device())
    with torch.device(device()):
        twin = Reference(cfg, torch.float32)
    twin.load((n, w.bfloat16().float()) for n, w in initial_weights(cfg, 0, device()))
    for batch in batches:
        want = twin(*batch)
        want.backward()
    model = Model(GPT, cfg, device(), torch.bfloat16)
    model.load(initial_weights(cfg, 0, device()))
    for placement, p in placements(cfg).items():
        with notes.trying(f"{name} {placement}"):
            model.reserve(1, S, p)
            model.grads.zero_()
            for batch in batches:  # the host waits for none of them: each meets the copies of the one before
                loss = model.forward(*batch, scale=1.0)
                model.backward()
            error, of = worst_gradient(twin, views(model.layout, model.grads))
            notes.line(f"{name} {placement}: gradient of {of}", error, 3e-2, "away", error <= 3e-2)
            away = abs(loss.item() - want.item())
            notes.line(f"{name} {placement}: loss {want.item():.5f}", away, 1e-2, "away",
                       want.item() > 0 and away <= 1e-2)
    model.close()
