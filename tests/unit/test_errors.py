import copy
import inspect
import pickle
import threading

import pytest
from bad_errors import Demanding, Holding

from dataload import errors

EXAMPLES = [
    errors.DataloadError("something"),
    errors.ConfigError("wrong", key="loader.batch_size", value=-1),
    errors.SourceError("wrong", path="/data/x"),
    errors.SourceNotFoundError("nothing there", path="/data/x"),
    errors.UnsupportedFormatError("found zeros", path="/data/x"),
    errors.CorruptFileError("sizes disagree", path="/data/x", offset=17, index=3),
    errors.ClosedSourceError("closed", path="/data/x"),
    errors.ChangedFileError("cut", path="/data/x", offset=17),
    errors.MachineError("no memory", path="/data/x"),
    errors.StoreError("no answer", path="s3://b/x"),
    errors.StateMismatchError("other data", differences=["seed: 1 in the state, 2 here"]),
    errors.WorkerError("failed", step=7, epoch=2, indices=(1, 2), worker="thread-1", traceback_text="Traceback ..."),
    errors.MissingDependencyError("needs lmdb", name="lmdb"),
]


def test_every_class_has_an_example():
    classes = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.DataloadError)}
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
        raise error or errors.WorkerError("failed", step=1, epoch=0) from cause
    except errors.DataloadError as raised:
        return raised


@pytest.mark.parametrize("cause", [Demanding(3, "no"), Holding()], ids=["unpickling fails", "pickling fails"])
def test_a_cause_that_cannot_travel_is_left_behind_with_its_text(cause):
    error = errors.WorkerError("failed", step=4, epoch=1, traceback_text="Traceback: the text", indices=(5,))
    twin = travel(caused(cause, error))
    assert twin.__cause__ is None
    assert (str(twin), twin.step, twin.epoch, twin.indices) == ("failed", 4, 1, (5,))
    assert twin.traceback_text == "Traceback: the text"


def test_causes_in_a_circle_and_attributes_that_cannot_travel():
    first, second = errors.CorruptFileError("one"), errors.CorruptFileError("two")
    first.__cause__, second.__cause__ = second, first
    assert str(travel(first).__cause__) == "two"
    twin = travel(errors.ConfigError("wrong", key="collate", value=Demanding))
    assert twin.value is Demanding
    lock = threading.Lock()
    twin = travel(errors.ConfigError("wrong", key="collate", value=lock))
    assert (twin.key, twin.value) == ("collate", repr(lock))
    twin = travel(errors.ConfigError("wrong", value=Demanding(1, "x")))
    assert twin.value == "Demanding('1: x')"


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (errors.ConfigError, (ValueError,)),
        (errors.SourceNotFoundError, (FileNotFoundError, errors.SourceError)),
        (errors.UnsupportedFormatError, (ValueError,)),
        (errors.CorruptFileError, (ValueError, errors.SourceError)),
        (errors.ClosedSourceError, (ValueError, errors.SourceError)),
        (errors.StoreError, (errors.SourceError,)),
        (errors.ChangedFileError, (errors.CorruptFileError, errors.StoreError)),
        (errors.MachineError, (errors.SourceError,)),
        (errors.StateMismatchError, (ValueError,)),
        (errors.WorkerError, (RuntimeError,)),
        (errors.MissingDependencyError, (ImportError,)),
    ],
)
def test_errors_are_caught_as_what_users_know(error, bases):
    assert all(issubclass(error, base) for base in (*bases, errors.DataloadError))


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
    error = errors.CorruptFileError("wrong", **places)
    assert str(error) == text
    assert (error.path, error.offset, error.index) == tuple(map(places.get, ("path", "offset", "index")))


def test_state_mismatch_has_one_line_per_difference():
    assert str(errors.StateMismatchError("differs", differences=["seed: 1, 2", "length: 3, 4"])).splitlines() == [
        "differs", "  seed: 1, 2", "  length: 3, 4"]  # fmt: skip


def test_closest():
    assert errors.closest("featurs", ["label", "features"]) == "did you mean 'features'? Choose from features, label"
    assert errors.closest("name", ["on_damage"]) == "choose from on_damage"
    assert errors.closest("zzz", ["label"]) == "choose from label"
    assert errors.closest("x", []) == "there is none"
    assert errors.closest("x", map(str, range(100, 10_100))).endswith(", 10055, 10056 (and 9936 more)")


def test_printable_escapes_what_a_terminal_or_a_file_would_not_take():
    for text in ("plain, größer, 漢字", "line\n\ttab", "a" * 50 + "b" * 50):
        assert errors.printable(text, 100) == text
    assert errors.printable("\x1b[2J\r\0") == "\\x1b[2J\\r\\x00"
    assert errors.printable("lone \udc80") == "lone \\udc80"
    assert errors.printable("a\n\tb", kept="\n") == "a\n\\tb"
    assert errors.printable("a" * 38, 8) == "a" * 38
    assert errors.printable("a" * 50 + "b" * 51, 8) == "aaaaaa ...(93 characters)... bb"
    assert len(errors.printable("x" * 10_000_000)) < 2100
    assert len(errors.printable("x" * 10_000, None)) == 10_000


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text for you")


def test_messages_of_any_exception():
    assert errors.message_of(ValueError("wrong")) == "ValueError: wrong"
    assert errors.text_of(ValueError("wrong")) == "wrong"
    assert errors.message_of(Mute()) == "Mute: (no message: its __str__ raised RuntimeError)"
    assert errors.message_of(ValueError("\x07")) == "ValueError: \\x07"
    assert len(errors.message_of(ValueError("x" * 1_000_000))) < 2100


class Unkempt(Exception):
    @property
    def __notes__(self):
        raise OSError("no notes")


def test_tracebacks_of_any_exception():
    def fail(error):
        try:
            raise error
        except Exception as raised:
            return errors.traceback_of(raised)

    text = fail(ValueError("wrong"))
    assert text.startswith("Traceback (most recent call last):\n")
    assert "    raise error\n" in text
    assert text.endswith("ValueError: wrong\n")
    assert "Mute" in fail(Mute())
    text = fail(ValueError("x" * 10_000_000))
    assert "    raise error\n" in text
    assert len(text) < 21_000
    assert "Unkempt" in fail(Unkempt())
