"""The checks of a cut run, in the order in which a fault is looked for. What memo computes is on one side; on
the other are memo/verify/reference.py in fp64, numpy over train.bin, and formulas of this folder.

A finding that is wrong ends the checks: what comes later would only say so again."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

import train
from memo.config.config import Config
from memo.config.keys import Keys
from memo.config.layout import Layout
from memo.decide.pipeline import even_shares
from memo.memory.flat import model_parameters
from memo.parallel.mesh import open_lanes
from memo.system.axis import Axis
from memo.verify import mechanics, training
from memo.verify.compare import Finding, factor_words, largest, none_of, place_of, relative, within, worst_of
from memo.verify.ranks import Told
from memo.verify.reference import Reference
from memo.verify.shrink import PLAIN, UNIT_ROWS, UNPLANNED, Cut, most_pieces
from memo.verify.steps import Opened, Part, Read, Tensors, make_data, together, weights

# Relative bounds. fp32 has 24 bits, 6e-8: sums of a few thousand products err by 1e-6, layers by a few
GRADIENT, LOSS = 1e-5, 2e-6
# of one process. In front of a softmax a gradient is the sum of what differs from its mean over all keys: the
# more layers have mixed the tokens, the less differs. q, k of 8 layers were off by 1.1e-5, all else by 2.3e-6
FROM_FP64 = {"gradients of q and k": 2e-5, "other gradients": 5e-6}
# bf16 has 8 bits, 4e-3: each of some ten roundings on the way to a gradient adds, e4m3's 6e-2 more so
LOW = dict(bf16=(5e-2, 2e-3), fp8=(0.4, 5e-3))  # of gradients, of the loss: bench/results/verify_fuzz.json
# moments are linear in gradients and their squares; a step divides by a root, so that signs of noise count
STATES = dict(exp_avg=1e-4, exp_avg_sq=1e-4, params=2e-3)
SHOWN = dict(loss=1e-4, grad_norm=1e-3, lr=1e-9, val_loss=1e-4)  # of three steps
NEAR_LN_V = 0.3  # nats: logits of random weights are not all 0


class Over(Exception):
    """Tells that a finding was wrong."""


class Checks:
    """Runs the checks on a rank. `asked`: the run's own config."""

    def __init__(self, asked: Config, cut: Cut, host: Axis, told: Told) -> None:
        cfg = cut.cfg
        self.asked, self.low, self.split, self.host, self.told = asked, cut.low, cut.split, host, told
        self.folder, self.first, self.failed = told.folder, host.rank == 0, False
        self.cuda = cfg.device == "cuda"  # where kernels have a noise of their own
        self.degrees = dict(tp=cfg.tp, cp=cfg.cp, pp=cfg.pp, dp=host.size // (cfg.tp * cfg.cp * cfg.pp))
        self.micros = cfg.micro_batches(self.degrees["dp"])
        self.cfg = replace(cfg, dataset=str(self.folder / "data"), gradient_accumulation_steps=self.micros)
        self.plain = Layout.of(replace(self.cfg, **PLAIN))
        self.whole = Layout.whole(self.cfg)
        self.copies = {name: p.copies(cfg.tp) for name, p in model_parameters(self.whole).items()}
        self.split_dims = {name: p.split_dim if self.copies[name] == 1 else None
                           for name, p in model_parameters(self.whole).items()}
        self.weights = weights(self.plain)
        # where N is left to the run, it is verified with 1 and with several
        self.usual, self.small = (Keys(subsequences=n) if cfg.subsequences == "auto" else {}
                                  for n in (1, most_pieces(cfg, cfg.tp * cfg.cp)))
        self.loss = self.norm = self.clip = 0.0  # in fp64, of the first step
        self.exact, self.wanted = Tensors(), Tensors()  # its gradients: in fp64, of one plain process
        self.reads = list[Read]()  # what this process has read
        self.model: Reference  # of the first rank, with the gradients of the first step

    def run(self) -> None:
        """Runs all checks, up to the first that is wrong."""
        try:
            if self.first:
                make_data(self.folder / "data", self.cfg, 2 * self.micros * self.cfg.batch_size)
            for check in (self.parts_alone, self.one_process, self.as_usual, self.in_small_pieces,
                          self.lower_precision):
                check()
            self.stage("end")
        except Over:
            pass

    # --- what all checks need ---

    def say(self, *findings: Finding) -> None:
        for found in findings if self.first else ():
            self.told.say("found", found)
            self.failed |= not found.right

    def stage(self, check: str) -> None:
        """Begins a check, on all ranks. Errors: Over."""
        if self.first:
            self.told.say("stage", check)
        if any(self.told.share(self.failed)):
            raise Over

    def open(self, name: str, alone: bool = False, **keys: Any) -> Opened:
        """Opens a run of all ranks, or `alone` of the first, of one process."""
        host = Axis("host", line="all ranks") if alone else self.host
        cfg = replace(self.cfg, **PLAIN if alone else {}, grad_clip=self.clip)
        return Opened(replace(cfg, **keys), self.folder / name, host, self.weights, name == "as usual")

    def reference(self, weights: Tensors) -> Reference:
        """Makes the model in fp64."""
        return Reference(self.plain, torch.float64).load(weights.items())

    def gather(self, parts: list[Part], check: str, what: str) -> Tensors:
        """Puts all ranks' Parts together, on the first rank; {} on others, and where they do not fit."""
        every = self.told.share(parts)
        try:
            return together(self.whole, self.cfg.tp, every) if self.first else {}
        except ValueError as e:
            self.say(Finding(check, False, f"{what} of {e}"))
            return {}

    def faults(self, check: str, mine: list[str], what: str) -> None:
        """Says what all ranks have found."""
        self.say(none_of(check, [fault for theirs in self.told.share(mine) for fault in theirs], what))

    def compare(self, check: str, what: str, got: Tensors, want: Tensors, bound: float) -> None:
        if got:
            error, place, words = worst_of(got, want, self.degrees, self.split_dims)
            self.say(within(check, f"{what}, worst {place}", error, bound, f"gradient of {place} is {words}"))

    def compare_number(self, check: str, what: str, got: float, want: float, bound: float) -> None:
        self.say(within(check, what, abs(got - want) / max(abs(want), 1e-30), bound,
                        f"{what} is {factor_words(got, want, self.degrees)}: {got:.7g}, not {want:.7g}"))

    # --- one process against the reference ---

    def parts_alone(self) -> None:
        """Tries what all else rests on: attention's kernel at the run's own heads, messages."""
        self.stage("kernels")
        dtype = torch.bfloat16 if self.low.get("dtype") == "bfloat16" else torch.float32
        if self.first:
            asked = replace(self.asked, attention=self.low.get("attention", self.cfg.attention))
            self.say(none_of("kernels", mechanics.kernel_faults(asked, torch.device(self.cfg.device), dtype),
                             f"attention with heads of {self.asked.head_width}: odd lengths, far scores"))
        self.stage("messages")
        if self.host.size > 1:
            self.faults("messages", mechanics.message_faults(self.host), "all kinds bring what was sent")

    def one_process(self) -> None:
        """Compares one plain process with the reference in fp64, and finds what is dead in it."""
        self.stage("reference")
        drawn = Tensors(train.initial_weights(self.plain, 1, torch.device("cpu")))
        sums = {name: w.double().sum().item() for name, w in drawn.items()}
        odd = [f"rank {rank} draws other initial weights than rank 0"
               for rank, theirs in enumerate(self.told.share(sums)) if theirs != sums]
        self.say(none_of("alive", odd, "initial weights are the same on all ranks"))
        if self.first:
            opened = self.open("plain", alone=True)
            loss, norm = opened.step()
            self.wanted, self.reads = together(self.plain, 1, [opened.gradients()]), opened.reads
            opened.run.close()
            model, batches = self.reference(self.weights), [read.batch for read in self.reads]
            self.loss, self.model = training.mean_loss(model, batches), model
            self.exact = {name: g.clone() for name, g in model.gradients().items()}
            self.norm = math.sqrt(sum(g.square().sum().item() for g in self.exact.values()))
            for what, bound in FROM_FP64.items():
                some = {name: g for name, g in self.exact.items()
                        if (name.rpartition(".")[2][:2] in ("q_", "k_")) == what.endswith("q and k")}
                self.compare("reference", f"{what} of one process", self.wanted, some, bound)
            self.compare_number("reference", "the loss", loss, self.loss, LOSS)
            self.compare_number("reference", "the norm that clips", norm, self.norm, GRADIENT)
            dead = [f"gradient of {place_of(name)} is zero" for name, g in self.wanted.items() if not g.any()]
            self.say(none_of("alive", dead, f"gradients of {len(self.wanted)} parameters"))
            with torch.no_grad():
                first = training.mean_loss(self.reference(drawn), batches[:1])
            expected = math.log(self.cfg.vocab_size)
            self.say(within("alive", "first loss from ln V", abs(first - expected), NEAR_LN_V,
                            f"the first loss is {first:.4f}, far from ln V = {expected:.4f}"))
        self.clip = self.told.share(self.norm / 2 * (self.cfg.grad_clip > 0))[0]

    # --- layout ---

    def as_usual(self) -> None:
        """Checks the layout as it is: a step, memory, three steps of training."""
        opened = self.open("as usual", **self.usual)
        self.layout(opened, "as usual")
        opened.restart()
        self.memory(opened)
        self.three_steps(opened)
        opened.run.close()

    def in_small_pieces(self) -> None:
        """Checks the layout in pieces as small as a long run's are: a step, modes, influence."""
        mechanics.lower_thresholds(self.cfg, self.split)
        opened = self.open("in small pieces", **self.small)
        self.modes(opened)
        self.stage("influence")
        batch = train.batch(opened.run, "train", 0, 0)
        self.faults("influence", mechanics.influence_faults(opened.run.model, batch, self.host.rank),
                    "before a changed token all bits stay, behind it all rows change")
        opened.run.close()

    def layout(self, opened: Opened, name: str) -> tuple[tuple[float, float], list[Part]]:
        """Compares the first step with that of one plain process: loss, gradients, norm -> ((loss, norm),
        this rank's gradients)."""
        self.stage(f"layout, {name}")
        opened.reads.clear()
        loss, norm = opened.step()
        parts = opened.gradients()
        self.data(opened, {0})
        self.stage(f"layout, {name}")
        shown = self.told.share((loss, norm))
        got = self.gather(parts, "layout", "gradient")
        self.compare("layout", f"gradients {name}", got, self.wanted, GRADIENT)
        self.compare_number("layout", "the loss shown", loss, self.loss, 2 * LOSS)
        self.compare_number("layout", "the norm that clips", norm, self.norm, GRADIENT)
        self.say(none_of("layout", [f"ranks show other losses or norms: {shown}"] * (len({*shown}) > 1),
                         "all ranks show the same loss"))
        return (loss, norm), parts

    def memory(self, opened: Opened) -> None:
        """Compares the bytes of each region that the run holds with its own estimate."""
        held, run = Counter[str](), opened.run
        for line in run.lines:
            held[line.region] += line.device_bytes + line.host_bytes
        # the dry run takes a sequence for one document, whose attention has fewer temporary tensors
        known = held.keys() - {"transient"} if self.cfg.documents else held.keys()
        wanted = {name: sum(run.expected.bytes_of(name)) for name in known} if run.expected else {}
        # a trace does not know all that kernels request, and of a cut run little is much; a bound is larger
        faults = [f"region {name} holds {held[name]} bytes on rank {self.host.rank}, estimated at {want}"
                  for name, want in wanted.items() if held[name] - want > 2**16 + 0.05 * want
                  or (name != "transient" and want - held[name] > 2**16 + 0.05 * want)]
        self.faults("memory", faults, f"{len(wanted)} regions are as large as estimated")

    def data(self, opened: Opened, steps: set[int]) -> training.Batches:
        """Looks at what all ranks have read in `steps` -> it, whole, on the first rank."""
        self.stage("data")
        every = self.told.share((opened.tokens(), opened.reads))
        if not self.first:
            return {}
        S, copies = self.cfg.block_size, self.degrees["tp"] * self.degrees["pp"]
        whole, faults = training.put_together(every, S, copies)
        faults += [f"micro batch {read.key[2]} of step 0 is not that of one process" for read in self.reads
                   if read.key in whole and not torch.equal(read.batch, whole[read.key])]
        lack = {*product(steps, range(self.micros))} - {key[1:] for key in whole if key[0] == "train"}
        if not faults:
            look = partial(training.not_packed, S=S, pack=self.cfg.pack) if self.cfg.documents else (
                training.not_in_file)
            faults = look(whole, self.folder / "data")
        faults += [f"nobody reads micro batch {micro} of step {step}" for step, micro in sorted(lack)]
        self.say(none_of("data", faults, f"{len(whole)} batches are train.bin's, each position read once"))
        return whole

    # --- modes, precision ---

    def modes(self, opened: Opened) -> None:
        """Compares a step of each mode, two of one whose copies are slow, with those of keep, bit by bit; the
        first one of keep as the layout's."""
        kept = list[tuple[str, torch.Tensor]]()
        model, cfg = opened.run.model, opened.run.cfg
        cfg = replace(cfg, leads=model.cfg.leads)
        if cfg.msp:  # stages help each other as if it were faster, which it may not be here
            self.layout(opened, "in small pieces, with help")
            opened.restart()
            cfg = model.cfg = replace(cfg, msp=False, shares=even_shares(cfg))
            open_lanes(model.mesh, cfg.shares, model.device)
        for name, placement, how in mechanics.placements(cfg, model.dtype.itemsize):
            self.stage(f"modes, {name}")
            mechanics.place(model, cfg, placement, how)
            found = list[tuple[str, torch.Tensor]]()
            for it in range(1 + (name == "keep" or "plan" in how)):
                if it > 0:
                    opened.run.optimizer.step(self.cfg.learning_rate)
                model.mesh.take_sent_bytes()
                if kept or it > 0:
                    shown, own = opened.step(it), opened.gradients()
                else:
                    shown, own = self.layout(opened, "in small pieces")
                    self.sent(opened, cfg, own)
                found.append(("the loss", torch.tensor(shown)))
                found += [(f"gradient of {place_of(part[0])}", part[3]) for part in own]
            opened.restart()
            kept = kept or found
            worst = largest((relative(a, b) or 1e-12, where) for (where, a), (_, b) in
                            zip(found, kept, strict=False) if not torch.equal(a, b))
            (error, what), rank = max((of, rank) for rank, of in enumerate(self.told.share(worst)))
            bound = GRADIENT if self.cuda else 0.0 if self.split == UNIT_ROWS else 1e-6
            self.say(within("modes", f"{name}, from keep", error, bound,
                            f"{name}: {what} on rank {rank} is not that of activation=keep"))

    def sent(self, opened: Opened, cfg: Layout, own: list[Part]) -> None:
        """Compares the bytes that each axis has sent with a formula."""
        sent = opened.run.mesh.take_sent_bytes()
        shared = sum(len(part[3]) * self.cfg.tp // n for part in own if (n := self.copies[part[0]]) > 1)
        batches = [ends for (split, step, _), ends in opened.ends.items() if (split, step) == ("train", 0)]
        split = {name.removeprefix("h.0."): self.weights[name].numel()
                 for name, dim in self.split_dims.items() if dim is not None and name.startswith("h.0.")}
        rank = opened.run.mesh.tokens.rank
        expected = mechanics.expected_bytes(cfg, batches, shared, split, rank)
        self.faults("layout", [f"axis {name} has sent {factor_words(sent[name], want, self.degrees)}: "
                               f"{sent[name]} bytes, by the formula {want:.0f}"
                               for name, want in expected.items() if abs(sent[name] - want) > 1e-4 * want],
                    f"bytes that {', '.join(expected) or 'no axis'} sent are those of the formula")

    def lower_precision(self) -> None:
        """Compares the layout in the run's own precision with the reference."""
        if not self.low:
            return
        kind = "fp8" if self.low.get("matmul") == "fp8" else "bf16"
        self.stage(f"layout, in {kind}")
        opened = self.open(kind, **self.low, **self.usual | UNPLANNED)
        loss, _ = opened.step()
        got, before = self.gather(opened.gradients(), "layout", "gradient"), opened.copies()
        opened.run.optimizer.step(0.05)  # a step that bf16 can show
        opened.run.optimizer.pieces()
        self.faults("alive", [f"{place_of(name)} does not follow its fp32 weights on rank {self.host.rank}"
                              for (name, _), w in opened.copies().items() if torch.equal(w, before[name, _])],
                    f"parameters in {kind} follow their fp32 weights")
        self.compare("layout", f"gradients in {kind}", got, self.exact, LOW[kind][0])
        self.compare_number("layout", f"the loss in {kind}", loss, self.loss, LOW[kind][1])
        opened.run.close()

    # --- three steps of training, saved, resumed, exported ---

    def three_steps(self, opened: Opened) -> None:
        """Trains three steps; looks at what was read, at the states, at what is saved."""
        self.stage("optimizer")
        metrics = opened.train()
        whole = self.data(opened, {0, 1, 2})
        self.stage("optimizer")
        parts = opened.states()
        states = {what: self.gather(those, "alive", f"after three steps {what}")
                  for what, those in parts.items()}
        copies: dict[tuple[str, int], tuple[int, torch.Tensor]] = {}
        self.say(none_of("alive", [
            f"after three steps {place_of(key[0])} is not the same on ranks {copies[key][0]} and {rank}"
            for rank, held in enumerate(self.told.share(opened.copies())) for key, values in held.items()
            if not torch.equal(copies.setdefault(key, (rank, values))[1], values)],
            "ranks that hold the same have the same bits"))
        trained = self.optimizer(metrics, states, whole) if all(states.values()) else None
        self.resume(opened, metrics, parts)
        if trained:
            self.elsewhere(metrics[-1]["loss"], whole, trained)

    def optimizer(self, metrics: list[dict[str, Any]], states: Mapping[str, Tensors],
                  whole: training.Batches) -> Reference:
        """Compares three steps with AdamW in fp64 -> the model that it has trained."""
        model, faults = self.model, training.odd_rates(self.asked)
        trained = training.Trained(replace(self.cfg, grad_clip=self.clip), model, self.loss)
        for it, shown in enumerate(metrics):
            wanted = {}
            if shown.get("val_loss") is not None:
                with torch.no_grad():
                    wanted["val_loss"] = training.mean_loss(
                        model, [whole["val", 0, i] for i in range(self.cfg.eval_iters)])
            wanted |= trained.step(it, [whole["train", it, micro] for micro in range(self.micros)])
            faults += [f"{key} of step {it} is {factor_words(shown[key], want, self.degrees)}: "
                       f"{shown[key]:.7g}, not {want:.7g}" for key, want in wanted.items()
                       if not abs(shown[key] - want) <= SHOWN[key] * abs(want)]
        self.say(none_of("optimizer", faults, "losses, norms and learning rates of three steps"))
        for what, error, where in trained.errors(states):
            self.say(within("optimizer", f"{what} after three steps, worst {where}", error, STATES[what],
                            f"{what} of {where} after three steps is not that of AdamW"))
        still = [f"{place_of(name)} does not move in three steps" for name, w in self.weights.items()
                 if torch.equal(states["params"][name], w)]
        self.say(none_of("alive", still, "each parameter moves"))
        return model

    def resume(self, opened: Opened, metrics: list[dict[str, Any]], parts: dict[str, list[Part]]) -> None:
        """Resumes the last step, in this layout."""
        self.stage("resume")
        for to in ("resumed", "alone") if self.first else ():
            training.without_newest(opened.run.out, self.folder / to)
        self.stage("resume")
        again = self.open("resumed", **self.usual | UNPLANNED, init_from="resume")
        shown, other = again.train(), again.states()
        last = [read for read in opened.reads if read.key[1] == 2 or read.key[0] == "val"]
        same = [torch.equal(a.batch, b.batch) for a, b in zip(last[-len(again.reads):], again.reads,
                                                              strict=False)]
        self.faults("data", ["other data is read after a resume"] * (not all(same) or not same),
                    "the same is read after a resume")
        odd = [f"{what} of {place_of(a[0])} on rank {self.host.rank}" for what in parts
               for a, b in zip(parts[what], other[what], strict=True) if not torch.equal(a[3], b[3])]
        odd += ["the loss"] * ([m["loss"] for m in metrics[-1:]] != [m["loss"] for m in shown[-1:]])
        self.faults("resume", [f"{what} after a resume has other bits" for what in odd[:1]],
                    "all bits are the same")
        again.run.close()

    def elsewhere(self, loss: float, whole: training.Batches, trained: Reference) -> None:
        """Resumes in one plain process, and exports the run, on the first rank."""
        other = self.open("alone", alone=True, init_from="resume")
        shown = other.train()[-1]["loss"]
        odd = [f"micro batch {read.key[2]} of step {read.key[1]} is another one after a resume in one process"
               for read in other.reads if not torch.equal(read.batch, whole[read.key])]
        self.say(none_of("data", odd, "and in one process"))
        self.compare_number("resume", "the loss after a resume in one process", shown, loss, 10 * LOSS)
        other.run.close()
        tokens, targets, _ = whole["train", 0, 0]
        exported, why = training.exported_loss(self.folder / "alone", self.folder / "hf", tokens, targets)
        if exported is None:
            self.say(Finding("export", True, f"not compared: {why}"))
        else:
            self.compare_number("export", "the exported model's loss", exported,
                                trained(tokens, targets).item(), 1e-5)
