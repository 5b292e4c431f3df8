"""Tar archives, and lists of them as wids writes them, as sources."""

import json
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any, ClassVar, Literal, cast

from dataload._util.settings import check_fields
from dataload.codecs.decoders import plan_decoders
from dataload.errors import ConfigError, CorruptFileError, DataloadError, UnsupportedFormatError, closest
from dataload.sources.file_source import FileSource
from dataload.sources.shards import ListedShards, OpenShards, ShardReader
from dataload.sources.tar import TarOptions
from dataload.sources.tar.samples import TarSettings
from dataload.sources.tar.shard import TarReader
from dataload.storage import (
    Remote,
    absolute,
    is_url,
    local_path,
    named_files,
    parent,
    read_limited,
    reading_tables,
    storage_of,
)
from dataload.types import FieldSpec, Record


class TarSource(FileSource[Record]):
    """Samples of tar archives.

    A sample is a run of adjacent files whose paths are the same up to the first dot of the base name. Its record has
    that path as ``"__key__"``, and the content of each file under the rest of its name: ``"jpg"``, ``"left.png"``. If
    a sample has several files of one name, the first is read, as in DALI; `dataload index` reports them. Directories,
    links and hidden files are ignored.

    With `fields`, ``"__key__"`` is read only if it is listed. Options: `TarOptions`.
    """

    format_name = "tar"
    options_type: ClassVar[Any] = TarOptions

    def _prepare(self) -> None:
        self._index: dict[str, str] | Literal[False] | None = pair_indexes(self._paths, self.options.index)
        decode, case_sensitive = self.options.decode, self.options.case_sensitive
        if not case_sensitive and self._selected is not None:
            self._selected = check_fields([name.lower() for name in self._selected])
        decoders = plan_decoders(decode, case_sensitive=case_sensitive)
        self._settings = TarSettings(self.options, decoders)

    def _open_shard(self, path: str) -> ShardReader[Record]:
        index = self._index[path] if isinstance(self._index, dict) else self._index
        return TarReader(path, index, self._settings, self._selected)

    def oddity(self) -> str | None:
        """Return what WebDataset would read differently, or refuse, and in which archive; None without a difference."""
        readers = zip(self._paths, cast("list[TarReader]", self._readers()), strict=True)
        found = ((path, reader.oddity()) for path, reader in readers)
        return next((f"{path}: {oddity}" for path, oddity in found if oddity), None)

    def _known_fields(
        self, readers: Sequence[ShardReader[Record]], fields: Sequence[Mapping[str, FieldSpec]]
    ) -> Mapping[str, FieldSpec]:
        if self.options.missing == "error":
            super()._known_fields(readers, fields)
        # Archives may differ in their fields, for example if each has one class.
        known: dict[str, FieldSpec] = {}
        for specs in fields:
            for name, spec in specs.items():
                known.setdefault(name, spec)
        # A table for several data sets may name extensions that this one does not have.
        ends = {end for name in known for end in (name, name.rpartition(".")[2])}
        if known and self._settings.decoders and not ends & self._settings.decoders.keys():
            name = next(iter(self._settings.decoders))
            message = f"decode names the extension {name!r}, which no file in {self!r} has: {closest(name, known)}"
            raise ConfigError(message, key=f"decode.{name}", value=self.options.decode)
        self._check_fields(known, repr(self))
        return known


def pair_indexes(paths: tuple[str, ...], index: Any, key: str = "index") -> dict[str, str] | Literal[False] | None:
    """Return the index file of each archive, or `index` itself if it is None or False; an error's key is `key`."""
    if index is None or index is False:
        return index
    if index is True:
        raise ConfigError(f"{key} is True: pass the paths of the index files, None or False", key=key, value=index)
    several = [index] if isinstance(index, (str, PathLike)) else list(index)
    if len(several) != len(paths):
        message = f"{key} names {len(several)} files for {len(paths)} archives: pass one for each, in the same order"
        raise ConfigError(message, key=key, value=index)
    pairs: dict[str, str] = {}
    for path, name in zip(paths, map(fspath, several), strict=True):
        if pairs.setdefault(path, name) != name:
            raise ConfigError(f"{path} is in paths twice, with two indexes: {pairs[path]}, {name}", key=key)
    return pairs


_MOST_BYTES = 64 << 20  # as in a manifest, parsed JSON takes up to twenty times the memory
_MOST_SAMPLES = 1 << 32  # of an archive, so that their sum fits in int64
_VERSION = 1


class WidsSource(TarSource):
    """Samples of the tar archives that an index of wids lists, in the order of the list.

    Archives are opened when they are first read, as the index has their lengths, unless an option may change these:
    ``missing="skip"`` or ``"empty"``, or ``on_damage="stop"``. The first archive with samples determines the fields.

    `paths` are JSON files. Archives are named relative to them, or to the ``base`` in them, and are below their
    directory; at a URL, at the same host or bucket. Options: `TarOptions`.
    """

    format_name = "wids"

    def _prepare(self) -> None:
        shards = [shard for path in self._paths for shard in _read_index(path, self._remote)]
        self._paths = tuple(path for path, _, _ in shards)
        super()._prepare()
        self._listed = {path: (count, index) for path, count, index in shards}

    def _open(self) -> OpenShards[Record]:
        changes_length = self.options.missing != "error" or self.options.on_damage != "error"
        if self._known is not None or self._closed or changes_length:
            return super()._open()
        counts = tuple(self._listed[path][0] for path in self._paths)
        number = next((shard for shard, count in enumerate(counts) if count), 0)
        first = self._open_reader(number)
        with reading_tables():
            fields = self._known_fields([first], [first.fields])
        self.open_on_first_use(ListedShards(counts, fields, listed=False))
        opened = super()._open()
        opened.readers[number] = first
        return opened

    def _open_shard(self, path: str) -> ShardReader[Record]:
        reader = super()._open_shard(path)
        expected, index = self._listed[path]
        if self.options.missing != "skip" and self.options.on_damage == "error" and len(reader) != expected:
            reader.close()
            message = f"the archive has {len(reader)} samples, and {expected} in {index}: it was cut off or replaced"
            raise CorruptFileError(message, path=path)
        return reader


def _read_index(path: str, remote: Remote | None) -> list[tuple[str, int, str]]:
    """Return the path and the number of samples of each archive, and the path of the index."""
    data = read_limited(storage_of(path, remote), path, _MOST_BYTES, "an index")
    try:
        table = json.loads(data)
        if table["wids_version"] != _VERSION or table.get("datasets"):
            message = f"{path}: expected wids_version {_VERSION} and no list of other data sets"
            raise UnsupportedFormatError(f"{message}: open each of these, and join them with ConcatSource", path=path)
        base = table.get("base") or ""
        shards = [(_resolve(path, base, shard["url"]), shard["nsamples"], path) for shard in table["shardlist"]]
        if not shards or not all(type(count) is int and 0 <= count < _MOST_SAMPLES for _, count, _ in shards):
            raise ValueError("it lists no archive, or one without a number of samples")
    except (CorruptFileError, UnsupportedFormatError):
        raise
    except (DataloadError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__} {str(error)[:200]}"
        raise CorruptFileError(f"expected an index of wids, with a shardlist: {problem}", path=path) from error
    return shards


def _resolve(path: str, base: str, name: str) -> str:
    """Return the path or URL, also a whole one, of what the index at `path` calls `name`."""
    root = "/".join(path.split("/")[:3]) if is_url(path) else absolute(parent(path)).rstrip("/")  # of a URL, the host
    if not is_url(path):
        base, name = local_path(base), local_path(name)
    if base and not (name.startswith("/") or is_url(name)):
        named_files(path, [name.removeprefix("./")])  # before it follows the base
        name = f"{base.rstrip('/')}/{name.removeprefix('./')}"
    if is_url(path) and name.startswith("/"):
        name = root + name
    inside = name.removeprefix(f"{root}/")
    return named_files(path, [inside.removeprefix("./")], parent(path) if inside == name else root)[0]
