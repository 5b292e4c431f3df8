"""A source of the simplest sort: a text file with the hexadecimal digits of one record per line.

It is the honest one from which the wrong sources of `dataload.testing.faults` are made, and an example of a backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataload.errors import CorruptFileError
from dataload.sources.files import FileSource, ShardReader
from dataload.testing.traits import SourceTraits
from dataload.types import FieldSpec, Int64Array

__all__ = ["LineBackend", "LineFile", "LineSource", "line_record", "parse_line"]

_END = b"end"


class LineFile(ShardReader[dict[str, Any]]):
    """The lines of one file, in memory."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as stream:
            *lines, end = stream.read().split(b"\n")
        if end != _END:
            raise CorruptFileError(f"expected {_END!r} as the last line, found {end[:20]!r}", path=path)
        self.path = path
        self.lines = [parse_line(line, path, index) for index, line in enumerate(lines)]

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The two that every record has."""
        return {"x": FieldSpec("float32", (3, 4)), "data": FieldSpec("bytes", ())}

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[dict[str, Any]]:
        """See `ShardReader.read`."""
        return [line_record(self.lines[index], fields) for index in indices.tolist()]


def parse_line(line: bytes, path: str, index: int) -> bytes:
    """The bytes that a line stands for."""
    try:
        return bytes.fromhex(line.decode())
    except ValueError as error:
        raise CorruptFileError(f"a line that is no hexadecimal number: {error}", path=path, index=index) from error


def line_record(data: bytes, fields: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The record that these bytes hold."""
    values = {"x": np.frombuffer(data[:12], np.uint8).reshape(3, 4).astype(np.float32), "data": data[12:]}
    return values if fields is None else {name: values[name] for name in fields}


def _line(record: dict[str, Any]) -> bytes:
    return (record["x"].astype(np.uint8).tobytes() + record["data"]).hex().encode()


class LineSource(FileSource[dict[str, Any]]):
    """The honest one: records ``{"x": (3, 4) float32, "data": bytes}``."""

    format_name = "lines"

    def _open_shard(self, path: str) -> ShardReader[dict[str, Any]]:
        return LineFile(path)


class LineBackend:
    """`write` and `open` for `LineSource` and its variants.

    Args:
        source: The variant.
    """

    traits = SourceTraits(suffix=".lines", several_paths=True, corruptions=("no_end", "no_number"))

    def __init__(self, source: type[Any] = LineSource) -> None:
        self.source = source

    def write(self, path: Path, records: Sequence[Any]) -> None:
        """One line per record: of what the suite offers, the small integers and the bytes."""
        path.write_bytes(b"\n".join([*map(_line, self.expected(records)), _END]))

    def open(self, path: Any) -> Any:
        """The variant, on these files."""
        return self.source(path)

    def expected(self, records: Sequence[Any]) -> Sequence[Any]:
        """Only what a line holds."""
        return [line_record(_bytes_of(record)) for record in records]

    def corrupt(self, path: Path, kind: str) -> None:
        """Take away the last line, or write a digit that is none."""
        data = path.read_bytes()
        path.write_bytes(data[: -len(_END)] if kind == "no_end" else b"?" + data[1:])


def _bytes_of(record: dict[str, Any]) -> bytes:
    """Twelve bytes for the array, and some: whatever the fields of the record are."""
    parts = [np.asarray(value).tobytes() if not isinstance(value, bytes) else value for value in record.values()]
    data = b"".join(parts)
    return data[:12].ljust(12, b"\0") + data[12:]
