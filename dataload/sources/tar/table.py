"""The sample table of an archive: from the cache, from DALI's text index (``X.idx`` beside ``X.tar``), or by a scan.

The first line of an index is ``v1.2 <samples>``. Each further line is a sample: ``<extension> <offset> <size> <name>``
for every component, where the offset points to the data. v1.1 has no names, nor does v1.2 as DALI's documentation
shows it. Any white space separates words; lines after the last sample are ignored.

The bytes equal DALI's wds2idx.py, except where wds2idx.py is wrong: its offsets of members with GNU long names are too
low, it omits contiguous files (type 7), ignores the last character of a name without a dot, and loses members after a
single block of zeros.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from dataload.catalog.arrays import IndexKey, recall, require, store_cached, within
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.options import parse_recorded
from dataload.sources.tar import OnDamage
from dataload.sources.tar.header import (
    BLOCK,
    GREATEST_SIZE,
    REGULAR,
    Member,
    is_plainly,
    padded,
    parse_comment,
    parse_header,
    scan,
)
from dataload.sources.tar.samples import Keys, SampleTable, build_table, decode_name, group_members, split_name
from dataload.storage import FileIdentity, RecordFile, Remote, base_name, storage_of
from dataload.storage.core import core, file_number
from dataload.storage.errors import file_errors
from dataload.storage.kept import CachedTable
from dataload.storage.local.record_files import ReopenedFile
from dataload.storage.paths import encoded_paths
from dataload.types import Array, Int64Array

_VERSION = "v1.2"
_FIELDS = {b"v1.2": (4, 3), b"v1.1": (3,)}  # words for each component
_MOST_DIGITS = 18  # the most that always fit in int64
_HEAD = re.compile(rb"[ \t\v\f\r]*(\S+)[ \t\v\f\r]+\+?(-?\d+)")


def index_path(path: str) -> str:
    """Return the path of an archive's index by DALI's convention: ``.idx`` instead of ``.tar``."""
    return f"{path[:-4] if path.endswith('.tar') else path}.idx"


def build_head(samples: int) -> bytes:
    """Return the first line of an index."""
    return f"{_VERSION} {samples}\n".encode()


def build_line(members: Iterable[Member]) -> bytes:
    """Return the line of one sample in an index; a name with white space or without extension is a ConfigError."""
    groups: list[bytes] = []
    for member in members:
        parts = split_name(member.name)
        extension = parts[1] if parts else b""
        if member.name.split() != [member.name] or not extension:
            what = "white space in its name" if extension else "no extension"
            raise ConfigError(
                f"member {decode_name(member.name)!r} (data at byte {member.offset}) has {what}, which DALI's index "
                "cannot represent: rename it, or read the archive without an index"
            )
        groups.append(b"%s %d %d %s" % (extension, member.offset, member.size, member.name))
    return b" ".join(groups) + b"\n"


def parse_index(text: bytes, path: str, archive: str = "TAR") -> SampleTable:
    """Parse the text of an index; offsets are not checked to be inside an archive."""
    try:
        return _parse_any(text)
    except _BadLine as error:
        line, message = error.args
        raise CorruptFileError(
            f"line {line}: {message}; rebuild the index: dataload index {archive}", path=path
        ) from None


class _BadLine(Exception):
    """The number of an invalid line, and its defect."""


def _parse_any(text: bytes) -> SampleTable:
    end = text.find(b"\n") if b"\n" in text else len(text)
    head = _HEAD.match(text[: min(end, 200)])
    version = head.group(1) if head else text[: min(end, 40)].strip()
    if version not in _FIELDS or head is None:
        raise _BadLine(1, f"expected 'v1.1' or 'v1.2' and the number of samples, found {text[: min(end, 40)]!r}")
    if len(head.group(2)) > _MOST_DIGITS or int(head.group(2)) < 1:
        raise _BadLine(1, f"the number of samples is {head.group(2).decode()[:40]}, expected 1 or more")
    for fields in _FIELDS[version]:
        if (found := core().tar_lines(text, min(end + 1, len(text)), int(head.group(2)), fields)) is not None:
            return table_of(*found)
    reasons: list[tuple[int, str]] = []  # not the errors, whose tracebacks would keep this frame alive
    for fields in _FIELDS[version]:
        try:
            return _parse_lines(text, end + 1, int(head.group(2)), fields)
        except _BadLine as error:
            reasons.append(error.args)
    raise _BadLine(*reasons[0])  # about the number of fields that the version should have


def table_of(
    extensions: bytes, codes: bytes, ends: bytes, blocks: bytes, sizes: bytes, keys: bytes, key_ends: bytes
) -> SampleTable:
    """Return the table that the core has parsed."""
    return SampleTable(
        tuple(map(decode_name, extensions.split())),
        np.frombuffer(codes, np.uint8),
        np.frombuffer(ends, np.uint32) if ends else None,
        np.frombuffer(blocks, np.uint32),
        np.frombuffer(sizes, np.uint32),
        Keys(keys, np.frombuffer(key_ends, np.uint32)) if key_ends else None,
    )


def _parse_lines(text: bytes, start: int, samples: int, fields: int) -> SampleTable:
    """Parse what the core does not: unusual white space, large numbers, and lines that are wrong, to say why."""
    extensions: dict[bytes, int] = {}
    codes, counts, blocks, sizes = array("L"), array("q"), array("q"), array("q")
    keys: list[bytes] = []
    lines = text[start:].removesuffix(b"\n").split(b"\n") if start < len(text) else []
    for number, line in enumerate(lines[:samples], 2):
        words = line.split()
        if not words:
            raise _BadLine(number, "an empty line, expected a sample")
        if len(words) % fields:
            raise _BadLine(number, f"{len(words)} words, expected {fields} for each component")
        for extension, offset, size in zip(words[::fields], words[1::fields], words[2::fields], strict=True):
            codes.append(extensions.setdefault(extension, len(extensions)))
            block, rest = divmod(_number(offset, "an offset", number), BLOCK)
            if rest:
                what = "is not the offset of a file: offsets are multiples of 512"
                raise _BadLine(number, f"{_shown(offset)} {what}")
            blocks.append(block)
            sizes.append(_number(size, "a size", number))
        counts.append(len(words) // fields)
        if fields == 4:
            directory, slash, base = words[3].rpartition(b"/")
            keys.append(directory + slash + base.partition(b".")[0])
    if len(counts) < samples:
        raise _BadLine(len(counts) + 2, f"the index ends here, after {len(counts)} of {samples} samples")
    return build_table(extensions, codes, counts, blocks, sizes, keys if fields == 4 else None)


def _number(word: bytes, what: str, line: int) -> int:
    if len(word) > _MOST_DIGITS:
        raise _BadLine(line, f"{_shown(word)} is {what} larger than any file")
    if not word.isdigit():
        raise _BadLine(line, f"{_shown(word)} is {what} that is not a number")
    return int(word)


def _shown(word: bytes) -> str:
    return repr(decode_name(word[:40]))


_MEMBERS_VERIFIED = 16  # evenly spaced, including the first and the last; each costs a page fault
_LEAST_CACHED = {True: 2_000, False: 100_000}
"""Components of the smallest table that is cached, by whether it was scanned. Making either takes about 30 ms."""
_OPENED_AT_ONCE = 256  # archives
_SHORTEST_COMPONENT = len("a 512 0 ")  # of an index
_LONGEST_GAP = 1 << 20  # bytes between two components that are searched for the header of the second


def find_recorded(path: str, remote: Remote | None) -> Mapping[str, Any] | None:
    """Return the reader options that our writer recorded in an archive; None if it is empty."""
    with storage_of(path, remote).open(path) as file:
        head = file.read(0, 2 * BLOCK)
        return parse_recorded(parse_comment(head), ("decode",)) if any(head) else None


def load_table(
    file: RecordFile,
    index: str | Literal[False] | None,
    *,
    on_damage: OnDamage,
    verify_index: bool,
    cache: bool = True,
    remote: Remote | None = None,
) -> SampleTable:
    """Load the sample table of an archive, whose components are all inside the archive; see `scan` for `on_damage`."""
    # `index` is the path of its index; None uses the one beside it, if any; False scans the archive.
    beside = index_path(file.path)
    if index is not False and isinstance(file, ReopenedFile):
        size, changed, place = file.identity
        versions = np.array([[size, changed, file_number(*place)]])
        for found in open_archives([file.path], [beside if index is None else index], versions, checks=verify_index):
            if found is not None:
                return found[1]
    if index is None:
        index = beside if storage_of(beside, remote).exists(beside) else False
    key = _key(file, index, remote) if cache and _may_be_large(file, index, remote) else None
    table = None if key is None else _load(key, file)
    if table is None:
        table = _make(file, index, on_damage, remote)
        # Without on_damage="error" a damaged archive should warn each time it is opened.
        if key is not None and on_damage == "error" and len(table.blocks) >= _LEAST_CACHED[index is False]:
            store_cached(key, _pack(table))
    if verify_index and index is not False:
        _check_members(table, file, index)
    return table


def open_archives(
    paths: Sequence[str], indexes: Sequence[str], versions: Int64Array, *, checks: bool
) -> Iterator[tuple[FileIdentity, SampleTable] | None]:
    """Yield the tables of local archives of known versions, see `versions_of`, all in few calls.

    None is for one that must be opened by itself, for example because it was changed or has an unusual index.
    """
    done = 0
    while done < len(paths):
        stop = min(done + _OPENED_AT_ONCE, len(paths))
        names = [encoded_paths(each[done:stop]) for each in (paths, indexes)]
        found = core().tar_open(*names, versions[done:stop], checks)
        for version, each in zip(versions[done:stop].tolist(), found, strict=False):
            yield None if each is None else (FileIdentity(version[0], version[1], each[:2]), table_of(*each[2]))
        done += len(found)


def _may_be_large(file: RecordFile, index: str | Literal[False], remote: Remote | None) -> bool:
    """Return whether so many components fit in the archive, or its index, that their table may be cached."""
    if index is False or file.size < BLOCK * _LEAST_CACHED[False]:
        return file.size >= BLOCK * _LEAST_CACHED[True] and index is False
    with file_errors(index):
        return storage_of(index, remote).identity(index)[0] >= _SHORTEST_COMPONENT * _LEAST_CACHED[False]


def _key(file: RecordFile, index: str | Literal[False], remote: Remote | None = None) -> IndexKey | None:
    if index is False:
        return IndexKey.of("tar", (file.path,), ("scanned",), remote=remote)
    options = () if index == index_path(file.path) else (base_name(index),)
    with file_errors(index):
        return IndexKey.of("tar", (file.path, index), options, remote=remote)


def _load(key: IndexKey, file: RecordFile) -> SampleTable | None:
    """Return the cached table if it fits the archive; the cache file may have been tampered with."""
    table = recall(key, _unpack) if key.files[0][0] == file.size else None
    return table if table is not None and _outside(table, file) is None else None


def _pack(table: SampleTable) -> CachedTable:
    arrays = {"codes": table.codes, "ends": table.ends, "blocks": table.blocks, "sizes": table.sizes}
    if table.keys is not None:
        arrays |= {"key_ends": table.keys.ends, "keys": np.frombuffer(table.keys.text, np.uint8)}
    kept = {name: array for name, array in arrays.items() if array is not None}
    return CachedTable(kept, {"extensions": table.extensions})


def _unpack(found: CachedTable) -> SampleTable:
    """Return the table that was packed, which must be a valid one."""
    arrays, names = found.arrays, found.extras["extensions"]
    require(isinstance(names, list))
    extensions = tuple(map(str, names))
    codes, blocks, sizes, ends = arrays["codes"], arrays["blocks"], arrays["sizes"], arrays.get("ends")
    # The sum of any offset and any size has to fit in int64.
    require(within(codes, len(extensions)), within(blocks, 2**53), within(sizes, 2**62), codes.dtype.kind == "u")
    count = len(blocks)
    if ends is None:
        samples = count // max(1, len(codes))
        require(samples * len(codes) == count == len(sizes))
    else:
        samples = len(ends)
        require(_rise(ends, count), count == len(codes) == len(sizes))
    keys = _unpack_keys(arrays["keys"], arrays["key_ends"], samples) if "keys" in arrays else None
    return SampleTable(extensions, codes, ends, blocks, sizes, keys)


def _unpack_keys(data: Array, ends: Array, samples: int) -> Keys:
    one_length = len(ends) == 1 and int(ends[0]) * samples == len(data)
    require(one_length or (len(ends) == samples and _rise(ends, len(data), least=0)))
    return Keys(data.tobytes(), ends)


def _rise(ends: Array, last: int, least: int = 1) -> bool:
    """Return whether each end is at least `least` more than the one before, and the last one is `last`."""
    steps = np.diff(ends.astype(np.int64), prepend=0)
    return int(steps.min()) >= least and int(ends[-1]) == last


def _make(file: RecordFile, index: str | Literal[False], on_damage: OnDamage, remote: Remote | None) -> SampleTable:
    if index is False:
        # Read instead of using the map: a page fault would also read the pages around it.
        with storage_of(file.path, remote).open(file.path, whole=True) as stream:
            return group_members(scan(stream.read, file.size, file.path, on_damage=on_damage))
    table = parse_index(storage_of(index, remote).read(index), index, file.path)
    component = _outside(table, file)
    if component is not None:
        offset, size = table.span(component)
        raise _stale(table, component, f"{size} bytes at {offset}, but the archive has {file.size}", file, index)
    return table


def _outside(table: SampleTable, file: RecordFile) -> int | None:
    """Return the number of the first component that is not inside the archive."""
    if not len(table.blocks) or int(table.blocks.max()) * BLOCK + int(table.sizes.max()) <= file.size:
        return None  # usually enough, and it makes no arrays
    outside = table.offsets(slice(None)) + table.lengths(slice(None)) > file.size
    return int(np.argmax(outside)) if outside.any() else None


def _check_members(table: SampleTable, file: RecordFile, index: str) -> None:
    """Compare members throughout the index with their headers."""
    if int(table.blocks.min()) == 0:
        first = int(np.argmin(table.blocks))
        raise _stale(table, first, "a member at 0, where the first header is", file, index)
    count = len(table.blocks)
    number = min(count, _MEMBERS_VERIFIED)
    components = np.arange(number) * (count - 1) // max(1, number - 1)
    headers = file.copies((table.blocks[components].astype(np.int64) - 1) * BLOCK, np.full(number, BLOCK))
    for component, data in zip(components.tolist(), headers, strict=True):
        difference = _difference(table, component, data, file.path)
        if difference is not None:
            raise _stale(table, component, difference, file, index)


def _difference(table: SampleTable, component: int, data: bytes, path: str) -> str | None:
    """Return a description of how a component differs from its header, `data`; None if it does not."""
    offset, size = table.span(component)
    expected = _names(table, component)
    if expected and is_plainly(data, expected[0], size):
        return None
    try:
        header = parse_header(data, path, offset - BLOCK)
    except CorruptFileError:
        return f"a member at {offset}, but there is no header before it"
    if header.kind not in REGULAR:
        return f"a file at {offset}, but the header before it is not of a file"
    if header.size != size and size <= GREATEST_SIZE:
        return f"{size} bytes at {offset}, but the header says {header.size}"
    # Longer names and names that are not ASCII may be in another header.
    if expected and header.name not in expected and all(len(n) <= 100 and n.isascii() for n in expected):
        return f"{expected[0].decode()!r} at {offset}, but the header says {decode_name(header.name)!r}"
    return None


def _names(table: SampleTable, component: int) -> tuple[bytes, ...]:
    """Return the possible names of a member, given its key and extension, which are equal for a name without a dot."""
    if table.keys is None:
        return ()
    key, extension = table.keys.names(np.array([table.sample(component)]))[0], table.extensions[table.code(component)]
    names = (f"{key}.{extension}", key) if key == extension else (f"{key}.{extension}",)
    return tuple(name.encode("utf-8", "surrogateescape") for name in names)


def _stale(table: SampleTable, component: int, message: str, file: RecordFile, index: str) -> CorruptFileError:
    sample = table.sample(component)
    return CorruptFileError(
        f"the index {index} (line {sample + 2}) puts {message}: the archive has changed since, or the index belongs to "
        f"another one; rebuild the index: dataload index {file.path}",
        path=file.path,
        offset=table.span(component)[0],
        index=sample,
    )


def name_from_archive(table: SampleTable, component: int, file: RecordFile) -> str:
    """Return the key of a component whose index has no names."""
    # The header before the data has the name, unless it is long or not ASCII. Then the name is in an extended header
    # before it, so headers are followed from the end of the previous component.
    offset = table.span(component)[0]
    if offset < BLOCK:
        raise CorruptFileError(
            f"the index puts a file at {offset}, where the first header is, so it has no name; rebuild the index: "
            f"dataload index {file.path}",
            path=file.path,
            offset=offset,
            index=table.sample(component),
        )
    name = parse_header(file.read(offset - BLOCK, BLOCK), file.path, offset - BLOCK).name
    start = 0
    if component:
        before, size = table.span(component - 1)
        start = before + padded(size)
    if 0 < offset - BLOCK - start <= _LONGEST_GAP:
        members = scan(lambda position, length: file.read(start + position, length), file.size - start, file.path)
        with suppress(CorruptFileError):  # in an index in another order, the previous component is elsewhere
            inside = takewhile(lambda member: start + member.offset <= offset, members)
            name = next((member.name for member in inside if start + member.offset == offset), name)
    parts = split_name(name)
    return decode_name(parts[0] if parts else name)
