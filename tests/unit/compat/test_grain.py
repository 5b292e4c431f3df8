import inspect
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dataload
from dataload import Loader
from dataload.compat import grain as grain_facade
from dataload.compat.grain import (
    ArrayRecordDataSource,
    RandomAccessDataSource,
    RangeDataSource,
    RecordKeyError,
    SharedMemoryDataSource,
    tfds_data_source,
)
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.sources.array_record.reader import ArrayRecordSource

GOLDEN = Path(__file__).parents[2] / "golden"
DEMO = GOLDEN / "tfds" / "demo" / "1.0.0"
SELECTIONS = [
    case
    for case in json.loads((GOLDEN / "arrayrecord" / "manifest.json").read_text())
    if case.get("kind") == "data_source" and case["expect"] == "ok"
]


@pytest.fixture(scope="session")
def original():
    """Grain's own module."""
    return pytest.importorskip("grain.sources", reason="grain is not installed: nothing to compare with")


@pytest.fixture
def files(tmp_path):
    """Two files, of 5 and 4 records."""
    names = [str(tmp_path / f"{name}.array_record") for name in "ab"]
    for name, length in zip(names, (5, 4), strict=True):
        with dataload.create(name) as writer:
            for i in range(length):
                writer.write(f"{Path(name).stem}{i}".encode())
    return names


def instruction(path, skip, take):
    return SimpleNamespace(filename=path, skip=skip, take=take, examples_in_shard=100)


FORMS = [
    lambda one, _: one,
    lambda _, two: Path(two),
    lambda one, two: [one, two],
    lambda one, two: (one, two),
    lambda one, _: f"{one}[1:4]",
    lambda one, two: [f"{two}[0:1]", one],
    lambda _, two: instruction(two, 1, 2),
    lambda one, two: [instruction(one, 4, 1), two, instruction(one, 0, 0), f"{one}[2:2]", f"{one}[0:2]"],
]


@pytest.mark.parametrize("form", FORMS)
def test_array_records_are_those_of_the_original(original, files, form):
    paths = form(*files)
    with original.ArrayRecordDataSource(paths) as theirs, ArrayRecordDataSource(paths) as ours:
        keys = list(range(len(theirs)))
        assert list(ours) == [ours[key] for key in keys] == [theirs[key] for key in keys]
        assert ours.__getitems__(keys[::-1] * 2) == theirs.__getitems__(keys[::-1] * 2)
        assert (len(ours), repr(ours), ours.paths) == (len(theirs), repr(theirs), theirs.paths)
        for source in (ours, theirs):
            assert isinstance(source, RandomAccessDataSource)
            for outside in (-1, len(ours), np.int64(-3)):
                with pytest.raises(ValueError, match=r"[Rr]ecord key"):
                    source[outside]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda source: source.__getitems__([0, 9]), RecordKeyError, r"record key 9 is outside \[0, 9\)"),
        (lambda source: source[-1], IndexError, "record key -1 is outside"),
        (lambda source: source[1.0], TypeError, "interpreted as an integer"),
        (
            lambda source: ArrayRecordDataSource(source.paths, {"no_such": "1"}),
            ConfigError,
            "reader_options 'readahead_buffer_size:0,no_such:1'",
        ),
        (lambda _: SharedMemoryDataSource(), ConfigError, "pass elements, or the name of existing shared memory"),
        *(
            (lambda _, end=end: SharedMemoryDataSource(["a", end]), ConfigError, r"^element 1 ends .*: b?'a{19}\\x00'$")
            for end in (f"b{'a' * 19}\0", b"b%b\0" % (b"a" * 19))
        ),
        *(
            (
                lambda _, wrong=wrong: SharedMemoryDataSource([1, wrong]),
                ConfigError,
                "^element 1 is .*: shared memory takes",
            )
            for wrong in (1 << 63, np.int64(1), [2])
        ),
        (lambda _: RangeDataSource(0, 10, 0), ConfigError, "step must not be 0"),
        (lambda _: RangeDataSource(0, 10, -1), ConfigError, "steps of -1 do not lead from 0 to 10"),
        (lambda _: RangeDataSource(5, 4, 1), ConfigError, "steps of 1 do not lead from 5 to 4"),
        *(
            (lambda _, values=values: tfds_data_source(*values), ConfigError, "pass a directory, or a data source with")
            for values in ((3,), (RangeDataSource(0, 3, 1), "train"))
        ),
    ],
)
def test_messages(files, call, error, text):
    with ArrayRecordDataSource(files) as source:
        assert source.__getitems__([]) == []
        with pytest.raises(error, match=text):
            call(source)


@pytest.mark.parametrize("case", SELECTIONS, ids=lambda case: case["why"][:40])
def test_what_the_original_selects(case, monkeypatch):
    monkeypatch.chdir(GOLDEN / "arrayrecord")
    paths = [SimpleNamespace(**path) if isinstance(path, dict) else path for path in case["paths"]]
    with ArrayRecordDataSource(paths) as source, ArrayRecordSource(paths) as plain:
        assert list(source) == list(plain)
        assert sum(source.shard_lengths) == len(source) == case["num_records"]


def test_only_whole_files_are_opened_at_start(files, tmp_path):
    missing = str(tmp_path / "missing.array_record")
    with ArrayRecordDataSource([instruction(missing, 3, 7), f"{missing}[0:5]", files[0]]) as source:
        assert (len(source), source[12], source.shard_lengths) == (17, b"a0", (7, 5, 5))
        with pytest.raises(SourceNotFoundError, match=r"missing\.array_record"):
            source[0]
    with pytest.raises(SourceNotFoundError, match=r"missing\.array_record"):
        ArrayRecordDataSource([files[0], missing])
    empty = tmp_path / "empty.array_record"
    empty.touch()
    with pytest.raises(CorruptFileError, match=r"empty\.array_record, byte 0: the file is empty"):
        ArrayRecordDataSource(empty)


def test_groups_are_warned_of_once_where_the_original_logs_an_error(original, tmp_path, caplog):
    path = tmp_path / "grouped.array_record"
    with dataload.create(path, options="group_size:11") as writer:
        writer.extend([b"a", b"b"])
    with original.ArrayRecordDataSource(path) as theirs:
        assert theirs[1] == b"b"
    assert "created with group size 11. Grain requires group size 1" in caplog.text
    with pytest.warns(UserWarning, match=r"grouped\.array_record was written with group_size:11: reading one record"):
        ours = ArrayRecordDataSource(path)
    assert list(ours) == [b"a", b"b"]  # warnings are errors here
    with ArrayRecordDataSource(f"{path}[1:2]") as part, pytest.warns(UserWarning, match="group_size:11"):
        assert part[0] == b"b"
    ours.__exit__()


def test_all_sources_of_the_original_are_here_with_its_arguments(original):
    names = [name for name in vars(original) if not name.startswith("_")]
    assert names
    for name in names:
        ours, theirs = (inspect.signature(vars(module)[name]) for module in (grain_facade, original))
        assert list(ours.parameters) == list(theirs.parameters), name
    assert grain_facade.InMemoryDataSource is SharedMemoryDataSource


VALUES = [1, 2.5, "text", b"bytes", None, True, -(1 << 40)]
FOREIGN = ["ü" * 7, "日本語", "é", "a", -1 << 63]


@pytest.mark.parametrize("name", ["SharedMemoryDataSource", "InMemoryDataSource"])
def test_memory_is_shared_with_the_original(original, name):
    theirs = original.SharedMemoryDataSource(VALUES)
    attached = getattr(grain_facade, name)(name=theirs.shm.name)
    copy = pickle.loads(pickle.dumps(attached))
    for source in (attached, copy):
        assert [source[key] for key in range(len(source))] == [*source] == [*theirs] == VALUES
        assert (str(source), repr(source)) == (str(theirs), repr(theirs))
        assert isinstance(source, RandomAccessDataSource)
        with pytest.raises(IndexError, match="index out of range"):
            source[len(VALUES)]
        source.close()
    theirs.close()
    theirs.unlink()
    for values in ([], FOREIGN):  # the original cuts the texts
        ours = SharedMemoryDataSource(values)
        assert [*ours] == values
        ours.close()
        ours.unlink()


def test_it_is_read_again_after_a_with_block_and_pickles(files):
    source = ArrayRecordDataSource(files)
    with source:
        assert source[0] == b"a0"
    assert source[8] == b"b3"
    copy = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(ArrayRecordDataSource([f"{files[0]}[0:1]"] * 10))) < 2000
    with source, copy:
        assert list(copy) == list(source)
        assert repr(copy) == repr(source)


def test_half_of_the_files_that_a_process_may_open_are_open(files, monkeypatch):
    monkeypatch.setattr(grain_facade, "open_files_limit", lambda: 4)
    before = len(os.listdir("/proc/self/fd"))
    with ArrayRecordDataSource([files[0]] * 20) as source:
        size = len(source) // 20
        assert source.__getitems__(range(20 * size)) == [source[row] for row in range(size)] * 20
        assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.parametrize(
    "arguments", [(0, 10, 1), (3, 10, 3), (10, 0, -3), (5, 5, 1), (5, 5, -1), (0, 1, -2), (-4, 4, 2)]
)
def test_ranges_are_those_of_the_original(original, arguments):
    ours, theirs = RangeDataSource(*arguments), original.RangeDataSource(*arguments)
    keys = range(len(theirs))
    assert len(ours) == len(theirs)
    assert [ours[key] for key in keys] == [theirs[key] for key in keys]
    assert repr(ours) == repr(theirs)
    assert repr(pickle.loads(pickle.dumps(ours))) == repr(ours)
    for outside in (-1, len(ours)):
        for source in (ours, theirs):
            with pytest.raises(IndexError, match=rf"{outside} is out of range|{outside} out of range"):
                source[outside]


def test_data_sources_of_tfds():
    with tfds_data_source(DEMO, "train[:50%]", fields=["id"]) as half:
        assert len(half) == 4  # 3.5, rounded to even
    first, second = tfds_data_source(str(DEMO), ["train[:2]", "test"])
    splits = tfds_data_source(DEMO)
    with first, second, splits["train"], splits["test"]:
        assert (len(first), len(second)) == (2, 2)
        assert {name: len(source) for name, source in splits.items()} == {"train": 7, "test": 2}
        assert splits["train"][0]["id"] == first[0]["id"]
    made = RangeDataSource(0, 3, 1)
    assert tfds_data_source(made) is made


def test_both_run_in_our_loader(original, files):
    with ArrayRecordDataSource(files) as ours:
        for source in (original.RangeDataSource(0, 20, 2), original.ArrayRecordDataSource(files), ours):
            wanted = [source[key] for key in range(len(source))]
            with Loader(source, batch_size=4, shuffle=True, seed=0, num_workers=2) as loader:
                found = [value for batch in loader for value in list(batch)]
            assert found != wanted
            assert sorted(found) == wanted
        with Loader(ours, batch_size=4, shuffle="shards") as loader:
            assert sorted(value for batch in loader for value in batch) == wanted
            state = loader.state_dict()
        with Loader(ours, batch_size=4, shuffle="shards") as loader:
            loader.load_state_dict(state)
            assert loader.epoch == 1
