"""Formats that another package adds: a plain source class, and a `Format` with options and a writer.

A file of the first with a number n holds the records n, n - 1, ..., 1; one of the second, a number on each line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload.errors import ConfigError
from dataload.sources import FileSource, Format, Options, ShardReader, Writer, require_fields, storage_of
from dataload.types import FieldSpec, Int64Array


class CountdownSource(FileSource[dict[str, Any]]):
    format_name = "countdown"

    def __init__(self, paths: Any, *, fields: Sequence[str] | None = None, step: int = 1) -> None:
        super().__init__(paths, fields=fields, step=step)
        self._step = step

    def _open_shard(self, path: str) -> ShardReader[dict[str, Any]]:
        with open(path, encoding="utf-8") as stream:
            return _Countdown(int(stream.read()), self._step, os.path.basename(path))


class _Countdown(ShardReader[dict[str, Any]]):
    def __init__(self, start: int, step: int, name: str) -> None:
        self._numbers = range(start, 0, -step)
        self._name = name

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[dict[str, Any]]:
        records = [{"number": np.int64(self._numbers[i]), "file": self._name} for i in indices.tolist()]
        return [{name: record[name] for name in fields or record} for record in records]


@dataclass(frozen=True, slots=True, kw_only=True)
class Countdown2Options(Options):
    """Options for reading countdowns.

    Attributes:
        step: Read every so many numbers.
        skip: Leave out these numbers.
    """

    step: int = 1
    skip: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ConfigError(f"step must be at least 1, got {self.step}", key="step", value=self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Countdown2WriterOptions(Options):
    """Options for writing countdowns.

    Attributes:
        width: Pad numbers with zeros to this width.
    """

    width: int = 0


class Countdown2Source(FileSource[dict[str, Any]]):
    """Numbers, a line each."""

    format_name = "countdown2"
    options_type = Countdown2Options

    def _open_shard(self, path: str) -> ShardReader[dict[str, Any]]:
        lines = storage_of(path).read(path).decode().splitlines()[1 :: self.options.step]
        return _Numbers([int(line) for line in lines if int(line) not in self.options.skip])


class _Numbers(ShardReader[dict[str, Any]]):
    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return {"number": FieldSpec("int64", ())}

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[dict[str, Any]]:
        del fields  # there is only one
        return [{"number": np.array(self._numbers[i])} for i in indices.tolist()]


class Countdown2Writer(Writer):
    options_type = Countdown2WriterOptions

    def _begin(self, options: Countdown2WriterOptions) -> None:
        self._width = options.width
        self._stream = self._part.create()
        self._stream.write(b"C2\n")

    def _write(self, record: Any) -> None:
        self._stream.write(b"%0*d\n" % (self._width, int(require_fields(record, "countdown2")["number"])))

    def _finish(self) -> None:
        self._stream.close()

    _discard = _finish


COUNTDOWN2 = Format(
    name="countdown2",
    source="countdown_plugin:Countdown2Source",
    writer="countdown_plugin:Countdown2Writer",
    reader_options=Countdown2Options,
    writer_options=Countdown2WriterOptions,
    suffixes=(".countdown2",),
    magic=b"C2\n",
)
