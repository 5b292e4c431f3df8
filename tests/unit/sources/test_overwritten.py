"""Shards that are overwritten in place while they are read: no record is part old, part new, or bad."""

import os
import pickle
import zipfile
from itertools import chain

import numpy as np
import pytest
import tables  # noqa: F401 - starts what pyarrow keeps

import dataload
from dataload._util.per_process import pickling_for_worker
from dataload.errors import ChangedFileError, WorkerError

ROWS = 40
UNCOMPRESSED = "group_size:1,uncompressed"
DECODED = (".parquet", ".jsonl.gz", ".csv")  # as a whole, and kept
# suffix -> options of the writer, and of the reader
FORMATS = {
    ".syr": ({}, {}),
    ".tar": ({}, {}),
    ".arrow": ({}, {}),
    ".parquet": ({}, {}),
    ".jsonl": ({}, {}),
    ".jsonl.gz": ({}, {}),
    ".tfrecord": ({"codec": "npz"}, {"codec": "npz"}),
    ".lmdb": ({"codec": "npz"}, {"codec": "npz"}),
    ".torchrecord": ({}, {}),
    ".array_record": ({"codec": "npz", "options": UNCOMPRESSED}, {"codec": "npz"}),
    ".compressed.array_record": ({"codec": "npz"}, {"codec": "npz"}),
    ".csv": (None, {}),
    ".zip": (None, {"pattern": "{key}.bin"}),
    "/": (None, {"pattern": "{key}.bin", "format": "folder"}),
}
MESSAGE = (
    "the file (was overwritten while it was in use|has been rewritten since|has been written to since|had .* bytes)"
)


def make(path, value):
    """Write a data set; all of one format are of equal size, and LMDB's have the same meta page."""
    suffix = path.name[1:]
    options = FORMATS["/" if path.name == "b" else suffix][0]
    if options is not None:
        with dataload.create(path, **options) as writer:
            for index in range(ROWS):
                x = np.full(256, value, np.int32) if suffix not in (".jsonl", ".jsonl.gz") else [value] * 9
                writer.write({"__key__": f"{index:03}", "x": x} if suffix == ".tar" else {"x": x})
    elif suffix == ".csv":
        path.write_text("x\n" + f"{value}\n" * ROWS)
    elif suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for index in range(ROWS):
                archive.writestr(f"{index:03}.bin", bytes([value]) * 300)
    else:
        path.mkdir()
        for index in range(ROWS):
            (path / f"{index:03}.bin").write_bytes(bytes([value]) * 300)


def overwrite(path, new):
    """Copy the bytes of a data set into the files of another, a second after their last change."""
    if path.is_dir():
        for name in sorted(os.listdir(path)):
            if name != "lock.mdb":
                overwrite(path / name, new / name)
        return
    before, data = os.stat(path), new.read_bytes()
    assert len(data) == before.st_size
    with open(path, "r+b") as stream:
        stream.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def opened(tmp_path, suffix, **more):
    path, new = tmp_path / f"a{suffix}" if suffix != "/" else tmp_path / "b", tmp_path / "new"
    new.mkdir()
    new /= path.name
    make(path, 1)
    make(new, 2)
    return path, new, dataload.open(path, **{**FORMATS[suffix][1], **more})


@pytest.mark.parametrize(
    ("suffix", "mapped"),
    [(name, how) for name in FORMATS for how in (True, False) if how or name not in (*DECODED, "/")],
)
def test_a_read_after_the_overwrite_is_an_error(tmp_path, suffix, mapped):
    path, new, source = opened(tmp_path, suffix, **({} if mapped else {"map": False}))
    before = source.read([0, 20])
    overwrite(path, new)
    if suffix in DECODED:  # what is kept is read on
        assert repr(source.read([0, 20])) == repr(before)
        source = pickle.loads(for_worker(source))
    for read in (lambda: source.read([1, 5]), lambda: source.read_batch([1, 5])):
        with pytest.raises(ChangedFileError, match=MESSAGE):
            read()
    source.close()
    with dataload.open(path, **FORMATS[suffix][1]) as again:
        assert repr(again.read([0])[0]) != repr(before[0])


def for_worker(source):
    with pickling_for_worker():
        return pickle.dumps(source)


@pytest.mark.parametrize(
    ("workers", "settings", "on_error"),
    [(0, {}, "raise"), (0, {}, "skip"), (2, {}, "raise"), (2, {}, "skip"), (2, {"executor": "processes"}, "raise")],
)
def test_the_job_ends(tmp_path, workers, settings, on_error):
    path, new, source = opened(tmp_path, ".tar")
    settings = settings and {**settings, "start_method": "fork"}
    loader = dataload.Loader(source, batch_size=4, num_workers=workers, prefetch=1, on_error=on_error, **settings)
    with loader:
        batches = [next(iter(loader))]
        overwrite(path, new)
        # The steps ahead of the consumer were read before.
        with pytest.raises(WorkerError, match="the file was overwritten while it was in use") as caught:
            batches.extend(chain.from_iterable(loader for _ in range(3)))
    assert isinstance(caught.value.__cause__, ChangedFileError)
    assert all((batch["x"] == 1).all() for batch in batches)
    assert loader.statistics().bad == 0


def test_an_environment_of_lmdb_may_be_written_to_by_lmdb(tmp_path):
    lmdb = pytest.importorskip("lmdb")
    path, _, source = opened(tmp_path, ".lmdb")
    before = source.read([0, 7])
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"another", bytes(300))
    os.utime(path / "data.mdb", ns=(0, 2**62))  # also if both were within a tick of the clock
    assert repr(source.read([0, 7])) == repr(before)
