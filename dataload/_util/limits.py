"""The limit on the memory that one record may take, because damaged and malicious files claim any size."""

import numpy as np

from dataload.errors import CorruptFileError
from dataload.types import Int64Array

MAX_RECORD_BYTES = 1 << 30
"""Default of the option `max_record_bytes` of every format."""

FIELD_BYTES = 512
"""About what the Python objects of one field take, besides its values."""

NO_MEMORY = "decoding it needs more memory than this process may have: lower max_record_bytes to refuse such records"


def check_size(size: int, limit: int, what: str, *, path: str | None = None, index: int | None = None) -> None:
    """Raise if `what` takes more than `limit` bytes. Call this before allocating them; codecs do not know the path."""
    if size > limit:
        raise CorruptFileError(
            f"{what} takes {size:,} bytes of memory, and max_record_bytes is {limit:,}: the file is damaged or "
            "malicious, unless you expect such records and set a higher max_record_bytes",
            path=path,
            index=index,
        )


def check_lengths(lengths: Int64Array, limit: int, indices: Int64Array, path: str) -> None:
    """Raise for the first of the records at `indices`, (rows,), that is stored in more than `limit` bytes."""
    if int(lengths.max()) > limit:
        row = int(np.argmax(lengths > limit))
        check_size(int(lengths[row]), limit, "the record", path=path, index=int(indices[row]))
