"""The application: all commands, and how errors become messages and exit codes."""

import os
import re
import sys
import traceback
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from types import NoneType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dataload.cli.output import as_typed, options_typed, print_error, print_interrupted, print_warning
from dataload.errors import ConfigError, DataloadError, MissingDependencyError, SourceNotFoundError

BAD_DATA = 1
BAD_USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
_USAGE_ERRORS = (ConfigError, MissingDependencyError, SourceNotFoundError, TypeError)

_HELPS = {
    "inspect": "Show the fields, dtypes, shapes, size, shards and first record of a data set.",
    "index": "Write index files for tar archives, or the manifest of a directory.",
    "convert": "Convert a data set to another format, in shards, keeping the order of its records.",
    "verify": "Read and decode every record, and report those that cannot be read.",
    "stats": "Measure the fields of a data set: counts, shapes, lengths, ranges and labels.",
    "order": "Show the order in which a config serves its records, and how well it mixes them.",
    "show": "Show any batch of a run, or records of a data set, and where each record lies.",
    "trace": "Show when a record was or will be served, or which records were served when the loss was high.",
    "certify": "Write hashes of batches, or check that this machine, world size and release serve the same batches.",
    "timeline": "Run a loader for some steps and show who worked, who waited, and what limits it.",
    "plan": "Plan a job on many machines: downloads, cache and load, computed from the order without reading data.",
    "fleet": "Show and end the workers of loaders on a Ray cluster.",
    "bench": "Compare formats on your data, side by side in one run.",
    "schema": "Print the JSON schema of a config, for editors that check and complete TOML or YAML.",
    "cache": "Show and delete what dataload keeps beside data and of data at URLs, and check it.",
}
"""The first line of each command's help, by the name of the command, which is mostly the name of its module, too."""

_MODULES = {
    **dict.fromkeys(("certify", "timeline", "trace", "schema"), "runs"),
    "index": "convert",
    "show": "inspect",
    "plan": "cluster",
    "fleet": "cluster",
}

_NO_EFFECT = "is deprecated and has no effect"
_ELSEWHERE = "use --json, or `python -m benchmarks` in a clone of the repository"
_MOVED = "has moved to `python -m benchmarks`, which a clone of the repository has"
_OLD: dict[str, dict[str, tuple[int, str]]] = {
    "bench": {
        **dict.fromkeys(("--scale", "--cold", "--wide", "--dark"), (0, f"{_NO_EFFECT}: {_ELSEWHERE}")),
        **dict.fromkeys(("--seed", "--html", "--picture"), (1, f"{_NO_EFFECT}: {_ELSEWHERE}")),
        **dict.fromkeys(("--made", "--peers", "--peer-python"), (1, _MOVED)),
        "--loader": (1, "is gone: `dataload timeline CONFIG` shows where the time of a config goes"),
    },
    "order": {"--dark": (0, _NO_EFFECT)},
    "plan": {"--dark": (0, _NO_EFFECT), **dict.fromkeys(("--step-time", "--epochs", "--picture"), (1, _NO_EFFECT))},
    "show": {"--npz": (1, "is gone: in Python, numpy.savez(path, **loader.batch(epoch, step)) writes the arrays")},
    "timeline": {"--dark": (0, _NO_EFFECT)},
}
"""Options of earlier releases by command: the number of their values, and what to say; an error if they had effects."""


class _Command(TyperCommand):
    """A command that knows the options of earlier releases."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with flags of an engine as its settings, and without options that are gone."""
        if any(parameter.name == "engine" for parameter in self.params):
            from dataload.cli.options import join_engine  # imports the library

            args = join_engine(args)
        old, kept, rest = _OLD.get(self.name or "", {}), list[str](), iter(args)
        for argument in rest:
            flag, equals, _ = argument.partition("=")
            if flag not in old:
                kept.append(argument)
                continue
            values, text = old[flag]
            if not text.startswith(_NO_EFFECT):
                raise ConfigError(f"{flag} {text}", key=flag)
            print_warning(f"{flag} {text}")
            if values and not equals:
                next(rest, None)
        return super().parse_args(ctx, kept)


@cache
def _import_command(name: str) -> Any:
    found = getattr(import_module(f"dataload.cli.{_MODULES.get(name, name)}"), f"{name}_command")
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(rich_markup_mode=None, add_completion=False)
        found.command(name, cls=_Command)(function)
    command = typer.main.get_command(found)
    command.name = name
    command.help = re.sub(r"(?m)^(?=Examples?:)", "\b\n", command.help or "")  # "\b" keeps the lines that follow
    return command


class _Group(TyperGroup):
    """A group whose commands are imported on use, and end with an exit code and, on failure, a one-line message."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = dict.fromkeys(_HELPS)  # names only: `get_command` imports

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; None if there is none of that name."""
        del ctx
        return _import_command(cmd_name) if cmd_name in _HELPS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names and first lines of all commands, without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_HELPS.items()))

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        if "--debug" in arguments:  # accept it after the command too, where people usually append it
            arguments.remove("--debug")
            arguments.insert(0, "--debug")
        extra["standalone_mode"] = False
        options: frozenset[str] = frozenset()
        try:
            with warnings.catch_warnings(), _current_directory_importable():
                warnings.showwarning = _show_warning
                options = self._options(arguments)  # imports the command
                with options_typed(options):
                    code = super().main(arguments, *rest, **extra)
        except SystemExit as end:
            # With a closed pipe (`dataload inspect x | head`), typer and rich exit with 1.
            code = BROKEN_PIPE if isinstance(end.__context__, BrokenPipeError) else end.code
            if not isinstance(code, (int, NoneType)):  # a user's function ends with a message, which Python prints
                print_error(str(code))
                code = BAD_DATA
        except KeyboardInterrupt as interrupt:  # of the imports
            print_interrupted(interrupt)
            code = INTERRUPTED
        except Exception as error:  # nothing is left to do but report it
            with options_typed(options):
                code = _report(error, debug="--debug" in arguments)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; typer would drop a KeyboardInterrupt with its notes."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            print_interrupted(interrupt)
            raise typer.Exit(INTERRUPTED) from None

    def _options(self, arguments: Sequence[str]) -> frozenset[str]:
        """Return the options of the command that the arguments name."""
        command: Any = self
        for argument in arguments:
            found = command.get_command(None, argument) if hasattr(command, "get_command") else None
            command = found or command
        return frozenset(name for parameter in command.params for name in parameter.opts)


@contextmanager
def _current_directory_importable() -> Generator[None]:
    """Let a command import modules of the current directory; last, so that no installed module is replaced."""
    added: list[str] = []
    with suppress(FileNotFoundError):  # the directory was deleted
        added = [directory for directory in [os.getcwd()] if directory not in sys.path]
    sys.path += added
    try:
        yield
    finally:
        for directory in added:
            sys.path.remove(directory)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line, without the source location that Python would show."""
    print_warning(as_typed(str(message)))


def _report(error: Exception, *, debug: bool) -> int:
    """Print an error and return the exit code."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, typer.Abort):
        is_interrupted = isinstance(error.__context__, KeyboardInterrupt)
        print_error("interrupted" if is_interrupted else "the question has no answer: answer it by an option")
        return INTERRUPTED if is_interrupted else BAD_DATA
    render = getattr(error, "format_message", None)
    if callable(render):  # a usage error of typer: an unknown option, a missing argument
        context = getattr(error, "ctx", None)
        if context is not None and type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(context.get_help(), err=True)
            return BAD_USAGE
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        print_error(f"{render()}{hint}")
        return BAD_USAGE
    if isinstance(error, DataloadError):
        print_error(as_typed(str(error), getattr(error, "key", None)))
    elif isinstance(error, OSError):
        print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    else:
        hint = "" if debug else "; use --debug for the traceback"
        print_error(f"unexpected {type(error).__name__}: {error}{hint}")
    return BAD_USAGE if isinstance(error, _USAGE_ERRORS) else BAD_DATA


app: Any = typer.Typer(
    name="dataload",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,  # rich takes 0.2 s to import
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from dataload.cli import version_line  # imports numpy

        typer.echo(version_line())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    """Inspect, verify and convert training data, and analyze how it is loaded."""


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        app(list(arguments), prog_name="dataload")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
