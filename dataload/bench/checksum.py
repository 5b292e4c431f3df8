"""A checksum that shows that two readers read the same records, in any order and any batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from dataload.types import Array

MODULUS = 2**64


def check_batch(batch: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the records of a batch, their bytes, and the sum of their checksums modulo 2^64.

    Only the first item and the size of each field count, so that the check costs every reader the same little. A batch
    maps each field to a (rows, ...) array, or to a list of arrays, bytes or texts.
    """
    rows = nbytes = total = 0
    for value in batch.values():
        if isinstance(value, np.ndarray) and value.dtype != object:
            column = cast("Array", value)
            rows, nbytes, total = len(column), nbytes + column.nbytes, total + _check_column(column)
        else:
            items = cast("Sequence[Any]", value)
            rows, nbytes = len(items), nbytes + sum(map(_size, items))
            total += sum(map(_check_value, items))
    return rows, nbytes, total % MODULUS


def check_record(record: Mapping[str, Any]) -> int:
    """Return the checksum of one record."""
    return sum(map(_check_value, record.values())) % MODULUS


def _check_column(column: Array) -> int:
    """Return the sum of `_check_value` over the rows of an array."""
    if not column.size:
        return 0
    first = np.ascontiguousarray(column.reshape(len(column), -1)[:, 0])
    return int(first.view(np.uint8).sum(dtype=np.uint64)) + column.nbytes


def _check_value(value: Any) -> int:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return len(value) + (value[0] if len(value) else 0)
    if isinstance(value, str):
        return len(value) + (ord(value[0]) if value else 0)
    array = np.asarray(value)
    return int(array.ravel()[:1].view(np.uint8).sum()) + array.nbytes if array.size else 0


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (bytes, bytearray, memoryview, str)) else int(np.asarray(value).nbytes)
