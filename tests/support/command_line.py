"""The command line, run in the process of the test."""

import json

from typer.testing import CliRunner

from dataload.cli.app import app


def run(*arguments, **environment):
    """Return how a command ended, and what it printed."""
    return CliRunner().invoke(app, [*map(str, arguments)], prog_name="dataload", env=environment)


def ok(*arguments):
    """Return what a command prints that succeeds and warns of nothing."""
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert_plain(result.stdout)
    return result.stdout


def facts(*arguments):
    """Return what a command prints as JSON."""
    return json.loads(ok(*arguments, "--json"))


def fail(code, *arguments):
    """Run a command that ends with this code and an error in words."""
    result = run(*arguments)
    assert (result.exit_code, "Traceback" in result.output) == (code, False), result.output
    assert_plain(result.output)
    return result


def assert_plain(text):
    """Check that a text has no control characters, which is what a pipe and a log file want."""
    assert not [c for c in text if not c.isprintable() and c != "\n"], text
