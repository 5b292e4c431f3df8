"""The application: all commands, and how errors become messages and exit codes."""

import os
import sys
import traceback
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dataload.cli.bench import bench_command
from dataload.cli.cache import cache_app
from dataload.cli.certify import certify_command
from dataload.cli.convert import convert_command
from dataload.cli.index import index_command
from dataload.cli.inspect import inspect_command
from dataload.cli.order import order_command
from dataload.cli.output import as_typed, options_typed, print_error, print_json, print_warning
from dataload.cli.plan import plan_command
from dataload.cli.show import show_command
from dataload.cli.stats import stats_command
from dataload.cli.timeline import timeline_command
from dataload.cli.trace import trace_command
from dataload.cli.verify import verify_command
from dataload.cli.version import version_line
from dataload.config import json_schema
from dataload.errors import ConfigError, DataloadError, MissingDependencyError, SourceNotFoundError

BAD_DATA = 1
BAD_USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
_USAGE_ERRORS = (ConfigError, MissingDependencyError, SourceNotFoundError, TypeError)


class _Group(TyperGroup):
    """A group whose commands all end with an exit code and, on failure, a one-line message."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        if "--debug" in arguments:  # accept it after the command too, where people usually append it
            arguments.remove("--debug")
            arguments.insert(0, "--debug")
        extra["standalone_mode"] = False
        try:
            with warnings.catch_warnings(), _current_directory_importable(), options_typed(self._options(arguments)):
                warnings.showwarning = _show_warning
                code = super().main(arguments, *rest, **extra)
        except SystemExit as end:
            # With a closed pipe (`dataload inspect x | head`), typer and rich exit with 1.
            code = BROKEN_PIPE if isinstance(end.__context__, BrokenPipeError) else end.code
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as error:  # nothing is left to do but report it
            with options_typed(self._options(arguments)):
                code = _report(error, debug="--debug" in arguments)
        sys.exit(code if isinstance(code, int) else 0)

    def _options(self, arguments: Sequence[str]) -> frozenset[str]:
        """Return the options of the command that the arguments name."""
        command: Any = self
        for argument in arguments:
            command = getattr(command, "commands", {}).get(argument, command)
        return frozenset(name for parameter in command.params for name in parameter.opts)


@contextmanager
def _current_directory_importable() -> Generator[None]:
    """Let a command import modules of the current directory; last, so that no installed module is replaced."""
    added: list[str] = []
    with suppress(FileNotFoundError):  # somebody has deleted it
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
    render = getattr(error, "format_message", None)
    if callable(render):  # a usage error of typer: an unknown option, a missing argument
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":  # the help was all that was missing, and typer has printed it
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
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
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


def schema_command() -> None:
    """Print the JSON schema of a config, for editors that check and complete TOML or YAML.

    Example: dataload schema > dataload.schema.json
    """
    print_json(json_schema())


for _command in (
    inspect_command,
    index_command,
    convert_command,
    verify_command,
    stats_command,
    order_command,
    show_command,
    trace_command,
    certify_command,
    timeline_command,
    plan_command,
    bench_command,
    schema_command,
):
    app.command(_command.__name__.removesuffix("_command"))(_command)
app.add_typer(cache_app, name="cache")


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        app(list(arguments), prog_name="dataload")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
