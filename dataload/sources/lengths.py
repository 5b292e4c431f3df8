"""How long the records of a source are."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataload.errors import ConfigError
from dataload.sources.base import Source, select_fields
from dataload.types import Int64Array


def record_lengths(source: Source[Any], field: str) -> Int64Array:
    """The length of each record: the extent of a field's first axis, or its bytes or characters.

    Reads every record once, in blocks. For data that are large, count once and keep the lengths in a file.

    Args:
        source: Whose records have fields.
        field: Name of the field to count.

    Returns:
        (records,) int64, in index order.

    Raises:
        ConfigError: A record has no such field, or its value there has no length.
    """
    lengths = np.empty(len(source), np.int64)
    for i, record in enumerate(source):
        value = select_fields(record, (field,))[field]
        try:
            lengths[i] = len(value)
        except TypeError:
            raise ConfigError(
                f"field {field!r} of record {i} has no length: expected an array of one axis or more, bytes or text, "
                f"got {value!r}",
                key="field",
                value=field,
            ) from None
    return lengths
