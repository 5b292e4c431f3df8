"""Index checks, and arithmetic for datasets stored in several files. Pure (no I/O)."""

import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np

from dataload.errors import printable
from dataload.types import Int64Array


def check_index(index: SupportsIndex, length: int) -> int:
    """Return `index` as an int in [0, length); negative indices count from the end, bools and floats are refused."""
    if isinstance(index, (bool, np.bool_)):  # both have __index__ (np.bool_ in numpy 1)
        raise TypeError(f"an index must be an integer, got {index}")
    try:
        number = operator.index(index)
    except TypeError:
        hint = "; for several records pass a list or an array, for fields read_batch(indices, fields)"
        raise TypeError(f"an index must be an integer or a slice, got {printable(repr(index), 60)}{hint}") from None
    if not -length <= number < length:
        raise IndexError(f"index {number} is out of range for {length} records")
    return number + length if number < 0 else number


def as_indices(indices: Any, length: int) -> Int64Array:
    """Return indices as contiguous (rows,) int64 in [0, length); negative ones count from the end. Copies if needed."""
    if isinstance(indices, np.ndarray):
        array = indices
    elif isinstance(indices, range):
        for end in (indices[0], indices[-1]) if indices else ():
            check_index(end, length)  # before allocating the array
        array = np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
    else:
        items: list[Any] = indices if isinstance(indices, list) else list(indices)
        if any(isinstance(item, (bool, np.bool_)) for item in items):
            raise TypeError("indices must be integers, got bool; for a mask use np.flatnonzero(mask)")
        try:
            array = np.fromiter(map(operator.index, items), np.int64, len(items))
        except TypeError as error:
            raise TypeError(f"indices must be integers: {error}") from None
        except OverflowError:
            outside = next(i for i in map(operator.index, items) if not -length <= i < length)
            raise IndexError(f"index {outside} is out of range for {length} records") from None
    if array.ndim != 1:
        raise TypeError(f"indices must have one dimension, got an array of shape {array.shape}")
    if array.dtype != np.int64:
        if array.size == 0:
            return np.empty(0, np.int64)
        if array.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, got an array of {array.dtype}")
        if array.dtype == np.uint64 and int(array.max()) >= length:
            raise IndexError(f"index {int(array.max())} is out of range for {length} records")
        array = array.astype(np.int64)
    array = np.ascontiguousarray(array)
    if array.size == 0:
        return array
    # As unsigned integers, negative numbers are huge, so one comparison checks both bounds.
    if int(np.maximum.reduce(array.view(np.uint64))) < length:
        return array
    outside = array[(array < -length) | (array >= length)]
    if outside.size:
        raise IndexError(f"index {int(outside[0])} is out of range for {length} records")
    return np.where(array < 0, array + length, array)


def distinct(numbers: Int64Array) -> Int64Array:
    """Return the distinct numbers, ascending. `numpy.unique` alone hashes them, which takes up to 100 times as long."""
    return np.unique(numbers, return_counts=True)[0]  # which sorts them


def split_by_shard(ends: Int64Array, indices: Int64Array) -> Iterator[tuple[int, Int64Array, Int64Array]]:
    """Yield (shard, sorted indices in it, their rows in the request), (k,) int64; `ends` is the records so far."""
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    # Search once per shard or per row, whichever are fewer. Shard s ends at cuts[s] in the sorted request.
    if len(ends) <= len(indices):
        cuts = np.searchsorted(ordered, ends, side="left")
        shards = np.flatnonzero(np.diff(cuts, prepend=0)).tolist()
        stops = cuts[shards].tolist()
    else:
        of_row = np.searchsorted(ends, ordered, side="right")
        last = np.flatnonzero(np.diff(of_row, append=len(ends)))
        shards = of_row[last].tolist()
        stops = (last + 1).tolist()
    start = 0
    for shard, stop in zip(shards, stops, strict=True):
        first = int(ends[shard - 1]) if shard else 0
        yield shard, ordered[start:stop] - first, order[start:stop]
        start = stop


_BRACE_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_PART = re.compile(r"(.*-)(\d{1,18})-of-(\d{1,18})(\D.*|)", re.DOTALL)
_BRACE_LIST = re.compile(r"\{([^{}]*,[^{}]*)\}")


def expand_braces(pattern: str) -> list[str]:
    """Expand `{000..127}` and `{a,b}` in a path as a shell does; the first brace varies slowest.

    Examples:
        >>> expand_braces("train-{08..10}.tar")
        ['train-08.tar', 'train-09.tar', 'train-10.tar']
    """
    numbers, names = _BRACE_RANGE.search(pattern), _BRACE_LIST.search(pattern)
    match = min((m for m in (numbers, names) if m), key=lambda m: m.start(), default=None)
    if match is None:
        return [pattern]
    choices: Iterable[str]
    if match is numbers:
        first, last = match.group(1), match.group(2)
        # A leading zero fixes the width, as in bash.
        padded = any(len(n) > 1 and n.startswith("0") for n in (first, last))
        width = max(len(first), len(last)) if padded else 0
        step = 1 if int(last) >= int(first) else -1
        choices = (f"{n:0{width}d}" for n in range(int(first), int(last) + step, step))
    else:
        choices = match.group(1).split(",")
    head, tail = pattern[: match.start()], expand_braces(pattern[match.end() :])
    return [f"{head}{choice}{rest}" for choice in choices for rest in tail]


def missing_parts(names: Iterable[str]) -> tuple[str, int] | None:
    """Return a missing name and the total for files named like "00001-of-00003"; None if the set is complete.

    Examples:
        >>> missing_parts(["a-00000-of-00003.tar", "b-1-of-1.tar", "c-7.tar"])
        ('a-00001-of-00003.tar', 2)
    """
    sets: dict[tuple[str, str, str, int], set[int]] = {}
    for name in names:
        if parts := _PART.fullmatch(name):
            head, number, count, tail = parts.groups()
            sets.setdefault((head, count, tail, len(number)), set()).add(int(number))
    for (head, count, tail, width), numbers in sets.items():
        if len(numbers) < int(count):
            first = 1 if int(count) in numbers else 0  # some writers count from 1
            number = next(number for number in itertools.count(first) if number not in numbers)
            return f"{head}{number:0{width}d}-of-{count}{tail}", int(count) - len(numbers)
    return None


def even_split(total: int, parts: int) -> Sequence[tuple[int, int]]:
    """Split [0, total) into `parts` contiguous half-open spans whose lengths differ by at most one."""
    edges = [total * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(edges))
