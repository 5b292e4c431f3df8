"""What shows that two readings read the same: a sum over records, in any order and any batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from dataload.types import Array

__all__ = ["MODULUS", "check_batch", "check_record"]

MODULUS = 2**64


def check_batch(batch: Mapping[str, Any]) -> tuple[int, int, int]:
    """Records of a batch of columns, their bytes, and the sum of the records' checksums modulo 2^64.

    Of each field of a record its first item counts and its size, so that checking costs every reading the same little,
    and a batch that was only promised is looked at.

    Args:
        batch: Field -> (rows, ...) array, or list of arrays, bytes or texts.
    """
    rows = nbytes = total = 0
    for value in batch.values():
        if isinstance(value, np.ndarray) and value.dtype != object:
            column = cast("Array", value)
            rows, nbytes, found = len(column), nbytes + column.nbytes, _of_column(column)
        else:
            items = cast("Sequence[Any]", value)
            rows = len(items)
            nbytes += sum(map(_size, items))
            found = sum(map(_of_value, items))
        total += found
    return rows, nbytes, total % MODULUS


def check_record(record: Mapping[str, Any]) -> int:
    """The checksum of one record."""
    return sum(map(_of_value, record.values())) % MODULUS


def _of_column(column: Array) -> int:
    """The sum of `_of_value` over the rows of an array."""
    if not column.size:
        return 0
    row_bytes = column.nbytes // len(column)
    first = np.ascontiguousarray(column.reshape(len(column), -1)[:, 0])
    return int(first.view(np.uint8).sum(dtype=np.uint64)) + row_bytes * len(column)


def _of_value(value: Any) -> int:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return len(value) + (value[0] if len(value) else 0)
    if isinstance(value, str):
        return len(value) + (ord(value[0]) if value else 0)
    array = np.asarray(value)
    if not array.size:
        return 0
    return int(array.ravel()[:1].view(np.uint8).sum()) + array.nbytes


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (bytes, bytearray, memoryview, str)) else int(np.asarray(value).nbytes)
