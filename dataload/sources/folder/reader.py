"""The source of files in folders and ZIP archives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import call
from os import fspath
from typing import Any, ClassVar, cast

import numpy as np

from dataload._util.arrays import split_records
from dataload._util.caches import is_pickled_for_worker
from dataload._util.clock import decoding
from dataload._util.fingerprint import digest
from dataload.catalog.checks import ContentMark
from dataload.catalog.facts import select_fields, spec_of
from dataload.codecs.audio import rate_field
from dataload.codecs.decoders import DECODERS, Decoder, decode_images, for_extension, known_extension, plan_decoders
from dataload.collate import default_collate
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.encoded import decoded, located
from dataload.sources.file_source import FileSource
from dataload.sources.folder import FolderOptions, is_medium, is_metadata, split_pattern
from dataload.sources.folder.files import Files, open_files
from dataload.sources.folder.table import (
    KEY,
    LABEL,
    FileTable,
    Sheet,
    class_table,
    compile_pattern,
    copy_rows,
    full_name,
    in_order,
    join_labels,
    media_table,
    pattern_table,
    split_prefix,
)
from dataload.sources.shards import ListedShards, OpenShards, ShardReader
from dataload.storage import join, storage_of
from dataload.storage.errors import rewritten_error
from dataload.types import Batch, FieldSpec, Int64Array, Record


class FolderSource(FileSource[Record]):
    """Files in folders or ZIP archives, which are read one by one.

    By default the folders in a folder are classes, as for torchvision's ``ImageFolder``: each image or audio file
    anywhere in them is a record ``{"__key__": str, "image": array, "label": int}``, or ``{"__key__", "audio",
    "sample_rate", "label"}``. A label is the number of the class among the sorted names, which are
    ``source.fields["label"].classes``. Records are ordered by class, then folder, then name. The key is the path
    without its suffix. Other files and hidden ones are ignored, and links are followed. With `labels`, `pattern` or
    ``metadata.csv`` or ``metadata.jsonl`` beside the files, folders are not classes: see `FolderOptions`. An archive
    whose files all lie in one folder of classes is read as that folder.

    `paths` are folders, archives, or folders with a pattern, ``"data/{label}/{key}.jpg"``. Several are one data set
    with the classes of all. Options: `FolderOptions`.
    """

    format_name = "folder"
    options_type: ClassVar[Any] = FolderOptions

    def _prepare(self) -> None:
        patterns = {split_pattern(path)[1] or self.options.pattern for path in self._paths}
        if self.options.labels is not None and (patterns != {None} or len(self._paths) > 1):
            message = "labels names the files of one folder or archive, without a pattern"
            raise ConfigError(message, key="labels", value=self.options.labels)
        self._decoders = plan_decoders(self.options.decode, case_sensitive=False)
        self._listed: str | None = None  # a hash of the tables, when this process or its parent made them

    def _open_shard(self, path: str) -> FolderReader:
        root, pattern = split_pattern(path)
        return FolderReader(root, pattern or self.options.pattern, self.options, self._decoders)

    def _open(self) -> OpenShards[Record]:
        opened = super()._open()
        readers = cast("list[FolderReader | None]", opened.readers)
        tables = digest(*(None if reader is None else reader.listing() for reader in readers))
        if self._known is None and self._listed not in (None, tables):
            opened.close()
            raise rewritten_error(self._paths[0])
        self._listed = tables
        return opened

    def _data_file(self, path: str) -> str:
        return split_pattern(path)[0]

    def _versioned_files(self) -> list[str]:
        files = super()._versioned_files()  # a folder changes with each file in it, also with those that are ignored
        return [file for file in files if not storage_of(file).is_directory(file)]

    def open_on_first_use(self, known: ListedShards) -> None:
        """Open all archives at once instead, because only then the classes are known."""

    def _open_known(self, shard: int) -> ShardReader[Record]:
        reader = cast("FolderReader", super()._open_known(shard))
        assert self._known is not None, "only then are shards opened one by one"
        if LABEL in self._known.fields and (classes := self._known.fields[LABEL].classes) is not None:
            reader.number_classes(classes)
        return reader

    def _known_fields(
        self, readers: Sequence[ShardReader[Record]], fields: Sequence[Mapping[str, FieldSpec]]
    ) -> Mapping[str, FieldSpec]:
        opened = [cast("FolderReader", reader) for reader in readers]
        for path, found in zip(self._paths, fields, strict=True):
            if found.keys() != fields[0].keys() and self.options.decode is not None:
                named = f"{self._paths[0]} has the fields {', '.join(fields[0])}, and {path} {', '.join(found)}"
                message = f"{named}: open them separately and join them with ConcatSource"
                raise ConfigError(message, key="paths")
        known = dict(super()._known_fields(readers, fields))
        have_names = [reader.classes is not None for reader in opened]
        if len({*have_names}) > 1 and all(LABEL in found for found in fields):
            texts, numbers = (self._paths[have_names.index(found)] for found in (True, False))
            message = f"{texts} has names as labels, but {numbers} has numbers: write all labels in one way"
            raise ConfigError(message, key="paths")
        if all(have_names):
            classes = tuple(sorted({name for reader in opened for name in reader.classes or ()}))
            for reader in opened:
                reader.number_classes(classes)
            known[LABEL] = FieldSpec("int64", (), classes)
        return known

    def _mark_of(self, shard: int, like: Any = None) -> ContentMark:  # noqa: ARG002 - files are not opened
        root, reader = self._data_file(self._paths[shard]), cast("FolderReader", self._data_set().reader(shard))
        if storage_of(root, self._remote).is_directory(root):
            return ContentMark(reader.total, "", reader.identity())
        return super()._mark_of(shard)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if not is_pickled_for_worker():
            state["_listed"] = None  # as of versions
        return state


class FolderReader(ShardReader[Record]):
    """Reads one folder or archive; `classes` are the names of the labels, None if these are numbers."""

    def __init__(self, root: str, pattern: str | None, options: FolderOptions, decoders: Mapping[str, Decoder]) -> None:
        self._options = options
        self._decoders = decoders
        is_read = None if pattern is None else compile_pattern(pattern)
        self._files = open_files(root, is_read or (lambda name: is_medium(name) or is_metadata(name)), options)
        self._table = _build_table(root, pattern, options, self._files)
        self._files.listing = {}
        self._hash = repr(pattern)
        self.classes: tuple[str, ...] | None = self._table.classes
        self._labels = self._table.columns.get(LABEL)
        rates = {rate_field(name): name for name in self._table.files if self._is_audio(name)}
        self._rates = {name: field for name, field in rates.items() if name not in self._table.files}

    def __len__(self) -> int:
        return len(self._table)

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return int(self._files.sizes(self._table.values).sum())

    def number_classes(self, classes: tuple[str, ...]) -> None:
        """Let labels, which are names, be numbers of these classes, which include this shard's classes."""
        codes = {name: code for code, name in enumerate(classes)}
        numbers = np.array([codes[name] for name in self.classes or ()], np.int64)
        self._labels = numbers[np.asarray(self._table.columns[LABEL])]

    @cached_property
    def _specs(self) -> Mapping[str, FieldSpec]:
        specs = {KEY: FieldSpec("str", ())}
        for name in self._table.files:
            if self._options.decode is None:
                specs |= {full_name(name, suffix): FieldSpec("bytes", ()) for suffix in self._table.suffixes[name]}
            else:
                specs[name] = self._spec(name)
        specs |= dict.fromkeys(self._rates, FieldSpec("int64", ()))
        return specs | {name: self._table.spec(name) for name in self._table.columns}

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The key, the fields that are files, and the values from paths or rows."""
        return self._specs

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        """Return records; undecoded ones name their files by suffix."""
        if self._options.decode is not None:
            names = tuple(self._specs) if fields is None else fields
            contents: dict[str, Any] = {}
            return split_records({name: self._values(name, indices, contents) for name in names}, len(indices))
        columns: dict[str, Any] = {KEY: self._table.keys(indices)}
        records = split_records(columns, len(indices))
        for name in self._table.files:
            values = self._contents(name, indices, {})
            for record, suffix, value in zip(records, self._suffixes(name, indices), values, strict=True):
                record[full_name(name, suffix)] = bytes(value)
        for name in self._table.columns:
            for record, value in zip(records, self._values(name, indices, {}), strict=True):
                record[name] = value
        return records if fields is None else [select_fields(record, fields) for record in records]

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        if self._options.decode is None:
            return default_collate(self.read(indices, fields))
        names = tuple(self._specs) if fields is None else fields
        contents: dict[str, Any] = {}
        batch: Batch = {}
        for name in names:
            values = self._values(name, indices, contents)
            with decoding():  # of the batch's column
                batch[name] = default_collate.column(values, name) if isinstance(values, list) else values
        return batch

    def ranges(self, indices: Int64Array, fields: tuple[str, ...] | None) -> tuple[Int64Array, Int64Array] | None:
        every = fields is None or self._options.decode is None
        wanted = self._table.files if every else {self._rates.get(name, name) for name in fields or ()}
        numbers = [indices[:0], *(each[indices] for name, each in self._table.files.items() if name in wanted)]
        return self._files.ranges(self._table.values[np.concatenate(numbers)])

    def key(self, index: int) -> str:
        """Return the path of a record, without its suffix."""
        (found,) = self._table.keys(np.array([index]))
        return found

    def listing(self) -> str:
        """Return a hash of names, sizes and values."""
        table, found = self._table, hashlib.blake2b(self._hash.encode(), digest_size=16)
        for numbers in (table.names.ends, self._files.sizes(table.values), *table.files.values()):
            found.update(np.ascontiguousarray(numbers).tobytes())
        found.update(table.names.text)
        for name, column in table.columns.items():
            found.update(repr((name, column) if isinstance(column, list) else name).encode())
            found.update(b"" if isinstance(column, list) else column.tobytes())
        found.update(repr((*table.files, table.classes)).encode())
        return found.hexdigest()

    def identity(self) -> str:
        """Return a hash of what `listing` has, and of the checksums of an archive or some files of a folder."""
        ends = np.array([0, len(self) - 1])
        numbers = np.concatenate([numbers[ends] for numbers in self._table.files.values()])
        files = self._files.identity(self._table.names.read(numbers), self._table.values[numbers])
        return digest(self.listing(), files)

    def release(self) -> None:
        """Close the archive."""
        self._files.release()

    def _values(self, name: str, indices: Int64Array, contents: dict[str, Any]) -> Any:
        """Return the values of a field: a list, or images of one size as an array."""
        if name == KEY:
            return self._table.keys(indices)
        if name in self._table.columns:
            column = self._labels if name == LABEL and self._labels is not None else self._table.columns[name]
            return copy_rows(column, indices)
        field = self._rates.get(name, name)
        found = self._contents(field, indices, contents)
        if name in self._rates:
            return self._decode(field, indices, found, [DECODERS["sample_rate"]] * len(indices))
        suffixes = self._suffixes(field, indices)
        decoders = {suffix: self._decoder(suffix) for suffix in {*suffixes}}
        kinds = {decoder.kind for decoder in decoders.values() if decoder.name == "image" and not decoder.own}
        if len(kinds) == 1 and all(decoder.kind in kinds for decoder in decoders.values()):
            with decoding():
                rows = decode_images(found, next(iter(kinds)), self._options.max_record_bytes)
            if rows is not None:
                return rows
        return self._decode(field, indices, found, [decoders[suffix] for suffix in suffixes])

    def _contents(self, field: str, indices: Int64Array, contents: dict[str, Any]) -> Any:
        """Return the bytes of a field, which are read once for all fields that need them."""
        if field not in contents:
            table = self._table
            values = table.values[table.files[field][indices]]
            contents[field] = self._files.read(table.names_of(field, indices), values, indices)
        return contents[field]

    def _suffixes(self, field: str, indices: Int64Array) -> list[str]:
        lengths = self._table.key_lengths[indices].tolist()
        names = self._table.names_of(field, indices)
        return [name[length:].lstrip("./").lower() for name, length in zip(names, lengths, strict=True)]

    def _decoder(self, suffix: str) -> Decoder:
        chosen = self._decoders.get(suffix) or self._decoders.get(suffix.rpartition(".")[2])
        chosen = chosen or (known_extension(suffix) if self._options.decode == "auto" else None) or DECODERS["bytes"]
        return for_extension(chosen, suffix, self._options.max_record_bytes)

    def _is_audio(self, field: str) -> bool:
        decoders = [*map(self._decoder, self._table.suffixes[field])]
        return self._options.decode is not None and all(d.name == "audio" and not d.own for d in decoders)

    def _decode(
        self, field: str, indices: Int64Array, contents: Sequence[Any], decoders: Sequence[Decoder]
    ) -> list[Any]:
        def locate(error: Exception, row: int) -> Exception:
            index = int(indices[row])
            path, what = self._files.locate(self._table.names_of(field, np.array([index]))[0])
            return located(error, path, index, what, own=decoders[row].own)

        pairs = zip(contents, decoders, strict=True)
        pieces = [bytes(content) if decoder.small else content for content, decoder in pairs]
        apply: Callable[..., Any] = call
        return decoded(map(apply, [decoder.decode for decoder in decoders], pieces), len(pieces), locate)

    def _spec(self, field: str) -> FieldSpec:
        """Describe a field by its suffixes, or its first file; the sizes of all show whether shapes vary."""
        decoders = [*map(self._decoder, self._table.suffixes[field])]
        if len({decoder.name for decoder in decoders}) > 1 or any(decoder.own for decoder in decoders):
            return _UNKNOWN
        if decoders[0].spec is not None:
            return decoders[0].spec
        try:
            value = self._values(field, np.zeros(1, np.int64), {})[0]
        except (CorruptFileError, UnsupportedFormatError):  # raised again when it is read; others may be intact
            return _UNKNOWN
        if isinstance(value, (dict, list)) or value is None:
            return _UNKNOWN
        spec, sizes = spec_of(value), self._files.sizes(self._table.values[self._table.files[field]])
        return FieldSpec(spec.dtype, (None,) * len(spec.shape or ())) if (sizes != sizes[0]).any() else spec


def _build_table(root: str, pattern: str | None, options: FolderOptions, files: Files) -> FileTable:
    """Return the records of a folder or an archive."""
    names, values = in_order(files.listing)
    if pattern is not None:
        return pattern_table(names, values, root, pattern, options.missing)
    tells = np.array([not is_medium(name) for name in names], bool)
    described = [name for name, tell in zip(names, tells.tolist(), strict=True) if tell]
    contents = [] if options.labels is not None else files.read(described, values[tells], np.flatnonzero(tells))
    names, values = [name for name in names if is_medium(name)], values[~tells]
    folders = [f"{folder}/" for folder in files.listing if folder]
    is_folder = storage_of(root, options.remote_settings).is_directory(root)
    inner = {folder.partition("/")[0] for folder in folders}
    cut = 0
    if not is_folder and len(inner) == 1 and all(name.count("/") > 1 for name in names) and options.labels is None:
        cut = len(inner.pop()) + 1  # an archive of a folder, not of its content
        names, folders = [name[cut:] for name in names], [folder[cut:] for folder in folders]
    top = {folder.partition("/")[0] for folder in folders} - {""}
    split = options.split if options.labels is None or options.split != "auto" else None
    within = split_prefix(split, top, root, is_folder=is_folder)
    if options.labels is None and not contents:
        below = {folder[len(within) :].partition("/")[0] for folder in folders if folder.startswith(within)} - {""}
        return class_table(names, values, root, below, within)
    kept = [number for number, name in enumerate(names) if name.startswith(within)]
    table = media_table([names[number] for number in kept], values[kept], root)
    if options.labels is None:
        pairs = zip(described, contents, strict=True)
        sheets = [Sheet(join(root, name), data, name[cut : name.rfind("/") + 1]) for name, data in pairs]
    else:
        labels = fspath(options.labels)
        sheets = [Sheet(labels, storage_of(labels, options.remote_settings).read(labels))]
    return join_labels(table, sheets, options.missing, within)


_UNKNOWN = FieldSpec("unknown")
