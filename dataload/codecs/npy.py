"""The .npy format, and dtypes stored by name. Nothing is ever unpickled."""

import ast
import io
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dataload._util.limits import fits
from dataload.errors import ConfigError, CorruptFileError
from dataload.types import Array

_NAME = re.compile(r"[<>|=][biufcmMSU]\d{1,9}(\[\w{1,9}\])?")
"""Values of `dtype.str`, except objects, which would have to be unpickled, and structures."""
MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000  # bytes, as in numpy: parsing time grows faster than the length
_KEYS = {"descr", "fortran_order", "shape"}
_PREFIX = 12  # longest prefix: magic, version and length of the header


@dataclass(frozen=True, slots=True)
class NpyLayout:
    """The header of a .npy file."""

    dtype: np.dtype[Any]  # never of objects
    shape: tuple[int, ...]
    fortran: bool  # whether the items are in Fortran order, with the first axis varying fastest
    start: int  # offset of the items in the file, in bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, items: Array) -> Array:
        """Return a (rows, *shape) array that shares memory with `items`, (rows, nbytes) uint8, contiguous."""
        if not self.nbytes:
            return np.empty((len(items), *self.shape), self.dtype)
        flat = items.view(self.dtype)
        if not self.fortran:
            return flat.reshape(len(items), *self.shape)
        return np.moveaxis(flat.reshape(len(items), *self.shape[::-1]).T, -1, 0)


def npy_layout(data: bytes | memoryview) -> NpyLayout:
    """Parse the header of `data`, a .npy file or at least its header. Errors have no path yet."""
    prefix = bytes(data[:_PREFIX])
    if prefix[:6] != MAGIC or len(prefix) < 10:
        raise CorruptFileError(f"a .npy file must start with {MAGIC!r}, found {prefix[:8]!r}")
    version, width = prefix[6], 2 if prefix[6] == 1 else 4
    if version not in (1, 2, 3) or prefix[7]:
        raise CorruptFileError(f"a .npy file of version {version}.{prefix[7]}; supported are 1.0, 2.0 and 3.0")
    start = 8 + width + int.from_bytes(prefix[8 : 8 + width], "little")
    if start > min(len(data), _LONGEST_HEADER + _PREFIX):
        raise CorruptFileError(f"the header of a .npy file claims to end at byte {start} of {len(data)}")
    return _parse_header(bytes(data[8 + width : start]), start, version)


@lru_cache(maxsize=256)  # the records of a data set have few distinct headers
def _parse_header(text: bytes, start: int, version: int) -> NpyLayout:
    try:
        header: Any = ast.literal_eval(text.decode("utf-8" if version == 3 else "latin-1").strip(" \n"))
        if header.keys() != _KEYS:
            raise CorruptFileError(f"the header of a .npy file has the keys {sorted(map(str, header))!s:.80}")
        descr, shape, fortran = header["descr"], header["shape"], header["fortran_order"]
        dtype = np.lib.format.descr_to_dtype(descr) if isinstance(descr, list) else parse_dtype(descr)
        np.empty((0, *shape), dtype)  # refuses too many dimensions and too large extents
    except CorruptFileError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, SyntaxError, MemoryError, RecursionError) as error:
        raise CorruptFileError(f"the header of a .npy file is invalid: {error}") from error
    if dtype.hasobject or not dtype.itemsize:
        raise CorruptFileError(f"a .npy file of {dtype}: objects would have to be unpickled")
    if type(shape) is not tuple or type(fortran) is not bool or not fits(shape, math.prod(shape)):
        raise CorruptFileError(f"the header of a .npy file gives the shape {shape!s:.80}, order {fortran!s:.80}")
    return NpyLayout(dtype, shape, fortran, start)


def parse_npy(data: bytes | memoryview) -> Array:
    """Return a copy of the array in a .npy file. Errors have no path yet."""
    layout = npy_layout(data)
    found = len(data) - layout.start
    if found != layout.nbytes:
        raise CorruptFileError(
            f"a .npy file of {layout.dtype} {layout.shape} has {layout.nbytes} bytes of items, found {found}"
        )
    items = np.empty((1, found), np.uint8)
    items[0] = np.frombuffer(data, np.uint8)[layout.start :]
    return layout.rows(items)[0, ...]


def build_npy(array: Array) -> bytes:
    """Return the .npy file of an array, which must not hold objects."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=False)
    return stream.getvalue()


def parse_dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = "objects would have to be unpickled" if "O" in str(name) else "not a plain dtype"
        raise CorruptFileError(f"an array of dtype {str(name)[:80]!r}: {what}")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError) as error:
        raise CorruptFileError(f"an array of dtype {name!r}: {error}") from error
    if not dtype.itemsize:  # any number of items would fit
        raise CorruptFileError(f"an array of dtype {name!r}: items of zero bytes")
    return dtype


def plain_array(value: Any) -> Array:
    """Return `value` as a C-order array with a dtype that `parse_dtype` supports; ConfigError otherwise."""
    try:
        array = np.asarray(value, order="C")
    except ValueError as error:  # nested lists of different lengths
        raise ConfigError(f"{type(value).__name__} is not an array: {error}") from error
    if array.dtype.kind not in "biufcmMSU" or not array.dtype.itemsize:
        reason = "would have to be pickled" if array.dtype.hasobject else "is not supported"
        raise ConfigError(f"an array of {array.dtype} {reason}; store its parts in separate fields")
    return array
