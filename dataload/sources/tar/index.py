"""Parse and build DALI's text index of a tar archive (``X.idx`` beside ``X.tar``). No I/O.

The first line is ``v1.2 <samples>``. Each further line is a sample: ``<extension> <offset> <size> <name>`` for every
component, where the offset points to the data. v1.1 has no names, nor does v1.2 as DALI's documentation shows
it. Any white space separates words; lines after the last sample are ignored.

The bytes equal DALI's wds2idx.py, except where wds2idx.py is wrong: its offsets of members with GNU long names are too
low, it omits contiguous files (type 7), ignores the last character of a name without a dot, and loses members after a
single block of zeros.

The parser is vectorised. It takes a block of whole lines at a time, small enough for its arrays to stay in the
processor's cache, and converts each column of numbers with a few operations on eight digits at once.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.tar.header import BLOCK, Member
from dataload.sources.tar.samples import Keys, SampleTable, build_table, code_array, decode_name, narrow, split_name
from dataload.types import Array, BytesArray, Int64Array

_VERSION = "v1.2"
_FIELDS = {b"v1.2": (4, 3), b"v1.1": (3,)}  # words for each component
_BLOCK_BYTES = 1 << 19  # bytes of text parsed at once
_FEW_BYTES = 1 << 12  # of text, for which numpy's calls take longer than an expression
_PAD = 24  # bytes before the text, so that the 24 bytes that end with a word can always be read
_PAD_AFTER = 40  # bytes after the text, at least the bytes of a word that are compared
_MOST_DIGITS = 18  # the most that always fit in int64
_SHORT = 32  # bytes of an extension that are compared, eight at once
_FEW = 32  # extensions that are searched for one after another; beyond that a dict is faster
_HEAD = re.compile(rb"[ \t\v\f\r]*(\S+)[ \t\v\f\r]+\+?(-?\d+)")
_WORDS = rb"(\S+) (\d{1,%d}) (\d{1,%d})" % (_MOST_DIGITS, _MOST_DIGITS)
_COMPONENT = {  # extension, offset, size, key (a name up to the first dot of its last part), and what follows
    4: re.compile(_WORDS + rb" (?=\S)((?:\S*/)?[^\s/.]*)\S*([ \n])"),
    3: re.compile(_WORDS + rb"()([ \n])"),
}
_ODD_SPACES = (b"\t", b"\r", b"\v", b"\f")

_Words = npt.NDArray[np.uint64]
_ALL = 2**64 - 1


def _kept(lengths: range, last: bool) -> _Words:
    """Return masks for the eight bytes read of a word, from its start or its `last`, (4, lengths), little-endian."""
    counts = [[min(max(length - start, 0), 8) for length in lengths] for start in range(0, 32, 8)]
    masks = [[_ALL << (64 - 8 * n) & _ALL if last else (1 << 8 * n) - 1 for n in row] for row in counts]
    return np.array(masks, np.uint64)


_LAST = _kept(range(_MOST_DIGITS + 2), last=True)
_FIRST = _kept(range(_SHORT + 1), last=False)


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
    reasons: list[tuple[int, str]] = []  # not the errors, whose tracebacks would keep this frame alive
    for fields in _FIELDS[version]:
        try:
            return _parse(text, end + 1, int(head.group(2)), fields)
        except _BadLine as error:
            reasons.append(error.args)
    raise _BadLine(*reasons[0])  # about the number of fields that the version should have


class _Block(NamedTuple):
    """The samples of some lines."""

    counts: Int64Array  # (lines,) components
    codes: Array  # (components,)
    blocks: Array
    sizes: Array
    keys: bytes  # back to back
    key_lengths: Int64Array  # (lines,)


def _parse(text: bytes, start: int, samples: int, fields: int) -> SampleTable:
    if len(text) < _FEW_BYTES and (few := _parse_few(text, start, samples, fields)) is not None:
        return few
    extensions: dict[bytes, int] = {}
    parts: list[_Block] = []
    line = 0  # samples so far
    for lines in _blocks(text, start):
        parts.append(_parse_lines(lines, samples - line, fields, line + 2, extensions))
        line += len(parts[-1].counts)
        if line == samples:
            break
    if line < samples:
        raise _BadLine(line + 2, f"the index ends here, after {line} of {samples} samples")
    counts, codes, blocks, sizes, keys, key_lengths = zip(*parts, strict=True)
    return build_table(
        [decode_name(name) for name in extensions],
        code_array(np.concatenate(codes), len(extensions)),
        np.concatenate(counts),
        np.concatenate(blocks),
        np.concatenate(sizes),
        Keys.of_lengths(b"".join(keys), np.concatenate(key_lengths)) if fields == 4 else None,
    )


def _parse_few(text: bytes, start: int, samples: int, fields: int) -> SampleTable | None:
    """Parse a short text at once; None if a line is odd, so that the general way says what is wrong with it."""
    found, lines = _COMPONENT[fields].findall(text, start), text.count(b"\n", start)
    is_whole = lines + text.count(b" ", start) == len(found) * fields  # or a separator is of no component
    if lines != samples or not is_whole or any(space in text for space in _ODD_SPACES):
        return None
    names, offsets, sizes, keys, separators = zip(*found, strict=True)
    starts = np.array([*map(int, offsets)])
    if (starts % BLOCK).any():
        return None
    width = separators.index(b"\n") + 1
    alike = names == names[:width] * samples and separators == separators[:width] * samples
    ends = [number for number, separator in enumerate(separators, 1) if separator == b"\n"]
    extensions = {name: code for code, name in enumerate(dict.fromkeys(names))}
    firsts = [keys[first] for first in (0, *ends[:-1])]
    return SampleTable(
        tuple(map(decode_name, extensions)),
        code_array(np.array([extensions[name] for name in names[: width if alike else None]]), len(extensions)),
        None if alike else narrow(np.array(ends)),
        narrow(starts // BLOCK),
        narrow(np.array([*map(int, sizes)])),
        Keys.of_lengths(b"".join(firsts), np.array([*map(len, firsts)])) if fields == 4 else None,
    )


def _blocks(text: bytes, start: int) -> Iterator[bytes]:
    """Yield blocks of whole lines, each ending with a newline."""
    while start < len(text):
        end = text.rfind(b"\n", start, start + _BLOCK_BYTES) + 1 or text.find(b"\n", start + _BLOCK_BYTES) + 1
        yield text[start:end] if end else text[start:] + b"\n"
        start = end or len(text)


def _parse_lines(lines: bytes, wanted: int, fields: int, first_line: int, extensions: dict[bytes, int]) -> _Block:
    """Parse at most `wanted` lines."""
    data, gaps, line_ends = _gaps(lines)
    if any(space in lines for space in _ODD_SPACES) or int((gaps[1:] - gaps[:-1]).min()) == 1:
        data, gaps, line_ends = _gaps(_with_single_spaces(lines, wanted, first_line))
    # Word i is between gaps[i] and gaps[i + 1]; the first gap is the end of the line before.
    line_ends = line_ends[: wanted + 1]
    gaps = gaps[: line_ends[-1] + 1]
    counts, rest = np.divmod(np.diff(line_ends), fields)
    if rest.any():
        line = int(np.argmax(rest != 0))
        found = int(line_ends[line + 1] - line_ends[line])
        raise _BadLine(first_line + line, f"{found} words, expected {fields} for each component")
    columns = [gaps[:-1:fields], *(gaps[word::fields] for word in range(1, fields + 1))]
    windows = np.ndarray((len(data) - 7,), np.dtype((np.void, 8)), data, 0, (1,))
    tokens = _Tokens(data, windows, counts, first_line)
    offsets = tokens.numbers(columns[1], columns[2], "an offset")
    sizes = tokens.numbers(columns[2], columns[3], "a size")
    tokens.refuse(
        offsets % BLOCK != 0, columns[1], columns[2], "is not the offset of a file: offsets are multiples of 512"
    )
    codes = _extension_codes(tokens, columns[0], columns[1], extensions)
    firsts = np.cumsum(counts) - counts
    keys, key_lengths = b"", np.empty(0, np.int64)
    if fields == 4:
        keys, key_lengths = _keys(data, columns[3][firsts] + 1, columns[4][firsts])
    return _Block(counts, codes, narrow(offsets // BLOCK), narrow(sizes), keys, key_lengths)


def _gaps(lines: bytes) -> tuple[BytesArray, Int64Array, Int64Array]:
    """Return the padded lines, the positions of spaces and newlines in them, and which of these are newlines."""
    data = np.frombuffer(b"\n".rjust(_PAD) + lines + bytes(_PAD_AFTER), np.uint8)
    gaps = np.flatnonzero(data[:-_PAD_AFTER] <= 0x20)[_PAD - 1 :]
    kinds = data[gaps]
    newlines = kinds == 0x0A
    known = newlines | (kinds == 0x20)
    if not known.all():  # other control characters belong to words
        gaps, newlines = gaps[known], newlines[known]
    return data, gaps, np.flatnonzero(newlines)


def _with_single_spaces(lines: bytes, wanted: int, first_line: int) -> bytes:
    """Return the first `wanted` lines with one space between words."""
    words = [line.split() for line in lines.split(b"\n")[:-1][:wanted]]
    if not all(words):
        raise _BadLine(first_line + words.index([]), "an empty line, expected a sample")
    return b"".join(b" ".join(line) + b"\n" for line in words)


class _Tokens(NamedTuple):
    """The text of a block, and methods to read a column of its words."""

    data: BytesArray
    windows: Array  # every 8 bytes of `data`, overlapping
    counts: Int64Array
    first_line: int

    def words(self, starts: Int64Array) -> _Words:
        """Return the 8 bytes from each of `starts` as little-endian numbers."""
        return self.windows[starts].view("<u8")

    def numbers(self, before: Int64Array, end: Int64Array, what: str) -> Int64Array:
        """Return the decimal numbers between the gaps `before` and `end`."""
        lengths = end - before - 1
        self.refuse(lengths > _MOST_DIGITS, before, end, f"is {what} larger than any file")
        total = np.zeros(len(end), np.uint64)
        wrong = np.zeros(len(end), np.uint64)
        for place in range(0, int(lengths.max()), 8):
            digits = self.words(end - (place + 8)) ^ np.uint64(0x3030303030303030)
            digits &= _LAST[place // 8][lengths]
            # A byte above 9 reaches its highest bit when 0x76 is added.
            wrong |= (digits + np.uint64(0x7676767676767676)) | digits
            total += _join_digits(digits) * np.uint64(10**place)
        self.refuse(wrong & np.uint64(0x8080808080808080) != 0, before, end, f"is {what} that is not a number")
        return total.view(np.int64)

    def refuse(self, bad: npt.NDArray[np.bool_], before: Int64Array, end: Int64Array, what: str) -> None:
        """Raise an error about the first bad word, if any."""
        if bad.any():
            component = int(np.argmax(bad))
            line = int(np.searchsorted(np.cumsum(self.counts), component, side="right"))
            start, stop = int(before[component]) + 1, int(end[component])
            word = decode_name(self.data[start : min(stop, start + 40)].tobytes())
            raise _BadLine(self.first_line + line, f"{word!r} {what}")


def _join_digits(digits: _Words) -> _Words:
    """Return the number whose eight digits are the bytes; the first byte is the highest digit."""
    pairs = (digits * np.uint64(10) + (digits >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    fours = (pairs * np.uint64(100) + (pairs >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return (fours * np.uint64(10_000) + (fours >> np.uint64(32))) & np.uint64(0x00000000FFFFFFFF)


def _extension_codes(tokens: _Tokens, before: Int64Array, end: Int64Array, names: dict[bytes, int]) -> Array:
    """Return the codes of the words between the gaps `before` and `end`, adding new words to `names`."""
    lengths = end - before - 1
    compared = np.minimum(lengths, _SHORT)
    words = [tokens.words(before + (1 + at)) & _FIRST[at // 8][compared] for at in range(0, int(compared.max()), 8)]
    out = np.empty(len(end), np.int64)
    todo = np.arange(len(end))
    while len(todo) and len(names) <= _FEW:
        # Find all words equal to the first one.
        model = todo[0]
        same = lengths[todo] == lengths[model]
        for word in words:
            same &= word[todo] == word[model]
        if lengths[model] > _SHORT:
            same[1:] = False
        out[todo[same]] = names.setdefault(tokens.data[before[model] + 1 : end[model]].tobytes(), len(names))
        todo = todo[~same]
    for row in todo.tolist():
        out[row] = names.setdefault(tokens.data[before[row] + 1 : end[row]].tobytes(), len(names))
    return out


def _keys(data: BytesArray, starts: Int64Array, ends: Int64Array) -> tuple[bytes, Int64Array]:
    """Return the keys of the names data[starts:ends], back to back, and their lengths."""
    bases = starts
    slashes, dots = np.flatnonzero(data == 0x2F), np.flatnonzero(data == 0x2E)
    if len(slashes):
        bases = np.maximum(starts, np.append(-1, slashes)[np.searchsorted(slashes, ends)] + 1)
    stops = np.minimum(ends, np.append(dots, len(data))[np.searchsorted(dots, bases)])
    lengths = stops - starts
    length = int(lengths[0])
    if length and bool((lengths == length).all()):
        windows = np.ndarray((len(data) - length + 1,), np.dtype((np.void, length)), data, 0, (1,))
        return windows[starts].tobytes(), lengths
    # Byte i of the result is byte i - (bytes of all keys before it) of its key.
    shifts = starts - (np.cumsum(lengths) - lengths)
    return data[np.repeat(shifts, lengths) + np.arange(int(lengths.sum()))].tobytes(), lengths
