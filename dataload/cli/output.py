"""Output of the commands: rich text on a terminal, plain text without control characters in a pipe.

rich is imported where something is printed: ``dataload --help`` does without it.
"""

import json
import re
import shlex
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self, cast

import typer

from dataload.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

_OPTIONS: ContextVar[Collection[str]] = ContextVar("options", default=())
_KEYWORD = re.compile(
    r"""(?<![\w.,)"'/-])(?<!\w\()(?<!,\ )\b(?P<name>[a-z_]+)=(?P<value>'[^'\n]*'|"[^"\n]*"|\[[^]\n]*]|[\w.]*+)"""
    r"(?![^\s,;]*/)"
)  # not the arguments in a repr, as in TarSource('a.tar', decode='auto'), nor directories, as in split=train/a.tar
_LAST_COLUMN = 16  # characters, at least, on a terminal
_PIPE_WIDTH = 10_000  # without a terminal, rich would wrap lines at 80 columns


def _console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    # A new one each time: a console keeps its stream, but tests and callers replace the streams.
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def _safe(text: str) -> str:
    """Escape control characters: names and messages may come from a malicious file."""
    return printable(text, None, kept="\n")  # a tab would break tables


@contextmanager
def options_typed(options: Collection[str]) -> Generator[None]:
    """Let `as_typed` write keyword arguments as these options of the present command."""
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def as_typed(message: str, key: str | None = None) -> str:
    """Return a message of the library with keyword arguments as options of the present command.

    ``overwrite=True`` becomes ``--overwrite``, and options of formats become ``--option missing=skip``; so does the
    `key` of a `ConfigError` at the start of its message. A key of a config becomes ``--set source.missing=skip``.
    """
    from dataload.sources.registry import built_in_formats

    options = _OPTIONS.get()
    option = f"--{key or ''}".replace("_", "-")
    if key and option in options and message.startswith((f"{key} is ", f"{key} must ")):
        message = f"{option}{message.removeprefix(key)}"
    readers = {name for entry in built_in_formats() for name in entry.reader_options.names()}
    writers = {name for entry in built_in_formats() for name in entry.writer_options.names()}

    def typed(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        plain = {"True": "true", "False": "false", "[...]": "NAME"}.get(value, value)
        if plain[:1] in ("'", '"'):
            plain = plain[1:-1]
        if key and key.endswith(f".{name}") and "--set" in options:  # of a config
            return f"--set {shlex.quote(f'{key}={plain}')}"
        option = "--field" if name == "fields" else f"--{name.replace('_', '-')}"
        if option in options:
            return f"{option} {shlex.quote(plain)}" if value not in ("", "True") else option
        for flag, names in (("--to-option", writers), ("--option", readers)):
            if flag in options and name in names:
                return f"{flag} {shlex.quote(name + '=' + plain.replace(chr(39), chr(34)))}"
        return found[0]

    return _KEYWORD.sub(typed, message)


def print_line(text: str = "", style: str = "", *, stderr: bool = False) -> None:
    """Print one line to stdout or stderr."""
    from rich.text import Text

    _console(stderr=stderr).print(Text(_safe(text), style), soft_wrap=True)


def print_interrupted(interrupt: KeyboardInterrupt) -> None:
    """Print one line after Ctrl-C, with what the library says to do next, if anything."""
    print_error("; ".join(["interrupted", *map(as_typed, getattr(interrupt, "__notes__", ()))]))


def print_error(message: str) -> None:
    print_line(f"error: {message}", "red", stderr=True)


def print_warning(message: str) -> None:
    print_line(f"warning: {message}", "yellow", stderr=True)


def print_json(value: Any) -> None:
    """Print a value as JSON to stdout."""
    # ASCII output cannot contain control characters, except DEL, which JSON leaves as it is.
    typer.echo(json.dumps(value, indent=2, default=str).replace("\x7f", "\\u007f"))


def print_table(columns: Mapping[str, str], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table to stdout; `columns` maps each heading to ``"left"`` or ``"right"``."""
    # On a narrow terminal, the last column is folded. If there is no room for the others, the terminal breaks the
    # lines.
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    if not columns:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    *others, last = columns
    for heading in others:
        table.add_column(heading, justify=cast("Any", columns[heading]), no_wrap=True)
    table.add_column(last, justify=cast("Any", columns[last]), overflow="fold")
    cells = [[_safe(cell) for cell in row] for row in rows]
    for row in cells:
        table.add_row(*map(Text, row))
    console = _console()
    widths = [max(map(cell_len, column)) + 2 for column in zip(columns, *cells, strict=True)]
    if sum(widths[:-1]) + _LAST_COLUMN > console.width:
        console.width = _PIPE_WIDTH
    with console.capture() as capture:
        console.print(table)
    # rich pads every line to the width of the table.
    console.print(Text.from_ansi("\n".join(line.rstrip() for line in capture.get().splitlines())), soft_wrap=True)


def count_of(number: int, noun: str, plural: str | None = None) -> str:
    """Return ``"1 record"``, ``"2,000 records"``."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


class ProgressBar:
    """A transient progress bar on stderr; it shows nothing if stderr is not a terminal."""

    def __init__(self, description: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = _console(stderr=True)
        # With redirection, rich would send stdout to its own console, which writes to stderr.
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}", markup=False),
            TimeRemainingColumn(),
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

    def __exit__(self, *error: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        if not self._progress.disable:  # rich before 15 ends a line even then
            self._progress.stop()

    def __call__(self, done: int, total: int | None) -> None:
        """Show that `done` of `total` units are done, or of an unknown number."""
        if self._progress.disable:
            return  # the time of a call is felt with thousands of small shards
        speed = self._progress.tasks[0].speed
        rate = f"{speed:,.0f}/s" if speed else ""
        self._progress.update(self._task, completed=done, total=total, rate=rate)

    @contextmanager
    def hidden(self) -> Generator[None]:
        """Hide the bar while something else is printed."""
        self._stop()
        try:
            yield
        finally:
            self._progress.start()
