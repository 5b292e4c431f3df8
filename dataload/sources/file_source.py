"""Sources in files, whose shards are opened lazily in the process that reads them."""

import zlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import repeat
from os import PathLike, fspath
from typing import Any, ClassVar, TypeVar
from weakref import ref

import numpy as np

from dataload._util.caches import PerProcess, is_pickled_for_worker
from dataload._util.fingerprint import digest
from dataload._util.indexing import as_indices
from dataload._util.settings import check_fields
from dataload._util.threads import DaemonThreads
from dataload.catalog.checks import ContentMark
from dataload.catalog.facts import ShardFacts, require_known, with_classes
from dataload.errors import ClosedSourceError, ConfigError, DataloadError
from dataload.sources.base import Source
from dataload.sources.directory import KnownShards, ShardDirectory, directory_of, open_different
from dataload.sources.options import Options, describe_value, short_repr
from dataload.sources.prefetch import read_ahead
from dataload.sources.shards import (
    ListedShards,
    Location,
    OpenShards,
    ShardReader,
    content_mark,
    describe_shard,
    most_open_shards,
    shard_of,
)
from dataload.storage import Remote, base_name, is_url, local_path, reading_tables
from dataload.storage.errors import file_errors, memory_error
from dataload.storage.local.files import check_versions, versions_of
from dataload.storage.remote.traffic import Traffic
from dataload.types import AheadReader, Batch, FieldSpec, Int64Array, StepsAhead

T_co = TypeVar("T_co", covariant=True)


class FileSource(Source[T_co]):
    """A data set in one or more files of one format, each a shard; each process opens them on first use.

    A backend implements `_open_shard`, sets `format_name`, and names the dataclass of its options in `options_type`.
    Without it, the options that affect its records go to ``super().__init__`` by name, which calls `_prepare` last.

    Args:
        paths: Files in index order.
        fields: Names of the fields to read, in that order; None means all.
        options: Options of the format, see `options_type`. Those that affect the records are in repr and fingerprint.

    Attributes:
        options: The options as an instance of `options_type`.
        has_urls: Whether any file is at a URL.
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
        self._remote: Remote | None = getattr(getattr(self, "options", None), "remote_settings", None)
        self._opened: PerProcess[OpenShards[T_co]] = PerProcess()
        self._versions: Int64Array | None = None  # of the files, when this process or its parent opened them
        self._known: ListedShards | None = None
        self._classes: Mapping[str, tuple[str, ...]] = {}
        self._closed = False
        self._described: list[tuple[Any, ...]] | None = None
        self._is_alone = False  # whether the last shard of `look_at` was a single local file
        self._prepare()
        self.has_urls: bool = any(map(is_url, self._paths))

    def _prepare(self) -> None:
        """Check options against each other and the paths, and set what `_open_shard` needs; called once."""

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

    @property
    def remote(self) -> Remote | None:
        """The settings for data at URLs; None if unknown."""
        return self._remote

    def reads_alike(self, options: Mapping[str, Any]) -> bool:
        """Return whether a source with these options would give the same records, apart from `fields`."""
        if self.options_type is not None:
            options = self.options_type.parse(options, f"format {self.format_name!r}").content()
        given, own = ({name: describe_value(each) for name, each in of.items()} for of in (options, self._content))
        return given == own

    def __len__(self) -> int:
        return int(self._data_set().ends[-1])

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The selected fields of the first shard that has records, by default all."""
        known = self._data_set().fields
        if (wanted := self._wanted(known)) is not None:
            known = {name: known[name] for name in wanted if name in known}
        return with_classes(known, self._classes) if self._classes else known

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Number of records per file."""
        return tuple(np.diff(self._data_set().ends, prepend=0).tolist())

    def _locate(self, index: int) -> Location:
        opened = self._data_set()
        shard, record = shard_of(opened.ends, index)
        key = offset = None
        with suppress(Exception), reading_tables():  # the location is often requested because the file is damaged
            key = opened.reader(shard).key(record)
        with suppress(Exception), reading_tables():
            offset = opened.reader(shard).offset(record)
        return Location(self._paths[shard], record, key, offset)

    def _data_set(self) -> OpenShards[T_co]:
        return self._opened.get(self._open)

    def name_classes(self, classes: Mapping[str, tuple[str, ...]]) -> None:
        """Add the names of classes to `fields` that the files do not know."""
        self._classes = classes

    def open_on_first_use(self, known: ListedShards) -> None:
        """Open each shard when it is first read, because its length is known."""
        self._known = known

    def _open(self) -> OpenShards[T_co]:
        if self._closed:
            raise ClosedSourceError(f"{self!r} is closed: open it again to read", path=self._paths[0])
        most_open, directory = most_open_shards(), directory_of(len(self._paths))
        far, opens = self._remote if is_url(self._paths[0]) else None, (ref(self), type(self)._open_known)
        if self._known is not None:
            if self._known.listed and self._versions is None:
                self._versions = versions_of(self._versioned_files()) if (had := self._known.versions) is None else had
            ends, fields = np.cumsum(self._known.lengths, dtype=np.int64), self._known.fields
            if directory is not None and self._versions is not None and len(self._versions) == len(self._paths):
                directory.known = KnownShards(self._paths, self._known.lengths, self._versions, self._known.contents)
            opened = OpenShards(ends, fields, [None] * len(ends), *opens, most_open, far, directory=directory)
            return opened if far is not None or not self._known.listed else self._with_first(opened)
        files, inherited = self._versioned_files(), self._versions
        versions = versions_of(files) if inherited is None else inherited
        with nullcontext() if self._remote is None else self._remote.learning(self._paths):
            found, lengths = self._open_readers(most_open, directory, versions)
        if inherited is not None:
            check_versions(files, inherited)
        self._versions = versions
        readers, fields = zip(*(found.get(shard, found[0]) for shard in range(len(lengths))), strict=True)
        known = self._known_fields(readers, fields)
        if len(found) < len(readers) and directory is not None:  # the others are like the first one
            self._known = ListedShards(lengths, known, listed=False)
            directory.known = KnownShards(self._paths, lengths, versions, None)
        recent, own = OrderedDict.fromkeys(found), [found[n][0] if n in found else None for n in range(len(readers))]
        alike, ends = readers[0] if len(found) < len(readers) else None, np.array(lengths, np.int64).cumsum()
        return OpenShards(ends, known, own, *opens, most_open, far, recent, directory, alike)

    def _with_first(self, opened: OpenShards[T_co]) -> OpenShards[T_co]:
        """Open the first shard with records, so that a wrong option or a missing package is an error at once."""
        reader = opened.reader(int(np.searchsorted(opened.ends, 0, side="right")) % len(opened.ends))
        with reading_tables():
            opened.fields = self._known_fields([reader], [reader.fields])
        return opened

    def _versioned_files(self) -> list[str]:
        """Return the files that must be of the same version in workers; versions of objects are sent with `Remote`."""
        return [self._data_file(path) for path in self._paths if not is_url(path)]

    def _open_reader(self, shard: int) -> ShardReader[T_co]:
        with reading_tables(), file_errors(self._paths[shard]):
            return self._open_shard(self._paths[shard])

    def _open_known(self, shard: int) -> ShardReader[T_co]:
        """Open a shard of known length, and compare it with the known facts."""
        assert self._known is not None, "only then are shards opened one by one"
        path, data_file = self._paths[shard], self._data_file(self._paths[shard])
        if self._versions is not None and not is_url(path):
            check_versions([data_file], self._versions[shard : shard + 1])
        with reading_tables(whole=True):  # the table and both ends
            reader = self._open_reader(shard)
            try:
                self._known.check(shard, path, len(reader), data_file, reader)
                if self._versions is not None and not self._known.listed and not is_url(path):
                    check_versions([data_file], self._versions[shard : shard + 1])
                if self._selected:
                    self._check_fields(reader.fields, path)
            except BaseException:
                reader.close()
                raise
        return reader

    def compare(self, known: ListedShards) -> None:
        """Compare the lengths of all shards, and the ends of files that are here, with `known` ones."""
        for shard, (path, records) in enumerate(zip(self._paths, self.shard_lengths, strict=True)):
            known.check(shard, path, records, self._data_file(path), self._data_set().readers[shard])

    def _open_readers(
        self, most_open: int, directory: ShardDirectory | None, versions: Int64Array
    ) -> tuple[dict[int, tuple[ShardReader[T_co], Mapping[str, FieldSpec]]], tuple[int, ...]]:
        """Return what `open_different` does of readers and fields; add the shards to the directory."""

        def opened(shard: int) -> tuple[ShardReader[T_co], Mapping[str, FieldSpec]]:
            reader = self._open_reader(shard)
            with reading_tables():
                fields = reader.fields  # may read a record
            if directory is not None:
                directory.add(shard, reader)
            if shard >= most_open:
                reader.release()
            return reader, fields

        return open_different(opened, self._paths, versions, directory, self._opening_threads)

    @property
    def _opening_threads(self) -> int:
        return 4 if self._remote is None else self._remote.options.connections

    def _readers(self) -> list[ShardReader[T_co]]:
        """Return the readers of all shards, which are opened if needed."""
        return self._data_set().open_all(range(len(self._paths)), self._opening_threads)

    def _known_fields(
        self, readers: Sequence[ShardReader[T_co]], fields: Sequence[Mapping[str, FieldSpec]]
    ) -> Mapping[str, FieldSpec]:
        """Return the fields of the data set, given each shard's, and check that each shard has the selected ones."""
        # An empty file may not know the fields that its records would have.
        filled = [shard for shard, reader in enumerate(readers) if len(reader)]
        for shard in filled:
            self._check_fields(fields[shard], self._paths[shard])
        return fields[filled[0] if filled else 0]

    def _wanted(self, known: Mapping[str, FieldSpec]) -> tuple[str, ...] | None:  # noqa: ARG002 - for those that add fields
        """Return the selected fields, with those that come with them; None means all of the `known` ones."""
        return self._selected

    def _check_fields(self, known: Mapping[str, FieldSpec], path: str) -> None:
        require_known((self._selected or ()) if known else (), known, path)

    def _read(self, indices: Int64Array) -> list[T_co]:
        try:
            opened = self._data_set()
            return opened.records(indices, self._wanted(opened.fields))
        except MemoryError as error:
            raise memory_error(self, self._paths[0], len(indices)) from error

    def read_batch(self, indices: Any, fields: Sequence[str] | None = None) -> Batch:
        """See `Source.read_batch`; here as well, so that a batch's way to its bytes leads through one file less."""
        rows, names = as_indices(indices, len(self)), check_fields(fields)
        try:
            return self._read_columns(rows, names) if rows.size else {}
        except MemoryError as error:
            raise memory_error(self, self._paths[0], len(rows)) from error

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        opened = self._data_set()
        chosen = self._choose(fields, opened)
        if len(opened.ends) == 1:
            return opened.reader(0).read_batch(indices, chosen)
        return opened.columns(indices, chosen)

    def _choose(self, fields: tuple[str, ...] | None, opened: OpenShards[T_co]) -> tuple[str, ...] | None:
        wanted = self._wanted(opened.fields)
        if fields is None:
            return wanted
        known = opened.fields if wanted is None else dict.fromkeys(wanted)
        require_known(fields if known else (), known, self)
        return fields

    def read_ahead(
        self, steps: Iterator[StepsAhead], fields: Sequence[str] | None, *, here: bool, share: float = 1.0
    ) -> AheadReader | None:
        """See `dataload.types.ReadsAhead`: files at URLs are fetched before they are read."""
        if self._remote is None or not self.has_urls:
            return None
        opened = self._data_set()
        files, chosen = [*map(self._data_file, self._paths)], self._choose(check_fields(fields), opened)
        return read_ahead(files, opened, self._remote, steps, chosen, here=here, share=share)

    def _traffics(self) -> Sequence[Traffic]:
        return () if self._remote is None or not self.has_urls else (self._remote.traffic,)

    def _files(self) -> Sequence[tuple[str, Remote | None]]:
        return [(self._data_file(path), self._remote) for path in self._paths]

    def _add_mapped(self, paths: list[str], versions: dict[int, Int64Array]) -> None:
        is_mapped = getattr(getattr(self, "options", None), "map", False)
        if is_mapped and self._versions is not None and id(self) not in versions:
            paths += self._versioned_files()
            versions[id(self)] = self._versions

    def fingerprint(self) -> str:
        """See `Source.fingerprint`: a hash of names, sizes, counts, file ends and `ShardReader.identity`."""
        return digest(*self.described())

    def described(self) -> tuple[str, list[tuple[Any, ...]], Any, Any]:
        """Return what the fingerprint is a hash of: of shards, names first."""
        if self._described is None:
            columns = zip(map(base_name, self._paths), self.shard_identities(), self.shard_lengths, strict=True)
            self._described = [(name, size, ends, count, inner) for name, (size, ends, inner), count in columns]
        options = {name: describe_value(value) for name, value in self._content.items()}
        return self.format_name, self._described, self._selected, sorted(options.items())

    def shard_identities(self) -> Sequence[ContentMark]:
        """Return what the fingerprint says of the content of each shard; a manifest may know it."""
        shards = range(len(self._paths))
        if self._known is not None and self._known.contents is not None:
            return [mark or self._mark_of(shard) for shard, mark in enumerate(self._known.contents)]
        if self._remote is None or not self.has_urls:
            alike, versions = self._data_set().alike, self._versions
            likes = repeat(None) if alike is None or versions is None else alike.like(self._paths, versions)
            return [*map(self._mark_of, shards, likes)]
        with DaemonThreads(self._opening_threads) as pool:  # requests take most of the time
            return [*pool.map(self._mark_of, shards)]

    def look_at(self, path: str) -> ShardFacts:
        """Return the facts about any shard: the SHA-256 only of a single local file, and no size of objects."""
        alone, data_file = self._is_alone, self._data_file(path)
        facts, self._is_alone = describe_shard(path, data_file, self._open_shard, self._remote, is_alone=alone)
        return facts

    def _mark_of(self, shard: int, like: ShardReader[T_co] | None = None) -> ContentMark:
        opened, file = self._data_set(), self._data_file(self._paths[shard])
        if like is None or opened.readers[shard] is not None or self._versions is None:
            return content_mark(file, opened.reader(shard), self._remote)
        check_versions([file], self._versions[shard : shard + 1])
        return content_mark(file, like, self._remote)

    def close(self) -> None:
        """Release files; reading afterwards raises `ClosedSourceError`. May be called twice."""
        self._closed = True
        if (opened := self._opened.drop()) is not None:
            opened.close()
        if self._remote is not None:
            self._remote.release()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_described"}
        if self._known is not None and not self.has_urls:
            # What is known of local files holds here and now. Workers compare versions.
            state["_known"] = replace(self._known, contents=None, versions=None)
        if not is_pickled_for_worker():
            del state["_versions"]  # another machine has other files, and so may this one tomorrow
            return state if self._known is None or self._known.listed else state | {"_known": None}
        if self._known is None and self._has_versions():  # so that a worker opens shards when it reads them
            with suppress(DataloadError):  # raised again where it is read
                state["_known"] = ListedShards(self.shard_lengths, self._data_set().fields, listed=False)
        state["_paths"] = zlib.compress("\0".join(self._paths).encode("utf-8", "surrogatepass"))
        return state

    def _has_versions(self) -> bool:
        """Return whether each shard that a worker opens is compared with the version that this process opened."""
        if all(map(is_url, self._paths)):
            return self._remote is not None
        return self._versions is not None and len(self._versions) == len(self._paths)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._versions = self._known = self._described = None
        # A copy in this process has its own files, too.
        vars(self).update((name, PerProcess() if isinstance(it, PerProcess) else it) for name, it in state.items())
        if isinstance(packed := state["_paths"], bytes):
            self._paths = tuple(zlib.decompress(packed).decode("utf-8", "surrogatepass").split("\0"))

    def __repr__(self) -> str:
        parts = [repr(self._paths[0] if len(self._paths[0]) < 80 else f"...{self._paths[0][-77:]}")]
        if len(self._paths) > 1:
            parts.append(f"{len(self._paths)} shards")
        if self._selected is not None:
            parts.append(f"{len(self._selected)} fields")
        return short_repr(type(self).__name__, parts, self._content)
