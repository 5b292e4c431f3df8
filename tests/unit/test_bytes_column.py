"""A column of bytes behaves as the list of its values."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload.collate import in_chunks, scatter_columns
from dataload.executors.serialization import put_together, take_apart
from dataload.types import BytesColumn, TextColumn

values_of = st.lists(st.binary(max_size=20), max_size=12)


def column_of(values):
    block = np.frombuffer(bytearray(b"".join(values)), np.uint8)
    return BytesColumn.packed(block, np.cumsum([len(value) for value in values], dtype=np.int64))


@given(values_of, st.slices(12))
def test_it_equals_the_list(values, part):
    column = column_of(values)
    assert column == values
    assert values == column
    assert list(column) == values
    assert len(column) == len(values)
    assert column[part] == values[part]
    assert [column[i] for i in range(-len(values), len(values))] == values * 2
    assert [bytes(column.view(i)) for i in range(len(values))] == values
    assert list(map(bytes, column.views())) == values
    assert column + [b"x"] == [*values, b"x"]  # noqa: RUF005
    assert [b"x"] + column == [b"x", *values]  # noqa: RUF005
    assert column + column == values + values
    assert column.nbytes == sum(map(len, values))
    assert (column == [*values, b""], column == [*values[1:], b"!"]) == (False, False)
    assert (b"ab" in column) == (b"ab" in values)


@given(values_of, st.slices(12))
def test_it_pickles_as_a_list_and_travels_between_processes_as_a_column(values, part):
    column = column_of(values)[part]
    restored = pickle.loads(pickle.dumps(column))
    assert (type(restored), restored) == (list, values[part])
    travelled = put_together([bytes(piece) for piece in take_apart({"x": column})])["x"]
    assert (type(travelled), travelled == values[part]) == (BytesColumn, True)


def test_a_slice_does_not_send_the_whole_block():
    column = column_of([bytes(100_000)] * 20)[3:5]
    assert sum(len(part) for part in take_apart(column)) < 300_000


@given(values_of, st.randoms(use_true_random=False), st.integers(1, 4))
def test_pieces_are_scattered_to_their_rows(values, random, parts):
    owner = [random.randrange(parts) for _ in values]
    pieces = []
    for part in range(parts):
        rows = [row for row, other in enumerate(owner) if other == part]
        if rows:
            pieces.append((np.array(rows), {"x": column_of([values[row] for row in rows])}))
    if pieces:
        joined = scatter_columns(pieces, len(values))["x"]
        assert (type(joined), joined == values) == (BytesColumn, True)
        again = scatter_columns([(np.arange(len(values))[::-1], {"x": joined})], len(values))["x"]
        assert again == values[::-1]
        assert again[1:] == values[::-1][1:]
        either = [list(batch["x"]) if i % 2 else batch["x"] for i, (_, batch) in enumerate(pieces)]
        both = [(where, {**batch, "y": column}) for (where, batch), column in zip(pieces, either, strict=True)]
        assert scatter_columns(both, len(values)) == {"x": values, "y": values}


def test_chunks():
    assert in_chunks({"x": column_of([b"a", b"b", b"c", b"d"])}, 2, 2) == {"x": [[b"a", b"b"], [b"c", b"d"]]}


def test_it_is_not_hashable_and_its_views_are_read_only():
    column = column_of([b"ab", b""])
    with pytest.raises(TypeError):
        hash(column)
    with pytest.raises(TypeError):
        column.view(0)[0] = 1
    with pytest.raises(IndexError):
        column[2]
    assert repr(column) == "BytesColumn(2 values, 2 bytes)"


@given(texts=st.lists(st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab")), max_size=4)))
def test_a_column_of_texts_is_their_list(texts):
    data = [text.encode() for text in texts]
    block = np.frombuffer(b"".join(data), np.uint8)
    column = TextColumn.checked(BytesColumn.packed(block, np.cumsum([len(each) for each in data], dtype=np.int64)))
    assert column == texts
    assert [column[row] for row in range(len(texts))] == texts
    assert list(column[::-2]) == texts[::-2]
    assert [bytes(view) for view in column.views()] == data
    assert pickle.loads(pickle.dumps(column)) == texts
    assert repr(column).startswith("TextColumn(")
    rows = np.arange(len(texts))
    halves = [(rows[rows % 2 == side], column[side::2]) for side in (0, 1)]
    assert list(TextColumn.scattered(halves, len(texts))) == texts


@pytest.mark.parametrize("values", [[b"\xff"], ["é".encode()[:1], "é".encode()[1:]], [b"a", b"\x80"]])
def test_bytes_that_are_no_texts(values):
    block = np.frombuffer(b"".join(values), np.uint8)
    assert TextColumn.checked(BytesColumn.packed(block, np.cumsum([len(each) for each in values]))) is None
