"""`Format`: everything that the rest of dataload knows about a format."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dataload._util.lazy import load_optional
from dataload.codecs.npz import MAGIC
from dataload.errors import ConfigError, MissingDependencyError, SourceError
from dataload.sources.options import Options
from dataload.storage import Remote, join, storage_of

if TYPE_CHECKING:
    from dataload.sources.base import Source
    from dataload.sources.writer import Writer

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


_ARRAYS = "a dict of arrays is a source for dataload.Loader"
ADVICE: Mapping[str, str] = {
    **dict.fromkeys((".h5", ".hdf5"), f"read it with h5py: {_ARRAYS}"),
    ".json": "if it has one object a line, pass format='jsonl'; else pass the list that json.load gives to a Loader",
    ".npy": "pass numpy.load(path, mmap_mode='r') to dataload.Loader, or format='tokens' for tokens",
    ".npz": f"pass dict(numpy.load(path)): {_ARRAYS}",
    **dict.fromkeys((".pickle", ".pkl"), f"load it with pickle: {_ARRAYS}, and so is a list of records"),
    **dict.fromkeys((".pt", ".pth"), f"load it with torch.load: {_ARRAYS}"),
    **dict.fromkeys((".toml", ".yaml", ".yml"), "if it is a config, dataload.from_config makes its loader"),
    ".tsv": "pass format='csv', delimiter='\\t'",
    **dict.fromkeys((".jpg", ".png", ".wav"), "open its folder, with pattern='{key}.*' if it has no classes"),
    **dict.fromkeys((".md", ".txt"), "pass format='text': a record is then the file, a line or a paragraph (records=)"),
}
"""Advice on files that no format reads, by suffix."""


def describe_head(head: bytes) -> str:
    """Describe the first bytes of a file in an unknown format."""
    if not head:
        return "the file is empty"
    if head.startswith(MAGIC):
        return "it is a .npy file, but not a one-dimensional array of integers"
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            return f"byte 0 has the magic bytes of {name}: decompress it first, to allow random access"
    return f"byte 0 has {head[:8]!r}"


HEAD_BYTES = 512
"""Number of bytes at the start of a file from which its format is detected."""

Content: TypeAlias = Literal["fields", "bytes", "images"]
"""Type of a format's records: fields, bytes that a codec turns into fields, or fields with decoded images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Description of a format: `open`, `create`, configs, detection and the command line derive everything from it.

    A package adds a format by exposing a `Format` as an entry point of the group ``dataload.sources``.
    Creating one imports neither reader nor writer.

    Attributes:
        name: Name in ``format=`` and ``"name:path"``.
        source: ``"module:Class"`` of the source, which is called with the paths, ``fields=`` and the reader options.
        writer: ``"module:Class"`` of the writer, which is called with a path, ``overwrite=`` and the writer options;
            None if the format is read-only.
        reader_options: Class of the source's options.
        writer_options: Class of the writer's options.
        suffixes: Suffixes of file names, such as ``".tar"``.
        magic: The bytes that every file begins with, or a function that returns whether the first `HEAD_BYTES` bytes
            of a file are in this format; None if the content does not tell. This function and the three below may be
            given as ``"module:function"``, which is imported when it is called.
        variant_of: Name of the more general format that has the same magic and suffixes, such as ``"lmdb"`` for
            TorchRecord.
        is_variant: Returns, for a path and the `Remote` or None, whether the file, which is in the format `variant_of`,
            is in this one.
        lies_beside: Whether such files often lie beside the shards of other formats. In a directory, they are the
            shards only without others.
        directory_file: Name of the file that makes a directory a single data set rather than a directory of shards.
        is_data_set_without_shards: Returns whether a directory in which no file is a shard is a single data set.
        split_selection: Returns the file that a path with a selection names: ``"x.array_record"`` for
            ``"x.array_record[2:4]"``.
        parse_argument: Converts the argument of a source that takes no paths, such as ``"100"`` of ``"range:100"``;
            None if the source takes paths.
        extra: The extra of dataload that installs what the format needs.
        content: What the writer takes without a codec.
        default_codec: If that is bytes, the codec with which records of fields are written; None for any.
        index_writer: ``"module:function"`` that writes an index beside a file.
        index_path: ``"module:function"`` that returns where the writer may write an index of the file at a path.
        key_field: Name of the field with a record's key, if the format stores keys.
        recorded_options: ``"module:function"`` that returns, for a path and the `Remote` or None, the reader options
            that our writer recorded in a file; None if the file is empty, so that another may tell.
        appends: Deprecated since 0.3: has no effect.
        verify_options: Deprecated since 0.3: ``dataload verify`` passes the option ``verify`` of the reader, if it has
            one.
    """

    name: str
    source: str
    writer: str | None = None
    reader_options: type[Options] = Options
    writer_options: type[Options] = Options
    suffixes: tuple[str, ...] = ()
    magic: bytes | str | Callable[[bytes], bool] | None = None
    variant_of: str | None = None
    is_variant: str | Callable[..., bool] | None = None
    lies_beside: bool = False
    directory_file: str | None = None
    is_data_set_without_shards: str | Callable[[str], bool] | None = None
    split_selection: str | Callable[[str], str] | None = None
    parse_argument: Callable[[Any], Any] | None = None
    extra: str | None = None
    content: Content = "fields"
    default_codec: str | None = None
    index_writer: str | None = None
    index_path: str | None = None
    key_field: str | None = None
    recorded_options: str | None = None
    appends: bool = False
    verify_options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.verify_options:
            message = "Format.verify_options is deprecated since 0.3: give the reader an option `verify`"
            warnings.warn(message, DeprecationWarning, stacklevel=3)

    @classmethod
    def from_class(cls, name: str, reference: str, source: Callable[..., Any]) -> Format:
        """Describe a source class, with the options of its `options_type`, or its keyword-only parameters."""
        options = getattr(source, "options_type", None)
        if options is None:
            parameters = inspect.signature(source).parameters.values()
            specs: list[Any] = [
                (p.name, Any) if p.default is p.empty else (p.name, Any, field(default=p.default))
                for p in parameters
                if p.kind is p.KEYWORD_ONLY and p.name != "fields"
            ]
            options = make_dataclass(f"{name}_options", specs, bases=(Options,), frozen=True, slots=True, kw_only=True)
        return cls(name=name, source=reference, reader_options=options)

    @property
    def takes_paths(self) -> bool:
        """Whether the source is opened by paths."""
        return self.parse_argument is None

    def matches(self, head: bytes) -> bool:
        """Return whether a file that begins with `head`, up to `HEAD_BYTES` bytes, is in this format."""
        if self.magic is None or isinstance(self.magic, bytes):
            return self.magic is not None and head.startswith(self.magic)
        return bool(self.load(self.magic)(head))

    def file(self, path: str) -> str:
        """Return the file or directory that `path` names, without a selection of its records."""
        return path if self.split_selection is None else self.load(self.split_selection)(path)

    def is_data_set(self, directory: str, remote: Remote | None = None) -> bool:
        """Return whether a directory is a single data set of this format."""
        storage = storage_of(directory, remote)
        if self.directory_file is None or not storage.exists(path := join(directory, self.directory_file)):
            return False
        if self.suffixes:
            return True  # the reader explains the error best
        with storage.open(path) as file:  # others have files of this name, too
            return self.matches(file.read(0, HEAD_BYTES))

    def open(
        self, argument: Any, *, fields: Sequence[str] | None = None, options: Mapping[str, Any] | None = None
    ) -> Source[Any]:
        """Open a data set.

        Args:
            argument: The paths in index order, or the parsed argument of a source that takes no paths.
            fields: Names of the fields to read; None means all.
            options: Reader options.

        Raises:
            ConfigError: An option is unknown, missing or out of range.
            MissingDependencyError: The package that adds the format cannot be imported.
        """
        given = dict(options or {})
        create = self.load(self.source)
        if getattr(create, "options_type", None) is not self.reader_options:  # a `FileSource` parses its options itself
            self.reader_options.parse(given, f"format {self.name!r}")
        source: Source[Any] = create(argument, **({} if fields is None else {"fields": fields}), **given)
        return source

    def find_index(self, path: str) -> str | None:
        """Return where the writer may write an index of the file at `path`; None if it writes none."""
        return None if self.index_path is None else self.load(self.index_path)(path)

    def find_recorded(self, paths: Iterable[str], remote: Remote | None = None) -> Mapping[str, Any]:
        """Return the reader options that our writer recorded in the first of the files that is not empty."""
        found: Mapping[str, Any] | None = None
        if self.recorded_options is not None:
            with suppress(SourceError):  # opening the file explains the error
                for path in paths:
                    found = self.load(self.recorded_options)(self.file(path), remote)
                    if found is not None:
                        break
        return found or {}

    def create(
        self, path: str | PathLike[str], *, overwrite: bool = False, options: Mapping[str, Any] | None = None
    ) -> Writer:
        """Start writing a data set.

        Raises:
            ConfigError: The format is read-only, the destination exists, or an option is unknown or out of range.
            MissingDependencyError: The package that adds the format cannot be imported.
        """
        if self.writer is None:
            raise ConfigError(f"format {self.name!r} is read-only", key="format", value=self.name)
        given = dict(options or {})
        self.writer_options.parse(given, f"the writer of format {self.name!r}")
        writer: Writer = self.load(self.writer)(path, overwrite=overwrite, **given)
        return writer

    def write_index(self, *arguments: Any, **options: Any) -> Any:
        """Call the function that `index_writer` names."""
        assert self.index_writer is not None, "callers look for a format with an index"
        return self.load(self.index_writer)(*arguments, **options)

    def require(self, module: str, *, package: str | None = None) -> Any:
        """Import a module that the format needs and return it.

        Args:
            module: Module of an optional package.
            package: Name of the package, if it differs from the module's.

        Raises:
            MissingDependencyError: The package is not installed; the message names `extra`.
        """
        return load_optional(module, needed_by=f"format {self.name!r}", extra=self.extra, package=package)

    def load(self, reference: str | Callable[..., Any]) -> Any:
        """Return the object that ``"module:name"`` names; a function is returned unchanged."""
        if not isinstance(reference, str):
            return reference
        module, _, attribute = reference.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            if module.startswith("dataload."):
                raise
            message = f"the package that adds format {self.name!r} cannot be imported ({reference}): {error}"
            raise MissingDependencyError(message) from error
