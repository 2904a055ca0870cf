"""What tests of documents share: a dataset of them, a step through it, and its documents one by one."""

import json
from dataclasses import replace
from itertools import count, pairwise
from unittest.mock import patch

import numpy as np
import torch

from memo.data.batch import open_dataset
from memo.data.tokens import DTYPES, STARTS
from memo.kernels import attention
from memo.kernels.ops import TORCH
from memo.layer.cp import attention_over_ranks
from memo.layer.masks import documents
from memo.layer.tiles import RowOrder, row_order
from memo.parallel.mesh import ALONE
from memo.planner.allocator import Arena, NoArena
from memo.run import reserve
from memo.system.files import fingerprint
from memo.verify.reference import Reference
from tests.helpers import CPU, mesh_of
from tests.layouts import build, train_steps, views, whole

# of one token, short, as long as a sequence, longer: cut across every boundary of subsequences and ranks
LENGTHS = [1, 300, 45, 128, 64, 1, 1, 200, 31, 77, 2, 19, 129, 50, 3, 17, 90, 24, 8, 1, 15]
KEYS = dict(n_layer=3, n_head=4, n_embd=32, vocab_size=97, block_size=128, batch_size=2, documents=True,
            gradient_accumulation_steps=2, subsequences=1)
FAMILIES = dict(gpt=dict(bias=True, position="learned"), qwen=dict(
    n_kv_head=1, norm="rmsnorm", mlp="swiglu", n_inner=64, qk_norm=True, tie_embeddings=False))
MODES = [dict(activation="keep"), dict(activation="recompute"), dict(activation="memo", alpha=0.5)]


def write_folder(folder, lengths, vocab_size=97):
    """A dataset whose splits have documents of these lengths, of random tokens."""
    folder.mkdir()
    rng, counts, prints = np.random.default_rng(1), {}, {}
    for split in STARTS:
        rng.integers(vocab_size, size=sum(lengths)).astype(DTYPES["uint16"]).tofile(folder / f"{split}.bin")
        (np.cumsum(lengths) - lengths).astype("<i8").tofile(folder / STARTS[split])
        counts[split] = dict(tokens=sum(lengths), documents=len(lengths))
        prints[split] = fingerprint(folder / f"{split}.bin", whole=True)
        prints[STARTS[split]] = fingerprint(folder / STARTS[split], whole=True)
    meta = dict(dtype="uint16", vocab_size=vocab_size, counts=counts, documents=STARTS, fingerprints=prints)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def packed_step(model, optimizer, cfg, data, step=0):
    """Loss of a step, as all ranks know it; gradients are reduced."""
    mesh, loss = model.mesh, torch.zeros(())
    learned = data.share(cfg, "train", step, cfg.micro_batches(mesh.dp.size)).learned
    order = row_order(cfg, cfg.block_size, mesh)
    micros = range(mesh.dp.rank, cfg.micro_batches(mesh.dp.size), mesh.dp.size)
    for micro in micros:
        batch = model.on_device(data.draw(cfg, "train", step, micro, mesh.dp.size, order))
        loss += model.forward(*batch, scale=1.0, learned=learned)
        model.backward(last=micro == micros[-1])
    return mesh.mean_loss(loss)


def packed_gradients(host, cfgs, folder):
    """For each config (loss, gradient norm, gradients as of whole(), requests that missed the plan, bytes
    that the ranks of cp sent)."""
    mesh, made = mesh_of(host, cfgs[0]), []
    for cfg in (cfg.of_rank(host.rank, host.size) for cfg in cfgs):
        data = open_dataset(folder, cfg.block_size, packs=cfg.pack)
        model, optimizer = build(cfg, mesh)
        arena = Arena(CPU, "greedy", guard=True)
        arena.replay(reserve.requests_of_a_step(model, arena))
        model.arena = arena
        mesh.take_sent_bytes()
        loss = packed_step(model, optimizer, cfg, data)
        sent, norm = mesh.take_sent_bytes().get("cp", 0), optimizer.clip(0.0)
        shard = torch.cat([model.grads[own.start:own.end] for own in optimizer.own])
        made.append((loss.item(), norm.item(), whole(optimizer, shard), arena.stats().misses, sent))
        model.close()
    return made


def trained_anywhere(host, cfg, folder, places):
    """Losses, norms and states of three steps, see train_steps(), with the states in each of these places."""
    data = open_dataset(folder, cfg.block_size, packs=cfg.pack)
    mesh = mesh_of(host, replace(cfg, states="host"))

    def trained(where):
        it = count()
        *found, _ = train_steps(lambda _: build(replace(cfg, states=where), mesh), cfg,
                                take=lambda *run: packed_step(*run, data, next(it)))
        return found
    return [trained(where) for where in places]


# --- a kernel by lengths for the CPU: numpy computes, so that memory is requested as on a GPU ---

def spans_of(q, k, v, lengths):
    """(rows, scores, q, k, v) of each document, one head of keys for each of queries."""
    q, k, v = (t.numpy().repeat(q.shape[1] // t.shape[1], 1) for t in (q, k, v))
    starts = lengths.starts.tolist()
    assert lengths.starts.dtype is torch.int32 and (starts[0], starts[-1]) == (0, len(q))
    assert max(2, *np.diff(starts)) <= lengths.longest
    with np.errstate(all="ignore"):  # a rehearsal's numbers are no numbers
        for a, b in pairwise(starts):
            scores = np.einsum("qhd,khd->hqk", q[a:b], k[a:b]) * q.shape[-1]**-0.5
            scores[:, np.triu(np.ones((b - a, b - a), bool), 1)] = -np.inf
            yield slice(a, b), scores, q[a:b], k[a:b], v[a:b]


def forward_by_lengths(q, k, v, lengths):
    out, lse = torch.empty(q.shape), torch.empty(q.shape[1], len(q))
    for rows, scores, _, _, v_ in spans_of(q, k, v, lengths):
        lse.numpy()[:, rows] = np.logaddexp.reduce(scores, 2)
        p = np.exp(scores - lse.numpy()[:, rows, None])
        out.numpy()[rows] = np.einsum("hqk,khd->qhd", p, v_)
    return out, lse


def backward_by_lengths(dout, q, k, v, out, lse, lengths):
    assert lse.is_contiguous() and lse.shape == (q.shape[1], len(q))
    dq, dk, dv = gradients = [torch.empty(t.shape) for t in (q, k, v)]
    n, sharing = len(q) + 128 * (len(lengths.starts) - 1), q.shape[1] // k.shape[1]
    workspaces = torch.empty(q.shape[1], n), torch.empty(n, *q.shape[1:])  # flash-attn's
    for rows, scores, q_, k_, v_ in spans_of(q, k, v, lengths):
        p, dout_ = np.exp(scores - lse.numpy()[:, rows, None]), dout.numpy()[rows]
        delta = (dout_ * out.numpy()[rows]).sum(-1).T[:, :, None]
        ds = p * (np.einsum("qhd,khd->hqk", dout_, v_) - delta) * q.shape[-1]**-0.5
        dq.numpy()[rows] = np.einsum("hqk,khd->qhd", ds, k_)
        for g, of in ((dk, np.einsum("hqk,qhd->khd", ds, q_)), (dv, np.einsum("hqk,qhd->khd", p, dout_))):
            g.numpy()[rows] = of.reshape(len(of), -1, sharing, of.shape[-1]).sum(2)
    del workspaces
    return gradients


BY_LENGTHS = attention.of_rows(forward_by_lengths, backward_by_lengths)


def gradients_by_lengths(host, cfgs, folder):
    """packed_gradients() of a kernel that takes lengths, each with the documents of calls so far."""
    calls, (forward, backward) = [], BY_LENGTHS

    def counted(*args):
        calls.append(len(args[-1].starts) - 1)
        return forward(*args)
    kernel = attention.BACKENDS["cpu"]._replace(lengths=(counted, backward))
    with (patch.dict(attention.BACKENDS, cpu=kernel),
          patch.object(attention, "by_lengths", lambda name, deterministic: name)):
        return [(*made, calls) for made in packed_gradients(host, cfgs, folder)]


def attention_by_lengths(lengths):
    """Yields (out, lse, gradients) tile by tile and by lengths, of documents of two sequences: of all
    queries, and of the later half."""
    T, g, place = sum(lengths), torch.Generator().manual_seed(0), torch.clone
    ends = [np.cumsum(of).tolist() for of in (lengths, lengths[::-1])]
    kernel = attention.BACKENDS["cpu"]._replace(lengths=BY_LENGTHS, merge=TORCH.merge)
    attend, _ = attention_over_ranks(kernel, ALONE.tokens, "ring", TORCH.merge)
    for cuts in ([(T,)], [(T // 2,), (T - T // 2,)]):
        n = cuts[-1][0]
        q, dout = (torch.randn(2, n, 4, 8, generator=g) for _ in range(2))
        pieces = [tuple(torch.randn(2, t, 2, 8, generator=g) for _ in range(2)) for t, in cuts]
        results = []
        for placed in (None, place):
            order = RowOrder(cuts, masks=[*map(documents, ends)])
            met, = order.meetings(len(cuts) - 1, 0, n, NoArena().fence, placed)
            assert any(tile.kind for tile in met.tiles()[-1]) == (placed is place)
            sums = [tuple(map(torch.zeros_like, pair)) for pair in pieces] if len(cuts) > 1 else []
            out, lse = attend.forward(q, pieces, met)
            gradients = attend.backward(dout, q, pieces, sums, out, lse, met)
            results.append([out, lse, *gradients, *(t for pair in sums for t in pair)])
        yield results


def of_documents(cfg, folder):
    """(loss, norm, gradients) of a step's pieces, each alone in an fp64 model."""
    data = open_dataset(folder, cfg.block_size, packs=cfg.pack)
    share, packing = data.share(cfg, "train", 0, 2), data.packings["train"]
    model, optimizer = build(cfg, ALONE)
    weights = ((name, w.double()) for name, w in views(model.layout, optimizer.master).items())
    reference = Reference(cfg).load(weights)
    total, tokens = 0.0, data.tokens["train"]
    for k in packing.numbers(0, 4, cfg.seed):
        for first, length, ends in packing.pieces(k):
            ids = torch.from_numpy(tokens[first:first + length + 1].astype(np.int64))
            x = reference.hidden(ids[None, :length])[0, :length - ends]
            targets, keep = ids[1:len(x) + 1], slice(None)
            if data.weights:
                keep = data.weights["train"][first + 1:first + 1 + len(x)] > 0
            if len(x[keep]):
                loss = reference.loss_sum(x[keep], targets[keep]) / share.learned
                loss.backward()
                total += loss.item()
    model.close()
    gradients = {name: g.float() for name, g in reference.gradients().items()}
    return total, torch.stack([g.norm() for g in gradients.values()]).norm().item(), gradients
