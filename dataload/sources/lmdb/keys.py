"""Tables of the keys of an LMDB database by index, at most 16 bytes per record.

Keys that are decimal numbers are ordered numerically, as their writer intended; LMDB orders them as text, with "10"
before "2" unless they are padded. All other keys are in LMDB's order.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice, repeat
from typing import Any, Literal, TypeAlias

import numpy as np

from dataload.storage.table_cache import CachedTable, IndexKey, load_cached, store_cached, within
from dataload.types import Array, BytesArray, Int64Array

KeyOrder: TypeAlias = Literal["number", "bytes"]
"""Order of keys: numerical, or by their bytes, like LMDB."""

_BYTES_PER_RECORD = 16
_MOST_DIGITS = 18  # always fits in int64
_SCAN_BLOCK = 1 << 16
_LEAST_CACHED = 100_000  # minimum number of keys of a cached table: about 30 ms of work


def decimal_keys(numbers: Int64Array, width: int) -> list[bytes]:
    """Return numbers as ASCII digits, padded with zeros.

    Args:
        numbers: (n,) int64, not negative, with at most `width` digits.
        width: Bytes per key.
    """
    if len(numbers) == 1:
        return [b"%0*d" % (width, int(numbers[0]))]
    digits = _four_digits()
    groups = -(-width // 4)
    out = np.full((len(numbers), groups), digits[0])
    rest, greatest = numbers, int(numbers.max(initial=0))
    for group in range(groups - 1, -1, -1):  # four digits at a time
        higher = rest // 10_000
        out[:, group] = digits[rest - higher * 10_000]
        rest, greatest = higher, greatest // 10_000
        if not greatest:
            break
    text = out.view(np.uint8)[:, 4 * groups - width :]
    return np.ascontiguousarray(text).view(np.dtype((np.void, width))).ravel().tolist()


@cache
def _four_digits() -> Array:
    """Return (10000,) uint32: the four characters of each number in memory order."""
    digits = np.arange(10_000)[:, None] // np.array([1000, 100, 10, 1]) % 10
    return (digits + ord("0")).astype(np.uint8).view(np.uint32).ravel()


class _DecimalKeys:
    """Keys that are numbers; 0, 1, ..., n - 1 need no table.

    Args:
        numbers: (n,) int64; None if each number is its index.
        widths: (n,) uint8, or one width for all; 0 means no padding.
    """

    order: KeyOrder = "number"

    def __init__(self, numbers: Int64Array | None, widths: BytesArray | int) -> None:
        self._numbers = numbers
        self._widths = widths

    def key(self, txn: Any, database: Any, index: int) -> bytes | None:
        """Return the key at `index`, or None if the database lacks it."""
        del txn, database
        return self._keys(np.array([index], np.int64))[0]

    def values(self, txn: Any, database: Any, indices: Int64Array) -> list[Any]:
        """Return the values of the keys at `indices`, or None for keys that the database lacks."""
        return list(map(txn.get, self._keys(indices), repeat(None), repeat(database)))

    def packed(self) -> CachedTable:
        """Return the table for the cache."""
        assert self._numbers is not None
        if isinstance(self._widths, int):
            return CachedTable({"numbers": self._numbers}, {"width": self._widths})
        return CachedTable({"numbers": self._numbers, "widths": self._widths}, {})

    def _keys(self, indices: Int64Array) -> list[bytes]:
        numbers = indices if self._numbers is None else self._numbers[indices]
        if isinstance(self._widths, int):
            if self._widths:
                return decimal_keys(numbers, self._widths)
            return [b"%d" % number for number in numbers.tolist()]
        widths = self._widths[indices].tolist()
        return [b"%0*d" % pair for pair in zip(widths, numbers.tolist(), strict=True)]


class _ListedKeys:
    """Keys in LMDB's order. If keys are long, only every `step`-th is kept, and a cursor walks from there.

    Args:
        data: The kept keys, concatenated.
        ends: End of each key, (kept,) int64; or the length of all.
        step: Distance between kept keys.
    """

    order: KeyOrder = "bytes"

    def __init__(self, data: bytes | memoryview, ends: Int64Array | int, step: int) -> None:
        self._ends = ends if isinstance(ends, np.ndarray) else None
        self._data = data
        # numpy's bytes type would drop trailing zero bytes of a key
        self._table = None if isinstance(ends, np.ndarray) else np.frombuffer(data, np.dtype((np.void, ends)))
        self._step = step
        self._length = 0 if isinstance(ends, np.ndarray) else ends

    def key(self, txn: Any, database: Any, index: int) -> bytes | None:
        cursor = txn.cursor(database)
        return bytes(cursor.key()) if self._move(cursor, index) else None

    def values(self, txn: Any, database: Any, indices: Int64Array) -> list[Any]:
        if self._step == 1:
            return list(map(txn.get, self._kept(indices), repeat(None), repeat(database)))
        cursor = txn.cursor(database)
        return [cursor.value() if self._move(cursor, index) else None for index in indices.tolist()]

    def packed(self) -> CachedTable:
        """Return the table for the cache."""
        arrays: dict[str, Array] = {"data": np.frombuffer(self._data, np.uint8)}
        if self._ends is not None:
            arrays["ends"] = self._ends
        return CachedTable(arrays, {"step": self._step, "length": self._length})

    def _move(self, cursor: Any, index: int) -> bool:
        kept, further = divmod(index, self._step)
        if not cursor.set_key(self._kept(np.array([kept], np.int64))[0]):
            return False
        return all(cursor.next() for _ in range(further))

    def _kept(self, positions: Int64Array) -> list[bytes]:
        if self._table is not None:
            return self._table[positions].tolist()
        assert self._ends is not None
        ends, data = self._ends, self._data
        starts = np.where(positions > 0, ends[positions - 1], 0).tolist()
        return [bytes(data[start:end]) for start, end in zip(starts, ends[positions].tolist(), strict=True)]


def build_keys(txn: Any, database: Any, count: int, key: IndexKey | None = None) -> _DecimalKeys | _ListedKeys:
    """Return the key table of a database with `count` records.

    Keys that are all numbers from 0 to n - 1 are recognized by the first, the last and a few other keys; they need no
    table, and the other keys are not read. If one is missing after all, reading it fails.

    Args:
        txn: A transaction without buffers.
        database: The database.
        count: Number of records.
        key: Cache key of a large table; None disables the cache.
    """
    cursor = txn.cursor(database)
    if not count or not cursor.first():
        return _DecimalKeys(None, 1)
    width = _width_of_complete(txn, database, count, bytes(cursor.key()))
    if width is not None:
        return _DecimalKeys(None, width)
    found = load_cached(key) if key is not None and count >= _LEAST_CACHED else None
    table = None if found is None else _unpack(found, count)
    if table is None:
        table = _scan(cursor)
        if key is not None and count >= _LEAST_CACHED:
            store_cached(key, table.packed())
    return table


def _width_of_complete(txn: Any, database: Any, count: int, first: bytes) -> int | None:
    """Return the width of keys that are 0 to count - 1, 0 if they are not padded; None for other keys."""
    if first.strip(b"0") or len(first) > _MOST_DIGITS:
        return None
    digits = len(str(count - 1))
    if len(first) == 1 < digits:
        last = b"9" * (digits if count == 10**digits else digits - 1)  # the last one as text
        width = 0
    else:
        last = b"%0*d" % (len(first), count - 1)
        width = len(first)
    cursor = txn.cursor(database)
    if not cursor.last() or cursor.key() != last:
        return None
    probes = {count - 1, count // 2, count // 3, count // 7}
    return width if all(txn.get(b"%0*d" % (width, n), None, database) is not None for n in probes) else None


def _scan(cursor: Any) -> _DecimalKeys | _ListedKeys:
    cursor.first()
    blocks = list(_blocks(cursor.iternext(keys=True, values=False)))
    lengths = np.concatenate([lengths for _, lengths in blocks])
    data = b"".join([joined for joined, _ in blocks])
    if int(lengths.max()) <= _MOST_DIGITS and data.isdigit():
        return _by_number(data, lengths)
    fixed = int(lengths[0]) if bool((lengths == lengths[0]).all()) else None
    # An array of ends takes 8 bytes per kept key.
    step = -(-(len(data) + (0 if fixed else 8 * len(lengths))) // (_BYTES_PER_RECORD * len(lengths)))
    if fixed:
        rows = np.frombuffer(data, np.uint8).reshape(len(lengths), fixed)
        return _ListedKeys(rows[::step].tobytes(), fixed, step)
    ends = np.cumsum(lengths)
    if step == 1:
        return _ListedKeys(data, ends, 1)
    kept = [
        data[end - length : end] for end, length in zip(ends[::step].tolist(), lengths[::step].tolist(), strict=True)
    ]
    return _ListedKeys(b"".join(kept), np.cumsum(lengths[::step]), step)


def _blocks(keys: Iterator[bytes]) -> Iterator[tuple[bytes, Int64Array]]:
    """Yield blocks of concatenated keys and their lengths; a list of all keys would take 60 bytes more per key."""
    while block := list(islice(keys, _SCAN_BLOCK)):
        yield b"".join(block), np.fromiter(map(len, block), np.int64, len(block))


def _by_number(data: bytes, lengths: Int64Array) -> _DecimalKeys:
    ends = np.cumsum(lengths)
    digits = np.frombuffer(data, np.uint8)
    numbers = _parse_decimals(digits, ends, lengths)
    if bool((lengths == lengths[0]).all()):  # LMDB's order is numerical
        return _DecimalKeys(numbers, int(lengths[0]))
    padded = (digits[ends - lengths] == ord("0")) & (lengths > 1)
    if not padded.any():
        return _DecimalKeys(np.sort(numbers), 0)
    # Among equal numbers, "7" and "07", the shorter key comes first.
    order = np.lexsort((lengths, numbers))
    return _DecimalKeys(numbers[order], lengths[order].astype(np.uint8))


def _parse_decimals(digits: BytesArray, ends: Int64Array, lengths: Int64Array) -> Int64Array:
    """Parse numbers with concatenated digits; return (n,) int64."""
    numbers = np.zeros(len(ends), np.int64)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        starts = ends[rows] - length
        of_length = np.zeros(len(rows), np.int64)
        for place in range(length):
            of_length *= 10
            of_length += digits[starts + place] - ord("0")
        numbers[rows] = of_length
    return numbers


def _unpack(found: CachedTable, count: int) -> _DecimalKeys | _ListedKeys | None:
    """Return the table from the cache, or None if it is not a valid one of `count` records."""
    arrays, extras = found.arrays, found.extras
    return _unpack_numbers(arrays, extras, count) if "numbers" in arrays else _unpack_listed(arrays, extras, count)


def _unpack_numbers(arrays: Mapping[str, Array], extras: Mapping[str, Any], count: int) -> _DecimalKeys | None:
    numbers, widths, width = arrays["numbers"], arrays.get("widths"), extras.get("width", 0)
    if numbers.dtype != np.int64 or len(numbers) != count or not within(numbers, 10**_MOST_DIGITS):
        return None
    if widths is not None:
        fit = widths.dtype == np.uint8 and len(widths) == count and within(widths, _MOST_DIGITS + 1)
        return _DecimalKeys(numbers, widths) if fit else None
    if type(width) is not int or not 0 <= width <= _MOST_DIGITS or (width and not within(numbers, 10**width)):
        return None
    return _DecimalKeys(numbers, width)


def _unpack_listed(arrays: Mapping[str, Array], extras: Mapping[str, Any], count: int) -> _ListedKeys | None:
    data, ends, step, length = arrays.get("data"), arrays.get("ends"), extras.get("step"), extras.get("length")
    if data is None or type(step) is not int or step < 1 or type(length) is not int:
        return None
    kept = -(-count // step)
    if ends is None:
        return _ListedKeys(data.data, length, step) if length > 0 and kept * length == len(data) else None
    if ends.dtype != np.int64 or len(ends) != kept or int(np.diff(ends, prepend=0).min()) < 1 or ends[-1] != len(data):
        return None
    return _ListedKeys(data.data, ends, step)
