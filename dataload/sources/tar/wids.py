"""Tar archives that an index of wids lists, with the number of samples in each."""

import json
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any

import numpy as np

from dataload.errors import ConfigError, CorruptFileError, DataloadError, UnsupportedFormatError
from dataload.sources.shards import KnownShards, OpenShards, ShardReader
from dataload.sources.tar.reader import TarSource
from dataload.storage import Remote, is_url, join, local_path, parent, reading_tables, storage_of
from dataload.types import Record

_MOST_BYTES = 64 << 20  # as in a manifest, parsed JSON takes up to twenty times the memory
_MOST_SAMPLES = 1 << 32  # of an archive, so that those of all fit in int64
_VERSION = 1


class WidsSource(TarSource):
    """Samples of the tar archives that an index of wids lists, in the order of the list.

    Archives are opened when they are first read, as the index has their lengths, unless an option may change these:
    ``missing="skip"`` or ``"empty"``, or ``on_damage="stop"``. Fields are those of the first archive with samples.

    Args:
        paths: The JSON file, or several. Archives are named relative to it, or to the ``base`` in it. One at a URL may
            only name archives of the same host or bucket.
        fields: See `TarSource`.
        options: See `TarOptions`.

    Raises:
        ConfigError: See `TarSource`; or an index at a URL names archives elsewhere.
        CorruptFileError: The index is damaged, or on first use, an archive has another number of samples.
        UnsupportedFormatError: The index is of another version, or refers to other indexes.
    """

    format_name = "wids"

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        fields: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        several = [paths] if isinstance(paths, (str, PathLike)) else paths
        place = Remote.of(options.pop("storage_options", None), options.pop("remote", None))
        shards = [shard for path in several for shard in _read_index(local_path(fspath(path)), place)]
        super().__init__([path for path, _, _ in shards], fields=fields, remote=place, **options)
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
        self.open_on_first_use(KnownShards(counts, fields, listed=False))
        opened = super()._open()
        opened.readers[number] = first
        return opened

    def _open_shard(self, path: str) -> ShardReader[Record]:
        reader = super()._open_shard(path)
        expected, index = self._listed[path]
        if self.options.missing != "skip" and self.options.on_damage == "error" and len(reader) != expected:
            reader.close()
            message = (
                f"the archive has {len(reader)} samples, and {expected} in {index}: it was cut off, or is another one"
            )
            raise CorruptFileError(message, path=path)
        return reader


def _read_index(path: str, remote: Remote | None) -> list[tuple[str, int, str]]:
    """Return the path and the number of samples of each archive, and the path of the index."""
    data = storage_of(path, remote).read_ranges(path, np.zeros(1, np.int64), np.array([_MOST_BYTES + 1]))[0]
    if len(data) > _MOST_BYTES:
        raise CorruptFileError(f"an index has at most {_MOST_BYTES:,} bytes", path=path)
    try:
        table = json.loads(data)
        if table["wids_version"] != _VERSION or table.get("datasets"):
            raise UnsupportedFormatError(
                f"{path}: expected wids_version {_VERSION} and no list of other data sets: open each of these, and "
                "join them with ConcatSource",
                path=path,
            )
        base = _resolve(parent(path), table["base"]) if table.get("base") is not None else parent(path)
        shards = [(_resolve(base, shard["url"]), shard["nsamples"], path) for shard in table["shardlist"]]
        if not shards or not all(type(count) is int and 0 <= count < _MOST_SAMPLES for _, count, _ in shards):
            raise ValueError("it lists no archive, or one without a number of samples")
    except DataloadError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__} {str(error)[:200]}"
        raise CorruptFileError(f"expected an index of wids, with a shardlist: {problem}", path=path) from error
    for shard, _, _ in shards:
        # Data choose neither which other hosts get the user's credentials, nor which local files are read.
        if is_url(path) and _origin(shard) != _origin(path):
            place = _origin(shard).rpartition("@")[2] or "a local path"  # a URL may hold secrets
            raise ConfigError(
                f"{path} names an archive at {place}, not at {_origin(path)}: if you trust it, download the index and "
                "open the copy",
                key="paths",
                value=path,
            )
    return shards


def _resolve(base: str, name: str) -> str:
    """Return the path or URL of what an index calls `name`."""
    if not name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file")
    if is_url(name):
        return local_path(name)
    return f"{_origin(base)}{name}" if is_url(base) and name.startswith("/") else join(base, name)


def _origin(path: str) -> str:
    """Return the scheme and the host or bucket of a URL; nothing for a local path."""
    return "/".join(path.split("/")[:3]) if is_url(path) else ""
