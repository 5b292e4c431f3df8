import io
import multiprocessing
import os
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from line_source import LineBackend, LineFile, LineSource

import dataload
from dataload._util.per_process import pickling_for_worker
from dataload.errors import ClosedSourceError, ConfigError, CorruptFileError, SourceError, SourceNotFoundError
from dataload.sources import files
from dataload.sources.files import FileSource
from dataload.sources.shards import ShardReader
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


def send_first(source, pipe):
    try:
        pipe.send(tags(source.read([0])))
    except CorruptFileError as error:
        pipe.send(str(error))


def first_in_new_process(source):
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(target=send_first, args=(source, child))
    process.start()
    child.close()
    found = parent.recv()
    process.join()
    return found


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_worker_processes_refuse_a_file_that_was_replaced_after_it_was_opened(make):
    paths = make(3, 3)
    source = LineSource(paths)
    assert tags(source.read(range(6))) == [0, 1, 2, 3, 4, 5]
    assert first_in_new_process(source) == [0]
    replace(paths[1], 6)
    with pickling_for_worker():
        data = pickle.dumps(source)
    assert len(data) < len(pickle.dumps(source)) + 100
    message = r"/1\.lines: the file has been rewritten since it was opened: open the data set again"
    with pytest.raises(CorruptFileError, match=message):
        pickle.loads(data).read([0])
    [reading] = read_in_fork([source])
    assert re.search(message, reading.error)
    assert re.search(message, first_in_new_process(source))
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


def test_a_source_that_could_not_be_opened_may_be_opened_after_repair(make):
    paths = make(3)
    data = paths[0].read_bytes()
    paths[0].write_bytes(data[:-1])
    source = LineSource(paths)
    with pytest.raises(CorruptFileError):
        len(source)
    paths[0].write_bytes(data)
    assert len(source) == 3


def test_one_path_or_several(make):
    [path] = make(3)
    for paths in (path, str(path), [path], (str(path),)):
        source = LineSource(paths)
        assert source.paths == (str(path),)
        assert len(source) == 3


def test_no_paths():
    with pytest.raises(ConfigError, match="a source needs at least one path, got an empty list") as caught:
        LineSource([])
    assert caught.value.key == "paths"


def test_fields_in_one_text():
    with pytest.raises(ConfigError, match="fields must be a list of names, got the text 'data'"):
        LineSource("x", fields="data")


def test_nothing_is_opened_before_the_first_use(make):
    source = Counting(make(2, 3))
    assert repr(source)
    assert source.opened == []
    assert len(source) == 5
    assert source.opened == ["0.lines", "1.lines"]
    source.read(range(5))
    assert len(source.opened) == 2


def test_missing_file_names_what_exists(make, tmp_path):
    source = LineSource(tmp_path / "no" / "such" / "x.lines")
    with pytest.raises(SourceNotFoundError) as caught:
        len(source)
    assert str(caught.value) == (
        f"there is no {tmp_path}/no/such/x.lines: the directory {tmp_path} exists, nothing of that name is in it"
    )
    assert caught.value.path == f"{tmp_path}/no/such/x.lines"
    source = LineSource([*make(2), tmp_path / "missing.lines"])
    with pytest.raises(SourceNotFoundError, match=r"missing\.lines"):
        len(source)


def test_what_the_system_refuses_is_a_source_error(tmp_path):
    with pytest.raises(SourceError, match=f"cannot read {tmp_path}: Is a directory"):
        len(LineSource(tmp_path))


def test_errors_with_a_name_pass_unchanged():
    for error in (SourceNotFoundError("mine", path="x"), SourceError("mine")):
        with pytest.raises(type(error)) as caught, file_errors("y"):
            raise error
        assert caught.value is error
    with pytest.raises(SourceError, match="cannot read y: odd"), file_errors("y"):
        raise OSError("odd")


def test_shards_are_one_data_set(make):
    source = LineSource(make(2, 0, 3, 1))
    assert source.shard_lengths == (2, 0, 3, 1)
    assert tags(source) == list(range(6))
    assert tags(source.read([5, 0, 2, 2, -1])) == [5, 0, 2, 2, 5]
    assert source.read_batch([4, 1])["x"][:, 0, 0].tolist() == [4, 1]
    assert source.read_batch([4, 1])["data"] == [b"tail", b"tail"]


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
    assert tags(Source(paths)) == [0, 1, 2]
    assert Source(paths, fields=["data"]).read_batch([2, 0]) == {"data": [b"tail" * 2, b""]}
    assert list(Source(paths[:1]).fields) == ["nothing"]


def test_chosen_fields(make):
    source = LineSource(make(2, 2), fields=["data"])
    assert list(source.fields) == ["data"]
    assert source[3] == {"data": b""}
    assert source.read([0, 3]) == [{"data": b""}] * 2
    assert list(source.read_batch([0, 3])) == ["data"]
    with pytest.raises(ConfigError, match=r"LineSource\(.*\) has no field 'x': Known: data") as caught:
        source.read_batch([0], fields=["x"])
    assert caught.value.value == "x"


def test_unknown_field_names_the_file(make):
    source = LineSource(make(2), fields=["dat"])
    with pytest.raises(ConfigError, match=r"0\.lines has no field 'dat': did you mean 'data'\? Known: data, x"):
        len(source)
    with pytest.raises(ConfigError, match=r"has no field 'dat': did you mean 'data'"):
        LineSource(make(2)).read_batch([0], fields=["dat"])


def test_closed(make):
    source = LineSource(make(2))
    source.close()
    source.close()
    for read in (lambda: len(source), lambda: source[0], lambda: source.read([0]), lambda: source.read_batch([0])):
        with pytest.raises(ClosedSourceError, match=r"LineSource\('.*0\.lines'\) is closed: open it again to read"):
            read()
    assert "0.lines" in repr(source)
    with pytest.raises(ClosedSourceError):
        pickle.loads(pickle.dumps(source))[0]


def test_a_source_that_did_not_open_can_be_tried_again(make, tmp_path):
    [path] = make(2)
    moved = tmp_path / "away"
    path.rename(moved)
    source = LineSource(path)
    with pytest.raises(SourceNotFoundError):
        len(source)
    moved.rename(path)
    assert len(source) == 2


def test_corrupt_file_is_named(make):
    good, bad = make(2, 2)
    bad.write_bytes(b"zz\nend")
    with pytest.raises(CorruptFileError, match=r"1\.lines, record 0: a line is not a hexadecimal number"):
        len(LineSource([good, bad]))


def test_more_shards_than_may_be_open(make, monkeypatch):
    """The ones used last stay open; those that another thread still reads from live on."""
    monkeypatch.setattr(files, "most_open_shards", lambda: 3)
    source = Counting(make(*[2] * 10))
    assert tags(source) == list(range(20))
    assert tags(source.read([18, 19, 18])) == [18, 19, 18]
    assert tags(source.read([0, 18, 1])) == [0, 18, 1]
    assert sorted(source.opened) == [f"{shard}.lines" for shard in range(10)], "each is opened once"
    batch = source.read_batch(range(19, -1, -1))
    assert batch["x"][:, 0, 0].tolist() == list(range(19, -1, -1))


def test_eight_threads_and_two_open_shards(make, monkeypatch):
    monkeypatch.setattr(files, "most_open_shards", lambda: 2)
    source = LineSource(make(*[3] * 8))
    wrong = []

    def work(seed):
        requests = np.random.default_rng(seed).integers(0, 24, (30, 5))
        wrong.extend(indices for indices in requests if tags(source.read(indices)) != indices.tolist())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_limit_is_half_of_the_descriptors():
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert files.most_open_shards() == max(8, soft // 4)


def test_pickle_holds_settings_only(make):
    source = LineSource(make(200), fields=["data"])
    fresh = len(pickle.dumps(source))
    source.read(range(200))
    assert len(pickle.dumps(source)) == fresh < 1000
    twin = pickle.loads(pickle.dumps(source))
    assert twin.read([7, 3]) == source.read([7, 3])
    assert twin.fingerprint() == source.fingerprint()


@pytest.mark.parametrize("read_before", [False, True])
def test_a_forked_process_does_not_wait_for_a_lock_of_its_parent(make, read_before):
    """As if another thread had been opening the files at the moment of the fork."""
    source = LineSource(make(3))
    if read_before:
        assert len(source) == 3
    with source._opened._locks.setdefault(os.getpid(), threading.Lock()):
        [reading] = read_in_fork([source])
    assert not reading.error
    assert len(reading.digests) == 3


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

    class Optional(LineSource):
        def __init__(self, paths, **options):
            FileSource.__init__(self, paths, **options)

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


def test_fingerprint_sees_a_change_at_either_end_of_a_large_file(make):
    [path] = make(200)
    seen = {LineSource(path).fingerprint()}
    content = path.read_bytes()
    assert len(content) > 4096
    for place in (0, len(content) - 5):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        seen.add(LineSource(path).fingerprint())
    assert len(seen) == 3


def test_repr_stays_short(make):
    assert repr(LineSource("a.lines")) == "LineSource('a.lines')"
    assert repr(LineSource(["a.lines", "b.lines"], fields=["x"])) == "LineSource('a.lines', 2 shards, 1 fields)"
    long = repr(LineSource(["/d" * 200 + "/end.lines"] * 1000))
    assert long.endswith("/end.lines', 1000 shards)")
    assert len(long) < 200

    class Optional(LineSource):
        def __init__(self, paths, **options):
            FileSource.__init__(self, paths, **options)

    assert (
        repr(Optional("a", codec=len, other={"x": max}))
        == "Optional('a', codec=builtins.len, other={'x': 'builtins.max'})"
    )
    assert len(repr(Optional("/x" * 50, codec="c" * 500, shapes={str(i): i for i in range(100)}, more="m" * 99))) < 200


def test_a_reader_without_columns_of_its_own_collates():
    class Reader(ShardReader):
        def __len__(self):
            return 3

        def read(self, indices, fields):
            return [{"n": int(index)} for index in indices]

    reader = Reader()
    assert reader.read_batch(np.array([2, 0]), None)["n"].tolist() == [2, 0]
    assert reader.fields == {}
    reader.close()


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
