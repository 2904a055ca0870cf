"""The steps that bring a layer's parameters to the device, and take its gradients away, where the layers take
turns in two places for each (memo/flat.py). The embedding is a layer like the others, below them all, and so
is the head, above; where both have one matrix, they stay. No torch.

    forward    the parameters of layer j come when the forward of layer j - 2 is done, while layer j - 1
               computes; with the head's come the sums of its gradients: its backward is part of its forward
    backward   parameters of the last two layers are still there; those of layer j come back when the backward
               of layer j + 2 is done, whose gradients leave then; and the sums that earlier micro batches
               have left of layer j's come where these have been. The embedding's backward needs its
               gradients alone

Source: ZeRO (arXiv 1910.02054), stages 2 and 3; ZeRO-Infinity (arXiv 2104.07857).
"""

from collections.abc import Iterator

from memo.swap.steps import Key, Step, Unit

LAYER_PLACES = 2  # for parameters, and for gradients: one is computed with while the other comes or goes
EMBEDDING = -1  # its number among the layers; the head's is that of layers


def coming(layers: int, layers_come: bool, edges_come: bool) -> range:
    """The layers that take turns; with `edges_come` embedding and head too. Beside a single layer these two
    would need the same place in turns, subsequence by subsequence: there they stay."""
    edges = edges_come and layers > 1
    return range(-edges, layers + edges) if layers_come else range(0)


class LayerStates:
    """Which steps these are, of the layers that come(). `head`: its number. Without `trains` there is no
    backward."""

    def __init__(self, come: range, head: int, subsequences: int, trains: bool = True) -> None:
        self.come, self.head, self.last, self.trains = come, head, subsequences - 1, trains
        self.back = range(max(0, come.start), come.stop - LAYER_PLACES)  # whose parameters come twice

    def layer_of(self, key: Key) -> int:
        """Of a step that computes."""
        kind, (layer, _) = key
        return {"embedding": EMBEDDING, "embedding backward": EMBEDDING, "head": self.head}.get(kind, layer)

    # --- the forward ---

    def bring(self, layer: int, *waits: Key) -> Iterator[Step]:
        if layer in self.come:
            yield Step("prefetch weights", (layer, 0), waits)
            if layer == self.head and self.trains:
                yield Step("prefetch weight gradients", (layer, 0))

    def first(self) -> Iterator[Step]:
        """Before a forward."""
        for layer in self.come[:LAYER_PLACES]:
            yield from self.bring(layer)

    def before_forward(self, key: Key) -> tuple[Key, ...]:
        return tuple(step.key for step in self.bring(self.layer_of(key)))

    def after_forward(self, key: Key) -> Iterator[Step]:
        layer = self.layer_of(key)
        if layer in self.come and key[1][1] == self.last:
            # protects the units whose layer has the place
            yield from self.bring(layer + LAYER_PLACES, key)

    # --- the backward ---

    def complete(self, key: Key) -> int | None:
        """The layer that comes whose gradients are complete behind a step; None where it is of no such layer,
        or others follow."""
        layer = self.layer_of(key)
        return layer if layer in self.come and key[1][1] == (self.last if key[0] == "head" else 0) else None

    def first_back(self, head: Key) -> Iterator[Step]:
        """Before a backward, behind the last `head`."""
        for layer in reversed(self.come[-LAYER_PLACES:]):
            if layer != self.head:
                yield Step("prefetch weight gradients back", (layer, 0))
        yield from self.after_backward(head)
        yield from self.sums_behind(head)

    def before_recompute(self, unit: Unit) -> tuple[Key, ...]:
        """Before whatever a backward computes with a layer's parameters."""
        return (("prefetch weights back", (unit[0], 0)),) if unit[0] in self.back else ()

    def before_backward(self, key: Key) -> tuple[Key, ...]:
        layer = self.layer_of(key)
        come = (("prefetch weight gradients back", (layer, 0)),) if layer in self.come else ()
        return (*self.before_recompute((layer, 0)), *come)

    def after_backward(self, key: Key) -> Iterator[Step]:
        layer = self.complete(key)
        if layer is not None:
            yield Step("offload weight gradients", (layer, 0), (key,))
            if layer - LAYER_PLACES in self.back:
                # protects the units whose layer has the place
                yield Step("prefetch weights back", (layer - LAYER_PLACES, 0), (key,))

    def sums_behind(self, key: Key) -> Iterator[Step]:
        """Behind the prefetches of activations, which need not wait for gradients to leave."""
        layer = self.complete(key)
        if layer is not None and (below := layer - LAYER_PLACES) in self.come:
            # protects gradients that still leave the place
            yield Step("prefetch weight gradients back", (below, 0),
                       (("offload weight gradients", (layer, 0)),))
