"""The source and the writer of JSON Lines."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, ClassVar, Self, TypeAlias, cast

import numpy as np

from dataload._util.arrays import check_lengths, check_size
from dataload._util.caches import DecodedCache
from dataload._util.clock import decoding
from dataload._util.lazy import load_optional
from dataload.catalog.arrays import IndexKey, remember, require
from dataload.catalog.facts import select_fields, spec_of
from dataload.codecs.arrow import REMEDIES
from dataload.codecs.nulls import fills_of_samples, with_masks
from dataload.collate import default_collate
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.directory import ShardDirectory
from dataload.sources.expression import Expression
from dataload.sources.file_source import FileSource
from dataload.sources.jsonl import JsonlOptions
from dataload.sources.options import FileOptions
from dataload.sources.shards import Location, ShardReader
from dataload.sources.views.select import match_columns
from dataload.sources.writer import Writer, require_fields
from dataload.storage import RecordFile, storage_of
from dataload.storage.backend import TextFile, is_compressed
from dataload.storage.kept import CachedTable
from dataload.types import Array, Batch, FieldSpec, Int64Array, NullPolicy, Record

BLOCK = 1 << 20  # bytes to look for lines in at once
_NEWLINE, _RETURN = 10, 13
_LEAST_CACHED = 50_000  # lines; finding fewer takes milliseconds


def find_lines(blocks: Iterable[bytes | memoryview], size: int) -> Array:
    """Return where the lines that are not empty begin in a text of `size` bytes, and its end; (lines + 1,) integers."""
    dtype = np.uint32 if size < 1 << 32 else np.int64
    found = bytearray()  # grows in place, where joining arrays would take twice their memory
    offset, begun, last = 0, 0, b"\n"  # of the block, of its first line, and the byte before the block
    for block in blocks:
        data = np.frombuffer(last + block, np.uint8)
        ends = np.flatnonzero(data[1:] == _NEWLINE) + offset
        starts = np.concatenate(([begun], ends[:-1] + 1)) if len(ends) else ends
        filled = ends > starts
        # A line break of Windows. A single byte of an earlier block is the byte before this one.
        short = np.flatnonzero(ends - starts == 1)
        filled[short] = data[starts[short] - offset + 1] != _RETURN
        found += starts[filled].astype(dtype).tobytes()
        begun = int(ends[-1]) + 1 if len(ends) else begun
        offset, last = offset + len(block), bytes(block[-1:]) or last
    unended = [begun] if begun < offset - (last == b"\r") else []
    found += np.array([*unended, offset], dtype).tobytes()
    return np.frombuffer(found, dtype)


def unpack(found: CachedTable, size: int) -> Array:
    """Return the lines from the cache, which must fill a text of `size` bytes."""
    edges = found.arrays["edges"]
    require(str(edges.dtype) in ("uint32", "int64"), edges[0] >= 0, edges[-1] == size, edges[1:] > edges[:-1])
    return edges


_SAMPLED = 1000  # records of a file that tell the types of fields with nulls
_SHOWN = 40  # characters
_PLAIN = frozenset((bool, int, float, str))
_LINE_BYTES = 4  # for each line while they are found
_MEMORY = 32  # most bytes that the values of JSON take for each byte of text


Fills: TypeAlias = dict[str, tuple[Any, str | None]]
"""For each field, the value that stands for nulls, and the name of the mask."""


class JsonlSource(FileSource[Record]):
    """Records of JSON Lines: what `json.loads` makes of each line, which has to be an object.

    The lines are found once, and read at random afterwards. Empty lines are skipped. A compressed file (``.gz``,
    ``.zst``) is decompressed into memory as a whole, and those used last are kept (`cached_bytes`): decompress or
    convert files that are larger than `max_record_bytes`, or several large ones that are shuffled.

    Options: `JsonlOptions`.
    """

    format_name = "jsonl"
    options_type: ClassVar[Any] = JsonlOptions

    def _prepare(self) -> None:
        self._cache = DecodedCache(min(self.options.cached_bytes, self.options.max_record_bytes))
        self._fills: Fills = {}  # which all readers share

    @property
    def reads_in_order(self) -> bool:
        """Whether one of several files is compressed; reading a record decompresses a whole file."""
        return len(self.paths) > 1 and any(map(is_compressed, self.paths))

    def _matches(self, condition: Expression, indices: Int64Array | None) -> Int64Array:
        """See `Source._matches`: None is null, and so is what a record lacks, whatever stands for them."""
        opened = self._data_set()  # which finds the fills
        masked = {mask: name for name, (_, mask) in self._fills.items() if mask is not None}

        def read(rows: Int64Array) -> dict[str, list[Any]]:
            records = opened.gathered(rows, lambda reader, local: cast("_Reader", reader).parse(local))
            return {
                name: [record.get(masked[name]) is None for record in records]
                if name in masked
                else [record.get(name) for record in records]
                for name in condition.fields
            }

        return match_columns(read, condition, len(self), indices)

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        opened = self._data_set()
        if len(opened.ends) == 1:
            return super()._read_columns(indices, fields)
        # Columns of each file would differ in type: numbers of some records are integers in JSON, others floats.
        chosen = self._choose(fields, opened)
        records = opened.gathered(indices, lambda reader, local: reader.read(local, chosen))
        return _columns(
            records,
            lambda name: cast("_Reader", opened.reader(0)).is_plain(name),
            lambda row: self.locate(int(indices[row])),
        )

    def _wanted(self, known: Mapping[str, FieldSpec]) -> tuple[str, ...] | None:
        return with_masks(self._selected, known, self.options.nulls)

    def _open_shard(self, path: str) -> ShardReader[Record]:
        if is_compressed(path):
            return _CompressedFile(path, self.options, self._fills, self._cache)
        return _File(path, self.options, self._fills)

    def _known_fields(
        self, readers: Sequence[ShardReader[Record]], fields: Sequence[Mapping[str, FieldSpec]]
    ) -> Mapping[str, FieldSpec]:
        if self.options.nulls is not None and not self._fills:
            samples: dict[str, Any] = {}  # of all files: one may have nothing but nulls in a field
            for reader in readers:
                _add_samples(samples, cast("_Reader", reader).samples)
            self._fills.update(fills_of_samples(samples, self.options.nulls, self.paths[0]))
            fields = [reader.fields for reader in readers]
        return super()._known_fields(readers, fields)

    def close(self) -> None:
        super().close()
        self._cache.clear()


class _Reader(ShardReader[Record]):
    """The lines of a file."""

    _edges: Any  # what `find_lines` returns, or `ShardNumbers` of many files

    def __init__(self, path: str, limit: int, fills: Fills) -> None:
        self._path = path
        self._limit = limit
        self._fills = fills
        self.samples: dict[str, Any] = {}  # a value of each field that is not null, if there is one
        self._plain: set[str] | None = None
        self._first: _Reader | None = None  # of the files of a reader of many

    def _sample(self, nulls: NullPolicy) -> None:
        """Look for what tells what stands for nulls, unless it is known; called once the lines are known."""
        if nulls is not None and not self._fills and len(self):
            for record in self._intact(np.arange(min(len(self), _SAMPLED))):
                _add_samples(self.samples, record)

    def _intact(self, rows: Int64Array) -> list[Record]:
        """Return the records that can be read; the others raise when they are read again."""
        with suppress(CorruptFileError):
            return self.read(rows, None)
        if len(rows) == 1:
            return []
        middle = len(rows) // 2
        return [*self._intact(rows[:middle]), *self._intact(rows[middle:])]

    def __len__(self) -> int:
        return len(self._edges) - 1

    def _spans(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return offset and bytes of lines, with their line breaks and the empty lines after them."""
        starts = self._edges.take(indices, mode="clip").astype(np.int64)
        return starts, self._edges.take(indices + 1, mode="clip").astype(np.int64) - starts

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        for record in self._intact(np.zeros(1, np.int64)) if len(self) else ():
            # Lists may differ in length, and what is null here may be anything elsewhere.
            return {n: spec_of(v) if type(v) in _PLAIN else FieldSpec("unknown", None) for n, v in record.items()}
        return {}

    def parse(self, indices: Int64Array) -> list[Record]:
        """Return the objects of lines, without values in place of nulls."""
        starts, lengths = self._spans(indices)
        check_lengths(lengths * _MEMORY, self._limit, indices, self._path)
        texts = self._texts(starts, lengths)
        with decoding():
            try:
                records: list[Any] = [*map(json.loads, texts)]
            except (ValueError, RecursionError) as error:
                raise self._find_invalid(texts, indices) from error
        if not all(type(record) is dict for record in records):
            row = next(row for row, record in enumerate(records) if type(record) is not dict)
            message = f"expected a JSON object, found {texts[row].strip()[:40]!r}"
            raise CorruptFileError(message, path=self._path, offset=int(starts[row]), index=int(indices[row]))
        return records

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        records = self.parse(indices)
        for name, (value, mask) in self._fills.items():
            if fields is None or name in fields or mask in fields:
                for record in records:
                    is_null = record.get(name) is None
                    if is_null:
                        record[name] = deepcopy(value)
                    if mask is not None:
                        record[mask] = is_null
        return records if fields is None else [select_fields(record, fields) for record in records]

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        first = self._first or self
        return _columns(
            self.read(indices, fields), first.is_plain, lambda row: Location(self._path, int(indices[row]), None)
        )

    def is_plain(self, name: str) -> bool:
        """Return whether one of the first records has a number or text in a field."""
        if self._plain is None:
            records = self._intact(np.arange(min(len(self), _SAMPLED)))
            self._plain = {name for record in records for name, value in record.items() if type(value) in _PLAIN}
        return name in self._plain

    def _find_invalid(self, texts: list[bytes], indices: Int64Array) -> CorruptFileError:
        """Return the error of the first line that is not JSON."""
        for index, text in zip(indices.tolist(), texts, strict=True):
            try:
                json.loads(text)
            except (ValueError, RecursionError) as error:
                offset = int(self._spans(np.array([index]))[0][0])
                reason = getattr(error, "msg", error)  # its line and column count within the record
                if text.strip() in (b"[", b"{", b"[{"):
                    reason = f"{reason}: a record is one line: write each by json.dumps, or load the whole by json.load"
                return CorruptFileError(f"invalid JSON: {reason}", path=self._path, offset=offset, index=index)
        raise AssertionError("one of them is not")

    def _texts(self, starts: Int64Array, lengths: Int64Array) -> list[bytes]:
        raise NotImplementedError


class _File(_Reader):
    def __init__(self, path: str, options: JsonlOptions, fills: Fills) -> None:
        super().__init__(path, options.max_record_bytes, fills)
        self._storage = storage_of(path, options.remote_settings)
        self._file = self._storage.map(path, mapped=options.map)
        _refuse_empty(self._file.size, path)
        key = IndexKey.of("jsonl", (path,), remote=options.remote_settings) if options.cache else None
        self._edges = remember(
            key,
            lambda found: unpack(found, self._file.size),
            lambda: find_lines(self._blocks(), self._file.size),
            lambda edges: CachedTable({"edges": edges}, {}) if len(edges) > _LEAST_CACHED else None,
        )
        self._sample(options.nulls)

    def shared(self) -> tuple[RecordFile, Any]:
        return self._file, self._fills

    def joined(self, directory: ShardDirectory) -> Self:
        joined = directory.copy_of(self)
        joined._first = self
        joined._edges = directory.numbers(is_place=True)
        return joined

    def join(self, joined: Any, shard: int) -> None:
        joined._edges.put(shard, self._edges)

    def _blocks(self) -> Iterator[bytes]:
        # Read instead of using the map: a page fault would also read the pages around it.
        with self._storage.open(self._path, whole=True) as file:
            for start in range(0, self._file.size, BLOCK):
                yield file.read(start, BLOCK)

    def _texts(self, starts: Int64Array, lengths: Int64Array) -> list[bytes]:
        return self._file.copies(starts, lengths)

    def ranges(self, indices: Int64Array, fields: tuple[str, ...] | None) -> tuple[Int64Array, Int64Array]:  # noqa: ARG002 - records are read whole
        return self._spans(indices)

    def release(self) -> None:
        self._file.release()


class _CompressedFile(_Reader):
    whole = True

    def __init__(self, path: str, options: JsonlOptions, fills: Fills, cache: DecodedCache) -> None:
        super().__init__(path, options.max_record_bytes, fills)
        self._content, self._cache = TextFile(path, self._limit, options.remote_settings), cache
        text = self._text()
        _refuse_empty(len(text), path)
        table = _LINE_BYTES * text.count(b"\n")
        check_size(len(text) + table, self._limit, "the text of the file, with the places of its lines,", path=path)
        blocks = (memoryview(text)[start : start + BLOCK] for start in range(0, len(text), BLOCK))
        self._edges = find_lines(blocks, len(text))
        self._sample(options.nulls)

    def _text(self) -> bytes | bytearray:
        return self._cache.get(self._path, self._content.read)

    def _texts(self, starts: Int64Array, lengths: Int64Array) -> list[bytes]:
        text, stops = self._text(), starts + lengths
        return [bytes(text[i:j]) for i, j in zip(starts.tolist(), stops.tolist(), strict=True)]


def _columns(records: list[Record], is_plain: Callable[[str], bool], locate: Callable[[int], Location]) -> Batch:
    """Collate records. A null in a field where others have numbers or text is a CorruptFileError."""
    for name in records[0]:
        values = [record.get(name) for record in records]
        if None in values and (not _PLAIN.isdisjoint(map(type, values)) or is_plain(name)):
            at = locate(values.index(None))
            message = f"field {name!r} is null, and other records have numbers or text: {REMEDIES}"
            raise CorruptFileError(message, path=at.shard, index=at.record)
    return default_collate(records)


def _add_samples(samples: dict[str, Any], others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        samples[name] = _short(value) if samples.get(name) is None else samples[name]


def _short(value: Any) -> Any:
    """Return a value of the same type that takes little memory."""
    if isinstance(value, dict):
        return {name: _short(each) for name, each in cast("dict[str, Any]", value).items()}
    return value[:_SHOWN] if isinstance(value, str) else [] if isinstance(value, list) else value


def _refuse_empty(size: int, path: str) -> None:
    if not size:
        message = "the file is empty: its writer did not finish (a file without records has an empty line)"
        raise CorruptFileError(message, path=path, offset=0)


class JsonlWriter(Writer):
    """Writes JSON Lines: numbers, text, lists and dicts unchanged, arrays as lists. Bytes are refused.

    The suffixes ``.gz`` and ``.zst`` of the path compress the file.

    Options: `FileOptions`.
    """

    options_type: ClassVar[Any] = FileOptions

    def _begin(self, options: FileOptions) -> None:  # noqa: ARG002 - none is for the records
        self._stream: Any = self._part.create()
        self._out: Any = self._stream
        if self.path.lower().endswith(".gz"):
            # Without a name and a time, the same records give the same bytes.
            self._out = gzip.GzipFile("", "wb", 6, self._stream, 0)
        elif self.path.lower().endswith(".zst"):
            arrow = load_optional("pyarrow", needed_by="writing .zst", extra="arrow")
            self._out = arrow.CompressedOutputStream(self._stream, "zstd")

    def _write(self, record: Any) -> None:
        values = require_fields(record, "jsonl")
        try:
            line = json.dumps(dict(values), default=_as_json, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"record {len(self)} cannot be written as JSON: {error}") from error
        self._out.write(line + b"\n")
        self.stored_bytes += len(line) + 1

    def _finish(self) -> None:
        if not len(self):
            self._out.write(b"\n")
        self._close()

    def _discard(self) -> None:
        self._close()

    def _close(self) -> None:
        self._out.close()
        self._stream.close()


def _as_json(value: Any) -> Any:
    """Return a value of a record as `json` can write it."""
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    kind = f"an array of {value.dtype}" if isinstance(value, (np.ndarray, np.generic)) else type(value).__name__
    raise TypeError(f"{kind} has no form in JSON: decode or drop this field, or choose another format")
