"""Write manifests: of a finished conversion, and of shards that exist already."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, Self, cast

from dataload._util.fingerprint import digest
from dataload._util.machine import usable_cpus
from dataload.convert.journal import FinishedShard
from dataload.convert.plan import pattern_of, select_part
from dataload.convert.receipts import merge_receipts, receipt_path, remove_receipts, save_receipt
from dataload.errors import ConfigError, SourceError
from dataload.sources.base import spec_of
from dataload.sources.files import FileSource
from dataload.sources.find import find_shards, harmless_options, read_manifest, split_format
from dataload.sources.format import Format
from dataload.sources.manifest import MANIFEST_NAME, DataSetEntry, Manifest, ShardEntry
from dataload.sources.manifest_checks import STORED_OPTIONS, ShardIdentity
from dataload.sources.shard_files import LOCK_FILE, shard_bytes
from dataload.storage import Remote, base_name, is_url, join, parent, storage_of
from dataload.storage.errors import file_errors
from dataload.storage.local.parts import remove_leftovers, write_errors
from dataload.storage.local.text import read_text
from dataload.storage.table_cache import node_directory
from dataload.types import FieldSpec

_LOCK_SECONDS = 10
_UNLIMITED = 1 << 60  # bytes to download: that is what indexing is for
_SECONDS_BETWEEN_TRIES = 0.02
_MOST_THREADS = 8  # they mostly hash, at about 1 GB/s each


@dataclass(frozen=True, slots=True)
class IndexReport:
    """The result of indexing.

    Attributes:
        path: The manifest, or the receipt of a part.
        data_sets: The data sets that were written to it.
        resumed: Number of shards that an earlier run, or a merged part, had finished.
    """

    path: str
    data_sets: tuple[DataSetEntry, ...]
    resumed: int


def index_shards(
    path: str,
    *,
    format: str | None = None,  # noqa: A002 - the word that users expect
    options: Mapping[str, Any] | None = None,
    part: tuple[int, int] | None = None,
    merge: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> IndexReport:
    """Write or renew the manifest of the directory of shards; other data sets in it keep their entries.

    An interrupted run continues where it stopped: it keeps a hidden journal beside the manifest or, for shards at URLs,
    in the node's cache. Each of those is downloaded once, and deleted again unless ``remote`` sets a cache.

    Args:
        path: A directory, or a pattern or file in one. A directory without a manifest is a single data set; of one with
            a manifest, each data set is renewed.
        format: Name of the format; by default suffix and content decide.
        options: The reader's options. Those in `STORED_OPTIONS` become part of the manifest; ``storage_options`` and
            ``remote`` do not.
        part: ``(i, n)`` describes only part i, counted from 1, of n: a contiguous range of the shards. It writes a
            receipt, a hidden file beside the shards, instead of the manifest.
        merge: Read no shards, but make the manifest of the receipts of all parts.
        progress: Called with (shards done, shards) at the start and after each shard.

    Raises:
        ConfigError: The shards are in several directories, an option cannot be stored, or a shard belongs to none of
            the directory's data sets. With `merge`: a receipt is missing or of another plan, or a shard has changed.
        SourceError: A shard cannot be read, or another process is indexing the directory.
    """
    if merge and part is not None:
        raise ConfigError("merge describes no shards: pass it without part", key="merge", value=merge)
    given = dict(options or {})
    remote = Remote.of(given.pop("storage_options", None), given.pop("remote", None))
    # Whole shards, at their present versions.
    remote = Remote(remote.store, dataclasses.replace(remote.options, mode="shards", scan=_UNLIMITED))
    directory, planned, gone = _plan(path, format, given, remote)
    if merge:

        def expected(number: int, count: int) -> list[tuple[Any, ...]]:
            return [each.receipt for each in _select(planned, number, count)]

        entries = merge_receipts(directory, expected, remote)
        manifest = update_manifest(directory, entries, gone, remote=remote)
        remove_receipts(directory, remote)
        return IndexReport(manifest, entries, sum(len(entry.names) for entry in entries))
    planned = planned if part is None else _select(planned, *part)
    total = sum(len(each.names) for each in planned)
    journal = _journal_path(directory, remote, part)
    with storage_of(journal).lock(journal):
        known = _Described.load(journal)
        described: list[DataSetEntry] = []
        resumed = done = 0

        def advance(resumes: bool) -> None:
            nonlocal done, resumed
            done += 1
            resumed += resumes
            if progress is not None:
                progress(done, total)

        if progress is not None:
            progress(0, total)
        with _open_journal(journal) as stream:
            for each in planned:
                shards = _describe_all(directory, each, known, stream, advance)
                described.append(each.entry(directory, shards))
        if part is None:
            written = update_manifest(directory, described, gone, remote=remote)
        else:
            written = receipt_path(directory, *part)
            save_receipt(written, described, remote)
        storage_of(journal).remove(journal)
    return IndexReport(written, tuple(described), resumed)


def update_manifest(
    directory: str, entries: Iterable[DataSetEntry], gone: Iterable[str] = (), *, remote: Remote | None = None
) -> str:
    """Put data sets into the manifest of a directory, in one step, and return its path.

    Args:
        directory: Where the shards are.
        entries: The data sets.
        gone: Names of shards that exist no longer: data sets that have such ones are taken out.
        remote: The settings of data at URLs.

    Raises:
        CorruptFileError: The present manifest is damaged.
        SourceError: The manifest cannot be written, or other processes have been writing it for too long.
    """
    path = join(directory, MANIFEST_NAME)
    added, missing, storage = tuple(entries), {*gone}, storage_of(path, remote)
    deadline = time.monotonic() + _LOCK_SECONDS
    with locked(path, remote):
        if not is_url(path):
            remove_leftovers(path)  # of a process that was killed when its manifest had just appeared
        while True:
            found = storage.load(path)
            before = None if found is None else Manifest.parse(found[0], path)
            kept = [entry for entry in (before or Manifest()).data_sets if missing.isdisjoint(entry.names)]
            after = Manifest(tuple(kept))
            for entry in added:
                after = after.with_data_set(entry)
            try:
                if after != before:
                    storage.replace(path, after.to_bytes(), None if found is None else found[1])
            except FileExistsError:  # other nodes take no notice of the lock
                if time.monotonic() > deadline:
                    message = f"other processes have been writing {path} for {_LOCK_SECONDS} seconds: try again"
                    raise SourceError(message, path=path) from None
            else:
                return path


def etag_of(entry: Format, shard: FinishedShard) -> str | None:
    """Return the ETag for the manifest; None for a shard that is a directory, which has none."""
    return shard.etag if entry.directory_file is None else None


def fields_of(entry: Format, paths: Iterable[str], options: Mapping[str, Any]) -> Mapping[str, FieldSpec]:
    """Return the fields of the first shard that has records; none if records are bytes."""
    for path in paths:
        with entry.open([path], options=_without_cache(entry, options)) as source:
            if len(source):
                if source.fields:
                    return source.fields
                record = source[0]
                known = cast("Mapping[str, Any]", record if isinstance(record, Mapping) else {})
                return {name: spec_of(value) for name, value in known.items()}
    return {}


def identities_of(entry: Format, paths: Sequence[str], options: Mapping[str, Any]) -> list[ShardIdentity | None]:
    """Return what the fingerprint of a data set needs to know of the content of these shards."""
    with entry.open(paths, options=_without_cache(entry, options)) as source:
        return [*source.shard_identities()] if isinstance(source, FileSource) else [None] * len(paths)


@contextmanager
def locked(path: str, remote: Remote | None) -> Generator[None]:
    """Hold the lock of a manifest, which others hold only for moments."""
    deadline = time.monotonic() + _LOCK_SECONDS
    with ExitStack() as entered:
        while True:
            try:
                entered.enter_context(storage_of(path, remote).lock(path))
                break
            except SourceError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_SECONDS_BETWEEN_TRIES)
        yield


@dataclass(frozen=True, slots=True)
class _Planned:
    """A data set to describe; `names` are in index order."""

    pattern: str
    format: Format
    names: tuple[str, ...]
    options: Mapping[str, Any]
    remote: Remote

    @property
    def stored(self) -> dict[str, Any]:
        harmless = harmless_options(self.format)
        return {name: value for name, value in self.options.items() if name not in harmless}

    @property
    def key(self) -> str:
        """Text for the format and the options that decide the number of records."""
        return f"{self.format.name} {sorted(self.stored.items())!r}"

    @property
    def receipt(self) -> tuple[Any, ...]:
        """What tells whether a receipt is of these shards; see `merge_receipts`."""
        return self.pattern, self.format.name, self.stored, self.names

    def options_for(self, path: str) -> dict[str, Any]:
        """Return the reader's options for a shard or its directory."""
        return {**self.options, **({"remote": self.remote} if is_url(path) else {})}

    def entry(self, directory: str, shards: Sequence[ShardEntry]) -> DataSetEntry:
        filled = (join(directory, shard.name) for shard in shards if shard.records)
        fields = fields_of(self.format, filled, self.options_for(directory))
        return DataSetEntry.of(self.pattern, self.format.name, shards, fields=fields, options=self.stored)


def _select(planned: Sequence[_Planned], number: int, count: int) -> list[_Planned]:
    """Return what part `number` of `count` describes of these data sets."""
    names = select_part([(each, name) for each in planned for name in each.names], number, count)
    selected = [(each, tuple(name for owner, name in names if owner is each)) for each in planned]
    return [dataclasses.replace(each, names=own) for each, own in selected if own]


def _journal_path(directory: str, remote: Remote, part: tuple[int, int] | None) -> str:
    if not is_url(directory):
        which = "" if part is None else f".{part[0]}-{part[1]}"
        return join(directory, f".{MANIFEST_NAME}.index{which}")
    node = node_directory(remote)
    if node is None:
        raise ConfigError("there is no home directory to keep shards in: set remote.cache", key="remote.cache")
    folder = os.path.join(node, "indexing")
    with write_errors(folder):
        os.makedirs(folder, 0o700, exist_ok=True)
    return os.path.join(folder, f"{digest(directory, *(part or ()))}.journal")


def _plan(
    path: str, format_name: str | None, options: dict[str, Any], remote: Remote
) -> tuple[str, list[_Planned], set[str]]:
    """Return the directory, the data sets to describe, and the shards in its manifest that exist no longer."""
    entry, path = split_format(path, format_name)
    path = path.rstrip("/") or "/"
    found = find_shards(path, entry.name if entry is not None else None, manifests=False, remote=remote)
    directories = {parent(file) for file in found.files}
    if len(directories) > 1:
        message = f"a manifest lists the shards of one directory, got shards of {', '.join(sorted(directories))}"
        raise ConfigError(f"{message}: index them one by one", key="paths", value=path)
    directory = directories.pop()
    for file in found.files:
        shard_bytes(file, remote)  # raises for a selection of records, which is no file
    names = tuple(map(base_name, found.files))
    if unstored := [name for name in options if not _can_store(found.format, name, options[name])]:
        message = f"the option {unstored[0]}={options[unstored[0]]!r} cannot be stored in a manifest: pass it to open"
        raise ConfigError(message, key=unstored[0], value=options[unstored[0]])
    is_directory = {*names} != {base_name(path)} and storage_of(path, remote).is_directory(path)
    manifest = read_manifest(directory, remote) if is_directory else None
    listed = manifest.data_sets if manifest is not None else ()
    if len(listed) < 2:
        order = listed[0].names if listed and {*listed[0].names} == {*names} else names
        options = {**(listed[0].options if listed and listed[0].format == found.format.name else {}), **options}
        typed = f"*{os.path.splitext(names[0])[1]}" if is_directory else base_name(path)
        return directory, [_Planned(pattern_of(order, typed), found.format, order, options, remote)], set()
    present = {*names}
    if extra := present.difference(*(entry.names for entry in listed)):
        message = f"{min(extra)} is in none of the {len(listed)} data sets of {directory}: index a pattern that has it"
        raise ConfigError(message, key="paths", value=path)
    planned: list[_Planned] = []
    for entry in listed:
        left = tuple(name for name in entry.names if name in present)
        if left:
            given = {**(entry.options if entry.format == found.format.name else {}), **options}
            planned.append(_Planned(pattern_of(left, entry.pattern), found.format, left, given, remote))
    return directory, planned, {name for entry in listed for name in entry.names}.difference(names)


def _can_store(entry: Format, name: str, value: Any) -> bool:
    return name in harmless_options(entry) or (name in STORED_OPTIONS and STORED_OPTIONS[name](value))


def _without_cache(entry: Format, options: Mapping[str, Any]) -> dict[str, Any]:
    return {**({"cache": False} if "cache" in entry.reader_options.names() else {}), **options}


@dataclass(frozen=True, slots=True)
class _Described:
    """A shard in the journal of an interrupted run."""

    records: int
    shard: FinishedShard

    @classmethod
    def load(cls, path: str) -> dict[tuple[str, str], Self]:
        """Return the finished shards by (name, key); a line that makes no sense is left out."""
        known: dict[tuple[str, str], Self] = {}
        with suppress(OSError, UnicodeDecodeError):
            for line in read_text(path).splitlines():
                with suppress(ValueError, TypeError, RecursionError):  # the last one may have been cut off
                    name, key, records, size, sha256, mtime_ns, etag, identity = found = json.loads(line)
                    if [*map(type, found[:6])] == [str, str, int, int, str, int]:
                        known[name, key] = cls(records, FinishedShard(size, sha256, mtime_ns, etag, identity))
        return known


@contextmanager
def _open_journal(path: str) -> Generator[IO[bytes]]:
    """Open the journal to append to it, but not through a link that somebody placed there."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with write_errors(path), open(os.open(path, flags, 0o644), "ab", buffering=0) as stream:
        stream.write(b"\n")  # ends a line that was cut off
        yield stream


def _describe_all(
    directory: str,
    data_set: _Planned,
    known: Mapping[tuple[str, str], _Described],
    journal: IO[bytes],
    advance: Callable[[bool], None],
) -> list[ShardEntry]:
    """Describe all shards in threads, and note each in the journal."""
    lock = threading.Lock()

    def describe(name: str) -> ShardEntry:
        path = join(directory, name)
        described = known.get((name, data_set.key))
        resumes = described is not None and described.shard.matches(path, data_set.remote)
        if not resumes or described is None:
            described = _describe(data_set, path)
        with lock:
            if not resumes:
                line = [name, data_set.key, described.records, *dataclasses.astuple(described.shard)[:5]]
                journal.write(json.dumps(line).encode() + b"\n")
            advance(resumes)
        found = described.shard
        etag = etag_of(data_set.format, found)
        return ShardEntry(name, described.records, found.bytes, etag, found.sha256, found.identity)

    with ThreadPoolExecutor(min(_MOST_THREADS, usable_cpus())) as pool:
        futures = [pool.submit(describe, name) for name in data_set.names]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _describe(data_set: _Planned, path: str) -> _Described:
    remote = data_set.remote
    if not is_url(path):
        with file_errors(path):
            finished = FinishedShard.of(path)
        return _described(data_set, path, finished)
    storage = storage_of(path, remote)
    files = [join(path, name) for name in storage.list(path)] if storage.is_directory(path) else [path]
    leases = [storage.lease(file) for file in files if base_name(file) != LOCK_FILE]  # reading finds the copies
    finished = FinishedShard.of_files([lease.path for lease in leases]).as_uploaded(path, remote)
    described = _described(data_set, path, finished)
    if remote.options.cache is None:  # nobody has asked to keep them
        for lease in leases:
            storage_of(lease.path).remove(lease.path)
    return described


def _described(data_set: _Planned, path: str, finished: FinishedShard) -> _Described:
    options = _without_cache(data_set.format, data_set.options_for(path))
    with data_set.format.open([path], options=options) as source:
        identity = source.shard_identities()[0] if isinstance(source, FileSource) else None
        return _Described(len(source), dataclasses.replace(finished, identity=identity))
