import copy
import inspect
import pickle
import threading

import pytest
from bad_errors import Demanding, Holding

from dataload import errors
from dataload.errors import (
    ChangedFileError,
    ClosedSourceError,
    ConfigError,
    CorruptFileError,
    DataloadError,
    MachineError,
    MissingDependencyError,
    SourceError,
    SourceNotFoundError,
    StateMismatchError,
    StoreError,
    UnsupportedFormatError,
    WorkerError,
    closest,
    message_of,
    printable,
    text_of,
    traceback_of,
)

EXAMPLES = [
    DataloadError("something"),
    ConfigError("wrong", key="loader.batch_size", value=-1),
    SourceError("wrong", path="/data/x"),
    SourceNotFoundError("nothing there", path="/data/x"),
    UnsupportedFormatError("found zeros", path="/data/x"),
    CorruptFileError("sizes disagree", path="/data/x", offset=17, index=3),
    ClosedSourceError("closed", path="/data/x"),
    ChangedFileError("cut", path="/data/x", offset=17),
    MachineError("no memory", path="/data/x"),
    StoreError("no answer", path="s3://b/x"),
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
    error = copy.copy(error)
    error.add_note("a note")
    twin = copied(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin.args == error.args
    assert twin.__dict__ == error.__dict__
    assert twin.__notes__[-1] == "a note"
    assert getattr(twin, "name", None) == getattr(error, "name", None)
    assert twin.__cause__ is None


def travel(error):
    return pickle.loads(pickle.dumps(error))


def caused(cause, error=None):
    try:
        raise error or WorkerError("failed", step=1, epoch=0) from cause
    except DataloadError as raised:
        return raised


@pytest.mark.parametrize("cause", [Demanding(3, "no"), Holding()], ids=["unpickling fails", "pickling fails"])
def test_a_cause_that_cannot_travel_is_left_behind_with_its_text(cause):
    error = WorkerError("failed", step=4, epoch=1, traceback_text="Traceback: the text", indices=(5,))
    twin = travel(caused(cause, error))
    assert twin.__cause__ is None
    assert (str(twin), twin.step, twin.epoch, twin.indices) == ("failed", 4, 1, (5,))
    assert twin.traceback_text == "Traceback: the text"


def test_causes_in_a_circle_and_attributes_that_cannot_travel():
    first, second = CorruptFileError("one"), CorruptFileError("two")
    first.__cause__, second.__cause__ = second, first
    assert str(travel(first).__cause__) == "two"
    twin = travel(ConfigError("wrong", key="collate", value=Demanding))
    assert twin.value is Demanding
    lock = threading.Lock()
    twin = travel(ConfigError("wrong", key="collate", value=lock))
    assert (twin.key, twin.value) == ("collate", repr(lock))
    twin = travel(ConfigError("wrong", value=Demanding(1, "x")))
    assert twin.value == "Demanding('1: x')"


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (ConfigError, (ValueError,)),
        (SourceNotFoundError, (FileNotFoundError, SourceError)),
        (UnsupportedFormatError, (ValueError,)),
        (CorruptFileError, (ValueError, SourceError)),
        (ClosedSourceError, (ValueError, SourceError)),
        (StoreError, (SourceError,)),
        (ChangedFileError, (CorruptFileError, StoreError)),
        (MachineError, (SourceError,)),
        (StateMismatchError, (ValueError,)),
        (WorkerError, (RuntimeError,)),
        (MissingDependencyError, (ImportError,)),
    ],
)
def test_errors_are_caught_as_what_users_know(error, bases):
    assert all(issubclass(error, base) for base in (*bases, DataloadError))


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


def test_closest():
    assert closest("featurs", ["label", "features"]) == "did you mean 'features'? Choose from features, label"
    assert closest("name", ["on_damage"]) == "choose from on_damage"
    assert closest("zzz", ["label"]) == "choose from label"
    assert closest("x", []) == "there is none"


def test_printable_escapes_what_a_terminal_or_a_file_would_not_take():
    for text in ("plain, größer, 漢字", "line\n\ttab", "a" * 50 + "b" * 50):
        assert printable(text, 100) == text
    assert printable("\x1b[2J\r\0") == "\\x1b[2J\\r\\x00"
    assert printable("lone \udc80") == "lone \\udc80"
    assert printable("a\n\tb", kept="\n") == "a\n\\tb"
    assert printable("a" * 38, 8) == "a" * 38
    assert printable("a" * 50 + "b" * 51, 8) == "aaaaaa ...(93 characters)... bb"
    assert len(printable("x" * 10_000_000)) < 2100
    assert len(printable("x" * 10_000, None)) == 10_000


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text for you")


def test_messages_of_any_exception():
    assert message_of(ValueError("wrong")) == "ValueError: wrong"
    assert text_of(ValueError("wrong")) == "wrong"
    assert message_of(Mute()) == "Mute: (no message: its __str__ raised RuntimeError)"
    assert message_of(ValueError("\x07")) == "ValueError: \\x07"
    assert len(message_of(ValueError("x" * 1_000_000))) < 2100


class Unkempt(Exception):
    @property
    def __notes__(self):
        raise OSError("no notes")


def test_tracebacks_of_any_exception():
    def fail(error):
        try:
            raise error
        except Exception as raised:
            return traceback_of(raised)

    text = fail(ValueError("wrong"))
    assert text.startswith("Traceback (most recent call last):\n")
    assert "    raise error\n" in text
    assert text.endswith("ValueError: wrong\n")
    assert "Mute" in fail(Mute())
    text = fail(ValueError("x" * 10_000_000))
    assert "    raise error\n" in text
    assert len(text) < 21_000
    assert "Unkempt" in fail(Unkempt())
