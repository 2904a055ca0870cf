"""What tests of documents share: a dataset of them, a step through it, and its documents one by one."""

import json
from dataclasses import replace

import numpy as np
import torch

from memo.data.batch import open_dataset
from memo.data.tokens import DTYPES, STARTS
from memo.layer.tiles import row_order
from memo.parallel.mesh import ALONE
from memo.planner.allocator import Arena
from memo.run import reserve
from memo.system.files import fingerprint
from memo.verify.reference import Reference
from tests.helpers import CPU, mesh_of
from tests.layouts import build, views, whole

# of one token, short, as long as a sequence, longer: cut across every boundary of subsequences and ranks
LENGTHS = [1, 300, 45, 128, 64, 1, 1, 200, 31, 77, 2, 19, 129, 50, 3, 17, 90, 24, 8, 1, 15]
KEYS = dict(n_layer=3, n_head=4, n_embd=32, vocab_size=97, block_size=128, batch_size=2, documents=True,
            gradient_accumulation_steps=2, subsequences=1)
FAMILIES = dict(gpt=dict(bias=True, position="learned"), qwen=dict(
    n_kv_head=2, norm="rmsnorm", mlp="swiglu", n_inner=64, qk_norm=True, tie_embeddings=False))
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
    """[(loss, norm) of three steps] with the states in each of these places."""
    mesh, made = mesh_of(host, replace(cfg, states="host")), []
    data = open_dataset(folder, cfg.block_size, packs=cfg.pack)
    for where in places:
        model, optimizer = build(replace(cfg, states=where), mesh)
        shown = []
        for it in range(3):
            loss = packed_step(model, optimizer, cfg, data, it)
            shown.append((loss.item(), optimizer.clip(0.1).item()))
            optimizer.step(1e-2)
        optimizer.pieces()  # behind the last step
        model.close()
        made.append(shown)
    return made


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
