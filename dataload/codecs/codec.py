"""Codecs: what turns the bytes of a record into fields, for formats whose records are only bytes.

| name | bytes | values |
|---|---|---|
| ``"tensorprotos"`` | caffe2 ``TensorProtos`` | arrays with their shapes |
| ``"example"`` | ``tf.train.Example`` | 1-D arrays, bytes; see `dataload.codecs.example` |
| ``"msgpack"`` | a msgpack map, arrays as msgpack-numpy writes them | see `dataload.codecs.msgpack` |
| ``"npz"`` | what `numpy.savez` writes | see `dataload.codecs.npz` |
| ``"raw"``, None | anything | the bytes themselves |

A function ``bytes -> record`` serves for reading, an object with ``decode`` and ``encode`` for both. No codec
unpickles.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from dataload.errors import ConfigError, CorruptFileError, DataloadError, closest
from dataload.types import Batch, Codec

__all__ = ["CODEC_NAMES", "CodecLike", "decode_batch", "decode_records", "resolve_codec", "takes_views"]

CodecLike: TypeAlias = str | Codec | Callable[[bytes], Any] | None
"""What users may pass as ``codec=``."""

_MODULES = {
    "example": "dataload.codecs.example",
    "msgpack": "dataload.codecs.msgpack",
    "npz": "dataload.codecs.npz",
    "tensorprotos": "dataload.codecs.tensorprotos",
}

CODEC_NAMES = (*_MODULES, "raw")
"""The built-in names."""


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(_MODULES[name])


@dataclass(frozen=True, slots=True, repr=False)
class _NamedCodec:
    """A built-in codec: the functions of one module, which is imported when the first record is decoded.

    Attributes:
        name: A key of `_MODULES`.
    """

    name: str

    def decode(self, data: bytes | memoryview) -> Any:
        return _module(self.name).decode(data)

    def encode(self, record: Mapping[str, Any]) -> bytes:
        return _module(self.name).encode(record)

    def decode_batch(self, buffers: Sequence[bytes | memoryview], fields: Sequence[str] | None) -> Batch | None:
        columns = getattr(_module(self.name), "decode_batch", None)
        return None if columns is None else columns(buffers, fields)

    def __repr__(self) -> str:
        return repr(self.name)


@dataclass(frozen=True, slots=True, repr=False)
class _FunctionCodec:
    """A function of the user's: decodes only."""

    function: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return _name_of(self.function)

    def decode(self, data: bytes | memoryview) -> Any:
        return _decode(self.function, data, self.name)

    def encode(self, record: Mapping[str, Any]) -> bytes:  # noqa: ARG002 - the protocol's name
        raise ConfigError(
            f"codec {self.name} is a function, which can only decode: to write, pass an object with decode "
            f"and encode, or one of {', '.join(CODEC_NAMES)}",
            key="codec",
            value=self.function,
        )

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, repr=False)
class _ObjectCodec:
    """An object of the user's with `decode` and `encode`."""

    codec: Codec

    @property
    def name(self) -> str:
        return str(getattr(self.codec, "name", "")) or _name_of(self.codec)

    def decode(self, data: bytes | memoryview) -> Any:
        return _decode(self.codec.decode, data, self.name)

    def encode(self, record: Mapping[str, Any]) -> bytes:
        return self.codec.encode(record)

    def decode_batch(self, buffers: Sequence[bytes | memoryview], fields: Sequence[str] | None) -> Batch | None:
        columns = getattr(self.codec, "decode_batch", None)
        return None if columns is None else columns(buffers, fields)

    def __repr__(self) -> str:
        # The default repr holds an address, and with it every fingerprint would differ.
        return self.name if type(self.codec).__repr__ is object.__repr__ else repr(self.codec)


def _name_of(thing: Any) -> str:
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def _decode(function: Callable[[Any], Any], data: bytes | memoryview, name: str) -> Any:
    try:
        return function(data)
    except DataloadError:
        raise
    except Exception as error:
        raise CorruptFileError(f"codec {name} raised {type(error).__name__}: {error}") from error


def resolve_codec(codec: CodecLike) -> Codec | None:
    """The codec that `codec` means; None for plain bytes.

    What is returned has, besides `decode` and `encode`, a `name` and a repr that is the same everywhere;
    it pickles if what was passed does. A record that it cannot decode is a `CorruptFileError` without a path,
    which `decode_records` adds.

    Args:
        codec: A name of `CODEC_NAMES`, a function that decodes, or an object with `decode` and `encode`.

    Raises:
        ConfigError: There is no codec of that name, or it is none of these.
    """
    if codec is None or codec == "raw":
        return None
    if isinstance(codec, (_NamedCodec, _FunctionCodec, _ObjectCodec)):
        return codec
    if isinstance(codec, str):
        if codec not in _MODULES:
            raise ConfigError(f"there is no codec {codec!r}: {closest(codec, CODEC_NAMES)}", key="codec", value=codec)
        return _NamedCodec(codec)
    has_both = callable(getattr(codec, "decode", None)) and callable(getattr(codec, "encode", None))
    if has_both and not isinstance(codec, type):
        return _ObjectCodec(cast("Codec", codec))
    if callable(codec) and not has_both:
        return _FunctionCodec(codec)
    found = f"{codec!r}, a class: pass an object of it" if has_both else repr(codec)
    raise ConfigError(
        f"a codec is a name ({', '.join(CODEC_NAMES)}), a function that decodes, or an object with decode "
        f"and encode; got {found}",
        key="codec",
        value=codec,
    )


def takes_views(codec: Codec | None) -> bool:
    """Return whether a codec may be given views: built-in ones keep no reference to what they decode."""
    return isinstance(codec, _NamedCodec)


def decode_records(codec: Codec, buffers: Iterable[bytes | memoryview], indices: Iterable[int], path: str) -> list[Any]:
    """Decode records one after another.

    Args:
        codec: From `resolve_codec`.
        buffers: The records' bytes.
        indices: Their numbers in the file, as many; only for the message.
        path: The file; only for the message.

    Raises:
        CorruptFileError: One cannot be decoded; the message names path and record.
    """
    decode = codec.decode
    records: list[Any] = []
    try:
        records.extend(map(decode, buffers))
    except CorruptFileError as error:
        if error.path is not None:
            raise
        # `extend` keeps what it had appended, so the length tells which record failed.
        index = next(number for row, number in enumerate(indices) if row == len(records))
        raise CorruptFileError(str(error), path=path, index=int(index)) from error
    return records


def decode_batch(codec: Codec, buffers: Sequence[bytes | memoryview], fields: Sequence[str] | None) -> Batch | None:
    """Columns of records at once, where the codec can and the records are alike.

    Args:
        codec: From `resolve_codec`.
        buffers: The records' bytes, at least one.
        fields: Names of the fields to read; None means all.

    Returns:
        What collating the decoded records gives; None where only decoding one by one would tell: because
        layouts differ, a record is corrupt, or a field is missing.
    """
    columns = getattr(codec, "decode_batch", None)
    return None if columns is None else columns(buffers, fields)
