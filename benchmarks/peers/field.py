"""The field of the records that peers read, and what the modules of peers share."""

import glob
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from dataload._util.indexing import expand_braces
from dataload._util.lazy import load_optional
from dataload.bench.task import Task
from dataload.codecs.codec import resolve_codec
from dataload.errors import ConfigError
from dataload.sources.base import Source
from dataload.types import Array

FieldKind: TypeAlias = Literal["array", "bytes", "image"]
"""Arrays of one shape, bytes of any length, or JPEG files to be decoded to (height, width, 3) uint8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The one field of the records that peers read; `codec` is None where records are the bytes of the field.

    `shards` is about how many files a peer's own format is to have, if it can have several.
    """

    name: str
    kind: FieldKind
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    codec: str | None = None
    shards: int = 1

    @classmethod
    def of_record(cls, record: Mapping[str, Any], *, decodes: bool = False) -> Self:
        """Return the field of a record that has one: an array, or bytes, which are a JPEG file if `decodes`."""
        if len(record) != 1:
            raise ConfigError(f"peers read records of one field, got the fields {sorted(record)}", key="field")
        ((name, value),) = record.items()
        if isinstance(value, np.ndarray):
            return cls(name=name, kind="array", dtype=value.dtype.name, shape=value.shape)
        if not isinstance(value, bytes):
            raise ConfigError(f"field {name!r} must hold arrays or bytes, got {type(value).__name__}", key="field")
        return cls(name=name, kind="image" if decodes else "bytes")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Return the field that `to_options` put into the options of a task."""
        if "field" not in options:
            raise ConfigError("the task of a peer needs the option 'field': see Field.to_options", key="field")
        values: dict[str, Any] = {**options["field"], "shape": tuple(options["field"]["shape"])}
        return cls(**values, codec=options.get("open", {}).get("codec"))

    def to_options(self) -> dict[str, Any]:
        """Return plain values for ``Task.options``, without the codec, which is in the option ``open``."""
        values = {"name": self.name, "kind": self.kind, "dtype": self.dtype, "shape": list(self.shape)}
        return {"field": {**values, "shards": self.shards}}

    @property
    def nbytes(self) -> int:
        """Bytes of one array; 0 for other kinds."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.kind == "array" else 0

    @property
    def component(self) -> str:
        """Extension of the field's files in a tar archive."""
        return f"{self.name}.npy" if self.kind == "array" else self.name

    def values(self, source: Source[Any]) -> Iterator[Any]:
        """Yield the values of a source whose records are the bytes of the field, or have it: arrays, or bytes."""
        decode = self.decoder()
        for start in range(0, len(source), 64):
            for record in source.read(range(start, min(start + 64, len(source)))):
                value = record[self.name] if isinstance(record, dict) else record
                yield decode(value) if self.kind == "array" and isinstance(value, bytes) else value

    def stored(self, value: Any) -> bytes:
        """Return the bytes of a value, as formats of bytes store them."""
        return value.tobytes() if self.kind == "array" else bytes(value)

    def decoder(self) -> Callable[[Any], Any]:
        """Return a function that decodes a record, or a component of a tar archive; made once a batch."""
        codec = resolve_codec(self.codec)
        if codec is not None:
            return lambda data: codec.decode(data)[self.name]
        if self.kind == "array":
            nbytes, dtype, shape = self.nbytes, np.dtype(self.dtype), self.shape
            return lambda data: np.frombuffer(bytearray(data[-nbytes:]), dtype).reshape(shape)
        return decode_jpeg if self.kind == "image" else bytes

    def column(self, values: Sequence[Any]) -> Any:
        """Return the column of a batch, given its records: (rows, *shape), or a list of bytes."""
        if self.codec is None and self.kind == "array" and len(values[0]) == self.nbytes:
            return np.frombuffer(b"".join(values), self.dtype).reshape(-1, *self.shape)
        decoded = [*map(self.decoder(), values)]
        return decoded if self.kind == "bytes" else np.stack(decoded)


def load(module: str, package: str) -> Any:
    return load_optional(module, needed_by=f"the peer {package}", extra="bench", package=package)


def worker_options(task: Task) -> dict[str, Any]:
    """Return the options of torch's DataLoader, and of those that are built on it, for the workers of a task."""
    return {
        "num_workers": task.workers,
        "persistent_workers": task.workers > 0,
        **(tuned(task) if task.workers else {}),
    }


def tuned(task: Task) -> dict[str, Any]:
    """Return the peer's own settings that are tried, see `Peer.grid`."""
    return task.options.get("tuned", {})


def batches_of_rows(task: Task, count: int, epoch: int = 0) -> Iterator[Any]:
    """Yield the rows of each batch of an epoch, in the task's order: for peers that leave orders to their users."""
    order = np.arange(count)
    if task.order == "global":
        np.random.default_rng((task.seed, epoch)).shuffle(order)
    return (order[start : start + task.batch_size] for start in range(0, count, task.batch_size))


def tensor_columns(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a batch of tensors or lists, with tensors seen as numpy arrays; nothing is copied."""
    return {name: value.numpy() if hasattr(value, "numpy") else value for name, value in batch.items()}


def expand_files(path: str) -> list[str]:
    """Return the files of a path, which may have braces (``{0..3}``) and wildcards; a directory is one."""
    files = [file for name in expand_braces(path) for file in sorted(glob.glob(name))]
    if not files:
        raise ConfigError(f"there is no {path}", key="path", value=path)
    return files


def decode_jpeg(data: Any) -> Array:
    """Decode to (height, width, 3) uint8 by dataload's own decoder, so that loaders are compared and not decoders."""
    return load_optional("simplejpeg", needed_by="decoding JPEG", extra="tar").decode_jpeg(data, "RGB")


@dataclass(frozen=True)
class DecodeJpeg:
    """A transform of samples, or of batches whose field is a list. Picklable, for worker processes."""

    name: str

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        value = sample[self.name]
        return {self.name: [*map(decode_jpeg, value)] if isinstance(value, list) else decode_jpeg(value)}
