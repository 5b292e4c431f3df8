"""`max_record_bytes` in every format that reads files: larger records are refused, and the others are read."""

import io
import tarfile

import numpy as np
import pytest
from typer.testing import CliRunner

import dataload
from dataload.cli.app import app
from dataload.errors import ConfigError, CorruptFileError, SourceError
from dataload.sources.files import FileSource
from dataload.sources.registry import built_in_formats
from dataload.sources.shards import ShardReader
from dataload.sources.tokens.format import TokenOptions

LIMIT = 1_000
SIZES = [10, 800, 1_100, 10]
BAD = 2
TOO_LARGE = r"the record takes [\d,]+ bytes of memory, and max_record_bytes is 1,000: the file is damaged or malicious"
FORMATS = [entry for entry in built_in_formats() if entry.takes_paths]


def write(path, records, **options):
    with dataload.create(path, **options) as writer:
        writer.extend(records)
    return path


def arrays_of(size):
    return {"x": np.zeros(size, np.uint8)}


def text_of(size):
    return {"x": "a" * size}


ARRAYS = {"options": "group_size:1,uncompressed"}
NPZ = {"codec": "npz"}
DECODED = {"decode": "auto"}
CASES = [
    ("a.lmdb", bytes, {}, {}),
    ("a.lmdb", arrays_of, NPZ, NPZ),
    ("a.torchrecord", arrays_of, {}, {}),
    ("a.syr", arrays_of, {}, {}),
    ("a.syr", text_of, {}, {}),
    ("a.tar", lambda size: {"x": bytes(size)}, {}, {}),
    ("a.tar", arrays_of, {}, DECODED),
    ("a.tar", text_of, {}, DECODED),
    ("a.array_record", bytes, ARRAYS, {}),
    ("a.array_record", bytes, {}, {}),
    ("a.array_record", arrays_of, {**ARRAYS, **NPZ}, NPZ),
]


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    ("name", "record", "writing", "reading", "one_length"),
    [*((*case, False) for case in CASES), (*CASES[0], True), (*CASES[3], True)],
)
def test_a_record_that_is_stored_in_more(tmp_path, name, record, writing, reading, one_length, mapped):
    # archives of numpy have some bytes more than their arrays
    sizes = [size // 4 if "codec" in writing and size < LIMIT else size for size in SIZES]
    good = [0, 1, 3]
    if one_length:
        sizes, good = [1_100] * 4, []
    path = write(tmp_path / name, map(record, sizes), **writing)
    with dataload.open(path, **reading, map=mapped) as source:
        assert len(source.read([BAD])) == 1
        default = source.fingerprint()
    with dataload.open(path, **reading, map=mapped, max_record_bytes=LIMIT) as source:
        assert not good or source.fingerprint() == default
        assert len(source.read(good)) == len(good)
        for read in (source.read, source.read_batch):
            with pytest.raises(CorruptFileError, match=TOO_LARGE) as caught:
                read([*good[:1], BAD, *good[1:2]])
            assert caught.value.index == BAD
            assert str(path) in caught.value.path


def test_a_sparse_archive_that_claims_much(tmp_path):
    path = tmp_path / "a.tar"
    info = tarfile.TarInfo("0.bin")
    info.size = 1 << 40
    with open(path, "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(512 + info.size + 1024)
    with pytest.raises(CorruptFileError, match=r"the record takes 1,099,511,627,776 bytes of memory, and max_record_b"):
        dataload.open(path)[0]


def zipped():
    np.savez_compressed(stream := io.BytesIO(), x=np.zeros(10_000))
    return {"x.npz": stream.getvalue()}


NUMBERS = [{"x": np.zeros(count, np.int64)} for count in (10, 900)]  # of one byte each
EXAMPLE = {"codec": "example"}


@pytest.mark.parametrize(
    ("name", "records", "writing", "reading", "message"),
    [
        ("a.torchrecord", NUMBERS, {}, {}, "key 1 of sub-database db0: .* a list of 900 integers takes 7,200"),
        ("a.lmdb", NUMBERS, EXAMPLE, EXAMPLE, "record 1: a list of 900 integers takes 7,200 bytes"),
        ("a.tar", [zipped()] * 2, {}, DECODED, "field 'x' of '0+1': an archive of 1 members takes 80,128 bytes"),
    ],
)
def test_a_codec_of_a_format_has_the_limit(tmp_path, name, records, writing, reading, message):
    source = dataload.open(write(tmp_path / name, records, **writing), **reading, max_record_bytes=LIMIT)
    for read in (source.read, source.read_batch):
        with pytest.raises(CorruptFileError, match=message):
            read([1])


@pytest.mark.parametrize("entry", FORMATS, ids=lambda entry: entry.name)
def test_every_format_has_the_option(entry):
    required = {"tokens": {"window": 2}, "tfds": {"split": "train"}}.get(entry.name, {})
    assert entry.reader_options.parse(required, "x").max_record_bytes == 1 << 30
    assert "max_record_bytes" not in entry.reader_options.parse({**required, "max_record_bytes": 5}, "x").content()
    for wrong in (0, -1, 1.5, "1", True, None):
        with pytest.raises(ConfigError, match=f"max_record_bytes must be an integer >= 1, got {wrong!r}"):
            entry.reader_options.parse({**required, "max_record_bytes": wrong}, "x")


def test_windows_of_tokens():
    assert TokenOptions(window=500, max_record_bytes=LIMIT).window == 500
    with pytest.raises(ConfigError, match="window is 501, more tokens of uint16 than max_record_bytes allows, 1,000"):
        TokenOptions(window=501, max_record_bytes=LIMIT)


def test_configs_and_the_command_line_have_it(tmp_path):
    path = write(tmp_path / "a.lmdb", map(bytes, SIZES))
    table = {"source": {"path": str(path), "max_record_bytes": LIMIT}, "loader": {"batch_size": 4}}
    with dataload.from_config(table) as loader, pytest.raises(dataload.WorkerError, match=TOO_LARGE):
        list(loader)
    with pytest.raises(ConfigError, match=r"source\.max_record_bytes is 0: expected a whole number >= 1"):
        dataload.from_config(table, overrides=["source.max_record_bytes=0"])
    done = CliRunner().invoke(app, ["verify", str(path), "-o", f"max_record_bytes={LIMIT}"])
    assert done.exit_code == 1
    assert "max_record_bytes is 1,000" in done.output.replace("\n", " ")
    assert CliRunner().invoke(app, ["verify", str(path)]).exit_code == 0


class Reader(ShardReader):
    def __len__(self):
        return 3

    def read(self, indices, fields):
        return np.empty((len(indices), 1 << 60), np.uint8)


class Greedy(FileSource):
    format_name = "greedy"

    def _open_shard(self, path):
        return Reader()


@pytest.mark.parametrize("paths", [["a"], ["a", "b"]])
def test_memory_that_there_is_not(paths, monkeypatch):
    source = Greedy(paths)
    message = (
        r"Greedy\(.*\): reading 2 records at once needs more memory than this process may have: read fewer "
        r"at once \(batch_size\), or lower max_record_bytes, so that larger ones are refused"
    )
    for read in (source.read, source.read_batch):
        with pytest.raises(SourceError, match=message) as caught:
            read([0, 1])
        assert isinstance(caught.value.__cause__, MemoryError)
        assert caught.value.path == "a"
    monkeypatch.setattr(Greedy, "_open_shard", lambda *_: np.empty(1 << 60, np.uint8))
    with pytest.raises(SourceError, match="cannot read a: this needs more memory than this process may have; the file"):
        len(Greedy(paths))
