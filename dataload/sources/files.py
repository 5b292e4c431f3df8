"""Sources in files, whose shards are opened lazily in the process that reads them."""

import hashlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike, fspath
from time import perf_counter
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from dataload._util.checks import check_fields
from dataload._util.fingerprint import digest
from dataload._util.indexing import as_indices, split_by_shard
from dataload._util.per_process import PerProcess
from dataload.collate import default_collate, scatter_columns
from dataload.errors import ClosedSourceError, ConfigError, CorruptFileError, closest
from dataload.sources.ahead import read_ahead
from dataload.sources.base import Location, Source, shard_of, spec_of
from dataload.sources.options import Options, describe_value
from dataload.storage import Remote, base_name, is_url, local_path, reading_tables, storage_of
from dataload.storage.errors import file_errors
from dataload.storage.local.files import open_files_limit
from dataload.types import AheadReader, Batch, FieldSpec, Int64Array, StepsAhead

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_FEWEST_OPENED_IN_PARALLEL = 5  # shards; fewer are opened faster than threads start
_OPENING_THREADS = 4
_SLOW_SECONDS = 0.01  # a shard that takes longer waits for the disk, or releases the GIL; others are slower in threads
_ENDS_BYTES = 4096
_REPR_CHARACTERS = 190
_OPTION_CHARACTERS = 60


class ShardReader(ABC, Generic[T_co]):
    """Reads one shard, a file or directory, in one process.

    It keeps the locations of the records (its table) for its lifetime, and opens the file when it reads. Reads are
    thread-safe. Dropping the last reference releases the file, as `close` does.

    Attributes:
        whole: Whether the file cannot be read by range.
    """

    whole = False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of records."""

    @abstractmethod
    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[T_co]:
        """Return records in the requested order.

        Args:
            indices: (rows,) int64 in [0, len), at least one.
            fields: Names of fields, which exist unless `fields` is empty; None means all.
        """

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        """Return columns; override this if it can be done without building records."""
        return default_collate(self.read(indices, fields))

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Fields of this shard, in file order; empty if records are plain bytes."""
        return {}

    def ranges(self, indices: Int64Array, fields: tuple[str, ...] | None) -> tuple[Int64Array, Int64Array] | None:  # noqa: ARG002 - for formats that know them
        """Return offsets and lengths in bytes of most of what `read` reads, both (n,) int64; None if it is unknown."""
        return None

    def first_fields(self) -> Mapping[str, FieldSpec]:
        """Return the fields of the first record; none if there is no record or records are bytes."""
        if not len(self):
            return {}
        try:
            record: Any = self.read(np.zeros(1, np.int64), None)[0]
        except CorruptFileError:  # raised again when it is read; other records may be intact
            return {}
        return {name: spec_of(value) for name, value in record.items()} if isinstance(record, Mapping) else {}

    def key(self, index: int) -> str | None:  # noqa: ARG002 - for formats that have keys
        """Return the key of a record without reading the record; None if records have no keys."""
        return None

    def identity(self) -> Any:
        """Return what else identifies the content besides the size and the ends of the file; its repr is hashed."""
        return None

    def release(self) -> None:
        """Release descriptors and maps but keep the table; the next read opens the file again."""

    def close(self) -> None:
        """Release the file for good."""
        self.release()


@dataclass(slots=True)
class _DataSet(Generic[T_co]):
    """A data set as opened by one process.

    Attributes:
        ends: (shards,) int64, cumulative number of records.
        fields: All fields.
        readers: Readers by shard. All keep their tables; at most `most_open` keep their files open.
        most_open: Maximum number of shards with open files.
        recent: Shards with open files, the most recently used last; unused if there are at most `most_open` shards.
    """

    ends: Int64Array
    fields: Mapping[str, FieldSpec]
    readers: Sequence[ShardReader[T_co]]
    most_open: int
    recent: OrderedDict[int, None]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, indices: Int64Array, read: Callable[[ShardReader[T_co], Int64Array], T]) -> Iterator[tuple[Any, T]]:
        """Yield, for each shard in the request, the rows that it serves and the result of `read`."""
        for shard, local, rows in split_by_shard(self.ends, indices):
            try:
                yield rows, read(self.reader(shard), local)
            finally:
                if len(self.readers) > self.most_open:
                    self._release_if_evicted(shard)

    def _release_if_evicted(self, shard: int) -> None:
        """Close a shard that other threads evicted before a read opened it again."""
        with self.lock:
            if shard not in self.recent:
                self.readers[shard].release()

    def reader(self, shard: int) -> ShardReader[T_co]:
        """Return the reader of a shard, and close the least recently used one if too many are open."""
        if len(self.readers) > self.most_open:
            with self.lock:
                self.recent[shard] = None
                self.recent.move_to_end(shard)
                while len(self.recent) > self.most_open:
                    self.readers[self.recent.popitem(last=False)[0]].release()
        return self.readers[shard]


class FileSource(Source[T_co]):
    """A data set in one or more files of one format; each file is a shard.

    Files are opened on first use in each process, not on construction.

    A backend implements `_open_shard`, sets `format_name`, and names the dataclass of its options in `options_type`.
    A backend without `options_type` passes the options that decide what is read to ``super().__init__`` by name.

    Args:
        paths: Files in index order.
        fields: Names of the fields to read, in that order; None means all.
        options: Options of the format, see `options_type`. Those that affect the records are part of repr and
            fingerprint.

    Attributes:
        options: The options as an instance of `options_type`.
    """

    format_name: str
    options_type: ClassVar[type[Options] | None] = None

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        fields: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        several = [paths] if isinstance(paths, (str, PathLike)) else paths
        self._paths = tuple(local_path(fspath(path)) for path in several)
        if not self._paths:
            raise ConfigError("a source needs at least one path, got an empty list", key="paths", value=paths)
        self._selected = check_fields(fields)
        if self.options_type is None:
            self._content = {name: value for name, value in options.items() if value is not None}
        else:
            self.options: Any = self.options_type.parse(options, f"format {self.format_name!r}")
            self._content = self.options.content()
        self._remote: Remote | None = getattr(getattr(self, "options", None), "place", None)
        self._opened: PerProcess[_DataSet[T_co]] = PerProcess()
        self._closed = False
        self._fingerprint: str | None = None

    @abstractmethod
    def _open_shard(self, path: str) -> ShardReader[T_co]:
        """Open one file. Several threads call this at once for different shards."""

    def _data_file(self, path: str) -> str:
        """Return the file whose size, start and end identify the shard at `path`."""
        return path

    @property
    def paths(self) -> tuple[str, ...]:
        """Files in index order."""
        return self._paths

    def __len__(self) -> int:
        return int(self._data_set().ends[-1])

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The selected fields of the first shard that has records, by default all."""
        known = self._data_set().fields
        return known if self._selected is None else {name: known[name] for name in self._selected if name in known}

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Number of records per file."""
        return tuple(np.diff(self._data_set().ends, prepend=0).tolist())

    def _locate(self, index: int) -> Location:
        opened = self._data_set()
        shard, record = shard_of(opened.ends, index)
        key = None
        with suppress(Exception), reading_tables():  # the location is often requested because the file is damaged
            key = opened.reader(shard).key(record)
        return Location(self._paths[shard], record, key)

    def _data_set(self) -> _DataSet[T_co]:
        return self._opened.get(self._open)

    def _open(self) -> _DataSet[T_co]:
        if self._closed:
            raise ClosedSourceError(f"{self!r} is closed: open it again to read", path=self._paths[0])
        most_open = _most_open_shards()
        readers, fields = zip(*self._open_readers(most_open), strict=True)
        ends = np.cumsum([len(reader) for reader in readers], dtype=np.int64)
        recent = OrderedDict.fromkeys(range(min(len(readers), most_open)))
        return _DataSet(ends, self._known_fields(readers, fields), readers, most_open, recent)

    def _open_readers(self, most_open: int) -> list[tuple[ShardReader[T_co], Mapping[str, FieldSpec]]]:
        """Return the reader and the fields of each shard."""

        def opened(shard: int) -> tuple[ShardReader[T_co], Mapping[str, FieldSpec]]:
            with reading_tables():
                with file_errors(self._paths[shard]):
                    reader = self._open_shard(self._paths[shard])
                fields = reader.fields  # may read a record
            if shard >= most_open:
                reader.release()
            return reader, fields

        shards = iter(range(len(self._paths)))
        found: list[tuple[ShardReader[T_co], Mapping[str, FieldSpec]]] = []
        for shard in shards:
            begun = perf_counter()
            found.append(opened(shard))
            if is_url(self._paths[shard]) or perf_counter() - begun > _SLOW_SECONDS:
                break
        if len(self._paths) - len(found) < _FEWEST_OPENED_IN_PARALLEL:
            return [*found, *map(opened, shards)]
        with ThreadPoolExecutor(_OPENING_THREADS if self._remote is None else self._remote.options.connections) as pool:
            futures = [pool.submit(opened, shard) for shard in shards]
            try:
                return [*found, *(future.result() for future in futures)]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _known_fields(
        self, readers: Sequence[ShardReader[T_co]], fields: Sequence[Mapping[str, FieldSpec]]
    ) -> Mapping[str, FieldSpec]:
        """Return the fields of the data set, given those of each shard, and check that each has the selected ones."""
        # An empty file may not know the fields that its records would have.
        filled = [shard for shard, reader in enumerate(readers) if len(reader)]
        for shard in filled:
            self._check_fields(fields[shard], self._paths[shard])
        return fields[filled[0] if filled else 0]

    def _check_fields(self, known: Mapping[str, FieldSpec], path: str) -> None:
        for name in self._selected or ():
            if known and name not in known:
                raise ConfigError(f"{path} has no field {name!r}: {closest(name, known)}", key="fields", value=name)

    def _read(self, indices: Int64Array) -> list[T_co]:
        opened = self._data_set()
        if len(opened.ends) == 1:
            return opened.reader(0).read(indices, self._selected)
        records: list[Any] = [None] * len(indices)
        for rows, found in opened.read(indices, lambda reader, local: reader.read(local, self._selected)):
            for row, record in zip(rows.tolist(), found, strict=True):
                records[row] = record
        return records

    def read_batch(self, indices: Any, fields: Sequence[str] | None = None) -> Batch:
        """See `Source.read_batch`; here as well, so that a batch's way to its bytes leads through one file less."""
        rows = as_indices(indices, len(self))
        return self._read_columns(rows, None if fields is None else tuple(fields)) if rows.size else {}

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        opened = self._data_set()
        chosen = self._choose(fields, opened)
        if len(opened.ends) == 1:
            return opened.reader(0).read_batch(indices, chosen)
        pieces = opened.read(indices, lambda reader, local: reader.read_batch(local, chosen))
        if not opened.fields:  # values instead of records with fields
            return scatter_columns(((rows, {"": values}) for rows, values in pieces), len(indices))[""]
        return scatter_columns(pieces, len(indices))

    def _choose(self, fields: tuple[str, ...] | None, opened: _DataSet[T_co]) -> tuple[str, ...] | None:
        if fields is None:
            return self._selected
        known = opened.fields if self._selected is None else dict.fromkeys(self._selected)
        for name in fields:
            if known and name not in known:
                raise ConfigError(f"{self!r} has no field {name!r}: {closest(name, known)}", key="fields", value=name)
        return fields

    def read_ahead(
        self, steps: Iterator[StepsAhead], fields: Sequence[str] | None, *, here: bool
    ) -> AheadReader | None:
        """See `dataload.types.ReadsAhead`: files at URLs are fetched before they are read."""
        if self._remote is None or not any(map(is_url, self._paths)):
            return None
        opened = self._data_set()
        files = [self._data_file(path) for path in self._paths]
        chosen = self._choose(None if fields is None else tuple(fields), opened)
        return read_ahead(files, opened.ends, opened.readers, self._remote, steps, chosen, here=here)

    def fingerprint(self) -> str:
        """See `Source.fingerprint`: a hash of names, sizes, counts, file ends and `ShardReader.identity`."""
        if self._fingerprint is None:
            shards = [
                (
                    base_name(path),
                    *_ends_of_file(self._data_file(path), self._remote),
                    count,
                    self._identity_of(shard),
                )
                for shard, (path, count) in enumerate(zip(self._paths, self.shard_lengths, strict=True))
            ]
            options = sorted((name, describe_value(value)) for name, value in self._content.items())
            self._fingerprint = digest(self.format_name, shards, self._selected, options)
        return self._fingerprint

    def _identity_of(self, shard: int) -> Any:
        with reading_tables():
            return self._data_set().reader(shard).identity()

    def close(self) -> None:
        """Release files; reading afterwards raises `ClosedSourceError`. May be called twice."""
        self._closed = True
        opened = self._opened.drop()
        for reader in opened.readers if opened is not None else ():
            reader.close()
        if self._remote is not None:
            self._remote.release()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_opened"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._opened = PerProcess()

    def __repr__(self) -> str:
        first = self._paths[0] if len(self._paths[0]) < 80 else f"...{self._paths[0][-77:]}"
        parts = [repr(first)]
        if len(self._paths) > 1:
            parts.append(f"{len(self._paths)} shards")
        if self._selected is not None:
            parts.append(f"{len(self._selected)} fields")
        options = [f"{name}={_brief(describe_value(value))}" for name, value in self._content.items()]
        while options and len(", ".join([*parts, *options])) > _REPR_CHARACTERS - len(type(self).__name__):
            options[-2:] = ["..."] if options[-1] == "..." else [*options[-2:-1], "..."]
        return f"{type(self).__name__}({', '.join([*parts, *options])})"


def _brief(text: str) -> str:
    """Return the text of an option, or dots for a long one, which would be broken syntax if cut."""
    return text if len(text) <= _OPTION_CHARACTERS else "..."


def _most_open_shards() -> int:
    """Return how many shards may be open; at two descriptors each, they take half of the process's limit."""
    return max(8, open_files_limit() // 4)


def _ends_of_file(path: str, remote: Remote | None) -> tuple[int, str]:
    """Return the size of a file and a hash of its first and last 4 KiB, which distinguishes files of equal size."""
    with storage_of(path, remote).open(path) as file:
        ends = file.read(0, _ENDS_BYTES) + file.read(max(0, file.size - _ENDS_BYTES), _ENDS_BYTES)
        return file.size, hashlib.blake2b(ends, digest_size=8).hexdigest()
