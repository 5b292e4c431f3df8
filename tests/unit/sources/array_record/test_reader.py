import gc
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from dataload.codecs import example, msgpack
from dataload.collate import default_collate
from dataload.errors import (
    ChangedFileError,
    ConfigError,
    CorruptFileError,
    MachineError,
    MissingDependencyError,
    SourceError,
    SourceNotFoundError,
    UnsupportedFormatError,
)
from dataload.sources.array_record.reader import ArrayRecordSource, FileInstruction


def write(path, records, options="group_size:1"):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


@pytest.fixture
def records():
    rng = np.random.default_rng(0)
    return [b"%d:" % index + rng.bytes(int(rng.integers(0, 300))) for index in range(3000)]


@pytest.fixture
def path(tmp_path, records):
    return write(tmp_path / "x.array_record", records)


def fields(index):
    return {"x": np.arange(index, index + 3, dtype=np.float32), "label": np.array([index % 300])}


@pytest.fixture
def examples(tmp_path):
    return write(tmp_path / "e.array_record", (example.encode(fields(index)) for index in range(700)))


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


@pytest.mark.parametrize("options", ["group_size:1,uncompressed", "group_size:1,zstd:3", "group_size:1,snappy"])
@pytest.mark.parametrize("record_bytes", [0, 5000, 40_000])
def test_records_of_all_sizes(tmp_path, options, record_bytes):
    large = [os.urandom(record_bytes) for _ in range(60)]
    with ArrayRecordSource(write(tmp_path / "x", large, options)) as source:
        request = [5, 59, 0, 5, 6, 7, 8]
        assert source.read(request) == [large[index] for index in request]
        assert list(source) == large


def test_groups_are_read_with_a_warning_for_each_file(tmp_path, records):
    files = [write(tmp_path / f"{name}.array_record", records[:200], "group_size:16") for name in "ab"]
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


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("[5:2]", r"x.array_record\[5:2\]: the slice ends at record 2, before its start"),
        ("[2000:3001]", r"x.array_record\[2000:3001\] selects records 2000 to 3001; the file has 3000"),
        ("[99999999999999999999:99999999999999999999]", "the file has 3000"),
    ],
)
def test_slices_that_cannot_be(path, selection, message):
    with pytest.raises(ConfigError, match=message) as caught:
        len(ArrayRecordSource(path + selection))
    assert caught.value.key == "paths"


def test_every_truncation_is_noticed_when_the_file_is_opened(tmp_path, path):
    data = (tmp_path / "x.array_record").read_bytes()
    assert len(data) >= 4 * 65536
    cut = tmp_path / "cut.array_record"
    for size in {*range(0, len(data), 65536), *range(7, len(data), 20011), 64, 65535, len(data) - 1}:
        cut.write_bytes(data[:size])
        with pytest.raises(CorruptFileError, match=r"cut.array_record.*(truncated|never closed|Corrupted|Failed)"):
            len(ArrayRecordSource(cut))


def test_a_file_that_does_not_end_as_it_should(tmp_path, path):
    damaged = tmp_path / "damaged.array_record"
    data = bytearray((tmp_path / "x.array_record").read_bytes())
    damaged.write_bytes(data + bytes(65536))
    with pytest.raises(CorruptFileError, match=r"no valid end: Corrupted Riegeli/records"):
        len(ArrayRecordSource(damaged))
    damaged.write_bytes(data[:-65536])
    with pytest.raises(CorruptFileError, match=r"no valid end: "):
        len(ArrayRecordSource(damaged))


def test_files_that_are_something_else(tmp_path):
    other = tmp_path / "x.array_record"
    other.write_bytes(b"GS\0\0" + bytes(200_000))
    with pytest.raises(UnsupportedFormatError, match=r"is not an ArrayRecord file, .*: byte 0 has b'GS"):
        len(ArrayRecordSource(other))
    with pytest.raises(SourceNotFoundError, match=r"there is no .*y.array_record: the directory .* exists"):
        len(ArrayRecordSource(tmp_path / "y.array_record"))
    with pytest.raises(SourceError, match=r"cannot read .*: Is a directory"):
        len(ArrayRecordSource(tmp_path))


def test_a_file_cut_while_it_is_open(tmp_path, records):
    """The original gives empty records, without an error."""
    path = write(tmp_path / "x", [os.urandom(4000) for _ in range(100)], "group_size:1,uncompressed")
    size = os.path.getsize(path)
    with ArrayRecordSource(path) as mapped, ArrayRecordSource(path, reader_options="") as source:
        mapped.read([1, 2])
        source.read([1, 2])
        os.truncate(path, 65536)
        for request in ([99], range(100), [0, 98, 99]):
            for cut in (source, mapped):
                with pytest.raises(
                    ChangedFileError, match=f"had {size} bytes when it was opened and has 65536 now|rewri|overwri"
                ):
                    cut.read(request)


def test_empty_records_stay_readable_when_the_file_is_deleted(tmp_path):
    path = write(tmp_path / "x", [b"", b"a", b""])
    with ArrayRecordSource(path) as source:
        assert source.read([0, 1]) == [b"", b"a"]
        os.unlink(path)
        assert source.read([2, 1, 0]) == [b"", b"a", b""]


def test_options_of_the_reader(path, records):
    with ArrayRecordSource(path, reader_options="readahead_buffer_size:0,max_parallelism:1") as source:
        assert source[7] == records[7]
        assert "reader_options='readahead_buffer" in repr(source)
    with pytest.raises(ConfigError, match=r"reader_options 'fast': Unknown option fast, valid options: .*readahead"):
        len(ArrayRecordSource(path, reader_options="fast"))


def test_codecs_give_fields_and_columns(examples):
    with ArrayRecordSource(examples, codec="example") as source:
        assert {name: str(spec) for name, spec in source.fields.items()} == {"x": "float32 (3)", "label": "int64 (1)"}
        request = np.random.default_rng(0).integers(0, 700, 400)
        found = source.read(request)
        for index, record in zip(request, found, strict=True):
            np.testing.assert_equal(record, fields(index))
        batch = source.read_batch(request)  # labels are of one byte and of two
        np.testing.assert_equal(batch, default_collate(found))
        assert batch["x"].flags.writeable
        assert batch["label"].flags.writeable
        assert list(source.read_batch([3], fields=["label"])) == ["label"]


def test_fields_are_chosen(examples):
    with ArrayRecordSource(examples, codec="example", fields=["label"]) as source:
        assert list(source.fields) == ["label"]
        np.testing.assert_equal(source.read([5, 2]), [{"label": [5]}, {"label": [2]}])
        np.testing.assert_equal(source.read_batch(range(9)), {"label": np.arange(9)[:, None]})
    with pytest.raises(ConfigError, match="has no field 'lable': did you mean 'label'"):
        len(ArrayRecordSource(examples, codec="example", fields=["lable"]))
    with pytest.raises(ConfigError, match="fields were given, but the records are plain bytes: give a codec too"):
        ArrayRecordSource(examples, fields=["label"])
    with ArrayRecordSource(examples) as source, pytest.raises(ConfigError, match="records are bytes, not fields"):
        source.read_batch([0], fields=["label"])


def test_records_that_do_not_decode(tmp_path):
    good = [msgpack.encode({"a": index}) for index in range(20)]
    path = write(tmp_path / "x", [*good[:9], b"\xc1", *good[10:]])
    with ArrayRecordSource(f"{path}[4:20]", codec="msgpack") as source:
        assert source[0] == {"a": 4}
        with pytest.raises(CorruptFileError, match=r"x, record 9: invalid msgpack \(1 bytes\)") as caught:
            source.read([0, 1, 5, 6])
        assert (caught.value.path, caught.value.index) == (path, 9)
        with pytest.raises(CorruptFileError, match=r"x, record 9: invalid msgpack \(1 bytes\)"):
            source.read_batch([0, 1, 5, 6])
    # A first record that is damaged does not keep the others from being read.
    with ArrayRecordSource(f"{path}[9:20]", codec="msgpack") as source:
        assert source.fields == {}
        assert source[1] == {"a": 10}


def test_codecs_without_fields(path, records):
    with ArrayRecordSource(path, codec=len) as source:
        assert source.fields == {}
        assert source.read([3, 1]) == [len(records[3]), len(records[1])]
        np.testing.assert_array_equal(source.read_batch([3, 1]), [len(records[3]), len(records[1])])


def test_threads_need_no_more_than_a_few_descriptors(path):
    def open_here():
        return sum(os.readlink(f"/proc/self/fd/{fd}") == path for fd in os.listdir("/proc/self/fd") if _is_link(fd))

    barrier = threading.Barrier(16)

    def work(_):
        barrier.wait()
        return [source.read(range(50)) for _ in range(20)]

    with ArrayRecordSource(path) as source:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(16)))
        assert 1 <= open_here() <= 4
    gc.collect()
    assert open_here() == 0


def _is_link(fd):
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_fingerprints_tell_a_changed_last_record(tmp_path):
    """The last block of a file is padding but for its beginning, so its end tells nothing."""
    names, same = [], os.urandom(9000)
    for last in (b"abc", b"abd"):
        folder = tmp_path / last.decode()
        folder.mkdir()
        names.append(write(folder / "x.array_record", [same, last], "group_size:1,uncompressed"))
    one, two = (ArrayRecordSource(name) for name in names)
    assert os.path.getsize(names[0]) == os.path.getsize(names[1])
    assert one.fingerprint() != two.fingerprint()
    assert one.fingerprint() != ArrayRecordSource(names[0], codec="msgpack").fingerprint()


def test_without_the_package(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(MissingDependencyError, match=r"format 'array_record' needs array_record: pip install 'dataloa"):
        len(ArrayRecordSource(path))


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (RuntimeError("odd"), CorruptFileError, r"x.array_record: odd$"),
        (MemoryError("std::bad_alloc"), MachineError, "reading 2 records at once needs more memory"),
    ],
)
def test_errors_of_the_package_that_no_single_record_repeats(path, raised, kind, message):
    class Flaky:
        def read(self, *request):
            if len(request) == 1 or request[1] - request[0] > 1:
                raise raised
            return [b""]

    with ArrayRecordSource(path) as source:
        len(source)
        readers = source._data_set().reader(0)._readers
        readers._idle[:] = [Flaky()]
        with pytest.raises(kind, match=message):
            source.read([1, 2])
        assert readers._idle == []  # not used again
        assert source[1].startswith(b"1:")
