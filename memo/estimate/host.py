"""The host memory of a node: what the ranks on it have for swapped activations and for the optimizer, beside
the copy that a checkpoint is written from."""

from collections.abc import Sequence
from dataclasses import replace

from memo.choose import with_stages
from memo.config import Config
from memo.estimate.hardware import Machine
from memo.formulas import parameters
from memo.layer import layer_of
from memo.layout import Layout
from memo.swap import alpha

STATES_BYTES = 12  # of a parameter: fp32 master weight and two moments
HOST_STATES_BYTES = STATES_BYTES + 4  # with its gradient, where the optimizer lives on the host


def host_capacity(cfg: Layout, machine: Machine, world: int) -> int:
    """Bytes of a node's memory for swapped activations and, with optimizer_device=cpu, the optimizer: those
    that host_memory_gb grants, or those left beside the copy that a checkpoint is written from. Errors:
    ConfigError where the node has fewer."""
    return alpha.granted_bytes(cfg.host_memory_gb, machine.node.host_memory_bytes,
                               snapshot_bytes(cfg, machine, world), "what a node has")


def host_share(cfg: Layout, machine: Machine, world: int) -> int:
    """The same of a rank."""
    return host_capacity(cfg, machine, world) // min(world, machine.node.gpus_per_node)


def node_bytes(of_stages: Sequence[int], world: int, ranks: range) -> int:
    """The sum over those of `world` ranks that are on a node; `of_stages`: of a rank of each stage. The ranks
    of a stage follow each other."""
    n = max(1, world // len(of_stages))
    return sum(nbytes * max(0, min(ranks.stop, (k + 1) * n) - max(ranks.start, k * n))
               for k, nbytes in enumerate(of_stages))


def fullest_node_bytes(of_stages: Sequence[int], world: int, local_ranks: int) -> int:
    """The most node_bytes() of any node."""
    nodes = range(0, world if len(of_stages) > 1 else 1, local_ranks)
    return max(node_bytes(of_stages, world, range(first, min(first + local_ranks, world))) for first in nodes)


def stage_state_bytes(cfg: Layout, world: int, each: int = STATES_BYTES) -> list[int]:
    """Of a rank of each stage: its part of the stage's optimizer, or what takes `each` bytes a parameter, of
    those of formulas.parameters(). The first stage and the last one may hold the same matrix."""
    numels, ranks = [n * layer_of(cfg).matrix_elements for n in cfg.depths], max(1, world // cfg.pp)
    for stage in {0, cfg.pp - 1} if cfg.tie_embeddings else (0, -1):
        numels[stage] += cfg.vocab_size * cfg.n_embd
    return [each * numel // ranks for numel in numels]


def copied_bytes(cfg: Layout, world: int) -> list[int]:
    """Of a rank of each stage: the copy of weights and moments that a checkpoint is written from. Those of
    the host need none."""
    return stage_state_bytes(cfg, world, 0 if cfg.optimizer_on_host else STATES_BYTES)


def snapshot_bytes(cfg: Layout, machine: Machine, world: int) -> int:
    """The same of the fullest node."""
    return fullest_node_bytes(copied_bytes(cfg, world), world, machine.node.gpus_per_node)


def granting(cfg: Config, machine: Machine, world: int, nbytes: int) -> tuple[Config, Machine]:
    """(cfg, machine) where a node grants so many bytes of host memory, whatever it has."""
    # a GPU's node has enough for the copy in any layout; a CPU's memory is the device's too
    copy = 2 * STATES_BYTES * parameters(cfg)
    if machine.cpu:
        every = with_stages(cfg, world) if cfg.pp == "auto" else [cfg]
        # msp, which takes none of it, is not for the one subsequence that nobody has decided on
        copy = max(snapshot_bytes(Layout.of(one, msp=False), machine, world) for one in every)
    node = replace(machine.node, host_memory_bytes=int((nbytes + copy) / alpha.HOST_SHARE) + 2)
    return replace(cfg, host_memory_gb=nbytes / 1e9), replace(machine, node=node)
