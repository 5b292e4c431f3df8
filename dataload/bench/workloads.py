"""Made data to compare with, the same on every machine with the same packages."""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from dataload._util.optional import load_optional
from dataload.errors import ConfigError, closest
from dataload.types import Array, RandomAccessSource

__all__ = ["WORKLOADS", "Workload", "busy_numbers", "get_workload"]

_DIFFERENT = 1000
_PHOTOS = 16
_PHOTO_SHAPE = (375, 500, 3)
_PHOTO_FILES = (
    ("sklearn", "datasets/images", ("china.jpg", "flower.jpg")),
    ("matplotlib", "mpl-data/sample_data", ("grace_hopper.jpg",)),
)
_TOKENS = 50_304
_WORK = 1_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Data of one sort.

    Attributes:
        name: As the command line knows it.
        title: As tables show it.
        records: Records by default.
        batch_size: Records per batch by default.
        formats: The formats that it is written in; ``"generator"`` is none, and has no file.
        make: From a number of records to the records.
        decodes: Fields that hold JPEG files, to be decoded.
        version: Part of the names of cached files; raised when `make` makes something else.
    """

    name: str
    title: str
    records: int
    batch_size: int
    formats: tuple[str, ...]
    make: Callable[[int], RandomAccessSource[Mapping[str, Any]]]
    decodes: tuple[str, ...] = ()
    version: int = 1


_RECORD_FORMATS = ("syrah", "torchrecord", "lmdb", "tar", "array_record")


@dataclass(frozen=True, slots=True)
class _Cycle:
    """A few different records, over and over."""

    records: tuple[Mapping[str, Any], ...]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: SupportsIndex, /) -> Mapping[str, Any]:
        index = operator.index(index)
        if not 0 <= index < self.length:
            raise IndexError(f"index {index} is out of range for {self.length} records")
        return self.records[index % len(self.records)]


def _floats(floats: int, count: int) -> _Cycle:
    values = np.random.default_rng(0).standard_normal((_DIFFERENT, floats), dtype=np.float32)
    return _Cycle(tuple({"x": value} for value in values), count)


def _blobs(count: int) -> _Cycle:
    rng = np.random.default_rng(0)
    return _Cycle(tuple({"bin": rng.bytes(int(size))} for size in rng.integers(20_000, 600_000, 64)), count)


def _photos(count: int) -> _Cycle:
    return _Cycle(tuple({"jpg": file} for file in _jpeg_files()), count)


@lru_cache(maxsize=1)
def _jpeg_files() -> tuple[bytes, ...]:
    """Cuttings of photos that packages ship (scikit-learn, else matplotlib), or smooth noise; all of one size."""
    simplejpeg = load_optional("simplejpeg", needed_by="the workload 'jpeg'", extra="tar")
    rng = np.random.default_rng(0)
    photos = _photographs(simplejpeg.decode_jpeg)
    images = [_cutting(photos[i % len(photos)], rng) if photos else _noise(rng) for i in range(_PHOTOS)]
    return tuple(simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=90) for image in images)


def _cutting(photo: Array, rng: np.random.Generator) -> Array:
    height, width, _ = _PHOTO_SHAPE
    top = int(rng.integers(0, photo.shape[0] - height + 1))
    left = int(rng.integers(0, photo.shape[1] - width + 1))
    return photo[top : top + height, left : left + width]


def _noise(rng: np.random.Generator) -> Array:
    height, width, _ = _PHOTO_SHAPE
    coarse = rng.integers(0, 255, (12, 16, 3)).astype(np.float32)
    return coarse.repeat(32, 0).repeat(32, 1)[:height, :width].astype(np.uint8)


def _photographs(decode: Callable[[bytes], Array]) -> list[Array]:
    """Photos, from files of packages that are not imported for it."""
    for package, folder, names in _PHOTO_FILES:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            files = [Path(place, folder, name) for name in names]
            if all(file.exists() for file in files):
                return [decode(file.read_bytes()) for file in files]
    return []


def _pictures(count: int) -> _Cycle:
    """What TorchRecord's README stores: a picture of 224 x 224 and its label."""
    values = np.random.default_rng(0).integers(0, 255, (32, 224, 224, 3), np.uint8)
    return _Cycle(tuple({"data": values[i % 32], "label": np.array([i % 10], np.int64)} for i in range(160)), count)


def _tokens(count: int) -> _Cycle:
    """Blocks of 1,024 tokens; written one after another they are a token file."""
    values = np.random.default_rng(0).integers(0, _TOKENS, (_DIFFERENT, 1024), np.uint16)
    return _Cycle(tuple({"tokens": value} for value in values), count)


def busy_numbers(sequence: int, count: int) -> Iterator[int]:
    """`count` numbers below 2^16, each of which holds the GIL for tens of microseconds: a decoder in pure Python."""
    value = sequence
    for _ in range(count):
        for number in range(_WORK):
            value = (value * 31 + number) & 0xFFFF
        yield value


def _numbers(count: int) -> _Cycle:
    return _Cycle(tuple({"data": value} for value in busy_numbers(0, min(count, 100))), count)


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("floats-4k", "4 KB records of float32", 100_000, 256, _RECORD_FORMATS, partial(_floats, 1024)),
        Workload("floats-64", "64 B records of float32", 1_000_000, 1024, _RECORD_FORMATS, partial(_floats, 16)),
        Workload("blobs", "20 to 600 KB of bytes", 1_000, 32, _RECORD_FORMATS, _blobs),
        Workload("jpeg", "JPEGs of 500 x 375, decoded", 2_000, 32, _RECORD_FORMATS, _photos, ("jpg",), 2),
        Workload("pictures", "TorchRecord's pictures, 224 x 224", 2_000, 32, _RECORD_FORMATS, _pictures),
        Workload("tokens", "windows of 1,025 tokens, uint16", 100_000, 64, ("tokens",), _tokens),
        Workload("streams", "rows that follow generators of pure Python", 16_000, 16, ("generator",), _numbers),
    )
}
"""By name."""


def get_workload(name: str) -> Workload:
    """The workload of a name.

    Raises:
        ConfigError: There is none.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}: {closest(name, WORKLOADS)}", key="made", value=name)
    return WORKLOADS[name]
