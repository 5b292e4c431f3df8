"""Rows that follow generators of pure Python: one worker process, two; and one torch DataLoader for each group."""

import itertools

import numpy as np

from benchmarks.timing import Case, compare
from dataload.streams import MultiStreamLoader

ROWS = 16
ROUNDS_OF_WORK = 8_000


def busy(seed):
    """A decoder that holds the GIL for about a millisecond an item."""
    value = seed
    for _ in range(500):
        for number in range(ROUNDS_OF_WORK):
            value = (value * 31 + number) & 0xFFFF
        yield value


def iterators(steps=30):
    """Batches of 16 rows, each from its own generator."""
    sequences = list(range(64))
    settings = {"batch_size": ROWS, "shuffle": False}
    cases, opened = [], []
    for executor, workers in (("processes", 1), ("processes", 2), ("threads", 2), ("threads", 0)):
        loader = MultiStreamLoader(busy, sequences, max_workers=workers, executor=executor, **settings)
        opened.append(loader)
        batches = iter(loader)
        floor = 1.8 if (executor, workers) == ("processes", 2) else None
        name = f"MultiStreamLoader, {workers} {executor}" if workers else "MultiStreamLoader, consumer's thread"
        cases.append(Case(name, lambda batches=batches: total((b["data"] for b in batches), steps), floor=floor))
    try:
        from torch.utils.data import DataLoader, IterableDataset
    except ImportError:
        print("torch is not installed: no peer")
    else:

        class Group(IterableDataset):
            """Some rows, one of whose samples are one item."""

            def __init__(self, rows):
                self.rows = rows

            def __iter__(self):
                return zip(*(self.row() for _ in range(self.rows)), strict=True)

            def row(self):
                return itertools.chain.from_iterable(map(busy, itertools.cycle(sequences)))

        for groups in (1, 2):
            peers = [DataLoader(Group(ROWS // groups), batch_size=None, num_workers=1) for _ in range(groups)]
            parts = zip(*peers, strict=True)
            cases.append(
                Case(
                    f"one torch DataLoader for each of {groups} groups",
                    lambda parts=parts: total((np.array(list(itertools.chain(*p))) for p in parts), steps),
                )
            )
    rows = compare("Generators of pure Python, one for each row", cases, items=steps * ROWS, steps=steps, rounds=3)
    for loader in opened:
        loader.close()
    return rows


def total(batches, steps):
    return sum(int(batch.sum()) for batch in itertools.islice(batches, steps))
