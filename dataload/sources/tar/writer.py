"""Tar archives that WebDataset and DALI read, with DALI's index beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from os import PathLike, fspath
from typing import Any

from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.tar.fields import encode_field
from dataload.sources.tar.format import KEY, TarWriterOptions
from dataload.sources.tar.header import BLOCK, END, Member, build_header, padded, scan
from dataload.sources.tar.index import build_head, build_line, index_path
from dataload.sources.tar.samples import decode_name, split_name
from dataload.sources.writer import Writer, require_fields
from dataload.storage import storage_of


class TarWriter(Writer):
    """Writes one archive; the same records give the same bytes.

    Each value becomes a file called key, dot, extension. Arrays are stored as ``.npy``, int as ``.cls``, float,
    bool and what else JSON can say as ``.json``, text as ``.txt``, bytes as they are; and a field whose own name ends
    in such an extension keeps it (``"cls"``, ``"caption.txt"``; ``"jpg"`` for bytes). Read with ``decode="auto"`` the
    records come back as they were.

    Args:
        path: Destination.
        overwrite: Replace an archive that is there, and its index.
        options: See `TarWriterOptions`.

    Raises:
        ConfigError: Archive or index exist and `overwrite` is false; when writing, a key or a field cannot be stored.
    """

    options_type = TarWriterOptions

    def _begin(self, options: TarWriterOptions) -> None:
        self._index = _IndexWriter(index_path(self.path), overwrite=self._overwrite)
        self._indexed = options.index
        self._make_key = options.key or _default_key
        self._last_key: bytes | None = None
        self._position = 0
        self._stream = self._part.create()

    def _write(self, record: Any) -> None:
        record = require_fields(record, "tar")
        key = _check_key(self._make_key(len(self), record), self._indexed)
        if key == self._last_key:
            raise ConfigError(
                f"record {len(self)} has the key {decode_name(key)!r} of the one before it: they would be one sample",
                key=KEY,
            )
        files = _encode(record, key, self._indexed)
        if not files:
            raise ConfigError(f"record {len(self)} has no fields: a sample of no files cannot be stored")
        members: list[Member] = []
        position = self._position
        parts: list[bytes] = []
        for name, data in files.items():
            header = build_header(name, len(data))
            members.append(Member(name, position + len(header), len(data)))
            parts += header, data, bytes(padded(len(data)) - len(data))
            position += len(header) + padded(len(data))
        line = build_line(members) if self._indexed else b""
        self._stream.writelines(parts)
        self._position = position
        self._last_key = key
        self._index.write(line)

    def _finish(self) -> None:
        with self._stream as stream:
            stream.write(END)
        if self._overwrite:
            # First: no archive may ever stand beside the index of another, which would be believed.
            storage_of(self.path).remove(self._index.path)

    def _discard(self) -> None:
        self._stream.close()

    def close(self) -> None:
        """Put the archive in its place, and then its index. May be called twice."""
        if self._state != "open":
            return
        super().close()
        if self._indexed and len(self._index):
            self._index.close()
        else:
            self._index.abort()

    def abort(self) -> None:
        """Throw away what was written; the destination is untouched."""
        try:
            super().abort()
        finally:
            self._index.abort()


class _IndexWriter(Writer):
    """Writes an index from the lines of its samples, kept in memory: their number stands in the first line."""

    def _begin(self, options: Any) -> None:  # noqa: ARG002 - there are none
        self._lines = bytearray()

    def _write(self, record: bytes) -> None:
        self._lines += record

    def _finish(self) -> None:
        with self._part.create() as stream:
            stream.write(build_head(len(self)))
            stream.write(self._lines)


def _default_key(number: int, record: Mapping[str, Any]) -> str:
    return record.get(KEY, f"{number:08d}")


def _check_key(key: Any, indexed: bool) -> bytes:
    """A key as bytes.

    Raises:
        ConfigError: Files of that name would not make one sample with that key.
    """
    if not isinstance(key, str):
        raise ConfigError(f"the key of a sample is text, got {key!r} ({type(key).__name__})", key=KEY, value=key)
    base = key.rpartition("/")[2]
    if not base or "." in base or "\0" in key:
        raise ConfigError(
            f"{key!r} cannot be the key of a sample: the key ends at the first dot of a file's name", key=KEY, value=key
        )
    return _check_name(key, f"the key {key!r}", indexed)


def _check_name(name: str, what: str, indexed: bool) -> bytes:
    try:
        encoded = name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is no text: {error.reason}", value=name) from error
    if indexed and encoded.split() != [encoded]:
        raise ConfigError(
            f"{what} holds white space, which DALI's index cannot: rename it, or write without one by index=False",
            value=name,
        )
    return encoded


def _encode(record: Mapping[str, Any], key: bytes, indexed: bool) -> dict[bytes, bytes]:
    """The files of a sample: name -> content.

    Raises:
        ConfigError: A field has a name or a value that cannot be stored.
    """
    files: dict[bytes, bytes] = {}
    for field, value in record.items():
        if field == KEY:
            continue
        if not field or "/" in field or "\0" in field:
            raise ConfigError(f"field {field!r} cannot be the end of a file's name", key=field)
        extension, data = encode_field(field, value)
        name = key + b"." + _check_name(extension, f"the name of field {field!r}", indexed)
        if name in files:
            raise ConfigError(f"two fields would both be stored as {extension!r}; one of them is {field!r}", key=field)
        files[name] = data
    return files


def write_index(
    path: str | PathLike[str],
    index: str | PathLike[str] | None = None,
    *,
    overwrite: bool = True,
    strict: bool = True,
) -> int:
    """Write DALI's index of an archive, and check the archive on the way.

    An archive without the blocks of zeros that end one is indexed with a warning: it may have been cut off.

    Args:
        path: The archive.
        index: Where the index goes: by default ``X.idx`` beside ``X.tar``.
        overwrite: Replace an index that is there.
        strict: Refuse an archive some of whose files would silently be lost or torn apart: a sample that continues
            after another, or has two files of one extension. Otherwise the index lists what is adjacent, as DALI's own
            tool does.

    Returns:
        The number of samples.

    Raises:
        CorruptFileError: The archive is damaged, or `strict` refuses it.
        UnsupportedFormatError: It is compressed or holds a sparse file.
        ConfigError: The index cannot list it: a name holds white space or has no extension, or there is no sample.
        SourceNotFoundError: There is no such archive.
    """
    archive = fspath(path)
    with _IndexWriter(index_path(archive) if index is None else fspath(index), overwrite=overwrite) as writer:
        seen: set[bytes] | None = set() if strict else None
        for key, members in _samples(archive):
            if seen is not None:
                _check_sample(key, members, seen, archive)
            writer.write(_line(members, archive))
        if not len(writer):
            raise ConfigError(f"{archive} holds no samples, which DALI's index cannot say: read it without an index")
        return len(writer)


def _samples(path: str) -> Iterator[tuple[bytes, list[Member]]]:
    """Keys of the samples of an archive, and their files."""
    with storage_of(path).open(path) as file:
        members = scan(file.read, file.size, path, warn_without_end=True)
        parted = ((parts[0], member) for member in members if (parts := split_name(member.name)))
        for key, group in groupby(parted, key=lambda pair: pair[0]):
            yield key, [member for _, member in group]


def _line(members: list[Member], path: str) -> bytes:
    try:
        return build_line(members)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_sample(key: bytes, members: list[Member], seen: set[bytes], path: str) -> None:
    if key in seen:
        raise CorruptFileError(
            f"sample {decode_name(key)!r} continues here after others, and so would be two samples: pack its files one "
            "after another (GNU tar: --sort=name)",
            path=path,
            offset=members[0].offset - BLOCK,
        )
    seen.add(key)
    names: set[bytes] = set()
    for member in members:
        if member.name in names:
            raise CorruptFileError(
                f"a second {decode_name(member.name)!r} in one sample: only the first would be read",
                path=path,
                offset=member.offset - BLOCK,
            )
        names.add(member.name)
