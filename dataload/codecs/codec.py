"""Codecs: from bytes to fields, for formats whose records are only bytes.

| name | bytes | values |
|---|---|---|
| ``"tensorprotos"`` | caffe2 ``TensorProtos`` | arrays with their shapes |
| ``"example"`` | ``tf.train.Example`` | 1-D arrays, bytes; see `dataload.codecs.example` |
| ``"sequence_example"`` | ``tf.train.SequenceExample`` | see `dataload.codecs.example.SequenceExample`; only read |
| ``"msgpack"`` | a msgpack map, with arrays as in msgpack-numpy | see `dataload.codecs.msgpack` |
| ``"npz"`` | an archive of `numpy.savez` | see `dataload.codecs.npz` |
| ``"raw"``, None | anything | the bytes themselves |

For other encodings, pass a function ``bytes -> record``, which can only read, or an object with ``decode`` and
``encode``. No codec unpickles.
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from dataload._util.arrays import MAX_RECORD_BYTES, no_memory
from dataload._util.clock import decoding
from dataload._util.failures import mark_users, owner_of
from dataload.codecs.layout import RecordTable
from dataload.errors import ConfigError, CorruptFileError, DataloadError, closest
from dataload.types import Batch, BytesColumn, Codec

CodecLike: TypeAlias = str | Codec | Callable[[bytes], Any] | None
"""Values for ``codec=``."""

_FUNCTIONS = {
    "example": "dataload.codecs.example",
    "msgpack": "dataload.codecs.msgpack",
    "npz": "dataload.codecs.npz",
    "sequence_example": "dataload.codecs.example:SequenceExample",
    "tensorprotos": "dataload.codecs.tensorprotos",
}

CODEC_NAMES = (*_FUNCTIONS, "raw")
"""Names of the built-in codecs."""

READ_ONLY_CODEC = "sequence_example"
"""The built-in codec that only decodes."""


@functools.cache
def _functions(name: str) -> Any:
    """Return what has the functions of a codec: a module, or a class in a module of two codecs."""
    module, _, kind = _FUNCTIONS[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, kind) if kind else found


@dataclass(frozen=True, slots=True, repr=False)
class _NamedCodec:
    """A built-in codec, whose module is imported when the first record is decoded."""

    name: str
    limit: int = MAX_RECORD_BYTES  # of the memory of a decoded record

    def decode(self, data: bytes | memoryview) -> Any:
        return _functions(self.name).decode(data, self.limit)

    def encode(self, record: Mapping[str, Any]) -> bytes:
        if type(record) is not dict and not isinstance(record, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass bytes
            raise ConfigError(f"codec {self.name!r} stores fields, got a record of type {type(record).__name__}")
        return _functions(self.name).encode(record)

    def decode_batch(self, buffers: Sequence[bytes | memoryview], fields: Sequence[str] | None) -> Batch | None:
        columns = getattr(_functions(self.name), "decode_batch", None)
        return None if columns is None else columns(buffers, fields, self.limit)

    def __repr__(self) -> str:
        return repr(self.name)


@dataclass(frozen=True, slots=True, repr=False)
class _FunctionCodec:
    """A user's function, which can only decode."""

    function: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return _name_of(self.function)

    def decode(self, data: bytes | memoryview) -> Any:
        return _decode(self.function, data, self.name)

    def encode(self, record: Mapping[str, Any]) -> bytes:  # noqa: ARG002 - the protocol's signature
        raise ConfigError(
            f"codec {self.name} is a function, which can only decode: to write, pass an object with decode and "
            f"encode, or one of {', '.join(CODEC_NAMES)}",
            key="codec",
            value=self.function,
        )

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, repr=False)
class _ObjectCodec:
    """A user's object with `decode` and `encode`."""

    codec: Codec

    @property
    def name(self) -> str:
        return str(getattr(self.codec, "name", "")) or _name_of(self.codec)

    def decode(self, data: bytes | memoryview) -> Any:
        return _decode(self.codec.decode, data, self.name)

    def encode(self, record: Mapping[str, Any]) -> bytes:
        return self.codec.encode(record)

    def decode_batch(self, buffers: Sequence[bytes | memoryview], fields: Sequence[str] | None) -> Batch | None:
        return decode_batch(self.codec, buffers, fields)

    def __repr__(self) -> str:
        # The default repr contains an address, so every fingerprint would differ.
        return self.name if type(self.codec).__repr__ is object.__repr__ else repr(self.codec)


def _name_of(thing: Any) -> str:
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def _decode(function: Callable[[Any], Any], data: bytes | memoryview, name: str) -> Any:
    try:
        return function(data)
    except Exception as error:
        mark_users(error)
        if isinstance(error, DataloadError) or owner_of(error) != "record":
            raise
        raise CorruptFileError(f"codec {name} raised {type(error).__name__}: {error}") from error


def resolve_codec(codec: CodecLike, limit: int = MAX_RECORD_BYTES) -> Codec | None:
    """Return the codec for a value of ``codec=``, or None for plain bytes; records take at most `limit` bytes."""
    if codec is None or codec == "raw":
        return None
    if isinstance(codec, _NamedCodec):
        return replace(codec, limit=limit)
    if isinstance(codec, (_FunctionCodec, _ObjectCodec)):
        return codec
    if isinstance(codec, str):
        if codec not in _FUNCTIONS:
            raise ConfigError(f"there is no codec {codec!r}: {closest(codec, CODEC_NAMES)}", key="codec", value=codec)
        return _NamedCodec(codec, limit)
    has_both = _has_both(codec)
    if has_both and not isinstance(codec, type):
        return _ObjectCodec(cast("Codec", codec))
    if callable(codec) and not has_both:
        return _FunctionCodec(codec)
    found = f"{codec!r}, a class: pass an instance of it" if has_both else repr(codec)
    raise ConfigError(
        f"a codec is a name ({', '.join(CODEC_NAMES)}), a function that decodes, or an object with decode "
        f"and encode; got {found}",
        key="codec",
        value=codec,
    )


def functions_in(value: Any) -> Iterator[Any]:
    """Yield the user's functions and objects in an option. A fingerprint holds only their names."""
    if isinstance(value, Mapping):
        for each in cast("Mapping[Any, Any]", value).values():
            yield from functions_in(each)
    elif isinstance(value, (_FunctionCodec, _ObjectCodec)):
        yield from functions_in(value.function if isinstance(value, _FunctionCodec) else value.codec)
    elif not type(value).__module__.startswith("dataload.") and (callable(value) or _has_both(value)):
        yield value


def _has_both(value: Any) -> bool:
    return callable(getattr(value, "decode", None)) and callable(getattr(value, "encode", None))


def takes_views(codec: Codec | None) -> bool:
    """Return whether a codec accepts views: built-in ones keep no reference to their input."""
    return isinstance(codec, _NamedCodec)


def _as_buffers(records: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
    """Return a column, which only codecs that take views are given, as a table if possible, or as views."""
    return (RecordTable.of(records) or list(records.views())) if isinstance(records, BytesColumn) else records


def decode_records(codec: Codec, buffers: Sequence[bytes | memoryview], indices: Iterable[int], path: str) -> list[Any]:
    """Decode records one by one. Errors name `path` and the index in the file, from `indices`."""
    decode = codec.decode
    records: list[Any] = []
    try:
        with decoding():
            records.extend(map(decode, _as_buffers(buffers)))
    except (CorruptFileError, MemoryError) as error:
        if isinstance(error, CorruptFileError) and error.path is not None:
            raise
        # `extend` keeps what it has appended, so the length tells which record failed.
        index = next(number for row, number in enumerate(indices) if row == len(records))
        if isinstance(error, MemoryError):
            raise no_memory(path, index) from error
        raise CorruptFileError(str(error), path=path, index=int(index)) from error
    return records


def decode_batch(codec: Codec, buffers: Sequence[bytes | memoryview], fields: Sequence[str] | None) -> Batch | None:
    """Decode records, at least one, to columns as collated; None if they must be decoded one by one."""
    columns = getattr(codec, "decode_batch", None)
    if columns is None:
        return None
    with decoding():
        return columns(_as_buffers(buffers), fields)
