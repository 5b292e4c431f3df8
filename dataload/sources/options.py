"""The options of formats for reading and writing."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any, Self, cast

from dataload._util.arrays import MAX_RECORD_BYTES
from dataload._util.interactive import instead
from dataload._util.settings import Least, check_setting, check_settings, hints_of
from dataload.catalog.checks import STORED_OPTIONS
from dataload.codecs.codec import CodecLike, resolve_codec
from dataload.errors import ConfigError
from dataload.storage import Remote, RemoteOptions

fields_of: Callable[[Any], tuple[Field[Any], ...]] = functools.cache(fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base class of a format's options for reading or writing.

    A subclass is a frozen dataclass. Its docstring describes each field in an ``Attributes:`` section, from which
    configs take their descriptions, and annotations are checked. A field whose metadata has ``content=False``
    does not affect the records and is not part of a source's fingerprint.
    """

    def __post_init__(self) -> None:
        check_settings(self)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all options."""
        return tuple(each.name for each in fields_of(cls))

    @classmethod
    def parse(cls, given: Mapping[str, Any], owner: str) -> Self:
        """Create the options from keyword arguments; a ConfigError begins with `owner`, such as ``"format 'tar'"``."""
        for name in given:
            if name not in cls.names():
                message = f"{owner} has no option {name!r}{instead('option', name, cls.names())}"
                raise ConfigError(message, key=name, value=given[name])
        for each in fields_of(cls):
            if each.name not in given and each.default is MISSING and each.default_factory is MISSING:
                raise ConfigError(f"{owner} needs the option {each.name!r}: pass {each.name}=...", key=each.name)
        for name, value in given.items():
            try:
                check_setting(name, value, hints_of(cls).get(name, Any))
            except ConfigError as error:
                advice = instead("option", "transform") if callable(value) else ""
                raise ConfigError(f"{owner}: {error}{advice}", key=name, value=value) from None
        return cls(**given)

    def content(self) -> dict[str, Any]:
        """Return the options that affect the records, except those with default values."""
        chosen: dict[str, Any] = {}
        for each in fields_of(type(self)):
            value = getattr(self, each.name)
            if value is None or ("like_default" in each.metadata and value == each.metadata["like_default"]):
                continue
            is_default = value is each.default or (isinstance(value, (str, bool, int)) and value == each.default)
            if each.metadata.get("content", True) and not is_default:
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
        Options.__post_init__(self)
        if self.storage_options is not None or self.remote is not None:
            object.__setattr__(self, "remote", Remote.of(self.storage_options, self.remote))
            object.__setattr__(self, "storage_options", None)

    @property
    def remote_settings(self) -> Remote | None:
        """The settings for `storage_of`."""
        return cast("Remote | None", self.remote)  # see `__post_init__`


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecOptions(FileOptions):
    """Base class of the options for writing records that are bytes.

    Attributes:
        codec: Encodes records: the name of a codec or an object with ``encode``. None takes bytes.
    """

    codec: CodecLike = None

    def __post_init__(self) -> None:
        FileOptions.__post_init__(self)
        object.__setattr__(self, "codec", resolve_codec(self.codec))


def deprecated_verify() -> Any:
    """Return the field of an option that is called `verify` since 0.3."""
    return field(default=None, repr=False, metadata={"content": False, "renamed": "verify"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(FileOptions):
    """Base class of the options for reading files, which others may have written.

    Attributes:
        max_record_bytes: Most bytes of memory that a decoded record, or a file or field of one that is read by itself,
            may take; a larger one is a CorruptFileError.
        verify: Read no tables of earlier runs, and check all that the format has for it: checksums and hashes of the
            records that are read, and all pages of an LMDB database when it is opened.
    """

    max_record_bytes: Annotated[int, Least(1)] = field(default=MAX_RECORD_BYTES, metadata={"content": False})
    verify: bool = field(default=False, metadata={"content": False})

    def __post_init__(self) -> None:
        FileOptions.__post_init__(self)
        for each in fields_of(type(self)):
            if each.metadata.get("renamed") and isinstance(getattr(self, each.name), bool):
                message = f"the option {each.name!r} is deprecated since 0.3: pass verify="
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                object.__setattr__(self, "verify", getattr(self, each.name))
                object.__setattr__(self, each.name, None)
        if self.verify and "cache" in self.names():
            object.__setattr__(self, "cache", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedOptions(ReadOptions):
    """Base class of the options for reading files that are mapped into memory.

    Attributes:
        map: If False, read files with ``pread`` instead of mapping them into memory.
    """

    map: bool = field(default=True, metadata={"content": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedOptions(MappedOptions):
    """Base class of the options for reading files whose tables are kept.

    Attributes:
        cache: Keep the table of a large file in a hidden file for later runs; see `dataload.catalog.arrays`.
    """

    cache: bool = field(default=True, metadata={"content": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecReadOptions(CachedOptions):
    """Base class of the options for reading files whose records are bytes.

    Attributes:
        codec: Decodes a record's bytes: the name of a codec, a function ``bytes -> record``, or an object with
            ``decode``. None returns bytes.
    """

    codec: CodecLike = None

    def __post_init__(self) -> None:
        ReadOptions.__post_init__(self)
        object.__setattr__(self, "codec", resolve_codec(self.codec, self.max_record_bytes))


def describe_value(value: Any) -> str:
    """Return text for an option's value that is the same in every process, such as a function's name."""
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, Mapping):
        return repr({name: describe_value(item) for name, item in value.items()})
    return repr(value)


_OPTION_CHARACTERS, _REPR_CHARACTERS = 60, 190  # longer ones are cut


def short_repr(name: str, parts: Sequence[str], options: Mapping[str, Any]) -> str:
    """Return the repr of a source: its name, these `parts`, and as many options as are not too long."""
    # Dots for a long text, which would be broken syntax if cut.
    described = [(key, describe_value(value)) for key, value in options.items()]
    shown = [f"{key}={text if len(text) <= _OPTION_CHARACTERS else '...'}" for key, text in described]
    dots: list[str] = []
    while shown and len(", ".join([*parts, *shown, *dots])) > _REPR_CHARACTERS - len(name):
        shown, dots = shown[:-1], ["..."]
    return f"{name}({', '.join([*parts, *shown, *dots])})"


# Our writers record reader options in a file, in a place that all other readers skip: in tar archives a PAX comment for
# all members, in ArrayRecord files padding, in LMDB the rest of the first page. A record is one line of text,
# ``dataload: {"codec": "tensorprotos"}``. Files come from anywhere, so
# only options that a manifest may set are accepted.

MOST_RECORDED_BYTES = 256
_MARK = b"dataload: "


def build_recorded(options: Mapping[str, Any]) -> bytes:
    """Return the line that records `options`."""
    return _MARK + json.dumps(dict(options)).encode()


def parse_recorded(data: bytes, names: Collection[str]) -> dict[str, Any]:
    """Return the options called `names` that are recorded at the start of `data`; none if they make no sense."""
    if not data.startswith(_MARK):
        return {}
    with suppress(ValueError, RecursionError):
        found = json.loads(data[len(_MARK) : MOST_RECORDED_BYTES].partition(b"\0")[0])
        if isinstance(found, dict):
            options = cast("dict[str, Any]", found)
            return {name: options[name] for name in names if name in options and STORED_OPTIONS[name](options[name])}
    return {}
