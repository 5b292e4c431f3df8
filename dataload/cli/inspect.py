"""``dataload inspect`` and ``dataload show``: what is in a data set, and in batches of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import numpy as np
import typer
from rich.filesize import decimal

from dataload._util.settings import check_directory
from dataload.analysis.page import Page
from dataload.analysis.shown import (
    columns_of,
    describe_column,
    describe_record,
    preview,
    show_batch,
    show_records,
)
from dataload.api import record_loader
from dataload.catalog.evidence import shard_bytes
from dataload.catalog.facts import spec_of
from dataload.catalog.manifest import MANIFEST_NAME
from dataload.catalog.statistics import DataSetStatistics
from dataload.cli import options
from dataload.cli.output import count_of, print_json, print_line, print_table
from dataload.cli.stats import print_statistics, statistics_facts
from dataload.convert.mapping import read_tokenizer
from dataload.errors import ConfigError, DataloadError, printable
from dataload.loader.loader import Loader
from dataload.samplers import BatchSampler
from dataload.sources.base import Source
from dataload.sources.discover import DataSetFiles
from dataload.sources.file_source import FileSource
from dataload.sources.views.sequences import find_statistics
from dataload.storage import Remote, is_url, storage_of
from dataload.storage.core import core_name
from dataload.storage.remote.settings import node_directory
from dataload.types import BatchReader, ColumnReader, Sharded

_PROTOCOLS: tuple[type[Any], ...] = (BatchReader, ColumnReader, Sharded)
_SHOWN_SHARDS = 10
_SHOWN_CLASSES = 10
_SHOWN_VALUES = 6
_SHOWN_CHARACTERS = 60


def inspect_command(
    path: Annotated[
        str, typer.Argument(help="A path, URL, pattern, directory, format:path, or module:function.", metavar="PATH")
    ],
    format: options.SourceFormat = None,  # noqa: A002 - the option's name
    field: options.Fields = None,
    codec: options.Codec = None,
    decode: options.Decode = None,
    option: options.Options = None,
    where: options.Where = None,
    fingerprint: Annotated[
        bool,
        typer.Option(
            "--fingerprint", help="Compute the fingerprint of data at URLs, too, which takes requests for each shard."
        ),
    ] = False,
    json: options.JsonFlag = False,
) -> None:
    """Show the fields, dtypes, shapes, size, shards and first record of a data set.

    At a URL with a manifest, that takes a handful of requests; without one, the end of each shard is read. Formats that
    can only be read as a whole are downloaded into the cache, with a manifest the first shard alone.
    """
    wanted = options.SourceOptions.parse(
        path, format=format, fields=field, codec=codec, decode=decode, options=option, where=where
    )
    found = wanted.shards()
    with wanted.open_found(found) as source:
        facts = _facts(source, found, wanted.remote)
        statistics = kept_statistics(source, found)
        facts["statistics"] = [statistics_facts(each) for each, _ in statistics]
        facts["fingerprint"] = source.fingerprint() if fingerprint or wanted.remote is None else None
    facts["remote"] = _remote(wanted.remote)
    facts["manifest"] = [
        {"pattern": entry.pattern, "options": dict(entry.options), "hashed": all(entry.sha256)}
        for entry in found.listed
    ]
    if json:
        print_json(facts)
    else:
        _print_facts(facts)
        for each, records in statistics:
            print_line()
            print_statistics(each, records)


def kept_statistics(source: Source[Any], found: DataSetFiles) -> list[tuple[DataSetStatistics, int]]:
    """Return the statistics that are kept of whole data sets, and their numbers of records."""
    listed = any(entry.statistics is not None for entry in found.listed)  # asking again is a request
    if not isinstance(source, FileSource) or not (listed or (source.remote is None and not found.listed)):
        return []
    kept = [each for each in find_statistics(source) if len(each.shards) == len(each.entry.names)]
    return [(each.statistics, sum(each.entry.records)) for each in kept]


def _facts(source: Source[Any], found: DataSetFiles, remote: Remote | None) -> dict[str, Any]:
    """Return everything that ``--json`` prints."""
    first = sample = None
    try:
        if len(source):
            first = source[0]
            sample = _shorten(first)
    except DataloadError as error:  # the other facts are still worth showing
        sample = f"cannot be read: {error}"
    lengths = source.shard_lengths
    # An index lists others, and a directory may hold a data set that is no list of files.
    several: list[Sequence[str]] = [found.files, *(getattr(source, name, ()) for name in ("paths", "shard_names"))]
    names = next((paths for paths in several if len(paths) == len(lengths)), [repr(source)] * len(lengths))
    listed = [size for entry in found.listed for size in entry.bytes]
    if remote is None or len(listed) != len(names):  # otherwise that would take requests for each shard
        listed = [_size(found.format.file(name), remote) for name in names]
    shards: list[dict[str, Any]] = [
        {"path": name, "records": length, "bytes": size}
        for name, length, size in zip(names, lengths, listed, strict=True)
    ]
    specs = source.fields
    if not specs and isinstance(first, Mapping):
        specs = {name: spec_of(value) for name, value in cast("Mapping[str, Any]", first).items()}
    key_order = getattr(source, "key_order", None)
    return {
        "format": found.format.name,
        "core": core_name(),
        "records": len(source),
        "bytes": sum(shard["bytes"] for shard in shards) or _size_below(found.files),
        "fields": {
            name: {
                "dtype": spec.dtype,
                "shape": spec.shape,
                **({} if spec.classes is None else {"classes": spec.classes}),
            }
            for name, spec in specs.items()
        },
        "protocols": [protocol.__name__ for protocol in _PROTOCOLS if isinstance(source, protocol)],
        "notes": [] if key_order is None else [f"records are ordered by key, compared by {key_order}"],
        "shards": shards,
        "sample": sample,
    }


def _remote(remote: Remote | None) -> dict[str, Any] | None:
    """Describe how data at URLs are read, without what may be secret, and what this command downloaded."""
    if remote is None:
        return None
    settings, downloads = remote.options, remote.traffic.total()
    return {
        "mode": settings.mode,
        "cache": node_directory(remote),
        "budget": settings.budget,
        "requests": downloads.requests,
        "bytes": downloads.nbytes,
    }


def _size(path: str, remote: Remote | None) -> int:
    storage = storage_of(path, remote)
    return storage.size(path) if storage.exists(path) else 0  # memory and ranges have no path


def _size_below(directories: Sequence[str]) -> int:
    """Return the bytes of all visible files in local directories and below."""
    return sum(shard_bytes(path) for path in directories if not is_url(path) and storage_of(path).is_directory(path))


def _shorten(value: Any) -> Any:
    """Return a value as short text: for an array, its first elements and its shape."""
    if isinstance(value, Mapping):
        return {name: _shorten(item) for name, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, (bytes, str)):
        head, unit = repr(value[:_SHOWN_CHARACTERS]), "bytes" if isinstance(value, bytes) else "characters"
        return head if len(value) <= _SHOWN_CHARACTERS else f"{head}... ({len(value):,} {unit})"
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        items = array.ravel()[:_SHOWN_VALUES].tolist()
        values = ", ".join(f"{item:.5g}" if isinstance(item, float) else str(item) for item in items)
        if not array.ndim:
            return values
        return f"[{values}{', ...' if array.size > _SHOWN_VALUES else ''}] {array.shape}"
    return repr(value)


def _print_facts(facts: dict[str, Any]) -> None:
    shards, sample = facts["shards"], facts["sample"]
    counts = f"{count_of(facts['records'], 'record')} in {count_of(len(shards), 'shard')}"
    print_line(f"{facts['format']}: {counts}, {decimal(facts['bytes'])}", "bold")
    protocols = ", ".join(facts["protocols"]) or "none"
    known = "" if facts["fingerprint"] is None else f" fingerprint {facts['fingerprint']};"
    print_line(f"protocols: {protocols};{known} {facts['core']} core")
    if remote := facts["remote"]:
        budget = "" if remote["budget"] is None else f", budget {decimal(remote['budget'])}"
        cache = "" if remote["mode"] == "ranges" else f", cache {remote['cache']}{budget}"
        cost = f"{count_of(remote['requests'], 'request')}, {decimal(remote['bytes'])}"
        print_line(f"remote: mode {remote['mode']}{cache}; this took {cost}")
    for listed in facts["manifest"]:
        given = "".join(f", {name}={value!r}" for name, value in listed["options"].items())
        print_line(f"{MANIFEST_NAME}: {listed['pattern']}{given}")
    for note in facts["notes"]:
        print_line(f"note: {note}")
    print_line()
    if facts["fields"]:
        shown = cast("dict[str, Any]", sample) if isinstance(sample, dict) else {}
        rows = [
            (name, spec["dtype"], _shape(spec["shape"]), str(shown.get(name, "")))
            for name, spec in facts["fields"].items()
        ]
        print_table({"field": "left", "dtype": "left", "shape": "left", "record 0": "left"}, rows)
        for name, spec in facts["fields"].items():
            if classes := spec.get("classes"):
                more = ", ..." if len(classes) > _SHOWN_CLASSES else ""
                shown = ", ".join(classes[:_SHOWN_CLASSES])
                print_line(f"{name}: {count_of(len(classes), 'class', 'classes')}, {shown}{more}")
    elif facts["records"]:
        print_line("no fields: records are plain bytes; use --codec to decode them into fields")
    if sample is not None and not isinstance(sample, dict):
        print_line(f"record 0: {sample}")
    if len(shards) > 1:
        print_line()
        sizes = ["size"] if any(shard["bytes"] for shard in shards) else []  # episodes have none
        rows = [(shard["path"], f"{shard['records']:,}", *(decimal(shard["bytes"]) for _ in sizes)) for shard in shards]
        print_table({"shard": "left", **dict.fromkeys(["records", *sizes], "right")}, rows[:_SHOWN_SHARDS])
        if len(rows) > _SHOWN_SHARDS:
            print_line(f"... and {len(rows) - _SHOWN_SHARDS} more (--json lists all)")


def _shape(shape: tuple[int | None, ...] | None) -> str:
    return "?" if shape is None else f"({', '.join('?' if extent is None else str(extent) for extent in shape)})"


_TERMINAL_ROWS = 8
_PAGE_ROWS = 64
_ORDER = 300  # characters


def show_command(
    path: Annotated[
        str,
        typer.Argument(
            help="The config of a loader; with --records, a data set or module:function.", metavar="CONFIG|PATH"
        ),
    ],
    overrides: options.Overrides = None,
    epoch: Annotated[int | None, typer.Option(min=0, help="Epoch. Default: 0, or the epoch of --state.")] = None,
    step: Annotated[
        str | None, typer.Option(help="Step: one (12345) or a range (0:3). Default: the ones around --state.")
    ] = None,
    rank: options.Rank = None,
    world_size: options.WorldSize = None,
    state: options.State = None,
    changes: options.Changes = None,
    records: Annotated[str | None, typer.Option(help="Show records of a data set: one (7) or a range (0:50).")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows to show. Default: 8, or 64 in a page.")] = None,
    html: Annotated[str | None, typer.Option(help="Write a page to this file.", metavar="FILE")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer.json: show tokens as text in the page.")] = None,
    format: options.SourceFormat = None,  # noqa: A002 - the option's name
    field: options.Fields = None,
    codec: options.Codec = None,
    decode: options.Decode = None,
    option: options.Options = None,
    where: options.Where = None,
) -> None:
    """Show any batch of a run, or records of a data set, and where each record lies.

    The order is a function, so a batch of any past step is made again, bit for bit.

    Examples:
      dataload show train.toml --epoch 3 --step 12345 --html page.html
      dataload show train.toml --state checkpoint.json --rank 2 --world-size 8
      dataload show images.tar --decode auto --records 0:50 --html page.html
    """
    if html is not None:
        check_directory(html, "html")
    most = rows or (_TERMINAL_ROWS if html is None else _PAGE_ROWS)
    if records is None:
        if format or field or codec or decode or option or where:
            raise ConfigError("a config says how its data is read: use --set to change it, or give --records")
        if step is None and state is None:
            raise ConfigError("give --step, such as 12345 or 0:3; or --state; or, for a data set, --records")
        settings = [*(overrides or ()), *options.ranks_of(rank, world_size)]
        with record_loader(path, overrides=settings) as loader:
            options.load_state(loader, state, changes)
            number, steps = _steps(loader, epoch, step, around=state is not None)
            shown = [show_batch(loader, number, each, most=most) for each in steps]
            planner = loader.batch_sampler
            order = " ".join(repr(planner.sampler if isinstance(planner, BatchSampler) else planner).split())
            about = [repr(loader.source), f"order: {printable(order, _ORDER)}"]
        page = Page(f"{path}: {shown[0].title}" if len(shown) == 1 else path, about, shown, words=_words(tokenizer))
    else:
        if overrides or state or changes or step or rank is not None or world_size is not None or epoch is not None:
            raise ConfigError("--records shows a data set: leave out the options for a config")
        wanted = options.SourceOptions.parse(
            path, format=format, fields=field, codec=codec, decode=decode, options=option, where=where
        )
        page = _page_of_records(wanted, options.parse_range(records, "--records"), most, _words(tokenizer))
    if html is not None:
        options.write_file(html, page.to_html().encode(errors="replace").decode(), "--html", "w")
        print_line(f"wrote {html} ({os.path.getsize(html):,} bytes)")
    else:
        _print_batch(page)


def _steps(loader: Loader[Any], epoch: int | None, step: str | None, *, around: bool) -> tuple[int, range]:
    """Return the epoch and its steps to show: as given, or the step before and the one after a state."""
    epoch = (loader.epoch if around else 0) if epoch is None else epoch
    total = loader.batch_sampler_of(epoch).steps(epoch)
    near = range(max(0, loader.step - 1), min(loader.step + 1, total))
    steps = near if step is None else options.parse_range(step, "--step")
    options.check_steps(steps, total, epoch, "--step", step)
    return epoch, steps


def _page_of_records(wanted: options.SourceOptions, records: range, most: int, words: Any) -> Page:
    found = wanted.shards()
    with wanted.open_found(found) as source:
        if records.stop > len(source):
            asked = f"{records.start}:{records.stop}"
            raise ConfigError(f"--records {asked} is out of range: the data set has {count_of(len(source), 'record')}")
        shown = show_records(source, records, most=most)
        statistics = kept_statistics(source, found)
        about = [repr(source), count_of(len(source), "record")]
    fields = statistics[0][0].fields if len(statistics) == 1 else None
    return Page(f"{wanted.path}: {shown.title}", about, [shown], words=words, statistics=fields)


def _words(tokenizer: str | None) -> Any:
    """Return the function from tokens to text, if a tokenizer is given."""
    if tokenizer is None:
        return None
    known = read_tokenizer(tokenizer)

    def word(token: int) -> str:
        return known.decode([token], skip_special_tokens=False) or str(token)

    return word


def _print_batch(page: Page) -> None:
    for line in page.about:
        print_line(line)
    for section in page.shown:
        print_line()
        print_line(section.title, "bold")
        if section.batch is not None:
            columns = {"field": "left", "dtype": "left", "shape": "left", "values": "left"}
            lines = [(name or "batch", *describe_column(column)) for name, column in columns_of(section.batch)]
            print_table(columns, lines)
        for row in section.rows:
            print_line()
            name = f"record {row.records[0].index}" if section.batch is None else f"row {row.row}"
            print_line(f"{name}{' (filler)' if row.filler else ''}", "bold")
            for record in row.records[:_TERMINAL_ROWS]:
                print_line(f"  {describe_record(record)}")
            if len(row.records) > _TERMINAL_ROWS:
                print_line(f"  and {len(row.records) - _TERMINAL_ROWS} more records")
            for name, value in columns_of(row.values):
                print_line(f"  {name or 'data'}: {preview(value, section.classes.get(name, ()))}")
        if section.total > len(section.rows):
            print_line()
            print_line(f"and {section.total - len(section.rows):,} more rows, which --rows adds")
