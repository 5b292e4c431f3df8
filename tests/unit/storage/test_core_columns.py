"""Columns that the core makes of plain memory: the compiled functions equal numpy's, and what Python says."""

import os

import numpy as np
import pytest
from cores import CORES, _core_c, check_allocations, compiled, each, numbers, outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from dataload.storage.core import PLACE_BITS


def packed(texts):
    ends = np.cumsum([*map(len, texts)], dtype=np.int64)
    lengths = np.diff(ends, prepend=0)
    return np.frombuffer(b"".join(texts), np.uint8), ends - lengths, lengths


DECIMALS = st.integers(-(10**18), 10**18).map(lambda number: b"%d" % number)
TEXTS = DECIMALS | st.from_regex(rb"-?0*[0-9]{1,4}", fullmatch=True) | st.binary(max_size=4) | st.just(b" 1")


@given(st.lists(DECIMALS, max_size=8), st.lists(TEXTS, max_size=3))
@settings(deadline=None)
def test_integers_are_those_of_python(plain, others):
    data, offsets, lengths = packed(texts := plain + others)
    found = []
    for one in CORES:
        out = np.full(len(texts), 7, np.int64)
        found.append((one.integers(out, data, offsets, lengths), out.tolist()))
    assert all(each == found[0] for each in found)
    row, out = found[0]
    row = len(texts) if row < 0 else row
    assert out == [*map(int, texts[:row]), *[7] * (len(texts) - row)]
    if row < len(texts):  # the others' forms are left to their decoder
        assert len(texts[row].lstrip(b"-")) > 18 or not texts[row].removeprefix(b"-").isdigit()


@each
def test_arguments_must_fit_each_other(one):
    data = np.zeros(9, np.uint8)
    assert outcome(one.integers, np.zeros(2, np.int64), data, numbers(1), numbers(1)) == (
        ValueError, "1 numbers do not fill 16 bytes",
    )  # fmt: skip
    assert outcome(one.integers, np.zeros(1, np.int64), data, numbers(9), numbers(1))[0] is ValueError


@compiled
def test_each_failing_allocation_is_a_memory_error():
    data, offsets, lengths = packed([b"12"] * 9)
    calls = [
        (_core_c.integers, (np.empty(9, np.int64), data, offsets, lengths), 2),
        (_core_c.cut, (np.empty(90, np.uint8), data, offsets[:5], 8, *[numbers(0)] * 3, bytes(8), bytes(8), -1), 5),
    ]
    for call in calls:
        check_allocations(*call)


@compiled
def test_wrong_arguments_are_type_errors():
    arguments = [np.zeros(1, np.int64), b"1", numbers(0), numbers(1)]
    _core_c.integers(*arguments)
    with pytest.raises(TypeError, match="takes 4 arguments, got 1"):
        _core_c.integers(arguments[0])
    for place in range(4):
        with pytest.raises(TypeError):
            _core_c.integers(*arguments[:place], object(), *arguments[place + 1 :])


DATA = np.random.default_rng(0).integers(0, 4, 1600, np.uint8)


@st.composite
def cuts(draw):
    length = draw(st.integers(1, 40) | st.sampled_from([64, 130, 500, 1300]))
    offsets = draw(st.lists(st.integers(0, len(DATA) - length), max_size=40)) * draw(st.sampled_from([1, 1, 10]))
    fields = draw(
        st.lists(st.tuples(st.integers(0, length), st.sampled_from([0, 1, 2, 4, 8, 64, 3, 100, 600, 1200])), max_size=5)
    )
    fields = [(start, min(size, length - start)) for start, size in fields]
    edges = np.cumsum([0, *(draw(st.integers(0, 3)) + size * len(offsets) for _, size in fields)])
    targets = [int(edge) - size * len(offsets) for edge, (_, size) in zip(edges[1:], fields, strict=True)]
    bits = None
    if length >= 8 and draw(st.booleans()):
        set_bits = draw(st.lists(st.tuples(st.integers(0, length - 1), st.sampled_from([1, 0x80, 0xFF])), max_size=3))
        mask = np.zeros(length, np.uint8)
        for at, bit in set_bits:
            mask[at] = bit
        bits = DATA[offsets[0] if offsets else 0 :][:length].tobytes(), mask
    wrong = draw(st.sampled_from([None] * 6 + ["offset", "start", "size", "target", "first"]))
    if wrong == "offset":
        offsets.append(draw(st.sampled_from([-1, len(DATA) - length + 1, 2**62])))
    starts, sizes = [start for start, _ in fields], [size for _, size in fields]
    for name, values in (("start", starts), ("size", sizes), ("target", targets)):
        if wrong == name and values:
            values[-1] = draw(st.sampled_from([-1, 2**62, length + 1000]))
    if wrong == "first" and bits:
        bits = bits[0][1:], bits[1]
    room = int(edges[-1])
    return numbers(*offsets), length, numbers(*starts), numbers(*sizes), numbers(*targets), bits or (None, None), room


@given(cuts())
@settings(deadline=None)
def test_columns_are_cut_from_rows(tmp_path_factory, arguments):
    offsets, length, starts, sizes, targets, bits, room = arguments
    path = tmp_path_factory.getbasetemp() / "rows"
    if not path.exists():
        path.write_bytes(DATA.tobytes())
    found = []
    for one in CORES:
        out = np.zeros(room, np.uint8)
        plain = outcome(one.cut, out, DATA, offsets, length, starts, sizes, targets, *bits, -1)
        found.append((plain, None if plain != -1 else out.tolist()))
    assert all(each == found[0] for each in found)
    result, columns = found[0]
    if _core_c is not None:
        mapped, maps = np.zeros(room, np.uint8), _core_c.Maps(2)
        with path.open("rb") as stream:
            maps.put(1, stream.fileno(), bytes(path), len(DATA), os.fstat(stream.fileno()).st_mtime_ns)
        places = (1 << PLACE_BITS) + offsets
        of_maps = outcome(maps.cut, mapped, places, length, starts, sizes, targets, *bits)
        assert (of_maps[0] if type(of_maps) is tuple else of_maps) == (result[0] if type(result) is tuple else result)
        assert columns is None or mapped.tolist() == columns
    if isinstance(result, tuple):
        return
    rows = np.stack([DATA[at : at + length] for at in offsets]) if len(offsets) else np.empty((0, length), np.uint8)
    if bits[0] is not None:
        differ = np.flatnonzero(((rows ^ np.frombuffer(bits[0], np.uint8)) & bits[1]).any(axis=1))
        assert result == (differ[0] if len(differ) else -1)
    if columns is not None:
        expected = np.zeros(room, np.uint8)
        for start, size, target in zip(starts.tolist(), sizes.tolist(), targets.tolist(), strict=True):
            expected[target : target + size * len(rows)] = rows[:, start : start + size].reshape(-1)
        assert columns == expected.tolist()
