"""Parse and build DALI's text index of a tar archive (``X.idx`` beside ``X.tar``). No I/O.

The first line is ``v1.2 <samples>``. Each further line is a sample: ``<extension> <offset> <size> <name>`` for every
component, where the offset points to the data. v1.1 has no names, nor does v1.2 as DALI's documentation shows
it. Any white space separates words; lines after the last sample are ignored.

The bytes equal DALI's wds2idx.py, except where wds2idx.py is wrong: its offsets of members with GNU long names are too
low, it omits contiguous files (type 7), ignores the last character of a name without a dot, and loses members after a
single block of zeros.
"""

import re
from array import array
from collections.abc import Iterable

import numpy as np

from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.tar.header import BLOCK, Member
from dataload.sources.tar.samples import Keys, SampleTable, build_table, decode_name, split_name
from dataload.storage.core import core

_VERSION = "v1.2"
_FIELDS = {b"v1.2": (4, 3), b"v1.1": (3,)}  # words for each component
_MOST_DIGITS = 18  # the most that always fit in int64
_HEAD = re.compile(rb"[ \t\v\f\r]*(\S+)[ \t\v\f\r]+\+?(-?\d+)")


def index_path(path: str) -> str:
    """Return the path of an archive's index by DALI's convention: ``.idx`` instead of ``.tar``."""
    return f"{path[:-4] if path.endswith('.tar') else path}.idx"


def build_head(samples: int) -> bytes:
    """Return the first line."""
    return f"{_VERSION} {samples}\n".encode()


def build_line(members: Iterable[Member]) -> bytes:
    """Return the line of one sample; a name with white space or without extension is a ConfigError."""
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
