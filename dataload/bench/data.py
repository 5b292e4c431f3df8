"""The data of a benchmark: written in several formats once, and kept."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataload._util.fingerprint import digest
from dataload.bench.results import FileFacts
from dataload.bench.timing import seconds_of
from dataload.bench.workloads import Workload
from dataload.convert import convert
from dataload.convert.sharded import create
from dataload.errors import ConfigError
from dataload.loader.step import nbytes
from dataload.sources.base import Source
from dataload.sources.registry import added_formats, built_in_formats, get_format
from dataload.sources.writer import DEFAULT_CODEC
from dataload.types import RandomAccessSource

_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Data:
    """Records to be written in several formats; `decodes` are fields that hold JPEG files, to be decoded.

    `content` identifies the records, as part of the names of cached files.
    """

    name: str
    content: str
    records: RandomAccessSource[Any]
    fields: tuple[str, ...]
    formats: tuple[str, ...]
    batch_size: int
    decodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """Data in one format; generators have no path.

    `options` are those with which `dataload.open` returns the written records; for generators, their number.
    """

    path: str
    options: Mapping[str, Any]
    facts: FileFacts


def made_data(workload: Workload, records: int | None = None) -> Data:
    """Return the records of a workload, or the given number of them."""
    count = workload.records if records is None else records
    made = workload.make(count)
    content = digest(workload.name, workload.version, count)
    formats = workload.formats or _writable()
    return Data(workload.name, content, made, tuple(made[0]), formats, workload.batch_size, workload.decodes)


def own_data(path: str, source: Source[Any], records: int | None) -> Data:
    """Return the user's own data, to be compared in other formats; `records` is the number to take from the start."""
    if not len(source):
        raise ConfigError(f"{path} has no records to measure", key="path", value=path)
    first = source[0]
    if not isinstance(first, Mapping):
        raise ConfigError(
            f"the records of {path} are {type(first).__name__} without fields, which other formats cannot store: "
            "name their codec with --codec",
            key="codec",
        )
    fields = tuple(name for name in first if name != "__key__")
    chosen = source if records is None else source[: min(records, len(source))]
    return Data(path, digest(source.fingerprint(), len(chosen)), chosen, fields, _writable(), 256)


def _writable() -> tuple[str, ...]:
    return tuple(entry.name for entry in (*built_in_formats(), *added_formats()) if entry.writer is not None)


def write(data: Data, format_name: str, cache: Path) -> Written:
    """Write the data in a format, unless they are in the cache directory."""
    count = len(data.records)
    if format_name == "generator":  # makes its records when they are read
        return Written("", {"records": count}, FileFacts(data.name, format_name, count, 0, None))
    directory = cache / data.content / format_name
    facts_file = directory / "facts.json"
    suffixes = (".npy",) if format_name == "tokens" else get_format(format_name).suffixes
    target = directory / f"data{''.join(suffixes[:1])}"
    if not facts_file.exists():
        shutil.rmtree(directory, ignore_errors=True)  # left by an interrupted run
        directory.mkdir(parents=True)
        _check_room(data, directory)
        seconds = seconds_of(lambda: _write(data, format_name, target))
        facts_file.write_text(json.dumps({"nbytes": _size(target), "write_seconds": seconds}), "utf-8")
    facts = FileFacts(data.name, format_name, count, **json.loads(facts_file.read_text("utf-8")))
    return Written(str(target), _options(data, format_name), facts)


def write_once(target: Path, records: Callable[[], Iterable[Any]], **options: Any) -> str:
    """Write records with `dataload.create`, unless the file exists; it appears when it is complete. Return its path."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with create(target, **options) as writer:
            writer.extend(records())
    return str(target)


def _write(data: Data, format_name: str, target: Path) -> None:
    if format_name == "tokens":
        np.save(target, np.concatenate([data.records[i]["tokens"] for i in range(len(data.records))]))
    else:
        convert(data.records, target, format=format_name)


def _options(data: Data, format_name: str) -> dict[str, Any]:
    """Return the options with which a format's reader returns the fields that `convert` has written."""
    if format_name == "tokens":
        return {"window": 1025}
    entry = get_format(format_name)
    options: dict[str, Any] = {"codec": entry.default_codec or DEFAULT_CODEC} if entry.content == "bytes" else {}
    if "decode" in entry.reader_options.names():
        options |= {"fields": list(data.fields), **({} if data.decodes else {"decode": "auto"})}
    return options


def _check_room(data: Data, directory: Path) -> None:
    count = len(data.records)
    sample = range(0, count, max(1, count // 16))
    needed = sum(nbytes(data.records[i]) for i in sample) * count // len(sample) + _SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ConfigError(
            f"{data.name} needs about {needed:,} bytes in {directory}, and {free:,} are free: set --cache to another "
            "directory, or lower --records",
            key="cache",
            value=str(directory),
        )


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
