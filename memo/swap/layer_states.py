"""The steps that bring a layer's parameters to the device, and take its gradients away, where the layers take
turns in two places for each (memo/flat.py). No torch.

    forward    the parameters of layer j come when the forward of layer j - 2 is done, while layer j - 1
               computes
    backward   those of the last two layers are still there; those of layer j come back when the backward of
               layer j + 2 is done, whose gradients leave then; and the sums that earlier micro batches have
               left of layer j's come where these have been

Source: ZeRO (arXiv 1910.02054), stages 2 and 3; ZeRO-Infinity (arXiv 2104.07857).
"""

from collections.abc import Iterator

from memo.swap.steps import Key, Step, Unit

LAYER_PLACES = 2  # for parameters, and for gradients: one is computed with while the other comes or goes


class LayerStates:
    """Which steps these are; none where `come` is false, and all layers' parameters stay on the device."""

    def __init__(self, come: bool, layers: int, subsequences: int) -> None:
        self.layers, self.last = layers * come, subsequences - 1

    def first(self) -> Iterator[Step]:
        """Before a forward."""
        for layer in range(min(LAYER_PLACES, self.layers)):
            yield Step("prefetch weights", (layer, 0))

    def before_forward(self, unit: Unit) -> tuple[Key, ...]:
        return (("prefetch weights", (unit[0], 0)),) if self.layers else ()

    def after_forward(self, unit: Unit) -> Iterator[Step]:
        layer, i = unit[0] + LAYER_PLACES, unit[1]
        if i == self.last and layer < self.layers:
            # protects the units whose layer has the place
            yield Step("prefetch weights", (layer, 0), (("forward", unit),))

    def first_back(self) -> Iterator[Step]:
        """Before a backward."""
        for layer in reversed(range(max(0, self.layers - LAYER_PLACES), self.layers)):
            yield Step("prefetch weight gradients", (layer, 0))

    def before_recompute(self, unit: Unit) -> tuple[Key, ...]:
        """Before whatever a backward computes with a layer's parameters."""
        gone = unit[0] + LAYER_PLACES < self.layers
        return (("prefetch weights back", (unit[0], 0)),) if gone else ()

    def before_backward(self, unit: Unit) -> tuple[Key, ...]:
        come: tuple[Key, ...] = (("prefetch weight gradients", (unit[0], 0)),) if self.layers else ()
        return self.before_recompute(unit) + come

    def after_backward(self, unit: Unit) -> Iterator[Step]:
        layer, below = unit[0], unit[0] - LAYER_PLACES
        if self.layers and unit[1] == 0:
            yield Step("offload weight gradients", (layer, 0), (("backward", unit),))
            if below >= 0:
                # protects the units whose layer has the place
                yield Step("prefetch weights back", (below, 0), (("backward", unit),))

    def sums_of(self, unit: Unit) -> Iterator[Step]:
        """Behind the prefetches of activations, which need not wait for gradients to leave."""
        layer, below = unit[0], unit[0] - LAYER_PLACES
        if self.layers and unit[1] == 0 and below >= 0:
            # protects gradients that still leave the place
            yield Step("prefetch weight gradients", (below, 0), (("offload weight gradients", (layer, 0)),))
