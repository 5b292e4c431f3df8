"""The data of a benchmark, written in several formats once and kept; and the measurements of the loader over them."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import numpy as np

from dataload._util.fingerprint import digest
from dataload.api import open_source
from dataload.bench.runner import FileFacts, Measurement
from dataload.bench.task import Order, Reading, Task
from dataload.convert import convert
from dataload.errors import ConfigError, CorruptFileError
from dataload.loader.loader import Loader
from dataload.loader.order import Shuffle
from dataload.loader.step import nbytes
from dataload.sources.base import Source
from dataload.sources.registry import added_formats, built_in_formats, get_format
from dataload.sources.writer import DEFAULT_CODEC
from dataload.types import RandomAccessSource

BATCH_SIZE = 256
_SPARE_BYTES = 1 << 30
_WORTH_IT = 1.5  # less may be noise, and is not worth a conversion
_USUAL = ("syrah", "tar", "torchrecord")
_SAMPLE = 16  # records that are looked at before the data are measured
_MEASURED_BYTES, _FEWEST, _MOST = 64 << 20, 512, 20_000  # of the records that are measured by default


@dataclass(frozen=True, slots=True)
class Data:
    """Records to be written in several formats, and the function of a `Task` that opens the loader over them."""

    name: str
    content: str  # of the names of cached files
    records: RandomAccessSource[Any]
    fields: tuple[str, ...]
    formats: tuple[str, ...]
    varying: tuple[str, ...] = ()  # fields whose shape differs between records
    usual: tuple[str, ...] = ()  # compared with your own, unless others are named
    raw: RandomAccessSource[Any] | None = None  # without decoding, for formats that keep files
    own: "Written | None" = None
    unread: int = 0  # records left out because they cannot be read
    kept: tuple[int, ...] | None = None  # the other ones, if any is left out


@dataclass(frozen=True, slots=True)
class Written:
    """Data in one format; with `options`, `dataload.open` returns the written records."""

    path: str
    options: Mapping[str, Any]
    facts: FileFacts


def own_data(
    path: str,
    source: Source[Any],
    records: int | None,
    *,
    raw: Source[Any] | None = None,
    format_name: str | None = None,
    options: Mapping[str, Any] | None = None,
    files: Sequence[str] = (),
) -> Data:
    """Return the user's own data, to be compared as they are and in other formats."""
    if not len(source):
        raise ConfigError(f"{path} has no records to measure", key="path", value=path)
    sample = read_some(source, range(0, len(source), max(1, len(source) // _SAMPLE)))
    if not sample:
        raise ConfigError(f"{path} has no records that can be read: see `dataload verify`", key="path", value=path)
    first = sample[0]
    if not isinstance(first, Mapping):
        raise ConfigError(
            f"the records of {path} are {type(first).__name__} without fields, which other formats cannot store: "
            "name their codec with --codec",
            key="codec",
        )
    fields = tuple(name for name in first if name != "__key__")
    if records is None:
        mean = max(1, sum(map(nbytes, sample)) // len(sample))
        records = min(max(_FEWEST, _MEASURED_BYTES // mean), _MOST)
    count = min(records, len(source))
    kept = readable(source, count)
    chosen = slice(count) if len(kept) == count else kept
    shapes = {name: {np.shape(record.get(name)) for record in sample} for name in fields}
    own = None
    if format_name is not None and options is not None:
        opened = {"fields": list(fields), **options}
        size = sum(_size(Path(file)) for file in dict.fromkeys(files)) * count // len(source)
        own = Written(path, opened, FileFacts(path, format_name, count, size, None))
    return Data(
        path,
        digest(source.fingerprint(), count, raw is not None),
        source[chosen],
        fields,
        writable_formats(),
        varying=tuple(name for name, found in shapes.items() if len(found) > 1),
        usual=tuple(name for name in _USUAL if name != format_name),
        raw=None if raw is None else raw[chosen],
        own=own,
        unread=count - len(kept),
        kept=None if len(kept) == count else tuple(kept),
    )


def read_some(source: Source[Any], indices: Iterable[int]) -> list[Any]:
    """Return the records that can be read."""
    found: list[Any] = []
    for index in indices:
        with suppress(CorruptFileError):
            found.append(source[index])
    return found


def readable(source: Source[Any], count: int) -> list[int]:
    """Return the indices below `count` of records that can be read, in order."""
    kept: list[int] = []
    for start in range(0, count, BATCH_SIZE):
        block = range(start, min(start + BATCH_SIZE, count))
        try:
            source.read(block)
            kept += block
        except CorruptFileError:
            kept += [index for index in block if read_some(source, [index])]
    return kept


def writable_formats() -> tuple[str, ...]:
    """Return the names of the formats that can be written and store any fields, which files of tokens do not."""
    written = (entry for entry in (*built_in_formats(), *added_formats()) if entry.writer is not None)
    return tuple(entry.name for entry in written if entry.name != "tokens")


def write(data: Data, format_name: str, cache: Path) -> Written:
    """Write the data in a format, unless they are in the cache directory."""
    count = len(data.records)
    directory = cache / data.content / format_name
    facts_file = directory / "facts.json"
    target = directory / f"data{''.join(get_format(format_name).suffixes[:1])}"
    if not facts_file.exists():
        shutil.rmtree(directory, ignore_errors=True)  # left by an interrupted run
        directory.mkdir(parents=True)
        _check_room(data, directory)
        files = data.raw is not None and "decode" in get_format(format_name).reader_options.names()
        begun = perf_counter()
        convert(data.raw if files and data.raw is not None else data.records, target, format=format_name)
        seconds = perf_counter() - begun
        facts_file.write_text(json.dumps({"nbytes": _size(target), "write_seconds": seconds}), "utf-8")
    facts = FileFacts(data.name, format_name, count, **json.loads(facts_file.read_text("utf-8")))
    return Written(str(target), _options(data, format_name), facts)


def _options(data: Data, format_name: str) -> dict[str, Any]:
    """Return the options with which a format's reader returns the fields that `convert` has written."""
    entry = get_format(format_name)
    options: dict[str, Any] = {"codec": entry.default_codec or DEFAULT_CODEC} if entry.content == "bytes" else {}
    if "decode" in entry.reader_options.names():
        options |= {"fields": list(data.fields), **({} if data.raw is None else {"decode": "auto"})}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The settings to compare; each measurement takes about `seconds`."""

    orders: tuple[Order, ...]
    workers: tuple[int, ...]
    batch_size: int
    executor: str = "threads"
    seconds: float = 2.0

    def task(self, data: Data, **settings: Any) -> Task:
        """Return a task with these choices and other settings."""
        return Task(workload=data.name, batch_size=self.batch_size, seconds=self.seconds, **settings)


def _settings(choices: Choices, *, own: bool) -> list[tuple[Order, int]]:
    """Return orders and numbers of workers; for data as they are, also what a pool of shards would gain."""
    more: list[tuple[Order, int]] = [("pool", max(choices.workers))] if own and choices.orders == ("global",) else []
    return [*product(choices.orders, choices.workers), *more]


AS_IT_IS = "as it is"
"""The name of the reading of the user's own data, before they are written in other formats."""


def plan_loaders(data: Data, written: Mapping[str, Written], choices: Choices) -> list[Task]:
    """Plan the loader over each format, in each order, with each number of workers."""
    return [
        choices.task(
            data,
            kind="dataload",
            name=AS_IT_IS if one is data.own else "dataload",
            path=one.path,
            format=one.facts.format,
            reading=f"{__name__}:loader",
            order=order,
            workers=workers,
            options={
                "open": one.options,
                "executor": choices.executor,
                "varying": data.varying,
                "records": (data.kept or one.facts.records) if one is data.own else None,
            },
        )
        for one in written.values()
        for order, workers in _settings(choices, own=one is data.own)
    ]


_SHUFFLES: Mapping[Order, Shuffle | Literal[False]] = {"global": "global", "pool": "shards", "sequential": False}


def advice(measurements: Sequence[Measurement], files: Sequence[FileFacts]) -> str:
    """Return what to do with data that were measured as they are and in other formats; "" without figures."""
    rates = {
        (m.task.name == AS_IT_IS, m.task.format, m.task.order, m.task.workers): median(m.rates)
        for m in measurements
        if m.answers
    }
    own = {setting: rate for setting, rate in rates.items() if setting[0] and setting[2] != "pool"}
    if not own:
        return ""
    best, rate = max(own.items(), key=lambda item: item[1])
    said = f"As it is, num_workers={best[3]} is best: {rate:,.0f} records/s"
    if best[3] and (alone := own.get((*best[:3], 0))):
        said += f", {rate / alone:.1f} times as many as without workers"
    pooled = max((other for setting, other in rates.items() if setting[0] and setting[2] == "pool"), default=0.0)
    if pooled > _WORTH_IT * rate:
        said += f"; shuffle='shards' gives {pooled / rate:.1f} times as many"
    others = {setting: other for setting, other in rates.items() if not setting[0]}
    fastest, most = max(others.items(), key=lambda item: item[1], default=(best, 0.0))
    if most <= _WORTH_IT * rate:
        return f"{said}. No format that was compared is much faster: keep yours."
    sizes = {one.format: one.nbytes for one in files}
    size = f" and {sizes[fastest[1]] / sizes[best[1]]:.1f} times as large" if sizes.get(best[1]) else ""
    return f"{said}. As {fastest[1]}, it is {most / rate:.1f} times as fast{size}: see `dataload convert`."


def open_data(task: Task) -> Source[Any]:
    """Open the data of a task with what the format needs to return fields."""
    return open_source(task.path, format=task.format, **task.options.get("open", {}))


def loader(task: Task, transform: Callable[..., Any] | None = None) -> Reading:
    """Open `dataload.Loader` with the kind of workers in the option ``executor``."""
    held = ExitStack()
    source = held.enter_context(open_data(task))
    if (records := task.options.get("records")) is not None:
        source = source[:records] if isinstance(records, int) else source[list(records)]
    executor = task.options.get("executor", "threads")
    made: Loader[Any] = Loader(
        source,
        batch_size=task.batch_size,
        shuffle=_SHUFFLES[task.order],
        seed=task.seed,
        transform=transform,
        collate=dict.fromkeys(task.options.get("varying", ()), "list") or None,
        num_workers=task.workers,
        executor=executor,
    )
    held.callback(made.close)

    def batches(epoch: int) -> Iterator[Any]:
        made.set_epoch(epoch)
        return iter(made)

    return Reading({"executor": executor, "num_workers": task.workers, "prefetch": 2}, batches, held=held)
