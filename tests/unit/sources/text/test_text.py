"""Text files: files, lines and paragraphs, what a directory stands for, compression, damage."""

import gzip
import re

import numpy as np
import pytest
import tables  # noqa: F401 - starts what pyarrow keeps
from hypothesis import given
from hypothesis import strategies as st

import dataload
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.sources.text.reader import spans_of


def fill(directory, **files):
    for name, text in files.items():
        path = directory / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return directory


@given(st.text("a \n\r", max_size=40))
def test_lines_and_paragraphs_are_those_of_the_text(text):
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    for paragraphs, expected in ((False, [line for line in lines if line]), (True, None)):
        starts, lengths = spans_of(text.encode(), paragraphs=paragraphs)
        found = [text[i : i + n] for i, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
        if expected is None:
            joined = "\n".join(lines)
            expected = [part for part in re.split(r"\n{2,}", joined.strip("\n")) if part]
            found = [part.replace("\r\n", "\n") for part in found]
        assert found == expected


def test_a_directory_of_texts(tmp_path):
    texts = {"b_txt": "one\r\ntwo\n\n\nthree\n", "a_md": "é", "in__c_txt_gz": "x\ny\n", "d_txt": ""}
    directory = fill(tmp_path / "books", **texts, README_md="no", LICENSE="no", _hidden_txt="no")
    source = dataload.open(directory)
    assert [record["file"] for record in source] == ["a.md", "b.txt", "d.txt", "in/c.txt.gz"]
    assert [record["text"] for record in source] == ["é", "one\r\ntwo\n\n\nthree\n", "", "x\ny\n"]
    assert source.read_batch([3, 0], ["file"]) == {"file": ["in/c.txt.gz", "a.md"]}
    lines = dataload.open(directory, records="line")
    assert [record["text"] for record in lines] == ["é", "one", "two", "three", "x", "y"]
    assert lines.reads_in_order
    found = [lines._data_set().reader(shard).ranges(np.array([0, 2]), None) for shard in (1, 3)]
    assert [found[0][0].tolist(), found[0][1].tolist(), found[1]] == [[0, 11], [3, 5], None]
    paragraphs = dataload.open([directory / "b.txt"] * 2, format="text", records="paragraph", fields=["text"])
    assert [*paragraphs] == [{"text": "one\r\ntwo"}, {"text": "three"}] * 2
    assert len({each.fingerprint() for each in (source, lines, dataload.open(directory, map=False))}) == 2
    with dataload.Loader(lines, batch_size=6, num_workers=2, executor="processes") as loader:
        assert next(iter(loader))["text"][-1] == "y"
    parts = lines.split({"a": 0.5, "b": 0.5}, group="file", stratify="text")
    assert {record["file"] for record in parts["a"]}.isdisjoint(record["file"] for record in parts["b"])


def test_a_directory_of_texts_at_a_url(tmp_path, object_server):
    directory = fill(tmp_path / "books", b_txt="one\n\ntwo\n", a_md_gz="x\n", README_md="no")
    bucket, reading = object_server.bucket(), {"storage_options": object_server.storage_options()}
    object_server.put_directory(bucket, directory, "books/")
    object_server.put_directory(bucket, fill(tmp_path / "other", b_txt="one", c_bin="no"), "other/")
    for options in ({}, {"records": "line"}, {"records": "paragraph"}):
        local = dataload.open(directory, **options)
        far = dataload.open(f"{object_server.url(bucket)}/books", **options, **reading)
        assert [*far] == [*local]
        assert far.fingerprint() == local.fingerprint()
    with pytest.raises(SourceNotFoundError, match=r"other has no files with a suffix of a known format: it has b\.txt"):
        dataload.open(f"{object_server.url(bucket)}/other", **reading)


def test_notes_beside_other_data_are_no_texts(tmp_path):
    beside = fill(tmp_path / "beside", notes_txt="no", x_jsonl='{"a": 1}\n')
    assert [*dataload.open(beside)] == [{"a": 1}]
    assert len(dataload.open(beside, format="text")) == 1
    deeper = fill(tmp_path / "deeper", notes_txt="no", in__x_csv="a\n1\n")
    with pytest.raises(SourceNotFoundError, match="has no files with a suffix of a known format"):
        dataload.open(deeper)
    with pytest.raises(SourceNotFoundError, match=r"has no files \.txt or \.md"):
        dataload.open(fill(tmp_path / "empty", README_md="no"), format="text")
    with pytest.raises(ConfigError, match="records is 'word'"):
        dataload.open(beside, format="text", records="word")


def test_damage(tmp_path):
    directory = fill(tmp_path, a_txt=b"good\nb\xffd\n", b_txt=b"\xef\xbb\xbfmark")
    source = dataload.open(directory, records="line")
    assert source[2]["text"] == "mark"
    with pytest.raises(CorruptFileError, match=r"a\.txt, byte 6, record 1: the text is not UTF-8: invalid start byte"):
        source.read([0, 1])
    with pytest.raises(CorruptFileError, match="the text of the file takes 9 bytes of memory"):
        dataload.open(directory, records="line", max_record_bytes=3)
    with pytest.raises(CorruptFileError, match=r"a\.txt, record 0: the record takes 9 bytes of memory"):
        dataload.open(directory, max_record_bytes=8).read([0])
