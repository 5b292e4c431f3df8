"""What ``fn.readers.webdataset`` takes, checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np

from dataload._util.checks import check_count
from dataload.errors import ConfigError, closest

__all__ = ["Missing", "Output", "check_flags", "check_missing", "check_needless", "check_outputs", "pair_indexes"]

Missing: TypeAlias = Literal["empty", "skip", "error"]

_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_DTYPES = {name.upper(): np.dtype(name) for name in _NUMBERS} | {"FLOAT": np.dtype("float32")}


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the reader.

    Attributes:
        extensions: It takes the first file of a sample, in the order of the archive, that has one of these.
        dtype: What the bytes of that file are.
    """

    extensions: tuple[str, ...]
    dtype: np.dtype[Any]


def check_outputs(ext: Any, dtypes: Any, *, case_sensitive: bool) -> tuple[Output, ...]:
    """The outputs that ``ext`` and ``dtypes`` ask for.

    Raises:
        ConfigError: One of them is no text, no list of texts, or no type of numbers; or they differ in length.
    """
    sets: list[Any] = list(ext) if isinstance(ext, Sequence) and not isinstance(ext, str) else [ext]
    if not sets or not all(isinstance(names, str) for names in sets):
        raise ConfigError(f"ext must be one set of extensions or more ('jpg;png', 'cls'), got {ext!r}", key="ext")
    if not case_sensitive:
        sets = [names.lower() for names in sets]
    given = [dtypes] if _is_one(dtypes) else list(dtypes or ["UINT8"] * len(sets))
    if len(given) != len(sets):
        raise ConfigError(
            f"dtypes names {len(given)} types for {len(sets)} outputs: give one for each", key="dtypes", value=dtypes
        )
    return tuple(Output(_alternatives(names), _dtype(dtype)) for names, dtype in zip(sets, given, strict=True))


def _alternatives(names: str) -> tuple[str, ...]:
    """What stands between the semicolons; behind the last one, nothing is no extension."""
    parts = names.split(";")
    return tuple(parts if parts[-1] else parts[:-1])


def _is_one(dtypes: Any) -> bool:
    return dtypes is not None and (isinstance(dtypes, (str, type)) or not isinstance(dtypes, Sequence))


def _dtype(given: Any) -> np.dtype[Any]:
    """The type that a name ("INT32"), a member of DALI's own enumeration or numpy's type stands for."""
    dtype: np.dtype[Any] | None
    if isinstance(given, (np.dtype, type)):
        dtype = np.dtype(cast("Any", given))
    else:
        dtype = _DTYPES.get(str(getattr(given, "name", given)).upper())
    if dtype is None or dtype not in _DTYPES.values():
        raise ConfigError(f"dtypes: {given!r} is no type of an output: {closest(given, _DTYPES)}", key="dtypes")
    return dtype


def check_missing(behavior: str) -> Missing:
    """What a sample that lacks an output does; the empty text means ``"empty"``.

    Raises:
        ConfigError: It is none of the three.
    """
    allowed = get_args(Missing)
    name = str(behavior).lower() or "empty"
    if name not in allowed:
        raise ConfigError(
            f"missing_component_behavior is {behavior!r}: {closest(name, allowed)}",
            key="missing_component_behavior",
            value=behavior,
        )
    return cast("Missing", name)


def pair_indexes(paths: Any, index_paths: Any) -> dict[str, str | Literal[False]]:
    """Archive -> its index; False where it is to be scanned.

    Raises:
        ConfigError: There is not one index for each archive, or one archive has two.
    """
    archives, indexes = _paths(paths), _paths(index_paths or [])
    if indexes and len(indexes) != len(archives):
        raise ConfigError(
            f"index_paths names {len(indexes)} files for {len(archives)} archives: give one for each, in the same "
            "order, or none",
            key="index_paths",
            value=index_paths,
        )
    if not indexes:
        return dict.fromkeys(archives, False)
    pairs: dict[str, str | Literal[False]] = {}
    for archive, index in zip(archives, indexes, strict=True):
        if pairs.setdefault(archive, index) != index:
            raise ConfigError(
                f"{archive} stands twice in paths, with two indexes: {pairs[archive]}, {index}", key="index_paths"
            )
    return pairs


def _paths(given: Any) -> list[str]:
    several = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    return [os.fspath(cast("str | os.PathLike[str]", path)) for path in several]


def check_flags(**flags: Any) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ConfigError: The message names the first one that is not.
    """
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ConfigError(f"{name} must be True or False, got {value!r}", key=name, value=value)


def check_needless(
    device: str | None,
    name: Any,
    bytes_per_sample_hint: int | Sequence[int],
    prefetch_queue_depth: int,
    tensor_init_bytes: int,
) -> None:
    """Refuse wrong values of what decides nothing here.

    Raises:
        ConfigError: A value is one that DALI's documentation does not allow.
    """
    if device not in (None, "cpu"):
        raise ConfigError(f"device must be 'cpu' or None, got {device!r}: this reader is one of the CPU", key="device")
    if not isinstance(name, (str, type(None))):
        raise ConfigError(f"name must be a text or None, got {name!r}", key="name", value=name)
    several = isinstance(bytes_per_sample_hint, Sequence)
    for hint in bytes_per_sample_hint if several else [bytes_per_sample_hint]:
        check_count("bytes_per_sample_hint", hint, least=0)
    check_count("prefetch_queue_depth", prefetch_queue_depth, least=1)
    check_count("tensor_init_bytes", tensor_init_bytes, least=1)
