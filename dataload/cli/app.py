"""The commands together, and what becomes of errors."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dataload.cli.bench import bench_command
from dataload.cli.convert import convert_command
from dataload.cli.index import index_command
from dataload.cli.inspect import inspect_command
from dataload.cli.order import order_command
from dataload.cli.output import as_typed, print_error, print_warning
from dataload.cli.schema import schema_command
from dataload.cli.timeline import timeline_command
from dataload.cli.verify import verify_command
from dataload.errors import ConfigError, DataloadError, MissingDependencyError, SourceNotFoundError

__all__ = ["app", "run"]

BAD_DATA = 1
BAD_USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
_USAGE_ERRORS = (ConfigError, MissingDependencyError, SourceNotFoundError, TypeError)


class _Group(TyperGroup):
    """Ends every command with an exit code and at most one line about what went wrong."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        if "--debug" in arguments:  # whoever adds it adds it at the end
            arguments.remove("--debug")
            arguments.insert(0, "--debug")
        extra["standalone_mode"] = False
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                code = super().main(arguments, *rest, **extra)
        except SystemExit as end:
            # `dataload inspect x | head`: nobody reads any more, which typer and rich answer by leaving with 1.
            code = BROKEN_PIPE if isinstance(end.__context__, BrokenPipeError) else end.code
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as error:  # the end of the program: all that is left to do is to say it
            code = _explain(error, debug="--debug" in arguments)
        sys.exit(code if isinstance(code, int) else 0)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as a line, without the place in our code that Python would show."""
    print_warning(str(message))


def _explain(error: Exception, *, debug: bool) -> int:
    """Print what went wrong.

    Returns:
        The exit code.
    """
    if debug:
        traceback.print_exception(error)
    render = getattr(error, "format_message", None)
    if callable(render):  # typer's own: a wrong option, a missing argument
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        print_error(f"{render()}{hint}")
        return BAD_USAGE
    if isinstance(error, DataloadError):
        print_error(as_typed(str(error)))
    elif isinstance(error, OSError):
        print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    else:
        hint = "" if debug else "; --debug shows where"
        print_error(f"unexpected {type(error).__name__}: {error}{hint}")
    return BAD_USAGE if isinstance(error, _USAGE_ERRORS) else BAD_DATA


app = typer.Typer(
    name="dataload",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from dataload import __version__

        typer.echo(f"dataload {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Look at training data, check it, and turn any format into any other."""


app.command("inspect")(inspect_command)
app.command("index")(index_command)
app.command("convert")(convert_command)
app.command("verify")(verify_command)
app.command("order")(order_command)
app.command("timeline")(timeline_command)
app.command("bench")(bench_command)
app.command("schema")(schema_command)


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Returns:
        Its exit code.
    """
    try:
        app(list(arguments), prog_name="dataload")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
