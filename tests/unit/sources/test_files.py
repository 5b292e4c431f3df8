"""Sources in files: what is opened when, by whom, and what becomes of files that are replaced."""

import itertools
import os
import pickle
import re
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from line_source import LineBackend, LineSource

import dataload
from dataload._util import interactive, threads
from dataload._util.caches import pickling_for_worker
from dataload.errors import ConfigError, CorruptFileError, SourceError, SourceNotFoundError
from dataload.sources import file_source as files
from dataload.sources.base import check_files
from dataload.sources.file_source import FileSource
from dataload.testing.child import ReadReport, read_in_fork


def record(i):
    return {"data": bytes([i]) * 12 + b"tail" * (i % 3)}


@pytest.fixture
def make(tmp_path):
    def make(*lengths, directory="data"):
        (tmp_path / directory).mkdir(exist_ok=True)
        paths, first = [], 0
        for shard, length in enumerate(lengths):
            paths.append(tmp_path / directory / f"{shard}.lines")
            LineBackend().write(paths[-1], [record(i) for i in range(first, first + length)])
            first += length
        return paths

    return make


def tags(records):
    return [int(record["x"][0, 0]) for record in records]


class Counting(LineSource):
    """Counts what it opens."""

    def __init__(self, paths, **options):
        super().__init__(paths, **options)
        self.opened = []

    def _open_shard(self, path):
        self.opened.append(os.path.basename(path))
        return super()._open_shard(path)


class Optional(LineSource):
    def __init__(self, paths, **options):
        FileSource.__init__(self, paths, **options)


def replace(path, first):
    """Replace a file by one of equal length with other records."""
    size = path.stat().st_size
    new = path.with_suffix(".new")
    LineBackend().write(new, [record(first + i) for i in range(3)])
    assert new.stat().st_size == size
    os.replace(new, path)


def test_a_repr_has_the_end_of_a_long_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x" * 79, "x" * 80):
        LineBackend().write(Path(name), [record(0)])
    assert repr(LineSource(["x" * 79])) == f"LineSource('{'x' * 79}')"
    assert repr(LineSource(["x" * 80, "x" * 79])) == f"LineSource('...{'x' * 77}', 2 shards)"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_worker_processes_refuse_a_file_that_was_replaced_after_it_was_opened(make):
    paths = make(3, 3)
    source = LineSource(paths)
    with pickling_for_worker():
        unread = pickle.dumps(source)
    assert tags(source) == [0, 1, 2, 3, 4, 5]
    elsewhere = pickle.dumps(source)
    with pickling_for_worker():
        data = pickle.dumps(source)
    assert len(data) < len(elsewhere) + 350  # of which 24 bytes a file
    worker = pickle.loads(data)
    from_worker = pickle.dumps(worker)
    assert tags(worker) == [0, 1, 2, 3, 4, 5]
    replace(paths[1], 6)
    message = r"/1\.lines: the file has been rewritten since it was opened: open the data set again"
    with pytest.raises(CorruptFileError, match=message):
        pickle.loads(data).read([3])  # a file is compared when it is opened
    assert tags(pickle.loads(data).read([0])) == [0]
    [reading] = read_in_fork([source])
    assert re.search(message, reading.error)
    assert tags(source) == tags(worker) == [0, 1, 2, 3, 4, 5]
    for pickled in (unread, elsewhere, from_worker):  # nothing to compare, or another machine
        assert tags(pickle.loads(pickled).read([3])) == [6]
    paths[0].write_bytes(b"")
    check_files(source)  # what is not mapped may change


@pytest.mark.parametrize(
    ("paths", "fields", "error", "message"),
    [
        ([], None, ConfigError, "a source needs at least one path, got an empty list"),
        ("no/x.lines", None, SourceNotFoundError, r"there is no .*: the directory .*/data exists, but has no"),
        (["0.lines", "gone.lines"], None, SourceNotFoundError, r"there is no .*gone\.lines"),
        (".", None, SourceError, "cannot read .*: Is a directory"),
        (["0.lines", "bad.lines"], None, CorruptFileError, r"bad\.lines, record 0: a line is not a hexadecimal number"),
        ("0.lines", ["dat"], ConfigError, r"0\.lines has no field 'dat': did you mean 'data'\? Choose from data, x"),
    ],
)
def test_what_cannot_be_opened(make, paths, fields, error, message):
    directory = make(2)[0].parent
    (directory / "bad.lines").write_bytes(b"zz\nend")
    names = [str(directory / name) for name in ([paths] if isinstance(paths, str) else paths)]
    with pytest.raises(error, match=message) as caught:
        len(LineSource(names, fields=fields))
    if error is ConfigError:
        assert caught.value.key in ("paths", "fields")
    else:
        assert caught.value.path == names[-1]


@pytest.mark.parametrize("read_before", [False, True])
def test_a_forked_process_does_not_wait_for_a_lock_of_its_parent(make, read_before):
    """Another thread is opening the files at the moment of the fork."""
    forked, opening = threading.Event(), threading.Event()

    class Slow(LineSource):
        def _open_shard(self, path):
            if threading.current_thread() is not threading.main_thread():
                opening.set()
                forked.wait(30)
            return super()._open_shard(path)

    source = Slow(make(3))
    if read_before:
        assert len(source) == 3
    with ThreadPoolExecutor(1) as pool:
        pool.submit(len, source)
        try:
            assert read_before or opening.wait(30)
            [reading] = read_in_fork([source])
        finally:
            forked.set()
    assert (reading.error, len(reading.digests)) == ("", 3)


def test_threads_of_a_forked_process_open_once(make):
    source = Counting(make(3))
    assert len(source) == 3

    def read_by_threads(source):
        source.opened.clear()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: int(source[i % 3]["x"][0, 0]), range(64)))
        return ReadReport(digests=(str(found == [i % 3 for i in range(64)]), str(source.opened)))

    [reading] = read_in_fork([source], read=read_by_threads)
    assert reading.digests == ("True", "['0.lines']")


def test_fingerprint_names_content_and_options(make, tmp_path):
    paths = make(3, 2)
    one = LineSource(paths).fingerprint()
    for same in (LineSource(paths), LineSource(make(3, 2, directory="elsewhere")), Optional(paths, codec=None)):
        assert same.fingerprint() == one
    options = [
        *({"codec": codec} for codec in (len, max, "npz")),
        *({"decode": {"x": function}} for function in (len, max)),
        {"shapes": {"x": (1, 2)}},
    ]
    different = [
        *(LineSource(some) for some in (paths[::-1], paths[:1])),
        *(LineSource(paths, fields=fields) for fields in (["x"], ["data"])),
        *(Optional(paths, **each) for each in options),
    ]
    assert len({source.fingerprint() for source in different} | {one}) == 11
    renamed = paths[0].rename(tmp_path / "renamed.lines")
    assert LineSource([renamed, paths[1]]).fingerprint() != one


@pytest.fixture
def clock(monkeypatch):
    """Opening each shard takes so many seconds."""

    def clock(seconds):
        for module in (interactive, threads):
            monkeypatch.setattr(module, "perf_counter", itertools.count(0, seconds).__next__)

    return clock


@pytest.mark.parametrize(("terminal", "seconds"), [(True, 3), (True, 0.1), (False, 3), (None, 3)])
@pytest.mark.parametrize("shards", [3, 12])  # these in threads
def test_a_terminal_shows_how_many_shards_are_open(make, clock, monkeypatch, capsys, shards, terminal, seconds):
    clock(seconds)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    if terminal is None:  # as in a program without a console
        monkeypatch.setattr(sys, "stderr", None)
    assert len(LineSource(make(*[1] * shards))) == shards
    shown = capsys.readouterr().err
    if terminal and seconds > 2:
        assert shown.endswith(f"\r{shards - 1} of {shards} shards are open\r{shards} of {shards} shards are open\n")
    else:
        assert not shown


def test_slow_shards_are_opened_side_by_side_and_the_error_is_that_of_the_first(make, clock):
    clock(0.02)
    late = threading.Event()

    class Slow(LineSource):
        """Finds the damage of shard 2 after that of shard 5."""

        def _open_shard(self, path):
            shard = os.path.basename(path)[0]
            try:
                assert shard != "2" or late.wait(30)
                return super()._open_shard(path)
            finally:
                if shard == "5":
                    late.set()

    paths = make(*[1] * 8)
    assert len(Slow(paths)) == 8
    late.clear()
    for shard in (2, 5):
        paths[shard].write_bytes(b"zz\nend")
    with pytest.raises(CorruptFileError, match=rf"{paths[2]}, record 0"):
        len(Slow(paths))


def test_more_shards_than_may_be_open(make, monkeypatch):
    """The ones used last stay open; see test_overwritten.py for each format."""
    for limit, most in ((400, 100), (20, 8), (resource.RLIM_INFINITY, 1 << 30)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert files.most_open_shards() == most
    monkeypatch.setattr(files, "most_open_shards", lambda: 3)
    source = Counting(make(*[2] * 10))
    assert source.opened == []
    for indices in (range(20), [18, 19, 18], [0, 18, 1]):
        assert tags(source.read(indices)) == [*indices]
    assert sorted(source.opened) == [f"{shard}.lines" for shard in range(10)], "each is opened once"
    assert source.read_batch(range(19, -1, -1))["x"][:, 0, 0].tolist() == list(range(19, -1, -1))


@pytest.mark.parametrize("suffix", [".syr", ".lmdb", ".jsonl"])
def test_more_sources_than_files_may_be_open(tmp_path, suffix):
    paths = [tmp_path / f"{n}{suffix}" for n in range(30)]
    for n, path in enumerate(paths):
        with dataload.create(path) as writer:
            writer.write({"x": n})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as lowest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno() + 25, hard))
    try:
        sources = [dataload.open(path) for path in paths]
        assert [int(source[0]["x"]) for source in sources] == [*range(30)]
        mixed = dataload.mix([(source, 1) for source in sources])
        assert sorted(mixed.read_batch(range(30))["x"].tolist()) == [*range(30)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
