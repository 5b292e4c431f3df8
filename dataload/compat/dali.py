"""DALI's ``fn.readers.webdataset`` without DALI: the same keywords, samples, shards and epochs.

```python
from dataload.compat.dali import webdataset

pipe = webdataset(paths=["a.tar"], index_paths=["a.idx"], ext=["jpg;png", "cls"], batch_size=32)
images, labels = next(pipe)  # or pipe.run()
```

A batch is a tuple of outputs. An output is a list of `batch_size` one-dimensional arrays, each holding the undecoded
bytes of a file. Results equal DALI's, with these deliberate differences:

- The orders of `random_shuffle` and `shuffle_after_epoch` keep DALI's bounds, but differ for the same seed.
- An archive without members has no samples. DALI gives one empty sample.
- A file that fills two outputs is missing in neither.
- Without an index, hidden files are never components, PAX names and base-256 sizes are understood, and an
  archive that is cut off in the padding of its last file is refused with `dont_use_mmap`, too.
- An offset or size beyond the archive is reported at the start, not when its sample is read.
- A negative `shard_id` is refused. An index of version 1.2 may lack the names, as DALI's documentation shows.
- Flags are True, False, 1 or 0, and numbers must be whole. DALI cuts fractions off and takes ``"no"`` for True.
- `reader_meta()` and `epoch_size()` take no reader name, because the pipeline has only one reader.
- Errors are dataload's, most of them a ValueError; DALI raises a RuntimeError.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from dataload._util.indexing import even_split
from dataload._util.randomness import check_seed
from dataload._util.settings import check_choice, check_count
from dataload.errors import ConfigError, closest
from dataload.samplers import PoolShuffle, Sequential, ShardSequential, Subset
from dataload.sources.file_source import FileSource
from dataload.sources.shards import ShardReader
from dataload.sources.tar.reader import pair_indexes
from dataload.sources.tar.table import load_table
from dataload.storage import storage_of
from dataload.types import Array, Int64Array, Sampler

__all__ = ["WebdatasetReader", "webdataset"]

_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def webdataset(
    *,
    paths: _Paths,
    ext: str | Sequence[str],
    batch_size: int,
    index_paths: _Paths | None = None,
    missing_component_behavior: str | None = "",
    dtypes: Any = None,
    case_sensitive_extensions: bool | None = True,
    num_shards: float | None = 1,
    shard_id: float | None = 0,
    stick_to_shard: bool | None = False,
    pad_last_batch: bool | None = False,
    random_shuffle: bool | None = False,
    initial_fill: float | None = 1024,
    seed: float | None = -1,
    shuffle_after_epoch: bool | None = False,
    shuffle_after_epoch_seed: float | None = None,
    lazy_init: bool | None = False,
    dont_use_mmap: bool | None = False,
    read_ahead: bool | None = False,
    prefetch_queue_depth: float | None = 1,
    skip_cached_images: bool | None = False,
    preserve: bool | None = False,
    bytes_per_sample_hint: float | Sequence[float] | None = 0,
    tensor_init_bytes: float | None = 1 << 20,
    device: str | None = None,
    name: str | None = None,
) -> WebdatasetReader:
    """Read tar archives of samples as DALI does.

    `dont_use_mmap`, `read_ahead`, `prefetch_queue_depth`, `skip_cached_images`, `preserve`, `bytes_per_sample_hint`,
    `tensor_init_bytes`, `device` and `name` only tune DALI. They are checked and otherwise ignored: each batch is read
    on request. `dataload.Loader` prefetches. For each keyword, None means its default.

    Without `index_paths` the archives are scanned. If several files of a sample match an output, the first in the
    archive is read, with a warning. `dtypes` are names, members of DALI's enumeration or numpy types. With
    `random_shuffle`, a sample comes at most ``initial_fill - 1`` positions early.
    """
    given = _convert(locals())
    if given["device"] is not None:
        check_choice("device", given["device"], ("cpu",))
    if not isinstance(given["name"], (str, type(None))):
        raise ConfigError(f"name must be a string or None, got {given['name']!r}", key="name", value=given["name"])
    check_count("prefetch_queue_depth", given["prefetch_queue_depth"], least=1)
    if given["shuffle_after_epoch"] and given["stick_to_shard"]:
        raise ConfigError("shuffle_after_epoch and stick_to_shard cannot both be set", key="shuffle_after_epoch")
    missing = str(given["missing_component_behavior"]).lower() or "empty"
    check_choice("missing_component_behavior", missing, get_args(Missing))
    num_shards = check_count("num_shards", given["num_shards"], least=1)
    shuffles, reorders = given["random_shuffle"], given["shuffle_after_epoch"]
    pool_size = check_count("initial_fill", given["initial_fill"], least=1, below=1 << 31) if shuffles else None
    archives_seed = check_seed(given["shuffle_after_epoch_seed"] or 0)
    plan = EpochOrder(
        batch_size=check_count("batch_size", batch_size, least=1),
        num_shards=num_shards,
        shard_id=check_count("shard_id", given["shard_id"], least=0, below=num_shards),
        stick=given["stick_to_shard"] or reorders,
        pad=given["pad_last_batch"],
        pool_size=pool_size,
        seed=secrets.randbits(63) if check_seed(given["seed"]) == -1 else given["seed"],
        archives_seed=archives_seed if reorders else None,
    )
    source = OutputSource(
        paths,
        index_paths,
        parse_outputs(ext, dtypes, case_sensitive=given["case_sensitive_extensions"]),
        missing=cast("Missing", missing),
        case_sensitive=given["case_sensitive_extensions"],
    )
    reader = WebdatasetReader(source, plan)
    if not given["lazy_init"]:
        reader.reader_meta()
    return reader


def _convert(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments as DALI does: None to the default, 0 and 1 to flags, 8.0 to 8."""
    converted = dict(arguments)
    for name, default in (webdataset.__kwdefaults__ or {}).items():
        value = arguments[name]
        if value is None:
            converted[name] = default
        elif isinstance(default, bool):
            if not isinstance(value, (int, float, np.generic)) or value not in (0, 1):
                raise ConfigError(f"{name} must be True or False, got {value!r}", key=name, value=value)
            converted[name] = bool(value)
        elif isinstance(value, (float, np.floating)) and value.is_integer():
            converted[name] = int(value)
    return converted


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The settings of the order of samples; see `webdataset`."""

    batch_size: int
    num_shards: int
    shard_id: int
    stick: bool
    pad: bool
    pool_size: int | None  # None: do not shuffle
    seed: int
    archives_seed: int | None  # None: keep the archives' order


class IndexStream:
    """An endless stream of sample indices; `lengths` are the samples per archive."""

    def __init__(self, plan: EpochOrder, lengths: tuple[int, ...]) -> None:
        self._plan = plan
        self.samples: int = sum(lengths)
        if self.samples < plan.num_shards:
            message = f"num_shards is {plan.num_shards}, but there are only {self.samples} samples: each needs one"
            raise ConfigError(message, key="num_shards", value=plan.num_shards)
        # With padding, every shard has the size of the largest.
        self.samples_padded: int = -(-self.samples // plan.num_shards) * plan.num_shards if plan.pad else self.samples
        seed = plan.archives_seed
        self._all: Sampler = Sequential(self.samples) if seed is None else ShardSequential(lengths, seed)
        self._epoch = -1
        self._begin_epoch()

    def take(self, count: int) -> Int64Array:
        """Return the next indices, (count,) int64."""
        parts: list[Int64Array] = []
        while count:
            if self._position == self._length:
                self._begin_epoch()
            stop = min(self._position + count, self._length)
            # Padding repeats the last sample of the order.
            positions = np.minimum(np.arange(self._position, stop), len(self._order) - 1)
            parts.append(self._order.indices(positions, epoch=self._epoch))
            count -= stop - self._position
            self._position = stop
        return np.concatenate(parts)

    def _begin_epoch(self) -> None:
        plan = self._plan
        self._epoch += 1
        self._position = 0
        shard = plan.shard_id if plan.stick else (plan.shard_id + self._epoch) % plan.num_shards
        self._order: Sampler = Subset(self._all, range(*even_split(self.samples, plan.num_shards)[shard]))
        if plan.pool_size is not None:
            self._order = PoolShuffle(self._order, plan.pool_size, plan.seed)
        self._length = len(self._order)
        if plan.pad:
            self._length = -(-self.samples_padded // (plan.num_shards * plan.batch_size)) * plan.batch_size


class WebdatasetReader(Iterator[tuple[list[Array], ...]]):
    """An endless iterator over batches, made by `webdataset`, in place of a DALI pipeline with one reader.

    The archives are released by `close`, at the end of a ``with`` block, or when the reader is garbage-collected.
    """

    def __init__(self, source: OutputSource, plan: EpochOrder) -> None:
        self._source = source
        self._plan = plan
        self._stream: IndexStream | None = None

    def __next__(self) -> tuple[list[Array], ...]:
        samples = self._source.read(self._indices().take(self._plan.batch_size))
        return tuple(map(list, zip(*samples, strict=True)))

    def run(self) -> tuple[list[Array], ...]:
        """Return the next batch: for each output a list of one-dimensional arrays, owned by the caller."""
        return next(self)

    def reader_meta(self, name: str | None = None) -> dict[str, int]:  # noqa: ARG002 - there is one reader
        """Return sizes and settings under DALI's names for them."""
        stream, plan = self._indices(), self._plan
        return {
            "epoch_size": stream.samples,
            "epoch_size_padded": stream.samples_padded,
            "number_of_shards": plan.num_shards,
            "shard_id": plan.shard_id,
            "pad_last_batch": int(plan.pad),
            "stick_to_shard": int(plan.stick),
        }

    def epoch_size(self, name: str | None = None) -> int:
        """Return the number of samples in all shards, including padding if `pad_last_batch` is set."""
        return self.reader_meta(name)["epoch_size_padded"]

    def close(self) -> None:
        """Release the archives; reading another batch then raises `ClosedSourceError`."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _indices(self) -> IndexStream:
        if self._stream is None:
            self._stream = IndexStream(self._plan, self._source.shard_lengths)
        return self._stream


Missing: TypeAlias = Literal["empty", "skip", "error"]

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
        paths: _Paths,
        index_paths: _Paths | None,
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
