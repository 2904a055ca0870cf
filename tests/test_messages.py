"""Messages meet: those of real steps do, those of changed ones do not, and the error names both ends."""

import random
import re
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

import pytest
import torch

from memo.config.layer import layer_of, n_rows
from memo.config.layout import Layout
from memo.decide.where import Room, place_rows, problem_of
from memo.memory.placement import Placement
from memo.schedule.passes import passes_of
from memo.schedule.streams import open_streams
from memo.states.optim import Optimizer
from memo.states.passes import Model
from model import GPT
from testing.notes import Communicator, Notes, Post, Program, Wait, noted_mesh
from testing.rendezvous import CIRCLE, ENDED, EQUAL, POSTED, SAME, validate_programs
from tests.helpers import LLAMA, degrees_of

KEYS = dict(n_layer=2, n_head=8, n_embd=64, vocab_size=150, block_size=2048, batch_size=2)
GROUPS = 4  # of heads, with METP on two ranks


def refusal(programs):
    """The error that the programs raise, None if there is none."""
    try:
        validate_programs(programs)
    except ValueError as e:
        return str(e)
    return None


# --- programs of real steps ---

def rebuild(model, cfg, lost):
    """Makes all layers but the last recompute the skeletal tensors of which `lost` is true."""
    L, kept = cfg.n_layer, {t.name: 0 for t in layer_of(cfg).skeletal if lost(t)}
    model.swap.missing = [Placement(L, 1, n_rows(cfg), kept).missing(0)] * (L - 1) + [{}]
    p = model.swap.placement.program
    fates = replace(p.fates, rebuilt=frozenset(range(L - 1)))
    model.swap.set_passes(passes_of(replace(p, fates=fates), model.states))


def program_of(cfg, rank, dp, lost):
    """The Program of a rank for a step, as on a GPU."""
    mesh, program = noted_mesh(rank, cfg.tp, cfg.cp, dp, cfg.metp)
    model = Model(GPT, cfg, "meta", torch.bfloat16, mesh=mesh)
    B, T = cfg.batch_size, cfg.block_size // cfg.cp
    placement = None  # every unit keeps its own
    if cfg.activation == "recompute":
        placement, _ = place_rows(cfg, problem_of(cfg, 2, None, Room(0)))
    streams = open_streams(torch.device("cpu"))
    streams.named("replicas").threaded = False  # the host's waits have places in its order
    model.reserve(B, T, placement, streams=streams)
    if lost:
        rebuild(model, cfg, lost)
    optimizer, tokens = Optimizer(model, cfg), torch.zeros(B, T, dtype=torch.int64, device="meta")
    micros = cfg.gradient_accumulation_steps // dp
    for i in range(micros):
        loss = model.forward(tokens, tokens, scale=1.0)
        model.backward(last=i == micros - 1)
    mesh.replicas.sum(loss)
    optimizer.clip(1.0)
    optimizer.step(1e-3)
    model.close()  # the parameters arrive
    return program


@cache
def real_programs(text, kind, groups="auto", family=(), lost=None, micros=1):
    """{rank: its Program} of a layout such as "tp2 cp2"; `kind`: ring, ulysses, metp."""
    tp, cp, dp = (degrees_of(text)[name] for name in ("tp", "cp", "dp"))
    how = dict(tensor_parallel="metp", head_groups=groups) if kind == "metp" else dict(context_parallel=kind)
    cfg = Layout(**KEYS | dict(family) | how, tp=tp, cp=cp, gradient_accumulation_steps=micros * dp)
    return {rank: program_of(cfg, rank, dp, lost) for rank in range(tp * cp * dp)}


def others(t):
    return t.group


def all_but_inputs(t):
    return t.name != "x"


GROUPED = tuple(LLAMA.items())  # its messages differ in size
SLOW = pytest.mark.slow


def in_four(order, *family, **keys):
    """Four subsequences; a layer's keys and values are made again before its backward, where they do not
    stay."""
    several = dict(subsequences=4, unit_order=order, activation="recompute")
    return keys | dict(family=(*family, *several.items()))


@pytest.mark.slow
@pytest.mark.parametrize("text,kind,keys", [
    ("tp2 cp2", "ring", dict(micros=2)), ("tp2 cp2", "ulysses", dict(micros=2)), ("tp4", "ring", {}),
    ("tp2 dp2", "ring", {}), ("cp2 dp2", "ring", dict(family=GROUPED)),
    ("tp2 cp2", "ring", dict(lost=all_but_inputs)),
    ("tp2", "metp", dict(micros=2)), ("tp2", "metp", dict(family=(("matmul", "fp8"),))),
    ("tp2 cp2", "metp", {}), ("tp2", "metp", dict(lost=all_but_inputs)),
    ("cp2", "ring", in_four("layer")), ("cp2", "ulysses", in_four("subsequence", *GROUPED)),
    pytest.param("tp4", "metp", {}, marks=SLOW), pytest.param("tp2 dp2", "metp", {}, marks=SLOW),
    pytest.param("tp2 cp2", "metp", dict(groups=8), marks=SLOW),
    pytest.param("tp4", "metp", dict(family=GROUPED), marks=SLOW),
    pytest.param("tp2 cp2", "metp", dict(lost=others), marks=SLOW),
    pytest.param("cp4", "ring", in_four("subsequence", micros=2), marks=SLOW),
    pytest.param("tp2 cp2", "ring", in_four("layer", ("subsequence_cut", "flops")), marks=SLOW),
    pytest.param("cp4", "ulysses", in_four("layer", *GROUPED), marks=SLOW),
    pytest.param("tp4", "metp", in_four("layer", *GROUPED, ("qkv_bias", True)), marks=SLOW),
    pytest.param("tp2 cp2", "metp", in_four("subsequence"), marks=SLOW),
    pytest.param("tp8", "metp", {}, marks=SLOW), pytest.param("tp2 cp2 dp2", "metp", {}, marks=SLOW),
    pytest.param("tp2 cp2 dp2", "ring", {}, marks=SLOW)])
def test_the_messages_of_a_step_meet(text, kind, keys):
    programs = real_programs(text, kind, **keys)
    size, metp = degrees_of(text), kind == "metp"
    wanted = dict(gather=True, scatter_sum=True, sum=True, broadcast=metp, reduce=metp,
                  shift=metp or (kind == "ring" and size["cp"] > 1), exchange=kind == "ulysses")
    for program in programs.values():
        posts = {step.number: step.kind for step in program if isinstance(step, Post)}
        assert set(posts.values()) == {name for name, there in wanted.items() if there}
        assert sorted(step.number for step in program if isinstance(step, Wait)) == list(posts)
    validate_programs(programs)


def places(program, name, **wanted):
    """Where a program has posts on a communicator, with these attributes."""
    return [at for at, step in enumerate(program) if isinstance(step, Post) and step.communicator.name == name
            and all(getattr(step, attribute) == value for attribute, value in wanted.items())]


def test_the_projections_matrix_comes_with_the_heads_that_it_multiplies():
    """A piece behind the first broadcasts of the second rank's groups, one behind the last."""
    program = real_programs("tp2", "metp")[0]
    pieces, broadcasts = places(program, "tp", kind="gather")[:2], places(program, "tp", kind="broadcast")
    ends = [broadcasts[3 * group - 1] for group in (GROUPS // 2 + 1, GROUPS)]  # of keys, values, queries
    assert pieces == [end + 1 for end in ends]
    for piece, end in zip(pieces, ends, strict=True):
        assert program.index(Wait(end)) < program.index(Wait(piece))
    assert pieces[1] < broadcasts[3 * GROUPS]  # of the next layer


def test_a_group_waits_for_one_matrix_after_the_other():
    program = real_programs("tp2", "metp")[0]
    keys, values, queries = (program.index(Wait(at)) for at in places(program, "tp", kind="broadcast")[:3])
    assert keys < values < places(program, "cp")[0] < queries


def test_a_groups_keys_leave_before_the_last_block_of_the_group_before():
    program = real_programs("tp2", "metp")[0]
    for hop, following in pairwise(places(program, "cp")[:GROUPS]):  # of two ranks: a hop a group
        assert hop < following < program.index(Wait(hop))


def most_under_way(program, hops):
    """Of the posts at these places, the most that are on their way at a time."""
    numbers = {program[at].number for at in hops}
    steps = [1 if isinstance(step, Post) else -1 for step in program if step.number in numbers]
    return max(accumulate(steps))


@pytest.mark.parametrize("text,kind,hops", [("cp4", "ring", 1), ("tp4", "metp", 4)])
def test_so_many_blocks_of_keys_are_on_their_way(text, kind, hops):
    """One; with METP, where they are of one group of heads, two, and the last two of the group before."""
    program = real_programs(text, kind)[0]
    ring = places(program, "cp")
    keys = [at for at in ring if program[at].nbytes == program[ring[0]].nbytes]
    assert most_under_way(program, keys) == hops and len(ring) == 3 * len(keys) // 2


def of_two_ranks_backward(program):
    """(places of a backward's hops of keys, of those of their gradients), group by group of heads."""
    ring = places(program, "cp")[-2 * GROUPS:]
    nbytes = program[ring[0]].nbytes
    gradients = [at for at in ring if program[at].nbytes == 2 * nbytes]  # fp32
    return [at for at in ring if at not in gradients], gradients


def of_reductions(program):
    """(places of a backward's reductions of the projection's gradients, of the queries'), group by group."""
    reduces = places(program, "tp", kind="reduce")[-4 * GROUPS:]  # of the projection, then q, k, v
    return reduces[::4], reduces[1::4]


def test_between_two_ranks_keys_leave_two_groups_ahead():
    """Beside the own block, behind the gradients that hide there, too."""
    program = real_programs("tp2", "metp")[0]
    keys, gradients = of_two_ranks_backward(program)
    assert len(keys) == len(gradients) == GROUPS and gradients[0] < keys[1]
    for home, following in zip(gradients, keys[2:], strict=False):
        assert home < following < program.index(Wait(home))


def test_gradients_of_a_groups_matrices_leave_as_soon_as_they_are_made():
    """Those of the projection beside the first gradients of keys; all before the next group's attention."""
    program = real_programs("tp2", "metp")[0]
    keys, gradients = of_two_ranks_backward(program)
    for group, (projection, others) in enumerate(zip(*of_reductions(program), strict=True)):
        home = gradients[group]
        assert program.index(Wait(keys[group])) < home < projection < program.index(Wait(home)) < others
        if group < GROUPS - 1:
            assert others < program.index(Wait(keys[group + 1]))


def test_the_mlps_last_gradients_are_on_their_way_as_long_as_attention_takes():
    program = real_programs("tp2", "metp")[0]
    matrices, gradients = places(program, "hops")[-2:]
    assert program[gradients].nbytes == 2 * program[matrices].nbytes  # fp32
    ring, reduces = places(program, "cp")[-2 * GROUPS:], places(program, "tp", kind="reduce")
    assert matrices < program.index(Wait(matrices)) < gradients < ring[0]
    assert reduces[-1] < program.index(Wait(gradients))


# --- programs that were changed ---

def swapped(programs, rank, a, b):
    """The programs, of which a rank's has two steps in each other's place."""
    program = list(programs[rank])
    program[a], program[b] = program[b], program[a]
    return programs | {rank: program}


def replaced(programs, rank, at, **attributes):
    """The programs, of which a rank's has a post with other attributes."""
    program = list(programs[rank])
    program[at] = program[at]._replace(**attributes)
    return programs | {rank: program}


def disagree(programs, ranks, places):
    """The error of two ranks whose collectives, at these places, are not the same."""
    ends = ((rank, programs[rank][at]) for rank, at in zip(ranks, places, strict=True))
    return f"{SAME}: " + " where ".join(f"rank {rank} has post {post.number} ({post})" for rank, post in ends)


def some(of, n, seed=0):
    assert len(of) >= n
    return random.Random(seed).sample(of, n)


def test_two_posts_in_another_order_are_found():
    real = real_programs("tp2 cp2", "metp", family=GROUPED)
    pairs = [(rank, a, b) for rank, program in real.items() for a, b in pairwise(places(program, "tp"))
             if program[a][2:] != program[b][2:] and not any(isinstance(s, Wait) for s in program[a:b])]
    for rank, a, b in some(pairs, 20):
        ranks, programs = sorted((rank, rank ^ 1)), swapped(real, rank, a, b)  # of the communicator
        assert refusal(programs) == disagree(programs, ranks, (a, a))


def test_a_broadcast_from_another_root_is_found():
    real = real_programs("tp2 cp2", "metp")
    for at in some(places(real[3], "tp", kind="broadcast"), 10):
        programs = replaced(real, 3, at, source=5 - real[3][at].source)  # 2 or 3
        assert refusal(programs) == disagree(programs, (2, 3), (at, at))


@pytest.mark.parametrize("name,kind,rule", [
    ("tp", "broadcast", SAME), ("tp", "reduce", SAME), ("tp", "gather", SAME), ("hops", "shift", EQUAL),
    ("cp", "shift", EQUAL), ("data", "scatter_sum", SAME), ("world", "sum", SAME)])
def test_another_size_is_found(name, kind, rule):
    real = real_programs("tp2 cp2", "metp")
    [at] = some(places(real[1], name, kind=kind), 1)
    programs = replaced(real, 1, at, nbytes=real[1][at].nbytes + 2)
    post, why = programs[1][at], refusal(programs)
    assert why.startswith(f"{rule}: ") and f"rank 1 has post {at} ({post})" in why
    [other] = re.findall(r"rank ([02-9]) has post", why)
    assert int(other) in post.communicator.ranks


@pytest.mark.parametrize("name", ["tp", "hops", "cp", "data", "world"])
def test_a_message_that_a_rank_leaves_out_is_found(name):
    real = real_programs("tp2 cp2", "metp")
    for at in some(places(real[1], name), 1) + places(real[1], name)[-1:]:
        rule, _, ends = refusal(real | {1: [step for step in real[1] if step.number != at]}).partition(": ")
        said = set(re.findall(r"rank (\d)(?: has| waits|, which has come to its end)", ends))
        assert rule in (SAME, EQUAL, CIRCLE, ENDED) and "1" in said and len(said) > 1


def test_a_rank_that_ends_early_is_found():
    real = real_programs("tp2 cp2", "metp")
    for end in some(range(len(real[1]) - 10), 10):
        why = refusal(real | {1: real[1][:end]})
        assert re.fullmatch(rf"{ENDED}: rank [023] waits in post \d+ \(.*\) for rank 1, "
                            "which has come to its end", why), why


def test_a_wait_before_its_post_is_found():
    real = real_programs("tp2", "metp")
    wait = next(at for at, step in enumerate(real[1]) if isinstance(step, Wait))
    programs = swapped(real, 1, wait, real[1][wait].number)
    assert refusal(programs) == f"{POSTED}: rank 1 waits for its post {real[1][wait].number} before"


def first_hop_and_broadcast(program):
    """Where a program has the first hop, and the first broadcast, which is posted behind it."""
    hop, broadcast = places(program, "hops")[0], places(program, "tp", kind="broadcast")[0]
    assert broadcast == hop + 1
    return hop, broadcast


def test_messages_of_two_communicators_in_crossed_orders_are_found():
    """A GPU may do what a rank posts one after the other, whatever the communicators."""
    real = real_programs("tp4", "metp")
    hop, broadcast = first_hop_and_broadcast(real[0])
    assert str(real[1][hop]).startswith("shift to 2 from 0 of ")
    assert str(real[2][broadcast]).startswith("broadcast from 0 of ")
    assert refusal(swapped(real, 2, hop, broadcast)) == (
        f"{CIRCLE}: rank 1 waits in post {hop} ({real[1][hop]}) for rank 2; "
        f"rank 2 waits in post {broadcast} ({real[2][broadcast]}) for rank 1")


# --- stages that send and receive ---

def stages(orders):
    """{rank: Program} of stages: each posts (send or receive, the other stage) in its order, and waits."""
    programs = {rank: Program() for rank in range(len(orders))}
    for rank, order in enumerate(orders):
        for kind, other in order:
            a, b = (rank, other) if kind == "send" else (other, rank)
            notes = Notes(programs[rank], Communicator(f"stage {a} to {b}", (a, b)))
            notes.post(kind, 64, **{"to": 1} if kind == "send" else {"source": 0}).wait()
    return programs


def test_two_stages_that_both_send_first_wait_for_each_other():
    sends, receives = [("send", 1), ("receive", 1)], [("receive", 0), ("send", 0)]
    validate_programs(stages([sends, receives]))
    assert refusal(stages([sends, receives[::-1]])) == (
        f"{CIRCLE}: "
        "rank 0 waits in post 0 (send to 1 of 64 bytes on stage 0 to 1 of ranks 0, 1) for rank 1; "
        "rank 1 waits in post 0 (send to 0 of 64 bytes on stage 1 to 0 of ranks 1, 0) for rank 0")
    assert refusal(stages([sends, receives[:1]])) == (
        f"{ENDED}: rank 0 waits in post 2 (receive from 1 of 64 bytes on stage 1 to 0 of ranks 1, 0) "
        "for rank 1, which has come to its end")
    early = stages([sends, receives[::-1]])
    early[0] = sorted(early[0], key=lambda step: isinstance(step, Wait))  # both are posted before a wait
    assert refusal(early) == refusal(stages([sends, receives[::-1]]))  # of which the second does not start


def test_a_pipeline_of_subsequences():
    forward = [[*[("receive", k - 1)] * (k > 0), *[("send", k + 1)] * (k < 2)] * 4 for k in range(3)]
    backward = [[*[("receive", k + 1)] * (k < 2), *[("send", k - 1)] * (k > 0)] * 4 for k in range(3)]
    orders = [f + b for f, b in zip(forward, backward, strict=True)]
    validate_programs(stages(orders))
    orders[1] = backward[1] + forward[1]
    assert refusal(stages(orders)) == (
        f"{CIRCLE}: "
        "rank 1 waits in post 0 (receive from 2 of 64 bytes on stage 2 to 1 of ranks 2, 1) for rank 2; "
        "rank 2 waits in post 0 (receive from 1 of 64 bytes on stage 1 to 2 of ranks 1, 2) for rank 1")


# --- small programs, against all orders in which they can run ---

def random_programs(rng):
    """Of two or three ranks: posts that go together, most of them then moved, changed or dropped."""
    ranks = range(rng.randint(2, 3))
    two = [Communicator(name, tuple(ranks)) for name in "ab"]
    programs = {rank: [] for rank in ranks}
    for number in range(rng.randint(1, 3)):
        communicator, kind = rng.choice(two), rng.choice(["sum", "shift", "send"])
        a, b = rng.sample(ranks, 2)
        for rank in ranks:
            post = Post(number, communicator, kind, rng.choice([4] * 40 + [8]))
            if kind == "shift":
                post = post._replace(to=(rank + 1) % len(ranks), source=(rank - 1) % len(ranks))
            elif kind == "send":
                post = post._replace(to=b) if rank == a else post._replace(kind="receive", source=a)
            if kind != "send" or rank in (a, b):
                programs[rank].append(post)
    for program in programs.values():
        if rng.random() < 0.3:
            rng.shuffle(program)
        if program and rng.random() < 0.1:
            program.pop()
        for post in list(program):
            if rng.random() < 0.6:
                program.insert(rng.randint(program.index(post) + 1, len(program)), Wait(post.number))
    return programs


def communicators(programs):
    return {step.communicator for program in programs.values() for step in program if isinstance(step, Post)}


def ends_of(post):
    return dict(shift=("to", "source"), send=("to",), receive=("source",)).get(post.kind, ("all",))


def moves(programs, state):
    """The states after each single thing that can happen: a host goes on, a collective is done, one end of a
    message meets another. A state: (how far each host is, {(rank, number of a post, end that was met)})."""
    at, met = state

    def is_done(rank, post):
        return all((rank, post.number, end) in met for end in ends_of(post))

    def first(rank, communicator):
        posts = (s for s in programs[rank][:at[rank]] if isinstance(s, Post))
        post = next((p for p in posts if not is_done(rank, p)), None)  # one queue a rank
        return post if post and post.communicator == communicator else None
    for rank, program in programs.items():
        if at[rank] < len(program):
            step = program[at[rank]]
            if isinstance(step, Post) or is_done(rank, next(p for p in program if p.number == step.number)):
                yield (*at[:rank], at[rank] + 1, *at[rank + 1:]), met
    for communicator in communicators(programs):
        here = {rank: first(rank, communicator) for rank in programs}
        what = {post and post[2:] for post in here.values()}
        if len(what) == 1 and all(post and post.kind == "sum" for post in here.values()):
            yield at, met | {(rank, post.number, "all") for rank, post in here.items()}
        for rank, post in here.items():
            other = here.get(post.to) if post else None
            if other and other.source == rank and other.nbytes == post.nbytes:
                ends = {(rank, post.number, "to"), (post.to, other.number, "source")}
                if not ends & met:
                    yield at, met | ends


def always_ends(programs):
    """Whether the programs come to their ends in all orders, True, or in none, False."""
    start = tuple(0 for _ in programs), frozenset()
    reached, todo, verdicts = {start}, [start], set()
    n = sum(len(ends_of(s)) for program in programs.values() for s in program if isinstance(s, Post))
    while todo:
        state = todo.pop()
        following = set(moves(programs, state))
        if not following:
            verdicts.add(state[0] == tuple(map(len, programs.values())) and len(state[1]) == n)
        todo += following - reached
        reached |= following
    [verdict] = verdicts
    return verdict


def test_small_programs_are_judged_as_if_all_orders_were_tried():
    rng, verdicts = random.Random(0), []
    for _ in range(400):
        programs = random_programs(rng)
        verdicts.append(always_ends(programs))
        assert (refusal(programs) is None) == verdicts[-1], programs
    assert 100 < sum(verdicts) < 300
