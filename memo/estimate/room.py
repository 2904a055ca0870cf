"""Whether a config fits, for a search, which asks for thousands that do not: what device or host are too
small for anyway is told from the least that its mode takes, without an Estimate."""

from dataclasses import replace
from functools import cache

from memo.choose import Judged, choose
from memo.config import Config
from memo.decide import Room, problem_of, ways_of, with_buffers
from memo.estimate.arena import fast_arena, itemsize_of
from memo.estimate.budget import Estimate, beside_activations, estimate, judged
from memo.estimate.hardware import Machine
from memo.layout import Layout, degrees
from memo.swap.alpha import AlphaProblem
from memo.swap.placing import place_rows


def chosen_if_fits(cfg: Config, machine: Machine, world: int) -> Estimate | None:
    """As budget.chosen() on a machine without speeds, None where it does not fit: only what no_room() says
    nothing of is estimated."""
    of = cache(lambda one: estimate(one, machine, world, fast_arena))
    judge = cache(lambda one: no_room(one, machine, world) or judged(of(one)))
    one, why = choose(cfg, judge, world)
    return None if judge(one).lacking else replace(of(one), asked=cfg, chosen=why)


def no_room(cfg: Layout, machine: Machine, world: int) -> Judged | None:
    """A config with numbers as choose() takes it, for which device or host are too small even with as little
    there as its mode allows; None where nothing says so. Takes a small part of the time of an Estimate."""
    if machine.cpu or (cfg.activation == "memo" and not cfg.finds_alpha):
        return None
    degrees(cfg, world)
    itemsize, found = itemsize_of(cfg, machine), list[Judged]()
    for stage in {0, cfg.pp - 1}:
        one = replace(cfg, stage=stage)
        room = beside_activations(one, machine, world, fast_arena).room
        ways = [lacking(one, problem_of(one, itemsize, None, room, **way), room) for way in ways_of(one)]
        found.append(min(ways))
    most = max(found)
    return most if most.lacking > 0 else None


def lacking(cfg: Layout, problem: AlphaProblem, room: Room) -> Judged:
    """As no_room(), of one of the ways_of() a stage, whose problem has two buffers."""
    swaps = cfg.activation in ("swap", "memo")
    if swaps:
        device = problem.device_bytes_at(0 if cfg.finds_alpha else problem.placement.n_rows)
    else:
        device = place_rows(cfg, problem)[0].device_bytes(problem.tensors)
    if device > room.spare_bytes:
        return Judged(0.0, device - room.spare_bytes, "the device")
    if swaps and problem.n_swapped:  # fewer with more buffers
        problem = with_buffers(cfg, problem, room)
        host = problem.least_bytes if cfg.finds_alpha else problem.needed_bytes(1.0)
        return Judged(0.0, max(0, host - room.host_bytes), "the host")
    return Judged(0.0)
