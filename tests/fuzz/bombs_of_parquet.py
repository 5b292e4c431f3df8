"""Bombs of Parquet: every physical type, encoding and nesting, with counts and sizes that lie or repeat a value."""

import itertools
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from bombs import Bomb
from wire import varint

HUGE = 1 << 28  # values
LONG = 1 << 17  # bytes of a text
ROWS = 64
KINDS = {"bool": 0, "int32": 1, "int64": 2, "int96": 3, "float": 4, "double": 5, "text": 6, "fixed": 7}
ENCODINGS = {"plain": 0, "dictionary": 8, "old dictionary": 2, "delta": 5, "lengths": 6, "prefixes": 7}
ENCODINGS |= {"split": 9, "runs": 3}
NESTING = ("required", "optional", "list", "list of lists", "struct")
LIES = ("repeat", "nulls", "page", "rows", "dictionary", "chunk")
ZSTD = 6
_DELTAS = ("prefixes", "delta", "lengths")


def signed(value: int) -> bytes:
    return varint(value << 1 ^ value >> 63 if value >= 0 else (-value << 1) - 1)


def compact(kind: int, value: Any) -> bytes:
    if kind in (5, 6):
        return signed(value)
    if kind == 8:
        return varint(len(value)) + value
    if kind == 9:
        inner, found = value
        head = bytes([len(found) << 4 | inner]) if len(found) < 15 else bytes([0xF0 | inner]) + varint(len(found))
        return head + b"".join(compact(inner, each) for each in found)
    out, before = bytearray(), 0
    for number, (inner, each) in sorted(value.items()):
        if inner == 1:
            inner, each = (1 if each else 2), None
        out.append(number - before << 4 | inner)
        out += b"" if each is None else compact(inner, each)
        before = number
    return bytes(out) + b"\0"


def i32(value: int) -> tuple[int, int]:
    return 5, value


def i64(value: int) -> tuple[int, int]:
    return 6, value


def run(value: int, count: int, width: int = 1) -> bytes:
    return varint(count << 1) + value.to_bytes(width, "little")


def schema_of(nesting: str, kind: int) -> tuple[list[Mapping[int, Any]], int, int]:
    """Return the elements of a schema with the column x, and its greatest levels of repetition and definition."""
    leaf = {1: i32(kind), 3: i32(1), 4: (8, b"element")} | ({2: i32(LONG)} if kind == 7 else {})
    root = {4: (8, b"root"), 5: i32(1)}
    group = {3: i32(1), 4: (8, b"x"), 5: i32(1)}
    repeated = {3: i32(2), 4: (8, b"list"), 5: i32(1)}
    as_list = group | {6: i32(3)}
    if nesting == "required":
        return [root, leaf | {3: i32(0), 4: (8, b"x")}], 0, 0
    if nesting == "optional":
        return [root, leaf | {4: (8, b"x")}], 0, 1
    if nesting == "struct":
        return [root, group, leaf], 0, 2
    if nesting == "list":
        return [root, as_list, repeated, leaf], 1, 3
    return [root, as_list, repeated, as_list | {4: (8, b"element")}, repeated, leaf], 2, 5


def write(path: Path, *, kind: str, encoding: str, nesting: str, lie: str, version: int = 1) -> Path:
    number = KINDS[kind]
    elements, repetition, definition = schema_of(nesting, number)
    dictionary = encoding in ("dictionary", "old dictionary")
    count = (HUGE if encoding not in _DELTAS else 1 << 20) if lie in ("repeat", "nulls") else ROWS
    level = 0 if lie == "nulls" else definition
    size = {"int32": 4, "float": 4, "int96": 12, "bool": 1}.get(kind, 8)
    one = b"x" * LONG if kind in ("text", "fixed") else bytes(size)
    plain = struct.pack("<I", LONG) + one if kind == "text" else one
    if dictionary:
        values = b"\x01" + run(0, count)
    elif encoding == "prefixes":  # a text, then its whole again and again: lengths of prefixes, of suffixes, texts
        values = deltas(0, LONG, count) + deltas(LONG, -LONG, count) + one
    elif encoding == "delta" or encoding == "lengths":
        values = deltas(0, 0, count)
    elif encoding == "runs":
        values = struct.pack("<I", len(run(0, count))) + run(0, count)
    else:
        values = plain * (ROWS if lie != "repeat" else 1)
    values = b"" if lie == "nulls" and definition else values
    again = run(0, 1) + run(repetition, count - 1) if lie == "repeat" else run(0, count)
    levels = [again] * bool(repetition) + [run(level, count)] * bool(definition)
    pages = b""
    claim = (1 << 31) - 1
    if dictionary:
        body = pa.compress(plain, "zstd", asbytes=True)
        head = {1: i32(2), 2: i32(claim if lie == "page" else len(plain)), 3: i32(len(body))}
        head[7] = (12, {1: i32(claim if lie == "dictionary" else 1), 2: i32(0)})
        pages = compact(12, head) + body
    first = len(pages)
    if version == 1:
        data = b"".join(struct.pack("<I", len(each)) + each for each in levels) + values
        body = pa.compress(data, "zstd", asbytes=True)
        head = {1: i32(0), 5: (12, {1: i32(count), 2: i32(ENCODINGS[encoding]), 3: i32(3), 4: i32(3)})}
    else:
        data = b"".join(levels) + values
        body = b"".join(levels) + pa.compress(values, "zstd", asbytes=True)
        sizes = [len(levels[0]) if repetition else 0, len(levels[-1]) if definition else 0]
        details = {1: i32(count), 2: i32(0), 3: i32(count), 4: i32(ENCODINGS[encoding])}
        details |= {5: i32(sizes[1]), 6: i32(sizes[0])}
        head = {1: i32(3), 8: (12, details)}
    head |= {2: i32(claim if lie == "page" else len(data)), 3: i32(len(body))}
    pages += compact(12, head) + body
    rows = 1 << 60 if lie == "rows" else 1 if lie == "repeat" and repetition else count
    meta = {1: i32(number), 2: (9, (5, [ENCODINGS[encoding]])), 3: (9, (8, [b"x"])), 4: i32(ZSTD)}
    meta |= {5: i64(1 << 60 if lie == "chunk" else count), 6: i64(len(data)), 7: i64(len(pages)), 9: i64(4 + first)}
    if dictionary:
        meta[11] = i64(4)
    chunk = {2: i64(4), 3: (12, meta)}
    group = {1: (9, (12, [chunk])), 2: i64(len(data)), 3: i64(rows)}
    footer = compact(12, {1: i32(1), 2: (9, (12, elements)), 3: i64(rows), 4: (9, (12, [group]))})
    path.write_bytes(b"PAR1" + pages + footer + struct.pack("<I", len(footer)) + b"PAR1")
    return path


def deltas(first: int, then: int, count: int) -> bytes:
    """Return numbers in DELTA_BINARY_PACKED: the first, and one that is more by `then` again and again."""
    block, least = 128, min(then, 0)
    head = varint(block) + varint(4) + varint(count) + signed(first)
    stored = min(block, -(-(count - 1) // 32) * 32)
    more = struct.pack(f"<{stored}I", *[then - least, *[-least] * (stored - 1)])
    # Numbers of no bits: a block of 128 takes a few bytes.
    return head + signed(least) + bytes([32] * 4) + more + (signed(0) + bytes(4)) * (-(-(count - 1) // block) - 1)


def bombs_of_parquet() -> Iterator[Bomb]:
    for kind, encoding, nesting, lie, version in itertools.product(KINDS, ENCODINGS, NESTING, LIES, (1, 2)):
        if (encoding in ("lengths", "prefixes") and kind != "text") or (encoding == "runs") != (kind == "bool"):
            continue
        if encoding == "split" and kind not in ("float", "double", "int32", "fixed"):
            continue
        if encoding == "delta" and kind not in ("int32", "int64"):
            continue
        options = {"kind": kind, "encoding": encoding, "nesting": nesting, "lie": lie, "version": version}
        yield Bomb(" ".join(map(str, options.values())), lambda folder, o=options: write(folder / "x.parquet", **o))
    for columns, rows in ((4000, 1), (40, 2_000_000)):
        yield Bomb(f"{columns} columns", lambda folder, c=columns, r=rows: zeros(folder / "x.parquet", c, r))


def zeros(path: Path, columns: int, rows: int) -> Path:
    table = pa.table({f"x{number}": np.zeros(rows) for number in range(columns)})
    pyarrow.parquet.write_table(table, path, compression="zstd", row_group_size=rows)
    return path
