"""Tar archives that an index of wids lists, with the number of samples in each."""

import json
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any

from dataload.errors import CorruptFileError, DataloadError, UnsupportedFormatError
from dataload.sources.shards import KnownShards, OpenShards, ShardReader
from dataload.sources.tar.reader import TarSource
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
from dataload.types import Record

_MOST_BYTES = 64 << 20  # as in a manifest, parsed JSON takes up to twenty times the memory
_MOST_SAMPLES = 1 << 32  # of an archive, so that those of all fit in int64
_VERSION = 1


class WidsSource(TarSource):
    """Samples of the tar archives that an index of wids lists, in the order of the list.

    Archives are opened when they are first read, as the index has their lengths, unless an option may change these:
    ``missing="skip"`` or ``"empty"``, or ``on_damage="stop"``. Fields are those of the first archive with samples.

    Args:
        paths: The JSON file, or several. Archives are named relative to it, or to the ``base`` in it. They are below
            its directory; if it is at a URL, at the same host or bucket.
        fields: See `TarSource`.
        options: See `TarOptions`.

    Raises:
        ConfigError: See `TarSource`.
        CorruptFileError: The index is damaged or names archives elsewhere; or on first use, archives differ from it.
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
    data = read_limited(storage_of(path, remote), path, _MOST_BYTES, "an index")
    try:
        table = json.loads(data)
        if table["wids_version"] != _VERSION or table.get("datasets"):
            raise UnsupportedFormatError(
                f"{path}: expected wids_version {_VERSION} and no list of other data sets: open each of these, and "
                "join them with ConcatSource",
                path=path,
            )
        base = table.get("base") or ""
        shards = [(_resolve(path, base, shard["url"]), shard["nsamples"], path) for shard in table["shardlist"]]
        if not shards or not all(type(count) is int and 0 <= count < _MOST_SAMPLES for _, count, _ in shards):
            raise ValueError("it lists no archive, or one without a number of samples")
    except DataloadError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__} {str(error)[:200]}"
        raise CorruptFileError(f"expected an index of wids, with a shardlist: {problem}", path=path) from error
    return shards


def _resolve(path: str, base: str, name: str) -> str:
    """Return the path or URL of what the index at `path` calls `name`.

    Unlike other names, it may be whole: a path below the directory of the index, or a URL of its host or bucket.
    """
    root = _origin(path) or absolute(parent(path)).rstrip("/")
    if not is_url(path):
        base, name = local_path(base), local_path(name)
    if base and not (name.startswith("/") or is_url(name)):
        named_files(path, [name.removeprefix("./")])  # before it follows the base
        name = f"{base.rstrip('/')}/{name.removeprefix('./')}"
    if is_url(path) and name.startswith("/"):
        name = root + name
    inside = name.removeprefix(f"{root}/")
    return named_files(path, [inside.removeprefix("./")], parent(path) if inside == name else root)[0]


def _origin(path: str) -> str:
    """Return the scheme and the host or bucket of a URL; nothing for a local path."""
    return "/".join(path.split("/")[:3]) if is_url(path) else ""
