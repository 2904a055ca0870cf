"""Parameters and the optimizer's states between two steps; what memo uses of a model."""
