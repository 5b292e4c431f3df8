"""``dataload verify module:function``: run the conformance suite on a user's own source."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from dataload.cli.output import count_of, print_error, print_json, print_line
from dataload.config.references import REFERENCE_PATTERN, resolve_reference
from dataload.errors import ConfigError, DataloadError, SourceError
from dataload.sources.registry import format_names

if TYPE_CHECKING:
    from dataload.testing.cases import CheckResult

__all__ = ["names_factory", "open_with", "print_checks", "print_verdict"]


def names_factory(path: str) -> bool:
    """Return whether `path` is ``module:name`` and neither a file nor ``format:path``."""
    named = re.fullmatch(REFERENCE_PATTERN, path) is not None
    return named and path.partition(":")[0] not in format_names() and not os.path.exists(path)


def open_with(reference: str, options: Mapping[str, Any]) -> Any:
    """Return the source that a function or class makes, or the object itself if `reference` names a source.

    Raises:
        ConfigError: There is no such name, it does not take these options, or it does not return a source.
        SourceError: The function raised an error that is not one of dataload's.
    """
    found = resolve_reference(reference, "PATH")
    if callable(found):
        try:
            inspect.signature(found).bind(**options)
        except TypeError as error:
            raise ConfigError(
                f"{reference} cannot be called with {_format(options)}: {error}", key="--option"
            ) from None
        try:
            found = found(**options)
        except DataloadError:
            raise
        except Exception as error:
            raise SourceError(f"{reference} raised {type(error).__name__}: {error}") from error
    elif options:
        raise ConfigError(f"{reference} is a {type(found).__name__}, which does not take --option", key="--option")
    if not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise ConfigError(
            f"{reference} returns {type(found).__name__!r}, not a source: a source has __len__ and __getitem__",
            key="PATH",
            value=reference,
        )
    return found


def _format(options: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name}={value!r}" for name, value in options.items()) or "no options (pass them as -o name=value)"
    )


def print_checks(source: Any, sample: int, *, quiet: bool) -> list[CheckResult]:
    """Run the checks and print each result; a failed check is followed by the rule it enforces."""
    from dataload.testing.verify import check_source  # imports twenty modules that no other command needs

    def show(result: CheckResult) -> None:
        print_line(str(result), "red" if result.status == "failed" else "")
        if result.status == "failed":
            print_line(f"        {result.rule}")

    return check_source(source, sample=sample, report=None if quiet else show)


def print_verdict(name: str, results: list[CheckResult], records: int, bad: list[Any], *, json: bool) -> None:
    """Print the summary line, or everything as JSON.

    Raises:
        typer.Exit: A check failed or a record cannot be read; the exit code is 1.
    """
    counts = Counter(result.status for result in results)
    good = not counts["failed"] and not bad
    if json:
        checks, findings = (list(map(dataclasses.asdict, found)) for found in (results, bad))
        print_json({"source": name, "records": records, "ok": good, "checks": checks, "bad": findings})
    else:
        unread = f"{len(bad)} of them cannot be read" if bad else "all can be read"
        failed = f"{counts['failed']} failed" if counts["failed"] else "none failed"
        text = f"{count_of(len(results), 'check')}: {failed}, {counts['skipped']} skipped; "
        text += f"{count_of(records, 'record')}: {unread}"
        (print_line if good else print_error)(text)
    if not good:
        raise typer.Exit(1)
