"""The owner of a failure: whose fault an exception is, and that only a record's own is skipped."""

import errno
import json
import os
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import dataload
from dataload import ConfigError, CorruptFileError, Loader, WorkerError
from dataload._util.failures import BUG, LIBRARIES, owner_of
from dataload.errors import (
    ChangedFileError,
    ClosedSourceError,
    DataloadError,
    MachineError,
    MissingDependencyError,
    SourceError,
    SourceNotFoundError,
    StoreError,
    UnsupportedFormatError,
)
from dataload.sources.base import Source
from dataload.sources.memory import MemorySource
from dataload.sources.views.adapt import as_source
from dataload.storage.errors import file_errors

OWNERS = {
    "record": [CorruptFileError("damaged"), UnsupportedFormatError("16 bits")],
    "store": [
        *(ChangedFileError("cut"), StoreError("503"), SourceNotFoundError("gone"), SourceError("locked")),
        *(OSError(errno.EIO, "disk"), OSError(errno.ESTALE, "server"), PermissionError(errno.EACCES, "no")),
        FileNotFoundError(errno.ENOENT, "no"),
    ],
    "machine": [MachineError("full"), MemoryError(), OSError(errno.ENOSPC, "full"), OSError(errno.EMFILE, "files")],
    "user": [
        *(ClosedSourceError("closed"), MissingDependencyError("lmdb", name="lmdb"), ConfigError("wrong")),
        DataloadError("other"),
    ],
    "dataload": [IndexError("ours"), OSError("without a number")],
}


@pytest.mark.parametrize(("owner", "error"), [(owner, error) for owner in OWNERS for error in OWNERS[owner]], ids=repr)
def test_the_class_and_the_number_decide(owner, error):
    assert owner_of(error) == owner


def failing(error):
    def fail(*_):
        raise error

    return fail


class Own:
    """A source of the user's."""

    def __init__(self, read, length=4):
        self.read_one, self.length = read, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.read_one(index)


class Derived(Source):
    """A source of the user's or of a plugin, derived from ours."""

    def __init__(self, read):
        self.read_one = read

    def __len__(self):
        return 4

    def _read(self, indices):
        return [self.read_one(index) for index in indices.tolist()]

    def fingerprint(self):
        return "0" * 32


def outcome(source, **options):
    """The number of bad records, or the error."""
    settings = {"batch_size": 2, "on_error": "skip", "max_bad": 1.0, **options}
    with Loader(source, **settings) as loader:
        rows = sum(len(next(iter(batch.values()), ())) for batch in loader)
    return len(source) - rows


def third(index):
    """Fail for one record, by an error that Python raises in the user's code."""
    return {"x": [1, 2, 4, 5][index]} if index != 2 else {"x": [][index]}


def by_c(index):
    """Fail for one record in code of a library that the user calls."""
    return json.loads(b"{}" if index != 2 else b"{") or {"x": 0}


@pytest.mark.parametrize("read", [third, by_c], ids=lambda read: read.__name__)
def test_the_users_source_is_to_blame_for_what_it_raises(read):
    assert outcome(Own(read)) == 1
    assert outcome(Derived(read)) == 1
    assert outcome(dataload.concat([Derived(read), Derived(lambda index: {"x": index})])) == 1
    assert outcome(as_source(Own(read))) == 1
    # A transform is the user's, too.
    assert outcome(MemorySource({"x": np.arange(4)}), transform=lambda sample: read(sample["x"])) == 1


BUGS = (IndexError("list index"), KeyError("x"), TypeError("None"), AssertionError("no"), AttributeError("y"))


@pytest.fixture
def break_reading(monkeypatch):
    """Break a source of ours: the name of the module of a frame says whose it is."""

    def broken(statement, error=None):
        scope = {"__name__": "dataload.sources.memory", "error": error}
        exec(f"def _read(self, indices): {statement}", scope)
        monkeypatch.setattr(MemorySource, "_read", scope["_read"])
        monkeypatch.setattr(MemorySource, "_read_columns", lambda self, indices, fields: self._read(indices))
        return MemorySource({"x": np.arange(4)})

    return broken


@pytest.mark.parametrize("error", [*BUGS, ValueError("could not broadcast")], ids=repr)
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_a_bug_of_ours_is_never_skipped(error, on_error, break_reading):
    source = break_reading("raise error", error)
    for each in (source, source[:3]):
        with pytest.raises(WorkerError, match=f"{type(error).__name__}: (.|\n)*\n  {BUG}") as caught:
            outcome(each, on_error=on_error, transform=lambda sample: sample)
        assert caught.value.__cause__ is error


FAILS = "; the disk or the file server is failing: see the system's log, and continue from the last"


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [
        (errno.EIO, StoreError, FAILS),
        (errno.ESTALE, StoreError, FAILS),
        (errno.EACCES, StoreError, "Permission denied$"),
        (errno.EMFILE, MachineError, r"; this process may open \d+ files: raise the limit \(ulimit -n\), or use fewer"),
        (errno.ENOSPC, MachineError, r"; [\d,]+ bytes are free in /.*: delete something, or choose another disk"),
        (errno.ENOMEM, MachineError, "; use fewer workers, or smaller batches"),
        (errno.ENOENT, SourceNotFoundError, "there is no "),
    ],
)
def test_errors_of_files_say_what_to_do(tmp_path, number, kind, remedy):
    path = str(tmp_path / "a.bin")
    with pytest.raises(kind, match=remedy) as caught, file_errors(path):
        raise OSError(number, os.strerror(number))
    assert path in str(caught.value)
    assert caught.value.path == path


def test_all_packages_that_the_library_calls_are_known():
    """Else an error in one of them would look like the user's."""
    loaded = re.compile(
        r"^ *import (\w+)|^ *from (\w+)[\w.]* import |(?:load_optional|require|import_module)\(\"(\w+)", re.MULTILINE
    )
    found = set()
    for path in Path(dataload.__file__).parent.rglob("*.py"):
        found |= {name for names in loaded.findall(path.read_text("utf-8")) for name in names if name}
    assert {"numpy", "pyarrow", "lmdb", "bson"} <= found
    not_reading = {"dataload", "hypothesis", "pytest", "typer", "matplotlib", "IPython", "jax", "webdataset"}
    not_reading |= {"benchmarks", "threadpoolctl", "typing_extensions"}
    assert found - LIBRARIES - not_reading == set()


@pytest.mark.parametrize(
    ("error", "owner"),
    [
        (OSError(errno.ENOSPC, "full"), "machine"),
        (OSError(errno.ESTALE, "server"), "store"),
        (MemoryError(), "machine"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "machine"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "machine"),
        (FileNotFoundError(errno.ENOENT, "no side file"), "record"),
        (ValueError("bytes"), "record"),
    ],
    ids=repr,
)
def test_the_users_code_may_wrap_what_the_system_says(error, owner):
    wrapped = ValueError("cannot load")
    wrapped.__cause__ = KeyError("between")
    wrapped.__cause__.__cause__ = error
    for each in (wrapped, error):
        with suppress(Exception):
            raise each
        assert owner_of(each) == owner
    error.__cause__ = wrapped  # a circle
    assert owner_of(wrapped) == owner
