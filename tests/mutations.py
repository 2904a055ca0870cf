"""Silent errors that memo.verify must find: each is put into a copy of memo's own code, and a run is verified
there.

    python -m tests.mutations [NAME ...]

Prints a table: what was found, by which check, in which words. Exit code 1 if one is missed, or found by a
check that it is not the matter of, or does not apply, or takes too long. Those with a `report` have happened
to others: the words that find it on the web.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 600.0  # of one mutation
RIGHT, WRONG = 0, 1  # exit codes
MODEL = "--n_layer=4 --n_head=8 --n_embd=64 --block_size=8192 --vocab_size=50257"
LLAMA = "--norm=rmsnorm --mlp=swiglu --n_kv_head=4 --tie_embeddings=False"
DOCUMENTS = "--documents=True --batch_size=2"
GPT2 = "--position=learned --bias=True --gelu=tanh"


@dataclass(frozen=True)
class Mutation:
    """A silent error: `old`, which stands once in `file`, becomes `new`; where a run with `keys` is verified,
    one of `checks` must be the first to say so."""

    name: str
    file: str
    old: str
    new: str
    checks: str
    keys: str = ""
    report: str = ""

    def apply(self, tree: Path) -> None:
        """Put the error into a copy of the tree. Errors: ValueError: `old` does not stand there once."""
        path = tree / self.file
        text = path.read_text()
        if (n := text.count(self.old)) != 1:
            raise ValueError(f"its old text stands {n} times in {self.file}, must stand there once")
        path.write_text(text.replace(self.old, self.new))


MUTATIONS = [
    # --- the model ---
    Mutation("no-gradient-of-a-bias", "model.py",
             "        bias_backward(dy, dw.proj_b)\n", "", "reference", GPT2),
    Mutation("attention-sees-the-next", "memo/kernels/attention.py",
             "device=q.device).triu_(1)", "device=q.device).triu_(2)", "kernels", "--attention=math"),
    Mutation("shared-keys-sum-over-the-wrong-heads", "memo/kernels/attention.py",
             "(g.unflatten(2, (k.shape[2], -1)).sum(3) for g in (dk, dv))",
             "(g.unflatten(2, (-1, k.shape[2])).sum(2) for g in (dk, dv))", "kernels",
             f"{LLAMA} --attention=math"),
    Mutation("scale-of-the-scores", "memo/kernels/attention.py",
             "repeated(k, q).float()) * q.shape[-1]**-0.5", "repeated(k, q).float()) * q.shape[-2]**-0.5",
             "kernels", "--attention=math --n_kv_head=4 --n_head=16"),
    Mutation("norm-without-its-mean-gradient", "memo/kernels/ops.py",
             "dx = g.sub_(xhat.mul_(along)).mul_(r)", "dx = g.mul_(r)", "reference", LLAMA),
    Mutation("heads-not-rotated-back", "memo/layer/attend.py",
             "        self.rotate(dy, back=True)\n", "", "reference", f"{LLAMA} --qk_norm=True"),
    Mutation("statistics-of-own-heads-alone", "memo/layer/attend.py",
             "            flat.addcmul_(rows, more.to(flat.dtype)[:, None])\n", "", "layout",
             f"{LLAMA} --qk_norm=True --qk_norm_over=all --norms=both --tp=2"),
    Mutation("always-the-exact-gelu", "memo/layer/mlp.py",
             'form = "tanh" if cfg.gelu == "tanh" else "none"', 'form = "none"', "reference", GPT2),
    Mutation("yarn-without-its-factor", "memo/config/rope.py",
             "return 0.1 * weight * math.log(scaling[\"factor\"]) + 1.0", "return 1.0", "reference",
             f"{LLAMA} --rope_scaling={{\"rope_type\":\"yarn\",\"factor\":4.0,"
             "\"original_max_position_embeddings\":4096}"),
    Mutation("llama3-slows-the-fast", "memo/config/rope.py",
             "(turns - low) / (high - low)", "(high - turns) / (high - low)", "reference",
             f"{LLAMA} --rope_theta=500000 --rope_scaling={{\"rope_type\":\"llama3\",\"factor\":8.0,"
             "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192}"),
    Mutation("padding-has-a-probability", "memo/layer/edges.py",
             "logits[:, padding:] = torch.finfo(logits.dtype).min",
             "logits[:, padding:] = logits[:, padding:]", "reference"),
    Mutation("mean-of-a-chunk", "memo/layer/edges.py",
             "return log_p.sum() / -N", "return log_p.sum() / -len(log_p)", "reference"),
    Mutation("tied-head-without-a-gradient", "memo/layer/edges.py",
             "accumulate_product(self.head_matrix(dw), dlogits.t(), h.mul_(scale / N))",
             "accumulate_product(self.head_matrix(dw), dlogits.t() * 0, h.mul_(scale / N))", "reference"),
    Mutation("accumulation-is-a-sum", "train.py",
             "else 1 / (micro_batches * cfg.cp)", "else 1 / cfg.cp", "reference",
             "--gradient_accumulation_steps=2", "huggingface/transformers gradient accumulation loss fix"),
    Mutation("weights-too-large-at-first", "model.py",
             'std = {"normal": 0.02,', 'std = {"normal": 0.5,', "alive"),
    # --- several ranks ---
    Mutation("ring-stale-keys", "memo/layer/cp.py",  # each hop attends to the rank's own keys again
             "            kv = next(coming)\n", "            next(coming)\n            kv = [*pieces[0]]\n",
             "layout", "--cp=2 --subsequences=1", "ring attention backward stale key value buffer"),
    Mutation("ring-gradients-stop-early", "memo/layer/cp.py",
             "by=jump(stops, step + 1)) if step < axis.size else None",
             "by=jump(stops, step + 1)) if step < axis.size - 1 else None", "layout",
             "--cp=2 --subsequences=1"),
    Mutation("merge-without-a-weight", "memo/kernels/ops.py",
             "out.mul_(part).addcmul_(out_, part_)", "out.mul_(part).add_(out_ * part_.round())", "layout",
             "--cp=2 --subsequences=1", "ring flash attention lse merge numerical error"),
    Mutation("passing-queries-lose-a-sum", "memo/layer/cp.py",
             "    dq.add_(*arrived(home, len(stops) > 1, [q]))\n",
             "    arrived(home, len(stops) > 1, [q])\n", "layout",
             "--cp=2 --subsequences=3"),
    Mutation("ulysses-gradient-of-one-of-several", "memo/layer/cp.py",
             "x.unflatten(2, (H, -1)).sum(3, dtype=torch.float32).to(x.dtype)",
             "x.unflatten(2, (H, -1)).select(3, 0)", "layout",
             "--cp=4 --context_parallel=ulysses --n_kv_head=2 --subsequences=1"),
    Mutation("key-gradients-of-a-step-before", "memo/states/passes.py",
             "end = i + 1 if i == len(self.lengths) - 1 else", "end = i + 1 if i == 0 else", "layout",
             "--subsequences=3"),
    Mutation("a-lead-has-the-keys-of-the-sequence-ahead", "memo/schedule/keys.py",
             "return self.order.home(unit)", "return unit.layer, self.order.piece(unit)", "layout",
             "--pp=2 --subsequences=4 --gradient_accumulation_steps=2"),
    Mutation("sums-of-a-later-piece", "memo/states/passes.py",  # which had the place before
             "else oldest(Unit(unit.layer, i + 1))", "else 0", "layout",
             "--subsequences=5 --sliding_window=300"),
    Mutation("keys-of-a-later-piece", "memo/schedule/keys.py",
             "self.most_read + (self.keys == \"copied\")", "1", "modes",
             "--subsequences=5 --sliding_window=300"),
    Mutation("gradients-times-cp", "train.py",  # the loss that is shown is right
             "forward(*one, scale=part, learned",
             "forward(*one, scale=part * cfg.cp, learned", "layout",
             "--cp=2 --subsequences=1", "context parallel loss scaled by cp size Megatron-LM"),
    Mutation("loss-shown-is-a-part", "train.py",
             "    return mesh.mean_loss(loss)\n", "    return mesh.mean_loss(loss / cfg.cp)\n", "layout",
             "--cp=2 --subsequences=1", "reported loss is half with context parallel"),
    Mutation("clip-of-one-rank", "memo/states/optim.py",
             "self.norm.copy_(world.sum(torch.cat(squares).sum()).sqrt())",
             "self.norm.copy_(torch.cat(squares).sum().sqrt())", "layout", "--gpus=2 --subsequences=1",
             "FSDP clip_grad_norm local norm"),
    Mutation("norm-weights-not-summed-over-tp", "memo/states/optim.py",
             "return square_sum(tp.sum(g))", "return square_sum(g)", "layout", "--tp=2 --subsequences=1",
             "Megatron-LM sequence parallel layernorm gradients not all-reduced"),
    Mutation("positions-of-tp-rank-0", "memo/layer/edges.py",
             "in chunks(out, positions[tp.rank::tp.size]):", "in chunks(out, positions[::tp.size]):",
             "layout", f"--tp=2 --subsequences=1 {GPT2}"),
    Mutation("rotations-of-tp-rank-0", "model.py",
             "mine = positions[tp.rank::tp.size] if cfg.metp else positions",
             "mine = positions[::tp.size] if cfg.metp else positions", "layout",
             "--tp=2 --tensor_parallel=metp --subsequences=1"),
    Mutation("metp-gradients-do-not-come-home", "memo/layer/metp_block.py",
             "torch._foreach_add_([*self.mlp_parts(self.dw).values()], mlp_home.wait())", "mlp_home.wait()",
             "layout", "--tp=2 --tensor_parallel=metp --subsequences=1"),
    Mutation("copies-of-keys-are-not-summed", "memo/states/optim.py",
             "square_sum(tp.sum(every).view(-1))", "square_sum(every.view(-1))", "layout",
             f"{LLAMA.replace('n_kv_head=4', 'n_kv_head=2')} --tp=4 --subsequences=1"),
    Mutation("tied-stages-step-apart", "memo/states/optim.py",
             "self.model.mesh.tied.sum(self.view(self.grads, 0, r))", "self.view(self.grads, 0, r)", "layout",
             "--pp=2 --subsequences=4", "pipeline parallel tied embedding gradients not all-reduced"),
    Mutation("softmax-of-own-columns", "memo/kernels/ops.py",
             "p.mul_((lse - tp.gather(lse).logsumexp(0)).exp_()[:, None])", "p.mul_(1.0)", "layout",
             "--tp=2 --subsequences=1"),
    Mutation("sum-that-sums-nothing", "memo/system/axis.py",
             "dist.all_reduce(borrowed(x), op, group=self.group)",
             "dist.barrier(self.group)", "messages",
             "--tp=2 --subsequences=1"),
    Mutation("bytes-of-the-own-part-are-counted", "memo/system/axis.py",
             "sent_bytes = x.nbytes // self.size * (self.size - 1)\n        return self.start(\"exchange\"",
             "sent_bytes = x.nbytes\n        return self.start(\"exchange\"", "layout",
             "--cp=2 --context_parallel=ulysses --subsequences=1"),
    Mutation("broadcasts-count-on-all-ranks", "memo/system/axis.py",
             "nbytes = 0 if (self.rank + 1) % self.size == owner else x.nbytes", "nbytes = x.nbytes",
             "layout", "--tp=2 --tensor_parallel=metp --subsequences=1"),
    Mutation("scales-of-another-ranks-rows", "memo/kernels/fp8.py",
             "torch._scaled_mm(a[i], by.q.t(), scale[i][:, None].contiguous(), columns,",
             "torch._scaled_mm(a[i], by.q.t(), scale[0][:, None].contiguous(), columns,", "layout",
             "--tp=2 --matmul=fp8 --subsequences=1"),
    # --- what is kept, copied, waited for ---
    Mutation("recompute-without-rotation", "model.py",
             "            if rows[name] != NO_ROWS:\n", "            if rows[name] == EVERY_ROW:\n", "modes"),
    Mutation("prefetch-writes-nothing", "memo/schedule/access.py",
             "else Access(there, here)", "else Access(there, [])", "modes", "",
             "activation offload prefetch race wrong gradients"),
    Mutation("writers-do-not-wait-for-readers", "memo/schedule/waits.py",
             "earlier |= dict.fromkeys(self.readers[place].values(), place)", "earlier |= {}", "modes"),
    Mutation("readers-do-not-wait-for-writers", "memo/schedule/waits.py",
             "for place in reversed(access.reads):", "for place in access.reads[:0]:", "modes"),
    Mutation("copies-read-nothing", "memo/schedule/access.py",
             "touched = Access(here, there) if step.leaves", "touched = Access([], there) if step.leaves",
             "modes", "", "CPU offload reload races its own offload"),
    Mutation("one-row-too-few-comes-back", "memo/memory/placement.py",
             "found[name] = slice(0, first) if first else slice(rows, n)",
             "found[name] = slice(0, first) if first else slice(rows + 1, n)", "modes"),
    # --- data ---
    Mutation("rolled-labels", "memo/data/batch.py",  # the last target of each window is its first token
             "torch.stack((windows[:, :-1], windows[:, 1:]))",
             "torch.stack((windows[:, :-1], windows[:, :-1].roll(-1, 1)))", "data", "",
             "context parallel labels shifted torch.roll chunk boundary"),
    Mutation("data-from-the-start-after-resume", "train.py",
             'batches = [batch(run, "train", it, i) for i in',
             'batches = [batch(run, "train", it - run.first, i) for i in', "data", "",
             "resume from checkpoint dataloader starts from the beginning"),
    Mutation("ranks-read-other-sequences", "memo/data/batch.py",
             "offsets = self.offsets(split, step, micro_step, B, S, seed)",
             "offsets = self.offsets(split, step, micro_step, B, S, seed + (order.ranks[0] if order else 0))",
             "data", "--cp=2 --subsequences=1", "tensor parallel ranks get different batches"),
    # --- documents ---
    Mutation("positions-go-on-behind-a-document", "memo/states/passes.py",
             "positions = self.by_subsequence(packed.positions)\n",
             "positions = [t.repeat(B) for t in order.positions()]\n", "reference",
             f"{DOCUMENTS} {GPT2}", "sequence packing position_ids not reset"),
    Mutation("targets-behind-a-document", "memo/data/batch.py",
             "[:high - low - (ends and high == at + length)]", "[:high - low]", "reference", DOCUMENTS),
    Mutation("cut-documents-end-at-the-cut", "memo/data/packing.py",
             "np.isin(stop, ends, assume_unique=True)", "np.isin(stop, stop, assume_unique=True)", "data",
             DOCUMENTS),
    Mutation("padding-is-learned", "memo/data/batch.py",
             "            rows[1] = UNLEARNED\n", "", "reference", DOCUMENTS,
             "padding tokens not ignored in loss"),
    Mutation("weights-of-the-tokens-before", "memo/data/batch.py",
             "self.weights[split][start + 1:start + 1 + len(targets)]",
             "self.weights[split][start:start + len(targets)]", "data", DOCUMENTS,
             "loss mask shifted by one token"),
    Mutation("mean-over-all-tokens", "train.py",
             'learned = run.data.share(cfg, "train", it, micro_batches).learned if',
             'learned = run.data.share(cfg, "train", it, micro_batches).tokens if', "reference", DOCUMENTS),
    Mutation("mean-of-a-ranks-tokens", "train.py",
             "learned=learned, following", "learned=learned // cfg.cp, following", "layout",
             f"{DOCUMENTS} --cp=2 --subsequences=1", "context parallel loss averaged per rank with padding"),
    Mutation("sequences-come-again", "memo/data/batch.py",
             "(step * cfg.micro_batches(dp) + micro_step) * B, B, seed",
             "step * cfg.micro_batches(dp) + micro_step, B, seed", "data", DOCUMENTS),
    Mutation("ring-sees-other-documents", "memo/layer/cp.py",
             "[tiles] = met.tiles(axis.rank, (axis.rank - step) % axis.size)\n",
             "[tiles] = Meeting(met.queries, met.pieces).tiles(axis.rank, (axis.rank - step) % axis.size)\n",
             "layout", f"{DOCUMENTS} --cp=2 --subsequences=1",
             "ring attention packed sequences cu_seqlens mask"),
    Mutation("metp-sees-other-documents", "memo/states/passes.py",
             "masks=[documents(of) for of in packed.ends])",
             "masks=[documents(of) for of in packed.ends] if not cfg.metp else order.masks)", "layout",
             f"{DOCUMENTS} --tp=2 --tensor_parallel=metp --subsequences=1"),
    Mutation("subsequences-see-other-documents", "memo/layer/tiles.py",
             " * (a > first), queries], self.masks, fence,",
             " * (a > first), queries], (CAUSAL,) if before else self.masks, fence,", "layout",
             f"{DOCUMENTS} --subsequences=3"),
    Mutation("a-hop-that-a-rank-needs-is-left-out", "memo/layer/tiles.py",
             "return sorted(found)[1:]", "return sorted(found)[2:]", "layout",
             f"{DOCUMENTS} --cp=2 --subsequences=1"),
    Mutation("keys-of-one-part-of-a-document", "memo/layer/masks.py",
             "near = of_part.get(part, ())", "near = of_part.get(part, ())[:1]", "layout",
             f"{DOCUMENTS} --cp=2 --subsequences=1"),
    Mutation("one-mask-for-all-sequences", "memo/layer/tiles.py",
             "        if len({*self.masks}) == 1:\n", "        if self.masks:\n", "reference", DOCUMENTS),
    Mutation("neighbours-are-left-out", "memo/layer/masks.py",
             "if key.tokens[1] <= first < min(", "if key.tokens[1] < first < min(",
             "layout optimizer", "--documents=True --cp=4 --subsequences=1"),
    # --- windows ---
    Mutation("a-window-sees-one-more", "memo/layer/masks.py", "Band(int(W) - 1, 0)", "Band(int(W), 0)",
             "reference", "--sliding_window=300 --subsequences=1"),
    Mutation("the-edge-of-a-window-is-full", "memo/layer/masks.py",
             "rows(key, first, last), Band(0, -1))", "rows(key, first, last), False)", "layout",
             "--sliding_window=300 --subsequences=3"),
    Mutation("behind-the-edge-nothing-is-seen", "memo/layer/masks.py",
             "        (triangle, rows(key, last, d), False)]", "        ]", "layout",
             "--sliding_window=300 --cp=4 --subsequences=1"),
    Mutation("a-window-reaches-no-further-rank", "memo/layer/masks.py",
             "key.tokens[1] + mask.window - 1)", "key.tokens[1] + 1)", "layout",
             "--sliding_window=500 --cp=4 --subsequences=1"),
    Mutation("a-halo-replaces-its-gradients", "memo/layer/halo.py", "total[:, first:end] += g[",
             "total[:, first:end] = g[", "layout", "--sliding_window=300 --cp=4 --subsequences=1"),
    Mutation("every-layer-is-like-the-first", "memo/states/passes.py", "kinds[stage.layers[unit.layer]]",
             "kinds[stage.layers[0]]", "reference", "--sliding_window=300 --layer_types=sliding,full"),
    Mutation("hops-are-as-long-as-one", "memo/parallel/visits.py",
             "return at - before[-1] if after[0] == at else 0", "return 1 if after[0] == at else 0",
             "layout optimizer", "--documents=True --cp=4 --subsequences=1"),
    # --- the optimizer ---
    Mutation("norms-decay", "memo/states/optim.py",
             "len(p.shape) > 1) for _, p in ps))", "len(p.shape) > 0) for _, p in ps))", "optimizer"),
    Mutation("one-beta-twice", "memo/states/optim.py", "beta2=betas[1]", "beta2=betas[0]", "optimizer"),
    Mutation("nothing-is-clipped", "memo/states/optim.py",
             "((self.norm + 1e-6) / max_norm).clamp(min=1.0)",
             "((self.norm + 1e-6) / max_norm).clamp(max=1.0)", "optimizer"),
    Mutation("warmup-from-zero", "train.py",
             "cfg.learning_rate * (it + 1) / cfg.warmup_iters", "cfg.learning_rate * it / cfg.warmup_iters",
             "optimizer"),
    Mutation("the-last-step-count", "memo/states/optim.py",
             "self.steps += k - 1 == self.model.states.in_order[-1]", "self.steps += 1", "optimizer"),
    # --- saved, exported ---
    Mutation("states-saved-as-another-ranks", "memo/states/optim.py",
             "first = [n * part if i == dim else 0 for i, n in enumerate(p.shape)]",
             "first = [n * (tp.size - 1 - part) if i == dim else 0 for i, n in enumerate(p.shape)]",
             "resume", "--tp=2 --subsequences=1"),
    Mutation("moments-not-restored", "memo/states/optim.py",
             "return dict(params=self.master, exp_avg=self.exp_avg, exp_avg_sq=self.exp_avg_sq)",
             "return dict(params=self.master, exp_avg=self.exp_avg_sq, exp_avg_sq=self.exp_avg_sq)",
             "optimizer resume"),
    Mutation("exported-pairs-not-turned", "memo/huggingface/weights.py",
             "stored[:, :w.R].unflatten(1, (2, -1)).transpose(1, 2)",
             "stored[:, :w.R].unflatten(1, (-1, 2))", "export", LLAMA,
             "convert_llama_weights_to_hf permute rotary"),
]


# --- the runner ---

def copy_tree(to: Path) -> None:
    """Copy the tracked files, as they lie in the working tree, into the folder `to`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def verified(tree: Path, keys: str, timeout_s: float = TIMEOUT_S) -> tuple[int | None, str, str]:
    """Verify a run with `keys` in a copy of the tree -> (exit code, None where it took longer than
    `timeout_s`; the check that found it; its words)."""
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
    command = [sys.executable, "-m", "memo.verify", *MODEL.split(), *keys.split(), "--json"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=tree, env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:  # with the ranks that it has started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for file in (out, err):
            file.seek(0)
        said, told = out.read(), [line for line in err.read().splitlines() if line.startswith("error: ")]
    if said:
        first = json.loads(said)["checks"][0]
        return code, first["check"], first["text"]
    words = told[-1].removeprefix("error: ") if told else ""
    return code, words.partition(":")[0].partition(",")[0], words


def verdict(mutation: Mutation, timeout_s: float = TIMEOUT_S) -> tuple[str, str]:
    """Verify a run in a copy that has the mutation -> ("found", "misled", "missed" or "not run"; in which
    words, or why it was not run)."""
    with tempfile.TemporaryDirectory(prefix="memo-mutation-") as folder:
        copy_tree(Path(folder))
        try:
            mutation.apply(Path(folder))
        except ValueError as e:
            return "not run", str(e)
        code, check, words = verified(Path(folder), mutation.keys, timeout_s)
    if code == WRONG:
        return "found" if check in mutation.checks.split() else "misled", f"{check}: {words}"
    if code == RIGHT:
        return "missed", f"all is right with {mutation.keys}"
    return "not run", f"no end within {timeout_s:g} s" if code is None else f"exit code {code}: {words}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named mutations, or all, and print a table -> the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {m.name: m for m in MUTATIONS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--out", help="a JSON file, to which verdicts are added")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"there is no mutation {unknown[0]}; there are {', '.join(known)}")
    found, names = 0, args.names or list(known)
    for name in names:
        start, mutation = time.monotonic(), known[name]
        word, what = verdict(mutation)
        found += word == "found"
        print(f"{name:38} {word:8} {time.monotonic() - start:4.0f} s  {what:.300}", flush=True)
        if args.out:
            path = Path(args.out)
            stored = json.loads(path.read_text()) if path.exists() else {}
            stored[name] = dict(file=mutation.file, keys=mutation.keys, verdict=word, words=what)
            path.write_text(json.dumps(stored, indent=1) + "\n")
    print(f"\n{found} of {len(names)} found")
    return 0 if found == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
