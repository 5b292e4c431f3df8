"""The simplest file format: a text file with one record per line, in hexadecimal.

It is an example of a source and of a test backend, and the base of the deliberately wrong sources on which the suite
itself is tested.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataload.errors import CorruptFileError
from dataload.sources.file_source import FileSource
from dataload.sources.shards import ShardReader
from dataload.testing.cases import SourceTraits
from dataload.types import FieldSpec, Int64Array

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
        return {"x": FieldSpec("float32", (3, 4)), "data": FieldSpec("bytes", ())}

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[dict[str, Any]]:
        return [line_record(self.lines[index], fields) for index in indices.tolist()]


def parse_line(line: bytes, path: str, index: int) -> bytes:
    """Decode one line; raise CorruptFileError if it is not hexadecimal."""
    try:
        return bytes.fromhex(line.decode())
    except ValueError as error:
        raise CorruptFileError(f"a line is not a hexadecimal number: {error}", path=path, index=index) from error


def line_record(data: bytes, fields: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the record that these bytes hold."""
    values = {"x": np.frombuffer(data[:12], np.uint8).reshape(3, 4).astype(np.float32), "data": data[12:]}
    return values if fields is None else {name: values[name] for name in fields}


def _line(record: dict[str, Any]) -> bytes:
    return (record["x"].astype(np.uint8).tobytes() + record["data"]).hex().encode()


class LineSource(FileSource[dict[str, Any]]):
    """A correct source of records ``{"x": (3, 4) float32, "data": bytes}``."""

    format_name = "lines"

    def _open_shard(self, path: str) -> ShardReader[dict[str, Any]]:
        return LineFile(path)


class LineBackend:
    """The test backend of `LineSource` and of wrong variants of it.

    Args:
        source: The class to test.
    """

    traits = SourceTraits(suffix=".lines", several_paths=True, corruptions=("no_end", "no_number"))

    def __init__(self, source: type[Any] = LineSource) -> None:
        self.source = source

    def write(self, path: Path, records: Sequence[Any]) -> None:
        path.write_bytes(b"\n".join([*map(_line, self.expected(records)), _END]))

    def open(self, path: Any) -> Any:
        """Return the source for these files."""
        return self.source(path)

    def expected(self, records: Sequence[Any]) -> Sequence[Any]:
        """Return the part of each record that a line can hold."""
        return [line_record(_bytes_of(record)) for record in records]

    def corrupt(self, path: Path, kind: str) -> None:
        """Remove the last line, or replace a digit."""
        data = path.read_bytes()
        path.write_bytes(data[: -len(_END)] if kind == "no_end" else b"?" + data[1:])


def _bytes_of(record: dict[str, Any]) -> bytes:
    """Return twelve bytes for the array, followed by all remaining bytes of the record."""
    parts = [np.asarray(value).tobytes() if not isinstance(value, bytes) else value for value in record.values()]
    data = b"".join(parts)
    return data[:12].ljust(12, b"\0") + data[12:]
