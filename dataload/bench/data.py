"""The data of a benchmark in several formats, written once and kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from dataload._util.fingerprint import digest
from dataload.api import open_source
from dataload.bench.results import FileFacts
from dataload.bench.workloads import Workload
from dataload.convert import convert
from dataload.errors import ConfigError
from dataload.sources.base import Source
from dataload.types import RandomAccessSource

__all__ = ["Data", "Written", "made_data", "own_data", "write"]

_SUFFIXES = {"syrah": ".syr", "torchrecord": "", "lmdb": ".lmdb", "tar": ".tar", "array_record": ".array_record"}
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Data:
    """Records to be written in several formats.

    Attributes:
        name: Name of the workload; for data of the user's own, their path.
        content: Identifies the records: part of the names of cached files.
        records: The records.
        fields: Names of their fields.
        formats: The formats that they can be written in.
        batch_size: Records per batch by default.
        decodes: Fields that hold JPEG files, to be decoded.
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
    """Data in one format.

    Attributes:
        path: File or directory; empty for generators.
        options: With which `dataload.open` gives the records that were written; of generators, how many records.
        facts: Size and cost.
    """

    path: str
    options: Mapping[str, Any]
    facts: FileFacts


def made_data(workload: Workload, records: int | None) -> Data:
    """The records of a workload, or so many of them."""
    count = workload.records if records is None else records
    made = workload.make(count)
    return Data(
        workload.name,
        digest(workload.name, workload.version, count),
        made,
        tuple(made[0]),
        workload.formats,
        workload.batch_size,
        workload.decodes,
    )


def own_data(path: str, records: int | None, options: Mapping[str, Any]) -> tuple[Data, Source[Any]]:
    """Data of the user's own, to be compared in other formats; and their source, for the caller to close.

    Args:
        path: As `dataload.open` takes it.
        records: The first so many; None for all.
        options: Of `dataload.open`.

    Raises:
        ConfigError: There is no record, or they have no fields.
        SourceError: They cannot be read.
    """
    source = open_source(path, **options)
    try:
        return _data_of(path, source, records), source
    except BaseException:
        source.close()
        raise


def _data_of(path: str, source: Source[Any], records: int | None) -> Data:
    if not len(source):
        raise ConfigError(f"{path} holds no record to measure with", key="path", value=path)
    first = source[0]
    if not isinstance(first, Mapping):
        raise ConfigError(
            f"the records of {path} are {type(first).__name__} without fields, which other formats cannot take: name "
            "their codec with --option codec=...",
            key="codec",
        )
    fields = tuple(name for name in first if name != "__key__")
    chosen = source if records is None else source[: min(records, len(source))]
    content = digest(source.fingerprint(), len(chosen))
    return Data(path, content, chosen, fields, tuple(_SUFFIXES), 256)


def write(data: Data, format_name: str, cache: Path) -> Written:
    """The data in a format: written, or found in the cache.

    Args:
        data: The records.
        format_name: The format.
        cache: Directory to keep it in.

    Raises:
        ConfigError: The format cannot take the records, or there is no room for them.
    """
    if format_name == "generator":  # makes its records when they are read
        count = len(data.records)
        return Written("", {"records": count}, FileFacts(data.name, format_name, count, 0, None))
    directory = cache / data.content / format_name
    facts_file = directory / "facts.json"
    target = directory / f"data{'.npy' if format_name == 'tokens' else _SUFFIXES[format_name]}"
    if not facts_file.exists():
        shutil.rmtree(directory, ignore_errors=True)  # of a run that was ended
        directory.mkdir(parents=True)
        _check_room(data, directory)
        seconds = _timed(lambda: _write(data, format_name, target))
        size = _size(target)
        facts_file.write_text(json.dumps({"nbytes": size, "write_seconds": seconds}), "utf-8")
    known = json.loads(facts_file.read_text("utf-8"))
    facts = FileFacts(data.name, format_name, len(data.records), known["nbytes"], known["write_seconds"])
    return Written(str(target), _options(data, format_name), facts)


def _write(data: Data, format_name: str, target: Path) -> None:
    if format_name == "tokens":
        np.save(target, np.concatenate([data.records[i]["tokens"] for i in range(len(data.records))]))
    else:
        convert(data.records, target, format=format_name)


def _options(data: Data, format_name: str) -> dict[str, Any]:
    if format_name in ("lmdb", "array_record"):
        return {"codec": "tensorprotos"}
    if format_name == "tar":
        return {"fields": list(data.fields), **({} if data.decodes else {"decode": "auto"})}
    if format_name == "tokens":
        return {"window": 1025}
    return {}


def _check_room(data: Data, directory: Path) -> None:
    looked = [data.records[i] for i in range(0, len(data.records), max(1, len(data.records) // 16))]
    mean = sum(_record_size(record) for record in looked) / len(looked)
    needed = int(mean * len(data.records)) + _SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ConfigError(
            f"{data.name} needs about {needed:,} bytes in {directory}, and {free:,} are free: set --cache to another "
            "place, or --records to fewer",
            key="cache",
            value=str(directory),
        )


def _record_size(record: Mapping[str, Any]) -> int:
    return sum(getattr(value, "nbytes", 0) or len(value) for value in record.values() if hasattr(value, "__len__"))


def _timed(work: Callable[[], object]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


def _size(path: Path) -> int:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return sum(os.stat(file).st_size for file in files)
