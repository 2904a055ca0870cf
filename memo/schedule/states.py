"""The steps between a backward and the next forward: gradients are summed, the optimizer makes new
parameters, and these go to all ranks that hold them. No torch.

What belongs together is a layer's: the embedding is layer -1, the head the one above all.

    backward    when a layer's gradients are complete, REDUCE sums them over the ranks that hold the same
                parameters, a piece to each; for an optimizer on the host they then leave the device
    clip        CLIP takes the norm of all gradients
    update      ADAMW, layer by layer: while one is worked on, GATHER sends the one before to all ranks. On
                the host a stream of its own does it, and the prefetch stream brings the new parameters

The next forward waits for a layer's parameters where it first reads them. Layers that come for each pass
(memo/schedule/program.py) leave and come by steps of that pass; only their sums are added to it here.
Source: ZeRO (arXiv 1910.02054), stage 1; ZeRO-Offload (arXiv 2101.06840).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memo.schedule.program import EMBEDDING, layer_of
from memo.schedule.step import Moved, Op, Step, Unit

ADDS = Op.EMBED_BACKWARD, Op.BACKWARD, Op.ADD  # to gradients; the head does so in the forward


@dataclass(frozen=True)
class States:
    """Says where a stage's gradients and parameters are while no pass needs them.

    `come`: the layers that are on the device only while they are needed; `in_turns`: of the others those
    whose gradients have two places in turns. `reduces`: whether several ranks hold the same parameters.
    `on_host`: whether the optimizer is; `apart`: whether new parameters do not come from where gradients lie.
    """

    layers: int
    come: range = range(0)
    in_turns: range = range(0)
    reduces: bool = False
    on_host: bool = False
    apart: bool = False

    @property
    def every(self) -> range:
        """Numbers the layers, embedding and head among them."""
        return range(EMBEDDING, self.layers + 1)

    @property
    def stay(self) -> list[int]:
        """Lists the layers that do not come."""
        return [layer for layer in self.every if layer not in self.come]

    @property
    def in_order(self) -> list[int]:
        """Lists all layers in the order of their steps: first those that the host itself sends on."""
        return [*self.stay, *self.come]

    def leave(self, layer: int) -> Iterator[Step]:
        """Yields what becomes of the gradients of a layer that does not come, when they are complete."""
        if layer in self.come:
            return
        if self.reduces:
            yield Step(Op.REDUCE, Unit(layer, 0), Moved.WEIGHT_GRADIENTS, back=True)
        if self.on_host:
            yield Step(Op.OFFLOAD, Unit(layer, 0), Moved.WEIGHT_GRADIENTS, back=True)

    def with_sums(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yields the steps of a pass, and before gradients of layers that come leave, their sum."""
        for step in steps:
            if self.reduces and (step.op, step.moved) == (Op.OFFLOAD, Moved.WEIGHT_GRADIENTS):
                yield step._replace(op=Op.REDUCE)
            yield step

    def with_reductions(self, steps: Iterable[Step], subsequences: int) -> Iterator[Step]:
        """Yields the steps of a training step's last pass, and those by which its gradients leave: late,
        before the next one that computes, so that copies of activations are launched, and start, first."""
        steps = [*self.with_sums(steps)]
        last = {layer_of(step, self.layers): step for step in steps if step.op in ADDS and (
            step.op is Op.ADD or step.unit.subsequence < subsequences)}  # no guest's
        complete = [self.layers]  # the head's, which the forward has left
        for step in steps:
            while step.back and step.computes and complete:
                yield from self.leave(complete.pop())
            yield step
            layer = layer_of(step, self.layers)
            if last.get(layer) is step:
                complete.append(layer)
        if EMBEDDING not in last:  # nothing, or the head's matrix: as in the first stage it is the last
            complete.insert(0, EMBEDDING)
        for layer in reversed(complete):
            yield from self.leave(layer)

    def update(self) -> Iterator[Step]:
        """Yields the steps from complete gradients to new parameters."""
        yield Step(Op.CLIP, Unit(0, 0))
        if not self.on_host:
            for layer in self.in_order:
                yield Step(Op.ADAMW, Unit(layer, 0))
                yield from self.gather(layer)
            return
        yield Step(Op.OFFLOAD, Unit(0, 0), Moved.SCALE)
        for layer in self.in_order:
            yield Step(Op.HOST_ADAMW, Unit(layer, 0), Moved.WEIGHTS)
        for layer in self.stay:  # the host may wait for each
            yield Step(Op.PREFETCH, Unit(layer, 0), Moved.WEIGHTS)
            yield from self.gather(layer)

    def gather(self, layer: int) -> Iterator[Step]:
        """Yields the sending of a layer's new parameters to all ranks that hold them."""
        if self.reduces and layer not in self.come:
            yield Step(Op.GATHER, Unit(layer, 0), Moved.WEIGHTS)
