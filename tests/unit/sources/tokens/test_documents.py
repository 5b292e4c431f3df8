"""Documents: Megatron's index, segments and positions of windows, and what our writer writes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dataload
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.sources.tokens.documents import build_index, load_documents
from dataload.sources.tokens.windows import mark_documents

GOLDEN = Path(__file__).parents[3] / "golden" / "tokens"


def open_tokens(path, **options):
    return dataload.open(path, format="tokens", **options)


def documents_of(source, field="tokens"):
    """The documents that windows of one token, which never cross documents, put together."""
    ends = np.cumsum(source.sequence_lengths)
    tokens = source.read_batch(np.arange(len(source)))[field][:, 0]
    return [part.tolist() for part in np.split(tokens, ends[:-1])]


@pytest.mark.parametrize("name", ["u16", "i32"])
def test_what_megatron_writes(name):
    expected = json.loads((GOLDEN / f"{name}.json").read_text())
    source = open_tokens(GOLDEN / f"{name}.bin", documents=True, window=1, ends="drop")
    assert documents_of(source) == expected
    assert source.fields["tokens"].dtype == {"u16": "uint16", "i32": "int32"}[name]
    same = open_tokens(GOLDEN / f"{name}.bin", documents=GOLDEN / f"{name}.idx", window=1, ends="drop")
    assert same.fingerprint() == source.fingerprint()
    packed = open_tokens(GOLDEN / f"{name}.bin", documents=True, window=8, stride=8)
    flat = [(token, at) for document in expected for at, token in enumerate(document)]
    assert [record["tokens"].tolist() for record in packed] == [
        [token for token, _ in flat[start : start + 8]] for start in range(0, len(flat) - 7, 8)
    ]


@pytest.mark.parametrize("name", ["u16", "i32"])
def test_an_index_is_built_as_megatron_builds_it(name):
    data = (GOLDEN / f"{name}.idx").read_bytes()
    documents = json.loads((GOLDEN / f"{name}.json").read_text())
    lengths = np.array([len(document) for document in documents])
    found = load_documents(str(GOLDEN / f"{name}.idx"))
    assert np.diff(found.starts).tolist() == lengths.tolist()
    built = b"".join(build_index(lengths, found.dtype))
    assert built[:18] == data[:18], "magic, version and dtype"
    assert built[-8 * (len(documents) + 1) :] == np.arange(5, dtype="<i8").tobytes()


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    window=st.integers(1, 30),
    rows=st.lists(st.integers(0, 40), max_size=8),
)
def test_segments_and_positions(lengths, window, rows):
    documents = [(number, at) for number, length in enumerate(lengths) for at in range(length)]
    starts = np.array([start for start in rows if start + window <= len(documents)], np.int64)
    segments, positions = mark_documents(np.cumsum([0, *lengths]), starts, window)
    assert segments.dtype == positions.dtype == np.int32
    assert segments.shape == positions.shape == (len(starts), window)
    for row, start in enumerate(starts.tolist()):
        numbers = [number for number, _ in documents[start : start + window]]
        assert segments[row].tolist() == [1 + sorted({*numbers}).index(number) for number in numbers]
        assert positions[row].tolist() == [at - numbers.index(number) for at, number in enumerate(numbers)]


def test_windows_across_documents_say_where_they_begin(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, 0, 3, 0, 4, 5, 6], "<u2"))
    source = open_tokens(tmp_path / "a.npy", window=4, stride=4, end_token=0)
    batch = source.read_batch([1, 0])
    assert batch["tokens"].tolist() == [[0, 4, 5, 6], [1, 2, 0, 3]]
    assert batch["segment_ids"].tolist() == [[1, 2, 2, 2], [1, 1, 1, 2]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2], [0, 1, 2, 0]]
    assert source.read_batch([0], fields=["position_ids"])["position_ids"].tolist() == [[0, 1, 2, 0]]
    assert list(source.fields) == ["tokens", "segment_ids", "position_ids"]
    without = open_tokens(tmp_path / "a.npy", window=4, stride=4)
    assert list(without.fields) == ["tokens"]
    assert without.fingerprint() != source.fingerprint()


@pytest.mark.parametrize("suffix", ["npy", "bin"])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_documents_are_written_and_read_back(tmp_path, suffix, dtype):
    documents = [[5, 6, 7], [], [60_000], list(range(300))]
    path = tmp_path / f"x.{suffix}"
    with dataload.create(path, format="tokens", dtype=dtype, end_token=9) as writer:
        for number, document in enumerate(documents):
            writer.write(np.array(document, np.int64) if number % 2 else {"tokens": document, "name": "x"})
    found = documents_of(open_tokens(path, documents=True, window=1, ends="drop", dtype=dtype))
    assert found == [[*document, 9] for document in documents]
    flat = np.load(path) if suffix == "npy" else np.fromfile(path, dtype)
    assert (flat.tolist(), flat.dtype) == ([t for document in documents for t in [*document, 9]], dtype)
    with pytest.raises(ConfigError, match=r"x\.\w+ exists"):
        dataload.create(path, format="tokens")
    with dataload.create(path, format="tokens", overwrite=True) as writer:
        writer.write([1])
    assert documents_of(open_tokens(path, documents=True, window=1, ends="drop")) == [[1]]


def test_what_is_no_document(tmp_path):
    with dataload.create(tmp_path / "x.bin", format="tokens") as writer:
        for record, match in (
            ({"text": "a"}, "record 0 has no tokens: expected integers in one dimension in 'tokens', got the fields t"),
            ([1.5], r"in 'tokens', got \[1.5\]"),
            ([[1]], r"got \[\[1\]\]"),
            ([3, 65_536], "the token 65536, which uint16 does not hold: pass dtype='int32'"),
            ([-1], "the token -1"),
        ):
            with pytest.raises(ConfigError, match=match):
                writer.write(record)
        writer.abort()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"dtype is 'uint32': did you mean 'int32'\?"):
        dataload.create(tmp_path / "x.bin", format="tokens", dtype="uint32")


def test_damaged_indexes(tmp_path):
    good = (GOLDEN / "u16.idx").read_bytes()
    shutil.copy(GOLDEN / "u16.bin", tmp_path / "x.bin")
    for data, match in (
        (good[:20], "an index has at least 34 bytes, found 20"),
        (good[:-1], "bytes, found"),
        (good[:9] + b"\2" + good[10:], "expected an index of version 1, found .* version 2"),
        (good[:17] + b"\7" + good[18:], r"dtype 7 is none of integers: expected 1 \(uint8\)"),
        (good[:34] + b"\xff\xff\xff\xff" + good[38:], "sequence 0 has -1 tokens at byte 0"),
        (good[:-8] + b"\xff" * 8, "a document begins at none of the"),
        (good[:18] + b"\xff" * 8 + good[26:], "an index of 18446744073709551615 sequences"),
    ):
        (tmp_path / "x.idx").write_bytes(data)
        with pytest.raises(CorruptFileError, match=match):
            open_tokens(tmp_path / "x.bin", documents=True, window=1)
    (tmp_path / "x.idx").write_bytes(good)
    with pytest.raises(ConfigError, match=r"dtype is int64, but the index of .* says uint16: leave it out"):
        open_tokens(tmp_path / "x.bin", documents=True, window=1, dtype="int64")
    (tmp_path / "y.bin").write_bytes(bytes(4))
    with pytest.raises(SourceNotFoundError, match=r"y\.idx"):
        open_tokens(tmp_path / "y.bin", documents=True, window=1)
    shutil.copy(tmp_path / "x.idx", tmp_path / "y.idx")
    with pytest.raises(CorruptFileError, match="an index of 33 tokens, beside a file of 2: it is that of another"):
        open_tokens(tmp_path / "y.bin", documents=True, window=1)
