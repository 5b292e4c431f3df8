"""``dataload stats``."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from dataload._util.settings import check_choice
from dataload.catalog.facts import DataSetFacts, ShardFacts
from dataload.catalog.statistics import DataSetStatistics, FieldStatistics, Length
from dataload.cli import options
from dataload.cli.output import ProgressBar, count_of, print_json, print_line, print_table
from dataload.config import read_config
from dataload.config.problems import resolve_reference
from dataload.convert.indexing import IndexReport, index_shards
from dataload.convert.measuring import measure, measure_mapped
from dataload.convert.plan import Measuring
from dataload.errors import ConfigError
from dataload.jobs.engine import Engine
from dataload.jobs.run import Mode
from dataload.loader.failures import OnError
from dataload.storage import is_url

_CONFIGS = (".toml", ".yaml", ".yml", ".json")
_SHOWN_LABELS = 3
_SHOWN_SHAPES = 2
_SHOWN_CHARACTERS = 20


def stats_command(
    path: Annotated[
        str,
        typer.Argument(
            help="A path, URL, pattern, directory, or module:function; or the config of a loader.",
            metavar="PATH|CONFIG",
        ),
    ],
    format: options.SourceFormat = None,  # noqa: A002 - the option's name
    field: options.Fields = None,
    codec: options.Codec = None,
    decode: options.Decode = None,
    option: options.Options = None,
    where: options.Where = None,
    overrides: options.Overrides = None,
    part: options.Part = None,
    merge: options.Merge = False,
    engine: options.EngineName = None,
    map: Annotated[  # noqa: A002 - the option's name
        str | None,
        typer.Option(help="Measure the lengths of what a transform makes of records.", metavar="module:transform"),
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="What to do with a record that --map cannot transform: raise or skip.")
    ] = "raise",
    save: Annotated[bool, typer.Option(help="Keep the statistics beside the data.")] = True,
    json: options.JsonFlag = False,
) -> None:
    """Measure the fields of a data set: counts, shapes, lengths, ranges and labels.

    All records are read once. The result is kept in the manifest, dataload.json,
    and the lengths of records in hidden files beside it, so that `inspect`,
    `length_of` and `record_lengths` need not read the data again. A directory
    without a manifest gets one. An interrupted run resumes.

    Bytes are not decoded without --codec or --decode, unless the manifest or
    the config says how.

    With --map, the lengths of the transform's fields are measured and kept beside
    the data under its digest, for record_lengths(..., transform=...) and packing;
    so are the tokens of dataload.text, which loaders then read.
    """
    running = options.parse_engine(engine)
    mode = Mode(part=options.parse_part(part), merge=merge)
    mode.check(running)
    if (part or merge or running) and not save:
        raise ConfigError("parts are kept until they are merged: leave --no-save out", key="save")
    reports: list[IndexReport] = []
    if os.path.splitext(path)[1].lower() in _CONFIGS and not is_url(path) and not os.path.isdir(path):
        if format or field or codec or decode or option or where:
            raise ConfigError("a config says how its data is read: use --set to change it", key="config", value=path)
        targets = [*_of_config(path, overrides or ())]
    else:
        if overrides:
            raise ConfigError("--set is for configs: use --option", key="set")
        wanted = options.SourceOptions.parse(
            path, format=format, fields=field, codec=codec, decode=decode, options=option, where=where
        )
        targets = [(wanted.path, wanted.format, dict(wanted.options))]
        if part or merge or running:
            wanted.check_files("--engine" if running else "--merge" if merge else "--part")
        if map is not None:
            if part or merge or not save:
                raise ConfigError("--map keeps the lengths of all records: leave out --part, --merge and --no-save")
            _measure_map(wanted, map, on_error, json, running)
            return
        if where and (part or merge or running):
            raise ConfigError("parts and engines measure whole shards: leave --where out", key="where", value=where)
        if where or not wanted.has_files or _is_folder(wanted):
            targets, reports = [], [_measure_source(wanted)]
    index = partial(index_shards, part=mode.part, merge=merge, engine=running)
    for target, name, given in targets:
        measuring = Measuring(given.pop("fields", None), save)
        with ProgressBar("measuring shards") as bar:
            reports.append(index(target, format=name, options=given, measuring=measuring, progress=bar))
    if json:
        print_json([_facts(report) for report in reports])
    else:
        for report in reports:
            _print(report)


def _measure_map(
    wanted: options.SourceOptions, reference: str, on_error: str, json: bool, engine: Engine | None
) -> None:
    """Measure what a transform makes of records, and print its lengths."""
    check_choice("on_error", on_error, ("raise", "skip"))
    transform = resolve_reference(reference, "--map")
    with wanted.open() as source, ProgressBar("measuring records") as bar:
        policy: OnError = "skip" if on_error == "skip" else "raise"
        found = measure_mapped(source, transform, on_error=policy, engine=engine, progress=bar)
        records = len(source)
    ends = {name: (int(each.min()), int(each.max()), int(each.sum())) for name, each in found.fields.items() if records}
    if json:
        fields = {name: dict(zip(Length._fields, each, strict=True)) for name, each in ends.items()}
        print_json([{"path": wanted.path, "map": reference, "records": records, "bad": found.bad, "fields": fields}])
        return
    print_line(f"{reference} of {wanted.path}: {count_of(records, 'record')}", "bold")
    columns = {"field": "left", "length": "right", "mean": "right", "total": "right"}
    rows = [
        (name, _range(low, high), f"{total / records:,.1f}", f"{total:,}") for name, (low, high, total) in ends.items()
    ]
    print_table(columns, rows)
    if found.bad:
        print_line(f"{count_of(found.bad, 'bad record')}, of length 0")
    reason = "the transform cannot be identified, the data have just been written, or no directory is writable"
    kept = "kept" if found.kept else f"not kept: {reason}"
    print_line(f"{kept}, as found in an earlier run" if found.known else kept)


def _measure_source(wanted: options.SourceOptions) -> IndexReport:
    """Measure a source without files, with a file for each record, or without some of its records."""
    with wanted.open() as source, ProgressBar("measuring"):
        name = os.path.basename(os.path.abspath(wanted.path)) if wanted.has_files else wanted.path
        selected = None if wanted.is_function else wanted.options.get("fields")
        statistics = DataSetStatistics(options={}, selected=None, fields=measure(source, selected).fields)
        entry = DataSetFacts.of(name, wanted.shards().format.name, [ShardFacts(name, 0, len(source))])
        entry = replace(entry, statistics=statistics.to_json())
    reason = "the data are single files" if wanted.has_files else "the data have no files"
    reason = "only some of the records were measured" if wanted.where else reason
    return IndexReport("", (entry,), 0, reason)


def _is_folder(wanted: options.SourceOptions) -> bool:
    """Return whether the data are single files in a directory, which no manifest describes."""
    found = wanted.shards()
    return found.format.is_data_set_without_shards is not None and any(map(os.path.isdir, found.files))


def _of_config(path: str, overrides: Sequence[str]) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """Yield path, format and options of each source of a config."""
    settings = read_config(path, overrides)
    sections = settings.sources()
    if not sections:
        raise ConfigError(f"{path} has no section 'source': its streams read the data", key="source")
    for key, section in sections.items():
        given = section.open_options(key)
        if settings.remote is not None and section.has_urls():
            given["remote"] = settings.remote.given()
        for each in [section.path] if isinstance(section.path, str) else section.path:
            yield each, section.format, dict(given)


def _facts(report: IndexReport) -> dict[str, Any]:
    return {
        "path": report.path,
        "saved": not report.unsaved,
        "data_sets": [
            {
                "pattern": entry.pattern,
                "records": sum(entry.records),
                "shards": len(entry.names),
                "statistics": statistics_facts(DataSetStatistics.parse(entry.statistics)),
            }
            for entry in report.data_sets
        ],
    }


def statistics_facts(statistics: DataSetStatistics) -> dict[str, Any]:
    """Return statistics for ``--json``: as the manifest keeps them, with the mean and the standard deviation."""
    facts = statistics.to_json()
    for name, each in statistics.fields.items():
        if each.numbers is not None:
            facts["fields"][name]["numbers"].update(mean=each.numbers.mean, std=each.numbers.std)
    return facts


def _print(report: IndexReport) -> None:
    for entry in report.data_sets:
        records, shards = sum(entry.records), count_of(len(entry.names), "shard")
        print_line(f"{entry.pattern}: {count_of(records, 'record')} in {shards}", "bold")
        print_statistics(DataSetStatistics.parse(entry.statistics), records)
    if report.resumed:
        print_line(f"{count_of(report.resumed, 'shard')} from an earlier run")
    print_line(f"not kept: {report.unsaved}" if report.unsaved else f"kept in {report.path}")


def print_statistics(statistics: DataSetStatistics, records: int) -> None:
    """Print a table with a line for each field."""
    columns = {"field": "left", "dtype": "left", "shape": "left", "length": "right", "range": "right"}
    columns |= {"mean": "right", "std": "right", "labels": "left"}
    rows = [_row(name, each, records) for name, each in statistics.fields.items()]
    print_table(columns, rows)


def _row(name: str, field: FieldStatistics, records: int) -> tuple[str, ...]:
    missing = f" (in {field.records:,})" if field.records < records else ""
    length = "" if field.length is None else _range(field.length.shortest, field.length.longest)
    numbers = field.numbers
    if numbers is None:
        return (f"{name}{missing}", ", ".join(field.dtypes), _shape(field), length, "", "", "", _labels(field))
    ends = "" if numbers.minimum is None else _range(numbers.minimum, numbers.maximum)
    bad = [f"{count:,} {what}" for what, count in (("NaN", numbers.nan), ("infinite", numbers.infinite)) if count]
    mean, std = ("" if value is None else f"{value:.4g}" for value in (numbers.mean, numbers.std))
    ends = f"{ends} ({', '.join(bad)})" if bad else ends
    return (f"{name}{missing}", ", ".join(field.dtypes), _shape(field), length, ends, mean, std, _labels(field))


def _range(low: Any, high: Any) -> str:
    start, stop = (f"{end:,}" if isinstance(end, int) else f"{end:.4g}" for end in (low, high))
    return start if start == stop else f"{start} to {stop}"


def _shape(field: FieldStatistics) -> str:
    shapes: Mapping[tuple[int, ...], int] = field.shapes or {}
    if 0 < len(shapes) <= _SHOWN_SHAPES:
        return " or ".join(str(shape).replace(",)", ")") for shape in sorted(shapes))
    if field.axes is None:
        return "?"
    axes = ", ".join(_range(low, high) for low, high in field.axes)
    return f"({axes}){f', {len(shapes):,} different' if shapes else ''}"


def _labels(field: FieldStatistics) -> str:
    if not field.labels:
        return ""
    common = sorted(field.labels.items(), key=lambda each: (-each[1], isinstance(each[0], str), each[0]))
    shown = [f"{str(label)[:_SHOWN_CHARACTERS]!r}" if isinstance(label, str) else str(label) for label, _ in common]
    several = [f"{label}: {count:,}" for label, (_, count) in zip(shown, common[:_SHOWN_LABELS], strict=False)]
    return f"{len(common):,} ({', '.join(several)}{', ...' if len(common) > _SHOWN_LABELS else ''})"
