"""Files in folders, or in ZIP archives, as records: the format and its options."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, TypeAlias

from dataload.errors import ConfigError
from dataload.sources.format import Format
from dataload.sources.options import MappedOptions
from dataload.storage import list_folder

Decode: TypeAlias = Literal["auto"] | Mapping[str, str | Callable[[bytes], Any]]
MissingFile: TypeAlias = Literal["error", "skip"]

SPLITS = frozenset(("train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval"))
"""Names of folders that are splits, rather than classes."""

_KEY = "{key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions(MappedOptions):
    """Options for reading files in folders and ZIP archives.

    Attributes:
        decode: ``"auto"`` decodes files by their suffix: images to (height, width, 3) uint8, audio to (frames,
            channels) float32, and ``txt``, ``json``, ``npy``, ``npz`` and ``cls`` as in tar archives. A mapping gives,
            for a suffix, the name of a decoder or a function of bytes; other files stay `bytes`, so ``{}`` decodes
            nothing. None decodes nothing either, and names the fields as tar archives do: ``image.jpg``.
        labels: A CSV file, whose rows are joined with the files by name: its column ``file``, ``filename`` or
            ``file_name`` has paths relative to the folder. Its other columns become fields. Then folders are no
            classes. Files called ``metadata.csv`` or ``metadata.jsonl`` in the folder are joined without this option;
            their paths are relative to the folder of each.
        split: The folder to read, such as ``"train"``, if the data are in one for each split. ``"auto"`` reads all, but
            refuses folders that all have names of splits instead of classes; None says that they are classes.
        pattern: Paths relative to the folder, such as ``"{split}/{label}/{key}.jpg"``. What stands at a name in braces
            is a field; ``{key}`` ends the part of the path that is the record's key. ``*`` is any part of a name,
            ``**/`` any folders, ``{jpg,json}`` either of these. Files of one key are one record.
        missing: What happens if a record lacks one of several files, or a file its row in `labels`: ``"error"``, or
            ``"skip"`` to leave it out.
    """

    decode: Decode | None = "auto"
    labels: str | PathLike[str] | None = field(default=None, metadata={"content": False})
    split: str | None = "auto"
    pattern: str | None = None
    missing: MissingFile = "error"

    def __post_init__(self) -> None:
        MappedOptions.__post_init__(self)
        if self.pattern is not None and _KEY not in self.pattern:
            message = f"pattern {self.pattern!r} has no {_KEY}, where the key of a record ends: '{{label}}/{{key}}.jpg'"
            raise ConfigError(message, key="pattern", value=self.pattern)


def split_pattern(path: str) -> tuple[str, str | None]:
    """Split a path such as ``"data/{label}/{key}.jpg"`` into the folder and the pattern, or None if it has none."""
    if _KEY not in path:
        return path, None
    at = path.rfind("/", 0, re.search(r"[{*]", path).start()) + 1  # pyright: ignore[reportOptionalMemberAccess] # it has {
    return path[:at].rstrip("/") or ("/" if at else "."), path[at:]


def is_medium(name: str) -> bool:
    """Return whether the suffix of a file is of an image or of audio."""
    from dataload.codecs.decoders import known_extension  # imports codecs

    decoder = known_extension(name) if "." in name else None
    return decoder is not None and decoder.name in ("audio", "image")


def is_metadata(name: str) -> bool:
    """Return whether a file describes the images beside and below it, as in the image folders of Hugging Face."""
    return name.rpartition("/")[2] in ("metadata.csv", "metadata.jsonl")


def holds_media(directory: str) -> bool:
    """Return whether there are images or audio in a directory or below."""

    def stop_at_medium(name: str) -> None:
        if is_medium(name):
            raise StopIteration

    try:
        list_folder(directory, stop_at_medium)
    except StopIteration:
        return True
    return False


FOLDER = Format(
    name="folder",
    source="dataload.sources.folder.reader:FolderSource",
    reader_options=FolderOptions,
    # No suffixes: archives lie beside the shards of other formats.
    magic=lambda head: head.startswith((b"PK\3\4", b"PK\5\6")),
    is_data_set_without_shards=holds_media,
    split_selection=lambda path: split_pattern(path)[0],
)
