import os

import pytest
from array_record.python.array_record_module import ArrayRecordReader

from dataload.errors import ConfigError, SourceError
from dataload.sources.array_record.reader import ArrayRecordSource
from dataload.sources.array_record.writer import ArrayRecordWriter

RECORDS = [b"", b"a", bytes(range(256)) * 300, b"last"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.array_record"


@pytest.mark.parametrize("options", ["group_size:1", "group_size:1,uncompressed", "group_size:3,brotli:4", ""])
def test_the_original_reads_what_is_written(path, options):
    with ArrayRecordWriter(path, options=options) as writer:
        writer.extend([*RECORDS[:2], bytearray(RECORDS[2]), memoryview(RECORDS[3])])
        assert len(writer) == 4
    reader = ArrayRecordReader(str(path))
    assert reader.ok()
    assert reader.read_all() == RECORDS
    reader.close()


def test_records_that_are_not_bytes(path):
    text = type("Text", (), {"name": "text", "decode": len, "encode": lambda self, record: str(record)})
    writer = ArrayRecordWriter(path, codec=text())
    with pytest.raises(ConfigError, match="codec text encoded a record as str, not bytes"):
        writer.write({"x": 1})
    writer.abort()
    with ArrayRecordWriter(path) as writer:
        writer.write(b"good")
        with pytest.raises(ConfigError, match="stores bytes, got a record of type dict: choose a codec"):
            writer.write({"x": 1})
    assert list(ArrayRecordSource(path)) == [b"good"]


def test_options_that_the_package_does_not_know(path, tmp_path):
    with pytest.raises(ConfigError, match=r"options 'group_size:1,fast': Unknown option fast, valid options: .*zstd"):
        ArrayRecordWriter(path, options="group_size:1,fast")
    assert os.listdir(tmp_path) == []


def test_a_package_that_fails_to_write(path, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("write() failed: No space left on device")

    full = type("Full", (), {"write": fail, "close": fail, "ok": lambda self: True, "__init__": lambda *_: None})
    monkeypatch.setattr("array_record.python.array_record_module.ArrayRecordWriter", full)
    writer = ArrayRecordWriter(path)
    for act in (lambda: writer.write(b"a"), writer.close):
        with pytest.raises(SourceError, match=r"cannot write .*x.array_record: .*No space left on device"):
            act()
    assert os.listdir(tmp_path) == []
