from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from dataload import errors
from dataload.errors import (
    ClosedSourceError,
    ConfigError,
    CorruptFileError,
    DataloadError,
    MissingDependencyError,
    SourceError,
    SourceNotFoundError,
    StateMismatchError,
    UnsupportedFormatError,
    WorkerError,
    closest,
)

EXAMPLES = [
    DataloadError("something"),
    ConfigError("wrong", key="loader.batch_size", value=-1),
    SourceError("wrong", path="/data/x"),
    SourceNotFoundError("nothing there", path="/data/x"),
    UnsupportedFormatError("found zeros", path="/data/x"),
    CorruptFileError("sizes disagree", path="/data/x", offset=17, index=3),
    ClosedSourceError("closed", path="/data/x"),
    StateMismatchError("other data", differences=["seed: 1 in the state, 2 here"]),
    WorkerError("failed", step=7, epoch=2, indices=(1, 2), worker="thread-1", traceback_text="Traceback ..."),
    MissingDependencyError("needs lmdb", name="lmdb"),
]


def test_every_class_has_an_example():
    classes = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, DataloadError)}
    assert classes == {type(example) for example in EXAMPLES}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    "copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"]
)
def test_errors_travel_whole(error, copied):
    error.add_note("a note")
    twin = copied(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin.args == error.args
    assert twin.__dict__ == error.__dict__
    assert twin.__notes__[-1] == "a note"
    assert getattr(twin, "name", None) == getattr(error, "name", None)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (ConfigError, ValueError),
        (SourceNotFoundError, FileNotFoundError),
        (SourceNotFoundError, SourceError),
        (UnsupportedFormatError, ValueError),
        (CorruptFileError, ValueError),
        (CorruptFileError, SourceError),
        (ClosedSourceError, ValueError),
        (ClosedSourceError, SourceError),
        (StateMismatchError, ValueError),
        (WorkerError, RuntimeError),
        (MissingDependencyError, ImportError),
    ],
)
def test_errors_are_caught_as_what_users_know(error, base):
    assert issubclass(error, base)
    assert issubclass(error, DataloadError)


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ({"path": "a.syr", "offset": 0, "index": 0}, "a.syr, byte 0, record 0: wrong"),
        ({"path": "a.syr", "offset": 22}, "a.syr, byte 22: wrong"),
        ({"path": "a.syr"}, "a.syr: wrong"),
        ({"index": 5}, "record 5: wrong"),
        ({}, "wrong"),
    ],
)
def test_corrupt_file_error_says_where(places, text):
    error = CorruptFileError("wrong", **places)
    assert str(error) == text
    assert (error.path, error.offset, error.index) == tuple(map(places.get, ("path", "offset", "index")))


def test_state_mismatch_has_one_line_per_difference():
    assert str(StateMismatchError("differs", differences=["seed: 1, 2", "length: 3, 4"])).splitlines() == [
        "differs", "  seed: 1, 2", "  length: 3, 4"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("featurs", ["label", "features"], "did you mean 'features'? Known: features, label"),
        ("zzz", ["label"], "Known: label"),
        ("x", [], "Known: (none)"),
    ],
)
def test_closest(name, known, text):
    assert closest(name, known) == text
