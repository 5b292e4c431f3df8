"""The source of text files."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dataload._util.arrays import check_lengths
from dataload._util.caches import DecodedCache
from dataload.catalog.facts import require_known
from dataload.errors import CorruptFileError, SourceNotFoundError
from dataload.sources.file_source import FileSource
from dataload.sources.shards import ShardReader
from dataload.sources.text import TextOptions, texts_among
from dataload.storage import base_name, files_below, join, storage_of
from dataload.storage.backend import TextFile, is_compressed
from dataload.types import FieldSpec, Int64Array, Record

_FIELDS = {"text": FieldSpec("str", ()), "file": FieldSpec("str", ())}
_MARK = b"\xef\xbb\xbf"  # that some editors put before UTF-8


class TextSource(FileSource[Record]):
    """Texts in files ``.txt`` and ``.md``, also compressed (``.gz``, ``.zst``): a file, a line or a paragraph each.

    A record has the fields ``text``, and ``file``, the name of its file. A directory stands for its texts and those in
    folders below; at a URL, for those in it. Hidden files and those called README or LICENSE are left out. A compressed
    file is decompressed as a whole.

    Options: `TextOptions`.
    """

    format_name = "text"
    options_type: ClassVar[Any] = TextOptions

    def _prepare(self) -> None:
        self._cache = DecodedCache(min(self.options.cached_bytes, self.options.max_record_bytes))
        self._names: dict[str, str] = {}
        paths: list[str] = []
        for path in self._paths:
            found = {path: base_name(path)}
            if not is_compressed(path) and storage_of(path, self._remote).is_directory(path):
                found = {join(path, name): name for name in texts_among(files_below(path, self._remote))}
            if not found:
                raise SourceNotFoundError(f"the directory {path} has no files .txt or .md", path=path)
            self._names |= found
            paths += found
        self._paths = tuple(paths)

    @property
    def reads_in_order(self) -> bool:
        """Whether files are decompressed as a whole for one of several records."""
        return self.options.records != "file" and any(map(is_compressed, self.paths))

    def _open_shard(self, path: str) -> ShardReader[Record]:
        return _TextFile(path, self._names[path], self.options, self._cache)

    def close(self) -> None:
        super().close()
        self._cache.clear()


class _TextFile(ShardReader[Record]):
    def __init__(self, path: str, name: str, options: TextOptions, cache: DecodedCache) -> None:
        self._path, self._name, self._options, self._cache = path, name, options, cache
        self.whole = is_compressed(path)
        self._content = TextFile(path, options.max_record_bytes, options.remote_settings)
        storage = self._content.storage
        size = storage.size(path)
        if options.records == "file":
            self._starts, self._lengths = np.zeros(1, np.int64), np.array([-1 if self.whole else size])
        else:
            self._starts, self._lengths = spans_of(self._text(), paragraphs=options.records == "paragraph")
        self._file = storage.map(path, mapped=options.map) if size and not self.whole else None

    def _text(self) -> bytes | bytearray:
        """Return the text of the file, decompressed."""
        return self._cache.get(self._path, self._content.read) if self.whole else self._content.read()[0]

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return _FIELDS

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        names = tuple(_FIELDS) if fields is None else fields
        require_known(names, _FIELDS, self._path)
        starts, lengths = self._starts[indices], self._lengths[indices]
        check_lengths(lengths, self._options.max_record_bytes, indices, self._path)
        if self._file is not None:
            found = self._file.copies(starts, lengths)
        else:
            text = self._text() if self.whole else b""
            stops = np.where(lengths < 0, len(text), starts + lengths)
            found = [bytes(text[i:j]) for i, j in zip(starts.tolist(), stops.tolist(), strict=True)]
        records: list[Record] = []
        for index, start, data in zip(indices.tolist(), starts.tolist(), found, strict=True):
            try:
                record = {"text": (data if start else data.removeprefix(_MARK)).decode(), "file": self._name}
            except UnicodeDecodeError as error:
                message = f"the text is not UTF-8: {error.reason}"
                raise CorruptFileError(message, path=self._path, offset=start + error.start, index=index) from error
            records.append({name: record[name] for name in names})
        return records

    def ranges(self, indices: Int64Array, fields: tuple[str, ...] | None) -> tuple[Int64Array, Int64Array] | None:  # noqa: ARG002 - records are read whole
        return None if self.whole else (self._starts[indices], self._lengths[indices])

    def release(self) -> None:
        if self._file is not None:
            self._file.release()


def spans_of(text: bytes | bytearray, *, paragraphs: bool) -> tuple[Int64Array, Int64Array]:
    """Return offsets and lengths of the lines or paragraphs of a text, without line breaks at their ends."""
    data = np.frombuffer(text, np.uint8)
    stops = np.append(np.flatnonzero(data == ord("\n")), len(data))
    starts = np.concatenate(([0], stops[:-1] + 1))
    has_return = (stops > starts) & (data[np.maximum(stops, 1) - 1] == ord("\r")) if len(data) else stops > starts
    stops = stops - has_return
    filled = stops > starts
    if not paragraphs:
        return starts[filled], (stops - starts)[filled]
    begins = filled & ~np.concatenate(([False], filled[:-1]))
    ends = filled & ~np.append(filled[1:], False)
    return starts[begins], stops[ends] - starts[begins]
