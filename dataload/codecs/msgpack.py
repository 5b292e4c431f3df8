"""Records as msgpack maps, compatible with msgpack-numpy in both directions.

| value | msgpack | decoded as |
|---|---|---|
| array | ``{b"nd": True, b"type": dtype, b"kind": b"", b"shape": [...], b"data": bytes}`` | the same array |
| numpy scalar | the same, with an empty shape | 0-d array |
| bytes, bytearray | bin | bytes |
| str, int, float, bool, None | the native types | the same |
| lists, maps of these | array, map | list, dict |

msgpack-numpy pickles arrays of objects; those are refused in both directions.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataload._util.arrays import MAX_RECORD_BYTES, fits
from dataload._util.lazy import load_optional
from dataload.codecs.npz import parse_dtype, plain_array
from dataload.errors import ConfigError, CorruptFileError

_CLAIM_BYTES = 8 * 1024
"""Bytes that are allocated for each claimed item of a list, before it is read, in lists nested as deep as possible."""


def decode(data: bytes | memoryview, limit: int = MAX_RECORD_BYTES) -> dict[str, Any]:
    """Decode a msgpack map to its fields. Lists that only claim to be long take at most `limit` bytes."""
    try:
        if len(data) * _CLAIM_BYTES > limit:
            record = _unpack_large(data, limit)
        else:
            record = _msgpack().unpackb(data, object_hook=_array, strict_map_key=False)
    except CorruptFileError:
        raise
    # msgpack raises ValueErrors, except for deep nesting and excessive lengths.
    except (ValueError, TypeError, RecursionError, _msgpack().UnpackException) as error:
        what = f"{type(error).__name__}: {error}"
        raise CorruptFileError(f"invalid msgpack ({len(data)} bytes): {what}") from error
    if not isinstance(record, dict):
        raise CorruptFileError(f"a record must be a msgpack map of fields; found {type(record).__name__}")
    for name in record:
        if not isinstance(name, str):
            raise CorruptFileError(f"names of fields must be strings; found {name!r:.80}")
    return record


def _unpack_large(data: bytes | memoryview, limit: int) -> Any:
    msgpack, options = _msgpack(), {"object_hook": _array, "strict_map_key": False}
    try:
        return msgpack.unpackb(data, **options, max_array_len=limit // _CLAIM_BYTES)
    except ValueError:  # longer lists need all their items in the data
        unpacker = msgpack.Unpacker(max_buffer_size=len(data))
        unpacker.feed(data)
        unpacker.skip()
    return msgpack.unpackb(data, **options)


def encode(record: Mapping[str, Any]) -> bytes:
    """Encode `record` as a msgpack map."""
    packer = _msgpack().Packer(default=_plain, use_bin_type=True)
    parts = [packer.pack_map_header(len(record))]
    for name, value in record.items():
        try:
            parts += packer.pack(name), packer.pack(value)
        except ConfigError as error:
            raise ConfigError(f"field {name!r}: {error}", key=name) from None
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"field {name!r}: msgpack cannot hold it: {error}", key=name) from error
    return b"".join(parts)


def _msgpack() -> Any:
    return load_optional("msgpack", needed_by="codec 'msgpack'", extra="codecs")


def _plain(value: Any) -> dict[bytes, Any]:
    if isinstance(value, int):
        raise ConfigError(f"{value} has more than 64 bits, the limit of msgpack")
    if not hasattr(value, "__array__"):
        kind = type(value).__name__
        raise ConfigError(f"{kind} is not supported by msgpack, which holds arrays, bytes, text and numbers")
    array = plain_array(value)
    shape, data = list(array.shape), array.tobytes()
    return {b"nd": True, b"type": array.dtype.str, b"kind": b"", b"shape": shape, b"data": data}


def _array(found: dict[Any, Any]) -> Any:
    if b"nd" not in found:
        if {"nd", "type", "data"} <= found.keys():
            raise CorruptFileError(
                "an array was written with use_bin_type=False, so its bytes cannot be told from text: write it with "
                "use_bin_type=True"
            )
        return found
    name, data = found.get(b"type"), found.get(b"data")
    dtype = parse_dtype(name.decode("ascii", "replace") if isinstance(name, bytes) else name)
    try:
        shape = tuple(found.get(b"shape", ()))
        if not isinstance(data, bytes) or len(data) % dtype.itemsize or not fits(shape, len(data) // dtype.itemsize):
            size = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
            raise ValueError(f"{size} for {dtype} {str(shape)[:80]}")
        return np.ndarray(shape, dtype, data).copy()
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptFileError(f"invalid array of msgpack-numpy: {error}") from error
