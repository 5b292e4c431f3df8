"""A format that another package adds: a file with a number n holds the records n, n - 1, ..., 1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from dataload.sources.files import FileSource, ShardReader
from dataload.types import Int64Array


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
