"""The owner of a failure: decides in one place who is responsible for an exception."""

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from opcode import opmap
from types import TracebackType
from typing import Literal, TypeAlias

from dataload.errors import (
    ClosedSourceError,
    CorruptFileError,
    DataloadError,
    MachineError,
    MissingDependencyError,
    SourceError,
    SourceNotFoundError,
    StoreError,
    UnsupportedFormatError,
    text_of,
)

Owner: TypeAlias = Literal["record", "store", "machine", "user", "dataload"]
"""`record`: its bytes do not parse, or the user's function raises on it. `store`: the data are missing, changed,
unreachable or forbidden. `machine`: memory, disk space or descriptors run out, or a disk fails. `user`: a setting or a
use is wrong. `dataload`: a bug of ours. `on_error` and `max_bad` apply to `record` only."""

MACHINE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG})
"""errno values for lack of disk space, descriptors or memory."""

STORE_ERRNOS = frozenset({errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ETIMEDOUT})
"""errno values for a failing disk or file server, for every caller."""

BUG = "this is a bug in dataload, not a fault of a record: please report it with this message and its traceback"
"""Advice for failures whose owner is `dataload`."""

RAISE = opmap["RAISE_VARARGS"]
"""The instruction of a ``raise`` statement."""

_NO_MEMORY = re.compile("out of memory|allocate memory", re.IGNORECASE)  # torch's wording
_MOST_CAUSES = 16
_MARK = "_dataload_users"

LIBRARIES = sys.stdlib_module_names | {
    *("PIL", "array_record", "av", "bson", "cloudpickle", "cramjam", "cv2", "google_crc32c", "huggingface_hub"),
    *("lmdb", "msgpack", "numpy", "obstore", "pyarrow", "pydantic", "ray", "rich", "simplejpeg", "soundfile"),
    *("tokenizers", "torch", "transformers", "yaml", "zstandard"),
}
"""Modules that dataload calls. Their errors belong to their caller."""


def mark_users(error: BaseException) -> None:
    """Record in an `except` clause that the user's function or source raised `error`; C code leaves no frame."""
    trace = error.__traceback__
    with suppress(Exception):  # some exceptions refuse attributes
        setattr(error, _MARK, trace is None or _raised_by_user(trace.tb_next, default=True))


def owner_of(error: BaseException) -> Owner:
    if owner := _of_system(error):
        return owner
    if isinstance(error, (StoreError, SourceNotFoundError)):
        return "store"
    if isinstance(error, (ClosedSourceError, MissingDependencyError)):
        return "user"
    if isinstance(error, (CorruptFileError, UnsupportedFormatError)):
        return "record"
    if getattr(error, _MARK, False) or _raised_by_user(error.__traceback__, default=False):
        causes: list[Owner] = [owner for cause in _causes(error) if (owner := _of_system(cause))]
        return causes[0] if causes else "record"
    if getattr(error, "errno", None) is not None or isinstance(error, SourceError):
        return "store"
    return "user" if isinstance(error, DataloadError) else "dataload"


def _of_system(error: BaseException) -> Owner | None:
    """Return the owner of a failure of the operating system; None for other failures."""
    number = error.errno if isinstance(error, OSError) else None
    no_memory = isinstance(error, RuntimeError) and _NO_MEMORY.search(text_of(error))
    if isinstance(error, (MachineError, MemoryError)) or number in MACHINE_ERRNOS or no_memory:
        return "machine"
    return "store" if number in STORE_ERRNOS else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    for _ in range(_MOST_CAUSES):  # causes may form a cycle
        if error.__cause__ is None:
            return
        error = error.__cause__
        yield error


def _raised_by_user(trace: TracebackType | None, *, default: bool) -> bool:
    """Return whether the innermost frame that is not of a library is the user's, or a refusal of a wrong argument."""
    # A ``raise`` of ours that ends the trace belongs to the user's code that has called us.
    found = called = default
    while trace is not None:
        frame = trace.tb_frame
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package == "dataload":
            found = called and trace.tb_next is None and frame.f_code.co_code[trace.tb_lasti] == RAISE
        elif package not in LIBRARIES:
            found = called = True
        trace = trace.tb_next
    return found
