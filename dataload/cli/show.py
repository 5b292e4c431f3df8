"""``dataload show``."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

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
from dataload.cli.inspect import kept_statistics
from dataload.cli.options import (
    Changes,
    Codec,
    Decode,
    Fields,
    Options,
    Overrides,
    Rank,
    SourceFormat,
    SourceOptions,
    State,
    Where,
    WorldSize,
    check_steps,
    load_state,
    parse_range,
    ranks_of,
)
from dataload.cli.output import count_of, print_line, print_table
from dataload.convert.tokenize import read_tokenizer
from dataload.errors import ConfigError, printable
from dataload.loader.loader import Loader
from dataload.samplers import BatchSampler

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
    overrides: Overrides = None,
    epoch: Annotated[int | None, typer.Option(min=0, help="Epoch. Default: 0, or the epoch of --state.")] = None,
    step: Annotated[
        str | None, typer.Option(help="Step: one (12345) or a range (0:3). Default: the ones around --state.")
    ] = None,
    rank: Rank = None,
    world_size: WorldSize = None,
    state: State = None,
    changes: Changes = None,
    records: Annotated[str | None, typer.Option(help="Show records of a data set: one (7) or a range (0:50).")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows to show. Default: 8, or 64 in a page.")] = None,
    html: Annotated[str | None, typer.Option(help="Write a page to this file.", metavar="FILE")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer.json: show tokens as text in the page.")] = None,
    format: SourceFormat = None,  # noqa: A002 - the option's name
    field: Fields = None,
    codec: Codec = None,
    decode: Decode = None,
    option: Options = None,
    where: Where = None,
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
        settings = [*(overrides or ()), *ranks_of(rank, world_size)]
        with record_loader(path, overrides=settings) as loader:
            load_state(loader, state, changes)
            number, steps = _steps(loader, epoch, step, around=state is not None)
            shown = [show_batch(loader, number, each, most=most) for each in steps]
            planner = loader.batch_sampler
            order = " ".join(repr(planner.sampler if isinstance(planner, BatchSampler) else planner).split())
            about = [repr(loader.source), f"order: {printable(order, _ORDER)}"]
        page = Page(f"{path}: {shown[0].title}" if len(shown) == 1 else path, about, shown, words=_words(tokenizer))
    else:
        if overrides or state or changes or step or rank is not None or world_size is not None or epoch is not None:
            raise ConfigError("--records shows a data set: leave out the options for a config")
        wanted = SourceOptions.parse(
            path, format=format, fields=field, codec=codec, decode=decode, options=option, where=where
        )
        page = _page_of_records(wanted, parse_range(records, "--records"), most, _words(tokenizer))
    if html is not None:
        _write_page(html, page)
    else:
        _print(page)


def _steps(loader: Loader[Any], epoch: int | None, step: str | None, *, around: bool) -> tuple[int, range]:
    """Return the epoch and its steps to show: as given, or the step before and the one after a state."""
    epoch = (loader.epoch if around else 0) if epoch is None else epoch
    total = loader.batch_sampler_of(epoch).steps(epoch)
    near = range(max(0, loader.step - 1), min(loader.step + 1, total))
    steps = near if step is None else parse_range(step, "--step")
    check_steps(steps, total, epoch, "--step", step)
    return epoch, steps


def _page_of_records(wanted: SourceOptions, records: range, most: int, words: Any) -> Page:
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


def _write_page(path: str, page: Page) -> None:
    try:
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(page.to_html())
    except OSError as error:
        raise ConfigError(f"--html: {path} cannot be written: {error.strerror}") from error
    print_line(f"wrote {path} ({os.path.getsize(path):,} bytes)")


def _print(page: Page) -> None:
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
