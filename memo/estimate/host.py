"""The host memory of a node: what the ranks on it have for swapped activations and for the optimizer, beside
the copy that a checkpoint is written from."""

from dataclasses import replace

from memo.config import Config
from memo.estimate.hardware import Machine
from memo.formulas import parameters
from memo.swap import alpha

STATES_BYTES = 12  # of a parameter: fp32 master weight and two moments
HOST_STATES_BYTES = STATES_BYTES + 4  # with its gradient, where the optimizer lives on the host


def host_capacity(cfg: Config, machine: Machine, world: int) -> int:
    """Bytes of a node's memory for swapped activations and, with optimizer_device=cpu, the optimizer: those
    that host_memory_gb grants, or those left beside the copy that a checkpoint is written from. Errors:
    ConfigError where the node has fewer."""
    return alpha.granted_bytes(cfg.host_memory_gb, machine.node.host_memory_bytes,
                               snapshot_bytes(cfg, machine, world), "what a node has")


def host_share(cfg: Config, machine: Machine, world: int) -> int:
    """The same of a rank."""
    return host_capacity(cfg, machine, world) // min(world, machine.node.gpus_per_node)


def snapshot_bytes(cfg: Config, machine: Machine, world: int) -> int:
    """Of a node: the copy of weights and moments that a checkpoint is written from."""
    return STATES_BYTES * parameters(cfg) // world * min(world, machine.node.gpus_per_node)


def granting(cfg: Config, machine: Machine, world: int, nbytes: int) -> tuple[Config, Machine]:
    """(cfg, machine) where a node grants so many bytes of host memory, whatever it has."""
    has = int((nbytes + snapshot_bytes(cfg, machine, world)) / alpha.HOST_SHARE) + 2
    node = replace(machine.node, host_memory_bytes=has)
    return replace(cfg, host_memory_gb=nbytes / 1e9), replace(machine, node=node)
