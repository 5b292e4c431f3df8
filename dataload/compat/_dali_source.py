"""Samples of tar archives as DALI's reader gives them: one array for each output."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dataload.compat._dali_arguments import Missing, Output
from dataload.errors import ConfigError
from dataload.sources.files import FileSource, ShardReader
from dataload.sources.tar.samples import SampleTable
from dataload.sources.tar.table import load_table
from dataload.storage.local.mapped import MappedFile
from dataload.types import Array, Int64Array

__all__ = ["OutputSource"]


class OutputSource(FileSource[tuple[Array, ...]]):
    """Tar archives whose records are tuples: for each output the bytes of one file, as an array of its dtype.

    Indexes are believed, as DALI believes them, as long as they stay inside the archive.

    Args:
        paths: The archives, in order; one may stand there twice.
        indexes: Archive -> path of its index, False to scan it.
        outputs: What to read of each sample.
        missing: What a sample that lacks an output does.
        case_sensitive: False compares extensions in lower case; those of `outputs` are then.

    Raises:
        ConfigError: On first use, when a sample lacks an output (`missing` is "error"), or the size of a file is no
            multiple of its dtype's.
        CorruptFileError: On first use, when archive or index contradict their format or each other.
    """

    format_name = "tar"

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        indexes: Mapping[str, str | Literal[False]],
        outputs: tuple[Output, ...],
        *,
        missing: Missing,
        case_sensitive: bool,
    ) -> None:
        super().__init__(paths, outputs=outputs, missing=missing, case_sensitive=case_sensitive)
        self._indexes = indexes
        self._outputs = outputs
        self._missing: Missing = missing
        self._case_sensitive = case_sensitive

    def _open_shard(self, path: str) -> ShardReader[tuple[Array, ...]]:
        return _Reader(path, self._indexes[path], self._outputs, self._missing, self._case_sensitive)


@dataclass(frozen=True, slots=True)
class _Column:
    """One output in one archive.

    Attributes:
        output: What was asked for.
        first: See `SampleTable.first`.
    """

    output: Output
    first: Array | int


class _Reader(ShardReader[tuple[Array, ...]]):
    def __init__(
        self,
        path: str,
        index: str | Literal[False],
        outputs: tuple[Output, ...],
        missing: Missing,
        case_sensitive: bool,
    ) -> None:
        self._file = MappedFile(path)
        self._table = load_table(self._file, index, on_damage="error", verify_index=False)
        names = [name if case_sensitive else name.lower() for name in self._table.extensions]
        codes = [[code for code, name in enumerate(names) if name in output.extensions] for output in outputs]
        self._columns = [_Column(o, self._table.first(c)) for o, c in zip(outputs, codes, strict=True)]
        several = [str(number) for number, places in enumerate(codes) if self._table.meet(places)]
        if several:
            message = f"{path}: several files of one sample match output {', '.join(several)}: the first one is read"
            warnings.warn(message, stacklevel=2)
        self._kept = self._check_samples(missing)

    def __len__(self) -> int:
        return len(self._table) if self._kept is None else len(self._kept)

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[tuple[Array, ...]]:  # noqa: ARG002
        """See `ShardReader.read`."""
        self._file.check()
        samples = indices if self._kept is None else self._kept[indices]
        return list(zip(*(self._arrays(column, samples) for column in self._columns), strict=True))

    def _check_samples(self, missing: Missing) -> Int64Array | None:
        """The numbers of the samples that are read; None for all of them."""
        everything = np.arange(len(self._table))
        present = np.ones(len(self._table), bool)
        for column in self._columns:
            found, _, lengths = self._places(column, everything)
            extensions, dtype = ";".join(column.output.extensions), column.output.dtype
            odd = lengths % dtype.itemsize != 0
            if bool(odd.any()):
                what = f"{extensions!r} has {lengths[odd][0]} bytes, which are no whole number of {dtype}"
                raise self._error("dtypes", int(np.argmax(odd)), what)
            if missing == "error" and not found.all():
                what = f"there is no {extensions!r}; 'skip' leaves such samples out, 'empty' gives an empty array"
                raise self._error("missing_component_behavior", int(np.argmin(found)), what)
            present &= found
        return np.flatnonzero(present) if missing == "skip" and not present.all() else None

    def _error(self, key: str, sample: int, what: str) -> ConfigError:
        named = "" if self._table.keys is None else f" ({self._table.keys.names(np.array([sample]))[0]!r})"
        return ConfigError(f"{key}: {self._file.path}: in sample {sample}{named} {what}", key=key)

    def _places(self, column: _Column, samples: Int64Array) -> tuple[npt.NDArray[np.bool_], Int64Array, Int64Array]:
        """Whether each of `samples` has the output, and offset and length of its bytes: 0 where it has not."""
        components = _components(self._table, column.first, samples)
        found = components >= 0
        components = np.maximum(components, 0)
        return found, self._table.offsets(components) * found, self._table.lengths(components) * found

    def _arrays(self, column: _Column, samples: Int64Array) -> list[Array]:
        _, offsets, lengths = self._places(column, samples)
        length, dtype = int(lengths[0]), column.output.dtype
        if length and bool((lengths == length).all()):
            return list(self._file.gather(offsets, length).view(dtype))
        self._file.hint(offsets, lengths)
        data = self._file.data
        places = zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True)
        return [data[start:stop].copy().view(dtype) for start, stop in places]


def _components(table: SampleTable, first: Any, samples: Int64Array) -> Int64Array:
    """The number of the component of each of `samples`, -1 where there is none."""
    if not isinstance(first, int):
        return first[samples]
    return np.full(len(samples), -1, np.int64) if first < 0 else samples * len(table.codes) + first
