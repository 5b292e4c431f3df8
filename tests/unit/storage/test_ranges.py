"""Merged ranges cover what is asked for, and no more than gaps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataload.storage.record_file import merge_ranges

DATA = np.random.default_rng(0).integers(0, 256, 3000, np.uint8)


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 900)), min_size=1, max_size=40), st.integers(0, 300))
def test_ranges_are_where_the_positions_say(pairs, gap):
    offsets, lengths = np.array(pairs).T
    runs = merge_ranges(offsets, lengths, gap)
    buffer = np.concatenate([DATA[a:b] for a, b in zip(runs.starts, runs.stops, strict=True)])
    for offset, length, position in zip(offsets, lengths, runs.positions, strict=True):
        assert buffer[position : position + length].tolist() == DATA[offset : offset + length].tolist()
    assert (runs.starts[1:] > runs.stops[:-1] + gap).all()
    asked = np.zeros(len(DATA) + 1, bool)
    for offset, length in pairs:
        asked[offset : offset + length] = True
    for start, stop in zip(runs.starts, runs.stops, strict=True):
        # no run of bytes that nobody asked for is longer than the gap
        unasked = np.diff(np.flatnonzero(np.concatenate(([True], asked[start:stop], [True])))) - 1
        assert unasked.max() <= gap
