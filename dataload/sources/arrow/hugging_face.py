"""Data sets that Hugging Face's library wrote with `save_to_disk`, read without it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any, cast

from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.arrow.format import STATE_FILE, ArrowOptions
from dataload.sources.arrow.reader import ArrowSource
from dataload.storage import Remote, join, local_path, named_files, read_limited, storage_of

_MOST_BYTES = 64 << 20  # parsed JSON takes up to 24 times the memory
_SPLITS_FILE = "dataset_dict.json"


class HuggingFaceSource(ArrowSource):
    """Records of a directory that ``Dataset.save_to_disk`` wrote; its files are the shards.

    Images and audio are the bytes of their files, or decoded with ``decode="auto"``. Formats that were set in the
    library (``set_format``) are ignored.

    Args:
        paths: The directory, which has ``state.json``.
        fields: Names of the columns to read; None means all.
        options: See `ArrowOptions`.

    Raises:
        SourceNotFoundError: There is no such directory, or it has no ``state.json``.
        CorruptFileError: ``state.json`` is damaged. On first use, see `ArrowSource`.
        ConfigError: The directory has several splits.
    """

    format_name = "hugging_face"

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        fields: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        several = [paths] if isinstance(paths, (str, PathLike)) else list(paths)
        place = ArrowOptions.parse(options, "format 'hugging_face'").place
        files = [file for path in several for file in _data_files(local_path(fspath(path)), place)]
        super().__init__(files, fields=fields, **options)


def _data_files(directory: str, remote: Remote | None) -> list[str]:
    """Return the files that ``state.json`` lists, in their order."""
    storage, path = storage_of(directory, remote), join(directory, STATE_FILE)
    splits = join(directory, _SPLITS_FILE)
    if not storage.exists(path) and storage.exists(splits):
        names = ", ".join(name for name in storage.list(directory) if storage.is_directory(join(directory, name)))
        message = f"{directory} has several splits, {names}: open one of these directories"
        raise ConfigError(message, key="paths", value=directory)
    try:
        state = json.loads(read_limited(storage, path, _MOST_BYTES, "a list of files"))
        names = [entry["filename"] for entry in cast("list[Any]", state["_data_files"])]
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise CorruptFileError("it has a list of indices: save it again with a newer library", path=path)
        if not names:
            raise ValueError("it lists no file")
    except CorruptFileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"expected a list of the files of a data set of Hugging Face: {type(error).__name__}: {error}"
        raise CorruptFileError(message, path=path) from error
    return named_files(path, names)
