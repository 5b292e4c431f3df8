"""The values that functions of a conversion use, as text for its journal, as functions of equal text may differ."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dataload._util.code_digest import code_digest
from dataload.errors import ConfigError

VALUES = " values"
"""End of the names of such entries among the options of a journal; releases before 0.3 wrote none."""

_UNKNOWN = "unknown: "


def describe_values(function: Any, version: str = "") -> str:
    try:
        return f"Python {sys.version_info.major}.{sys.version_info.minor}, {code_digest(function)}"
    except ValueError as error:
        return f"version {version} ({error})" if version else f"{_UNKNOWN}{error}"


def check_values(begun: Mapping[str, str], now: Mapping[str, str], subject: str, *, resuming: bool) -> None:
    """Raise a ConfigError that begins with `subject` if functions use other values than in the journal's options."""
    for entry, function, values in _functions(now):
        if entry not in begun:
            message = f"{subject} was begun by dataload 0.2, which did not note the values that {function} uses, so"
            remedy = "finish it with 0.2, or pass overwrite=True"
            raise ConfigError(f"{message} records of two functions could be mixed: {remedy}", key="resume")
        if resuming and values.startswith(_UNKNOWN):
            message = f"{subject} was begun with {_unnoticed(function, values)}: pass overwrite=True to start over"
            raise ConfigError(f"{message}. To resume the next time, {_remedy(function)}", key="resume")


def notes_of_values(begun: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield notes about functions that the journal cannot distinguish from others."""
    for entry, function, values in _functions(now):
        if entry not in begun:
            message = f"dataload 0.2 converted this, and did not note the values that {function} uses"
            yield f"{message}: whether they have changed cannot be told"
        elif values.startswith(_UNKNOWN):
            yield f"the function is {_unnoticed(function, values)}: {_remedy(function)}"


def _functions(options: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the journal entry, the name and the values of each function among the options."""
    for entry, values in options.items():
        if entry.endswith(VALUES):
            yield entry, options[entry.removesuffix(VALUES)].partition(" (")[0], values


def _unnoticed(function: str, values: str) -> str:
    return f"{function}, whose changes cannot be noticed, because {values.removeprefix(_UNKNOWN)}"


def _remedy(function: str) -> str:
    return f"give the object a method fingerprint(), or the module of {function} a `version`"
