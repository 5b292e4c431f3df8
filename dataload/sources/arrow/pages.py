"""What the pages of a Parquet file claim, which pyarrow allocates before it looks at their data. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from dataload.sources.arrow.ipc import Read

_DICTIONARY, _DATA, _DATA_2 = 2, 5, 8  # a type of page; fields of headers
_NUMBERS, _PREFIXES = (2, 8), 7  # encodings: numbers of values in the dictionary; text that begins as the one before
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4}  # bytes of a value; of text, of its offset
_DEPTH = 12  # of structs and lists
_USUAL_HEADER, _LONGEST_HEADER = 4096, 1 << 20  # bytes


class _Chunk(NamedTuple):
    """A column in a row group: its number of values, and where its pages are."""

    values: int
    size: int
    start: int


class Claim(NamedTuple):
    """What the numbers or texts of a column claim in a row group.

    Attributes:
        values: Number of values, nulls included.
        bytes: Bytes of its pages; or of its numbers and the offsets of its texts, if that is more.
        numbered: Texts that are numbers of values in the dictionary.
        dictionary: Bytes of the dictionary.
        prefixed: Bytes of the largest page of texts that begin as those before.
    """

    values: int
    bytes: int
    numbered: int
    dictionary: int
    prefixed: int


def read_chunks(read: Read, size: int) -> list[list[_Chunk]]:
    """Return where the pages of each row group's columns are; an error of Python if that is damaged."""
    length = int.from_bytes(read(size - 8, 4), "little")
    footer = read(size - 8 - length, length)
    groups: list[list[_Chunk]] = []

    def column(at: int) -> int:
        fields, at = _struct(footer, at)
        found = fields[3]
        groups[-1].append(_Chunk(found[5], found[7], min(found[9], found.get(11) or found[9])))
        return at

    def group(at: int) -> int:
        groups.append([])
        return _struct(footer, at, {1: column})[1]

    _struct(footer, 0, {4: group})
    if sum(max(0, chunk.size) for group in groups for chunk in group) > size:
        raise ValueError("the columns claim more bytes than the file has")
    return groups


def claim_of(read: Read, chunk: _Chunk, column: Any) -> Claim:
    """Return what a column of pyarrow's schema claims, from its metadata and the headers of its pages."""
    values = numbered = dictionary = prefixed = stored = texts = 0
    nested = column.max_repetition_level > 0
    for page, data in _pages(read, chunk):
        encoding = data.get(4 if _DATA_2 in page else 2) if column.physical_type == "BYTE_ARRAY" else None
        stored += page[2]
        if page[1] == _DICTIONARY:
            dictionary, texts = page[2], texts + 16 * page[7][1]
        elif encoding in _NUMBERS:
            if numbered < values:
                raise ValueError("a page of numbers in a dictionary follows one of text")
            numbered += data[1]
        elif encoding == _PREFIXES:
            prefixed = max(prefixed, page[2])
            texts += nested * data[1] * page[2]  # of a record, they cannot be decoded piece by piece
        values += data[1]
    fixed = column.physical_type == "FIXED_LEN_BYTE_ARRAY"
    width = (column.length if fixed else _WIDTHS.get(column.physical_type, 8)) + 4 * nested
    return Claim(values, max(stored, values * width) + texts, numbered, dictionary, prefixed)


def _pages(read: Read, chunk: _Chunk) -> Iterator[tuple[dict[int, Any], dict[int, Any]]]:
    """Yield the headers of pages as pyarrow finds them, and what each says of its values."""
    at, stop, values = chunk.start, chunk.start + chunk.size, 0
    while values < chunk.values and at < stop:
        try:
            page, length = _struct(read(at, min(_USUAL_HEADER, stop - at)), 0)
        except IndexError:  # long statistics
            page, length = _struct(read(at, min(_LONGEST_HEADER, stop - at)), 0)
        data = page.get(_DATA) or page.get(_DATA_2) or {1: 0}
        if min(page[2], page[3], data[1], page.get(7, {1: 0})[1]) < 0:
            raise ValueError("a page claims a negative size")
        yield page, data
        values += data[1]
        at += length + page[3]


def _struct(
    data: bytes, at: int, items: Mapping[int, Callable[[int], int]] | None = None, depth: int = _DEPTH
) -> tuple[dict[int, Any], int]:
    """Parse a struct of Thrift's compact protocol; return its integers, truths and structs by field, and its end.

    The structs in a list, a field in `items`, are parsed by a function that takes and returns a position.
    """
    if not depth:
        raise ValueError("too many structs within each other")
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        kind = head & 15
        if head >> 4:
            number, at = number + (head >> 4), at + 1
        else:
            number, at = _integer(data, at + 1)
        if 4 <= kind <= 6:
            value = data[at]
            if value > 127:
                fields[number], at = _integer(data, at)
            else:
                fields[number], at = value >> 1 ^ -(value & 1), at + 1
        elif kind <= 2:
            fields[number] = kind == 1
        elif kind == 12:
            fields[number], at = _struct(data, at, None, depth - 1)
        elif kind == 9 and items and number in items:
            kind, count, at = _list(data, at)
            if kind != 12:
                raise ValueError(f"a list of the type {kind}")
            for _ in range(count):
                at = items[number](at)
        else:
            at = _skip(data, at, kind, depth)
    return fields, at + 1


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return the end of a value."""
    if kind == 8:
        size, at = _varint(data, at)
        at += size
    elif kind in (3, 7):
        at += 1 if kind == 3 else 8
    elif kind in (4, 5, 6):
        at = _varint(data, at)[1]
    elif kind == 12:
        at = _struct(data, at, None, depth)[1]
    elif kind in (9, 10) and depth:
        kind, count, at = _list(data, at)
        for _ in range(count):
            at = _skip(data, at, kind, depth - 1)
    else:
        raise ValueError(f"a field of the type {kind}")
    if at > len(data):
        raise IndexError("it ends in a value")
    return at


def _list(data: bytes, at: int) -> tuple[int, int, int]:
    """Return type and number of the items of a list, and where they begin; a truth takes a byte here."""
    head, at = data[at], at + 1
    count, at = (head >> 4, at) if head >> 4 < 15 else _varint(data, at)
    return max(3, head & 15), count, at


def _integer(data: bytes, at: int) -> tuple[int, int]:
    number, at = _varint(data, at)
    return number >> 1 ^ -(number & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value, at
