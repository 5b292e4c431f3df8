"""Data sets of more shards than may be open: tables stay, files come and go, and replaced files are noticed."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from line_source import LineBackend, LineSource

import dataload
from dataload.errors import CorruptFileError
from dataload.sources import files

RECORDS = 3
OPTIONS = {
    "syrah": {},
    "tar": {"decode": "auto"},
    "lmdb": {"codec": "tensorprotos"},
    "torchrecord": {},
    "array_record": {"codec": "tensorprotos"},
    "tokens": {"window": 4, "stride": 4},
}
CONTENTS = {"lmdb": "data.mdb", "torchrecord": "data.mdb"}  # the file in a shard that is a directory


def write_shard(path, name, first):
    numbers = range(first, first + RECORDS)
    if name == "tokens":
        np.repeat(np.array(numbers, "<u2"), 4).tofile(path)
        return
    writer_options = {"codec": "tensorprotos"} if name in ("lmdb", "array_record") else {}
    with dataload.create(path, format=name, **writer_options) as writer:
        writer.extend({"x": np.full(5, number, np.int32)} for number in numbers)


def write_shards(directory, name, count):
    paths = [directory / f"{shard:03d}.{name}" for shard in range(count)]
    for shard, path in enumerate(paths):
        write_shard(path, name, RECORDS * shard)
    return paths


def open_shards(paths, name):
    return dataload.open([str(path) for path in paths], format=name, **OPTIONS[name])


def values(source, indices):
    [field] = [name for name in source.fields if not name.startswith("__")]
    columns = source.read_batch(indices, fields=[field])[field][:, 0]
    records = [record[field][0] for record in source.read(indices)]
    assert columns.tolist() == records
    return columns.tolist()


def open_files(directory):
    """Descriptors of this process on files in a directory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith(f"{directory}{os.sep}"):
            found.append(target)
    return found


@pytest.fixture
def few(monkeypatch):
    """Three shards may be open."""
    monkeypatch.setattr(files, "most_open_shards", lambda: 3)


@pytest.mark.parametrize("name", OPTIONS)
def test_files_are_closed_and_those_that_were_replaced_meanwhile_are_refused(name, tmp_path, few):
    paths = write_shards(tmp_path, name, 10)
    (tmp_path / "other").mkdir()
    write_shard(tmp_path / "other" / "x", name, 77)  # as long, and different
    with open_shards(paths, name) as source:
        for seed in range(3):
            indices = np.random.default_rng(seed).permutation(len(source))
            assert values(source, indices) == indices.tolist()
            assert len(set(open_files(tmp_path))) <= 3
        values(source, range(len(source)))  # ends with the last shard
        where = CONTENTS.get(name, "")
        os.replace(tmp_path / "other" / "x" / where, paths[0] / where)
        with pytest.raises(CorruptFileError, match="has been rewritten since it was opened: open the data set again"):
            source.read([0])
        assert values(source, [len(source) - 1]) == [len(source) - 1]


def test_eight_threads_keep_few_files_open(tmp_path, few):
    source = open_shards(write_shards(tmp_path, "tar", 20), "tar")
    len(source)
    wrong, most = [], []

    def work(seed):
        for indices in np.random.default_rng(seed).integers(0, len(source), (30, 9)):
            if source.read_batch(indices)["x"][:, 0].tolist() != indices.tolist():
                wrong.append(indices)
            most.append(len(set(open_files(tmp_path))))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert max(most) <= 3 + 8  # each thread holds on to the one that it reads
    assert len(set(open_files(tmp_path))) <= 3, "none stays open that is not counted"
    source.close()
    assert open_files(tmp_path) == []


def test_slow_shards_are_opened_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_SLOW_SECONDS", -1.0)
    together = threading.Barrier(2, timeout=30)

    class Waiting(LineSource):
        """Opens two shards only if both are being opened."""

        def _open_shard(self, path):
            if Path(path).name in ("1", "2"):
                together.wait()
            return super()._open_shard(path)

    for shard in range(6):
        LineBackend().write(tmp_path / str(shard), [{"data": bytes(20)}])
    assert len(Waiting([tmp_path / str(shard) for shard in range(6)])) == 6


def test_the_error_is_that_of_the_first_bad_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_SLOW_SECONDS", -1.0)
    late = threading.Event()

    class Slow(LineSource):
        """Finds the damage of shard 2 after that of shard 5."""

        def _open_shard(self, path):
            try:
                if Path(path).name == "2":
                    assert late.wait(30)
                return super()._open_shard(path)
            finally:
                if Path(path).name == "5":
                    late.set()

    for shard in range(8):
        LineBackend().write(tmp_path / str(shard), [{"data": bytes(20)}])
    for shard in (2, 5):
        (tmp_path / str(shard)).write_bytes(b"zz\nend")
    with pytest.raises(CorruptFileError, match=rf"{tmp_path}/2, record 0"):
        len(Slow([tmp_path / str(shard) for shard in range(8)]))
