"""Options of formats as frozen dataclasses, used by `open`, `create`, configs and the command line alike."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self, get_type_hints

from dataload._util.checks import check_count, check_type
from dataload._util.limits import MAX_RECORD_BYTES
from dataload.codecs.codec import CodecLike, resolve_codec
from dataload.errors import ConfigError, closest
from dataload.storage import Remote, RemoteOptions

_FUNCTIONS = (
    "; a function of samples is passed to dataload.Loader as transform=, or to dataload.convert.convert as map="
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base class of a format's options for reading or writing.

    A subclass is a frozen dataclass. Its docstring describes each field in an ``Attributes:`` section, from which
    configs take their descriptions, and `__post_init__` checks values. A field whose metadata has ``content=False``
    does not affect the records and is not part of a source's fingerprint.
    """

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all options."""
        return tuple(each.name for each in fields(cls))

    @classmethod
    def parse(cls, given: Mapping[str, Any], owner: str) -> Self:
        """Create the options from keyword arguments.

        Args:
            given: Keyword arguments.
            owner: The owner of the options for error messages, such as ``"format 'tar'"``.

        Raises:
            ConfigError: An option is unknown, missing or out of range.
        """
        for name in given:
            if name not in cls.names():
                advice = _FUNCTIONS if callable(given[name]) else ""
                message = f"{owner} has no option {name!r}: {closest(name, cls.names())}{advice}"
                raise ConfigError(message, key=name, value=given[name])
        for each in fields(cls):
            if each.name not in given and each.default is MISSING and each.default_factory is MISSING:
                raise ConfigError(f"{owner} needs the option {each.name!r}: pass {each.name}=...", key=each.name)
        made: Self | None = None
        with suppress(TypeError, AttributeError):  # of a check that expects values of the right type
            made = cls(**given)  # checks ranges
        hints = cls._hints()
        for name, value in given.items():
            try:
                check_type(name, value, hints[name])
            except ConfigError as error:
                advice = _FUNCTIONS if callable(value) else ""
                raise ConfigError(f"{owner}: {error}{advice}", key=name, value=value) from None
        return made or cls(**given)

    @classmethod
    def _hints(cls) -> dict[str, Any]:
        try:
            return get_type_hints(cls)
        except NameError:  # of a class of others, whose annotations are for type checkers only
            return dict.fromkeys(cls.names(), Any)

    def content(self) -> dict[str, Any]:
        """Return the options that affect the records, except those with default values."""
        chosen: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and each.metadata.get("content", True) and not _is_default(value, each.default):
                chosen[each.name] = value
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(Options):
    """Base class of the options of formats whose data are files, here or at URLs.

    Attributes:
        storage_options: Arguments of obstore's stores for URLs: ``endpoint``, ``region``, ``skip_signature``,
            ``client_options``, ``credential_provider``, ... They are part of `remote` afterwards.
        remote: How data at URLs are read; see `dataload.RemoteOptions`.
    """

    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, metadata={"content": False})
    remote: RemoteOptions | Remote | Mapping[str, Any] | None = field(
        default=None, repr=False, metadata={"content": False}
    )

    def __post_init__(self) -> None:
        if self.storage_options is not None or self.remote is not None:
            object.__setattr__(self, "remote", Remote.of(self.storage_options, self.remote))
            object.__setattr__(self, "storage_options", None)

    @property
    def place(self) -> Remote | None:
        """The settings for `storage_of`."""
        return self.remote if isinstance(self.remote, Remote) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecOptions(FileOptions):
    """Base class of the options of formats whose records are bytes.

    Attributes:
        codec: Converts between bytes and records; see `resolve_codec`. By default records are bytes.
    """

    codec: CodecLike = None

    def __post_init__(self) -> None:
        FileOptions.__post_init__(self)
        object.__setattr__(self, "codec", resolve_codec(self.codec))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(FileOptions):
    """Base class of the options for reading files, which others may have written.

    Attributes:
        max_record_bytes: Most bytes of memory that a decoded record may take; a larger one is a CorruptFileError.
    """

    max_record_bytes: int = dataclasses.field(default=MAX_RECORD_BYTES, metadata={"content": False})

    def __post_init__(self) -> None:
        FileOptions.__post_init__(self)
        object.__setattr__(self, "max_record_bytes", check_count("max_record_bytes", self.max_record_bytes, least=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecReadOptions(ReadOptions):
    """Base class of the options for reading files whose records are bytes; see `CodecOptions` and `ReadOptions`."""

    codec: CodecLike = None

    def __post_init__(self) -> None:
        ReadOptions.__post_init__(self)
        object.__setattr__(self, "codec", resolve_codec(self.codec, self.max_record_bytes))


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, (str, bool, int)) and value == default)


def describe_value(value: Any) -> str:
    """Return text for an option's value that is the same in every process, such as a function's name."""
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, Mapping):
        return repr({name: describe_value(item) for name, item in value.items()})
    return repr(value)
