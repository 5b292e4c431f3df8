"""Options of formats as frozen dataclasses: one definition for `open`, `create`, configs and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self

from dataload.errors import ConfigError, closest


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base class of a format's options, for reading or for writing.

    A subclass is a frozen dataclass; its docstring describes each field in an ``Attributes:`` section, from which
    configs and help texts take their words. `__post_init__` checks values. A field whose metadata has
    ``content=False`` does not change which records are read, and is not part of a source's fingerprint.
    """

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all options."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def parse(cls, given: Mapping[str, Any], owner: str) -> Self:
        """Make the options from keyword arguments.

        Args:
            given: Keyword arguments.
            owner: Whose options these are, for messages: ``"format 'tar'"``.

        Raises:
            ConfigError: An option is unknown, missing or out of range; the message names the closest one.
        """
        for name in given:
            if name not in cls.names():
                message = f"{owner} has no option {name!r}: {closest(name, cls.names())}"
                raise ConfigError(message, key=name, value=given[name])
        for field in fields(cls):
            if field.name not in given and field.default is MISSING and field.default_factory is MISSING:
                raise ConfigError(f"{owner} needs the option {field.name!r}: give {field.name}=...", key=field.name)
        return cls(**given)

    def content(self) -> dict[str, Any]:
        """Return the options that decide which records are read, without those that have their default."""
        chosen: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.metadata.get("content", True) and not _is_default(value, field.default):
                chosen[field.name] = value
        return chosen


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, (str, bool, int)) and value == default)


def describe_value(value: Any) -> str:
    """Return text for an option's value that is the same in every process: a function's name, not its address."""
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, Mapping):
        return repr({name: describe_value(item) for name, item in value.items()})
    return repr(value)
