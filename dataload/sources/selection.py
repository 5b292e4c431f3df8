"""Parts of files: as a slice in a path, ``"train.array_record[0:1000]"``, or as an object that libraries exchange."""

from os import PathLike, fspath
from typing import Any, Protocol, runtime_checkable

from dataload.errors import ConfigError


@runtime_checkable
class FileInstruction(Protocol):
    """Part of a file, as TensorFlow Datasets and Grain describe it; `examples_in_shard` is ignored."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int


def as_path(path: Any) -> str:
    """Return a path or a `FileInstruction` as text, the latter as a slice; others are a TypeError."""
    if isinstance(path, (str, PathLike)) and isinstance(text := fspath(path), str):
        if not text or "\0" in text:
            raise ConfigError(f"{text!r} is not a path", key="paths", value=path)
        return text
    if not isinstance(path, FileInstruction):
        raise TypeError(f"paths are text, path objects or a list of these, got {path!r} ({type(path).__name__})")
    if path.skip < 0 or path.take < 0:
        raise ConfigError(
            f"{path.filename}: skip={path.skip}, take={path.take}: neither may be negative", key="paths", value=path
        )
    return f"{fspath(path.filename)}[{path.skip}:{path.skip + path.take}]"
