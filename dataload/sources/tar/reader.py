"""Tar archives of samples, as WebDataset and DALI read them, through an index or by scanning."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from dataload._util.checks import check_choice
from dataload.codecs.decoders import Decoder, find_decoder
from dataload.errors import ConfigError
from dataload.sources.files import FileSource, ShardReader
from dataload.sources.tar.header import OnDamage
from dataload.sources.tar.shard import Missing, TarReader, TarSettings
from dataload.types import FieldSpec, Record

__all__ = ["Decode", "TarSource", "pair_indexes"]

Decode: TypeAlias = "Literal['auto'] | Mapping[str, str | Callable[[bytes], Any]]"
"""What becomes of the bytes of a component; see `TarSource`."""


class TarSource(FileSource[Record]):
    """Samples of tar archives.

    A sample is a run of adjacent files whose paths agree up to the first dot of the base name. Its record holds
    ``"__key__"``, that common path, and for each file its content under the rest of its name: ``"jpg"``,
    ``"left.png"``. Of several files of one name in a sample the first counts, as for DALI; `dataload index`
    reports them. Directories, links and hidden files are passed over.

    Args:
        paths: One archive or several, not compressed.
        fields: Names of the fields to read, in that order; None means all that a sample has. ``"__key__"`` is then
            read only if it is named.
        index: DALI's index files, one for each archive. None looks for ``X.idx`` beside ``X.tar``, and scans the
            archive where there is none; False always scans.
        decode: None gives `bytes`. ``"auto"`` decodes by the last part of the extension: ``cls`` to int, ``txt`` to
            str, ``json``, ``npy``, ``npz``, and images to (height, width, 3) uint8. It takes that part off where there
            is more than it: ``image.npy`` becomes ``image``, and so does the ``image.png`` of other samples; where one
            sample has two of them, their names stay whole. A mapping gives extension (or its last part) -> name of a
            decoder, or a function of bytes; others stay `bytes`. Nothing is ever unpickled.
        missing: What happens if `fields` names something that a sample lacks. `error` refuses to open, naming the
            sample; `skip` leaves such samples out; `empty` reads ``b""``, for text ``""``, for an image one of no
            pixels, and refuses what has no empty value.
        case_sensitive: False reads all names of fields in lower case.
        on_damage: `stop` ends a scan at a damaged or truncated member, with a warning, instead of raising.
        verify_index: Compare some members with what the index says of them, so that an index of another archive is
            noticed. False believes it, as DALI does, as long as it stays inside the archive.
        cache: Keep where the samples of a large archive lie in a hidden file, for the next time; see
            `dataload.storage.table_cache`.

    Raises:
        ConfigError: An option is none of these; on first use, when a field is unknown or missing.
        CorruptFileError: On first use, when archive or index contradict their format or each other.
        UnsupportedFormatError: On first use, when an archive is compressed or holds sparse files.
    """

    format_name = "tar"

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        fields: Sequence[str] | None = None,
        index: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Literal[False] | None = None,
        decode: Decode | None = None,
        missing: Missing = "error",
        case_sensitive: bool = True,
        on_damage: OnDamage = "error",
        verify_index: bool = True,
        cache: bool = True,
    ) -> None:
        check_choice("missing", missing, get_args(Missing))
        check_choice("on_damage", on_damage, get_args(OnDamage))
        if not case_sensitive and fields is not None and not isinstance(fields, str):
            fields = [name.lower() for name in fields]
        super().__init__(
            paths,
            fields=fields,
            decode=decode,
            missing=missing if missing != "error" else None,
            case_sensitive=None if case_sensitive else False,
            on_damage=on_damage if on_damage != "error" else None,
        )
        self._index: dict[str, str] | Literal[False] | None = pair_indexes(self._paths, index)
        self._settings = TarSettings(
            decoders=_plan_decoders(decode, case_sensitive),
            auto=decode == "auto",
            missing=missing,
            case_sensitive=case_sensitive,
            on_damage=on_damage,
            verify_index=verify_index,
            cache=cache,
        )
        self._known: dict[str, FieldSpec] = {}

    def _open_shard(self, path: str) -> ShardReader[Record]:
        index = self._index[path] if isinstance(self._index, dict) else self._index
        reader = TarReader(path, index, self._settings, self._selected)
        for name, spec in reader.fields.items():
            self._known.setdefault(name, spec)
        return reader

    def _open(self) -> Any:
        # Archives may differ in fields (a class to an archive): known is what one of them has.
        self._known = {}
        opened = super()._open()
        opened.fields = self._known
        super()._check_fields(self._known, repr(self))
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_known": {}}

    def _check_fields(self, known: Mapping[str, FieldSpec], path: str) -> None:
        if self._settings.missing == "error":
            super()._check_fields(known, path)


def pair_indexes(paths: tuple[str, ...], index: Any, key: str = "index") -> dict[str, str] | Literal[False] | None:
    """Return a dict from archive to index file, or `index` itself if it is None or False.

    Raises:
        ConfigError: The numbers of archives and of index files differ, or an archive has two different index files.
            The error's key is `key`.
    """
    if index is None or index is False:
        return index
    if index is True:
        raise ConfigError(f"{key} is True: give the paths of the index files, None or False", key=key, value=index)
    several = [index] if isinstance(index, (str, os.PathLike)) else list(index)
    if len(several) != len(paths):
        raise ConfigError(
            f"{key} names {len(several)} files for {len(paths)} archives: give one for each, in the same order",
            key=key,
            value=index,
        )
    pairs: dict[str, str] = {}
    for path, name in zip(paths, map(os.fspath, several), strict=True):
        if pairs.setdefault(path, name) != name:
            raise ConfigError(f"{path} is in paths twice, with two indexes: {pairs[path]}, {name}", key=key)
    return pairs


def _plan_decoders(decode: Any, case_sensitive: bool) -> dict[str, Decoder]:
    if decode is None or decode == "auto":
        return {}
    if not isinstance(decode, Mapping):
        raise ConfigError(
            f'decode is {decode!r}: give None, "auto" or a mapping of extensions to decoders',
            key="decode",
            value=decode,
        )
    return {(name if case_sensitive else name.lower()): find_decoder(what, name) for name, what in decode.items()}
