"""Samples of tar archives as DALI's reader returns them: one array per output."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError, closest
from dataload.sources.file_source import FileSource
from dataload.sources.shards import ShardReader
from dataload.sources.tar.reader import pair_indexes
from dataload.sources.tar.table import load_table
from dataload.storage import storage_of
from dataload.types import Array, Int64Array

Missing: TypeAlias = Literal["empty", "skip", "error"]
"""Policy for samples that lack an output: give an empty array, skip the sample, or raise an error."""

_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_DTYPES = {name.upper(): np.dtype(name) for name in _NUMBERS} | {"FLOAT": np.dtype("float32")}


@dataclass(frozen=True, slots=True)
class Output:
    """One output: the first file of a sample with one of `extensions`, in archive order, read as `dtype`."""

    extensions: tuple[str, ...]
    dtype: np.dtype[Any]


def parse_outputs(ext: Any, dtypes: Any, *, case_sensitive: bool) -> tuple[Output, ...]:
    """Return the outputs for the arguments `ext` and `dtypes`."""
    sets: list[Any] = list(ext) if isinstance(ext, Sequence) and not isinstance(ext, str) else [ext]
    if not sets or not all(isinstance(names, str) for names in sets):
        raise ConfigError(f"ext must be one or more sets of extensions ('jpg;png', 'cls'), got {ext!r}", key="ext")
    if isinstance(dtypes, (str, type)) or not isinstance(dtypes, (Sequence, type(None))):
        dtypes = [dtypes]
    given = list(dtypes or ["UINT8"] * len(sets))
    if len(given) != len(sets):
        message = f"dtypes names {len(given)} types for {len(sets)} outputs: give one for each"
        raise ConfigError(message, key="dtypes", value=dtypes)
    outputs: list[Output] = []
    for names, dtype in zip(sets, given, strict=True):
        extensions = (names if case_sensitive else names.lower()).split(";")
        if not extensions[-1]:  # a trailing semicolon adds no extension
            extensions.pop()
        outputs.append(Output(tuple(extensions), _parse_dtype(dtype)))
    return tuple(outputs)


def _parse_dtype(given: Any) -> np.dtype[Any]:
    """Return the dtype for a name ("INT32"), a member of DALI's enumeration or a numpy type."""
    is_dtype = isinstance(given, (np.dtype, type))
    dtype = np.dtype(cast("Any", given)) if is_dtype else _DTYPES.get(str(getattr(given, "name", given)).upper())
    if dtype is None or dtype not in _DTYPES.values():
        raise ConfigError(f"dtypes: an output cannot have type {given!r}: {closest(given, _DTYPES)}", key="dtypes")
    return dtype


class OutputSource(FileSource[tuple[Array, ...]]):
    """A source of tuples with one array per output. Like DALI, it trusts index files that stay inside the archive."""

    format_name = "tar"

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        index_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
        outputs: tuple[Output, ...],
        *,
        missing: Missing,
        case_sensitive: bool,
    ) -> None:
        # If not `case_sensitive`, the extensions in `outputs` must be in lower case.
        super().__init__(paths, outputs=outputs, missing=missing, case_sensitive=case_sensitive)
        self._indexes = pair_indexes(self._paths, index_paths or False, "index_paths")
        self._settings: tuple[tuple[Output, ...], Missing, bool] = outputs, missing, case_sensitive

    def _open_shard(self, path: str) -> ShardReader[tuple[Array, ...]]:
        index = self._indexes[path] if isinstance(self._indexes, dict) else False
        return _Reader(path, index, *self._settings)


class _Reader(ShardReader[tuple[Array, ...]]):
    def __init__(
        self, path: str, index: str | Literal[False], outputs: Sequence[Output], missing: Missing, case_sensitive: bool
    ) -> None:
        self._file = storage_of(path).map(path)
        self._table = load_table(self._file, index, on_damage="error", verify_index=False)
        self._outputs = outputs
        names = [name if case_sensitive else name.lower() for name in self._table.extensions]
        codes = [[code for code, name in enumerate(names) if name in output.extensions] for output in outputs]
        self._first = [self._table.first(wanted) for wanted in codes]  # one entry per output
        several = [str(number) for number, wanted in enumerate(codes) if self._table.meet(wanted)]
        if several:
            message = f"{path}: several files of one sample match output {', '.join(several)}: the first one is read"
            warnings.warn(message, stacklevel=2)
        self._kept = self._check_samples(missing)

    def __len__(self) -> int:
        return len(self._table) if self._kept is None else len(self._kept)

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[tuple[Array, ...]]:  # noqa: ARG002
        samples = indices if self._kept is None else self._kept[indices]
        return list(zip(*(self._arrays(output, samples) for output in range(len(self._outputs))), strict=True))

    def _check_samples(self, missing: Missing) -> Int64Array | None:  # None: all samples
        everything = np.arange(len(self._table))
        present = np.ones(len(self._table), bool)
        for number, output in enumerate(self._outputs):
            found, _, lengths = self._ranges(number, everything)
            extensions, dtype = ";".join(output.extensions), output.dtype
            odd = lengths % dtype.itemsize != 0
            if bool(odd.any()):
                reason = f"{extensions!r} has {lengths[odd][0]} bytes, which is not a multiple of the size of {dtype}"
                raise self._error("dtypes", int(np.argmax(odd)), reason)
            if missing == "error" and not found.all():
                reason = f"has no {extensions!r}; 'skip' leaves such samples out, 'empty' gives an empty array"
                raise self._error("missing_component_behavior", int(np.argmin(found)), reason)
            present &= found
        return np.flatnonzero(present) if missing == "skip" and not present.all() else None

    def _error(self, key: str, sample: int, reason: str) -> ConfigError:
        named = "" if self._table.keys is None else f" ({self._table.keys.names(np.array([sample]))[0]!r})"
        return ConfigError(f"{key}: {self._file.path}: sample {sample}{named}: {reason}", key=key)

    def _ranges(self, output: int, samples: Int64Array) -> tuple[npt.NDArray[np.bool_], Int64Array, Int64Array]:
        """Return whether each sample has the output (bool), and offset and length of its bytes (0 if missing)."""
        components = self._table.components(self._first[output], samples)
        found = components >= 0
        components = np.maximum(components, 0)
        return found, self._table.offsets(components) * found, self._table.lengths(components) * found

    def _arrays(self, output: int, samples: Int64Array) -> list[Array]:
        _, offsets, lengths = self._ranges(output, samples)
        length, dtype = int(lengths[0]), self._outputs[output].dtype
        if length and bool((lengths == length).all()):
            return list(self._file.gather(offsets, length).view(dtype))
        values = self._file.gather_ranges(offsets, lengths).views()
        return [np.frombuffer(value, np.uint8).copy().view(dtype) for value in values]
