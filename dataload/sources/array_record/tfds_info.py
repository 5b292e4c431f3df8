"""Directories that TensorFlow Datasets writes: which files and records a split stands for. Pure (no I/O).

``dataset_info.json`` names the splits, the records of each of their shards, and a template for the names of the files.
A small language chooses among them, ``"train[:75%]+test"``: see https://www.tensorflow.org/datasets/splits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError, closest

INFO_NAME = "dataset_info.json"

_FILE_FORMAT = "array_record"
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_DIGITS = 5  # of the number of a shard, at least
_VARIABLE = re.compile(r"\{(\w+)\}")

_UNION = re.compile(r"\s*\+\s*")
_PART = re.compile(r"([\w-]+)(?:\[([\w%:.-]+)\])?")
_BOUND = re.compile(r"(?:(-?[\d_.]+)(%|shard)?)?")
_ALL = "all"


@dataclass(frozen=True, slots=True)
class Split:
    """A split as it lies in files.

    Attributes:
        name: As users write it.
        shard_lengths: Records of each shard.
        files: Name of each shard's file, relative to the directory.
    """

    name: str
    shard_lengths: tuple[int, ...]
    files: tuple[str, ...]

    def __len__(self) -> int:
        return sum(self.shard_lengths)


class ShardPart(NamedTuple):
    """The records [start, stop) of a file; there is at least one."""

    file: str
    start: int
    stop: int


def parse_json(text: str, path: str) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        CorruptFileError: It holds none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"JSON that does not parse: {error}", path=path) from error
    if not isinstance(found, dict):
        raise CorruptFileError(f"expected a JSON object, found {str(found)[:40]!r}", path=path)
    return found


def parse_info(text: str, path: str) -> dict[str, Split]:
    """The splits of a data set, by name.

    Args:
        text: Content of ``dataset_info.json``.
        path: The file, for messages.

    Raises:
        UnsupportedFormatError: The records are not in ArrayRecord files.
        CorruptFileError: It is not what TensorFlow Datasets writes.
    """
    info = parse_json(text, path)
    found = info.get("fileFormat", "tfrecord")  # what it meant before it was written down
    if found != _FILE_FORMAT:
        raise UnsupportedFormatError(
            f"{path}: the records are in files of format {found!r}, which have no random access: prepare the data set "
            f'again with file_format="{_FILE_FORMAT}"',
            path=path,
        )
    try:
        splits = [_split(entry, str(info["name"])) for entry in info["splits"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(
            f"expected a name, and splits with name and shardLengths: {type(error).__name__} {error}", path=path
        ) from error
    return {split.name: split for split in splits}


def _split(entry: Mapping[str, Any], dataset: str) -> Split:
    lengths = tuple(int(length) for length in entry.get("shardLengths", ()))
    if any(length < 0 for length in lengths):
        raise ValueError(f"shardLengths {lengths}")
    template = entry.get("filepathTemplate") or _TEMPLATE
    name = str(entry["name"])
    files = [_file_name(template, dataset, name, shard, len(lengths)) for shard in range(len(lengths))]
    return Split(name, lengths, tuple(files))


def _file_name(template: str, dataset: str, split: str, shard: int, shards: int) -> str:
    digits = max(_DIGITS, len(str(shards)))
    index, count = f"{shard:0{digits}}", f"{shards:0{digits}}"
    variables = {
        "DATASET": dataset,
        "SPLIT": split,
        "FILEFORMAT": _FILE_FORMAT,
        "SHARD_INDEX": index,
        "NUM_SHARDS": count,
        "SHARD_X_OF_Y": f"{index}-of-{count}",
    }
    return _VARIABLE.sub(lambda match: variables[match[1]], template)


def select_records(splits: Mapping[str, Split], spec: str) -> list[ShardPart]:
    """The records that ``split=`` means, as TensorFlow Datasets rounds them.

    Args:
        splits: From `parse_info`.
        spec: Names of splits joined by ``+``, each alone or with a slice: ``[10:20]``, ``[-5:]``, ``[25%:75%]``,
            ``[2shard]``, ``[:2shard]``. ``"all"`` is all splits.

    Raises:
        ConfigError: There is no such split, or `spec` does not parse.
    """
    if spec in splits:
        return [*_parts(splits[spec], 0, len(splits[spec]))]
    selected: list[ShardPart] = []
    for part in _UNION.split(spec):
        match = _PART.fullmatch(part)
        if match is None:
            raise _unreadable(spec, f"{part!r} is no name of a split with or without a slice")
        name, selector = match.groups()
        if name == _ALL and name not in splits:
            if selector is not None:
                raise _unreadable(spec, f"{_ALL!r} takes no slice: slice each split")
            selected += [shard for split in splits.values() for shard in _parts(split, 0, len(split))]
        elif name not in splits:
            raise ConfigError(f"there is no split {name!r}: {closest(name, splits)}", key="split", value=spec)
        else:
            split = splits[name]
            bounds = (0, len(split)) if selector is None else _bounds(selector, split, spec)
            selected += _parts(split, *bounds)
    return selected


def _bounds(selector: str, split: Split, spec: str) -> tuple[int, int]:
    """First and last record of a slice, half open."""
    ends = [_BOUND.fullmatch(end) for end in selector.split(":")]
    first, last = ends[0], ends[-1]
    if first is None or last is None or len(ends) > 2 or not (first[0] or last[0]):
        raise _unreadable(spec, f"the slice [{selector}] is none of [10:20], [:75%], [2shard]")
    unit = first[2] or last[2]
    try:
        low, high = (None if end[1] is None else (float if unit == "%" else int)(end[1]) for end in (first, last))
    except ValueError:
        raise _unreadable(spec, f"the slice [{selector}] holds no {'number' if unit == '%' else 'integer'}") from None
    if len(ends) == 1:
        if unit != "shard" or low is None:
            raise _unreadable(spec, f"[{selector}] is one number, which selects a shard only: [{first[1]}shard]")
        high = low + 1
    if unit == "shard":
        return _of_shards(None if low is None else int(low), None if high is None else int(high), split)
    count = len(split)
    if unit == "%":
        if max(abs(low or 0), abs(high or 0)) > 100:
            raise _unreadable(spec, f"[{selector}] is outside of -100% to 100%")
        # Halves to even, and a product before the division: as TensorFlow Datasets rounds.
        low, high = (None if end is None else round(end * count / 100.0) for end in (low, high))
    start, stop = 0 if low is None else int(low), count if high is None else int(high)
    if max(abs(start), abs(stop)) > count:
        raise _unreadable(spec, f"[{selector}] reaches beyond the {count} records of {split.name!r}")
    return start + count if start < 0 else start, stop + count if stop < 0 else stop


def _of_shards(low: int | None, high: int | None, split: Split) -> tuple[int, int]:
    """Shards [low, high) as records; numbers that no shard has select nothing."""
    lengths = split.shard_lengths
    if high is not None and high <= 0:
        high += len(lengths)
    return 0 if low is None else sum(lengths[:low]), sum(lengths[:high])


def _parts(split: Split, start: int, stop: int) -> Iterator[ShardPart]:
    """The records [start, stop) of a split, by file."""
    first = 0
    for file, length in zip(split.files, split.shard_lengths, strict=True):
        low, high = max(start - first, 0), min(stop - first, length)
        if low < high:
            yield ShardPart(file, low, high)
        first += length


def _unreadable(spec: str, why: str) -> ConfigError:
    return ConfigError(f"split {spec!r}: {why}", key="split", value=spec)
