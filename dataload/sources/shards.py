"""Shards of a data set: how a format reads one, and all of them as opened by one process."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, Generic, NamedTuple, Self, TypeVar
from weakref import ref

import numpy as np

from dataload._util.indexing import split_by_shard
from dataload._util.system import open_files_limit
from dataload._util.threads import DaemonThreads
from dataload.catalog.checks import ContentMark
from dataload.catalog.evidence import ends_of, ends_of_file, look_locally, read_marks
from dataload.catalog.facts import Evidence, ShardFacts, is_same_content, spec_of
from dataload.catalog.manifest import MANIFEST_NAME, renewal
from dataload.collate import default_collate, scatter_columns
from dataload.errors import ChangedFileError, ConfigError, CorruptFileError, SourceError
from dataload.sources.directory import ShardDirectory
from dataload.storage import RecordFile, Remote, base_name, is_url, join, parent, reading_tables
from dataload.storage.errors import file_errors, rewritten_error
from dataload.storage.local.record_files import MappedFile, ReopenedFile
from dataload.types import Batch, FieldSpec, Int64Array


class Location(NamedTuple):
    """Location of a record, for messages and reports."""

    shard: str | None  # path or name; None for the only shard of a source without files
    record: int  # index within the shard
    key: str | None  # in the format; None without keys, or if this one cannot be read
    offset: int | None = None  # first byte in the file that is read for the record; None if the format does not tell it

    def __str__(self) -> str:
        parts = [self.shard, f"record {self.record}", None if self.key is None else f"key {self.key!r}"]
        return ", ".join(part for part in parts if part is not None)


def locate(source: Any, index: int) -> Location:
    """Return the location of a record in any source, including one without `locate` or with one that fails."""
    find: Any = getattr(source, "locate", None)
    if callable(find):
        with contextlib.suppress(Exception):  # an error here must not hide the one being reported
            found = find(index)
            if isinstance(found, Location):
                return found
    return Location(None, index, None)


def shard_of(ends: Int64Array, index: int) -> tuple[int, int]:
    """Return the shard of an index and the index within it; `ends`, (shards,) int64, are cumulative record counts."""
    shard = int(np.searchsorted(ends, index, side="right"))
    return shard, index - (int(ends[shard - 1]) if shard else 0)


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


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
        records = self.read(indices, fields)
        if len(records) != len(indices):
            raise SourceError(f"{type(self).__name__}.read returned {len(records)} records for {len(indices)} indices")
        return default_collate(records)

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

    def offset(self, index: int) -> int | None:
        """Return where in the file a record begins, without reading it; None if that is unknown."""
        found = None if self.whole else self.ranges(np.array([index]), None)
        return int(found[0].min()) if found is not None and len(found[0]) else None

    def identity(self) -> Any:
        """Return what else identifies the content besides the size and the ends of the file; its repr is hashed."""
        return None

    def shared(self) -> tuple[RecordFile | None, Any] | None:
        """Return the file, and what shards have in common that are read together; None if this one is read alone.

        A reader of many shards copies from the maps of files, unless it is None instead of the file.

        What a reader of many shards refuses, the readers of the shards read again, which know the record's location.
        """
        return None

    def layout_ranges(self) -> Sequence[tuple[int, int]] | None:
        """Return offsets and lengths of the bytes that say where values are; None if others matter to this reader.

        Of files with the same bytes there, and of the same size, the readers differ in nothing but the file. If there
        are none, `like` compares the files.
        """
        return None

    def like(self, paths: Sequence[str], versions: Int64Array) -> Iterable[Self | None]:  # noqa: ARG002 - for formats that compare
        """Yield readers of other local files of known versions, see `versions_of`; None where one must be opened."""
        return repeat(self, len(paths))

    def joined(self, directory: ShardDirectory) -> Self:
        """Return a reader of many shards like this one, so far of none; its indices are places."""
        raise NotImplementedError

    def join(self, joined: Any, shard: int) -> None:
        """Add the tables of this shard to a reader of many shards."""
        raise NotImplementedError

    def release(self) -> None:
        """Release descriptors and maps but keep the table; the next read opens the file again."""

    def close(self) -> None:
        """Release the file for good."""
        self.release()


def open_file_of(reader: "ShardReader[Any] | None", data_file: str) -> MappedFile | None:
    """Return the file of a reader if it is this one, on this machine and mapped as it is."""
    file = getattr(reader, "_file", None)
    return file if isinstance(file, MappedFile) and file.is_plain and file.path == data_file else None


def content_mark(data_file: str, reader: "ShardReader[Any]", remote: Remote | None) -> ContentMark:
    """Return what a fingerprint says of the content of a shard."""
    file = open_file_of(reader, data_file)
    size, ends = ends_of_file(data_file, remote) if file is None else ends_of(file)
    with reading_tables():
        return ContentMark(size, ends, reader.identity())


def describe_shard(
    path: str, data_file: str, open_shard: Callable[[str], ShardReader[Any]], remote: Remote | None, *, is_alone: bool
) -> tuple[ShardFacts, bool]:
    """Return the facts about a shard, and whether it is a single local file, which `is_alone` expects."""
    # A look before the shard is opened, so that a later change shows; an open file tells its version itself.
    found = None if is_alone else look_locally(path)
    with reading_tables(whole=True), file_errors(path), contextlib.closing(open_shard(path)) as reader:
        if data_file == path and (file := open_file_of(reader, path)) is not None:
            size, ends, sha256 = read_marks(file)
            content, evidence = ContentMark(size, ends, reader.identity()), Evidence(file.identity.changed)
            return ShardFacts(base_name(path), size, len(reader), sha256, content, evidence), True
        records, content = len(reader), content_mark(data_file, reader, remote)
    if found is None:
        return describe_shard(path, data_file, open_shard, remote, is_alone=False)
    return ShardFacts(base_name(path), found.bytes, records, None, content, found.evidence), False


@dataclass(frozen=True, slots=True)
class ListedShards:
    """Facts about shards that are not open yet: from a manifest (`listed`), or from the process that sent the source.

    `lengths` are numbers of records; `contents` see `FileSource.shard_identities`. `versions` are of local files, as
    `versions_of` returns them. Either is None if it is unknown of a shard.
    """

    lengths: tuple[int, ...]
    fields: Mapping[str, FieldSpec]
    listed: bool
    contents: Sequence[ContentMark | None] | None = None
    versions: Int64Array | None = field(default=None, compare=False)

    def check(
        self, shard: int, path: str, records: int, data_file: str = "", reader: ShardReader[Any] | None = None
    ) -> None:
        """Compare the number of records, and the content of a local file or of the copy of a folder's object."""
        if records != self.lengths[shard]:
            if not self.listed:
                raise rewritten_error(path)
            raise _stale_error(path, f"{records:,} records, and {self.lengths[shard]:,} in the manifest")
        mark = None if self.contents is None or not data_file else self.contents[shard]
        if mark is None:
            return
        if reader is None or not is_url(data_file):
            file = open_file_of(reader, data_file)
            same = (ends_of_file(data_file, None) if file is None else ends_of(file)) == mark[:2]
        else:  # of a folder, the manifest has no ETag
            copy: Any = getattr(reader, "_file", None) if data_file != path else None
            is_whole = isinstance(copy, ReopenedFile) and copy.path == data_file
            same = not is_whole or is_same_content(ContentMark(*ends_of(copy), reader.identity()), mark)
        if not same:
            raise _stale_error(path, "another content than in the manifest")


def _stale_error(path: str, found: str) -> CorruptFileError:
    problem = f"{base_name(path)} has {found}: {renewal(parent(path))}"
    return CorruptFileError(problem, path=join(parent(path), MANIFEST_NAME))


@dataclass(slots=True)
class OpenShards(Generic[T_co]):
    """The shards of a data set as opened by one process; `ends`, (shards,) int64, is the cumulative number of records.

    `readers` are None until their first use. All keep their tables; at most `most_open` keep their files open,
    which `recent` lists, the most recently used last, if there are more. `source` is weak, because it refers to this;
    `open` returns its reader of a shard. `remote` is None unless shards are read at once, because each read is a
    request. `directory` is None if shards are not mapped. The method `like` of `alike` returns those not in `readers`.
    """

    ends: Int64Array
    fields: Mapping[str, FieldSpec]
    readers: list[ShardReader[T_co] | None]
    source: ref[Any]
    open: Callable[[Any, int], ShardReader[T_co]]
    most_open: int
    remote: Remote | None
    recent: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])
    directory: ShardDirectory | None = None
    alike: ShardReader[T_co] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    opening: dict[int, threading.Lock] = field(default_factory=dict[int, threading.Lock])
    evicts: bool = field(init=False)  # whether more shards are read than may be open

    def __post_init__(self) -> None:
        self.evicts = len(self.readers) > self.most_open
        if self.directory is not None:
            self.directory.place(self.ends)

    def read(self, indices: Int64Array, read: Callable[[ShardReader[T_co], Int64Array], T]) -> Iterator[tuple[Any, T]]:
        """Yield the results of `read` for shards read together, then for each other one, with rows; None for all."""
        rest = None  # the rows that are still to be read; None for all
        if self.directory is not None:
            for rows, reader, places in self.directory.split(indices, self.reader):
                try:
                    found = read(reader, places)
                except (ChangedFileError, MemoryError):
                    raise
                except Exception:  # raised again, with its location, where shards are read one by one
                    continue
                yield rows, found
                if rows is None:
                    return
                rest = np.setdiff1d(np.arange(len(indices)) if rest is None else rest, rows, assume_unique=True)
        if rest is None:
            yield from self._read_alone(indices, read)
        elif len(rest):
            yield from ((rest[rows], found) for rows, found in self._read_alone(indices[rest], read))

    def records(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[T_co]:
        """Return records in the requested order; see `ShardReader.read`."""
        if len(self.ends) == 1:
            return self.reader(0).read(indices, fields)
        return self.gathered(indices, lambda reader, local: reader.read(local, fields))

    def gathered(self, indices: Int64Array, read: Callable[[ShardReader[T_co], Int64Array], list[Any]]) -> list[Any]:
        """Return what `read` makes of records of a shard, in the requested order."""
        records: list[Any] = [None] * len(indices)
        for rows, found in self.read(indices, read):
            if rows is None:
                return found
            for row, record in zip(rows.tolist(), found, strict=True):
                records[row] = record
        return records

    def columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        """Return columns of records in the requested order."""
        pieces = self.read(indices, lambda reader, local: reader.read_batch(local, fields))
        try:
            first = next(pieces)
            return first[1] if first[0] is None else scatter_columns(chain((first,), pieces), len(indices))
        except ConfigError:  # numbers of JSON, say, are all integers in one shard, and floats in another
            return default_collate(self.records(indices, fields))

    def _read_alone(
        self, indices: Int64Array, read: Callable[[ShardReader[T_co], Int64Array], T]
    ) -> Iterator[tuple[Any, T]]:
        """Yield, for each shard in the request, the rows that it serves and the result of `read`."""
        parts = list(split_by_shard(self.ends, indices))
        remote = self.remote
        threads = 1 if remote is None or remote.reads_ahead else min(remote.options.connections, len(parts))
        if threads <= 1:
            for shard, local, rows in parts:
                yield rows, self._read_part(shard, local, read)
            return
        with DaemonThreads(threads) as pool:
            shards, locals_, rows = zip(*parts, strict=True)
            yield from zip(rows, pool.map(self._read_part, shards, locals_, repeat(read)), strict=True)

    def _read_part(self, shard: int, indices: Int64Array, read: Callable[[ShardReader[T_co], Int64Array], T]) -> T:
        try:
            return read(self.reader(shard), indices)
        finally:
            self._release_if_evicted(shard)

    def _release_if_evicted(self, shard: int) -> None:
        """Close a shard that other threads evicted before a read opened it again."""
        if self.evicts:
            with self.lock:
                if shard not in self.recent:
                    self._release(shard)

    def _release(self, shard: int) -> None:
        reader = self.readers[shard]
        if reader is not None:
            reader.release()

    def reader(self, shard: int) -> ShardReader[T_co]:
        """Return the reader of a shard, and close the least recently used one if too many are open."""
        reader = self.readers[shard]
        if reader is None:
            reader = self._open(shard)
        if self.evicts:
            with self.lock:
                self.recent[shard] = None
                self.recent.move_to_end(shard)
                while len(self.recent) > self.most_open:
                    self._release(self.recent.popitem(last=False)[0])
        return reader

    def open_all(self, shards: Iterable[int], threads: int) -> list[ShardReader[T_co]]:
        """Return the readers of several shards; shards that are not open yet are opened in threads."""
        found = list(shards)
        if all(self.readers[shard] is not None for shard in found):
            return [reader for shard in found if (reader := self.readers[shard]) is not None]
        with DaemonThreads(min(threads, len(found))) as pool:
            return list(pool.map(self._open_and_release, found))

    def _open_and_release(self, shard: int) -> ShardReader[T_co]:
        reader = self._open(shard)
        self._release_if_evicted(shard)
        return reader

    def _open(self, shard: int) -> ShardReader[T_co]:
        with self.lock:
            lock = self.opening.setdefault(shard, threading.Lock())
        with lock:
            reader = self.readers[shard]
            if reader is None:
                source = self.source()
                assert source is not None, "a source is alive while it is read"
                reader = self.readers[shard] = self.open(source, shard)
                self.opening.pop(shard, None)
            return reader

    def close(self) -> None:
        for reader in self.readers:
            if reader is not None:
                reader.close()


def most_open_shards() -> int:
    """Return how many shards may be open; at two descriptors each, they take half of the process's limit."""
    return max(8, open_files_limit() // 4)
