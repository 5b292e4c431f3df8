"""PackedBatchSampler, first fit and best fit, against plain loops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataload import Pack
from dataload.samplers import GlobalShuffle, PackedBatchSampler


def plain_first_fit(lengths, row_length):
    """One list; rows as lists of (record, start)."""
    rows, room = [], []
    for record, length in enumerate(lengths):
        row = next((row for row, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_length)
        rows[row].append((record, row_length - room[row]))
        room[row] -= length
    return rows


def plain_best_fit(lengths, row_length):
    """One list, the longest first, each into the row with the least room for it; rows by first record, in order."""
    rows = []
    for record in sorted(range(len(lengths)), key=lambda record: -lengths[record]):
        left = [row_length - sum(lengths[other] for other in row) for row in rows]
        fitting = [(room, number) for number, room in enumerate(left) if room >= lengths[record]]
        if not fitting:
            fitting = [(row_length, len(rows))]
            rows.append([])
        rows[min(fitting)[1]].append(record)
    rows = sorted(sorted(row) for row in rows)
    return [[(record, sum(lengths[other] for other in row if other < record)) for record in row] for row in rows]


PLAIN = {"first-fit": plain_first_fit, "best-fit": plain_best_fit}


def plain_rows(sampler, lengths, row_length, window, epoch, strategy):
    """All rows of an epoch: each a list of (index, start)."""
    order = sampler.indices(np.arange(len(sampler)), epoch=epoch).tolist()
    rows = []
    for first in range(0, len(order), window):
        part = order[first : first + window]
        cut = [min(int(lengths[index]), row_length) for index in part]
        rows += [[(part[record], start) for record, start in row] for row in PLAIN[strategy](cut, row_length)]
    return rows


def rows_of(plan):
    found = [[] for _ in range(plan.packing.shape[0])]
    for row, start, index in zip(plan.packing.rows, plan.packing.starts, plan.indices, strict=True):
        found[row].append((int(index), int(start)))
    return found


@given(
    count=st.integers(0, 70),
    window=st.integers(1, 30),
    batch_size=st.integers(1, 4),
    world_size=st.integers(1, 3),
    tail=st.sampled_from(["drop", "pad", "partial"]),
    strategy=st.sampled_from([*PLAIN]),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_rows_are_those_of_a_plain_loop_for_any_ranks(
    count, window, batch_size, world_size, tail, strategy, seed, data
):
    lengths = np.random.default_rng(seed).integers(0, 12 if seed % 2 else 5, count)  # some larger than a row
    sampler = GlobalShuffle(count, seed)
    expected = plain_rows(sampler, lengths, 10, window, 1, strategy)
    settings = {"row_length": 10, "batch_size": batch_size, "window": window, "overlong": "truncate"}
    settings |= {"world_size": world_size, "tail": tail, "strategy": strategy}
    size = batch_size * world_size
    steps = len(expected) // size if tail == "drop" else -(-len(expected) // size)
    for rank in range(world_size):
        planner = PackedBatchSampler(sampler=sampler, lengths=lengths, rank=rank, **settings)
        assert planner.items(1) == len(expected)
        assert planner.steps(1) == steps
        named = [value for name, value in planner.order[1:] if name == "strategy"]
        assert named == ["best-fit"] * (strategy == "best-fit"), "states of first-fit name none"
        cut = data.draw(st.integers(0, steps))
        plans = [*planner.plans(range(cut), epoch=1), *planner.plans(range(cut, steps), epoch=1)]
        for step, plan in enumerate(plans):
            numbers = range(step * size + rank, (step + 1) * size, world_size)
            mine = [expected[number] for number in numbers if number < len(expected)]
            assert plan.step == step
            assert plan.packing.lengths.tolist() == lengths[plan.indices].tolist()
            if tail == "pad":
                assert plan.valid.tolist() == [number < len(expected) for number in numbers]
                assert rows_of(plan) == mine + [[]] * (batch_size - len(mine))
            else:
                assert plan.valid is None
                assert rows_of(plan) == mine


@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=40),
    window=st.integers(1, 12),
    strategy=st.sampled_from([*PLAIN]),
    world_size=st.integers(1, 2),
)
def test_long_records_are_split_into_pieces_that_all_are_served(lengths, window, strategy, world_size):
    lengths, served = np.array(lengths), []
    sampler = GlobalShuffle(len(lengths), seed=0)
    settings = {"row_length": 10, "batch_size": 3, "window": window, "strategy": strategy, "overlong": "split"}
    source = [{"t": np.arange(n) + 100 * i} for i, n in enumerate(lengths.tolist())]
    for rank in range(world_size):
        planner = PackedBatchSampler(sampler=sampler, lengths=lengths, rank=rank, world_size=world_size, **settings)
        plans = planner.plans(range(planner.steps(0)), epoch=0)
        for plan in plans:
            batch = Pack(-1)([source[index] for index in plan.indices] or source[:1], plan.packing)
            assert batch["t"].shape == plan.packing.shape
            served += batch["t"][batch["segment_ids"] > 0].tolist()
            # A piece is at most a row; a step without records keeps its shape.
            assert (plan.packing.sizes + plan.packing.starts <= 10).all()
            dropped = plan.without(np.arange(len(plan.indices)) % 2 == 0)
            assert dropped.packing.offsets.tolist() == plan.packing.offsets[1::2].tolist()
    assert sorted(served) == [value for record in source for value in record["t"].tolist()]
    # In a window, records follow each other, so a plain loop over their pieces gives the same rows.
    order = sampler.indices(np.arange(len(lengths)), epoch=0)
    rows = 0
    for first in range(0, len(order), window):
        sizes = [min(10, n - at) for n in lengths[order[first : first + window]] for at in range(0, max(n, 1), 10)]
        rows += len(PLAIN[strategy](sizes, 10))
    assert planner.items(0) == rows
