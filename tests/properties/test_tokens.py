"""TokenSource under hypothesis: windows over flat files, beside a slow model that cuts lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_files import write_tokens as write

from dataload.sources.tokens.reader import TokenSource

PAD = 9


def documents_of(tokens, end_token):
    documents, rest = [], []
    for token in tokens:
        rest.append(token)
        if token == end_token:
            documents.append(rest)
            rest = []
    return [*documents, rest] if rest else documents


def windows_of(document, window, stride, ends):
    """The rules of the docstring, one window after the other; each is its real tokens."""
    found, seen = [], 0
    for start in range(0, len(document), stride):
        part = document[start : start + window]
        if len(part) == window or (ends == "pad" and start + len(part) > seen):
            found.append(part)
        seen = start + len(part)
    if ends == "pad" and len(document) == 1 and stride < window:
        return []
    return found


def padded(part, window):
    return part + [PAD] * (window - len(part))


def batch_of(source):
    """All records as lists, by way of read_batch, which must say the same as read and iteration."""
    batch = source.read_batch(np.arange(len(source)))
    for row, record in enumerate(source):
        assert {n: value.tolist() for n, value in record.items()} == {n: c[row].tolist() for n, c in batch.items()}
    return {name: column.tolist() for name, column in batch.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@given(data=st.data())
def test_windows_equal_the_slow_model(folder, data):
    files = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=40), min_size=1, max_size=3))
    window, stride = data.draw(st.integers(1, 8)), data.draw(st.one_of(st.none(), st.integers(1, 10)))
    ends = data.draw(st.sampled_from(["across", "drop", "pad"]))
    suffix, dtype = data.draw(st.sampled_from([".bin", ".npy"])), data.draw(st.sampled_from(["<u2", "<i4", "u1"]))
    by = data.draw(st.sampled_from(["file"] if ends == "across" else ["file", "end token", "starts"]))
    paths = [write(folder / f"{number}{suffix}", tokens, dtype) for number, tokens in enumerate(files)]
    parts = [[tokens] if by == "file" else documents_of(tokens, 0) for tokens in files]
    options = {"end_token": 0} if by == "end token" else {}
    if by == "starts":
        options["documents"] = [np.cumsum([0, *map(len, part)])[: data.draw(st.none() | st.just(-1))] for part in parts]
    source = TokenSource(paths, window=window, stride=stride, ends=ends, dtype=dtype, pad_token=PAD, **options)
    step = stride or max(1, window - 1)
    wanted = [[windows_of(document, window, step, ends) for document in part] for part in parts]
    flat = [found for part in wanted for document in part for found in document]
    assert len(source) == len(flat)
    assert source.sequence_lengths.tolist() == [len(document) for part in wanted for document in part]
    assert source.sequence_lengths.dtype == np.int64
    assert source.shard_lengths == tuple(sum(map(len, part)) for part in wanted)
    if flat:
        batch = batch_of(source)
        assert batch["tokens"] == [padded(found, window) for found in flat]
        assert batch.get("token_count") == ([len(found) for found in flat] if ends == "pad" else None)
        order = data.draw(st.lists(st.integers(0, len(flat) - 1), min_size=1, max_size=9))
        got = source.read_batch(order)
        assert got["tokens"].tolist() == [padded(flat[index], window) for index in order]
        assert (got["tokens"].dtype, got["tokens"].flags.writeable) == (np.dtype(dtype), True)
    source.close()


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), window=st.integers(1, 9), data=st.data())
def test_padding_leaves_no_token_out_and_shows_none_but_the_overlap_twice(folder, lengths, window, data):
    stride = data.draw(st.integers(1, window))
    tokens = np.arange(sum(lengths))
    starts = np.cumsum([0, *lengths])
    source = TokenSource(
        write(folder / "all.bin", tokens), window=window, stride=stride, documents=starts, ends="pad", pad_token=PAD
    )
    if not len(source):
        assert set(lengths) == {1}
        return
    batch = source.read_batch(np.arange(len(source)))
    real = [row[:count].tolist() for row, count in zip(batch["tokens"], batch["token_count"], strict=True)]
    alone = {int(start) for start, length in zip(starts, lengths, strict=False) if length == 1 and stride < window}
    assert {token for row in real for token in row} == set(range(len(tokens))) - alone
    assert all(row == list(range(row[0], row[0] + len(row))) for row in real)
    assert all(len(row) > 1 for row in real) or stride == window or stride < window - 1
