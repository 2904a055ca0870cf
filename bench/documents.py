"""Documents kept apart beside windows over whatever comes, on the stdlib data.

    python -m bench.documents curves   300 steps each way, then losses by position within validation documents
    python -m bench.documents cost     CPU seconds of a pass whose sequences are one document each, over one
                                       without documents, in turns; and of one with as many as they hold
    python -m bench.documents batches  ten batches each of five kinds of lengths: requests that the memory
                                       plan missed, CPU seconds of a pass over those of the estimate, after
                                       python -m memo.profiler --calibrate; and with fewer learned tokens

Without an argument all. Writes bench/results/documents.json and .png. Data: python data/stdlib/prepare.py.
"""

import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time

import matplotlib.pyplot as plt
import numpy as np
import torch

from bench.machine import store_parts
from bench.parallel_convergence import train
from bench.swap_convergence import curve
from memo.config.layout import Layout
from memo.data.batch import open_dataset, read_starts
from memo.data.tokens import DTYPES, STARTS, WEIGHTS
from memo.estimate.arena import fast_arena
from memo.estimate.budget import estimate
from memo.estimate.lengths import Documents, sample_of
from memo.estimate.pipeline_seconds import step_s
from memo.estimate.unit_seconds import modelled_rates
from memo.evaluate import token_losses
from memo.layer.tiles import Batch, Packed, row_order
from memo.parallel.mesh import ALONE
from memo.planner.allocator import Arena
from memo.plots.figures import plain, smooth
from memo.run import reserve
from memo.sample import load_model
from memo.states.passes import Model
from memo.system.hardware import machine as machine_here
from model import GPT

RESULTS, CPU = Path(__file__).parent / "results", torch.device("cpu")
S = 4096
MODEL = dict(n_layer=4, n_head=4, n_embd=128, block_size=S, batch_size=1, dataset="stdlib", device="cpu",
             max_iters=300, learning_rate=2e-3, warmup_iters=20, eval_interval=100, eval_iters=4,
             save_interval=0, subsequences=1)
WAYS = {"windows": {}, "documents": dict(documents=True)}
VOCAB = 4096
WIDE = dict(n_layer=4, n_head=4, n_embd=256, vocab_size=VOCAB, block_size=S, batch_size=1, documents=True,
            norm="rmsnorm", mlp="swiglu", activation="keep", subsequences=1)
EDGES = [0, 64, 256, 1024, S]  # of positions in a document


def by_position(out):
    """Mean losses of the first S tokens of validation documents, by positions between EDGES."""
    data, model = open_dataset("stdlib", S, ("val",)), load_model(out, "cpu", "float32")
    starts = [*read_starts(data.folder, data.meta, "val").tolist(), len(data.tokens["val"])]
    sums, counts = np.zeros(S), np.zeros(S)
    for first, end in zip(starts, starts[1:], strict=False):
        n = min(S, end - first - 1) // 64 * 64
        if n:
            ids = torch.from_numpy(data.tokens["val"][first:first + n + 1].astype(np.int64))
            sums[:n] += token_losses(model, ids, n)
            counts[:n] += 1
    return [sums[a:b].sum() / counts[a:b].sum() for a, b in zip(EDGES, EDGES[1:], strict=False)]


def curves(_):
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, keys in WAYS.items():
            out = Path(folder) / name
            train(1, MODEL | keys | dict(out_dir=out))
            runs[name] = curve(out) | dict(by_position=by_position(out))
    return dict(model=MODEL, edges=EDGES, runs=runs)


def cost(rounds):
    """CPU seconds of forward and backward: of the median of pairs in turns, and the least and largest."""
    data = open_dataset("stdlib", S, ("train",), packs="best_fit")
    keys = MODEL | dict(vocab_size=data.vocab_size, documents=True, batch_size=2, activation="keep")
    cfg = Layout(**keys)
    model = Model(GPT, cfg, CPU, torch.float32)
    model.params.normal_(std=0.02)
    drawn = data.draw(cfg, "train", 0, 0, 1, row_order(cfg, S, ALONE))
    one = Packed(torch.arange(S).repeat(cfg.batch_size, 1), ((S,),) * cfg.batch_size)
    batches = {"without": Batch(drawn.tokens, drawn.targets.clamp_min(0)),
               "one document": model.on_device(Batch(drawn.tokens, drawn.targets.clamp_min(0), one)),
               "as packed": model.on_device(drawn)}

    def seconds(batch):
        begin = process_time()
        model.forward(*batch, scale=1.0, learned=0 if batch.packed is None else 2 * S)
        model.backward()
        return process_time() - begin
    for batch in batches.values():
        seconds(batch)
    spent = [{name: seconds(batch) for name, batch in batches.items()} for _ in range(rounds)]
    ratios = {name: sorted(of[name] / of["without"] for of in spent) for name in batches if name != "without"}
    return {name: dict(median=median(of), least=of[0], largest=of[-1]) for name, of in ratios.items()} | dict(
        documents=[len(ends) for ends in drawn.packed.ends])


def write_dataset(folder, lengths, learned=1.0):
    """A dataset whose documents have these lengths, of random tokens, of which a part is learned."""
    folder.mkdir()
    rng, n = np.random.default_rng(3), int(sum(lengths))
    counts = {split: dict(tokens=n, documents=len(lengths)) for split in STARTS}
    for split in STARTS:
        rng.integers(VOCAB, size=n).astype(DTYPES["uint16"]).tofile(folder / f"{split}.bin")
        (np.cumsum(lengths) - lengths).astype("<i8").tofile(folder / STARTS[split])
        (rng.random(n) < learned).astype(np.uint8).tofile(folder / WEIGHTS[split])
    (folder / "meta.json").write_text(json.dumps(dict(
        dtype="uint16", vocab_size=VOCAB, counts=counts, documents=STARTS, weights=WEIGHTS)))
    return str(folder)


def kinds_of_lengths():
    rng = np.random.default_rng(2)
    return {"alike": np.full(2000, 300), "from 1 to 64": rng.integers(1, 65, 4000),
            "lognormal": np.maximum(1, rng.lognormal(6, 1.5, 400)).astype(np.int64),
            "longer than a sequence": rng.integers(S, 5 * S, 30),
            "books and pages": rng.permutation([*[3 * S // 5] * 20, *[200] * 300])}


def passes(folder, count, rounds):
    """Of the first batches of a dataset CPU seconds of a pass, and these over the estimate's; and the memory
    plan's misses and plans."""
    cfg = Layout(**WIDE)
    data, model = open_dataset(folder, S, ("train",), packs="best_fit"), Model(GPT, cfg, CPU, torch.float32)
    model.params.normal_(std=0.02)
    model.reserve(1, S)
    model.arena = Arena(CPU, "greedy")
    model.arena.replay(reserve.requests_of_a_step(model, model.arena))
    packing, order, here = data.packings["train"], row_order(cfg, S, ALONE), machine_here("here")
    got = estimate(cfg, here, 1, fast_arena, Documents(folder, packing))
    stages = [replace(stage, totals=None) for stage in got.stages]
    drawn = [model.on_device(data.draw(cfg, "train", step, 0, 1, order)) for step in range(count)]
    taken = [list[float]() for _ in drawn]
    for _ in range(rounds + 1):  # in turns: a machine that is slow for a while is so for all of them
        for seconds, batch in zip(taken, drawn, strict=True):
            begin = process_time()
            model.forward(*batch, scale=1.0, learned=S)
            model.backward()
            seconds.append(process_time() - begin)
    seconds = [median(each[1:]) for each in taken]

    def expected(step):
        parts = step_s(stages, here, 1, 4, modelled_rates(cfg, here, 4, partial(sample_of, packing, step)))
        return parts["step"] - parts["gradients and parameters"] - parts["optimizer"]
    return dict(over_estimate=[s / expected(step) for step, s in enumerate(seconds)], seconds=seconds,
                misses=model.arena.stats().misses, plans=len(model.arena.plans))


def batches(rounds):
    with tempfile.TemporaryDirectory() as scratch:
        found = {name: passes(write_dataset(Path(scratch) / name, lengths), 10, rounds)
                 for name, lengths in kinds_of_lengths().items()}
        learned = {share: passes(write_dataset(Path(scratch) / str(share), np.full(2000, 300), share), 2,
                                 rounds) for share in (1.0, 0.5, 0.1)}
    for of in found.values():
        of["worst"] = max(of["over_estimate"], key=lambda ratio: abs(ratio - 1))
        of["mean"] = sum(of["seconds"]) / sum(s / r for s, r in zip(of["seconds"], of["over_estimate"],
                                                                      strict=True))
    return dict(model=WIDE, kinds=found, learned={str(share): of for share, of in learned.items()})


def draw(found):
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 4), dpi=130, layout="constrained")
    for name, run in found["runs"].items():
        left.plot(smooth(run["loss"]), label=f"{name}: validation {run['val_loss'][-1]:.3f}")
        right.plot(run["by_position"], marker="o", label=name)
    right.set_xticks(range(len(EDGES) - 1), [f"{a} to {b}" for a, b in zip(EDGES, EDGES[1:], strict=False)])
    left.set(xlabel="step", ylabel="training loss, smoothed", title="each run's own validation data")
    right.set(xlabel="position in a validation document", ylabel="loss", title="the same, each alone")
    for ax in (left, right):
        ax.legend(frameon=False)
        plain(ax)
    fig.savefig(RESULTS / "documents.png")


if __name__ == "__main__":
    found = store_parts(__doc__, RESULTS / "documents.json", dict(curves=curves, cost=cost,
                                                                      batches=batches))
    if "curves" in found:
        draw(found["curves"])
    print(*found.get("cost", {}).items(), sep="\n")
