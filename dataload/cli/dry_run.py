"""Dry runs of conversions: a sample of records tells which files would be written, their size, and what fails."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.filesize import decimal

from dataload.cli.output import ProgressBar, as_typed, count_of, print_line, print_warning
from dataload.convert import ConvertReport, convert
from dataload.convert.plan import plan_shards, select_part
from dataload.sources.base import SelectionSource, Source
from dataload.sources.format import Format
from dataload.sources.views.select import Chosen

_TRIED = 256
_LISTED = 20


def without(source: Source[Any], excluded: Any) -> Source[Any]:
    """Return the source without the records `excluded`, (n,) int64, or None."""
    if excluded is None:
        return source
    kept = np.ones(len(source), np.bool_)
    kept[excluded] = False
    return SelectionSource(source, Chosen(np.flatnonzero(kept)))


def bytes_of(files: Iterable[str]) -> int:
    """Return the size of local files and of what is in local directories."""
    paths = [path for file in dict.fromkeys(files) for path in (Path(file), *Path(file).rglob("*"))]
    return sum(path.stat().st_size for path in paths if path.is_file())


def sizes(after: int, before: int, *, about: bool = False) -> str:
    """Return the size of the written files in words, and beside that of the source if it is known."""
    size = f"{'about ' if about else ''}{decimal(after)}"
    return f"{size}, {after / before:.1f} times the {decimal(before)} of the source" if before and after else size


def show_plan(
    source: Source[Any],
    destination: str,
    entry: Format,
    *,
    shards: int | None,
    records_per_shard: int | None,
    part: tuple[int, int] | None,
    before: int,
    describe_bad: Callable[[Any], Iterable[str]],
    on_error: str,
    settings: Mapping[str, Any],
) -> None:
    """Print the files that a conversion would write, their size, and the records that fail."""
    plan = plan_shards(destination, entry, len(source), shards=shards, records_per_shard=records_per_shard)
    plan = plan if part is None else select_part(plan, *part)
    total = sum(shard.stop - shard.start for shard in plan)
    chosen = np.unique(np.linspace(plan[0].start, max(plan[0].start, plan[-1].stop - 1), _TRIED).astype(np.int64))
    report = _try(SelectionSource(source, Chosen(chosen[: total or 1])), entry, settings) if total else None
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
            for line in describe_bad(bad):
                print_line(f"  {line}")
    print_line("nothing was written: leave out --dry-run", "bold")


def _try(sample: Source[Any], entry: Format, settings: Mapping[str, Any]) -> ConvertReport:
    with TemporaryDirectory() as folder, ProgressBar("trying some records") as bar:
        target = Path(folder, f"trial{''.join(entry.suffixes[:1])}")
        return convert(sample, target, format=entry.name, on_error="skip", max_bad=1.0, progress=bar, **settings)
