"""Tables that pyarrow makes of the records of the conformance suite."""

import io

import numpy as np
import pyarrow as pa
from pyarrow import csv


def expected(records):
    """What a table gives back: arrays of different shapes, or without items, are stored as lists of numbers."""
    flat = {name for name in fields_of(records) if not is_uniform([record[name] for record in records])}
    return [{name: value.ravel() if name in flat else value for name, value in record.items()} for record in records]


def fields_of(records):
    return records[0] if records else ()


def is_uniform(values):
    shapes = {value.shape for value in values if isinstance(value, np.ndarray)}
    return not shapes or (len(shapes) == 1 and 0 not in values[0].shape)


def table_of(records):
    """Arrays are lists of one size where they can be."""
    return pa.table({name: column_of([record[name] for record in expected(records)]) for name in fields_of(records)})


def column_of(values):
    first = values[0]
    if not isinstance(first, np.ndarray):
        return pa.array(values)
    if not is_uniform(values):
        flat = np.concatenate(values)
        return pa.ListArray.from_arrays(np.cumsum([0, *map(len, values)]).astype(np.int32), pa.array(flat))
    column = pa.array(np.stack(values).ravel())
    for size in reversed(first.shape):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


# Opens a pipe for signals, which stays as long as the process.
csv.read_csv(io.BytesIO(b"x\n1\n"))
