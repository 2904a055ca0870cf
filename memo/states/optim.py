"""AdamW, sharded over the data ranks (ZeRO-1): fp32 master weights, weight decay of matrices, a global norm.

Every rank of mesh.replicas has all gradients of its part of the model, and the optimizer's states of its
piece of each bucket. memo/schedule/states.py says what happens when; Optimizer.work_of does its steps. Also
summed: pieces of a matrix that two stages hold, over both; of what several tp ranks hold, over these.
docs/states.md says what states=sharded (ZeRO-2 and 3) and states=host change. Source: arXiv 1910.02054."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch.optim.adamw import adamw

from memo.config.layout import Layout
from memo.errors import BadState
from memo.memory.flat import Location, Range, boxes, joined, shared_numel, staged_bytes
from memo.memory.parameters import Piece, bucket_views
from memo.memory.slab import HostSlab
from memo.parallel.tp import local
from memo.schedule.step import Moved, Op, Step
from memo.states.passes import Model
from memo.system.axis import Axis
from memo.system.launch import rank_name

EPS = 1e-8
SUMMED = 2**10  # squares that are added up in fp32, before fp64 takes over
CHUNK = 2**18  # elements: a save finds little free memory on the device


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Sums the squares of a flat fp32 tensor, fp64, within 1e-6: pieces in fp32, their sums in fp64. torch's
    norm of the whole is 1% low at 100M elements on the CPU: long sums lose small terms."""
    rows = flat[:len(flat) // SUMMED * SUMMED].view(-1, SUMMED)
    norms = [torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(flat[rows.numel():])[None]]
    return torch.cat(norms).double().square().sum()


def sum_copies(tp: Axis, g: torch.Tensor, copies: int) -> torch.Tensor:
    """Sums gradients g, flat, in place over the tp ranks that hold the same, so many neighbours -> the sum of
    squares of all that these ranks hold, once. A message is of all parts: a rank has zeros for others'."""
    if copies == tp.size:
        return square_sum(tp.sum(g))
    squares = torch.zeros((), dtype=torch.float64, device=g.device)
    for own in g.split(CHUNK):
        every = own.new_zeros(tp.size // copies, len(own))
        mine = every[tp.rank // copies].copy_(own)
        squares += square_sum(tp.sum(every).view(-1))
        own.copy_(mine)
    return squares


def digest(flat: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Hashes the bits of a flat tensor in `dtype`; no order of adding changes the number."""
    total: int | torch.Tensor = 0
    odd = torch.arange(1, 2 * min(CHUNK, len(flat)), 2, device=flat.device)
    for part in flat.split(CHUNK):
        bits = part.to(dtype).view(torch.int16 if dtype.itemsize == 2 else torch.int32)
        total = 31 * total + (bits * odd[:len(bits)]).sum()
    return int(total)


def adamw_step(weights: torch.Tensor, gradients: torch.Tensor, exp_avg: torch.Tensor,
               exp_avg_sq: torch.Tensor, steps: torch.Tensor, lr: float, betas: tuple[float, float],
               weight_decay: float, scale: torch.Tensor | None = None) -> None:
    """Takes the AdamW step after `steps` in place, on flat fp32 tensors. Gradients are divided by `scale`."""
    adamw([weights], [gradients], [exp_avg], [exp_avg_sq], [], [steps.clone()], fused=True, grad_scale=scale,
          amsgrad=False, beta1=betas[0], beta2=betas[1], lr=lr, eps=EPS, maximize=False,
          weight_decay=weight_decay)


class Staging:
    """Holds the host memory between the device and an optimizer on the host: `grads` (numel,) of one shard,
    fp32, come down, and `scale` (1,), their divisor; weights go up. One page-locked block serves both, but
    for layers that come again for another micro batch: weights go up from where their gradients came down.
    Errors: OutOfHostMemory. Source: ZeRO-Offload (arXiv 2101.06840)."""

    def __init__(self, model: Model, numel: int, pin: bool) -> None:
        self.dtype, self.apart = model.dtype, model.states.apart
        self.nbytes = staged_bytes(model.cfg, numel, model.micro_batches, model.dtype.itemsize)
        self.slab = HostSlab(self.nbytes, model.device, pin)
        self.grads, self.scale = self.slab.bytes[:4 * (numel + 1)].view(torch.float32).split((numel, 1))

    def weights(self, own: Range) -> torch.Tensor:
        """Views where the new parameters of a bucket's Range go up from."""
        first = self.grads.nbytes + 4 + self.dtype.itemsize * own.at if self.apart else 4 * own.at
        return self.slab.bytes[first:first + self.dtype.itemsize * (own.end - own.start)].view(self.dtype)


class Optimizer:
    """Owns this rank's shard of fp32 master weights and two moments, flat, on `cfg.optimizer_device`."""

    def __init__(self, model: Model, cfg: Layout) -> None:
        self.model, self.cfg, data = model, cfg, model.mesh.replicas
        on_host = cfg.optimizer_on_host
        device = torch.device("cpu") if on_host else model.device
        numel = model.buckets[-1][1] // data.size
        # parameters that are fp32 and whole are their own master weights
        in_place = data.size == 1 and model.dtype == torch.float32 and not on_host and not cfg.layers_come
        self.master = model.params if in_place else torch.zeros(numel, device=device)
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
        self.steps = torch.zeros((), device=device)
        self.staging = Staging(model, numel, cfg.pin_memory) if on_host else None
        self.copy = self.staging.slab.copy if self.staging else torch.Tensor.copy_  # (to, source)
        # of each bucket: what this rank owns; its parameters and its gradients on the device
        sizes = [(end - start) // data.size for start, end in model.buckets]
        self.own = [Range(start + n * data.rank, start + n * (data.rank + 1), start // data.size)
                    for n, (start, _) in zip(sizes, model.buckets, strict=True)]
        self.parts = [flat.chunk(data.size)[data.rank] for flat in model.bucket_params]
        self.grads = [flat.chunk(data.size)[data.rank] for flat in model.bucket_grads]
        self.coming = come = model.coming
        self.sums = list(self.grads)  # of each bucket where the sums of gradients lie
        self.ready = [self.master[own.shard] for own in self.own]  # and of what its parameters are made
        if self.staging is not None:
            self.sums = [self.staging.grads[own.shard] for own in self.own]
            self.ready = [*map(self.staging.weights, self.own)]
        elif come:
            numels = sizes[come.start:come.stop]
            self.sums[come.start:come.stop] = torch.zeros(sum(numels), device=device).split(numels)
        model.optimizer = self
        self.find_parts(on_host, model.mesh.weights.size)
        # of the matrix that the first stage and the last one hold: both share it out alike
        self.tied = self.shard_of(model.layout["wte"]) if cfg.ties_stages and "wte" in model.layout else []
        self.squares = torch.zeros(len(self.own), dtype=torch.float64, device=model.device)
        self.left: set[int] = set()  # the buckets of which gradients of this step have left the device
        self.max_norm = self.lr = 0.0  # of the step under way, like norm and scale
        self.norm, self.scale = (torch.zeros((), device=model.device) for _ in range(2))

    def find_parts(self, on_host: bool, tp: int) -> None:
        """Finds Ranges of each bucket: `decays`; `split` over tp ranks; `shared`, of which several of these
        hold the same, with how many."""
        self.decays: list[list[tuple[Range, int]]] = []
        self.split: list[list[Range]] = []
        self.shared: list[list[tuple[Range, torch.Tensor, int]]] = []
        # gradients leave for the host early; in `kept` those of shared parameters wait for clip()
        layout = self.model.layout
        self.kept = free = torch.zeros(shared_numel(layout, tp) if on_host else 0, device=self.model.device)
        for k in range(len(self.own)):
            ps = [(name, p) for name, p in layout.items() if p.bucket == k]
            self.decays.append(self.within(k, joined((p.offset, p.end, len(p.shape) > 1) for _, p in ps)))
            ranges = self.within(k, joined((p.offset, p.end, p.whole.copies(tp)) for name, p in ps
                                           if not self.elsewhere(name)))
            self.split.append([r for r, copies in ranges if copies == 1])
            self.shared.append([])
            for r, copies in [last for last in ranges if last[1] > 1]:
                n = r.end - r.start
                g, free = (free[:n], free[n:]) if on_host else (self.view(self.sums, k, r), free)
                self.shared[k].append((r, g, copies))

    def within(self, k: int, ranges: list[tuple[int, int, int]]) -> list[tuple[Range, int]]:
        """Cuts [(start, end, what)] to this rank's part of bucket k -> [(Range, what)] of those not empty."""
        own = self.own[k]
        cut = [(max(start, own.start), min(end, own.end), what) for start, end, what in ranges]
        return [(Range(a, b, own.at + a - own.start), what) for a, b, what in cut if a < b]

    def shard_of(self, p: Location) -> list[Range]:
        """Finds this rank's part of a parameter: a list of no Range or one."""
        return [r for r, _ in self.within(p.bucket, [(p.offset, p.end, False)])]

    def elsewhere(self, name: str) -> bool:
        """Says whether the first stage, which holds the same parameter, counts and saves it."""
        return self.cfg.ties_stages and name in ("wte", "wpe") and not self.cfg.has_embedding

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies this rank's part of (name, fp32 tensor) pairs to the master weights and the parameters."""
        model = self.model
        params = bucket_views(model.layout, model.buckets, model.bucket_params)
        for name, tensor in named_tensors:
            p = model.layout[name]
            part = local(tensor, p.whole, model.mesh.weights)
            if p.bucket not in self.coming:
                params[name].copy_(part)
            for r in self.shard_of(p):
                self.master[r.shard] = part.reshape(-1)[r.start - p.offset:r.end - p.offset]
        for k in self.coming:
            self.put(k)

    def states(self) -> dict[str, torch.Tensor]:
        return dict(params=self.master, exp_avg=self.exp_avg, exp_avg_sq=self.exp_avg_sq)

    def copies(self) -> Iterator[tuple[str, int]]:
        """Yields (name, digest) of what is held twice: parameters, their master weights, shared moments."""
        model, tp = self.model, self.model.mesh.weights
        params = bucket_views(model.layout, model.buckets, model.bucket_params)
        for name, p in model.layout.items():
            copies = p.whole.copies(tp.size)
            first = tp.rank - tp.rank % copies  # of the ranks that hold the same
            part = name if copies == tp.size else f"{name} of tp rank {first}"
            if name == "wpe" and self.elsewhere(name):  # nobody reads it
                continue
            stays = p.bucket not in self.coming
            if stays and model.mesh.host.size > 1:
                yield part, digest(params[name].view(-1), model.dtype)
            for r in self.shard_of(p):
                a, b = r.start - p.offset, r.end - p.offset
                if stays and self.staging is None and self.master is not model.params:
                    for flat in (params[name].view(-1)[a:b], self.master[r.shard]):
                        yield f"{part}[{a}:{b}] and its master weights", digest(flat, model.dtype)
                if copies > 1 or (name == "wte" and self.cfg.ties_stages):
                    for prefix, flat in self.states().items():
                        yield f"{prefix}.{part}[{a}:{b}]", digest(flat[r.shard])

    def check_copies(self) -> None:
        """Compares all ranks' copies. Errors: BadState, on all ranks: those of one name are not the same."""
        host = self.model.mesh.host
        holders: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for where, pairs in host.objects((rank_name(host.rank), [*self.copies()])):
            for name, value in pairs:
                holders[name][value].append(where)
        for name, values in holders.items():
            if len(values) > 1:
                odd, *_, usual = sorted(reversed(values.values()), key=len)
                where = " and ".join(dict.fromkeys((odd[0], usual[0])))
                raise BadState(f"{where}: different values of {name}, which must be the same: memory or a "
                               "message has failed; this state is not saved, what was saved before is whole")

    def pieces(self, saved: bool = False) -> list[Piece]:
        """Lists views of this rank's states, after a step; `saved`, on all ranks: checked, nothing twice."""
        self.model.settle()
        if saved:
            self.check_copies()
        pieces, tp = [], self.model.mesh.weights
        for name, p in self.model.layout.items():
            dim, shape = p.whole.split_dim, p.whole.shape
            part, copy = divmod(tp.rank, p.whole.copies(tp.size))
            if saved and (copy > 0 or self.elsewhere(name)):
                continue
            first = [n * part if i == dim else 0 for i, n in enumerate(p.shape)]
            for r in self.shard_of(p):
                at = r.at
                for row, column, rows, columns in boxes(r.start - p.offset, r.end - p.offset, p.shape[-1]):
                    offsets = [a + b for a, b in zip(first, (row, column)[-len(shape):], strict=True)]
                    for prefix, flat in self.states().items():
                        box = flat[at:at + rows * columns].view((rows, columns)[-len(shape):])
                        pieces.append(Piece(f"{prefix}.{name}", shape, tuple(offsets), box))
                    at += rows * columns
        return pieces

    def view(self, tensors: list[torch.Tensor], k: int, r: Range) -> torch.Tensor:
        """Cuts Range r out of the k-th of `tensors`, each of which is what this rank owns of a bucket."""
        return tensors[k][r.start - self.own[k].start:r.end - self.own[k].start]

    # --- steps of the schedule: memo/schedule/states.py, and of layers that come program.py ---

    def work_of(self, step: Step) -> tuple:
        """Finds (function, arguments...) of a step that moves gradients or parameters, or makes new ones."""
        k = step.unit.layer + 1
        match step.op, step.moved:
            case Op.REDUCE, _:  # of the data ranks' gradients, a piece to each
                return self.model.mesh.replicas.start_scatter_sum, self.model.bucket_grads[k], self.grads[k]
            case Op.GATHER, _:
                return self.model.mesh.replicas.start_gather, self.parts[k], self.model.bucket_params[k]
            case Op.PREFETCH, Moved.WEIGHTS:
                return self.bring_weights, k
            case Op.PREFETCH, _:
                return self.bring_sums, k, k in self.left  # not those of the step before
            case Op.OFFLOAD, Moved.SCALE:
                return self.bring_scale,
            case Op.OFFLOAD, _:
                self.left.add(k)
                return self.leave, k
            case Op.CLIP, _:
                return self.take_norm, self.max_norm
            case (Op.ADAMW | Op.HOST_ADAMW), _:
                scale = self.scale if self.staging is None else self.staging.scale[0]
                return self.step_bucket, k, self.lr, scale if self.max_norm > 0 else None
        raise ValueError(f"{step} is not the optimizer's")

    def bring_weights(self, k: int) -> None:
        """Copies master weights to this rank's part of bucket k; gathers the rest where the bucket comes."""
        self.copy(self.parts[k], self.ready[k])
        if k in self.coming:
            self.model.mesh.shards.start_gather(self.parts[k], self.model.bucket_params[k]).wait()

    def bring_sums(self, k: int, there: bool) -> None:
        """Adds what earlier micro batches have left, if it is `there`, to bucket k's zero gradients."""
        if there:
            self.copy(self.grads[k], self.sums[k])

    def leave(self, k: int) -> None:
        """Takes this rank's sums of bucket k's gradients from their place on the device, and zeroes that."""
        self.complete(k)
        for r, g, _ in self.shared[k] if self.staging is not None else ():
            g.copy_(self.view(self.grads, k, r))
        self.copy(self.sums[k], self.grads[k])
        self.model.bucket_grads[k].zero_()

    def complete(self, k: int) -> None:
        """Adds another stage's gradients of the same matrix to bucket k's, and notes what the norm needs."""
        for r in self.tied if k == 0 else ():  # both ends get the same bits, and step alike
            self.model.mesh.tied.sum(self.view(self.grads, 0, r))
        square = self.squares[k].zero_()
        for r in self.split[k]:
            square += square_sum(self.view(self.grads, k, r))

    def bring_scale(self) -> None:
        """Copies `scale` to the host, and the gradients of what all tp ranks hold."""
        assert self.staging is not None
        for r, g, _ in (last for shared in self.shared for last in shared):
            self.copy(self.staging.grads[r.shard], g)
        self.copy(self.staging.scale, self.scale)

    # --- the end of a step ---

    def clip(self, max_norm: float) -> torch.Tensor:
        """Completes the gradients -> their norm. step() scales them to `max_norm` at most (0: not at all)."""
        states = self.model.states
        assert self.model.complete or not (states.reduces or states.on_host), "backward(last=True) is missing"
        self.max_norm = max_norm
        self.model.follow(self.model.swap.passes.clip)
        self.left.clear()
        return self.norm.clone()

    def take_norm(self, max_norm: float) -> None:
        """Makes `norm` that of all gradients, and `scale` what they are to be divided by."""
        tp, world = self.model.mesh.weights, self.model.mesh.world
        if self.staging is None:
            for k in reversed(range(len(self.own))):
                if k not in self.coming:
                    self.complete(k)
        squares = [self.squares]
        for _, g, copies in (last for shared in self.shared for last in shared):
            square = sum_copies(tp, g, copies)
            if tp.rank == 0:  # once in a tp group
                squares.append(square[None])
        self.norm.copy_(world.sum(torch.cat(squares).sum()).sqrt())
        if max_norm > 0:
            self.scale.copy_(((self.norm + 1e-6) / max_norm).clamp(min=1.0))

    def step(self, lr: float) -> None:
        """Steps AdamW; parameters follow, gradients are zero. On the host it may still be under way."""
        self.lr = lr
        self.model.follow(self.model.swap.passes.update)

    def step_bucket(self, k: int, lr: float, scale: torch.Tensor | None) -> None:
        """Takes the step of bucket k. `scale`: what its gradients are divided by, where they are clipped."""
        cfg = self.cfg
        for r, decays in self.decays[k]:
            w, m, v = (t[r.shard] for t in self.states().values())
            adamw_step(w, self.view(self.sums, k, r), m, v, self.steps, lr, (cfg.beta1, cfg.beta2),
                       cfg.weight_decay if decays else 0.0, scale)
        self.steps += k - 1 == self.model.states.in_order[-1]  # the last one
        self.put(k)
        if self.staging is None and k not in self.coming:
            self.model.bucket_grads[k].zero_()

    def put(self, k: int) -> None:
        """Copies bucket k's master weights to its parameters, or to where these come from."""
        if self.staging is not None:
            self.ready[k].copy_(self.master[self.own[k].shard])
        elif k not in self.coming and self.master is not self.model.params:
            self.parts[k].copy_(self.ready[k])

    def publish(self) -> None:
        """Makes the model's parameters those of the master weights."""
        for k in range(len(self.own)):
            self.put(k)
            if k not in self.coming:
                if self.staging is not None:
                    self.bring_weights(k)
                self.model.mesh.replicas.start_gather(self.parts[k], self.model.bucket_params[k]).wait()
