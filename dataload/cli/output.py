"""What the commands print: text for people on a terminal, the same without control characters in a pipe."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dataload.errors import printable

__all__ = [
    "ProgressBar",
    "as_typed",
    "count_of",
    "human_bytes",
    "print_error",
    "print_json",
    "print_line",
    "print_table",
    "print_warning",
]

_PIPE_WIDTH = 10_000  # rich would cut lines at 80 columns where there is no terminal


def _console(*, stderr: bool = False) -> Console:
    # Made anew each time: it keeps the stream that it was made with, and tests and callers replace streams.
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def _safe(text: str) -> str:
    """`text` with control characters escaped: names and messages may come from a file that means harm."""
    return printable(text, None, kept="\n")  # a tab would tear a table


def as_typed(message: str) -> str:
    """A message of the library with its arguments as options: ``overwrite=True`` is ``--overwrite`` here."""
    return re.sub(r"\b(overwrite|resume|keep_key)=True", lambda m: f"--{m[1].replace('_', '-')}", message)


def print_line(text: str = "", style: str = "") -> None:
    """One line to stdout."""
    _console().print(Text(_safe(text), style), soft_wrap=True)


def print_error(message: str) -> None:
    """``error: message`` to stderr, in red."""
    _console(stderr=True).print(Text(f"error: {_safe(message)}", "red"), soft_wrap=True)


def print_warning(message: str) -> None:
    """``warning: message`` to stderr, in yellow."""
    _console(stderr=True).print(Text(f"warning: {_safe(message)}", "yellow"), soft_wrap=True)


def print_json(value: Any) -> None:
    """A value as JSON to stdout."""
    # In ASCII, so that nothing in it can be a control character; DEL is the one that JSON leaves as it is.
    typer.echo(json.dumps(value, indent=2, default=str).replace("\x7f", "\\u007f"))


def print_table(columns: Mapping[str, str], rows: list[tuple[str, ...]]) -> None:
    """A table to stdout.

    Args:
        columns: Heading -> ``"left"`` or ``"right"``.
        rows: As many texts each.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading, side in columns.items():
        table.add_column(heading, justify="right" if side == "right" else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_safe(cell)) for cell in row))
    console = _console()
    with console.capture() as capture:
        console.print(table)
    # Columns are filled up to their width; blanks at the end of a line help nobody.
    console.print(Text.from_ansi("\n".join(line.rstrip() for line in capture.get().splitlines())), soft_wrap=True)


def human_bytes(number: int) -> str:
    """A number of bytes as people read it: ``"1.5 MB"``, powers of 1,000."""
    size = float(number)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{number} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("the last unit has no limit")


def count_of(number: int, noun: str) -> str:
    """``"1 record"``, ``"2,000 records"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class ProgressBar:
    """A bar on stderr, gone when the work is done; nothing where stderr is no terminal.

    Args:
        description: What is going on.
    """

    def __init__(self, description: str) -> None:
        console = _console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}", markup=False),
            TimeRemainingColumn(),
        )
        # rich would send what is printed meanwhile to its own console, which is stderr's.
        self._progress = Progress(
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(_safe(description), total=None, rate="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done."""
        speed = self._progress.tasks[0].speed
        rate = f"{speed:,.0f}/s" if speed else ""
        self._progress.update(self._task, completed=done, total=total, rate=rate)

    @contextmanager
    def aside(self) -> Generator[None]:
        """Take the bar away while something is printed."""
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()
