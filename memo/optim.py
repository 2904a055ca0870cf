"""AdamW over the flat buffers, sharded over the data ranks (ZeRO-1): fp32 master weights, decoupled weight decay on matrices
only, one global norm.

Every rank of mesh.data has all gradients of its part of the model, and the optimizer's states of its piece of each bucket:

    backward    as soon as a bucket's gradients are complete they are summed over the ranks, each getting its piece
    clip        what all tp ranks hold, and saw the gradients of their own tokens of, is summed over them; one global norm
    step        AdamW on the pieces, bucket by bucket; each goes to all ranks while the next is worked on
    forward     waits for a bucket where it is first needed

Source: ZeRO (arXiv 1910.02054), stage 1.
"""

from collections import namedtuple

import torch
from torch.optim.adamw import adamw

from memo.flat import Piece, boxes, joined, split_dim, views
from memo.tp import local

EPS = 1e-8
SUMMED = 2**10  # squares that are added up in fp32


def square_sum(flat):
    """fp64 sum of the squares of a flat fp32 tensor, within 1e-6: of pieces in fp32, of these in fp64. torch's norm of the
    whole reads 1% low at 100M elements on the CPU, whose long sums in fp32 lose what is small beside them."""
    rows = flat[:len(flat) // SUMMED * SUMMED].view(-1, SUMMED)
    norms = [torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(flat[rows.numel():])[None]]
    return torch.cat(norms).double().square().sum()


class Range(namedtuple("Range", "start end at")):
    """A part of the flat buffers that a rank owns, and where that begins in its shard."""

    @property
    def flat(self):
        return slice(self.start, self.end)

    @property
    def shard(self):
        return slice(self.at, self.at + self.end - self.start)


class Optimizer:
    """Owns this rank's shard of the fp32 master weights (the parameters themselves, where those are fp32 and whole) and of
    the two moments, flat, bucket behind bucket, on `cfg.optimizer_device`."""

    def __init__(self, model, cfg):
        self.model, self.cfg, data = model, cfg, model.mesh.data
        device = torch.device("cpu") if cfg.optimizer_device == "cpu" else model.device
        numel = model.params.numel() // data.size
        whole = data.size == 1 and model.params.dtype == torch.float32 and device == model.device
        self.master = model.params if whole else torch.zeros(numel, device=device)
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
        self.steps = torch.zeros((), device=device)
        self.own = []  # of each bucket, the Range that is this rank's
        for start, end in model.buckets:
            part = (end - start) // data.size
            self.own.append(Range(start + part * data.rank, start + part * (data.rank + 1), start // data.size))
        self.decays, self.counted, self.shared = [], [], []  # of each bucket, own ranges
        for k, (start, end) in enumerate(model.buckets):
            here = {name: p for name, p in model.layout.items() if start <= p.offset < end}
            shared = [(p.offset, p.end, True) for name, p in here.items() if split_dim(name) is None]
            split = [(p.offset, p.end, True) for name, p in here.items() if split_dim(name) is not None]
            self.decays.append(self.within(k, joined((p.offset, p.end, len(p.shape) > 1) for p in here.values())))
            self.counted.append(self.within(k, joined(split + shared * (model.mesh.tp.rank == 0))))  # once in a tp group
            self.shared.append(self.within(k, joined(shared)))
        self.reducing = []

    def within(self, k, ranges):
        """[(Range, what)]: this rank's part of bucket k in each of [(start, end, what)], where there is any."""
        own = self.own[k]
        cut = [(max(start, own.start), min(end, own.end), what) for start, end, what in ranges]
        return [(Range(a, b, own.at + a - own.start), what) for a, b, what in cut if a < b]

    def shard_of(self, p):
        """[Range]: this rank's part of a parameter, none or one."""
        return [r for k in range(len(self.own)) for r, _ in self.within(k, [(p.offset, p.end, None)])]

    def load(self, named_tensors):
        """Copies this rank's part of (name, whole fp32 tensor) pairs into the master weights and the model's parameters."""
        model = self.model
        mine = views(model.layout, model.params)
        for name, tensor in named_tensors:
            part, p = local(name, tensor, model.mesh.tp), model.layout[name]
            mine[name].copy_(part)
            for r in self.shard_of(p):
                self.master[r.shard] = part.reshape(-1)[r.start - p.offset:r.end - p.offset]

    def states(self):
        return dict(params=self.master, exp_avg=self.exp_avg, exp_avg_sq=self.exp_avg_sq)

    def pieces(self, saved=False):
        """[Piece]: what this rank holds of every parameter's states, as views; with `saved` only what it is to save, so that
        nothing is saved twice."""
        made, tp = [], self.model.mesh.tp
        for name, p in self.model.layout.items():
            dim, shape = split_dim(name), self.model.full_shapes[name]
            if saved and dim is None and tp.rank > 0:
                continue
            first = [n * tp.rank if i == dim else 0 for i, n in enumerate(p.shape)]
            for r in self.shard_of(p):
                at = r.at
                for row, column, rows, columns in boxes(r.start - p.offset, r.end - p.offset, p.shape[-1]):
                    offsets = [a + b for a, b in zip(first, (row, column)[-len(shape):], strict=True)]
                    for prefix, flat in self.states().items():
                        box = flat[at:at + rows * columns].view((rows, columns)[-len(shape):])
                        made.append(Piece(f"{prefix}.{name}", shape, tuple(offsets), box))
                    at += rows * columns
        return made

    def reduce(self, k):
        """Starts to sum the gradients of bucket k, which are complete on this rank, over the data ranks."""
        model, own, (start, end) = self.model, self.own[k], self.model.buckets[k]
        self.reducing.append(model.mesh.data.start_scatter_sum(model.grads[start:end], model.grads[own.flat]))

    def clip(self, max_norm):
        """Completes the gradients, and scales them to a global norm of at most `max_norm` (0: leaves them); returns the norm
        before."""
        grads, tp, world = self.model.grads, self.model.mesh.tp, self.model.mesh.world
        for works in self.reducing:
            works.wait()
        self.reducing.clear()
        for r, _ in [r for bucket in self.shared for r in bucket]:
            tp.sum(grads[r.flat])
        squares = [square_sum(grads[r.flat]) for bucket in self.counted for r, _ in bucket]
        square = torch.stack([*squares, grads.new_zeros((), dtype=torch.float64)]).sum()
        norm = world.sum(square).sqrt().float()
        if max_norm > 0:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for own in self.own:
                grads[own.flat].mul_(scale)
        return norm

    def step(self, lr):
        """One AdamW step at learning rate `lr`; the model's parameters follow, and its gradients are zero again."""
        cfg, grads = self.cfg, self.model.grads
        for k, ranges in enumerate(self.decays):
            for r, decays in ranges:
                w, m, v = ([t[r.shard]] for t in self.states().values())
                adamw(w, [grads[r.flat].to(self.master.device)], m, v, [], [self.steps.clone()], fused=True,
                      amsgrad=False, beta1=cfg.beta1, beta2=cfg.beta2, lr=lr, eps=EPS, maximize=False,
                      weight_decay=cfg.weight_decay if decays else 0.0)
            self.send(k)
        self.steps += 1
        grads.zero_()

    def send(self, k):
        """Sends this rank's part of bucket k's master weights on its way into the parameters of all data ranks."""
        model, own = self.model, self.own[k]
        part = model.params[own.flat]
        if self.master is not model.params:
            part.copy_(self.master[own.shard])
        model.arriving[k] = model.mesh.data.start_gather(part, model.params[slice(*model.buckets[k])])

    def publish(self):
        """Makes the model's parameters those of the master weights."""
        for k in range(len(self.own)):
            self.send(k)
            self.model.arrive(k)
