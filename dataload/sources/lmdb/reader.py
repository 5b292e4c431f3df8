"""Source of plain LMDB environments, with any keys, and values that a codec may decode."""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from dataload.catalog.arrays import IndexKey, store_cached
from dataload.errors import ConfigError, UnsupportedFormatError, closest
from dataload.sources.lmdb.file import FileInfo, Tree
from dataload.sources.lmdb.format import LMDBOptions
from dataload.sources.lmdb.table import KeyedValues, KeyOrder, LMDBFileSource, LMDBShard, find_table
from dataload.sources.lmdb.tree import open_snapshot, read_tree, subdatabases, verify_pages
from dataload.storage import RecordFile
from dataload.types import Codec


class LMDBSource(LMDBFileSource[Any]):
    """Records of LMDB environments, each a directory with ``data.mdb`` or a single file.

    Records are the values, as bytes or decoded by a codec. Keys that are decimal numbers are ordered numerically, all
    others in LMDB's order; see `key_order`.

    What others commit later is not seen; after their second transaction, reads raise an error. Options: `LMDBOptions`.
    """

    format_name = "lmdb"

    options_type: ClassVar[Any] = LMDBOptions

    def _open_shard(self, path: str) -> LMDBShard:
        return _LMDBShard(path, self.options)

    @property
    def key_order(self) -> KeyOrder:
        """Order of the keys in the first environment: ``"number"`` or ``"bytes"``."""
        shard = self._data_set().reader(0)
        assert isinstance(shard, _LMDBShard)
        return shard.keys.order


class _LMDBShard(LMDBShard):
    def __init__(self, path: str, options: LMDBOptions) -> None:
        def parse(file: RecordFile, info: FileInfo) -> tuple[KeyedValues, IndexKey | None]:
            tree = _choose(subdatabases(file, info), info.main, path, options.subdatabase)
            if options.verify:
                verify_pages(file, info, [info.main] if tree.name is None else [info.main, tree])
            names = () if tree.name is None else (tree.name,)
            # A writer with a writable map updates the file's time late, but the transaction number immediately.
            state = (info.transaction, tree.root)
            key = (
                IndexKey.of(
                    "lmdb-values", (file.path,), names, state=state, beside=path, remote=options.remote_settings
                )
                if options.cache
                else None
            )
            return find_table(
                key,
                tree.entries,
                lambda found: KeyedValues.unpack(found, tree.entries, info),
                lambda: KeyedValues.of(read_tree(file, info, tree)),
            )

        snapshot, (table, key) = open_snapshot(path, parse, mapped=options.map, remote=options.remote_settings)
        super().__init__(snapshot, table.values, cast("Codec | None", options.codec), options.max_record_bytes)
        self.keys = table.keys
        if key is not None:
            store_cached(key, table.pack())
        if self._codec is not None:
            self._fields = self.first_fields()

    def key(self, index: int) -> str:
        with self._snapshot.reading() as file:
            return self.keys.read(file, self._snapshot.info, index).decode(errors="backslashreplace")


def _choose(named: Sequence[Tree], main: Tree, path: str, subdatabase: str | None) -> Tree:
    """Return the database to read."""
    names = [tree.name.decode(errors="replace") for tree in named if tree.name is not None]
    if subdatabase is None and names:
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        hint = "; this is a TorchRecord, which format='torchrecord' reads as a whole" if names[0] == "db0" else ""
        raise ConfigError(
            f"{path} contains the sub-databases {listed}: choose one with subdatabase={names[0]!r}{hint}",
            key="subdatabase",
        )
    if subdatabase is None:
        tree = main
    elif subdatabase in names:
        tree = named[names.index(subdatabase)]
    else:
        message = f"{path} has no sub-database {subdatabase!r}: {closest(subdatabase, names)}"
        raise ConfigError(message, key="subdatabase", value=subdatabase)
    if tree.has_duplicates:
        raise UnsupportedFormatError(
            f"{path}: keys of this database may have several values (DUPSORT), so values have no index", path=path
        )
    return tree
