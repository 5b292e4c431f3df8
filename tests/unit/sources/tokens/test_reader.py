"""Tokens: options, documents, damage, and how they are found; tests/properties has the windows themselves."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_files import write_tokens as write

import dataload
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError, UnsupportedFormatError
from dataload.sources.tokens.documents import build_index, load_documents
from dataload.sources.tokens.reader import TokenSource, mark_documents

PAD = 9
NO_TOKENS = np.zeros(4), np.zeros((2, 2), int), np.zeros(4, ">u2"), np.array(3)


def test_files_of_any_size(tmp_path):
    path = tmp_path / "huge.bin"
    with open(path, "wb") as stream:
        stream.truncate(1 << 36)  # sparse
        stream.seek(-8, os.SEEK_END)
        stream.write(np.arange(4, dtype="<u2").tobytes())
    source = TokenSource(path, window=8, stride=8)
    assert len(source) == 2**32
    assert source[-1]["tokens"].tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    path = write(tmp_path / "a.bin", range(4))
    assert (len(TokenSource(path, window=5)), TokenSource(path, window=5).read_batch([])) == (0, {})
    assert TokenSource([path, path], window=5).sequence_lengths.tolist() == [0, 0]
    for window, documents, ranges, last in (
        *((5, None, [[0], [8]], [0, 1, 2, 3, PAD]), (5, [0, 2], [[0, 0], [8, 8]], [2, 3, PAD, PAD, PAD])),
        (3, None, [[0, 2], [6, 6]], [3, PAD, PAD]),
    ):
        source = TokenSource(path, window=window, stride=window, documents=documents, ends="pad", pad_token=PAD)
        found = source._data_set().reader(0).ranges(np.arange(len(source)), None)
        assert [each.tolist() for each in found] == ranges
        assert (source[-1]["tokens"].tolist(), source[-1]["token_count"]) == (last, window - last.count(PAD))
    empty = write(tmp_path / "none.npy", [], "<i8")
    assert len(TokenSource(empty, window=5, ends="pad")) == len(TokenSource(empty, window=1, end_token=0)) == 0
    assert len(TokenSource([write(tmp_path / "a.npy", range(9), "<i4"), empty], window=3)) == 4  # of any dtype


def test_a_shard_of_documents_without_tokens_has_no_windows(tmp_path):
    with dataload.create(tmp_path / "a.bin", format="tokens", records_per_shard=1) as writer:
        writer.extend([np.arange(3), np.arange(0), np.arange(5)])
    for options in ({}, {"documents": True}, {"end_token": 2}, {"documents": True, "ends": "drop"}):
        assert dataload.open(tmp_path, window=2, **options).shard_lengths == (2, 0, 4)


def test_end_tokens_at_the_borders_of_what_is_scanned_at_once(tmp_path):
    border = 1 << 21
    tokens = np.ones(2 * border, np.uint16)
    tokens[[border - 1, border, 2 * border - 2]] = 0
    for path in (tmp_path / "a.bin", tmp_path / "a.npy"):
        found = TokenSource(write(path, tokens), window=1, stride=1, end_token=0, ends="drop").sequence_lengths
        assert found.tolist() == [border, 1, border - 2, 1]


def test_documents_in_a_file_as_one_path_or_a_list(tmp_path):
    path, starts = write(tmp_path / "a.bin", range(9)), tmp_path / "starts.npy"
    np.save(starts, np.array([0, 4, 4]))
    lists = [0, 4, 4], (0, 4, 4, 9), np.array([0, 4, 4], np.uint32), [[0, 4, 4]]
    for documents, lengths in (*((each, [2, 0, 2]) for each in (starts, str(starts), [starts], *lists)), ([0], [4])):
        source = TokenSource(path, window=2, stride=2, documents=documents, ends="drop")
        assert source.sequence_lengths.tolist() == lengths, documents
    assert len(TokenSource(write(tmp_path / "none.npy", []), window=2, documents=[], ends="drop")) == 0


def test_the_fingerprint_is_of_tokens_and_windows_and_not_of_places(tmp_path):
    def fingerprint(tokens=range(50), name="a.bin", **options):
        return TokenSource(write(tmp_path / name, tokens), **{"window": 5, **options}).fingerprint()

    starts = tmp_path / "starts.npy"
    np.save(starts, [0, 10])
    same = fingerprint(ends="drop", documents=[0, 10])
    assert fingerprint(stride=4) == fingerprint()
    assert fingerprint(ends="drop", documents=starts) == same
    different = [
        *({}, {"window": 6}, {"stride": 5}, {"tokens": range(1, 51)}, {"dtype": "int16"}, {"field": "ids"}),
        *({"ends": "pad"}, {"ends": "pad", "pad_token": 1}, {"ends": "drop", "documents": [0, 11]}),
    ]
    assert len({fingerprint(**each) for each in different} | {same}) == len(different) + 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(({"window": window}, f"window must be an integer >= 1, got {window}") for window in (0, 2.5)),
        ({"stride": 0}, r"stride must be an integer >= 1, got 0"),
        ({"ends": "cross"}, r"ends is 'cross': did you mean 'across'\?"),
        ({"dtype": "float32"}, r"dtype must be a little-endian integer type .* got 'float32'"),
        ({"dtype": ">u2"}, r"dtype must be a little-endian"),
        ({"dtype": "uint17"}, r"dtype must be a little-endian"),
        ({"documents": [0], "end_token": 0, "ends": "drop"}, r"documents and end_token both say .* give only one"),
        ({"ends": "pad", "field": "token_count"}, r"field is 'token_count', which ends='pad' adds"),
        ({"end_token": 0, "field": "segment_ids"}, r"field is 'segment_ids', which ends='across' adds"),
        ({"documents": False}, "documents must be True, text, a path, an array, a list or None; got False"),
        ({"documents": ["x", "y"], "ends": "drop"}, r"documents of a\.bin: expected one integer per document"),
        ({"end_token": 65_536, "ends": "drop"}, r"end_token must be an integer in \[0, 65536\), got 65536"),
        ({"pad_token": -1, "ends": "pad"}, r"pad_token must be an integer in \[0, 65536\), got -1"),
        ({"documents": [1, 4], "ends": "drop"}, r"0 as the first start, got 1: give starts, not ends"),
        ({"documents": [], "ends": "drop"}, r"0 as the first start, got none"),
        ({"documents": [0, 4, 3], "ends": "drop"}, r"rising starts, got 4 at 1 and 3 after it"),
        ({"documents": [0, 4, 12], "ends": "drop"}, r"starts up to the 9 tokens of the file, got 12 at 2"),
        ({"documents": np.zeros(2), "ends": "drop"}, r"one integer per document, got an array of float64 \(2,\)"),
        ({"documents": np.zeros((1, 2), int), "ends": "drop"}, r"one integer per document, got .* \(1, 2\)"),
    ],
)
def test_wrong_options(tmp_path, options, match):
    path = write(tmp_path / "a.bin", range(9))
    with pytest.raises(ConfigError, match=match):
        len(TokenSource(path, **{"window": 3, **options}))


@pytest.mark.parametrize(
    ("files", "options", "error", "match"),
    [
        (["a.bin", "b.bin"], {"documents": "starts.npy"}, ConfigError, "documents has 1 entries for 2 files: give one"),
        (["a.bin", "b.bin"], {"documents": [[0]]}, ConfigError, "documents has 1 entries for 2 files: give one for ea"),
        (["a.bin", "b.bin"], {"documents": [[0]] * 3}, ConfigError, "documents has 3 entries for 2 files: give one fo"),
        (["a.bin", "a.bin"], {"documents": [[0], [0]]}, ConfigError, "paths must not name a file twice"),
        (["w.npy", "b.bin"], {}, ConfigError, r"w\.npy contains int32 tokens, .*b\.bin contains uint16 .* one dtype"),
        (["empty.bin"], {}, CorruptFileError, r"empty\.bin: the file is empty"),
        (["odd.bin"], {}, CorruptFileError, "byte 4: 5 bytes are not a whole number of uint16 tokens"),
        (["cut.npy"], {}, CorruptFileError, "9 tokens of uint16 have 18 bytes, found 16"),
        (["zeros.npy"], {}, CorruptFileError, r"zeros\.npy, byte 0: a \.npy file must start with"),
        (["gone.bin"], {}, SourceNotFoundError, r"there is no .*gone\.bin"),
        (["a.bin"], {"documents": "gone.npy"}, SourceNotFoundError, r"there is no .*gone\.npy"),
        (["a.bin"], {"documents": "odd.bin"}, CorruptFileError, r"odd\.bin: a \.npy file must start with"),
        (["a.bin"], {"documents": "falling.npy"}, CorruptFileError, r"falling\.npy: documents of a\.bin: expected ris"),
        *(
            ([f"{n}.npy"], {}, UnsupportedFormatError, re.escape(f"{each.dtype.str} {each.shape}, not little-end"))
            for n, each in enumerate(NO_TOKENS)
        ),
    ],
)
def test_files_that_do_not_fit(tmp_path, monkeypatch, files, options, error, match):
    monkeypatch.chdir(tmp_path)
    for name in ("a.bin", "b.bin", "a.npy"):
        write(tmp_path / name, range(9))
    write(tmp_path / "w.npy", range(9), "<i4")
    data = (tmp_path / "a.npy").read_bytes()
    damaged = {"empty.bin": b"", "odd.bin": b"12345", "cut.npy": data[:-2], "zeros.npy": bytes(len(data))}
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
    np.save("falling.npy", [0, 5, 4])
    for n, each in enumerate(NO_TOKENS):
        np.save(f"{n}.npy", each)
    with pytest.raises(error, match=match):
        len(TokenSource([tmp_path / name for name in files], window=3, ends="drop", **options))


def test_a_config_opens_tokens_with_documents_beside_it(tmp_path):
    write(tmp_path / "train.bin", range(100))
    np.save(tmp_path / "starts.npy", [0, 40])
    path = tmp_path / "train.toml"
    path.write_text(
        '[source]\npath = "train.bin"\nformat = "tokens"\nwindow = 11\nends = "drop"\ndocuments = "starts.npy"\n'
        "[loader]\nbatch_size = 3\n"
    )
    with dataload.from_config(path) as loader:
        batches = [batch["tokens"][:, 0].tolist() for batch in loader]
    assert batches == [[0, 10, 20], [40, 50, 60], [70, 80]]


GOLDEN = Path(__file__).parents[3] / "golden" / "tokens"


def open_tokens(path, **options):
    return dataload.open(path, format="tokens", **options)


def documents_of(source, field="tokens"):
    """The documents that windows of one token, which never cross documents, put together."""
    ends = np.cumsum(source.sequence_lengths)
    tokens = source.read_batch(np.arange(len(source)))[field][:, 0]
    return [part.tolist() for part in np.split(tokens, ends[:-1])]


@pytest.mark.parametrize("name", ["u16", "i32"])
def test_what_megatron_writes_is_read_and_written(name):
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
    data = (GOLDEN / f"{name}.idx").read_bytes()
    lengths = np.array([len(document) for document in expected])
    found = load_documents(str(GOLDEN / f"{name}.idx"))
    assert np.diff(found.starts).tolist() == lengths.tolist()
    built = b"".join(build_index(lengths, found.dtype))
    assert built[:18] == data[:18], "magic, version and dtype"
    assert built[-8 * (len(expected) + 1) :] == np.arange(5, dtype="<i8").tobytes()


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
    path, end = tmp_path / f"x.{suffix}", np.iinfo(dtype).max
    with dataload.create(path, format="tokens", dtype=dtype, end_token=end) as writer:
        for number, document in enumerate(documents):
            writer.write(np.array(document, np.int64) if number % 2 else {"tokens": document, "name": "x"})
    found = documents_of(open_tokens(path, documents=True, window=1, ends="drop", dtype=dtype))
    assert found == [[*document, end] for document in documents]
    flat = np.load(path) if suffix == "npy" else np.fromfile(path, dtype)
    assert (flat.tolist(), flat.dtype) == ([t for document in documents for t in [*document, end]], dtype)
    with pytest.raises(ConfigError, match=r"x\.\w+ exists"):
        dataload.create(path, format="tokens")
    with dataload.create(path, format="tokens", overwrite=True) as writer:
        writer.write([1])
    assert documents_of(open_tokens(path, documents=True, window=1, ends="drop")) == [[1]]


def test_new_tokens_are_never_beside_the_index_of_others(tmp_path, monkeypatch):
    for token in (1, 2):
        writer = dataload.create(tmp_path / "x.bin", format="tokens", overwrite=True)
        writer.write([token])
        if token == 2:
            monkeypatch.setattr(writer._index, "publish", lambda: None)  # as if it had been ended there
        writer.close()
    assert (tmp_path / "x.bin").read_bytes() == b"\2\0"
    assert not (tmp_path / "x.idx").exists()


def test_tokens_at_the_limits_of_their_dtype(tmp_path):
    with dataload.create(tmp_path / "x.npy", format="tokens", dtype="int8", end_token=-128) as writer:
        writer.write([-128, 127])
        for wrong in (-129, 128):
            with pytest.raises(ConfigError, match=rf"record 1 has the token {wrong}, which int8 does not hold"):
                writer.write([0, wrong])
        assert (len(writer), writer.stored_bytes) == (1, 3)
    assert np.load(tmp_path / "x.npy").tolist() == [-128, 127, -128]


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
    for options, match in (
        ({"dtype": "uint32"}, r"dtype is 'uint32': did you mean 'int32'\?"),
        ({"end_token": 65_536}, r"end_token must be an integer in \[0, 65536\), got 65536"),
        ({"end_token": -129, "dtype": "int8"}, r"end_token must be an integer in \[-128, 128\), got -129"),
    ):
        with pytest.raises(ConfigError, match=match):
            dataload.create(tmp_path / "x.bin", format="tokens", **options)


def test_damaged_indexes(tmp_path):
    good = (GOLDEN / "u16.idx").read_bytes()
    shutil.copy(GOLDEN / "u16.bin", tmp_path / "x.bin")
    for data, match in (
        (good[:20], "an index has at least 34 bytes, found 20"),
        (good[:-1], "bytes, found"),
        (good[:9] + b"\2" + good[10:], "expected an index of version 1, found .* version 2"),
        (good[:17] + b"\7" + good[18:], r"dtype 7 is not one of integers: expected 1 \(uint8\)"),
        (good[:34] + b"\xff\xff\xff\xff" + good[38:], "sequence 0 has -1 tokens at byte 0"),
        (good[:-8] + b"\xff" * 8, "a document begins outside of the"),
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
    with pytest.raises(CorruptFileError, match="an index of 33 tokens, beside a file of 2: it belongs to another"):
        open_tokens(tmp_path / "y.bin", documents=True, window=1)
