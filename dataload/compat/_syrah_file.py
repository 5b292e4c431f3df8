"""Files with Syrah's interface."""

import operator
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, SupportsIndex

import numpy as np

from dataload.errors import ConfigError, SourceError, SourceNotFoundError
from dataload.sources.syrah.layout import DTYPES
from dataload.sources.syrah.reader import SyrahSource
from dataload.sources.syrah.writer import SyrahWriter
from dataload.types import Array


class FileError(SourceError, OSError):
    """The file is closed or open in the other mode, or the operating system reported an error."""


class File:
    """A Syrah file, open for reading or for writing.

    Close a file open for writing with `close` or a ``with`` block. If an exception leaves the block, the file contains
    the items added until then. Mode ``"w"`` replaces an existing file; the other mode is ``"r"``.
    """

    def __init__(self, file_path: str | os.PathLike[str], mode: str) -> None:
        self._reader: SyrahSource | None = None
        self._writer: SyrahWriter | None = None
        self.open(file_path, mode)

    def open(self, file_path: str | os.PathLike[str], mode: str) -> None:
        """Close this file and open the same or another one. Worker processes do not need to call this method."""
        if mode not in ("r", "w"):
            raise ConfigError(f"a Syrah file is opened with mode 'r' or 'w', got {mode!r}", key="mode", value=mode)
        self.close()
        self._path, self._mode = os.fspath(file_path), mode
        self._num_items, self._names = 0, frozenset[str]()
        if os.path.isdir(self._path):
            raise FileError(f"{self._path} is a directory; a Syrah dataset is a file", path=self._path)
        directory = os.path.dirname(self._path) or "."
        if mode == "w" and not os.path.exists(directory):  # as the original; our writer would create it
            raise SourceNotFoundError(f"the directory {directory} does not exist", path=self._path)
        with _os_errors():
            if mode == "w":
                self._writer = SyrahWriter(self._path, overwrite=True)
                return
            reader = SyrahSource(self._path)
            self._num_items = len(reader)
            self._reader = reader

    def close(self) -> None:
        """Release the file and complete a file open for writing. Closing it again has no effect."""
        reader, writer = self._reader, self._writer
        self._reader = self._writer = None
        if reader is not None:
            reader.close()
        if writer is not None:
            with _os_errors():
                writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def num_items(self) -> int:
        """Return the number of items in the file, or added so far; also works after `close`."""
        return self._num_items

    def add_item(self, item: Mapping[str, Array]) -> None:
        """Append an item: arrays by name, with the names and dtypes of the first one.

        The elements of an array of strings are joined to one string. A dtype that the format lacks is a TypeError,
        other names are a KeyError.
        """
        if self._writer is None:
            raise self._not_open("w", "write an item to")
        record = {name: _to_value(name, array) for name, array in item.items()}
        if self._num_items and record.keys() != self._names:
            raise KeyError(f"item {self._num_items} has arrays {sorted(record)}, the first had {sorted(self._names)}")
        with _os_errors():
            self._writer.write(record)
        if not self._num_items:
            self._names = frozenset(record)
        self._num_items = len(self._writer)

    def get_item(self, index: SupportsIndex | str) -> dict[str, Array]:
        """Return an item as a dict from name to one-dimensional array, in file order; see `get_array`."""
        reader, position = self._readable(), self._position(index)
        return {name: _flat(value) for name, value in reader[position].items()}

    def get_array(self, index: SupportsIndex | str, array_name: str, dtype: str | None = None) -> Array:
        """Return one array of an item, of one dimension; for a string, it has one element.

        `index` is a position from 0, or its digits as text, as in the original's README. `dtype` names a dtype to
        reinterpret the bytes as, instead of the array's own. A negative index is a ConfigError, a missing name a
        KeyError.
        """
        reader, position = self._readable(), self._position(index)
        if array_name not in reader.fields:
            raise KeyError(f"{self._path} has no array {array_name!r}; it has {', '.join(reader.fields)}")
        value = reader.read_batch([position], [array_name])[array_name][0]
        return _reinterpret(value, dtype) if dtype else _flat(value)

    def get_columns(self, indices: Iterable[SupportsIndex | str], names: Sequence[str]) -> list[list[Array]]:
        """Return, for each name, a list of the arrays of several items, as `get_array` would return them.

        The original lacks this method. Arrays of equal length are read together.
        """
        reader, positions = self._readable(), [self._position(index) for index in indices]
        specs = [reader.fields.get(name) for name in names]
        if not positions or any(spec is None or spec.shape is None or None in spec.shape for spec in specs):
            return [[self.get_array(position, name) for position in positions] for name in names]
        columns = reader.read_batch(positions, list(names))
        return [list(map(_flat, columns[name])) for name in names]

    def _readable(self) -> SyrahSource:
        if self._reader is None:
            raise self._not_open("r", "read an item from")
        return self._reader

    def _not_open(self, mode: str, action: str) -> FileError:
        is_open = self._reader is not None or self._writer is not None
        found = f"its mode is {self._mode!r}" if is_open else "it is closed"
        return FileError(f"cannot {action} {self._path}: {found}; open it with mode {mode!r}", path=self._path)

    def _position(self, index: SupportsIndex | str) -> int:
        number = int(index) if isinstance(index, str) and index.isdecimal() else operator.index(index)  # pyright: ignore
        return check_position(number, self._num_items, f"items in {self._path}")


@contextmanager
def _os_errors() -> Generator[None]:
    """Raise operating system errors as `FileError`, an `OSError` as in the original."""
    try:
        yield
    except SourceError as error:
        if isinstance(error, (OSError, ValueError)):
            raise
        raise FileError(str(error), path=error.path) from error


def check_position(number: int, length: int, what: str) -> int:
    """Return `number` if it is in [0, length), otherwise raise the original's class of error."""
    if number < 0:
        raise ConfigError(f"index {number} is negative; there are {length} {what}", key="index", value=number)
    if number >= length:
        raise IndexError(f"index {number} is out of range for {length} {what}")
    return number


def _to_value(name: Any, array: Any) -> Array | str:
    """Convert an array to the value that `SyrahWriter` takes."""
    if not isinstance(name, str):
        raise ConfigError(f"names of arrays must be strings, got {name!r} ({type(name).__name__})")
    if isinstance(array, str):  # as np.array([array])
        return array
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"array {name!r} is a {type(array).__name__}, not a numpy array", key=name)
    if array.dtype.kind == "U":
        return "".join(array.ravel().tolist())
    if array.dtype.newbyteorder("<") not in DTYPES.values():
        raise TypeError(f"array {name!r} has dtype {array.dtype}; the format supports {', '.join(DTYPES)}, str")
    return array


def _flat(value: Any) -> Array:
    """Convert a value of a `SyrahSource` to a one-dimensional array."""
    if isinstance(value, str):
        return np.array([value])
    return np.frombuffer(bytearray(value), np.uint8) if isinstance(value, bytes) else np.asarray(value).reshape(-1)


def _reinterpret(value: Any, dtype: str) -> Array:
    """Return the bytes of a value as an array of another dtype."""
    data = value.encode() if isinstance(value, str) else _flat(value).tobytes()
    if dtype == "str":
        return np.array([data.decode()])
    if dtype not in DTYPES:
        raise TypeError(f"the format does not support dtype {dtype!r}; it supports {', '.join(DTYPES)}, str")
    if len(data) % DTYPES[dtype].itemsize:
        raise ConfigError(f"{len(data)} bytes are not a multiple of the size of {dtype}", key="dtype", value=dtype)
    return np.frombuffer(bytearray(data), DTYPES[dtype])
