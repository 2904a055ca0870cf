"""Hard instances of the placement problem, made from a placement, so that one is known to exist.

They resemble the public minimalloc benchmark, which comes from the buffers of neural networks: many small
buffers that live long, rows of large ones that live briefly, together as large as the capacity nearly all the
time. The rectangle of time and address is filled without a hole, event by event. The capacity is the lower
bound, or up to 0.5% above it.
"""

import random

from memo.dsa.problem import Buffer, Problem

KIB = 1024
FAMILIES = {  # as hard() takes them
    "network_1": dict(n=160, live=22, again=0.5, several=0.3, slack=0),
    "network_2": dict(n=210, live=30, again=0.3, several=0.5, slack=0),
    "network_3": dict(n=260, live=30, again=0.4, several=0.3, slack=4),
    "network_4": dict(n=330, live=40, again=0.6, several=0.4, slack=0),
    "network_5": dict(n=400, live=40, again=0.5, several=0.5, slack=2),
    "network_6": dict(n=450, live=60, again=0.6, several=0.5, slack=0),
    "rows_1": dict(n=180, live=20, again=0.8, several=0.0, slack=0),
    "rows_2": dict(n=300, live=30, again=0.8, several=0.1, slack=3),
    "stacks_1": dict(n=350, live=35, again=0.1, several=0.8, slack=5),
    "loose_1": dict(n=190, live=25, again=0.1, several=0.1, slack=5),
    "trim_1": dict(n=160, live=22, again=0.5, several=0.3, slack=0, trim=0.1),
    "trim_2": dict(n=210, live=30, again=0.3, several=0.5, slack=0, trim=0.1),
    "trim_3": dict(n=260, live=30, again=0.4, several=0.3, slack=4, trim=0.3),
    "trim_4": dict(n=330, live=40, again=0.6, several=0.4, slack=0, trim=0.3),
    "plain_1": dict(n=160, live=22, again=0, several=0, slack=0),
    "plain_2": dict(n=260, live=30, again=0, several=0, slack=0, trim=0.1),
    "plain_3": dict(n=400, live=40, again=0, several=0, slack=0),
}


def parts_of(rng: random.Random, total: int, count: int) -> list[int]:
    """`total` cut into `count` positive whole numbers of very different sizes, in a random order."""
    weights = [rng.lognormvariate(0, 1.2) for _ in range(min(count, total))]
    sizes = [max(1, int(total * w / sum(weights))) for w in weights]
    while sum(sizes) != total:  # what rounding took or gave
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[largest] += total - sum(sizes) if sum(sizes) < total else -1
    return rng.sample(sizes, len(sizes))


def hard(seed: str, n: int, live: int, again: float, several: float, slack: int, trim: float = 0.0,
         capacity: int = 1024, horizon: int = 1024) -> Problem:
    """A Problem of about n buffers that has a placement. Blocks fill the addresses from 0 up; at every event
    some neighbours end and others take their room: the larger a block, the sooner.

    live: blocks at a time. again: P(a successor is as large as the block before). several: P(a block
    is several buffers). slack: KiB of capacity above the lower bound. trim: P(an end of a lifespan moves
    inwards).
    """
    rng, rows = random.Random(seed), []
    blocks, t = [(0, size) for size in parts_of(rng, capacity, live)], 0
    events = sorted(rng.sample(range(1, horizon), min(horizon - 1, n)))

    def end(block: tuple[int, int], t: int) -> None:
        born, size = block
        count = rng.randint(2, 4) if rng.random() < several else 1
        for piece in parts_of(rng, size, count):
            late, early = (rng.randint(0, (t - born) // 8) if rng.random() < trim else 0 for _ in range(2))
            rows.append((born + late, t - early, piece))

    for t in events:
        if len(rows) + len(blocks) * (1 + 2 * several) >= n:
            break
        k = rng.choices(range(len(blocks)), [size * (t - born) for born, size in blocks])[0]
        while True:
            width = rng.choice((1, 1, 2, 2, 3, 4))
            ending = blocks[k:k + width]
            if all(born < t for born, _ in ending):
                break
        for block in ending:
            end(block, t)
        sizes = [size for _, size in ending]
        if rng.random() >= again:
            count = max(1, len(sizes) + rng.choice((-1, 0, 1)) + (len(blocks) < live))
            sizes = parts_of(rng, sum(sizes), count)
        blocks[k:k + width] = [(t, size) for size in sizes]
    for block in blocks:
        end(block, horizon)
    rng.shuffle(rows)
    buffers = (Buffer(str(i), *(value * KIB for value in row)) for i, row in enumerate(rows))
    return Problem(tuple(buffers), (capacity + slack) * KIB)
