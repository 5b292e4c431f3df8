"""The splits of TensorFlow Datasets, and the files and records that belong to them. Pure (no I/O).

``dataset_info.json`` contains the names of the splits, the number of records in each of their shards, and a template
for file names. For the language of ``"train[:75%]+test"`` see https://www.tensorflow.org/datasets/splits.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError, closest
from dataload.storage import named_files

INFO_NAME = "dataset_info.json"

_FILE_FORMAT = "array_record"
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_DIGITS = 5  # of a shard number, at least
_VARIABLE = re.compile(r"\{(\w+)\}")

_UNION = re.compile(r"\s*\+\s*")
_PART = re.compile(r"([\w-]+)(?:\[([\w%:.-]+)\])?")
_BOUND = re.compile(r"(?:(-?[\d_.]+)(%|shard)?)?")
_ALL = "all"


@dataclass(frozen=True, slots=True)
class Split:
    """A split: the records in each of its shards, and file names relative to the directory."""

    name: str
    shard_lengths: tuple[int, ...]
    files: tuple[str, ...]

    def __len__(self) -> int:
        return sum(self.shard_lengths)


class ShardPart(NamedTuple):
    """The records [start, stop) of a file, at least one."""

    file: str
    start: int
    stop: int


def parse_json(text: str, path: str) -> dict[str, Any]:
    """Parse the text of the file at `path` as a JSON object, or raise a CorruptFileError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"invalid JSON: {error}", path=path) from error
    if not isinstance(found, dict):
        raise CorruptFileError(f"expected a JSON object, found {str(found)[:40]!r}", path=path)
    return found


def parse_info(text: str, path: str) -> dict[str, Split]:
    """Return the splits of a data set by name; `text` is the content of the ``dataset_info.json`` at `path`."""
    info = parse_json(text, path)
    found = info.get("fileFormat", "tfrecord")  # before there was a choice
    if found != _FILE_FORMAT:
        raise UnsupportedFormatError(
            f"{path}: the records are in files of format {found!r}, which has no random access: prepare the data set "
            f'again with file_format="{_FILE_FORMAT}"',
            path=path,
        )
    try:
        splits = [_split(entry, str(info["name"]), path) for entry in info["splits"]]
    except CorruptFileError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        message = f"expected a name, and splits with name and shardLengths: {type(error).__name__} {error}"
        raise CorruptFileError(message, path=path) from error
    return {split.name: split for split in splits}


def _split(entry: Mapping[str, Any], dataset: str, path: str) -> Split:
    lengths = tuple(int(length) for length in entry.get("shardLengths", ()))
    if any(length < 0 for length in lengths):
        raise ValueError(f"shardLengths {lengths}")
    template = entry.get("filepathTemplate") or _TEMPLATE
    name, count = str(entry["name"]), len(lengths)
    digits = max(_DIGITS, len(str(count)))
    files: list[str] = []
    for shard in range(count):
        variables = {
            "DATASET": dataset,
            "SPLIT": name,
            "FILEFORMAT": _FILE_FORMAT,
            "SHARD_INDEX": f"{shard:0{digits}}",
            "NUM_SHARDS": f"{count:0{digits}}",
            "SHARD_X_OF_Y": f"{shard:0{digits}}-of-{count:0{digits}}",
        }
        files.append(_VARIABLE.sub(lambda match, known=variables: known[match[1]], template))
    named_files(path, files)
    return Split(name, lengths, tuple(files))


def select_records(splits: Mapping[str, Split], spec: str) -> list[ShardPart]:
    """Return the records that ``split=`` selects, such as ``"train[10:20]+test[-5:]"``, rounded as in TFDS."""
    if spec in splits:
        return [*_parts(splits[spec], 0, len(splits[spec]))]
    selected: list[ShardPart] = []
    for part in _UNION.split(spec):
        match = _PART.fullmatch(part)
        if match is None:
            raise _invalid(spec, f"{part!r} is not the name of a split, with or without a slice")
        name, selector = match.groups()
        if name == _ALL and name not in splits:
            if selector is not None:
                raise _invalid(spec, f"{_ALL!r} takes no slice: slice each split")
            selected += [shard for split in splits.values() for shard in _parts(split, 0, len(split))]
        elif name not in splits:
            raise ConfigError(f"there is no split {name!r}: {closest(name, splits)}", key="split", value=spec)
        else:
            split = splits[name]
            bounds = (0, len(split)) if selector is None else _bounds(selector, split, spec)
            selected += _parts(split, *bounds)
    return selected


def _bounds(selector: str, split: Split, spec: str) -> tuple[int, int]:
    """Return the half-open range of records that the text between the brackets selects."""
    ends = [_BOUND.fullmatch(end) for end in selector.split(":")]
    first, last = ends[0], ends[-1]
    if first is None or last is None or len(ends) > 2 or not (first[0] or last[0]):
        raise _invalid(spec, f"the slice [{selector}] is not like [10:20], [:75%] or [2shard]")
    unit = first[2] or last[2]
    try:
        low, high = (None if end[1] is None else (float if unit == "%" else int)(end[1]) for end in (first, last))
    except ValueError:
        raise _invalid(spec, f"the slice [{selector}] needs {'numbers' if unit == '%' else 'integers'}") from None
    if len(ends) == 1:
        if unit != "shard" or low is None:
            raise _invalid(spec, f"[{selector}] is a single number, which can only select a shard: [{first[1]}shard]")
        high = low + 1
    if unit == "shard":
        lengths = split.shard_lengths  # shards that do not exist are ignored
        first_shard = 0 if low is None else int(low)
        end = len(lengths) if high is None else int(high) + (len(lengths) if high <= 0 else 0)
        return sum(lengths[:first_shard]), sum(lengths[:end])
    count = len(split)
    if unit == "%":
        if max(abs(low or 0), abs(high or 0)) > 100:
            raise _invalid(spec, f"[{selector}] is outside of -100% to 100%")
        # As TensorFlow Datasets rounds: multiply before dividing, and round halves to even.
        low, high = (None if end is None else round(end * count / 100.0) for end in (low, high))
    start, stop = 0 if low is None else int(low), count if high is None else int(high)
    if max(abs(start), abs(stop)) > count:
        raise _invalid(spec, f"[{selector}] reaches beyond the {count} records of {split.name!r}")
    return start + count if start < 0 else start, stop + count if stop < 0 else stop


def _parts(split: Split, start: int, stop: int) -> Iterator[ShardPart]:
    """Yield the records [start, stop) of a split by file."""
    first = 0
    for file, length in zip(split.files, split.shard_lengths, strict=True):
        low, high = max(start - first, 0), min(stop - first, length)
        if low < high:
            yield ShardPart(file, low, high)
        first += length


def _invalid(spec: str, why: str) -> ConfigError:
    return ConfigError(f"split {spec!r}: {why}", key="split", value=spec)
