"""The field of the records that peers read, and what the modules of peers share."""

import glob
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from dataload._util.indexing import expand_braces
from dataload._util.lazy import load_optional
from dataload.bench.task import Task
from dataload.errors import ConfigError
from dataload.sources.base import Source
from dataload.types import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The one field of the records that peers read: arrays of one shape, or, without a shape, files.

    `shards` is about how many files a peer's own format is to have, if it can have several.
    """

    name: str
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    shards: int = 1

    @classmethod
    def of_record(cls, record: Mapping[str, Any], shards: int = 1) -> Self:
        """Return the field of a record that has one."""
        ((name, value),) = record.items()
        return cls(name=name, dtype=value.dtype.name, shape=value.shape, shards=shards)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Return the field that `to_options` put into the options of a task."""
        return cls(**{**options["field"], "shape": tuple(options["field"]["shape"])})

    def to_options(self) -> dict[str, Any]:
        """Return plain values for ``Task.options``."""
        return {"field": {**asdict(self), "shape": list(self.shape)}}

    @property
    def nbytes(self) -> int:
        """Bytes of one array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def component(self) -> str:
        """Extension of the field's files in a tar archive."""
        return f"{self.name}.npy" if self.shape else self.name

    def values(self, source: Source[Any]) -> Iterator[Array]:
        """Yield the values of a source."""
        for start in range(0, len(source), 64):
            for record in source.read(range(start, min(start + 64, len(source)))):
                yield record[self.name]

    def decoder(self) -> Callable[[Any], Any]:
        """Return a function that decodes the bytes of an array, or a component of a tar archive; made once a batch."""
        nbytes, dtype, shape = self.nbytes, np.dtype(self.dtype), self.shape
        return lambda data: np.frombuffer(bytearray(data[-nbytes:]), dtype).reshape(shape)

    def column(self, values: Sequence[Any]) -> Array:
        """Return the column of a batch, given its records: (rows, *shape)."""
        if len(values[0]) == self.nbytes:
            return np.frombuffer(b"".join(values), self.dtype).reshape(-1, *self.shape)
        return np.stack([*map(self.decoder(), values)])


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
