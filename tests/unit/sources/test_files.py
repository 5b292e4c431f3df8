import io
import os
import pickle
import re
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from line_source import LineBackend, LineFile, LineSource

import dataload
from dataload._util.per_process import pickling_for_worker
from dataload.errors import ClosedSourceError, ConfigError, CorruptFileError, SourceError, SourceNotFoundError
from dataload.sources import files
from dataload.sources.files import FileSource
from dataload.storage.errors import file_errors
from dataload.testing.child import Reading, read_in_fork
from dataload.types import FieldSpec


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


def replace(path, first):
    """Replace a file by one of equal length with other records."""
    size = path.stat().st_size
    new = path.with_suffix(".new")
    LineBackend().write(new, [record(first + i) for i in range(3)])
    assert new.stat().st_size == size
    os.replace(new, path)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_worker_processes_refuse_a_file_that_was_replaced_after_it_was_opened(make):
    paths = make(3, 3)
    source = LineSource(paths)
    assert tags(source.read(range(6))) == [0, 1, 2, 3, 4, 5]
    replace(paths[1], 6)
    with pickling_for_worker():
        data = pickle.dumps(source)
    assert len(data) < len(pickle.dumps(source)) + 100
    message = r"/1\.lines: the file has been rewritten since it was opened: open the data set again"
    with pytest.raises(CorruptFileError, match=message):
        pickle.loads(data).read([0])
    [reading] = read_in_fork([source])
    assert re.search(message, reading.error)
    assert tags(source.read(range(6))) == [0, 1, 2, 3, 4, 5]


def test_a_pickle_compares_nothing_if_the_source_was_never_opened_or_it_goes_elsewhere(make):
    paths = make(3)
    source = LineSource(paths)
    with pickling_for_worker():
        unread = pickle.dumps(source)
    assert tags(source.read([0])) == [0]
    elsewhere = pickle.dumps(source)
    with pickling_for_worker():
        worker = pickle.loads(pickle.dumps(source))
    from_worker = pickle.dumps(worker)
    assert tags(worker.read([0])) == [0]
    replace(paths[0], 6)
    for data in (unread, elsewhere, from_worker):
        assert tags(pickle.loads(data).read([0])) == [6]
    restored = LineSource.__new__(LineSource)  # from a pickle of a release that did not know this
    restored.__setstate__({name: value for name, value in source.__getstate__().items() if name != "_versions"})
    assert tags(restored.read([0])) == [6]


def test_one_path_or_several(make):
    [path] = make(3)
    for paths in (path, str(path), [path], (str(path),)):
        source = LineSource(paths)
        assert (source.paths, len(source)) == ((str(path),), 3)
    shards = LineSource(make(2, 0, 3, 1))
    assert shards.shard_lengths == (2, 0, 3, 1)
    assert tags(shards) == list(range(6))
    assert tags(shards.read([5, 0, 2, 2, -1])) == [5, 0, 2, 2, 5]
    batch = shards.read_batch([4, 1])
    assert (batch["x"][:, 0, 0].tolist(), batch["data"]) == ([4, 1], [b"tail", b"tail"])


@pytest.mark.parametrize(
    ("paths", "fields", "error", "message"),
    [
        ([], None, ConfigError, "a source needs at least one path, got an empty list"),
        ("x", "data", ConfigError, "fields must be a list of names, got the text 'data'"),
        ("no/x.lines", None, SourceNotFoundError, r"there is no .*: the directory .*/data exists, nothing of that nam"),
        (["0.lines", "gone.lines"], None, SourceNotFoundError, r"there is no .*gone\.lines"),
        (".", None, SourceError, "cannot read .*: Is a directory"),
        (["0.lines", "bad.lines"], None, CorruptFileError, r"bad\.lines, record 0: a line is not a hexadecimal number"),
        ("0.lines", ["dat"], ConfigError, r"0\.lines has no field 'dat': did you mean 'data'\? Known: data, x"),
    ],
)
def test_what_cannot_be_opened(make, tmp_path, monkeypatch, paths, fields, error, message):
    make(2)
    monkeypatch.chdir(tmp_path / "data")
    bad = tmp_path / "data" / "bad.lines"
    bad.write_bytes(b"zz\nend")
    names = [paths] if isinstance(paths, str) else paths
    with pytest.raises(error, match=message) as caught:
        len(LineSource([str(tmp_path / "data" / name) for name in names], fields=fields))
    if error is ConfigError:
        assert caught.value.key in ("paths", "fields")
    else:
        assert caught.value.path == str(tmp_path / "data" / names[-1])


def test_a_source_that_could_not_be_opened_may_be_opened_after_repair(make):
    [path] = make(3)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    source = LineSource(path)
    with pytest.raises(CorruptFileError):
        len(source)
    path.write_bytes(data)
    assert len(source) == 3
    source.close()
    with pytest.raises(ClosedSourceError, match=r"LineSource\('.*0\.lines'\) is closed: open it again to read"):
        pickle.loads(pickle.dumps(source))[0]


def test_errors_with_a_name_pass_unchanged():
    for error in (SourceNotFoundError("mine", path="x"), SourceError("mine")):
        with pytest.raises(type(error)) as caught, file_errors("y"):
            raise error
        assert caught.value is error
    with pytest.raises(SourceError, match="cannot read y: odd"), file_errors("y"):
        raise OSError("odd")


def test_fields_are_those_of_the_first_shard_with_records(make):
    class Knowing(LineFile):
        @property
        def fields(self):
            return super().fields if len(self) else {"nothing": FieldSpec("unknown")}

    class Source(LineSource):
        def _open_shard(self, path):
            return Knowing(path)

    paths = make(0, 2, 0, 1)
    assert list(Source(paths).fields) == ["x", "data"]
    assert list(Source(paths, fields=["data"]).fields) == ["data"]
    assert list(Source(paths[:1]).fields) == ["nothing"]


def test_more_shards_than_may_be_open(make, monkeypatch):
    """The ones used last stay open; those that another thread still reads from live on."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert files.most_open_shards() == max(8, soft // 4)
    monkeypatch.setattr(files, "most_open_shards", lambda: 3)
    source = Counting(make(*[2] * 10))
    assert source.opened == []
    assert tags(source) == list(range(20))
    assert tags(source.read([18, 19, 18])) == [18, 19, 18]
    assert tags(source.read([0, 18, 1])) == [0, 18, 1]
    assert sorted(source.opened) == [f"{shard}.lines" for shard in range(10)], "each is opened once"
    assert source.read_batch(range(19, -1, -1))["x"][:, 0, 0].tolist() == list(range(19, -1, -1))


@pytest.mark.parametrize("read_before", [False, True])
def test_a_forked_process_does_not_wait_for_a_lock_of_its_parent(make, read_before):
    """Another thread is opening the files at the moment of the fork."""
    forked, opening = threading.Event(), threading.Event()

    class Slow(LineSource):
        def _open_shard(self, path):
            if threading.current_thread().name == "slow":
                opening.set()
                forked.wait(30)
            return super()._open_shard(path)

    source = Slow(make(3))
    if read_before:
        assert len(source) == 3
    thread = threading.Thread(target=lambda: len(source), name="slow")
    thread.start()
    try:
        assert read_before or opening.wait(30)
        [reading] = read_in_fork([source])
    finally:
        forked.set()
        thread.join()
    assert (reading.error, len(reading.digests)) == ("", 3)


def test_threads_of_a_forked_process_open_once(make):
    source = Counting(make(3))
    assert len(source) == 3

    def read_by_threads(source):
        source.opened.clear()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: int(source[i % 3]["x"][0, 0]), range(64)))
        return Reading(digests=(str(found == [i % 3 for i in range(64)]), str(source.opened)))

    [reading] = read_in_fork([source], read=read_by_threads)
    assert reading.digests == ("True", "['0.lines']")


def test_fingerprint_names_content_and_options(make, tmp_path):
    paths = make(3, 2)
    one = LineSource(paths).fingerprint()
    assert LineSource(paths).fingerprint() == one
    assert LineSource(make(3, 2, directory="elsewhere")).fingerprint() == one

    different = [
        LineSource(paths[::-1]),
        LineSource(paths[:1]),
        LineSource(paths, fields=["x"]),
        LineSource(paths, fields=["data"]),
        Optional(paths, codec=len),
        Optional(paths, codec=max),
        Optional(paths, codec="npz"),
        Optional(paths, shapes={"x": (1, 2)}),
        Optional(paths, decode={"x": len}),
        Optional(paths, decode={"x": max}),
    ]
    assert len({source.fingerprint() for source in different} | {one}) == len(different) + 1
    assert Optional(paths, codec=None).fingerprint() == one
    renamed = tmp_path / "renamed.lines"
    paths[0].rename(renamed)
    assert LineSource([renamed, paths[1]]).fingerprint() != one


class Optional(LineSource):
    def __init__(self, paths, **options):
        FileSource.__init__(self, paths, **options)


def test_repr_stays_short():
    long = repr(LineSource(["/d" * 200 + "/end.lines"] * 1000))
    assert long.endswith("/end.lines', 1000 shards)")
    assert len(long) < 200
    for source, text in (
        (LineSource("a.lines"), "LineSource('a.lines')"),
        (LineSource(["a.lines", "b.lines"], fields=["x"]), "LineSource('a.lines', 2 shards, 1 fields)"),
        (Optional("a", codec=len, other={"x": max}), "Optional('a', codec=builtins.len, other={'x': 'builtins.max'})"),
    ):
        assert repr(source) == text
    assert len(repr(Optional("/x" * 50, codec="c" * 500, shapes={str(i): i for i in range(100)}, more="m" * 99))) < 200


@pytest.mark.parametrize(("terminal", "seconds"), [(True, 0), (True, 60), (False, 0)])
@pytest.mark.parametrize("shards", [3, 12])
def test_a_terminal_shows_how_many_shards_are_open(tmp_path, monkeypatch, shards, terminal, seconds):
    class Stream(io.StringIO):
        def isatty(self):
            return terminal

    for shard in range(shards):
        with dataload.create(tmp_path / f"part-{shard:02}.syr") as writer:
            writer.write({"n": shard})
    monkeypatch.setattr(files, "_SECONDS_UNSHOWN", seconds)
    monkeypatch.setattr(files, "_SLOW_SECONDS", 0)  # in threads, if there are enough
    monkeypatch.setattr("sys.stderr", stream := Stream())
    with dataload.open(str(tmp_path)) as source:
        assert len(source) == shards
    shown = stream.getvalue()
    if terminal and not seconds:
        assert shown.endswith(f"\r{shards - 1} of {shards} shards are open\r{shards} of {shards} shards are open\n")
    else:
        assert not shown
