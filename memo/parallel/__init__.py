"""How ranks share a layer: the axes, tensor parallelism, what goes round in a ring."""
