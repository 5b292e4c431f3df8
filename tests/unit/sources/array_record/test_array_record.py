import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from array_records import PLAIN, write_records
from refusals import refuses

from dataload.codecs import example, msgpack
from dataload.errors import (
    ChangedFileError,
    ConfigError,
    CorruptFileError,
    MachineError,
    SourceError,
    SourceNotFoundError,
    UnsupportedFormatError,
)
from dataload.sources.array_record.reader import ArrayRecordSource, FileInstruction
from dataload.sources.array_record.writer import ArrayRecordWriter


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(0)
    return [b"%d:" % index + rng.bytes(int(rng.integers(0, 300))) for index in range(3000)]


@pytest.fixture(scope="module")
def path(tmp_path_factory, records):
    return write_records(tmp_path_factory.mktemp("array_record") / "x.array_record", records)


def fields(index):
    return {"x": np.arange(index, index + 3, dtype=np.float32), "label": np.array([index % 300])}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "e.array_record"
    return write_records(path, (example.encode(fields(index)) for index in range(700)))


@pytest.mark.parametrize("size", [1, 2, 50, 1500])
def test_any_request_is_that_of_the_original(path, records, size):
    """Both ways of reading: by one list, and by runs."""
    original = ArrayRecordReader(path)
    rng = np.random.default_rng(size)
    with ArrayRecordSource(path) as source:
        for request in (rng.integers(0, 3000, size), np.arange(size), np.arange(size)[::-1], np.repeat(7, size)):
            found = source.read(request)
            assert found == original.read(request.tolist()) == [records[index] for index in request]
            assert source.read_batch(request) == found


def test_groups_are_read_with_a_warning_for_each_file(tmp_path, records):
    files = [write_records(tmp_path / f"{name}.array_record", records[:200], "group_size:16") for name in "ab"]
    source = ArrayRecordSource([files[0], f"{files[0]}[3:9]", files[1]])
    with pytest.warns(UserWarning, match="was written with group_size:16: .* group_size:1 ") as warned:
        assert source.read([5, 199, 200, 206]) == [records[5], records[199], records[3], records[0]]
    assert [str(w.message).split()[0] for w in warned] == files
    assert pickle.loads(pickle.dumps(source)).read(range(50)) == records[:50]  # has said it


def test_slices_and_instructions_select_without_opening(tmp_path, path, records):
    instruction = SimpleNamespace(filename=path, skip=10, take=3, examples_in_shard=5)
    assert isinstance(instruction, FileInstruction)
    paths = [instruction, f"{path}[100:102]", f"{path}[0:0]", path]
    source = ArrayRecordSource(paths)
    assert source.paths == (f"{path}[10:13]", f"{path}[100:102]", f"{path}[0:0]", path)
    assert source.shard_lengths == (3, 2, 0, 3000)
    assert source.read([0, 4, 5, 2]) == [records[10], records[101], records[0], records[12]]
    assert ArrayRecordSource(instruction).read([2]) == [records[12]]
    assert len({ArrayRecordSource(p).fingerprint() for p in paths}) == 4
    ArrayRecordSource(tmp_path / "not there[3:4]")
    instruction.take = -1
    with pytest.raises(ConfigError, match=r"x.array_record: skip=10, take=-1: neither may be negative"):
        ArrayRecordSource(instruction)


def test_every_truncation_is_noticed_when_the_file_is_opened(tmp_path, path):
    data = Path(path).read_bytes()
    assert len(data) >= 4 * 65536
    cut = tmp_path / "cut.array_record"
    for size in {*range(0, len(data), 65536), *range(7, len(data), 60013), 64, 65535, len(data) - 1}:
        cut.write_bytes(data[:size])
        with pytest.raises(CorruptFileError, match=r"cut.array_record.*(truncated|never closed|Corrupted|Failed)"):
            len(ArrayRecordSource(cut))
    cut.write_bytes(data + bytes(65536))
    with pytest.raises(CorruptFileError, match=r"no valid end: Corrupted Riegeli/records"):
        len(ArrayRecordSource(cut))


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("x.array_record[5:2]", {}, ConfigError, r"x.array_record\[5:2\]: the slice ends at record 2, before its star"),
        ("x.array_record[2000:3001]", {}, ConfigError, r"x.array_record\[2000:3001\] .* 2000 to 3001; the file has 30"),
        ("x.array_record[99999999999999999999:99999999999999999999]", {}, ConfigError, "the file has 3000"),
        ("other", {}, UnsupportedFormatError, r"is not an ArrayRecord file, .*: byte 0 has b'GS"),
        ("y.array_record", {}, SourceNotFoundError, r"there is no .*y.array_record: the directory .* exists"),
        (".", {}, SourceError, r"cannot read .*: Is a directory"),
        ("x.array_record", {"reader_options": "fast"}, ConfigError, "'fast': Unknown option fast, valid opt.*: .*read"),
        ("x.array_record", {"codec": "example", "fields": ["lable"]}, ConfigError, "has no field 'lable'"),
        ("x.array_record", {"fields": ["label"]}, ConfigError, "fields were given, but the records are plain bytes: g"),
    ],
)
def test_what_does_not_fit(path, examples, name, options, error, message):
    directory = Path(path).parent
    (directory / "other").write_bytes(b"GS\0\0" + bytes(200_000))
    with pytest.raises(error, match=message) as caught:
        len(ArrayRecordSource(examples if "lable" in message else directory / name, **options))
    assert "[" not in name or caught.value.key == "paths"


def test_fields_are_chosen(examples, path, records):
    with ArrayRecordSource(examples, codec="example") as source:
        assert {name: str(spec) for name, spec in source.fields.items()} == {"x": "float32 (3)", "label": "int64 (1)"}
        request = np.random.default_rng(0).integers(0, 700, 400)  # labels are of one byte and of two
        np.testing.assert_equal(source.read(request), [fields(index) for index in request])
    with ArrayRecordSource(examples, codec="example", fields=["label"]) as source:
        assert list(source.fields) == ["label"]
        np.testing.assert_equal(source.read([5, 2]), [{"label": [5]}, {"label": [2]}])
        np.testing.assert_equal(source.read_batch(range(9)), {"label": np.arange(9)[:, None]})
    with ArrayRecordSource(examples) as source, pytest.raises(ConfigError, match="records are bytes, not fields"):
        source.read_batch([0], fields=["label"])
    with ArrayRecordSource(path, codec=len) as source:
        assert source.fields == {}
        assert source.read([3, 1]) == [len(records[3]), len(records[1])]
        np.testing.assert_array_equal(source.read_batch([3, 1]), [len(records[3]), len(records[1])])


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (RuntimeError("odd"), CorruptFileError, r"x.array_record: odd$"),
        (MemoryError("std::bad_alloc"), MachineError, "reading 2 records at once needs more memory"),
    ],
)
def test_errors_of_the_package_that_no_single_record_repeats(path, monkeypatch, raised, kind, message):
    class Flaky(ArrayRecordReader):
        def read(self, *request):
            if len(request) == 1 or request[1] - request[0] > 1:
                raise type(raised)(*raised.args)
            return super().read(*request)

    monkeypatch.setattr("array_record.python.array_record_module.ArrayRecordReader", Flaky)
    with ArrayRecordSource(path) as source:
        len(source)
        with pytest.raises(kind, match=message):
            source.read([1, 2])
        monkeypatch.undo()
        assert source.read([1, 2])[0].startswith(b"1:")  # by another reader


def test_a_file_cut_while_it_is_open(tmp_path, records):
    """The original gives empty records, without an error."""
    path = write_records(tmp_path / "x", [os.urandom(4000) for _ in range(100)], PLAIN)
    size = os.path.getsize(path)
    with ArrayRecordSource(path) as mapped, ArrayRecordSource(path, reader_options="") as source:
        mapped.read([1, 2])
        source.read([1, 2])
        os.truncate(path, 65536)
        message = f"had {size} bytes when it was opened and has 65536 now|rewri|overwri"
        for request in ([99], range(100), [0, 98, 99]):
            for cut in (source, mapped):
                refuses(cut, request, message, ChangedFileError)


def test_records_that_do_not_decode(tmp_path):
    good = [msgpack.encode({"a": index}) for index in range(20)]
    path = write_records(tmp_path / "x", [*good[:9], b"\xc1", *good[10:]])
    with ArrayRecordSource(f"{path}[4:20]", codec="msgpack") as source:
        assert source[0] == {"a": 4}
        refuses(source, [0, 1, 5, 6], r"x, record 9: invalid msgpack \(1 bytes\)", path=path, index=9)
    # A first record that is damaged does not keep the others from being read.
    with ArrayRecordSource(f"{path}[9:20]", codec="msgpack") as source:
        assert (source.fields, source[1]) == ({}, {"a": 10})


RECORDS = [b"", b"a", bytes(range(256)) * 300, b"last"]


@pytest.fixture
def new(tmp_path):
    return tmp_path / "x.array_record"


@pytest.mark.parametrize("options", ["group_size:1", "group_size:1,uncompressed", "group_size:3,brotli:4", ""])
def test_the_original_reads_what_is_written(new, options):
    with ArrayRecordWriter(new, options=options) as writer:
        writer.extend([*RECORDS[:2], bytearray(RECORDS[2]), memoryview(RECORDS[3])])
        assert len(writer) == 4
    reader = ArrayRecordReader(str(new))
    assert reader.ok()
    assert reader.read_all() == RECORDS
    reader.close()


def test_records_that_are_not_bytes(new):
    text = type("Text", (), {"name": "text", "decode": len, "encode": lambda self, record: str(record)})
    writer = ArrayRecordWriter(new, codec=text())
    with pytest.raises(ConfigError, match="codec text encoded a record as str, not bytes"):
        writer.write({"x": 1})
    writer.abort()
    with ArrayRecordWriter(new) as writer:
        writer.write(b"good")
        with pytest.raises(ConfigError, match="stores bytes, got a record of type dict: choose a codec"):
            writer.write({"x": 1})
    assert list(ArrayRecordSource(new)) == [b"good"]


def test_options_that_the_package_does_not_know(new, tmp_path):
    with pytest.raises(ConfigError, match=r"options 'group_size:1,fast': Unknown option fast, valid options: .*zstd"):
        ArrayRecordWriter(new, options="group_size:1,fast")
    assert os.listdir(tmp_path) == []


def test_a_package_that_fails_to_write(new, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("write() failed: No space left on device")

    full = type("Full", (), {"write": fail, "close": fail, "ok": lambda self: True, "__init__": lambda *_: None})
    monkeypatch.setattr("array_record.python.array_record_module.ArrayRecordWriter", full)
    writer = ArrayRecordWriter(new)
    for act in (lambda: writer.write(b"a"), writer.close):
        with pytest.raises(
            MachineError, match=r"cannot write .*x.array_record: No space left on device; .* bytes are free"
        ):
            act()
    assert os.listdir(tmp_path) == []
