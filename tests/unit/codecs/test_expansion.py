"""What values of Arrow expand to, computed before they are taken."""

import numpy as np
import pyarrow as pa
import pytest

from dataload.codecs.expansion import OBJECT_BYTES as EACH
from dataload.codecs.expansion import check_views, expansion, least_bytes, longest_in_dictionaries, total_bytes
from dataload.errors import CorruptFileError


def sizes(array, **options):
    found = expansion(array, **options)
    return found if isinstance(found, int) else found.tolist()


def items(kind, offsets, values):
    return pa.Array.from_buffers(
        kind(values.type), len(offsets) - 1, [None, pa.py_buffer(np.array(offsets, np.int32))], children=[values]
    )


def views(offsets, lengths, values):
    buffers = [None, *(pa.py_buffer(np.array(each, np.int32)) for each in (offsets, lengths))]
    return pa.Array.from_buffers(pa.list_view(values.type), len(offsets), buffers, children=[values])


WORDS = pa.array(["", "abc", None, "de"])
FLOATS = pa.array([1.0, 2.0, 3.0])

CASES = {
    "numbers": (FLOATS, 8),
    "bools": (pa.array([True, False]), 1),
    "rows of numbers": (pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)), 4),
    "tensors": (
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int8(), (2, 1)), pa.array([[1, 2]], pa.list_(pa.int8(), 2))
        ),
        2,
    ),
    "null": (pa.nulls(3), EACH),
    "text": (WORDS, [EACH, EACH + 3, EACH, EACH + 2]),
    "no text in empty buffers": (pa.Array.from_buffers(pa.string(), 0, [None, *[pa.py_buffer(b"")] * 2]), []),
    "a part of text": (WORDS[1:], [EACH + 3, EACH, EACH + 2]),
    "large text": (WORDS.cast(pa.large_string()), [EACH, EACH + 3, EACH, EACH + 2]),
    "views": (WORDS.cast(pa.string_view()), [EACH, EACH + 3, EACH, EACH + 2]),
    "a part of views": (WORDS.cast(pa.string_view())[1:], [EACH + 3, EACH, EACH + 2]),
    "fixed bytes": (pa.array([b"abc"], pa.binary(3)), EACH + 3),
    "lists of numbers": (pa.array([[1, 2], []], pa.list_(pa.int64())), [EACH + 16, EACH]),
    "lists of null": (items(pa.list_, [0, 0, 1 << 20], pa.nulls(1 << 20)), [EACH, EACH + (EACH << 20)]),
    "a part of lists": (pa.array([["abc"], ["d"], []])[1:], [2 * EACH + 1, EACH]),
    "lists of empty structs": (
        items(pa.list_, [0, 7], pa.Array.from_buffers(pa.struct([]), 7, [None], children=[])),
        [8 * EACH],
    ),
    "lists of text": (pa.array([["abc", "d"], []]), [3 * EACH + 4, EACH]),
    "lists of lists of numbers": (pa.array([[[1], [2, 3]]]), [EACH + 2 * EACH + 3 * EACH]),
    "overlapping lists": (views([0, 0, 2], [3, 3, 1], FLOATS), [EACH + 24, EACH + 24, EACH + 8]),
    "overlapping lists in lists": (
        views([0, 0], [2, 1], views([0, 0], [3, 3], FLOATS)),
        [EACH + 2 * (EACH + 3 * EACH), EACH + (EACH + 3 * EACH)],
    ),
    "rows of text": (pa.array([["a", "bc"], ["", ""]], pa.list_(pa.string(), 2)), [3 * EACH + 3, 3 * EACH]),
    "a part of rows of text": (pa.array([["a", "bc"], ["", ""]], pa.list_(pa.string(), 2))[1:], [3 * EACH]),
    "rows of no numbers": (pa.array([[], []], pa.list_(pa.int8(), 0)), 1),
    "rows of null": (pa.array([[None, None]], pa.list_(pa.null(), 2)), 3 * EACH),
    "rows of lists of numbers": (pa.array([[[1], [2, 3]]], pa.list_(pa.list_(pa.int8()), 2)), [6 * EACH]),
    "maps": (pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())), [EACH + 5 * EACH + 1, EACH]),
    "dictionaries": (
        pa.DictionaryArray.from_arrays(pa.array([1, 1, None]), pa.array(["", "abc"])),
        [EACH + 3, EACH + 3, EACH],
    ),
    "dictionaries without values": (pa.array([None], pa.dictionary(pa.int8(), pa.string())), 0),
    "dictionaries of numbers": (pa.array([1.5, 1.5]).dictionary_encode(), 8),
    "structs": (
        pa.array([{"a": 1, "b": "xyz"}], pa.struct({"a": pa.int32(), "b": pa.string()})),
        [EACH * 3 + 4 + EACH + 3],
    ),
    "runs": (pa.RunEndEncodedArray.from_arrays([1 << 30], ["abc"]), EACH + 3),
    "runs of lists": (pa.RunEndEncodedArray.from_arrays([9], pa.array([[1, 2]])), 3 * EACH),
    "unions of lists": (
        pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([[1, 2]])]),
        4 * EACH,
    ),
    "unions": (
        pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array(["abc"])]),
        2 * EACH + 3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes(name):
    array, want = CASES[name]
    assert sizes(array) == want


def test_sizes_that_no_number_holds():
    """Lists of lists of lists of all: 2^48 bytes stand for anything above."""
    array = FLOATS
    for _ in range(12):
        array = views([0] * 64, [len(array)] * 64, array)
    assert all(size >= 1 << 40 for size in sizes(array))
    assert least_bytes(pa.list_(pa.list_(pa.list_(pa.null(), 1 << 30), 1 << 30), 1 << 30)) == 1 << 48
    assert total_bytes(array) > 1 << 40


def test_what_is_made_dense_as_a_whole():
    overlapping = CASES["views"][0]
    assert total_bytes(overlapping) == 5 + len(overlapping)
    assert total_bytes(pa.array([[{"a": 1}]])) == 1 + 1 + 8
    assert total_bytes(pa.array([["ab", "c"]], pa.list_(pa.string(), 2))) == 1 + 1 + 2 + 1 + 1
    assert total_bytes(pa.array([[None] * 5] * 3, pa.list_(pa.null(), 5))) == 3 * (1 + 5)
    check_views(overlapping, 9, "the column", "a.arrow")
    check_views(WORDS, 1, "the column", "a.arrow")
    for array in (overlapping, pa.DictionaryArray.from_arrays(pa.array([0]), overlapping)):
        with pytest.raises(
            CorruptFileError, match=r"a.arrow: the column takes 9 bytes of memory, and max_record_bytes is 8"
        ):
            check_views(array, 8, "the column", "a.arrow")


def test_the_longest_value_of_dictionaries():
    words = pa.array(["a", "abc"]).dictionary_encode()
    inside = pa.StructArray.from_arrays([pa.array([1, 2]), pa.ListArray.from_arrays([0, 1, 2], words)], ["n", "w"])
    none = pa.array([], pa.string()).dictionary_encode(), pa.array([{}], pa.struct([]))
    rows = pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([{"a": 1}]))
    arrays = words, inside, rows, pa.array(["abc"]), *none
    assert [longest_in_dictionaries(array) for array in arrays] == [4, 4, 9, 0, 0, 0]
