import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload.errors import CorruptFileError, UnsupportedFormatError
from dataload.sources.array_record.layout import (
    SIGNATURE,
    Selection,
    check_head,
    footer_offset,
    group_size,
    parse_selection,
    plan_reads,
)


@pytest.mark.parametrize(
    ("path", "selection"),
    [
        ("a", ("a", 0, None)),
        ("a[2:5]", ("a", 2, 5)),
        ("a[00:02]", ("a", 0, 2)),
        ("a[1:2][3:3]", ("a[1:2]", 3, 3)),
        ("a[1:]", ("a[1:]", 0, None)),
        ("a[:3]", ("a[:3]", 0, None)),
        ("a[-3:2]", ("a[-3:2]", 0, None)),
        ("a[٣:٤]", ("a[٣:٤]", 0, None)),  # digits, but none that the original takes
        ("a[1:2]b", ("a[1:2]b", 0, None)),
        ("[1:2]", ("[1:2]", 0, None)),
        ("a\nb[1:2]", ("a\nb", 1, 2)),
    ],
)
def test_only_digits_make_a_slice(path, selection):
    assert parse_selection(path) == Selection(*selection)


def test_heads():
    check_head(SIGNATURE, 1 << 17, "x")
    with pytest.raises(CorruptFileError, match="x, byte 0: the file is empty"):
        check_head(b"", 0, "x")
    with pytest.raises(UnsupportedFormatError, match=r"x is not an ArrayRecord file, .*: byte 0 has b'PK"):
        check_head(b"PK\3\4" * 16, 1 << 17, "x")
    for size in (1, 10, 64, 65536):
        with pytest.raises(CorruptFileError, match=f"x, byte {size}: the file has {size} bytes, the smalles") as caught:
            check_head(SIGNATURE[:size], size, "x")
        assert pickle.loads(pickle.dumps(caught.value)).offset == size


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ("group_size:1,transpose:false", 1),
        ("transpose:false,group_size:16,zstd:3", 16),
        ("group_size:65536", 65536),
        ("transpose_group_size:3", 1),
        ("", 1),
        (None, 1),
    ],
)
def test_group_sizes(options, size):
    assert group_size(options) == size


@given(st.binary(max_size=200))
def test_any_block_is_a_postscript_or_none(block):
    assert footer_offset(block) is None or block[69] == 8


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=60),
    st.integers(51, 10**6),
    st.integers(0, 10**9),
    st.sampled_from([1, 16]),
    st.booleans(),
)
def test_runs_are_the_request(indices, records, size, group, alone):
    runs = plan_reads(np.array(indices, np.int64), records, size, group, alone=alone)
    if runs is not None:
        assert [index for start, stop in runs for index in range(start, stop)] == indices
        assert all(start < stop for start, stop in runs)
        assert group == 1 or len(runs) * 8 <= len(indices)


def test_which_way_is_taken():
    shuffled, consecutive = np.arange(0, 512, 2), np.arange(256)

    def ways(indices, records, record_bytes, group):
        return [plan_reads(indices, records, records * record_bytes, group, alone=alone) for alone in (True, False)]

    as_list = [None, None]
    assert ways(shuffled, 10**4, 100_000, 1) == as_list  # worth decompressing on all cores
    assert ways(shuffled, 10**4, 4096, 1)[1] is None  # several threads would wait for the GIL
    assert len(ways(shuffled, 10**4, 4096, 1)[0] or ()) == 256
    assert all(len(way or ()) == 256 for way in ways(shuffled, 10**4, 64, 1))
    assert all(len(way or ()) == 256 for way in ways(shuffled, 10**6, 100_000, 1))  # the list goes through the index
    assert ways(shuffled, 10**6, 64, 16) == as_list  # each group once
    assert ways(consecutive, 10**6, 64, 16) == [[(0, 256)], [(0, 256)]]
