"""``dataload convert`` and ``dataload index``, which write beside data or elsewhere."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import numpy as np
import typer
from rich.filesize import decimal

from dataload.cli import options
from dataload.cli.output import ProgressBar, as_typed, count_of, print_error, print_line, print_warning
from dataload.config import parse_value
from dataload.config.problems import resolve_reference
from dataload.convert import ConvertReport, convert
from dataload.convert.indexing import index_shards
from dataload.convert.mapping import Tokenize
from dataload.convert.plan import Shard, Target
from dataload.errors import ConfigError, DataloadError
from dataload.jobs.engine import select_part
from dataload.loader.failures import BadRecord, read_excluded
from dataload.sources.base import SelectionSource, Source
from dataload.sources.discover import find_shards
from dataload.sources.registry import built_in_formats, find_destination
from dataload.sources.shards import Location
from dataload.sources.views.select import Chosen
from dataload.sources.views.split import select
from dataload.storage import Remote, base_name, storage_of

_SHOWN_BAD = 3


def convert_command(
    source: Annotated[
        str, typer.Argument(help="A path, pattern, directory, format:path, or module:function.", metavar="SRC")
    ],
    destination: Annotated[
        str, typer.Argument(help="A path, URL or format:path. Shard names may contain {shard:05d}.", metavar="DST")
    ],
    format: Annotated[  # noqa: A002 - the option's name
        str | None, typer.Option(help="Format to write. Default: detected from the suffix of DST.")
    ] = None,
    from_format: Annotated[
        str | None, typer.Option("--from", help="Format of SRC. Default: detected from the name or content.")
    ] = None,
    shards: Annotated[int | None, typer.Option(help="Number of files to write.")] = None,
    records_per_shard: Annotated[int | None, typer.Option(help="Maximum number of records per file.")] = None,
    map: Annotated[  # noqa: A002 - the option's name
        str | None,
        typer.Option(help="Function of a sample, or of a sample and its context: module:function."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json: write the tokens of texts.", metavar="FILE")
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field with the texts for --tokenizer.")] = "text",
    end_token: Annotated[
        str | None, typer.Option(help="Token to write after each text, such as '<|endoftext|>'.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers in the context.")] = 0,
    on_error: Annotated[
        str, typer.Option(help="What to do with a record that cannot be read or mapped: raise or skip.")
    ] = "raise",
    max_bad: Annotated[
        str,
        typer.Option(help="Maximum number of skipped records, or their share, such as 0.05 or 5%."),
    ] = "1%",
    error_report: Annotated[str | None, typer.Option(help="JSONL file to append skipped records to.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted conversion.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    part: options.Part = None,
    merge: options.Merge = False,
    keep_key: Annotated[bool, typer.Option("--keep-key", help="Keep the __key__ of tar samples as a field.")] = False,
    field: options.Fields = None,
    codec: options.Codec = None,
    to_codec: Annotated[str | None, typer.Option(help="Codec for writing, if not the one for reading.")] = None,
    decode: options.Decode = None,
    option: options.Options = None,
    to_option: Annotated[
        list[str] | None,
        typer.Option(help="Option of the writer, or storage_options.NAME of a URL, as key=value. Repeatable."),
    ] = None,
    engine: options.EngineName = None,
    where: options.Where = None,
    split: options.Split = None,
    take: options.Take = None,
    exclude: Annotated[
        str | None, typer.Option(help="Records to leave out: indices such as 3,17, or a file of --error-report.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing: show files, sizes, and records that fail.")
    ] = False,
) -> None:
    """Convert a data set to another format, in shards, keeping the order of its records.

    --codec applies to whichever of the two formats stores plain bytes, or to
    both. Parts may run on several machines, in any order, and again; --merge,
    with the same arguments, ends the conversion. --engine does all of that.

    The function of --map returns a record, a list of records, or dataload.DROP.
    """
    running = options.parse_engine(engine)
    tokenize = None
    if tokenizer is not None:
        if map is not None:
            raise ConfigError("--tokenizer and --map are both functions of a sample: pass one of them", key="tokenizer")
        tokenize = Tokenize.of(tokenizer, text_field=text_field, end_token=end_token)
    entry, path = find_destination(destination, format or (None if tokenize is None else "tokens"))
    wanted = options.SourceOptions.parse(source, format=from_format, fields=field, decode=decode, options=option)
    if codec is not None and "codec" in wanted.shards().format.reader_options.names():
        wanted.options["codec"] = options.resolve_codec(codec)
    passes = map is None and tokenize is None and entry.content != "images"
    if decode is None and passes and options.decodes(wanted.shards().format):
        # Files pass through unchanged; with their suffixes where fields are files again.
        wanted.options.setdefault("decode", {} if entry.key_field is None else None)
    writer_options = {**(tokenize.writer_options if tokenize is not None else {}), **options.parse_options(to_option)}
    if (writer_codec := to_codec or codec) is not None and "codec" in entry.writer_options.names():
        writer_options["codec"] = options.resolve_codec(writer_codec)
    settings: dict[str, Any] = {
        "writer_options": writer_options,
        "keep_key": keep_key,
        "map": tokenize if map is None else resolve_reference(map, "--map"),
        "seed": seed,
    }
    before = sum(storage_of(file).size(file) for file in dict.fromkeys(wanted.local_files()))
    number = options.parse_part(part)
    with ExitStack() as stack:
        opened = _select(stack.enter_context(wanted.open()), where, split, take)
        opened = _without(opened, exclude, error_report)
        if dry_run:
            plan = Target.of(path, entry.name).plan(len(opened), shards=shards, records_per_shard=records_per_shard)
            plan = plan if number is None else select_part(plan, *number)
            _show_plan(opened, plan, before, {"format": entry.name, **settings}, "".join(entry.suffixes[:1]), on_error)
            return
        bar = stack.enter_context(ProgressBar(f"converting to {entry.name}"))
        report = convert(
            opened,
            path,
            format=entry.name,
            shards=shards,
            records_per_shard=records_per_shard,
            on_error=cast("Any", on_error),
            max_bad=parse_max_bad(max_bad),
            error_report=error_report,
            resume=resume,
            overwrite=overwrite,
            part=number,
            merge=merge,
            engine=running,
            progress=bar,
            **settings,
        )
    _print(report, sizes(report.bytes, 0 if part else before))


def _select(source: Source[Any], where: str | None, split: str | None, take: str | None) -> Source[Any]:
    """Return the records that --where, --split and --take select, and print how large the parts are."""
    if (split is None) != (take is None):
        raise ConfigError("--split names the parts, and --take the one to read: pass both", key="split")
    items = [each.strip().partition("=") for each in split.split(",")] if split is not None else []
    given = dict[str, Any]()
    for key, _, value in items:
        if key in given:
            raise ConfigError(f"--split {split}: {key!r} stands twice", key="split", value=split)
        given[key] = parse_value(f"0{value}" if value.startswith(".") else value)
    settings = {key: given.pop(key) for key in ("seed", "exact", "stratify", "group") if key in given}
    dealt = {"folds": given["folds"]} if [*given] == ["folds"] else {"shares": given}
    source, report = select(source, where, {} if split is None else {**dealt, "part": take, **settings})
    for line in report.splitlines():
        print_line(line)
    return source


def parse_max_bad(text: str) -> int | float:
    """Parse ``"50"`` as a number of records, and ``"0.05"`` or ``"5%"`` as a fraction."""
    number = text.removesuffix("%")
    try:
        value = float(number) if "." in text or "%" in text else int(text)
    except ValueError:
        message = f"--max-bad is a number of records, or a fraction such as 0.05 or 5%, got {text!r}"
        raise ConfigError(message, key="max_bad", value=text) from None
    return value if number == text else value / 100


def _print(report: ConvertReport, size: str) -> None:
    """Print what a conversion has written and left out."""
    for note in report.notes:
        print_line(f"note: {as_typed(note)}")
    resumed = f", {count_of(report.resumed, 'record')} from an earlier run" if report.resumed else ""
    print_line(f"{count_of(report.records, 'record')} in {report.pattern} ({size}{resumed})")
    if report.skipped:
        print_line(f"{count_of(report.skipped, 'bad record')} skipped")
        for line in _describe_bad(report.bad_records):
            print_line(f"  {line}")


def _without(source: Source[Any], exclude: str | None, error_report: str | None) -> Source[Any]:
    """Return the source without the records that --exclude names."""
    if exclude is not None and error_report is not None:
        message = "--exclude and --error-report contradict each other: the report would number the remaining records"
        raise ConfigError(f"{message}. Leave --exclude out, and --on-error skip reports all of them", key="exclude")
    listed = exclude is not None and re.fullmatch(r"\d+(,\d+)*", exclude) is not None
    given = [*map(int, exclude.split(","))] if listed and exclude is not None else exclude
    if (excluded := read_excluded(given, source)) is None:
        return source
    kept = np.ones(len(source), np.bool_)
    kept[excluded] = False
    return SelectionSource(source, Chosen(np.flatnonzero(kept)))


def _describe_bad(bad: Sequence[BadRecord]) -> Iterator[str]:
    """Yield lines about bad records: how many failed in which way, and the first of each kind."""
    for (stage, error), count in Counter((each.stage, each.error) for each in bad).most_common():
        yield f"{stage}: {error}: {count:,}"
        for each in [each for each in bad if (each.stage, each.error) == (stage, error)][:_SHOWN_BAD]:
            known = each.shard is not None and each.shard in each.cause  # messages of our own errors begin with it
            where = "" if known else f"{Location(each.shard, each.record, each.key)}: "
            yield f"  [{each.index}] {where}{each.cause}"


_TRIED = 256
_LISTED = 20


def sizes(after: int, before: int, *, about: bool = False) -> str:
    """Return the size of the written files in words, compared with the source's size if it is known."""
    size = f"{'about ' if about else ''}{decimal(after)}"
    return f"{size}, {after / before:.1f} times the {decimal(before)} of the source" if before and after else size


def _show_plan(
    source: Source[Any], plan: Sequence[Shard], before: int, settings: Mapping[str, Any], suffix: str, on_error: str
) -> None:
    """Print the files that a conversion would write, their size, and the records that fail."""
    total = sum(shard.stop - shard.start for shard in plan)
    chosen = np.unique(np.linspace(plan[0].start, max(plan[0].start, plan[-1].stop - 1), _TRIED).astype(np.int64))
    report = _try(SelectionSource(source, Chosen(chosen)), suffix, settings) if total else None
    for shard in plan[:_LISTED]:
        exists = " (exists)" if os.path.exists(shard.path) else ""
        print_line(f"{shard.path}: {count_of(shard.stop - shard.start, 'record')}{exists}")
    if len(plan) > _LISTED:
        print_line(f"... and {len(plan) - _LISTED:,} more")
    if report is not None:
        after = report.bytes * total // len(chosen)
        print_line(f"{count_of(total, 'record')} of the source would become {sizes(after, before, about=True)}")
        for note in report.notes:
            print_line(f"note: {as_typed(note)}")
        if report.skipped:
            fate = "skipped" if on_error == "skip" else "an error"
            print_warning(
                f"of {len(chosen):,} records tried, {report.skipped:,} cannot be converted: they would be {fate}"
            )
            bad = [replace(each, index=int(chosen[each.index])) for each in report.bad_records]
            for line in _describe_bad(bad):
                print_line(f"  {line}")
    print_line("nothing was written: leave out --dry-run", "bold")


def _try(sample: Source[Any], suffix: str, settings: Mapping[str, Any]) -> ConvertReport:
    with TemporaryDirectory() as folder, ProgressBar("trying some records") as bar:
        target = Path(folder, f"trial{suffix}")
        return convert(sample, target, on_error="skip", max_bad=1.0, progress=bar, **settings)


def index_command(
    paths: Annotated[
        list[str], typer.Argument(help="Tar archives, patterns or directories; with --manifest, any shards.")
    ],
    directory: Annotated[
        str | None,
        typer.Option("--directory", "-d", help="Where to write the index files. Default: beside the archives."),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Reject archives with split samples, or with two files of one extension in a sample.")
    ] = True,
    manifest: Annotated[
        bool, typer.Option("--manifest", help="Write or renew dataload.json in the directory of the shards instead.")
    ] = False,
    part: options.Part = None,
    merge: options.Merge = False,
    format: options.SourceFormat = None,  # noqa: A002 - the option's name
    codec: options.Codec = None,
    decode: options.Decode = None,
    option: options.Options = None,
    engine: options.EngineName = None,
) -> None:
    """Write index files for tar archives, or the manifest of a directory.

    Index files are DALI-compatible; the archives are validated. A bad archive
    gets no index; the others are still indexed, and the exit code is 1.

    With --manifest, the manifest lists the shards of each PATH with records,
    sizes and SHA-256, and gives their format, --codec and --decode to those
    who open the directory. An interrupted run resumes.
    """
    running = options.parse_engine(engine)
    if manifest:
        if directory is not None:
            raise ConfigError("a manifest is written beside its shards: leave --directory out", key="directory")
        index = partial(index_shards, part=options.parse_part(part), merge=merge, engine=running)
        for path in paths:
            wanted = options.SourceOptions.parse(path, format=format, codec=codec, decode=decode, options=option)
            wanted.check_files("--manifest")
            with ProgressBar("hashing shards") as bar:
                report = index(wanted.path, format=wanted.format, options=wanted.options, progress=bar)
            for entry in report.data_sets:
                shards, records = count_of(len(entry.names), "shard"), count_of(sum(entry.records), "record")
                print_line(f"{report.path}: {entry.pattern}: {records} in {shards} ({decimal(sum(entry.bytes))})")
            if report.resumed:
                print_line(f"{count_of(report.resumed, 'shard')} from an earlier run")
    elif format or codec or decode or part or merge or running:
        message = "--format, --codec, --decode, --part, --merge and --engine are for --manifest"
        raise ConfigError(message, key="manifest")
    else:
        given = options.parse_options(option)
        remote = Remote.of(given.pop("storage_options", None), given.pop("remote", None))
        if given:
            message = f"without --manifest, --option takes storage_options and remote only, got {min(given)!r}"
            raise ConfigError(message, key="option")
        _index_archives(paths, directory, remote, strict=strict)


def _index_archives(archives: list[str], directory: str | None, remote: Remote, *, strict: bool) -> None:
    entry = next(entry for entry in built_in_formats() if entry.index_writer is not None)
    if directory is not None and not os.path.isdir(directory):
        raise ConfigError(f"there is no directory {directory}", key="directory", value=directory)
    found: list[str] = []
    failed, samples = 0, 0
    for pattern in archives:
        try:
            found += find_shards(pattern, entry.name, manifests=False, remote=remote).files
        except DataloadError as error:
            failed += 1
            print_error(str(error))
    found = [*dict.fromkeys(found)]
    total = len(found) + failed
    names = [os.path.splitext(base_name(archive))[0] for archive in found]
    if directory is not None and (twice := [name for name, count in Counter(names).items() if count > 1]):
        message = (
            f"{twice[0]}.idx would be the index of {names.count(twice[0])} archives: index their folders one by one"
        )
        raise ConfigError(f"{message}, each into another directory", key="directory", value=directory)
    with ProgressBar("indexing") as bar:
        for done, (archive, name) in enumerate(zip(found, names, strict=True), start=1):
            try:
                index = None if directory is None else os.path.join(directory, f"{name}.idx")
                count = entry.write_index(archive, index, overwrite=True, strict=strict, remote=remote)
            except (DataloadError, OSError) as error:
                failed += 1
                with bar.hidden():
                    print_error(str(error))
            else:
                samples += count
                with bar.hidden():
                    print_line(f"{archive}: {count_of(count, 'sample')}")
            bar(done, len(found))
    if total > 1:
        print_line(f"{count_of(samples, 'sample')} in {total - failed} of {count_of(total, 'archive')}")
    if failed:
        raise typer.Exit(1)
