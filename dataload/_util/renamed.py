"""Arguments of constructors that have another name now."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from dataload.errors import ConfigError

InitT = TypeVar("InitT", bound=Callable[..., None])


def renamed(**names: str) -> Callable[[InitT], InitT]:
    """Decorate a constructor so that old names of arguments, given as ``old="new"``, still work, with a warning.

    The old argument ``start_method`` said how the processes of ``executor="processes"`` start, and nothing otherwise.
    """

    def decorate(init: InitT) -> InitT:
        @functools.wraps(init)
        def translated(self: Any, /, *args: Any, **settings: Any) -> None:
            owner = type(self).__name__
            for old, new in names.items():
                if old not in settings:
                    continue
                message = f"{old} of {owner} is deprecated: pass it as {new}="
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                value, replaced = settings.pop(old), settings.get(new)
                if value is None or (old == "start_method" and replaced != "processes"):
                    continue
                if replaced is not None and old != "start_method":
                    raise ConfigError(f"{old} is the old name of {new}: give only {new}", key=old, value=value)
                settings[new] = value
            init(self, *args, **settings)

        return cast("InitT", translated)

    return decorate
