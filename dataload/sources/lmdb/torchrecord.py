"""Source of TorchRecord directories: LMDB sub-databases db0, db1, ... with TensorProtos under the numbers from 0."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from dataload._util.arrays import split_records
from dataload._util.clock import decoding
from dataload.catalog.arrays import require
from dataload.catalog.facts import select_fields
from dataload.codecs.codec import decode_batch, resolve_codec
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.encoded import decoded, located
from dataload.sources.lmdb import TorchRecordOptions
from dataload.sources.lmdb.file import FileInfo, Tree
from dataload.sources.lmdb.reader import LMDBFileSource, LMDBShard, Values, open_table
from dataload.sources.lmdb.tree import Nodes, read_key, read_tree, subdatabases
from dataload.sources.shards import shard_of
from dataload.storage import RecordFile
from dataload.storage.kept import CachedTable
from dataload.types import Array, Codec, Int64Array, Record


class TorchRecordSource(LMDBFileSource[Record]):
    """Records of TorchRecord directories.

    Records are in the order of db0, db1, and so on; see `dataload.codecs.tensorprotos` for their values.
    Fields without a name are named by position, ``"0"``, ``"1"``, ...; in the original's image data sets, ``"0"``
    contains the pixels as a flat uint8 array and ``"1"`` the label as bytes.

    Options: `TorchRecordOptions`.
    """

    format_name = "torchrecord"

    options_type: ClassVar[Any] = TorchRecordOptions

    def _open_shard(self, path: str) -> LMDBShard:
        return _TorchRecord(path, self.options)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The sub-databases of a TorchRecord: all values, db0 first, record `ends` (int64), and bytes per key."""

    values: Values
    ends: Int64Array
    widths: tuple[int, ...]

    def pack(self) -> CachedTable:
        return CachedTable(self.values.pack(), {"widths": self.widths})


class _TorchRecord(LMDBShard):
    def __init__(self, path: str, options: TorchRecordOptions) -> None:
        def choose(file: RecordFile, info: FileInfo) -> tuple[Sequence[Tree], tuple[Any, ...]]:
            trees = _databases(subdatabases(file, info), path, file.path)
            if options.db_num not in (None, len(trees)):
                message = f"{path} has {len(trees)} sub-databases, but db_num is {options.db_num}"
                raise ConfigError(message, key="db_num", value=options.db_num)
            return trees, ()

        snapshot, parts = open_table(path, options, "torchrecord", choose, _unpack, _build, _Parts.pack)
        codec = resolve_codec("tensorprotos", options.max_record_bytes)
        super().__init__(snapshot, parts.values, codec, options.max_record_bytes)
        self._ends, self._widths = parts.ends, parts.widths
        self._has_gaps = bool(len(self)) and int(parts.values.offsets.min()) < 0
        self._fields = self.first_fields()

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        codec = cast("Codec", self._codec)
        with self._reading(indices):
            values = self._stored(indices, self._gather)
            with decoding():
                batch = decode_batch(codec, values, fields)
                return self._decode(values, indices, fields) if batch is None else split_records(batch, len(indices))

    def join(self, joined: Any, shard: int) -> None:
        super().join(joined, shard)
        joined._has_gaps |= self._has_gaps

    def key(self, index: int) -> str:
        number, local = shard_of(self._ends, index)
        return f"db{number}/{local:0{self._widths[number]}d}"

    def _offsets(self, indices: Int64Array) -> Int64Array:
        offsets = super()._offsets(indices)
        if self._has_gaps and int(offsets.min()) < 0:
            index = int(indices[int(np.argmin(offsets))])
            number, _ = shard_of(self._ends, index)
            count = int(self._ends[number]) - (int(self._ends[number - 1]) if number else 0)
            message = f"key {self.key(index).partition('/')[2]!r} of sub-database db{number} is missing"
            raise CorruptFileError(f"{message}, which has {count} records", path=self._path, index=index)
        return offsets

    def _decode(
        self, data: Sequence[bytes | memoryview], indices: Int64Array, fields: tuple[str, ...] | None
    ) -> list[Record]:
        def locate(error: Exception, row: int) -> Exception:
            index = int(indices[row])
            database, _, key = self.key(index).partition("/")
            return located(error, self._path, index, f"key {key} of sub-database {database}")

        records = decoded(map(cast("Codec", self._codec).decode, data), len(data), locate)
        return records if fields is None else [select_fields(record, fields) for record in records]


def _databases(named: Sequence[Tree], path: str, file: str) -> list[Tree]:
    """Return the sub-databases in the order of their numbers."""
    numbered = {
        int(tree.name[2:]): tree
        for tree in named
        if tree.name is not None and re.fullmatch(rb"db(0|[1-9][0-9]{0,8})", tree.name)
    }
    if not numbered:
        raise UnsupportedFormatError(
            f"{path} is an LMDB file without a sub-database db0, so it is not a TorchRecord; format='lmdb' reads it",
            path=path,
        )
    for number in range(len(numbered)):
        if number not in numbered:
            message = f"the sub-database db{number} is missing; the last one is db{max(numbered)}"
            raise CorruptFileError(message, path=file)
        if numbered[number].has_duplicates:
            raise CorruptFileError(f"keys of the sub-database db{number} may have several values (DUPSORT)", path=file)
    return [numbered[number] for number in range(len(numbered))]


def _part(file: RecordFile, nodes: Nodes, tree: Tree, info: FileInfo) -> tuple[Int64Array, Array, int]:
    """Return offsets (-1 if it is missing) and lengths of the records 0 to n - 1, and the number of bytes of a key."""
    count = len(nodes)
    width = int(nodes.key_sizes[0]) if count else 1
    # The original pads keys to the digits of each sub-database's own count.
    if count and (nodes.numbers[0] < 0 or width < len(str(count - 1))):
        first = read_key(file, info, nodes.leaves, nodes.ends, 0)
        raise CorruptFileError(
            f"the first key of sub-database {(tree.name or b'').decode()} is {first!r}; its {count} records should "
            "have decimal keys, padded with zeros",
            path=info.path,
        )
    if bool((nodes.numbers == np.arange(count)).all()) and bool((nodes.key_sizes == width).all()):
        return nodes.offsets, nodes.lengths, width
    rows = np.flatnonzero((nodes.key_sizes == width) & (nodes.numbers >= 0) & (nodes.numbers < count))
    offsets, lengths = np.full(count, -1, np.int64), np.zeros(count, np.uint32)
    offsets[nodes.numbers[rows]] = nodes.offsets[rows]
    lengths[nodes.numbers[rows]] = nodes.lengths[rows]
    return offsets, lengths, width


def _build(file: RecordFile, info: FileInfo, trees: Sequence[Tree]) -> _Parts:
    parts = [_part(file, read_tree(file, info, tree), tree, info) for tree in trees]
    offsets, lengths, widths = zip(*parts, strict=True)
    ends = np.cumsum([len(part) for part in offsets], dtype=np.int64)
    return _Parts(Values.of(np.concatenate(offsets), np.concatenate(lengths)), ends, widths)


def _unpack(found: CachedTable, trees: Sequence[Tree], info: FileInfo) -> _Parts:
    """Return the table from the cache, which must fit these sub-databases."""
    ends = np.cumsum([tree.entries for tree in trees], dtype=np.int64)
    values = Values.unpack(found.arrays, int(ends[-1]), -1, info.size)
    widths: Any = found.extras.get("widths")
    require(isinstance(widths, list), len(widths) == len(trees))
    require(all(type(width) is int and 0 < width < 1 << 16 for width in widths))
    return _Parts(values, ends, tuple(widths))
