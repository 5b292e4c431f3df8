"""Write tar archives for WebDataset and DALI, and DALI's index files."""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from os import PathLike, fspath
from typing import Any, ClassVar, cast

import numpy as np

from dataload.codecs import npz
from dataload.codecs.decoders import known_extension
from dataload.codecs.npz import build_npy, npy_layout
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.options import build_recorded
from dataload.sources.tar import KEY, TarWriterOptions
from dataload.sources.tar.header import BLOCK, END, Member, build_comment, build_header, padded, scan
from dataload.sources.tar.samples import decode_name, split_name
from dataload.sources.tar.table import build_head, build_line, index_path
from dataload.sources.writer import IndexedWriter, require_fields
from dataload.storage import Remote, storage_of
from dataload.storage.errors import write_errors

_BYTES = (bytes, bytearray, memoryview)
_PADDING = bytes(BLOCK)
_AT_ONCE = 1 << 20


class TarWriter(IndexedWriter):
    """Writes one archive; the same records give the same bytes.

    Each value becomes a file named key, dot, extension. Arrays are stored as ``.npy``, int as ``.cls``, text as
    ``.txt``, bytes unchanged, and float, bool and other values that JSON can represent as ``.json``. A field whose own
    name ends in such an extension keeps it (``"cls"``, ``"caption.txt"``; ``"jpg"`` for bytes). If the first record
    has a value that is not bytes, the archive says so in a PAX comment: `dataload.open` then reads records back as they
    were, and images are bytes unless ``decode="auto"`` is passed.

    Options: `TarWriterOptions`.
    """

    options_type: ClassVar[Any] = TarWriterOptions

    def _begin(self, options: TarWriterOptions) -> None:
        self._begin_index(index_path(self.path))
        self._indexed = options.index
        self._lines = bytearray()  # of the index, kept in memory because its first line has their number
        self._make_key = options.key or _default_key
        self._last_key: bytes | None = None
        self._position = self._written = 0
        self._parts: list[bytes] = []  # what is in the archive between both
        self._stream = self._part.create()

    def _write(self, record: Any) -> None:
        record = require_fields(record, "tar")
        key = _check_key(self._make_key(len(self), record), self._indexed)
        if key == self._last_key:
            message = f"record {len(self)} has the key of the one before, {decode_name(key)!r}: both are one sample"
            raise ConfigError(message, key=KEY)
        files = _encode(record, key, self._indexed)
        if not files:
            raise ConfigError(f"record {len(self)} has no fields: a sample without files cannot be stored")
        parts: list[bytes] = []
        if not len(self) and any(name != KEY and not isinstance(value, _BYTES) for name, value in record.items()):
            parts.append(build_comment(build_recorded({"decode": "written"})))
        position = self._position + sum(map(len, parts))
        words: list[bytes] = []  # of the line of the index, as `build_line` makes it
        for name, data in files.items():
            header, size = build_header(name, len(data)), len(data)
            parts += header, data, _PADDING[: -size % BLOCK]
            position += len(header)
            words.append(b"%s %d %d %s" % (name[len(key) + 1 :], position, size, name))
            position += padded(size)
        self._parts += parts
        self._position = position
        self.stored_bytes = position
        if position - self._written >= _AT_ONCE:
            self._flush()
        self._last_key = key
        if self._indexed:
            self._lines += b" ".join(words) + b"\n"

    def _flush(self) -> None:
        # Joined, they are written in one call. What is large anyway is not copied.
        small = self._position - self._written < 2 * _AT_ONCE
        self._stream.writelines([b"".join(self._parts)] if small else self._parts)
        self._parts.clear()
        self._written = self._position

    def _finish(self) -> None:
        self._flush()
        with self._stream as stream:
            stream.write(END)
        # All but the renames is done before them, so that an archive is without an index for a moment only.
        self._finish_index((build_head(len(self)), self._lines) if self._lines else None)

    def _discard(self) -> None:
        self._stream.close()


def _default_key(number: int, record: Mapping[str, Any]) -> str:
    return record.get(KEY, f"{number:08d}")


def _check_key(key: Any, indexed: bool) -> bytes:
    """Encode a key; raise a ConfigError if files with that name would not form one sample with that key."""
    if not isinstance(key, str):
        raise ConfigError(f"the key of a sample must be text, got {key!r} ({type(key).__name__})", key=KEY, value=key)
    base = key.rpartition("/")[2]
    if not base or "." in base or "\0" in key:
        message = f"{key!r} cannot be the key of a sample: its last part must be a file name without a dot"
        raise ConfigError(message, key=KEY, value=key)
    return _check_name(key, f"the key {key!r}", indexed)


def _check_name(name: str, what: str, indexed: bool) -> bytes:
    try:
        encoded = name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not valid text: {error.reason}", value=name) from error
    if indexed and encoded.split() != [encoded]:
        message = f"{what} contains white space, which DALI's index does not allow: rename it, or pass index=False"
        raise ConfigError(message, value=name)
    return encoded


def _encode(record: Mapping[str, Any], key: bytes, indexed: bool) -> dict[bytes, bytes]:
    """Return the files of a sample, name -> content; raise a ConfigError if a field cannot be stored."""
    files: dict[bytes, bytes] = {}
    for field, value in record.items():
        if field == KEY:
            continue
        if not field or "/" in field or "\0" in field:
            raise ConfigError(f"field {field!r} cannot be part of a file name", key=field)
        extension, data = encode_field(field, value)
        name = key + b"." + _check_extension(extension, field, indexed)
        if name in files:
            raise ConfigError(f"field {field!r} and another one would both be stored as {extension!r}", key=field)
        files[name] = data
    return files


@lru_cache(1 << 10)
def _check_extension(extension: str, field: str, indexed: bool) -> bytes:
    return _check_name(extension, f"the name of field {field!r}", indexed)


def encode_field(name: str, value: Any) -> tuple[str, bytes]:
    """Return the extension and bytes of a value, see `TarWriter`; raise a ConfigError if it cannot be stored."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return name, bytes(value)
    known = known_extension(name)
    kind = _kind(name, value)
    if known is not None and kind in _FITS.get(known.name, ()):
        return name, _encode_as(known.name, name, value)
    return f"{name}.{kind}", _encode_as(kind, name, value)


_FITS = {
    "cls": ("cls",),
    "json": ("json", "cls", "txt"),
    "npy": ("npy",),
    "npz": ("npz",),
    "txt": ("txt",),
}
"""Decoder named by a field -> kinds of values that it restores."""


def _kind(name: str, value: Any) -> str:
    """Return the extension for a value by its type."""
    if isinstance(value, (np.ndarray, np.generic)):
        return "npy"
    if isinstance(value, str):
        return "txt"
    if isinstance(value, int) and not isinstance(value, bool):
        return "cls"
    if isinstance(value, (bool, float, list, tuple, Mapping)):
        items = cast("Mapping[Any, Any]", value).values() if isinstance(value, Mapping) else ()
        return "npz" if any(isinstance(item, (np.ndarray, bytes)) for item in items) else "json"
    message = f"field {name!r} is of type {type(value).__name__}, which tar archives do not store"
    raise ConfigError(f"{message}: give an array, bytes, text, a number, or a value that JSON can represent", key=name)


def _encode_as(kind: str, name: str, value: Any) -> bytes:
    try:
        if kind == "npy":
            data = build_npy(np.asarray(value))
            npy_layout(data)  # refuses what would not be read back, such as bfloat16
            return data
        if kind == "npz":
            return npz.encode(value)
        if kind == "json":
            return json.dumps(value).encode()
        return str(value).encode()
    except ConfigError:
        raise
    except (CorruptFileError, ValueError, TypeError) as error:  # such as an object array, or a set in a list
        raise ConfigError(f"field {name!r} cannot be stored as {kind}: {error}", key=name) from error


def write_index(
    path: str | PathLike[str],
    index: str | PathLike[str] | None = None,
    *,
    overwrite: bool = True,
    strict: bool = True,
    remote: Remote | None = None,
) -> int:
    """Write DALI's index of an archive, by default ``X.idx`` beside ``X.tar``; return the number of samples.

    An archive that does not end with blocks of zeros is indexed with a warning, because it may have been cut off.
    `strict` refuses an archive in which files would be lost or samples split: a sample that continues after another
    one, or has two files with the same extension. Otherwise the index lists adjacent files, as DALI's own tool does.
    """
    archive = fspath(path)
    target = index_path(archive) if index is None else fspath(index)
    lines: list[bytes] = []
    with storage_of(target, remote).create(target, overwrite=overwrite) as part:
        seen: set[bytes] | None = set() if strict else None
        for key, members in _samples(archive, remote):
            if seen is not None:
                _check_sample(key, members, seen, archive)
            try:
                lines.append(build_line(members))
            except ConfigError as error:
                raise ConfigError(f"{archive}: {error}") from error
        if not lines:
            raise ConfigError(f"{archive} holds no samples, and DALI's index cannot be empty: read it without an index")
        with write_errors(target):
            with part.create() as stream:
                stream.writelines([build_head(len(lines)), *lines])
            part.publish()
    return len(lines)


def _samples(path: str, remote: Remote | None) -> Iterator[tuple[bytes, list[Member]]]:
    """Yield the key and the members of each sample."""
    with storage_of(path, remote).open(path, whole=True) as file:
        members = scan(file.read, file.size, path)
        pairs = ((parts[0], member) for member in members if (parts := split_name(member.name)))
        for key, group in groupby(pairs, key=lambda pair: pair[0]):
            yield key, [member for _, member in group]


def _check_sample(key: bytes, members: list[Member], seen: set[bytes], path: str) -> None:
    if key in seen:
        raise CorruptFileError(
            f"sample {decode_name(key)!r} continues here after others, so it would be read as two samples: pack its "
            "files next to each other (GNU tar: --sort=name)",
            path=path,
            offset=members[0].offset - BLOCK,
        )
    seen.add(key)
    names: set[bytes] = set()
    for member in members:
        if member.name in names:
            message = f"a second {decode_name(member.name)!r} in one sample: only the first one would be read"
            raise CorruptFileError(message, path=path, offset=member.offset - BLOCK)
        names.add(member.name)
