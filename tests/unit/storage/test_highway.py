"""HighwayHash: published values, the hashes inside ArrayRecord files, and the same in C, with AVX2 and in numpy."""

import numpy as np
import pytest
from cores import CORES
from hypothesis import example, given, settings
from hypothesis import strategies as st

KEY = b"Riegeli/records\nRiegeli/records\n"
PLAIN = -1
DATA = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)

FUNCTIONS = {core.__name__.rpartition("_")[2]: core.hash_ranges for core in CORES}
if len(CORES) > 1:
    FUNCTIONS["portable"] = CORES[1].hash_ranges_portable

each = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def hashes_of(function, ranges, data=DATA, key=KEY):
    offsets, lengths = np.array(list(ranges), np.int64).reshape(-1, 2).T.copy()
    out = np.zeros(len(offsets), np.uint64)
    function(out, data, offsets, lengths, key, PLAIN)
    return out.tolist()


@each
def test_published_values(function):
    """The first of those that the authors give for the bytes 0, 1, 2, ... and a key of these bytes."""
    counting = bytes(range(32))
    found = hashes_of(function, [(0, length) for length in range(3)], counting, counting)
    assert found == [0x907A56DE22C26E53, 0x7EAB43AAC7CDDD78, 0xB8D0569AB0B53D62]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 200) | st.sampled_from([1024, 4095])), max_size=30),
    st.binary(min_size=32, max_size=32),
)
@example([(length, length) for length in (*range(201), 65_537)], KEY)
def test_all_give_the_same(ranges, key):
    found = [hashes_of(function, ranges, key=key) for function in FUNCTIONS.values()]
    assert all(hashes == found[0] for hashes in found)
    assert found[0] == [hashes_of(CORES[0].hash_ranges, [one], key=key)[0] for one in ranges]


@each
def test_arguments_are_checked(function):
    with pytest.raises(ValueError, match=r"a key of 31 bytes, and 8 bytes for 1 hashes: expected 32, and 8 for each"):
        hashes_of(function, [(0, 1)], key=KEY[1:])
    one = np.array([1])
    for size in (0, 7, 16):
        with pytest.raises(ValueError, match=rf"a key of 32 bytes, and {size} bytes for 1 hashes"):
            function(bytearray(size), DATA, one, one, KEY, PLAIN)
    with pytest.raises(ValueError, match="row 1: a range outside the 300000 bytes"):
        hashes_of(function, [(0, 5), (299_999, 2)])
    with pytest.raises(ValueError, match="1 offsets and 2 lengths"):
        function(bytearray(8), DATA, one, np.array([1, 2]), KEY, PLAIN)
    assert hashes_of(function, []) == []
