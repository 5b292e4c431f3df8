"""The index of an MDS data set: the shards and their columns. Pure (no I/O)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dataload.errors import CorruptFileError, DataloadError, UnsupportedFormatError
from dataload.sources.mds.columns import Column, parse_column
from dataload.storage import named_files

MOST_BYTES = 64 << 20
"""Maximum size of an index, of about 100,000 shards: parsed JSON takes up to twenty times the memory."""

_VERSION = 2
_MOST = (1 << 32) - 1  # offsets in a shard have 32 bits


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard: a file of `bytes` bytes beside the index; `columns` are in the order in which a sample holds them.

    `packed` is the same file compressed, None if there is none; `compression` says how, such as ``"zstd"``.
    """

    name: str
    bytes: int
    samples: int
    columns: tuple[Column, ...]
    packed: str | None
    compression: str | None


def parse_index(data: bytes, path: str) -> tuple[ShardInfo, ...]:
    """Return the shards in the order of their samples; `path` is for messages."""
    if len(data) > MOST_BYTES:
        raise CorruptFileError(f"an index has at most {MOST_BYTES:,} bytes", path=path)
    try:
        shards = _expect(list, json.loads(data)["shards"])
        if not shards:
            raise ValueError("it lists no shard")
        return tuple(_parse_shard(shard, path) for shard in shards)
    except DataloadError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__} {str(error)[:200]}"
        message = f"expected the index of an MDS data set, with a list of shards: {problem}"
        raise CorruptFileError(message, path=path) from error


def _parse_shard(shard: Mapping[str, Any], path: str) -> ShardInfo:
    if (shard["format"], shard["version"]) != ("mds", _VERSION):
        raise UnsupportedFormatError(
            f"{path}: a shard is {str(shard['format'])[:40]!r} of version {str(shard['version'])[:40]}; only 'mds' of "
            f"version {_VERSION} is supported",
            path=path,
        )
    names, encodings = shard["column_names"], shard["column_encodings"]
    columns = _columns(tuple(map(_text, names)), tuple(map(_text, encodings)))
    if [column.size for column in columns] != shard["column_sizes"]:
        raise ValueError(f"column_sizes {shard['column_sizes']} contradict column_encodings {encodings}")
    packed = shard["zip_data"]
    names = [each["basename"] for each in (shard["raw_data"], packed) if each is not None]
    named_files(path, names)
    return ShardInfo(
        name=names[0],
        bytes=_count(shard["raw_data"]["bytes"]),
        samples=_count(shard["samples"]),
        columns=columns,
        packed=None if packed is None else names[1],
        compression=None if packed is None else _text(shard["compression"]).partition(":")[0],
    )


@cache
def _columns(names: tuple[str, ...], encodings: tuple[str, ...]) -> tuple[Column, ...]:
    if len({*names}) != len(names):
        raise ValueError("two columns have the same name")
    return tuple(parse_column(name, encoding) for name, encoding in zip(names, encodings, strict=True))


def _expect(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{str(value)[:80]!r} is not {kind.__name__}")
    return value


def _text(value: Any) -> str:
    return _expect(str, value)


def _count(value: Any) -> int:
    if not 0 <= _expect(int, value) <= _MOST:
        raise ValueError(f"{value} is not in [0, {_MOST}]")
    return value
