"""The source of tar archives, as WebDataset and DALI read them."""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any, ClassVar, Literal, cast

from dataload.codecs.decoders import plan_decoders
from dataload.errors import ConfigError, closest
from dataload.sources.files import FileSource
from dataload.sources.shards import ShardReader
from dataload.sources.tar.format import TarOptions
from dataload.sources.tar.shard import TarReader, TarSettings
from dataload.types import FieldSpec, Record


class TarSource(FileSource[Record]):
    """Samples of tar archives.

    A sample is a run of adjacent files whose paths are the same up to the first dot of the base name. Its record has
    that path as ``"__key__"``, and the content of each file under the rest of its name: ``"jpg"``, ``"left.png"``. If
    a sample has several files of one name, the first is read, as in DALI; `dataload index` reports them. Directories,
    links and hidden files are ignored.

    Args:
        paths: One or more uncompressed archives.
        fields: Names of the fields to read, in that order. None means all fields of each sample; otherwise
            ``"__key__"`` is read only if it is listed.
        options: See `TarOptions`.

    Raises:
        ConfigError: An option is invalid; on first use, a field is unknown or missing.
        CorruptFileError: On first use, an archive or index is invalid, or they contradict each other.
        UnsupportedFormatError: On first use, an archive is compressed or contains sparse files.
    """

    format_name = "tar"
    options_type: ClassVar[Any] = TarOptions

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        fields: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        if options.get("case_sensitive") is False and fields is not None and not isinstance(fields, str):
            fields = [name.lower() for name in fields]
        super().__init__(paths, fields=fields, **options)
        self._index: dict[str, str] | Literal[False] | None = pair_indexes(self._paths, self.options.index)
        decode, case_sensitive = self.options.decode, self.options.case_sensitive
        decoders = plan_decoders(decode, names=("auto", "written"), case_sensitive=case_sensitive)
        self._settings = TarSettings(self.options, decoders)

    def _open_shard(self, path: str) -> ShardReader[Record]:
        index = self._index[path] if isinstance(self._index, dict) else self._index
        return TarReader(path, index, self._settings, self._selected)

    def oddity(self) -> str | None:
        """Return what WebDataset would read differently, or refuse, and in which archive; None if there is nothing."""
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
        raise ConfigError(
            f"{key} names {len(several)} files for {len(paths)} archives: pass one for each, in the same order",
            key=key,
            value=index,
        )
    pairs: dict[str, str] = {}
    for path, name in zip(paths, map(fspath, several), strict=True):
        if pairs.setdefault(path, name) != name:
            raise ConfigError(f"{path} is in paths twice, with two indexes: {pairs[path]}, {name}", key=key)
    return pairs
