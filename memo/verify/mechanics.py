"""How a run is made to show what it does: messages of known numbers, small pieces of rows, placements of
activations, slow streams, the outputs of single tokens."""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from memo.config import layer
from memo.config.config import Config
from memo.config.layer import Tensor, groups_of
from memo.config.layout import Layout, subsequence_lengths
from memo.decide.where import Room, place_rows, problem_of, ways_of
from memo.kernels.attention import for_any_mask, resolve_attention
from memo.kernels.bands import Band
from memo.layer.tiles import Batch
from memo.memory.placement import Placement, rows
from memo.planner.allocator import NoArena
from memo.run.reserve import plan_memory
from memo.schedule.execute import Work
from memo.schedule.step import Step
from memo.states.passes import Model
from memo.system.axis import Axis
from memo.verify.compare import relative

SLOW_S = 0.03  # longer than a unit of a cut run computes


def message_faults(host: Axis) -> list[str]:
    """Sends known numbers by each kind of message -> what came otherwise, in words."""
    n, me = host.size, host.rank
    every = [torch.arange(6.0 * n).view(n, 6) + 100 * rank + 1 for rank in range(n)]
    total, owner, own = torch.stack(every).sum(0), n - 1, every[me].clone
    came = dict(
        gather=(host.gather(own()), torch.stack(every)), sum=(host.sum(own()), total),
        scatter_sum=(host.scatter_sum(own()), total[me]),
        exchange=(host.exchange(own()), torch.stack([theirs[me] for theirs in every])),
        **{f"shift by {by}": (host.shift(own(), by=by).wait()[0], every[me - by])
           for by in sorted({1, n // 2 or 1})},
        broadcast=(host.start_broadcast(own(), owner).wait(), every[owner]),
        max=(torch.tensor(host.max(float(me), -float(me))), torch.tensor([n - 1.0, 0.0])))
    reduced = host.start_reduce(own(), owner).wait()
    came |= dict(reduce=(reduced, total)) if me == owner else {}
    return [f"a message of kind {kind} brings other numbers than it must (rank {me})"
            for kind, (got, want) in came.items() if not torch.equal(got, want)]


def lower_thresholds(cfg: Config, split: int) -> None:
    """Makes pieces of rows and groups of heads so small that a cut run has several, as long ones have."""
    elements = cfg.batch_size * cfg.block_size * cfg.head_width * cfg.n_head // (cfg.tp * cfg.cp)
    lowered = dict(CHUNK_ROWS=256, METP_ROWS=256, SPLIT_ROWS=split, GROUP_ELEMENTS=elements // 2,
                   METP_ELEMENTS=elements // 4, pieces_at_once=lambda axis, device: 1 + (axis.size > 1))
    for module in [vars(module) for name, module in sys.modules.items() if name.startswith("memo.")]:
        module |= {name: lowered[name] for name in module.keys() & lowered.keys()}


def uneven(p: Placement, tensors: dict[str, Tensor]) -> Placement:
    """Has other rows of each group of tensors survive."""
    split, kept = layer.SPLIT_ROWS, dict(p.kept)
    for j, names in enumerate(groups_of(tensors).values()):
        part = (j % 3) / 3
        n = tuple(rows(part, n, split) for n in p.lengths) if p.several else rows(
            part, p.n_rows, max(1, min(split, p.n_rows // 16)))
        kept |= dict.fromkeys(names, n)
    return replace(p, kept=kept)


def placements(cfg: Layout, itemsize: int) -> Iterator[tuple[str, Placement, str]]:
    """Yields (mode, where it places activations, which streams are slow, and whether memory is planned): keep
    first."""
    alpha = 0.5 if cfg.alpha == "auto" else cfg.alpha

    def placed(mode: str, alpha: float | str = "auto", **way: str) -> tuple[Placement, dict[str, Tensor]]:
        asked = Layout.of(cfg, activation=mode, alpha=alpha, stage=cfg.stage, shares=cfg.shares,
                          leads=cfg.leads)
        problem = problem_of(asked, itemsize, None, Room(2**34, cpu=True), **way)
        return place_rows(asked, problem)[0], problem.tensors
    for mode in ("keep", "recompute"):
        yield mode, placed(mode)[0], ""
    swapped, tensors = placed("swap")
    yield "swap, slow copies", swapped, "copies"
    if swapped.several:  # SPPO's: a part of what is swapped stays on the device
        stays = {name: tuple(n // 2 for n in swapped.lengths) for name in tensors
                 if name != "x" and not swapped.apart(name)}
        yield "swap, half stays", replace(swapped, stays=stays), ""
    every = [ways_of(replace(cfg, activation="memo", stage=stage)) for stage in range(cfg.pp)]
    ways, most = every[cfg.stage], max(every, key=len)
    p, tensors = placed("memo", alpha, **ways[0])
    for more, how in ((", slow copies", "plan copies"), (", slow compute", "compute")):
        yield f"memo at alpha {alpha}{more}", p, how
    yield "memo at an alpha for each tensor", uneven(p, tensors), ""
    for i, told in enumerate(most[1:], 1):  # stages have others: all place something at the same time
        words = ", ".join(f"{what} {how}" for what, how in told.items())
        yield f"memo at alpha {alpha}, {words}", placed("memo", alpha, **ways[i % len(ways)])[0], ""


def place(model: Model, cfg: Layout, placement: Placement, how: str) -> None:
    """Takes memory as a placement says, until the next one. `how`: see placements()."""
    vars(model).pop("work_of", None)
    model.arena.close()
    model.arena = NoArena()
    model.reserve(cfg.batch_size, cfg.block_size // cfg.cp, placement)
    if "plan" in how:
        plan_memory(cfg, model)
    if how:
        # a GPU's stream pauses by itself: the host has launched all of it before
        pause = partial(torch.cuda._sleep, 2 * 10**7) if model.device.type == "cuda" else partial(
            time.sleep, SLOW_S)
        vars(model)["work_of"] = partial(slowed, model.work_of, how == "compute", pause)


def slowed(work_of: Callable[..., Work], compute: bool, pause: Callable[[], object], step: Step,
           **more: object) -> Work:
    """Finds what a step does, behind a pause where it computes, or where it does not."""
    label, call, *arguments = work_of(step, **more)
    if step.stream == "replicas" or step.computes != compute:
        return label, call, *arguments

    def late(*arguments: object) -> object:
        pause()
        return call(*arguments)
    return label, late, *arguments


def outputs(model: Model, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Lists by subsequences (token, sequence, last layer's output) of own rows of (B, T) tokens; nothing of a
    stage that has no head."""
    tp, B, found = model.mesh.weights, len(tokens), []
    places, tokens = model.order.positions(), tokens.to(model.device).contiguous()
    for i, x in model.hidden(tokens, lambda i, x: (i, x.clone().flatten(0, -2).cpu())):
        of = torch.arange(B).repeat_interleave(len(places[i]))
        found.append((places[i].repeat(B)[tp.rank::tp.size], of[tp.rank::tp.size], x))
    return found


def influence_faults(model: Model, batch: Batch, rank: int) -> list[str]:
    """Changes single tokens of a batch's first sequence -> outputs that change but must not, or do not but
    must, in words."""
    S, own, faults = model.cfg.block_size, torch.cat(model.order.positions()), list[str]()
    model.meet(batch.packed)
    ends = torch.tensor(batch.packed.ends[0] if batch.packed else [S])
    of_token = torch.bucketize(torch.arange(S), ends, right=True)  # the number of its document
    of_token[ends[-1]:] = -torch.arange(ends[-1], S)  # padding sees itself
    before = outputs(model, batch.tokens)
    for place in sorted({0, S // 2, S - 2, int(ends[0]) % S}):
        changed = batch.tokens.clone()
        changed[0, own == place] = (changed[0, own == place] + 1) % model.cfg.vocab_size
        for (at, of, old), (_, _, new) in zip(before, outputs(model, changed), strict=True):
            sees = (of == 0) & (at >= place) & (of_token[at] == of_token[place])
            moved = (old != new).any(1)
            if all(W := [kind.window for kind in model.cfg.kinds]):  # each layer passes on what it sees;
                sees &= (at < place + W[0]) | (moved & (at <= place + sum(W) - len(W)))  # later bits may stay
            faults += [f"token {place} is changed, and the output at {at[row].item()} of sequence "
                       f"{of[row].item()}, which {'sees' if sees[row] else 'must not see'} it, "
                       f"{'changes' if moved[row] else 'does not'} (rank {rank})"
                       for row in (moved != sees).nonzero().flatten()[:1].tolist()]
    return faults


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    causal: bool | Band) -> tuple[torch.Tensor, ...]:
    """Computes attention's (output (B, T, H, D), logsumexp (B, H, T)), all scores at once."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[3])
    if causal:
        n = len(scores[0, 0])
        left, right = causal if isinstance(causal, Band) else (n, 0)
        seen = torch.ones(n, n).triu(-left).tril(right if right >= 0 else n)
        scores = scores.masked_fill(seen == 0, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def kernel_faults(cfg: Config, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Compares the run's attention kernel with fp64 at its own heads, odd lengths, and scores far below 0,
    where a sum of exponentials would be 0 -> faults, in words."""
    # roundings of q, k, v, probabilities and results in 8 bits, or 24
    kernel = for_any_mask(resolve_attention(cfg.attention, device, dtype, cfg.head_width,
                                            window=cfg.window > 0))
    bound, faults = 2e-2 if dtype == torch.bfloat16 else 1e-5, list[str]()
    heads, g = max(1, cfg.n_head // cfg.held_kv_heads), torch.Generator().manual_seed(cfg.seed)
    cases: list[tuple[int, int, bool | Band, int]] = [
        (257, 257, True, 0), (129, 385, False, 0), (131, 131, True, 150)]
    cases += [(n, n, band, 0) for n in (131, 400) for band in (Band(40, 0), Band(0, -1)) if cfg.window]
    for queries, keys, causal, low in cases:
        q, k, v, dout = (torch.randn(1, n, h, cfg.head_width, generator=g).to(device, dtype)
                         for n, h in ((queries, 2 * heads), (keys, 2), (keys, 2), (queries, 2 * heads)))
        if low:  # each product of a query and a key is -low * sqrt(D) or so
            side = math.sqrt(low / math.sqrt(cfg.head_width))
            q, k = q / 8 + side, k / 8 - side
        leaves = q_, k_, v_ = [t.double().cpu().requires_grad_() for t in (q, k, v)]
        exact = exact_attention(q_, k_, v_, causal)
        exact += torch.autograd.grad(exact[0], leaves, dout.double().cpu())
        out, lse = kernel.forward(q, k, v, causal)
        got = [out, lse, *kernel.backward(dout, q, k, v, out, lse, causal)]
        for name, one, right in zip(("output", "logsumexp", "dq", "dk", "dv"), got, exact, strict=True):
            # of far scores all keys weigh the same: differences of gradients nearly cancel
            error = relative(one.cpu(), right.detach()) if not (low and name in ("dq", "dk")) else 0.0
            # a score of -150 has an error of 1e-5 in fp32, and so has its exponential
            if not (error <= max(bound, 1e-6 * low) and one.isfinite().all()):
                within = " within a band" * isinstance(causal, Band)
                faults.append(f"attention={kernel.name}: {name} of {queries} queries, {keys} keys{within}, "
                              f"logsumexp near {lse.mean():.0f} is off by {error:.1e}, at most {bound:.0e}")
    return faults


def holders(cfg: Layout) -> list[tuple[int, int, int]]:
    """Lists of each token its subsequence, which of the chunks that are dealt out there and back it is in,
    and the rank of a ring that has it."""
    ranks = cfg.token_ranks
    return [(i, k, min(k, 2 * ranks - 1 - k)) for i, n in enumerate(subsequence_lengths(cfg))
            for k in range(2 * ranks) for _ in range(n // (2 * ranks))]


def hops_by_subsequences(cfg: Layout, window: int, ends: Sequence[Sequence[int]]) -> list[set[int]]:
    """Finds the hops of a ring in a batch whose documents end at `ends`, of each subsequence: the distances
    between ranks with tokens of one document, of which the later ones are in that subsequence and see some of
    the others through the layer's `window`."""
    window, ranks, places = window or cfg.block_size, cfg.token_ranks, holders(cfg)
    needed = [set[int]() for _ in subsequence_lengths(cfg)]
    for of in ends:
        for first, end in pairwise((0, *of)):
            last = {place: token for token, place in enumerate(places[first:end], first)}
            for n, ((i, _, rank), token) in enumerate(zip(last, [first, *last.values()], strict=False)):
                needed[i] |= {(rank - other) % ranks for (*_, other), seen in [*last.items()][:n]
                              if token + (n > 0) - seen < window}
    return [distances - {0} for distances in needed]


def halo_tokens(cfg: Layout, window: int, rank: int) -> list[Counter[int]]:
    """Counts what leaves a ring's rank for the queries of each subsequence: {distance: its tokens that a
    token of the subsequence on rank `rank` + distance sees through the window}."""
    places, found = holders(cfg), [Counter[int]() for _ in subsequence_lengths(cfg)]
    for token, (*_, holder) in enumerate(places):
        if holder == rank:
            seen_from = {(i, (other - rank) % cfg.token_ranks)
                         for i, _, other in places[token + 1:token + window]}
            for i, distance in seen_from:
                found[i][distance] += 1
    return found


def expected_bytes(cfg: Layout, batches: Sequence[Sequence[Sequence[int]]], shared: int,
                   split: dict[str, int], rank: int) -> dict[str, float]:
    """Computes {axis: bytes that a rank sends in a step's passes} with activation=keep, where there is a
    formula. `batches`: of each micro batch of this rank the ends of documents; `shared`: elements that a rank
    sums over tp ranks that hold the same; `split`: {name: elements} of what they share out in a layer;
    `rank`: of those that share the tokens."""
    if cfg.shares:  # stages that help send what others have
        return {}
    tp, cp, N, units = cfg.tp, cfg.cp, cfg.n_subsequences, len(cfg.layers) * len(batches)
    H, Hkv, heads = cfg.n_head // tp, cfg.held_kv_heads // tp, layer.group_heads(cfg, cfg.block_size)
    rows = cfg.batch_size * cfg.block_size // cp
    x, q, kv, lse = (4 * rows * width for width in (
        cfg.n_embd, H * cfg.head_width, 2 * cfg.held_kv_heads * cfg.head_width // tp, H))
    # keys go to each group of heads that reads them; of several subsequences they stay, or go once
    groups, ranks = max(1, cfg.n_head // cfg.held_kv_heads // heads) if N == 1 else 1, cfg.token_ranks
    found, in_layers = dict[str, float](), 10 * x  # 4 messages of x in a layer's forward, 6 in its backward
    # a backward makes keys again as they were before a norm; a norm of all heads sums a number a row, of q
    # and of k, once forward, twice backward
    in_layers += x * (cfg.qk_norm and N > 1) + 6 * 2 * 4 * rows * (cfg.qk_norm_over == "all")
    if cfg.metp and tp > 1:  # matrices come in both passes, and their gradients go back
        sent = dict(tp=0, hops=0)
        for name, elements in split.items():
            kind = name.partition("_")[0]
            sent["tp" if kind in ("q", "k", "v", "proj") else "hops"] += 3 * 4 * N * elements * (
                groups if kind in ("k", "v") else 1)
        in_layers, found["hops"] = sent["tp"], (tp - 1) / tp * units * sent["hops"]
    if tp > 1 and cfg.pp == 1 and not cfg.documents:  # with documents the head takes learned rows alone
        # 4 messages of x at the edges; sums of softmax and norm
        edges = len(batches) * (4 * x + 4 * rows * (tp + 2)) + 8 * shared
        found["tp"] = (tp - 1) / tp * (units * in_layers + edges)
    if cp > 1 and cfg.context_parallel == "ulysses":
        # q and out; q, out and their gradients: of each rank the heads of another; heads of keys that do not
        # suffice for all go to several; those of one piece go again in the backward
        turns = H // heads if N == 1 else 1
        copies = turns * math.lcm(max(1, Hkv // turns), cp) / Hkv
        found["cp"] = (cp - 1) / cp * units * (6 * q + (3 if N == 1 else 2) * copies * kv)
    elif cp > 1 or (cfg.metp and tp > 1):
        # keys and values go round, and in the backward again, with their gradients; of several subsequences
        # queries leave, outputs come back, and their gradients
        each = 3 * kv * groups if N == 1 else (q + q + lse) + (3 * q + lse + q)
        parts = [n / cfg.block_size for n in subsequence_lengths(cfg)]
        found["cp"] = 0.0
        for window, count in Counter(cfg.kinds[k].window for k in cfg.layers).items():
            own = (halo_bytes(cfg, window, rank, kv * groups) if window else
                   [[each * part] * ranks for part in parts])
            found["cp"] += count * sum(own[i][hop] for ends in batches for i, hops in enumerate(
                hops_by_subsequences(cfg, window, ends)) for hop in hops)
    return found


def halo_bytes(cfg: Layout, window: int, rank: int, kv: float) -> list[list[float]]:
    """Computes for each subsequence by distances the bytes that a rank of a ring sends of a halo: keys and
    values leave in both passes, and gradients of those that came go home. `kv`: bytes of all its own."""
    ranks = cfg.token_ranks
    tokens = [halo_tokens(cfg, window, holder) for holder in range(ranks)]
    return [[kv * ranks / cfg.block_size * (2 * tokens[rank][i][by] + tokens[(rank - by) % ranks][i][by])
             for by in range(ranks)] for i in range(cfg.n_subsequences)]
