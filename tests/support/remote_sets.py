"""Small data sets of each format, for tests of data at URLs."""

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

import dataload

MSGPACK = {"codec": "msgpack"}
FORMATS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "syr": ("syr", {}, {}),
    "tar": ("tar", {}, {"decode": "auto"}),
    "torchrecord": ("torchrecord", {}, {}),
    "lmdb": ("lmdb", MSGPACK, MSGPACK),
    "array_record": ("array_record", {**MSGPACK, "options": "group_size:1,brotli:1"}, MSGPACK),
    "uncompressed": ("array_record", {**MSGPACK, "options": "group_size:1,uncompressed"}, MSGPACK),
    "tokens": ("npy", {}, {"format": "tokens", "window": 16}),
    "zstandard": ("array_record", {**MSGPACK, "options": "group_size:1"}, MSGPACK),
}
"""Suffix, options of the writer and options of the reader, by name."""


def sampled(cases: Iterable[Any], sample: Container[Any]) -> list[Any]:
    """Return the cases of a parametrized test, of which `make test` runs `sample` and `make test-remote` the others."""
    return samples.sampled(cases, sample, pytest.mark.remote)


def write_shards(directory: Path, name: str, shards: int, records: int, nbytes: int) -> None:
    """Write ``part-00``, ``part-01``, ... with records of the fields x, so many random bytes, and n, their index."""
    suffix, options, _ = FORMATS[name]
    random = np.random.default_rng(0)
    for shard in range(shards):
        path = directory / f"part-{shard:02}.{suffix}"
        if suffix == "npy":
            np.save(path, random.integers(0, 60000, 16 * records).astype(np.uint16))
            continue
        with dataload.create(path, **options) as writer:
            for row in range(records):
                writer.write({"x": random.integers(0, 255, nbytes).astype(np.uint8), "n": shard * records + row})


def proxied(proxy: Any) -> dict[str, Any]:
    """Return the storage options for S3 behind a proxy; the credentials are in the environment."""
    return {"endpoint": proxy.endpoint, "client_options": {"allow_http": True}}
