"""Where the samples of an archive lie: from its index, checked against the archive, or by scanning it."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import takewhile
from typing import Literal

import numpy as np

from dataload.errors import CorruptFileError
from dataload.formats.tar import BLOCK, GREATEST_SIZE, REGULAR, OnDamage, padded, parse_header, scan
from dataload.formats.tar_index import index_path, parse_index
from dataload.formats.tar_samples import SampleTable, decode_name, group_members, split_name
from dataload.sources.files import file_errors
from dataload.sources.mapped import MappedFile

__all__ = ["load_table", "name_from_archive"]

_MEMBERS_VERIFIED = 16  # at even distances, the first and the last among them: a page fault each
_LONGEST_GAP = 1 << 20  # bytes between two components that are searched for the header of the second


def load_table(
    file: MappedFile, index: str | Literal[False] | None, *, on_damage: OnDamage, verify_index: bool
) -> SampleTable:
    """The samples of an archive.

    Args:
        file: The archive.
        index: Path of its index; None for the one beside it if there is one; False to scan.
        on_damage: See `scan`.
        verify_index: Compare some members with what the index says.

    Returns:
        Every component lies inside the archive.

    Raises:
        CorruptFileError: Archive or index contradict their format or each other.
        UnsupportedFormatError: The archive is compressed or holds sparse files.
    """
    if index is None:
        beside = index_path(file.path)
        index = beside if os.path.exists(beside) else False
    if index is False:
        return _scan(file, on_damage)
    with file_errors(index), open(index, "rb") as stream:
        table = parse_index(stream.read(), index, file.path)
    _check_bounds(table, file, index)
    if verify_index:
        _check_members(table, file, index)
    return table


def _scan(file: MappedFile, on_damage: OnDamage) -> SampleTable:
    # By pread, not through the map: a fault of a map reads the pages around it too.
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        members = scan(
            lambda offset, length: os.pread(descriptor, length, offset), file.size, file.path, on_damage=on_damage
        )
        return group_members(members)
    finally:
        os.close(descriptor)


def _check_bounds(table: SampleTable, file: MappedFile, index: str) -> None:
    ends = table.offsets(slice(None)) + table.lengths(slice(None))
    if int(ends.max()) <= file.size:
        return
    component = int(np.argmax(ends > file.size))
    offset, size = (int(numbers(np.array([component]))[0]) for numbers in (table.offsets, table.lengths))
    raise _stale(table, component, f"{size} bytes at {offset}, and the archive has {file.size}", file, index)


def _check_members(table: SampleTable, file: MappedFile, index: str) -> None:
    """Compare members spread over the index with their headers."""
    count = len(table.blocks)
    if int(table.blocks.min()) == 0:
        first = int(np.argmin(table.blocks))
        raise _stale(table, first, "a member at 0, where the first header stands", file, index)
    spread = np.unique(np.linspace(0, count - 1, min(count, _MEMBERS_VERIFIED)).astype(np.int64))
    for component, offset, size in zip(
        spread.tolist(), table.offsets(spread).tolist(), table.lengths(spread).tolist(), strict=True
    ):
        try:
            header = parse_header(file.copy(offset - BLOCK, BLOCK), file.path, offset - BLOCK)
        except CorruptFileError:
            raise _stale(
                table, component, f"a member at {offset}, and no header stands before it", file, index
            ) from None
        if header.kind not in REGULAR:
            raise _stale(table, component, f"a file at {offset}, and the header before it is of no file", file, index)
        if header.size != size and size <= GREATEST_SIZE:
            raise _stale(table, component, f"{size} bytes at {offset}, and the header says {header.size}", file, index)
        expected = _names(table, component)
        # Longer and non-ASCII names may stand in full elsewhere.
        if expected and header.name not in expected and all(len(n) <= 100 and n.isascii() for n in expected):
            found = decode_name(header.name)
            raise _stale(
                table, component, f"{expected[0].decode()!r} at {offset}, and the header says {found!r}", file, index
            )


def _names(table: SampleTable, component: int) -> tuple[bytes, ...]:
    """What a member may be called, given key and extension: without a dot they are the same."""
    if table.keys is None:
        return ()
    key, extension = table.keys.names(np.array([table.sample(component)]))[0], table.extensions[table.code(component)]
    names = (f"{key}.{extension}", key) if key == extension else (f"{key}.{extension}",)
    return tuple(name.encode("utf-8", "surrogateescape") for name in names)


def _stale(table: SampleTable, component: int, message: str, file: MappedFile, index: str) -> CorruptFileError:
    offset = int(table.offsets(np.array([component]))[0])
    sample = table.sample(component)
    return CorruptFileError(
        f"the index {index} (line {sample + 2}) puts {message}: the archive has changed since, or the index "
        f"belongs to another; make it anew: dataload index {file.path}",
        path=file.path,
        offset=offset,
        index=sample,
    )


def name_from_archive(table: SampleTable, component: int, file: MappedFile) -> str:
    """The key of a component whose index has no names.

    The header before the data holds the name, unless that is long or not ASCII: then it stands in a member before
    it, so headers are followed from the end of the component before.
    """
    offset = int(table.offsets(np.array([component]))[0])
    name = parse_header(file.copy(offset - BLOCK, BLOCK), file.path, offset - BLOCK).name
    start = 0
    if component:
        before = np.array([component - 1])
        start = int(table.offsets(before)[0]) + padded(int(table.lengths(before)[0]))
    if 0 < offset - BLOCK - start <= _LONGEST_GAP:
        members = scan(lambda place, length: file.copy(start + place, length), file.size - start, file.path)
        with suppress(CorruptFileError):  # the component before stands elsewhere, in an index in another order
            inside = takewhile(lambda member: start + member.offset <= offset, members)
            name = next((member.name for member in inside if start + member.offset == offset), name)
    parts = split_name(name)
    return decode_name(parts[0] if parts else name)
