"""Bombs of tables in memory: every type of Arrow, in every other, with huge counts over tiny, shared or empty items."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from bombs import Bomb

from dataload.sources.arrow.ipc import parse_layout

LONG = 1 << 16  # bytes of a text
MANY = 1 << 12  # items that are stored
ENDLESS = 1 << 28  # items that take no space
DEPTH = 2
ROWS = 8


def _offsets(kind: type, *values: int) -> pa.Buffer:
    return pa.py_buffer(np.array(values, kind))


def items(make: Callable[[int], pa.Array]) -> tuple[pa.Array, int]:
    for count in (ENDLESS, MANY):
        found = make(count)
        if len(found) == count and found.nbytes < 1 << 20:
            return found, count
    found = make(1)
    return found, len(found)


def _zeros(count: int) -> pa.Array:
    return pa.array(np.zeros(min(count, MANY), np.int8))


def text(count: int) -> pa.Array:
    count = min(count, MANY)
    return pa.array(["x" * LONG, *[""] * (count - 1)][:count])


def view(count: int) -> pa.Array:
    count = min(count, MANY)
    word = np.zeros(count, [("size", "<i4"), ("start", "S4"), ("buffer", "<i4"), ("offset", "<i4")])
    word["size"], word["start"] = LONG, b"xxxx"
    buffers = [None, pa.py_buffer(word), pa.py_buffer(b"x" * LONG)]
    return pa.Array.from_buffers(pa.string_view(), count, buffers)


LEAVES = {"null": pa.nulls, "number": _zeros, "text": text, "view": view}


def _lists(kind, *offsets_of, dtype=np.int32):
    """Return what nests a type in lists whose offsets are functions of their number and of the items' number."""

    def nest(make):
        def build(count: int) -> pa.Array:
            found, size = items(make)
            count = min(count, MANY)
            buffers = [_offsets(dtype, *offsets(count, size)) for offsets in offsets_of]
            return pa.Array.from_buffers(kind(found.type), count, [None, *buffers], children=[found])

        return build

    return nest


def _last(count, size):
    """The last list has all items."""
    return [*[0] * count, size]


def _back_and_forth(count, size):
    """Every other list has the same items."""
    return itertools.islice(itertools.cycle([0, size]), count + 1)


def _fixed(make):
    def build(count: int) -> pa.Array:
        found, size = items(make)
        if size == ENDLESS:
            count, size = min(count, 1 << 20), 1 << 10
            return pa.FixedSizeListArray.from_arrays(make(count * size), size)
        return pa.FixedSizeListArray.from_arrays(found, size)

    return build


def _map(make):
    def build(count: int) -> pa.Array:
        found, size = items(make)
        count, size = min(count, MANY), min(size, MANY)
        keys = pa.array([""] * size)
        pairs = pa.StructArray.from_arrays(
            [keys, found[:size]], fields=[pa.field("key", keys.type, nullable=False), pa.field("value", found.type)]
        )
        offsets = _offsets(np.int32, *[0] * count, size)
        return pa.Array.from_buffers(pa.map_(keys.type, found.type), count, [None, offsets], children=[pairs])

    return build


def _union(make):
    def build(count: int) -> pa.Array:
        count = min(count, MANY)
        zeros = np.zeros(count, np.int32)
        return pa.UnionArray.from_dense(pa.array(zeros.astype(np.int8)), pa.array(zeros), [make(1)])

    return build


def _sparse(make):
    def build(count: int) -> pa.Array:
        found = make(min(count, MANY))
        return pa.UnionArray.from_sparse(pa.array(np.zeros(len(found), np.int8)), [found])

    return build


NESTING = {
    "list": _lists(pa.list_, _last),
    "large_list": _lists(pa.large_list, _last, dtype=np.int64),
    "again": _lists(pa.list_, _back_and_forth),
    "list_view": _lists(pa.list_view, lambda count, _: [0] * count, lambda count, size: [size] * count),
    "fixed": _fixed,
    "struct": lambda make: lambda count: pa.StructArray.from_arrays([make(count)], ["x"]),
    "empty": lambda _: lambda count: pa.Array.from_buffers(pa.struct([]), count, [None], children=[]),
    "map": _map,
    "dictionary": lambda make: lambda count: pa.DictionaryArray.from_arrays(_zeros(count), make(1)),
    "run": lambda make: (
        lambda count: pa.RunEndEncodedArray.from_arrays(pa.array([min(count, ENDLESS)], pa.int32()), make(1)[:1])
    ),
    "union": _union,
    "sparse": _sparse,
}


def arrays(depth: int = DEPTH) -> Iterator[tuple[str, Callable[[int], pa.Array]]]:
    """Give each type, nested in each other to a depth; the name begins with the outermost."""
    known = list(LEAVES.items())
    yield from known
    for _ in range(depth):
        inner, known = known, []
        for (outer, nest), (name, make) in itertools.product(NESTING.items(), inner):
            if outer == "empty" and name not in LEAVES:
                continue
            known.append((outer if outer == "empty" else f"{outer}<{name}>", nest(make)))
        known = list(dict(known).items())
        yield from known


def batch_of(make: Callable[[int], pa.Array], rows: int) -> pa.RecordBatch | None:
    """Return a batch with a column of such values; None if Arrow has no such type."""
    try:
        found = make(rows)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None
    return pa.RecordBatch.from_arrays([found], ["x"])


def arrow_file(batch: pa.RecordBatch, path: Path, compression: str | None = None) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_file(stream, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return path


def share_buffers(path: Path, columns: int) -> Path:
    """Let all columns of a file have the buffers of the first."""
    data = bytearray(path.read_bytes())
    layout = parse_layout(lambda at, size: bytes(data[at : at + size]), len(data), str(path))
    for found in layout.batches:
        at = data.index(found.buffers, found.offset)
        first = found.buffers[: len(found.buffers) // columns]
        data[at : at + len(found.buffers)] = first * columns
    path.write_bytes(data)
    return path


def bombs_of_arrow(depth: int = DEPTH) -> Iterator[Bomb]:
    for name, make in arrays(depth):
        for compression in (None, "zstd"):

            def write(folder: Path, make=make, compression=compression) -> Path | None:
                batch = batch_of(make, ROWS)
                try:
                    return None if batch is None else arrow_file(batch, folder / "x.arrow", compression)
                except (pa.ArrowException, OverflowError):  # it has no form in a file
                    return None

            yield Bomb(f"{name}{' compressed' if compression else ''}", write)
    yield Bomb(
        "4000 columns compressed",
        lambda folder: arrow_file(
            pa.RecordBatch.from_pydict({f"x{number}": np.zeros(ROWS) for number in range(4000)}),
            folder / "x.arrow",
            "zstd",
        ),
    )
    for count in (64, 1024):

        def columns(folder: Path, count=count) -> Path:
            batch = pa.RecordBatch.from_pydict({f"x{number}": text(ROWS) for number in range(count)})
            return share_buffers(arrow_file(batch, folder / "x.arrow"), count)

        yield Bomb(f"{count} columns with the same buffers", columns)
