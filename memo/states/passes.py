"""A model: parameters, a transformer over them, and its passes, which the executor runs step by step.

The transformer (model.py) computes a layer, the embedding, the head, and knows of no stream, place or stage;
here each step of a program (memo/schedule/program.py) finds what it does."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from memo.config.config import Config
from memo.config.layer import layer_of
from memo.config.layout import Layout
from memo.config.settings import Kind, Rope
from memo.decide.where import all_kept, with_stream
from memo.errors import OutOfHostMemory, warn
from memo.layer.activations import Activations
from memo.layer.masks import documents
from memo.layer.tiles import Batch, Meeting, Packed, row_order
from memo.memory.buffers import Swap, of_sequences
from memo.memory.flat import bucket_numels
from memo.memory.parameters import Parameters
from memo.memory.placement import Placement
from memo.memory.slab import HostSlab, host_bytes
from memo.parallel.mesh import ALONE, Mesh
from memo.planner.allocator import Arena, NoArena
from memo.schedule.execute import Work
from memo.schedule.step import Content, Op, Part, Step, Unit
from memo.schedule.streams import Streams
from memo.schedule.waits import Schedule
from memo.states.transformer import LayerBlock, OptimizerSteps, Transformer
from memo.system.device import free_bytes, to_device


@dataclass
class Rows:
    """Holds what a batch's rows are, each list by subsequence: `turns`: the rotations of each Rope."""

    packed: Packed | None
    positions: list[torch.Tensor]
    turns: dict[Rope | None, list]
    tokens: Sequence[torch.Tensor] = ()
    targets: Sequence = ()


Make = Callable[[Layout, Parameters], Transformer]
SHARE = 0.8  # of a GPU's free memory, for the parameters of a model that is not trained


def place_on_host(model: Parameters) -> HostSlab:
    """Gives the parameters that come, of a model not trained, host memory. Errors: OutOfHostMemory."""
    buckets = [model.buckets[k] for k in model.coming]
    begin, end = buckets[0][0], buckets[-1][1]
    needed, free = model.dtype.itemsize * (end - begin), host_bytes("auto")
    if needed > free:
        raise OutOfHostMemory(f"the parameters that come need {needed / 2**30:.4g} GiB of host memory, "
                              f"{free / 2**30:.4g} GiB are free; try a larger --tp")
    slab = HostSlab(needed, model.device, model.cfg.pin_memory)
    flat = slab.bytes.view(model.dtype)
    for k, (start, stop) in zip(model.coming, buckets, strict=True):
        model.loaded[k] = flat[start - begin:stop - begin]
    return slab


class Model(Parameters):
    """Trains the transformer that `make` builds over this rank's parameters; without `grads` evaluates only.

    B, T, N: sequences, the T = S/cp tokens of each that this rank holds, and their rows N = B*T. `gpt`: the
    transformer. `shape`: (B, T) for which reserve() has taken memory, `swap`. `arena`: where transient
    tensors live. `optimizer`, or without one `slab`, host memory: from where parameters come.
    `complete`: whether the last backward has sent all gradients away.
    """

    def __init__(self, make: Make, cfg: Layout, device: torch.device, dtype: torch.dtype, grads: bool = True,
                 mesh: Mesh = ALONE) -> None:
        super().__init__(cfg, device, dtype, grads, mesh)
        self.make, self.gpt = make, make(cfg, self)
        self.guest_blocks: list[LayerBlock] = []  # of layers of other stages: a helper's two places
        self.shape = 0, 0
        self.rows = list[Rows]()  # of each batch that takes turns
        self.turn, self.led, self.leads = 0, False, False  # whose turn it is; has it, has the next one begun
        self.learned = 0
        self.taken: Swap | None = None
        self.complete = False
        self.optimizer: OptimizerSteps | None = None
        self.slab = place_on_host(self) if cfg.layers_come and not grads else None
        self.arena: Arena | NoArena = NoArena()

    @property
    def swap(self) -> Swap:
        """Finds the memory that reserve() has taken."""
        assert self.taken is not None
        return self.taken

    def reserve(self, B: int, T: int, placement: Placement | None = None,
                streams: Streams | None = None, pin: bool = True) -> None:
        """Takes the memory for the activations of a batch of (B, T), placed as `placement` says: without one,
        every layer keeps its own on the device. `streams`, `pin`: see Swap."""
        cfg, tp = self.cfg, self.mesh.weights
        self.settle()  # an error of a step under way is not to be lost
        self.close()  # free the old before taking the new
        placement = placement or all_kept(cfg, B, T)
        # parameters of all layers are equally long, in all stages
        self.taken = Swap(placement, layer_of(cfg), B, T, self.dtype, self.device, tp.size,
                          key_shape=self.gpt.key_shape, gradients=self.grads.numel() > 0,
                          params=self.bucket_params[1:-1], states=self.states, streams=streams, pin=pin)
        self.guest_blocks = [*map(self.gpt.block, self.swap.guest_weights, self.swap.guest_gradients)]
        self.shape = (B, T)
        self.order = row_order(cfg, T * cfg.cp, self.mesh)
        self.lengths, self.rows, self.led = [*map(len, self.order.positions())], [], False
        for turn, _ in enumerate(self.swap.placement.forward_order.sequences):
            self.meet(None, turn)

    def meet(self, packed: Packed | None, turn: int = 0) -> None:
        """Sets what the units' attention knows of a batch: the tokens that its rows are, and which of them
        meet: those of a sequence, or where documents are `packed`, those of a document."""
        cfg, tp, p, (B, _) = self.cfg, self.mesh.weights, self.swap.placement, self.shape
        order, begin = self.order, turn * p.subsequences
        # row b*T + t has the position in the whole sequence, or in its document, of this rank's t-th token
        if packed is None:
            positions = self.rows[0].positions if turn else [
                t.to(self.device).repeat(B) for t in order.positions()]
        else:
            order = replace(order, masks=[documents(of) for of in packed.ends])
            positions = self.by_subsequence(packed.positions)
        turns = self.rows[0].turns if turn and packed is None else {
            rope: [self.gpt.rotations_of(each, rope) for each in positions]
            for rope in {kind.rope: None for kind in cfg.kinds}}
        self.rows[turn:turn + 1] = [Rows(packed, positions, turns)]
        by_lengths = packed is not None and self.gpt.attention.takes_lengths
        place = partial(to_device, device=self.device, pin=cfg.pin_memory) if by_lengths else None

        @cache
        def meetings(window: int, i: int, first: int, end: int) -> list[Meeting]:
            of_kind = replace(order, masks=[mask.near(window) for mask in order.masks])
            return of_kind.meetings(i, first, end, fence=packed and self.fence, place=place)

        @cache  # where other stages compute the other rows
        def part_of(rope: Rope, i: int, first: int, end: int) -> torch.Tensor:
            return of_sequences(turns[rope][i], B, first, end).flatten(0, 1)
        for unit, s in self.swap.units.items():
            first, end, i, kind = 0, len(s.x), unit.subsequence - begin, self.kind_of(unit)
            if guest := p.guest_of.get(i):
                first, end, i = guest.first, guest.end, guest.subsequence
            if i not in range(p.subsequences):
                continue  # of another batch
            tokens = (rows * (1 if cfg.metp else tp.size) // B for rows in (first, end))
            s.meetings = meetings(kind.window, i, *tokens)
            for meeting in s.meetings if by_lengths else ():
                meeting.own_tiles(self.mesh.tokens.rank)  # now: in a unit's work all memory is planned
            s.turn = turns[kind.rope][i]
            if kind.rope and p.several and end - first < p.cuts[i]:
                s.turn = part_of(kind.rope, i, first, end)

    def kind_of(self, unit: Unit) -> Kind:
        """Finds the Kind of a unit's layer: of this stage, or of the one that it helps."""
        guest = self.swap.placement.guest_of.get(unit.subsequence)
        stage = self.cfg.every_stage[guest.stage] if guest else self.cfg
        return self.cfg.kinds[stage.layers[unit.layer]]

    @property
    def first_of_kinds(self) -> dict[int, float]:
        """Finds {the first layer of each Kind: its part of the layers}, of this stage."""
        kinds = self.cfg.stage_kinds
        return {kinds.index(kind): n / len(kinds) for kind, n in Counter(kinds).items()}

    def fence(self, varies: bool) -> Callable[[], object]:
        """Marks for the arena where attention calls its kernel for each document."""
        return self.arena.fence(varies)

    def reserve_forward(self, B: int, T: int, n_layer: int | None = None,
                        streams: Streams | None = None, pin: bool = True) -> None:
        """Takes memory for passes whose units are used up one by one, as in a forward without a backward:
        all units of `n_layer` layers (default: all) take turns in the memory of one. The stream between
        layers is copied where all would take over half of what a GPU has free."""
        # one buffer, and of no tensor a row that outlives its layer
        nothing = dict.fromkeys((t.name for t in layer_of(self.cfg).skeletal), 0)
        whole, n_layer = all_kept(self.cfg, B, T), n_layer or len(self.gpt.blocks)
        keys = "made" if whole.keys_may_leave else "stay"  # there is no backward to make them for
        p = replace(whole, n_layer=n_layer, n_buffers=1, kept=nothing, keys=keys, near=whole.near[:n_layer])
        tensors = layer_of(self.cfg).tensors(B, T, self.dtype.itemsize, self.mesh.weights.size)
        spare = free_bytes(self.device)[0] / 2 if self.device.type == "cuda" else math.inf
        self.reserve(B, T, with_stream(p, tensors, spare), streams, pin)

    def close(self) -> None:
        """Gives the activations' memory back, on device and host, once copies and messages are done."""
        if self.taken is not None:
            self.swap.close()
        self.shape, self.taken = (0, 0), None

    def one_document(self) -> Packed:
        """Makes the Packed of a batch whose sequences are one document each: the worst there is."""
        B, T = self.shape
        positions = torch.cat(self.order.positions()).to(self.device).repeat(B, 1)
        return Packed(positions, ((T * self.cfg.cp,),) * B)

    def on_device(self, batch: Batch) -> Batch:
        """Copies a batch to the device; with documents the head's rows are found before."""
        move = partial(to_device, device=self.device, pin=self.cfg.pin_memory)
        tokens, targets, packed = batch
        if packed is None:
            return Batch(move(tokens), move(targets))
        if self.shape != tokens.shape:
            self.reserve(*tokens.shape)
        of_head = self.by_subsequence(targets) if self.cfg.has_head else ()
        learned = [self.gpt.edges.learned(part).to(move) for part in of_head]
        return Batch(move(tokens), targets, Packed(move(packed.positions), packed.ends, learned))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, packed: Packed | None = None,
                scale: float | None = None, learned: int = 0,
                following: Sequence[Batch] = ()) -> torch.Tensor:
        """Computes the mean loss of (B, T) tokens. With `scale`, backward() may follow: of scale * loss. With
        documents, of a batch on_device(): the sum of those that have a target, over `learned`; 0 of none.
        `following`: the step's next batch, if any, which may begin before that backward."""
        if self.shape != tokens.shape:
            self.reserve(*tokens.shape)
        passes, self.scale, self.learned = self.swap.passes, scale, learned
        self.led = self.led and scale is not None  # else a step has been given up
        self.loss = torch.zeros((), device=self.device)  # the head adds to it: no value comes to the host
        if self.led:
            self.follow(passes.turns[self.turn].forward)
        else:
            self.turn = 0
            self.take(Batch(tokens, targets, packed))
            # an evaluation keeps nothing: its layers take turns in the buffers, and only the stream is copied
            self.follow(passes.evaluation if scale is None else passes.forward)
        loss, self.loss, self.rows[self.turn].targets = self.loss, None, []  # the backward needs neither
        self.leads = bool(following and passes.turns)
        if self.leads:
            self.take(following[0], 1 - self.turn)
            self.follow(passes.turns[1 - self.turn].lead)
        return loss

    def take(self, batch: Batch, turn: int = 0) -> None:
        """Takes a batch whose `turn` it is."""
        tokens, targets, packed = batch
        if packed is not self.rows[turn].packed:
            self.meet(packed, turn)
        self.rows[turn].tokens = self.by_subsequence(tokens)
        self.rows[turn].targets = self.by_subsequence(targets) if packed is None else packed.learned

    def by_subsequence(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Cuts (B, T) -> [(B * T_i,)]."""
        return [part.reshape(-1) for part in ids.split(self.lengths, 1)]

    def hidden(self, tokens: torch.Tensor, read: Callable[[int, torch.Tensor], object]) -> list:
        """Lists read(i, x) of tokens (B, T), where reserve() has taken memory for them. x (n_i, C): the
        last layer's output, of own rows of subsequence i; what comes next writes over it."""
        self.rows[0].tokens, self.scale, results = self.by_subsequence(tokens), None, []
        self.follow(self.swap.passes.evaluation, head=lambda i, x: results.append(read(i, x)))
        self.swap.streams.timeline.clear()  # nobody asks for these times
        return results

    def backward(self, last: bool = False) -> None:
        """Adds the gradients of the last forward to `grads`. With `last`, of a step's last micro batch,
        those of each bucket leave for the optimizer as soon as they are complete. Where the device has all
        of the stream, `swap.x[0]` is then the gradient of the first layer's input."""
        self.complete, passes, led = last, self.swap.passes, self.led
        ways = passes.turns[self.turn] if led or self.leads else passes
        self.follow(ways.last_backward if last else ways.backward)
        self.turn, self.led = (self.turn + self.leads) % 2, self.leads

    def follow(self, steps: Schedule, head: Callable[[int, torch.Tensor], None] | None = None) -> None:
        """Executes steps of the schedule: the host launches them in their order, and the waits between
        streams are theirs. head(subsequence, last layer's output): what to do in the place of the head."""
        self.swap.executor.run(steps, partial(self.work_of, head=head))

    def settle(self) -> None:
        """Holds the device, and on the host the caller, until the optimizer's last step is done, here and on
        its way to all ranks. Errors: what went wrong in it."""
        if self.taken is not None:
            self.swap.executor.settle(self.swap.passes.update)

    def work_of(self, step: Step, head: Callable[[int, torch.Tensor], None] | None = None) -> Work:
        """Finds what a step does. `head`: see follow()."""
        if step.is_message:
            return self.swap.label(step), self.exchange, step
        if step.of_states:
            k = step.unit.layer + 1
            call, *arguments = self.optimizer.work_of(step) if self.optimizer else (self.bring, k)
            # what computes has no label: clip and update are in no timeline, where steps are compared
            return "" if step.computes else self.swap.label(step), call, *arguments
        if not step.computes:
            return self.swap.copy_of(step)
        if step.op is Op.ZERO:
            return step.kind, self.swap.buffers["key_gradients"].zero_
        (B, T), (label, *work) = self.shape, self.computing(step, head)
        return label, self.arena.run, f"{B}x{T}/{label}", *work

    def exchange(self, step: Step) -> None:
        """Sends what a stage sends to another one, or receives it; the step's stream waits for it."""
        axis = self.mesh.lanes[step.stream + " back" * (step.back and step.peer is None)]
        (axis.send if step.op is Op.SEND else axis.receive)(*self.swap.message(step)).wait()

    def computing(self, step: Step, head: Callable[[int, torch.Tensor], None] | None = None) -> tuple:
        """Finds (label, function, arguments...) of a computing step, a segment of the memory plan."""
        layer, i = step.unit
        (B, T), swap, name = self.shape, self.swap, self.swap.name(step.unit)
        turn, i = divmod(i, swap.placement.subsequences) if swap.placement.follows else (0, i)
        of, several = self.rows[turn], len(self.lengths) > 1
        if step.op is Op.ADD:
            return f"{step.kind} {name}", swap.add, step, self.bucket_grads[layer + 1]
        helps = i in swap.placement.guest_of
        block = self.guest_blocks[swap.sizes.table.turn[step.unit]] if helps else self.gpt.blocks[layer]
        s, (x, y), whole = swap.units[step.unit], swap.between[step.unit], swap.whole[step.unit]
        k = swap.placement.number[step.unit]
        alone = f" {name}" * several  # a segment's name
        match step.op:
            case Op.EMBED:
                return f"embedding{alone}", self.gpt.edges.embed, of.tokens[i], of.positions[i], whole[0]
            case Op.FORWARD:
                return f"forward {name}", self.unit_forward, block, x, s, y
            case Op.HEAD if head is not None:
                return f"reader{alone}", head, i, whole[1]
            case Op.HEAD:
                label = "evaluation head" if self.scale is None else "head"
                mean = self.learned or B * T, self.scale, self.loss  # over the rows of all subsequences
                return f"{label}{alone}", self.gpt.edges.head, whole[1], of.targets[i], *mean
            case Op.RECOMPUTE:
                return f"recompute {name}", block.recompute, s, swap.missing[k]
            case Op.SWEEP:
                return f"sweep {name}", block.sweep, s, swap.input_of_sweep(step.unit)
            case Op.BACKWARD:
                return f"backward {name}", self.unit_backward, block, y, s, x, self.zeroed(step.unit)
            case Op.EMBED_BACKWARD:
                return f"embedding backward{alone}", self.gpt.edges.embed_backward, of.tokens[i], (
                    of.positions[i]), whole[0]
        raise ValueError(f"{step.kind} is no step that computes")

    def zeroed(self, unit: Unit) -> list[torch.Tensor]:
        """Lists what is to be 0 before the backward of a unit, which adds to it."""
        s, p = self.swap.units[unit], self.swap.placement
        if unit[1] in p.guest_of:
            return self.swap.views(Part(Content.REPAID, unit))
        if not s.pieces or p.lent:  # what helpers add to is 0 by then
            return []
        # what the unit reads and the one behind it does not: of the last all, of others the oldest piece
        oldest, i = p.key_places.oldest, p.forward_order.piece(unit)
        end = i + 1 if i == len(self.lengths) - 1 else oldest(Unit(unit.layer, i + 1))
        return [t for pair in s.sums[oldest(unit):end] for t in pair]

    # With one subsequence the input of a unit lies where the layer below has written it. With several each
    # unit has a copy, which leaves for the host while the layer above already writes over the original.

    @staticmethod
    def unit_forward(block: LayerBlock, x: torch.Tensor, s: Activations, y: torch.Tensor) -> None:
        """Computes y from x, (n, C), or both (B, n/B, C) where others compute the rows between."""
        if x is not s.x:
            s.x.view(x.shape).copy_(x)
        if y.dim() == 2:
            block.forward(s, y)
        else:
            y.copy_(block.forward(s, torch.empty_like(s.x)).view(y.shape))

    @staticmethod
    def unit_backward(block: LayerBlock, dy: torch.Tensor, s: Activations, dx: torch.Tensor,
                      zeroed: list[torch.Tensor]) -> None:
        """Computes dx from dy, as in unit_forward."""
        if zeroed:
            torch._foreach_zero_(zeroed)
        block.backward(dy.flatten(0, -2), s)
        if dx is not s.x:
            dx.copy_(s.x.view(dx.shape))

    def bring(self, bucket: int) -> None:
        """Copies the parameters of a bucket, of a model not trained, to the device, if they come."""
        if bucket in self.coming and self.slab is not None:
            self.slab.copy(self.bucket_params[bucket], self.loaded[bucket])


def with_place(cfg: Config, device: torch.device, dtype: torch.dtype) -> Layout:
    """Lays out a model that is not trained: where a GPU has too little room, on the host, with a warning."""
    on_device = Layout.whole(cfg, states="device")
    needs = dtype.itemsize * sum(bucket_numels(on_device, 1))
    if device.type != "cuda" or needs <= SHARE * free_bytes(device)[0]:
        return on_device
    warn(f"{needs / 2**30:.4g} GiB of parameters do not fit the device: layers come from the host, which "
         "takes time")
    return Layout.whole(cfg, states="host", unit_order="layer")
