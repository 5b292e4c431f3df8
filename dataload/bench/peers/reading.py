"""What the readings of peers share: the field that they read, the files, and the shape of a `Reading`."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Self, TypeAlias, cast

import numpy as np

from dataload._util.indexing import expand_braces
from dataload._util.optional import load_optional
from dataload.bench.checksum import check_batch
from dataload.bench.task import Order, Task
from dataload.codecs.codec import resolve_codec
from dataload.errors import ConfigError
from dataload.types import Array

__all__ = ["Field", "FieldKind", "FunctionReading", "decode_jpeg", "expand_files", "load", "refuse_order", "versions"]

FieldKind: TypeAlias = Literal["array", "bytes", "image"]
"""Arrays of one shape, bytes of any length, JPEG files to be decoded to (height, width, 3) uint8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The one field of the records that peers read.

    Attributes:
        name: Of the field.
        kind: What it holds.
        dtype: Name of the dtype of arrays.
        shape: Shape of one array; () for what is none.
        codec: What the bytes of a record were encoded with in the formats that store only bytes; None where they are
            the bytes of the field.
    """

    name: str
    kind: FieldKind
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    codec: str | None = None

    @classmethod
    def of_record(cls, record: Mapping[str, Any], *, decodes: bool = False) -> Self:
        """The field of a record that has one: an array, or bytes, which are a JPEG file if `decodes`.

        Raises:
            ConfigError: The record has several fields, or one of another type.
        """
        if len(record) != 1:
            raise ConfigError(f"peers read records of one field, got the fields {sorted(record)}", key="field")
        ((name, value),) = record.items()
        if isinstance(value, np.ndarray):
            array = cast("Array", value)
            return cls(name=name, kind="array", dtype=array.dtype.name, shape=array.shape)
        if not isinstance(value, bytes):
            raise ConfigError(f"field {name!r} must hold arrays or bytes, got {type(value).__name__}", key="field")
        return cls(name=name, kind="image" if decodes else "bytes")

    @classmethod
    def of(cls, task: Task) -> Self:
        """What `to_options` put into the options of a task."""
        return cls.from_options(task.options)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Read what `to_options` gave.

        Raises:
            ConfigError: It is not there.
        """
        if "field" not in options:
            raise ConfigError("the task of a peer needs the option 'field': see Field.to_options", key="field")
        codec = options.get("open", {}).get("codec")
        values: dict[str, Any] = {**options["field"], "codec": codec}
        values["shape"] = tuple(values["shape"])
        return cls(**values)

    def to_options(self) -> dict[str, Any]:
        """As plain values for ``Task.options``; the codec is taken from the option ``open``."""
        return {"field": {"name": self.name, "kind": self.kind, "dtype": self.dtype, "shape": list(self.shape)}}

    @property
    def nbytes(self) -> int:
        """Bytes of one array; 0 for what is none."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.kind == "array" else 0

    @property
    def component(self) -> str:
        """What a file of a tar archive with this field is called behind the key."""
        return f"{self.name}.npy" if self.kind == "array" else self.name

    def stored(self, value: Any) -> bytes:
        """The bytes of a value, as formats of bytes store them."""
        return value.tobytes() if self.kind == "array" else bytes(value)

    def decoder(self) -> Callable[[Any], Any]:
        """What makes a value of the bytes of a record, or of a component of a tar archive; made once a batch.

        It takes bytes or a memoryview, and gives bytes, or an array that can be written to and owns its memory, as
        torch wants it. Of an array the last bytes count, so that those of an ``.npy`` file serve.
        """
        codec = resolve_codec(self.codec)
        if codec is not None:
            return lambda data: codec.decode(data)[self.name]
        if self.kind == "array":
            nbytes, dtype, shape = self.nbytes, np.dtype(self.dtype), self.shape
            return lambda data: np.frombuffer(bytearray(data[-nbytes:]), dtype).reshape(shape)
        return decode_jpeg if self.kind == "image" else bytes

    def column(self, values: Sequence[Any]) -> Any:
        """The column of a batch from what its records store: (rows, *shape), or a list of bytes."""
        if self.codec is None and self.kind == "array" and len(values[0]) == self.nbytes:
            return np.frombuffer(b"".join(values), self.dtype).reshape(-1, *self.shape)
        decoded = [*map(self.decoder(), values)]
        return decoded if self.kind == "bytes" else np.stack(decoded)


class FunctionReading:
    """A `dataload.bench.task.Reading` put together from functions.

    Args:
        settings: To be shown.
        batches: From the number of an epoch to its batches.
        columns: From a batch as it is given to field -> array, or list of bytes; without copying.
        held: What is closed at the end.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        batches: Callable[[int], Iterator[Any]],
        columns: Callable[[Any], Mapping[str, Any]] = lambda batch: batch,
        held: ExitStack | None = None,
    ) -> None:
        self.settings = settings
        self._batches: Callable[[int], Iterator[Any]] | None = batches
        self.columns = columns
        self._held = held or ExitStack()

    def batches(self, epoch: int) -> Iterator[Any]:
        """See `Reading`."""
        if self._batches is None:
            raise ConfigError("this reading is closed: make another one")
        return self._batches(epoch)

    def check(self, batch: Any) -> tuple[int, int, int]:
        """See `Reading`."""
        return check_batch(self.columns(batch))

    def close(self) -> None:
        """Drop the loader, which ends its workers, then close what is held."""
        self._batches = None
        self._held.close()


def load(module: str, package: str) -> Any:
    """Import a module of a peer.

    Raises:
        MissingDependencyError: It is not installed.
    """
    return load_optional(module, needed_by=f"the peer {package}", extra="bench", package=package)


def versions(*packages: str) -> dict[str, str]:
    """Versions of those of the packages that are installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def refuse_order(task: Task, *orders: Order) -> None:
    """Raise unless the order of a task is one of `orders`.

    Raises:
        ConfigError: It is not.
    """
    if task.order not in orders:
        raise ConfigError(
            f"{task.name} has the orders {', '.join(orders)}, not {task.order!r}", key="order", value=task.order
        )


def expand_files(path: str) -> list[str]:
    """The files of a path, which may have braces (``{0..3}``) and wildcards; a directory is one.

    Raises:
        ConfigError: There are none.
    """
    files = [file for name in expand_braces(path) for file in sorted(glob.glob(name))]
    if not files:
        raise ConfigError(f"there is no {path}", key="path", value=path)
    return files


def decode_jpeg(data: Any) -> Array:
    """(height, width, 3) uint8, by the decoder that dataload uses, so that loaders are compared and not decoders."""
    simplejpeg = load_optional("simplejpeg", needed_by="decoding JPEG", extra="tar")
    return simplejpeg.decode_jpeg(data, "RGB")
