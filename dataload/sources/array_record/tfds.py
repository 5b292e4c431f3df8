"""Data sets that TensorFlow Datasets wrote as ArrayRecord files, read without TensorFlow.

Records are Examples, decoded as ``features.json`` describes them:

| feature | value |
|---|---|
| Scalar, ClassLabel, Tensor without a shape | a Python number, or bytes |
| Text | bytes |
| Tensor with at most one unknown extent | an array of its dtype and shape; for bytes, an array of objects |
| Image of 8 bits and one or three channels | (height, width, channels) uint8 |
| FeaturesDict | a dict |

``tfds.data_source`` returns the same values. Other features raise an error that names them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, TypeAlias

import numpy as np

from dataload._util.arrays import MAX_RECORD_BYTES, check_size, fits
from dataload.codecs import example
from dataload.codecs.decoders import decode_image
from dataload.errors import ConfigError, CorruptFileError, DataloadError, UnsupportedFormatError, closest
from dataload.sources.array_record import TFDS, TfdsOptions
from dataload.sources.array_record.reader import ArrayRecordSource
from dataload.sources.array_record.tfds_info import INFO_NAME, parse_info, parse_json, select_records
from dataload.storage import Remote, join, local_path, storage_of
from dataload.types import Array

_FEATURES_NAME = "features.json"

_TEXT = "string"  # the dtype of bytes
_UNKNOWN = -1  # extent of a shape


class TfdsSource(ArrayRecordSource):
    """Records of a split: the features in ``features.json``, with the same values as from ``tfds.data_source``.

    The path is the directory that contains ``dataset_info.json``, such as ``mnist/3.0.1``, which may also be given as
    ``mnist:3.0.1``; or the directory of its versions (the highest is read). A field includes those inside it. Options:
    `TfdsOptions`; supported types of features: see `dataload.sources.array_record.tfds`.

    Examples:
        >>> source = TfdsSource("mnist/3.0.1", split="train[:75%]")  # doctest: +SKIP
        >>> source[0]["label"]  # doctest: +SKIP
        4
    """

    format_name = "tfds"

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        split: str,
        fields: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        several = [paths] if isinstance(paths, (str, PathLike)) else list(paths)
        if len(several) != 1:
            message = f"TensorFlow Datasets keeps a data set in one directory, got {len(several)}: open each of them"
            raise ConfigError(f"{message}, and join them with ConcatSource", key="paths", value=paths)
        given = TfdsOptions.parse({"split": str(split), **options}, "format 'tfds'")
        place = Remote.of(None, given.remote)
        self._directory = _find_version(TFDS.file(local_path(fspath(several[0]))), place)
        self._split = given.split
        info = join(self._directory, INFO_NAME)
        parts = select_records(parse_info(_read_text(info, place), info), self._split)
        if not parts:
            message = f"split {self._split!r} of {self._directory} selects no records"
            raise ConfigError(message, key="split", value=split)
        features = join(self._directory, _FEATURES_NAME)
        super().__init__(
            [f"{join(self._directory, part.file)}[{part.start}:{part.stop}]" for part in parts],
            fields=fields,
            codec=parse_features(_read_text(features, place), features, names=fields, limit=given.max_record_bytes),
            reader_options=given.reader_options,
            max_record_bytes=given.max_record_bytes,
            verify=given.verify,
            remote=place,
        )

    def __repr__(self) -> str:
        directory = self._directory if len(self._directory) < 80 else f"...{self._directory[-77:]}"
        fields = "" if self._selected is None else f", {len(self._selected)} fields"
        return f"TfdsSource({directory!r}, split={self._split!r}{fields})"[:199]


def _find_version(directory: str, remote: Remote | None) -> str:
    """Return the directory of the highest version, if this is the directory of all versions."""
    storage = storage_of(directory, remote)
    if storage.exists(join(directory, INFO_NAME)) or not storage.is_directory(directory):
        return directory
    versions = [name for name in storage.list(directory) if re.fullmatch(r"\d+\.\d+\.\d+", name)]
    highest = max(versions, key=lambda name: [int(part) for part in name.split(".")], default=None)
    return directory if highest is None else join(directory, highest)


def split_names(directory: str | PathLike[str]) -> tuple[str, ...]:
    """Return the names of the splits in a directory, in the order of ``dataset_info.json``; see `TfdsSource`."""
    info = join(fspath(directory), INFO_NAME)
    return tuple(parse_info(_read_text(info), info))


def _read_text(path: str, remote: Remote | None = None) -> str:
    return storage_of(path, remote).read(path).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A number, bytes, or an array of either; one extent of `shape` may be -1.

    `dtype` is a numpy name or ``"string"``. `encoding` is ``"none"`` if the Example holds numbers, ``"bytes"`` or
    ``"zlib"`` if it holds their bytes.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    encoding: str = "none"

    def decode(self, value: Any, limit: int) -> Any:
        values = self._values(value, limit)
        if not self.shape:
            if len(values) != 1:
                raise CorruptFileError(f"expected one value, found {len(values)}")
            return values[0] if self.dtype == _TEXT else values.item()
        with suppress(ValueError, OverflowError):
            found = values.reshape(self.shape)
            if fits(found.shape, len(values)):
                return found
        raise CorruptFileError(f"{len(values)} values do not fill the shape {self.shape}")

    def _values(self, value: Any, limit: int) -> Array:
        """Return all values as a flat array of `dtype` that belongs to the caller."""
        if self.dtype == _TEXT:
            several: Any = [value] if isinstance(value, bytes) else value
            if not isinstance(several, list):
                raise CorruptFileError(f"expected bytes, found numbers ({several.dtype})")
            return np.fromiter(several, object, len(several))
        dtype = np.dtype(self.dtype)
        if self.encoding != "none":
            return self._from_bytes(value, dtype, limit)
        if isinstance(value, list) and not value:  # the type of an empty list is unknown
            return np.empty(0, dtype)
        stored = np.dtype(np.float32 if dtype.kind == "f" else np.int64)
        if not isinstance(value, np.ndarray) or value.dtype != stored:
            raise CorruptFileError(f"expected numbers stored as {stored}, found {_describe(value)}")
        return value.view(dtype) if dtype == np.uint64 else np.asarray(value, dtype)

    def _from_bytes(self, value: Any, dtype: np.dtype[Any], limit: int) -> Array:
        if not isinstance(value, bytes):
            raise CorruptFileError(f"expected the bytes of an array, found {_describe(value)}")
        try:
            data = _inflate(value, limit) if self.encoding == "zlib" else value
            return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)
        except CorruptFileError:
            raise
        except (zlib.error, ValueError) as error:
            raise CorruptFileError(f"the bytes are not an array of {dtype}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Image:
    """A compressed image with 8 bits per channel; `shape` is height, width and channels, -1 where images differ."""

    shape: tuple[int, ...]

    def decode(self, value: Any, limit: int) -> Any:
        if not isinstance(value, bytes):
            raise CorruptFileError(f"expected an image as bytes, found {_describe(value)}")
        image = decode_image(value, limit=limit)
        if self.shape[-1] == 1:
            if (image != image[..., :1]).any():
                raise CorruptFileError("expected a grey image, found one with colours")
            image = image[..., :1].copy()
        if any(wanted not in (_UNKNOWN, found) for wanted, found in zip(self.shape, image.shape, strict=True)):
            raise CorruptFileError(f"expected an image of shape {self.shape}, found {image.shape}")
        return image


def _inflate(value: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj()
    data = stream.decompress(value, limit + 1)
    check_size(len(data), limit, "the first part of a compressed array")
    if not stream.eof:
        raise zlib.error("incomplete or truncated stream")
    return data


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{len(value)} of {value.dtype}"
    return "bytes" if isinstance(value, bytes) else f"a list of {len(value)} bytes objects"


_Feature: TypeAlias = "_Tensor | _Image | Mapping[str, _Feature]"


@dataclass(frozen=True, slots=True)
class FeaturesCodec:
    """Decodes serialized Examples to records, each feature to at most `limit` bytes; see the module for the values."""

    features: Mapping[str, _Feature]
    limit: int = field(default=MAX_RECORD_BYTES, repr=False)  # the repr is part of fingerprints

    def decode(self, data: bytes | memoryview) -> dict[str, Any]:
        return _decode(self.features, example.decode(data, self.limit), "", self.limit)

    def encode(self, record: Mapping[str, Any]) -> bytes:  # noqa: ARG002 - the protocol's name
        """Raise a ConfigError, because only TensorFlow Datasets writes its data sets."""
        raise ConfigError("this codec only reads TensorFlow Datasets; write records with codec='example'", key="codec")


def _decode(features: Mapping[str, _Feature], values: Mapping[str, Any], prefix: str, limit: int) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, feature in features.items():
        key = prefix + name
        if isinstance(feature, Mapping):
            record[name] = _decode(feature, values, f"{key}/", limit)
            continue
        if key not in values:
            raise CorruptFileError(f"the record has no feature {key!r}: {closest(key, values)}")
        try:
            record[name] = feature.decode(values[key], limit)
        except CorruptFileError as error:
            raise CorruptFileError(f"feature {key!r}: {error}") from error
    return record


def parse_features(
    text: str, path: str, *, names: Sequence[str] | None = None, limit: int = MAX_RECORD_BYTES
) -> FeaturesCodec:
    """Return the codec of a data set from ``features.json``; others than `names` may be of any type."""
    try:
        known = parse_json(text, path)["featuresDict"]["features"]
        for name in names or ():
            if name not in known:
                raise ConfigError(f"{path} has no feature {name!r}: {closest(name, known)}", key="fields", value=name)
        chosen = known if names is None else names
        return FeaturesCodec({name: _feature(known[name], name, path) for name in chosen}, limit)
    except DataloadError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        message = f"expected featuresDict with features, each with its pythonClassName: {type(error).__name__} {error}"
        raise CorruptFileError(message, path=path) from error


def _feature(node: Mapping[str, Any], name: str, path: str) -> _Feature:
    kind = node["pythonClassName"].rpartition(".")[2]
    if kind == "FeaturesDict":
        inner = node["featuresDict"]["features"]
        return {key: _feature(value, f"{name}/{key}", path) for key, value in inner.items()}
    parse = _PARSERS.get(kind)
    feature = None if parse is None else parse(node)
    if feature is None:
        details = {key: value for key, value in node.items() if key not in ("pythonClassName", "description")}
        raise UnsupportedFormatError(
            f"{path}: feature {name!r} is {kind} {str(details)[:200]}, which is not supported: read the other features "
            "with fields=[...], or all of them through tfds.data_source",
            path=path,
        )
    return feature


def _tensor(node: Mapping[str, Any]) -> _Tensor | None:
    content = node["tensor"]
    dtype, shape, encoding = content["dtype"], _shape(content), content.get("encoding") or "none"
    if shape.count(_UNKNOWN) > 1 or content.get("optional") or encoding not in ("none", "bytes", "zlib"):
        return None
    if dtype == _TEXT:
        return _Tensor(dtype, shape) if encoding == "none" else None
    try:
        known = np.dtype(dtype).kind in "biuf" and np.dtype(dtype).itemsize <= 8
    except TypeError:  # bfloat16 and other dtypes that numpy lacks
        return None
    return _Tensor(dtype, shape, encoding) if known else None


def _image(node: Mapping[str, Any]) -> _Image | None:
    content = node["image"]
    shape = _shape(content) or (_UNKNOWN, _UNKNOWN, 3)
    simple = content.get("dtype", "uint8") == "uint8" and len(shape) == 3 and shape[-1] in (1, 3)
    return _Image(shape) if simple else None


def _text(node: Mapping[str, Any]) -> _Tensor | None:
    return None if node["text"].get("optional") or node["text"].get("use_encoder") else _Tensor(_TEXT)


_PARSERS: Mapping[str, Callable[[Mapping[str, Any]], _Feature | None]] = {
    "ClassLabel": lambda _: _Tensor("int64"),
    "Image": _image,
    "Scalar": _tensor,
    "Tensor": _tensor,
    "Text": _text,
}


def _shape(content: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(extent) for extent in content["shape"].get("dimensions", ()))
