"""Functions named in a config: ``"package.module:function"``."""

from __future__ import annotations

import importlib
from typing import Any

from dataload.errors import ConfigError, closest

__all__ = ["REFERENCE_PATTERN", "resolve_reference"]

REFERENCE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"


def resolve_reference(reference: str, key: str) -> Any:
    """Import what `reference` names.

    Args:
        reference: ``"package.module:name"``, the name dotted for an attribute of a class.
        key: The setting, for the message.

    Raises:
        ConfigError: The module does not import, or has no such name.
    """
    module_name, _, path = reference.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key} is {reference!r}: importing {module_name!r} failed ({error}); is it installed, or on PYTHONPATH?",
            key=key,
            value=reference,
        ) from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            known = [known for known in vars(found) if not known.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError(
                f"{key} is {reference!r}: {module_name} has no {name!r}: {closest(name, known)}",
                key=key,
                value=reference,
            ) from None
    return found
