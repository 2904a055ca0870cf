"""Figure 11d of MEMO, small and on the CPU: losses of memo that swaps and recomputes, of memo that keeps all,
and of transformers' GPT-2 with gradient checkpointing under torch's AdamW: same weights, same batches."""

import tempfile
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import train
from memo.data.batch import open_dataset
from memo.errors import ConfigError
from memo.plots.figures import BLUE, GREEN, GREY, plain, smooth
from memo.run.load_config import load_config
from memo.run.loggers import read_metrics
from research.papers.page import MEASURED, Part
from testing.rivals import gpt2_of_transformers

STEPS, RIVAL = 200, "transformers, checkpointing"
MODEL = dict(block_size=1024, dataset="stdlib", device="cpu", max_iters=STEPS, warmup_iters=20,
             eval_interval=0, save_interval=0, learning_rate=2e-3)
SHAPE = dict(n_layer=4, n_head=4, n_embd=64, vocab_size=512, position="learned", bias=True, gelu="tanh")
RUNS = {"memo, keep": dict(activation="keep"), "memo, alpha 0.5": dict(activation="memo", alpha=0.5)}
COLOURS = BLUE, GREY, GREEN


def losses_of_memo(hf, out, keys):
    train.main([f"--{k}={v}" for k, v in (MODEL | keys | dict(init_from=f"hf:{hf}", out_dir=out)).items()])
    return [row["loss"] for row in read_metrics(out / "metrics.jsonl")]


def losses_of_transformers(net, cfg):
    """Of a loop like train.py's: warmup and cosine, decay on matrices alone, one norm that is clipped."""
    net.gradient_checkpointing_enable()
    net.train()
    matrices, others = ([p for p in net.parameters() if (p.dim() > 1) == two] for two in (True, False))
    groups = [dict(params=matrices, weight_decay=cfg.weight_decay), dict(params=others, weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=1e-8, fused=True)
    data, losses = open_dataset(cfg.dataset, cfg.block_size), []
    for it in range(STEPS):
        tokens, targets = data.batch("train", it, 0, cfg.batch_size, cfg.block_size, cfg.seed)
        loss = F.cross_entropy(net(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), cfg.grad_clip)
        for group in adamw.param_groups:
            group["lr"] = train.learning_rate(cfg, it)
        adamw.step()
        losses.append(loss.item())
    return losses


def check():
    """Errors: ConfigError: there is no data/stdlib, or no transformers."""
    open_dataset(MODEL["dataset"], MODEL["block_size"])
    if find_spec("transformers") is None:
        raise ConfigError("transformers=none must be installed, for memo.figure11d compares its losses; try "
                          "pip install -r requirements-dev.txt")


def make():
    cfg = load_config([f"--{k}={v}" for k, v in (SHAPE | MODEL).items()])
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more would sum in another order
    net = gpt2_of_transformers(cfg)
    with tempfile.TemporaryDirectory() as folder:
        hf = Path(folder) / "hf"
        net.save_pretrained(hf)
        curves = {name: losses_of_memo(hf, Path(folder) / str(i), keys)
                  for i, (name, keys) in enumerate(RUNS.items())}
    curves[RIVAL] = losses_of_transformers(net, cfg)
    keep, swapped, rival = curves.values()
    most = max(abs(a - b) for a, b in zip(keep, rival, strict=True))
    rows = [["memo, alpha 0.5, from memo, keep", "equal to the last bit" if swapped == keep else "not equal"],
            [f"{RIVAL}, from memo, keep", f"{most:.0e} at the most"]]
    return dict(tables=[(["losses", f"difference over {STEPS} steps"], rows)], notes=[
        f"4 layers, C = 64, context 1,024, fp32, losses from {keep[0]:.3f} to {keep[-1]:.3f}. The paper has "
        "7B at 128K, 1,000 steps, several alphas beside Megatron-LM: one curve, only drawn."],
        curves={name: [round(loss, 6) for loss in losses] for name, losses in curves.items()})


def draw(facts, path):
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5.5), dpi=110, sharex=True, height_ratios=(3, 1),
                                      layout="constrained")
    first = facts["curves"]["memo, keep"]
    for i, ((name, losses), colour) in enumerate(zip(facts["curves"].items(), COLOURS, strict=True)):
        top.plot(smooth(losses), label=name, lw=7 - 3 * i, color=colour)
        bottom.plot([a - b for a, b in zip(losses, first, strict=True)], lw=7 - 3 * i, color=colour)
    top.set(ylabel="training loss, smoothed")
    top.legend(frameon=False)
    bottom.set(ylabel="loss minus\nkeep's", xlabel="step")
    for ax in (top, bottom):
        plain(ax)
    fig.savefig(path)
    plt.close(fig)


PART = Part("Figure 11d: convergence", MEASURED, make, draw, check)
