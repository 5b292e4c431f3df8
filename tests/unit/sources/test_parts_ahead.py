"""Steps over several sources, seen by each of them."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataload.sources.parts_ahead import _MOST_UNUSED, StepsByPart
from dataload.types import StepsAhead


def block(epoch, steps):
    indices = np.array([index for step in steps for index in step], np.int64)
    return StepsAhead(epoch, indices, np.cumsum([len(step) for step in steps]).astype(np.int64), len(steps))


def steps_of(blocks):
    for each in blocks:
        for start, stop in itertools.pairwise([0, *each.ends.tolist()]):
            yield each.epoch, each.indices[start:stop].tolist()


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.lists(st.lists(st.lists(st.integers(0, 1000), max_size=6), min_size=1, max_size=4), max_size=5),
    st.randoms(),
)
def test_each_part_sees_its_records_of_every_step(lengths, blocks, random):
    lengths[0] += 1
    ends = np.cumsum(lengths)
    blocks = [[[index % int(ends[-1]) for index in step] for step in steps] for steps in blocks]
    given_steps = [(epoch, step) for epoch, steps in enumerate(blocks) for step in steps]
    parts = StepsByPart((block(epoch, steps) for epoch, steps in enumerate(blocks)), ends)
    iterators = {part: parts.of(part) for part in range(len(lengths))}
    found = {part: [] for part in iterators}
    while iterators:  # in any order
        part = random.choice([*iterators])
        try:
            found[part].append(next(iterators[part]))
        except StopIteration:
            del iterators[part]
    for part, length in enumerate(lengths):
        start = int(ends[part]) - length
        wanted = [
            (epoch, [index - start for index in step if start <= index < ends[part]]) for epoch, step in given_steps
        ]
        assert [*steps_of(found[part])] == wanted


def test_a_part_that_is_never_read_ends_the_planning():
    parts = StepsByPart((block(0, [[0]]) for _ in itertools.count()), np.array([1, 2]))
    assert len([*parts.of(1)]) == _MOST_UNUSED
