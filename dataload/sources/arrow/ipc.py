"""The offsets of columns in an Arrow IPC file or stream, from its metadata, without pyarrow. Pure (no I/O).

pyarrow would map the file, without a guard for its reads, and could not read a record without its batch.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dataload._util.caches import Memo
from dataload.errors import CorruptFileError, UnsupportedFormatError
from dataload.types import Int64Array

FILE_MAGIC = b"ARROW1"
STREAM_MAGIC = b"\xff\xff\xff\xff"
"""Begins each message."""

_HEADER = struct.Struct("<4si")
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # types of messages
_INVALID = (struct.error, ValueError, IndexError, OverflowError)
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("_", "<i4"), ("body", "<i8")])
_PREFIX = 8  # bytes before the metadata of a message
_MESSAGE = struct.Struct("<I6HiIhB5xq")  # place of the table, its fields' places, and the table
_START, _FOOT = 8, 10  # bytes of a file before its messages, and after its footer
_MOST_KNOWN = 64  # messages of a file whose metadata are compared
_HEAD_BYTES = 2048  # read at once; the first messages are mostly in it
_END_BYTES = 2048  # likewise, for the footer

Read = Callable[[int, int], bytes]
"""A function from an offset and a length to the bytes there, or fewer at the end of the file."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message: a batch of records, or of values of the dictionary with number `dictionary`; sizes in bytes.

    Its prefix starts at `offset`. `nodes` (length and nulls of each array, depth first) and `buffers` (offset in the
    body and length) take 8 bytes a number, see `pairs_of`. With `is_delta`, values are appended to the dictionary.
    """

    offset: int
    body: int
    body_length: int
    rows: int
    nodes: bytes
    buffers: bytes
    compressed: bool
    dictionary: int | None = None
    is_delta: bool = False


class Layout(NamedTuple):
    """The messages of a file, and it without records; `schema` is empty without one, as in files of Polars.

    Files of equal `form` have the same schema.
    """

    schema: bytes
    footer: bytes
    form: bytes
    dictionaries: Sequence[Message]
    batches: Sequence[Message]

    def ranges(self, size: int) -> list[tuple[int, int]] | None:
        """Return offsets and lengths of all but the bodies of batches, in a file of `size` bytes; None of streams."""
        if not self.footer:
            return None
        heads = [(each.offset, each.body - each.offset) for each in self.batches]
        return [(0, _START + len(self.schema)), *heads, (size - len(self.footer) + _START, len(self.footer) - _START)]


def is_arrow(head: bytes) -> bool:
    """Return whether a file begins as an Arrow file, or as a stream: with a message of less than 256 MB."""
    return head.startswith(FILE_MAGIC + b"\0\0") or (head[:4] == STREAM_MAGIC and head[7:8] in (b"\0", b"\x01"))


def parse_layout(read_file: Read, size: int, path: str, known: Memo[tuple[bytes, Layout]] | None = None) -> Layout:
    """Return the layout of a file or stream of `size` bytes, or the `known` one if it has the same metadata."""
    head = read_file(0, min(size, _HEAD_BYTES))
    if not head.startswith(FILE_MAGIC):
        return _parse_stream(read_file, size, path)

    tail = max(len(head), size - _END_BYTES)
    end = read_file(tail, size - tail)

    def read(offset: int, length: int) -> bytes:
        if offset >= tail:
            return end[offset - tail : offset - tail + length]
        return head[offset : offset + length] if offset + length <= len(head) else read_file(offset, length)

    last = (head + end)[-_FOOT:]
    length = int.from_bytes(last[:4], "little")
    if last[4:] != FILE_MAGIC or length > size - _FOOT - _START:
        raise CorruptFileError("the file has no valid end: it was truncated", path=path, offset=size)
    footer = read(size - _FOOT - length, length)
    if known is not None and (found := known.recall((size, footer))) and found[0] == _metadata(read, found[1]):
        return found[1]
    try:
        root = _Table.root(footer)
        vectors = [root.vector(number) for number in (2, 3)]
        blocks = [np.frombuffer(footer, _BLOCK, *vector).tolist() for vector in vectors]
        big_endian = _is_big_endian(root.table(1))
    except _INVALID as error:
        raise CorruptFileError(f"the footer is damaged: {error}", path=path, offset=size - _FOOT - length) from error
    if big_endian:
        raise _big_endian_error(path)
    several = [[_Part.read(read, offset, size, path).message(path) for offset, *_ in each] for each in blocks]
    if any((found.dictionary is None) != bool(kind) for kind, each in enumerate(several) for found in each):
        raise CorruptFileError("the footer takes one kind of batch for another", path=path)
    _check([*several[0], *several[1]], path)
    schema = b""
    if read(_START, len(STREAM_MAGIC)) == STREAM_MAGIC:
        schema = read(_START, _Part.read(read, _START, size, path).body - _START)
    form = bytearray(footer)
    for count, start in vectors:
        form[start : start + count * _BLOCK.itemsize] = bytes(count * _BLOCK.itemsize)
    layout = Layout(schema, FILE_MAGIC + bytes(2) + footer + last, bytes(form), *several)
    if known is not None and sum(map(len, several)) <= _MOST_KNOWN:
        known.keep((size, footer), (_metadata(read, layout), layout))
    return layout


def schema_message(layout: Layout) -> bytes:
    """Return the message with which a stream of the file's batches begins. Polars writes none at the start of a file.

    pyarrow would number dictionaries anew, and fields may share one.
    """
    if layout.schema:
        return layout.schema
    footer = layout.footer[_START:-_FOOT]
    root = _Table.root(footer)
    schema = root.table(1)
    if schema is None:
        raise ValueError("the footer has no schema")
    # A table of Flatbuffers, whose offsets are relative: version, type and place of the header, no body.
    place = _MESSAGE.size - 20 + schema.at
    message = _MESSAGE.pack(16, 12, 24, 8, 10, 4, 16, 12, place, root.number(0, "h"), _SCHEMA, 0) + footer
    message += bytes(-len(message) % 8)
    return STREAM_MAGIC + len(message).to_bytes(4, "little") + message


def _metadata(read: Read, layout: Layout) -> bytes:
    """Return the schema and what lies before the bodies of all messages, if they are where `layout` has them."""
    messages = [read(each.offset, each.body - each.offset) for each in (*layout.dictionaries, *layout.batches)]
    return b"".join([read(_START, len(layout.schema)), *messages])


def _parse_stream(read: Read, size: int, path: str) -> Layout:
    parts = list(_walk(read, size, path))
    if not parts:
        raise CorruptFileError("the stream has no schema", path=path, offset=0)
    try:
        big_endian = _is_big_endian(parts[0].table.table(2))
    except _INVALID as error:
        raise CorruptFileError(f"the schema is damaged: {error}", path=path, offset=0) from error
    if big_endian:
        raise _big_endian_error(path)
    messages = [part.message(path) for part in parts[1:]]
    _check(messages, path)
    dictionaries = [found for found in messages if found.dictionary is not None]
    schema = read(0, parts[0].body)
    return Layout(schema, b"", schema, dictionaries, [found for found in messages if found.dictionary is None])


def _is_big_endian(schema: "_Table | None") -> bool:
    return schema is not None and schema.number(0, "h") != 0


def _big_endian_error(path: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{path} has big-endian values: write it anew, with pyarrow, which swaps them", path=path
    )


def _walk(read: Read, size: int, path: str) -> "Iterator[_Part]":
    offset = 0
    while (head := read(offset, _PREFIX)) != STREAM_MAGIC + bytes(4):
        if not head:
            raise CorruptFileError("the stream has no end: it was truncated", path=path, offset=offset)
        part = _Part.read(read, offset, size, path)
        yield part
        offset = part.body + part.length


def pairs_of(several: Sequence[bytes]) -> Int64Array:
    """Return the pairs of numbers in `Message.nodes` or `Message.buffers` of several messages, (pairs, 2) int64."""
    return np.frombuffer(b"".join(several), "<i8").reshape(-1, 2)


def _check(messages: Sequence[Message], path: str) -> None:
    """Check the numbers of all messages at once."""
    buffers, nodes = (pairs_of([getattr(each, name) for each in messages]) for name in ("buffers", "nodes"))
    counts = [[len(each.buffers) // 16 for each in messages], [len(each.nodes) // 16 for each in messages]]
    sizes = np.repeat([each.body_length for each in messages], counts[0])
    bad = (buffers < 0).any(axis=1) | (buffers[:, 0] > sizes - buffers[:, 1])
    negative = (nodes < 0).any(axis=1)
    for each in messages:
        if each.rows < 0:
            raise CorruptFileError("a batch has a negative number of rows", path=path, offset=each.offset)
    for wrong, count in zip((bad, negative), counts, strict=True):
        if wrong.any():
            number = int(np.searchsorted(np.cumsum(count), np.argmax(wrong), side="right"))
            message = "a message of Arrow is damaged: a buffer or an array is outside of it"
            raise CorruptFileError(message, path=path, offset=messages[number].offset)


def _number(form: str, data: bytes, at: int) -> int:
    [found] = struct.unpack_from(form, data, at)
    return found


class _Table:
    """A table of Flatbuffers."""

    __slots__ = ("_data", "_fields", "at")

    def __init__(self, data: bytes, at: int) -> None:
        if at < 0:
            raise ValueError("a table before the start")
        self._data, self.at = data, at
        vtable = at - _number("<i", data, at)
        if vtable < 0:
            raise ValueError("a table without fields")
        size = _number("<H", data, vtable)
        self._fields: tuple[int, ...] = struct.unpack_from(f"<{max(0, size // 2 - 2)}H", data, vtable + 4)

    @classmethod
    def root(cls, data: bytes) -> "_Table":
        return cls(data, _number("<I", data, 0))

    def number(self, field: int, kind: str) -> int:
        """Return a scalar in the format `kind` of `struct`; 0 if it is absent."""
        at = self._where(field)
        return 0 if at is None else _number(f"<{kind}", self._data, at)

    def table(self, field: int) -> "_Table | None":
        at = self._where(field)
        return None if at is None else _Table(self._data, self._target(at))

    def vector(self, field: int) -> tuple[int, int]:
        """Return the number of items of a vector, and the offset of the first."""
        at = self._where(field)
        if at is None:
            return 0, 0
        start = self._target(at)
        return _number("<I", self._data, start), start + 4

    def pairs(self, field: int) -> bytes:
        count, start = self.vector(field)
        found = self._data[start : start + 16 * count]
        if len(found) < 16 * count:
            raise ValueError("a vector is outside of its message")
        return found

    def _where(self, field: int) -> int | None:
        offset = self._fields[field] if field < len(self._fields) else 0
        return self.at + offset if offset else None

    def _target(self, at: int) -> int:
        return at + _number("<I", self._data, at)


class _Part(NamedTuple):
    """The metadata of a message."""

    table: _Table
    offset: int
    body: int
    length: int

    @classmethod
    def read(cls, read: Read, offset: int, size: int, path: str) -> "_Part":
        head = read(offset, _PREFIX) if 0 <= offset < size else b""
        if len(head) < _PREFIX or head[:4] != STREAM_MAGIC:
            raise CorruptFileError(f"expected a message of Arrow, found {head[:4]!r}", path=path, offset=offset)
        length = _HEADER.unpack(head)[1]
        body = offset + _PREFIX + length
        if length <= 0 or body > size:
            message = f"a message of Arrow claims {length} bytes of metadata: the file is truncated or damaged"
            raise CorruptFileError(message, path=path, offset=offset)
        try:
            table = _Table.root(read(offset + _PREFIX, length))
            body_length = table.number(3, "q")
        except _INVALID as error:
            raise CorruptFileError(f"a message of Arrow is damaged: {error}", path=path, offset=offset) from error
        if not 0 <= body_length <= size - body:
            message = f"a message of Arrow claims {body_length} bytes, but only {size - body} exist: it was truncated"
            raise CorruptFileError(message, path=path, offset=offset)
        return cls(table, offset, body, body_length)

    def message(self, path: str) -> Message:
        try:
            kind, header = self.table.number(1, "B"), self.table.table(2)
            if header is None or kind not in (_DICTIONARY, _BATCH):
                raise ValueError(f"it is of type {kind}")
            batch, number, is_delta = header, None, False
            if kind == _DICTIONARY:
                number, is_delta, batch = header.number(0, "q"), bool(header.number(2, "B")), header.table(1)
            if batch is None:
                raise ValueError("a dictionary without values")
            rows, nodes, buffers = batch.number(0, "q"), batch.pairs(1), batch.pairs(2)
            compressed = batch.table(3) is not None
        except _INVALID as error:
            raise CorruptFileError(f"a message of Arrow is damaged: {error}", path=path, offset=self.offset) from error
        return Message(self.offset, self.body, self.length, rows, nodes, buffers, compressed, number, is_delta)
