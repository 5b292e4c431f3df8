"""Shards that are overwritten or replaced while they are read: no record is part old, part new, or bad."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain

import numpy as np
import pytest
import tables  # noqa: F401 - starts what pyarrow keeps
from equal_sizes import FORMATS, make

import dataload
from dataload._util.caches import pickling_for_worker
from dataload.errors import ChangedFileError, WorkerError

ROWS = 40
DECODED = (".parquet", ".jsonl.gz", ".csv")  # as a whole, and kept
MESSAGE = (
    "the file (was overwritten while it was in use|has been rewritten since|has been written to since|had .* bytes)"
)


def overwrite(path, new):
    """Copy the bytes of a data set into the files of another, a second after their last change."""
    if path.is_dir():
        for name in sorted({*os.listdir(path)} - {"lock.mdb"}):
            overwrite(path / name, new / name)
        return
    before, data = os.stat(path), new.read_bytes()
    assert len(data) == before.st_size
    with open(path, "r+b") as stream:
        stream.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def opened(tmp_path, suffix, **more):
    path, new = tmp_path / f"a{suffix}", tmp_path / "new" / f"a{suffix}"
    new.parent.mkdir()
    make(path, suffix, 1)
    make(new, suffix, 2)
    return path, new, dataload.open(path, **FORMATS[suffix][1], **more)


@pytest.mark.parametrize(
    ("suffix", "mapped"),
    [(name, how) for name in FORMATS for how in (True, False) if how or name not in (*DECODED, ".folder")],
)
def test_a_read_after_the_overwrite_is_an_error(tmp_path, suffix, mapped):
    path, new, source = opened(tmp_path, suffix, **({} if mapped else {"map": False}))
    before = source.read([0, 20])
    overwrite(path, new)
    if suffix in DECODED:  # what is kept is read on
        assert repr(source.read([0, 20])) == repr(before)
        with pickling_for_worker():
            source = pickle.loads(pickle.dumps(source))
    for read in (source.read, source.read_batch):
        with pytest.raises(ChangedFileError, match=MESSAGE):
            read([1, 5])
    source.close()
    with dataload.open(path, **FORMATS[suffix][1]) as again:
        assert repr(again.read([0])[0]) != repr(before[0])


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        *((workers, {"on_error": on_error}) for workers in (0, 2) for on_error in ("raise", "skip")),
        (2, {"executor": "fork"}),
    ],
)
def test_the_job_ends(tmp_path, workers, settings):
    path, new, source = opened(tmp_path, ".tar")
    with dataload.Loader(source, batch_size=4, num_workers=workers, prefetch=1, **settings) as loader:
        batches = [next(iter(loader))]
        overwrite(path, new)
        # The steps ahead of the consumer were read before.
        with pytest.raises(WorkerError, match="the file was overwritten while it was in use") as caught:
            batches.extend(chain.from_iterable(loader for _ in range(3)))
    assert isinstance(caught.value.__cause__, ChangedFileError)
    assert all((batch["x"] == 1).all() for batch in batches)
    assert loader.statistics().bad == 0


@pytest.mark.parametrize("suffix", [".syr", ".tar"])
@pytest.mark.parametrize(("num_workers", "executor"), [(0, "threads"), (2, "processes")])
def test_the_end_of_an_epoch_looks_at_all_files(tmp_path, suffix, num_workers, executor):
    path, new, source = opened(tmp_path, suffix)
    settings = {"num_workers": num_workers, "executor": executor}
    both = dataload.concat([source, dataload.open(path, **FORMATS[suffix][1])])
    twice = dataload.concat([both, both[:]])
    with dataload.Loader(twice, batch_size=2 * len(source), epochs=2, **settings) as loader:
        assert len([*loader]) == 2
        batches = iter(loader)
        assert (next(batches)["x"] == 1).all()
        next(batches)
        overwrite(path, new)
        with pytest.raises(ChangedFileError, match="was overwritten while it was in use"):
            next(batches)


@pytest.fixture
def several(tmp_path, monkeypatch):
    """Open ten shards, of which three may be open, and three mapped."""
    monkeypatch.setattr("dataload.sources.file_source.most_open_shards", lambda: 3)
    monkeypatch.setattr("dataload.storage.local.shard_maps.most_maps", lambda: 3)

    def several(suffix, **more):
        paths = [tmp_path / f"{shard}{suffix}" for shard in range(10)]
        for shard, path in enumerate(paths):
            make(path, suffix, shard)
        return dataload.open(paths, **FORMATS[suffix][1], **more)

    return several


def check(source, indices):
    """Each record has the number of its shard."""
    [field] = [name for name in source.fields if not name.startswith("__")]
    columns = source.read_batch(indices, [field])[field]
    records = [record[field] for record in source.read(indices)]
    assert [row[0] for row in columns] == [row[0] for row in records] == [index // ROWS for index in indices]


def open_files(directory):
    """Files in a directory of which this process has a descriptor."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {target for target in found if target.startswith(f"{directory}{os.sep}")}


@pytest.mark.parametrize("suffix", [".syr", ".tar", ".lmdb", ".torchrecord", ".array_record", ".npy"])
def test_files_are_closed_and_those_that_were_replaced_meanwhile_are_refused(several, tmp_path, suffix):
    with several(suffix) as source:
        for seed in range(3):
            check(source, np.random.default_rng(seed).permutation(len(source))[:100])
            assert len(open_files(tmp_path)) <= 3
        check(source, range(0, len(source), 9))  # ends with the last shard
        make(new := tmp_path / f"new{suffix}", suffix, 7)  # as long, and different
        path = tmp_path / f"0{suffix}"
        where = "data.mdb" if path.is_dir() else ""
        os.replace(new / where, path / where)
        with pytest.raises(ChangedFileError, match="has been rewritten since it was opened: open the data set again"):
            source.read([0])
        check(source, [len(source) - 1])


@pytest.mark.slow_suite
@pytest.mark.parametrize(("suffix", "options"), [(".tar", {}), (".syr", {"map": False})])
def test_eight_threads_keep_few_files_open(several, tmp_path, suffix, options):
    source = several(suffix, **options)

    def work(seed):
        for indices in np.random.default_rng(seed).integers(0, len(source), (20, 9)):
            check(source, indices)
            assert len(open_files(tmp_path)) <= 3 + 8  # each thread holds on to the one that it reads

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(work, range(8))] == [None] * 8
    assert len(open_files(tmp_path)) <= 3, "none stays open that is not counted"
    source.close()
    assert open_files(tmp_path) == set()


def test_an_environment_of_lmdb_may_be_written_to_by_lmdb(tmp_path):
    lmdb = pytest.importorskip("lmdb")
    path, _, source = opened(tmp_path, ".lmdb")
    before = source.read([0, 7])
    batches = iter(dataload.Loader(source, batch_size=len(source), epochs=1))
    next(batches)
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"another", bytes(300))
    os.utime(path / "data.mdb", ns=(0, 2**62))  # also if both were within a tick of the clock
    assert repr(source.read([0, 7])) == repr(before)
    assert next(batches, None) is None, "the end of an epoch looks at the files, too"
