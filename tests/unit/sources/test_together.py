"""Records of many shards that are read together: as those of each shard alone, and with the same errors."""

import errno
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dataload
from dataload._util.caches import pickling_for_worker
from dataload.collate import default_collate
from dataload.convert.indexing import index_shards
from dataload.errors import ChangedFileError, CorruptFileError, DataloadError, SourceNotFoundError
from dataload.sources.directory import ShardDirectory
from dataload.sources.file_source import FileSource
from dataload.storage.core import PLACE_BITS, can_map
from dataload.storage.local.record_files import MappedFile
from dataload.storage.local.shard_maps import ShardMaps, most_maps
from dataload.testing.compare import difference
from dataload.types import StepsAhead, TextColumn

pytestmark = pytest.mark.skipif(not can_map(), reason="without the compiled core, each shard is read alone")

LENGTHS = [7, 1, 12, 3, 9]
RAW = {"options": "group_size:1,uncompressed"}


def values(index):
    rng = np.random.default_rng(index)
    return {
        "x": rng.integers(0, 99, 5, np.int32),
        "b": rng.bytes(rng.integers(0, 70)),
        "n": np.float32(index),
        "s": f"text {index}",
    }


def fields(*names, **more):
    return lambda index: {**{name: values(index)[name] for name in names}, **{n: f(index) for n, f in more.items()}}


def blob(size):
    return lambda index: np.random.default_rng(index).bytes(size(index))


# name -> suffix, options of the writer, options of the reader, a record by its index
FORMATS = {
    "syrah": (".syr", {}, {}, fields("x", "b", "n", "s")),
    "syrah ragged": (".syr", {}, {}, fields("n", r=lambda index: np.arange(index % 3 + 1))),
    "tar": (".tar", {}, {}, fields("x", "b", "s", cls=lambda index: index)),
    "tar keys": (".tar", {}, {}, fields("b", __key__=lambda index: f"é{'k' * (index % 4)}{index}")),
    "tar raw": (".tar", {}, {"decode": None}, fields("x", "b")),
    "arrow": (".arrow", {"group_bytes": 100}, {}, fields("x", "b", "n")),
    "arrow compressed": (".arrow", {"group_bytes": 100, "compression": "zstd"}, {}, fields("x", "b", "n", "s")),
    "parquet": (".parquet", {"group_bytes": 100}, {}, fields("x", "b", "n", "s", t=lambda i: np.datetime64(i, "s"))),
    "parquet, nothing kept": (".parquet", {"group_bytes": 100}, {"cached_bytes": 0}, fields("x", "b", "s")),
    "parquet, many columns": (
        ".parquet",
        {},
        {},
        lambda index: {"s": f"{index}", **{f"n{number}": index * number for number in range(40)}},
    ),
    "tfrecord": (".tfrecord", {}, {}, blob(lambda index: index % 50)),
    "tfrecord example": (".tfrecord", {"codec": "example"}, {"codec": "example"}, fields("x", "b")),
    "tfrecord crc": (".tfrecord", {}, {"verify": True}, blob(lambda index: 30)),
    "array_record": (".array_record", RAW, {}, blob(lambda index: 1 + index * 3000)),
    "array_record alike": (".array_record", RAW, {}, blob(lambda _: 40)),
    "array_record npz": (".array_record", {**RAW, "codec": "npz"}, {"codec": "npz"}, fields("x", "n")),
    "lmdb": (".lmdb", {}, {}, blob(lambda index: 1 + index % 50)),
    "lmdb npz": (".lmdb", {"codec": "npz"}, {"codec": "npz"}, fields("x", "n")),
    "torchrecord": (".torchrecord", {}, {}, fields("x", "n")),
    "jsonl": (".jsonl", {}, {}, lambda index: {"i": index, "s": "x" * (index % 40)}),
    "tokens": (".npy", None, {"window": 4, "stride": 3}, None),
    "tokens raw": (".bin", None, {"window": 4, "dtype": "uint16", "format": "tokens"}, None),
    "tokens drop": (".npy", None, {"window": 4, "end_token": 9, "ends": "drop"}, None),
}


def write(folder, name, lengths=LENGTHS):
    """Write shards, and return their paths."""
    suffix, options, _, record = FORMATS[name]
    starts = np.cumsum(lengths) - lengths
    paths = [folder / f"{shard}{suffix}" for shard in range(len(lengths))]
    for path, start, length in zip(paths, starts.tolist(), lengths, strict=True):
        if record is None:
            tokens = np.random.default_rng(start).integers(0, 10, 4 * length + start % 3).astype(np.uint16)
            np.save(path, tokens) if suffix == ".npy" else tokens.tofile(path)
        else:
            with dataload.create(path, **options) as writer:
                writer.extend(map(record, range(start, start + length)))
    return paths


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The sources of each format, and its records as read from each shard alone."""
    found = {}

    def written(name):
        if name not in found:
            paths, options = write(tmp_path_factory.mktemp("shards"), name), FORMATS[name][2]
            records = []
            for path in paths:
                with dataload.open(path, **options) as alone:
                    records += alone.read(range(len(alone)))
            found[name] = paths, records
        return found[name]

    return written


@pytest.fixture
def none_alone(monkeypatch):
    def refuse(*_):
        raise AssertionError("a shard was read alone")

    monkeypatch.setattr("dataload.sources.shards.split_by_shard", refuse)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and bytes(one) == bytes(other) if isinstance(one, bytes) else one == other


def columns(batch, rows):
    """The values of each row of a batch."""
    if isinstance(batch, dict):
        return [{name: column[row] for name, column in batch.items()} for row in range(rows)]
    return list(batch)


PLANNED = [name for name in FORMATS if name.split(",")[0].split()[0] not in ("arrow", "parquet", "lmdb", "torchrecord")]


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize("one_field", [False, True])
def test_ranges_hold_what_is_read(tmp_path, name, one_field):
    """A loader downloads these bytes ahead: all others are zeros here."""
    (path,) = write(tmp_path, name, [12])
    options = {**FORMATS[name][2], "verify": False} if "tfrecord" in name else FORMATS[name][2]
    indices = np.array([0, 7, 9])
    with dataload.open(path, **options) as source:
        fields = (max(source.fields),) if one_field and source.fields else None
        reader = source._data_set().reader(0)
        expected = reader.read(indices, fields)
        (offsets, lengths), before = reader.ranges(indices, fields), path.stat()
        data = np.fromfile(path, np.uint8)
        kept = np.zeros_like(data)
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            kept[offset : offset + length] = data[offset : offset + length]
        with path.open("r+b") as file:
            file.write(kept.tobytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert all(map(same, reader.read(indices, fields), expected))
    assert lengths.sum() <= len(data) // 3


@pytest.mark.parametrize("name", FORMATS)
def test_all_shards_are_read_together(written, none_alone, name):
    paths, expected = written(name)
    with dataload.open(paths, **FORMATS[name][2]) as source:
        order = np.random.default_rng(0).permutation(len(source))
        if name == "syrah ragged":
            records = source.read(order)
        else:
            records, batch = source.read(order), source.read_batch(order)
            if isinstance(batch, dict):
                assert [*batch] == [*records[0]]
                assert "__key__" not in batch or isinstance(batch["__key__"], TextColumn)
            for row, record in zip(columns(batch, len(order)), records, strict=True):
                assert (
                    same({k: np.asarray(v) for k, v in row.items()}, {k: np.asarray(v) for k, v in record.items()})
                    if isinstance(row, dict)
                    else row == record
                )
        assert all(same(record, expected[index]) for record, index in zip(records, order.tolist(), strict=True))
        if source.fields:
            for field in source.fields:
                assert [*source.read_batch([3, 0], [field])] == [field]


DAMAGE = {
    "tar": ("cls", b"17", b"1x"),
    "tfrecord example": ("x", b"x", b"\xff"),
    "jsonl": ("i", b'{"i": 17', b'{"i" 17 '),
}


@pytest.mark.parametrize("name", ["jsonl", "tar"])
def test_a_damaged_record_has_the_error_of_its_shard(tmp_path, name):
    paths = write(tmp_path, name)
    _, old, new = DAMAGE[name]
    data = paths[2].read_bytes()
    at = data.rindex(old)
    paths[2].write_bytes(data[:at] + new.ljust(len(old)) + data[at + len(old) :])
    with dataload.open(paths, **FORMATS[name][2]) as source, dataload.open(paths[2], **FORMATS[name][2]) as alone:
        with pytest.raises(CorruptFileError) as expected:
            alone.read([9])
        with pytest.raises(CorruptFileError) as caught:
            source.read([0, 17, 30, 8])
        assert str(caught.value) == str(expected.value)
        assert (caught.value.path, caught.value.index) == (str(paths[2]), 9)
        source.read([0, 30, 8])


def test_a_record_over_the_limit_has_the_error_of_its_shard(tmp_path):
    paths = write(tmp_path, "tfrecord")
    with dataload.open(paths, max_record_bytes=20) as source:
        assert len(source.read([0, 10, 20])) == 3
        with pytest.raises(CorruptFileError, match="max_record_bytes") as caught:
            source.read([0, 10, 25])
        assert (caught.value.path, caught.value.index) == (str(paths[4]), 2)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_few_files_stay_mapped(tmp_path, monkeypatch, most):
    monkeypatch.setattr("dataload.storage.local.shard_maps.most_maps", lambda: most)
    assert most_maps() == int(Path("/proc/sys/vm/max_map_count").read_text()) // 2
    paths = write(tmp_path, "syrah")
    with dataload.open(paths) as source:
        for seed in range(20):
            indices = np.random.default_rng(seed).integers(0, len(source), 1 + seed % 4)
            assert source.read_batch(indices, ["n"])["n"].tolist() == indices.tolist()
        with open("/proc/self/maps", encoding="utf-8") as maps:
            assert sum(str(tmp_path) in line for line in maps) <= most + 1


def test_threads_unmap_files_of_each_other(tmp_path):
    maps = ShardMaps(24, most=6)
    for shard in range(24):
        (tmp_path / f"{shard}").write_bytes(bytes([shard]))
        maps.add(shard, MappedFile(str(tmp_path / f"{shard}")))

    def read(seed):
        shards = np.random.default_rng(seed).integers(0, 24, 5)
        return maps.use(shards) and (maps.gather(shards << PLACE_BITS, 1)[:, 0] == shards).all()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4000)))


@pytest.mark.parametrize("kept", [pytest.param(0, marks=pytest.mark.slow_suite), 600, 1 << 20])
def test_threads_read_while_decoded_columns_are_forgotten(tmp_path, kept):
    """Columns are gathered from memory, and decoded again once another thread has forgotten them."""
    paths = [tmp_path / f"{shard}.parquet" for shard in range(4)]
    for shard, path in enumerate(paths):
        with dataload.create(path, group_bytes=100) as writer:
            writer.extend({"n": 50 * shard + n, "b": b"x" * (n % 7), "s": f"é{n}"} for n in range(50))
    source = dataload.open(paths, cached_bytes=kept)

    def work(seed):
        for indices in np.random.default_rng(seed).integers(0, len(source), (5, 12)):
            batch = source.read_batch(indices)
            assert batch["n"].tolist() == indices.tolist()
            assert [*map(len, batch["b"])] == (indices % 50 % 7).tolist()
            assert batch["s"] == [f"é{n}" for n in (indices % 50).tolist()]

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(work, range(4))] == [None] * 4
    source.close()


def read_for_long(source, indices):
    while True:  # the test's own time limit ends it
        source.read_batch(indices)


@pytest.mark.parametrize("shards", [5, 12])
def test_an_overwritten_shard_is_found_at_the_next_read_or_a_second_later(tmp_path, shards):
    paths = write(tmp_path, "syrah", [3] * shards)
    with dataload.open(paths) as source:
        source.read_batch([0, 8])
        status = os.stat(paths[2])
        os.utime(paths[2], ns=(0, status.st_mtime_ns + 10**9))
        with pytest.raises(ChangedFileError, match="the file was overwritten while it was in use") as caught:
            source.read_batch([0, 8]) if shards <= 8 else read_for_long(source, [0, 8])
        assert caught.value.path == str(paths[2])


@pytest.mark.parametrize("refused", ["all", "second"])
@pytest.mark.parametrize("name", FORMATS)
def test_files_that_the_system_refuses_to_map_are_read_without_maps(written, monkeypatch, name, refused):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    paths, records = written(name)
    if refused == "all":
        monkeypatch.setattr("mmap.mmap", refuse)
    else:  # the map that all shards share
        monkeypatch.setattr("dataload.storage.local.record_files.MappedFile.map_for", refuse)
    with dataload.open(paths, **FORMATS[name][2]) as source:
        wanted = [records[index] for index in (31, 1, 7)]
        assert all(map(same, source.read([31, 1, 7]), wanted))
        assert difference(source.read_batch([31, 1, 7]), default_collate(wanted), "the batch") is None


def test_a_shard_that_shrinks_is_an_error(tmp_path):
    paths = write(tmp_path, "tfrecord")
    with dataload.open(paths) as source:
        source.read([0, 31])
        os.truncate(paths[4], 0)
        with pytest.raises(ChangedFileError, match="it was changed while in use") as caught:
            source.read([0, 31])
        assert caught.value.path == str(paths[4])
        source.read([0, 1, 9])


def test_no_descriptor_stays_open_and_deleted_shards_are_read_on(tmp_path):
    paths = write(tmp_path, "syrah")
    with dataload.open(paths) as source:
        everything = range(len(source))
        before = source.read(everything)
        assert not [name for name in map(linked, os.listdir("/proc/self/fd")) if str(tmp_path) in name]
        for path in paths:
            path.unlink()
        assert all(map(same, source.read(everything), before))


def linked(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # closed meanwhile
        return ""


def test_shards_that_an_index_lists_are_read_together(none_alone):
    directory = Path(__file__).parents[2] / "golden/mds/all"
    with dataload.open(directory) as source:
        order = [8, 0, 5, 4, 7]
        records = source.read(order)
        assert [record["int32"] for record in records] == source.read_batch(order, ["str", "int32"])["int32"].tolist()
        assert all(same(record["bytes"], source[index]["bytes"]) for record, index in zip(records, order, strict=True))


def test_workers_get_few_bytes_for_a_shard_and_open_it_when_they_read_it(tmp_path):
    [path] = write(tmp_path, "syrah", [3])
    paths = [tmp_path / f"shard-{number:05}.syr" for number in range(1000)]
    for each in paths:
        os.link(path, each)
    with dataload.open(paths) as source, pickling_for_worker():
        assert len(source) == 3000
        data = pickle.dumps(source)
    assert len(data) < 40 * len(paths)
    for each in paths[1:]:
        each.unlink()
    with pickle.loads(data) as worker:
        assert (len(worker), worker.paths) == (3000, tuple(map(str, paths)))
        assert worker.read_batch([2, 0], ["n"])["n"].tolist() == [2, 0]
        with pytest.raises(SourceNotFoundError, match=r"shard-00999\.syr"):
            worker.read([2, 2999])


def write_alike(path, seed, field="x", count=4):
    path.unlink(missing_ok=True)
    path.with_suffix(".idx").unlink(missing_ok=True)
    if path.suffix == ".npy":
        np.save(path, np.random.default_rng(seed).integers(0, 1000, 400))
        return
    with dataload.create(path) as writer:
        for row, values in enumerate(np.random.default_rng(seed).random((count, 400))):
            if path.suffix == ".tar":  # keys, sizes, and texts differ from archive to archive
                writer.write({"__key__": f"{seed:0{1 + seed % 3}}/{row}", field: values, "t": "é" * (row + seed)})
            else:
                writer.write({field: values})


def change_index(path, change):
    if (index := path.with_suffix(".idx")).exists():
        index.write_text(change(index.read_text()))


def without_names(text):
    lines = [line.split() for line in text.splitlines()]
    return "".join(" ".join(w for n, w in enumerate(line) if n % 4 != 3 or line is lines[0]) + "\n" for line in lines)


def write_over(path):
    with path.open("r+b") as stream:
        stream.write(b"?")


CHANGES = {
    "none": lambda _: None,
    "other field": lambda path: write_alike(path, 0, "y"),  # the file has the same size
    "longer": lambda path: write_alike(path, 0, count=5),
    "replaced": lambda path: write_alike(path, 9),
    "cut off": lambda path: os.truncate(path, 5000),
    "overwritten": write_over,
    "deleted": os.unlink,
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}
INDEX_CHANGES = {
    "index deleted": lambda path: path.with_suffix(".idx").unlink(missing_ok=True),
    "index of no text": lambda path: path.with_suffix(".idx").write_bytes(b"\0\xff"),
    "index cut off": lambda path: change_index(path, lambda text: text[: len(text) // 2]),
    "index of fewer": lambda path: change_index(path, lambda text: text.replace("v1.2 4", "v1.2 3")),
    "index of other sizes": lambda path: change_index(path, lambda text: text.replace(" 2", " 3")),
    "index of other keys": lambda path: change_index(path, lambda text: text.replace("/", "/0")),
    "index of other fields": lambda path: change_index(path, lambda text: text.replace("x.npy", "z.npy")),
    "index beyond the end": lambda path: change_index(path, lambda text: text.replace(" 512 ", " 512000 ", 1)),
    "index without names": lambda path: change_index(path, without_names),
    "header changed": lambda path: path.write_bytes(path.read_bytes().replace(b"ustar", b"USTAR", 3)),
}
WHENS = ["before the manifest", "before the first use", "later"]


def read_or_error(source, indices):
    try:
        return source.read(indices)
    except DataloadError as error:
        return type(error), str(error)


def some_changes(suffix):
    names = [*CHANGES, *(INDEX_CHANGES if suffix == ".tar" else ())]
    return st.lists(st.tuples(st.sampled_from(names), st.sampled_from(WHENS)), min_size=1, max_size=5)


@given(
    st.sampled_from([".syr", ".arrow", ".tar"]).flatmap(lambda each: st.tuples(st.just(each), some_changes(each))),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None)
def test_shards_alike_are_opened_together(changed, listed, for_worker):
    """The first shard is opened, and those that differ in values only are mapped; others are opened one by one."""
    suffix, changes = changed
    with TemporaryDirectory() as name:
        paths = [Path(name) / f"{number}{suffix}" for number in range(1 + len(changes))]
        for seed, path in enumerate(paths):
            write_alike(path, seed)

        def change(now):
            for path, (what, when) in zip(paths[1:], changes, strict=True):
                if when == now and (what in ("longer", "other field") or when != WHENS[0]):
                    (CHANGES | INDEX_CHANGES)[what](path)

        change(WHENS[0])
        if listed:
            index_shards(name)
        sources = [dataload.open(name) for _ in range(3)]
        assert listed or all(map(len, sources))  # opens them
        change(WHENS[1])
        ends = np.cumsum(sources[0].shard_lengths)
        change(WHENS[2])
        if listed or for_worker:
            with pickling_for_worker() if for_worker else nullcontext():
                sources = pickle.loads(pickle.dumps(sources))
        alone, together, rest = sources
        parts = np.split(np.arange(ends[-1]), ends[:-1])
        found = [read_or_error(alone, part) for part in parts]
        good = [isinstance(each, list) for each in found]
        everything = read_or_error(together, np.arange(ends[-1]))
        if isinstance(everything, tuple):
            assert everything in found
        assert isinstance(everything, list) == all(good)
        records = [record for each, is_good in zip(found, good, strict=True) if is_good for record in each]
        read = rest.read(np.concatenate([part for part, is_good in zip(parts, good, strict=True) if is_good]))
        assert len(read) == len(records)
        assert all(map(same, read, records))


@pytest.mark.parametrize(
    ("suffix", "listed", "options"),
    [
        *((suffix, listed, {}) for suffix in (".syr", ".arrow", ".tar") for listed in (True, False)),
        (".npy", False, {"window": 100}),
    ],
)
def test_one_of_many_shards_alike_is_opened(tmp_path, monkeypatch, suffix, listed, options):
    paths = [tmp_path / f"{number:02}{suffix}" for number in range(20)]
    for number, path in enumerate(paths):
        write_alike(path, number)
    if listed:
        index_shards(str(tmp_path))
    rows, opened, open_reader = np.arange(0, 60, 3), [], FileSource._open_reader
    monkeypatch.setattr(FileSource, "_open_reader", lambda *given: opened.append(given) or open_reader(*given))
    with dataload.open(tmp_path if listed else paths, **options) as source:
        batch = source.read_batch(rows)
        known = source.fingerprint()
        assert len(opened) == (1 if listed else 2)
    with dataload.open(paths, map=False, **options) as source:  # opens every shard
        assert same(source.read_batch(rows), batch)
        assert source.fingerprint() == known


@pytest.mark.parametrize("what", [name for name in (CHANGES | INDEX_CHANGES) if name != "longer"])
def test_a_damaged_archive_among_others_has_its_own_error(tmp_path, what):
    paths = [tmp_path / f"{number}.tar" for number in range(5)]
    for number, path in enumerate(paths):
        write_alike(path, number)
    (CHANGES | INDEX_CHANGES)[what](paths[3])

    def records_or_error(paths):
        try:
            with dataload.open(paths, decode="written") as source:  # as archives say at their start
                return source.read(range(len(source)))
        except DataloadError as error:
            return type(error), str(error)

    found, alone = records_or_error(paths), records_or_error(paths[3:4])
    if isinstance(alone, tuple):
        assert found == alone
        assert str(paths[3]) in found[1] or str(paths[3].with_suffix(".idx")) in found[1]
    else:
        assert all(map(same, found[12 : 12 + len(alone)], alone))
        assert len(found) == 16 + len(alone)


@pytest.mark.parametrize("suffix", [".syr", ".arrow", ".tar"])
def test_another_thread_maps_the_shards_first(tmp_path, monkeypatch, suffix):
    for number in range(20):
        write_alike(tmp_path / f"{number}{suffix}", number)
    index_shards(str(tmp_path))
    add, rows, others = ShardDirectory.add, np.arange(0, 80, 4), []

    def after_another_thread(directory, *given):
        if not others:
            others.append(threading.Thread(target=source.read_batch, args=(rows,)))
            others[0].start()
            others[0].join()
        add(directory, *given)

    with dataload.open(tmp_path) as source:
        monkeypatch.setattr(ShardDirectory, "add", after_another_thread)
        found = source.read_batch(rows)
        assert others
        assert same(found, source.read_batch(rows))


PARTS = {
    "whole": lambda source: source,
    "slice": lambda source: source[3:30:2],
    "slice of a slice": lambda source: source[::-1][2:20][1::3],
    "one record": lambda source: source[5:6],
    "no record": lambda source: source[5:5],
    "split": lambda source: source.split(0.5, seed=1)[0],
    "slice of a split": lambda source: source.split(0.7, seed=1)[1][::-1],
}


@given(st.lists(st.tuples(st.sampled_from([*PARTS]), st.integers(0, 2)), min_size=1, max_size=6), st.integers(0, 99))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_of_several_sources_are_read_together(written, chosen, seed):
    paths, expected = written("syrah")
    with (
        dataload.open(paths) as both,
        dataload.open(paths[:3]) as first,
        dataload.open(paths[3:]) as last,
        pytest.MonkeyPatch.context() as patch,
    ):
        wholes = [(both, expected), (first, expected[: len(first)]), (last, expected[len(first) :])]
        parts = [PARTS[name](wholes[number][0]) for name, number in chosen]
        records = [
            wholes[number][1][i] for (_, number), part in zip(chosen, parts, strict=True) for i in indices_of(part)
        ]
        source = dataload.concat(parts)
        if records:
            for module in ("shards", "views.concat"):  # no loop over sources or shards
                patch.setattr(f"dataload.sources.{module}.split_by_shard", None)
            order = np.random.default_rng(seed).integers(0, len(records), 50)
            assert all(map(same, source.read(order), [records[index] for index in order.tolist()]))
            assert source.read_batch(order, ["n"])["n"].tolist() == [records[index]["n"] for index in order.tolist()]


def test_many_parts_of_many_files_are_read_together(tmp_path, monkeypatch):
    paths = [tmp_path / f"{number}.npy" for number in range(730)]  # 730 * 730 is more than can be read together
    for number, path in enumerate(paths):
        np.save(path, np.array([number, number], np.int32))
    with dataload.open(paths, window=1) as source:
        looks = []
        monkeypatch.setattr("dataload.sources.file_source.is_url", looks.append)
        parts = dataload.concat([source[2 * number : 2 * number + 2] for number in range(len(paths))])
        monkeypatch.setattr("dataload.sources.views.concat.split_by_shard", None)  # no loop over parts
        assert parts.read_batch([3, 1459, 0])["tokens"].tolist() == [[1], [729], [0]]
        assert len(looks) < 10 * len(paths)


def indices_of(source):
    """The indices of a part among the records of the whole source."""
    indices = np.arange(len(source))
    while hasattr(source, "parent"):
        indices, source = source.indices[indices] if len(indices) else indices, source.parent
    return indices.tolist()


def test_sources_with_other_options_or_fields_are_read_one_by_one(tmp_path):
    paths = write(tmp_path, "tar")
    double, plain = {"cls": lambda data: 2 * int(data)}, {"cls": lambda data: int(data)}
    with dataload.open(paths[0], decode=plain) as one, dataload.open(paths[2], decode=double) as two:
        both = dataload.concat([one, two])
        records = both.read([1, 8])
        assert [record["cls"] for record in records] == [1, 2 * 9]
        for fields in (None, ["__key__", "cls"]):
            assert both.read_batch([1, 8], fields)["__key__"] == [record["__key__"] for record in records]
    with dataload.open(paths[0]) as one, dataload.open(paths[2], fields=["cls", "b"]) as two:
        both, rest = dataload.concat([one, two]), ["x", "b", "s", "cls"]  # not the key, as not all have one
        assert [[*record] for record in both.read([1, 8])] == [rest, ["cls", "b"]]
        assert [*both.fields] == [*both.read_batch([1])] == rest


class Fetching(dataload.RangeSource):
    """A source of which a step says what it would fetch."""

    asked = ()

    def read_ahead(self, steps, fields, *, here, share=1.0):
        self.asked = [block.indices.tolist() for block in steps], fields, here, share


@pytest.mark.parametrize(("part", "indices"), [(slice(0, 10), [1, 2, 8]), (slice(2, 12), [3, 4, 10])])
def test_only_sources_that_fetch_are_asked_before_a_read(tmp_path, monkeypatch, part, indices):
    monkeypatch.setattr(FileSource, "read_ahead", lambda *_, **__: pytest.fail("a local file is asked"))
    with dataload.create(tmp_path / "a.syr") as writer:
        writer.extend({"index": index} for index in range(12))
    here, fetching = dataload.open(tmp_path / "a.syr")[:10], Fetching(12)
    steps = [StepsAhead(0, np.array([3, 11, 12, 0, 18]), np.array([2, 5]), 2)]

    def ahead(*sources):
        return dataload.concat(sources).read_ahead(taken := iter(steps), ["index"], here=False, share=0.5), [*taken]

    assert ahead(here, here[part]) == ahead(here, dataload.RangeSource(12)) == (None, steps)
    assert ahead(here, fetching[part]) == (None, [])
    assert fetching.asked == ([indices], ["index"], False, 0.25)
