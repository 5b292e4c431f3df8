"""Syrah's `File`; see `dataload.compat.syrah`."""

from __future__ import annotations

import operator
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Self, SupportsIndex

from dataload.compat._syrah_values import check_position, flat, storable, taken_for
from dataload.errors import ConfigError, SourceError
from dataload.sources.syrah.reader import SyrahSource
from dataload.sources.syrah.writer import SyrahWriter
from dataload.types import Array

__all__ = ["File", "FileError"]


class FileError(SourceError, OSError):
    """The file is closed or open in the other mode, or the operating system refused."""


class File:
    """A Syrah file, open to be read or to be written.

    Outside a ``with`` block a file that is written needs `close`. Leaving the block by an exception closes it, too:
    what was added until then is the file.

    Args:
        file_path: The file; mode ``"w"`` replaces what is there.
        mode: ``"r"`` or ``"w"``.

    Raises:
        ConfigError: It is another mode.
        SourceNotFoundError: There is no such file, or no such directory to write to.
        FileError: The operating system refused.
        CorruptFileError: It is no Syrah file, or damaged.
    """

    def __init__(self, file_path: str | os.PathLike[str], mode: str) -> None:
        self._reader: SyrahSource | None = None
        self._writer: SyrahWriter | None = None
        self.open(file_path, mode)

    def open(self, file_path: str | os.PathLike[str], mode: str) -> None:
        """Close this file and open one, the same or another. Needless in worker processes."""
        if mode not in ("r", "w"):
            raise ConfigError(f"a Syrah file is opened with mode 'r' or 'w', got {mode!r}", key="mode", value=mode)
        self.close()
        self._path, self._mode = os.fspath(file_path), mode
        self._num_items, self._names = 0, frozenset[str]()
        if os.path.isdir(self._path):
            raise FileError(f"{self._path} is a directory; a Syrah data set is a file", path=self._path)
        with _os_errors():
            if mode == "w":
                self._writer = SyrahWriter(self._path, overwrite=True)
                return
            reader = SyrahSource(self._path)
            self._num_items = len(reader)
            self._reader = reader

    def close(self) -> None:
        """Release the file; one that was written is complete then. May be called twice."""
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
        """Items in the file, or added so far; also after `close`."""
        return self._num_items

    def add_item(self, item: Mapping[str, Array]) -> None:
        """Append an item.

        Args:
            item: Name -> array. All items have the names and dtypes of the first. An array of text becomes one text.

        Raises:
            FileError: The file is not open to be written.
            ConfigError: A name is no text, a value no array, or not of the dtype that it had in the first item.
            TypeError: The format has no such dtype.
            KeyError: The names are not those of the first item.
        """
        if self._writer is None:
            raise self._unusable("w", "write an item to")
        record = {name: storable(name, value) for name, value in item.items()}
        if self._num_items and record.keys() != self._names:
            raise KeyError(f"item {self._num_items} has arrays {sorted(record)}, the first had {sorted(self._names)}")
        with _os_errors():
            self._writer.write(record)
        if not self._num_items:
            self._names = frozenset(record)
        self._num_items = len(self._writer)

    def get_item(self, index: SupportsIndex | str) -> dict[str, Array]:
        """An item: name -> array of one dimension, in the order of the file. See `get_array`."""
        reader, position = self._readable(), self._position(index)
        return {name: flat(value) for name, value in reader[position].items()}

    def get_array(self, index: SupportsIndex | str, array_name: str, dtype: str | None = None) -> Array:
        """One array of an item.

        Args:
            index: From 0; also as text, as the original's README has it.
            array_name: Name of the array.
            dtype: Name of the dtype that its bytes shall be taken for, instead of its own.

        Returns:
            An array of one dimension; for text, with one element.

        Raises:
            FileError: The file is not open to be read.
            IndexError: There are not so many items.
            KeyError: There is no such array.
            TypeError: The index is no integer, or the format has no such dtype.
            ConfigError: The index is negative, or the bytes are no whole number of `dtype`.
        """
        reader, position = self._readable(), self._position(index)
        if array_name not in reader.fields:
            raise KeyError(f"{self._path} has no array {array_name!r}; it has {', '.join(reader.fields)}")
        value = reader.read_batch([position], [array_name])[array_name][0]
        return taken_for(value, dtype) if dtype else flat(value)

    def get_columns(self, indices: Iterable[SupportsIndex | str], names: Sequence[str]) -> list[list[Array]]:
        """Several arrays of several items: for each name a list as `get_array` would give it item by item.

        The original has no such method. Arrays of one length are read in one go.
        """
        reader, positions = self._readable(), [self._position(index) for index in indices]
        specs = [reader.fields.get(name) for name in names]
        if not positions or any(spec is None or spec.shape is None or None in spec.shape for spec in specs):
            return [[self.get_array(position, name) for position in positions] for name in names]
        columns = reader.read_batch(positions, list(names))
        return [list(map(flat, columns[name])) for name in names]

    def _readable(self) -> SyrahSource:
        if self._reader is None:
            raise self._unusable("r", "read an item from")
        return self._reader

    def _unusable(self, mode: str, doing: str) -> FileError:
        is_open = self._reader is not None or self._writer is not None
        found = f"its mode is {self._mode!r}" if is_open else "it is closed"
        return FileError(f"cannot {doing} {self._path}: {found}; open it with mode {mode!r}", path=self._path)

    def _position(self, index: SupportsIndex | str) -> int:
        number = int(index) if isinstance(index, str) and index.isdecimal() else operator.index(index)  # pyright: ignore
        return check_position(number, self._num_items, f"items in {self._path}")


@contextmanager
def _os_errors() -> Generator[None]:
    """Make what the operating system refused an `OSError` again."""
    try:
        yield
    except SourceError as error:
        if isinstance(error, (OSError, ValueError)):
            raise
        raise FileError(str(error), path=error.path) from error
