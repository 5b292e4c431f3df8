"""`Format`: all that the rest of dataload knows about a format."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dataload.errors import ConfigError, MissingDependencyError
from dataload.sources.options import Options
from dataload.storage import storage_of

if TYPE_CHECKING:
    from dataload.sources.base import Source
    from dataload.sources.writer import Writer

__all__ = ["Content", "Format"]

Content: TypeAlias = Literal["fields", "bytes"]
"""What a format stores: records with fields, or bytes that a codec turns into fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format, described to `open`, `create`, configs, detection and the command line.

    Formats are values: a package of your own adds one by exposing it as an entry point of the group
    ``dataload.sources``. Making one imports neither readers nor writers.

    Attributes:
        name: As in ``format=`` and ``"name:path"``.
        source: ``"module:Class"`` of the source; called with the paths, ``fields=`` and the reader's options.
        writer: ``"module:Class"`` of the writer, called with a path, ``overwrite=`` and the writer's options; None
            for a format that is only read.
        reader_options: The options of the source; see `Options`.
        writer_options: The options of the writer.
        suffixes: Ends of file names that mean this format.
        matches: Tells from the first `HEAD_BYTES` bytes of a file whether it is in this format; None for never.
        refines: Tells from the path of a file that `matches` whether it is in this format rather than in the one named
            by `refined`; needed where the head alone cannot tell.
        refined: Name of the more general format with the same head and suffixes, or None.
        directory_file: Name of the file by which a directory is one data set rather than a directory of shards.
        file_of: Takes what a path may have besides the name of a file off it, such as the slice of
            ``"x.array_record[2:4]"``.
        takes_paths: False for a source made from one argument that is not a path, such as ``range:100``.
        parse_argument: Turns that argument from text into what the source takes.
        extra: The extra of dataload that installs what the format needs; None if it needs nothing.
        content: Whether the writer takes records with fields, or bytes unless it is given a codec.
        index: ``"module:function"`` that writes an index beside a file, for formats that have one.
        key_field: Name of the field that holds a record's key, if the format stores keys.
        verify_options: Options under which ``dataload verify`` reads more strictly than is usual.
    """

    name: str
    source: str
    writer: str | None = None
    reader_options: type[Options] = Options
    writer_options: type[Options] = Options
    suffixes: tuple[str, ...] = ()
    matches: Callable[[bytes], bool] | None = None
    refines: Callable[[str], bool] | None = None
    refined: str | None = None
    directory_file: str | None = None
    file_of: Callable[[str], str] | None = None
    takes_paths: bool = True
    parse_argument: Callable[[Any], Any] | None = None
    extra: str | None = None
    content: Content = "fields"
    index: str | None = None
    key_field: str | None = None
    verify_options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def from_class(cls, name: str, reference: str, source: Callable[..., Any]) -> Format:
        """Describe a plain source class: its keyword-only parameters are the options."""
        parameters = inspect.signature(source).parameters.values()
        options = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "fields"]
        specs: list[Any] = [
            (p.name, Any) if p.default is p.empty else (p.name, Any, field(default=p.default)) for p in options
        ]
        made = make_dataclass(f"{name}_options", specs, bases=(Options,), frozen=True, slots=True, kw_only=True)
        return cls(name=name, source=reference, reader_options=made)

    @property
    def can_write(self) -> bool:
        """Whether the format can be written."""
        return self.writer is not None

    def file(self, path: str) -> str:
        """Return the file or directory that `path` names, without a selection of its records."""
        return path if self.file_of is None else self.file_of(path)

    def is_data_set(self, directory: str) -> bool:
        """Return whether a directory is itself a data set of this format."""
        storage = storage_of(directory)
        return self.directory_file is not None and storage.exists(f"{directory}/{self.directory_file}")

    def open(
        self, argument: Any, *, fields: Sequence[str] | None = None, options: Mapping[str, Any] | None = None
    ) -> Source[Any]:
        """Open a data set.

        Args:
            argument: The paths in index order, or the one argument of a format that takes no paths.
            fields: Names of the fields to read; None means all.
            options: Options of the reader.

        Raises:
            ConfigError: An option is unknown or missing, or out of range.
            MissingDependencyError: The package that adds the format does not import.
        """
        given = dict(options or {})
        self.reader_options.parse(given, f"format {self.name!r}")
        selected = {} if fields is None else {"fields": fields}
        source: Source[Any] = self._load(self.source)(argument, **selected, **given)
        return source

    def create(
        self, path: str | PathLike[str], *, overwrite: bool = False, options: Mapping[str, Any] | None = None
    ) -> Writer:
        """Begin to write a data set.

        Raises:
            ConfigError: The format is only read; the destination exists; or an option is unknown or out of range.
            MissingDependencyError: The package that adds the format does not import.
        """
        if self.writer is None:
            raise ConfigError(f"format {self.name!r} is only read", key="format", value=self.name)
        given = dict(options or {})
        self.writer_options.parse(given, f"the writer of format {self.name!r}")
        writer: Writer = self._load(self.writer)(path, overwrite=overwrite, **given)
        return writer

    def write_index(self, *arguments: Any, **options: Any) -> Any:
        """Call the function that `index` names."""
        assert self.index is not None, "callers look for a format with an index"
        return self._load(self.index)(*arguments, **options)

    def _load(self, reference: str) -> Any:
        module, _, attribute = reference.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            if module.startswith("dataload."):
                raise
            raise MissingDependencyError(
                f"the package that adds format {self.name!r} does not load ({reference}): {error}"
            ) from error
