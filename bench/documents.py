"""Documents kept apart beside windows over whatever comes, on the stdlib data.

    python -m bench.documents curves   300 steps each way, then losses by position within validation documents
    python -m bench.documents cost     CPU seconds of a pass whose sequences are one document each, over one
                                       without documents, in turns; and of one with as many as they hold

Without an argument both. Writes bench/results/documents.json and .png. Data: python data/stdlib/prepare.py.
"""

import tempfile
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
from memo.evaluate import token_losses
from memo.layer.tiles import Batch, Packed, row_order
from memo.parallel.mesh import ALONE
from memo.plots.figures import plain, smooth
from memo.sample import load_model
from memo.states.passes import Model
from model import GPT

RESULTS, CPU = Path(__file__).parent / "results", torch.device("cpu")
S = 4096
MODEL = dict(n_layer=4, n_head=4, n_embd=128, block_size=S, batch_size=1, dataset="stdlib", device="cpu",
             max_iters=300, learning_rate=2e-3, warmup_iters=20, eval_interval=100, eval_iters=4,
             save_interval=0, subsequences=1)
WAYS = {"windows": {}, "documents": dict(documents=True)}
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
    found = store_parts(__doc__, RESULTS / "documents.json", dict(curves=curves, cost=cost))
    if "curves" in found:
        draw(found["curves"])
    print(*found.get("cost", {}).items(), sep="\n")
