"""Made data, the same on every machine with the same packages."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dataload._util.fingerprint import digest
from dataload._util.lazy import load_optional
from dataload.bench.data import Data, Written, writable_formats, write
from dataload.convert import convert
from dataload.convert.create import create
from dataload.types import Array

Records: TypeAlias = list[Mapping[str, Any]]

_DIFFERENT = 1000
_PHOTOS = 16
_PHOTO_SIZE = (375, 500)
_PHOTO_FILES = (
    ("sklearn", "datasets/images", ("china.jpg", "flower.jpg")),
    ("matplotlib", "mpl-data/sample_data", ("grace_hopper.jpg",)),
)


def repeat_records(records: Records, count: int) -> Records:
    """Return `count` records: a few different ones, over and over."""
    return [records[index % len(records)] for index in range(count)]


def floats(size: int) -> Records:
    """Return records of one field: `size` float32 values."""
    values = np.random.default_rng(0).standard_normal((_DIFFERENT, size), dtype=np.float32)
    return [{"x": value} for value in values]


def blobs(least: int, below: int, different: int) -> Records:
    """Return records of one field: at least `least` and less than `below` bytes."""
    rng = np.random.default_rng(0)
    return [{"bin": rng.bytes(int(size))} for size in rng.integers(least, below, different)]


@lru_cache(maxsize=1)
def _photos() -> Records:
    """Return crops of photos that packages ship (scikit-learn, else matplotlib), or smooth noise; all of one size."""
    simplejpeg = load_optional("simplejpeg", needed_by="JPEG files", extra="tar")
    rng = np.random.default_rng(0)
    photos = photographs(simplejpeg.decode_jpeg)
    images = [_crop(photos[i % len(photos)], rng) if photos else _noise(rng) for i in range(_PHOTOS)]
    return [{"jpg": simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=90)} for image in images]


def jpegs(count: int = _PHOTOS) -> Records:
    """Return records of one field: JPEG files of 500 x 375, of which a few differ."""
    return repeat_records(_photos(), count)


def _crop(photo: Array, rng: np.random.Generator) -> Array:
    top, left = (int(rng.integers(0, have - want + 1)) for have, want in zip(photo.shape, _PHOTO_SIZE, strict=False))
    return photo[top : top + _PHOTO_SIZE[0], left : left + _PHOTO_SIZE[1]]


def _noise(rng: np.random.Generator) -> Array:
    coarse = rng.integers(0, 255, (12, 16, 3)).astype(np.uint8)
    return coarse.repeat(32, 0).repeat(32, 1)[: _PHOTO_SIZE[0], : _PHOTO_SIZE[1]]


def photographs(decode: Callable[[bytes], Array]) -> list[Array]:
    """Read photos from the files of packages, without importing these."""
    for package, folder, names in _PHOTO_FILES:
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or ()) if spec is not None else ():
            files = [Path(location, folder, name) for name in names]
            if all(file.exists() for file in files):
                return [decode(file.read_bytes()) for file in files]
    return []


def busy_numbers(sequence: int, count: int, work: int = 1_000) -> Iterator[int]:
    """Yield `count` numbers below 2^16 and hold the GIL for tens of ns times `work` for each: a pure-Python decoder."""
    value = sequence
    for _ in range(count):
        for number in range(work):
            value = (value * 31 + number) & 0xFFFF
        yield value


WORKLOADS = {"floats-4k": (100_000, 256, 1024), "floats-64": (1_000_000, 1024, 16)}
"""Numbers of records, of those of a batch, and of the float32 values of a record, by name."""


def made_data(name: str, records: int | None = None) -> Data:
    """Return the records of a workload, or the given number of them."""
    count, _, size = WORKLOADS[name]
    made = repeat_records(floats(size), count if records is None else records)
    return Data(name, digest(name, 1, len(made)), made, ("x",), writable_formats())


def write_made(data: Data, format_name: str, cache: Path, shards: int = 1) -> Written:
    """Write made data in a format, unless they are in the cache; with several `shards`, the path is a pattern."""
    if shards == 1:
        return write(data, format_name, cache)
    one = write(replace(data, content=data.content.removesuffix(f"-{shards}")), format_name, cache)
    path = write_shards(Path(one.path), data.records, shards, format=format_name)
    return replace(one, path=path, facts=replace(one.facts, workload=data.name))


def write_shards(file: Path, records: Any, shards: int, **options: Any) -> str:
    """Write records to `shards` files in a directory beside `file`, unless they exist; return their pattern."""
    target = file.parent / f"{shards}-{file.stem}" / file.name
    if not target.parent.exists():
        convert(records, target, shards=shards, **options)
    return str(target.with_name(f"{target.stem}-*-of-{shards:05}{target.suffix}"))


def write_once(target, records, **options):
    """Write what `records` returns, unless the file exists; it appears when it is complete. Return its path."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with create(target, **options) as writer:
            writer.extend(records())
    return str(target)
