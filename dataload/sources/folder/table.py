"""The records of a folder: which files and values each has. Pure (no I/O)."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataload._util.indexing import expand_braces
from dataload.codecs.decoders import known_extension
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.sources.folder.format import MissingFile
from dataload.storage import Listing
from dataload.types import Array, Int64Array

KEY = "__key__"
LABEL = "label"
_FILE_COLUMNS = ("file", "filename", "file_name")
_INTEGER = re.compile(r"-?(0|[1-9]\d{0,17})")
_NO_NUMBER = re.compile(r"[+-]?0\d|.*_", re.DOTALL)  # a code such as 007; Python takes 1_000
_PLACE = re.compile(r"\{(?P<name>[A-Za-z_]\w*)\}|(?P<folders>\*\*/)|(?P<any>\*)")


@dataclass(frozen=True, slots=True)
class Names:
    """Relative paths, which take a byte a character and 8 bytes each."""

    text: bytes
    ends: Int64Array

    @classmethod
    def of(cls, names: Sequence[str]) -> Names:
        """Pack `names`."""
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        return cls(b"".join(encoded), np.cumsum([*map(len, encoded)], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def read(self, numbers: Int64Array) -> list[str]:
        """Return the names with these numbers, (n,)."""
        starts = np.where(numbers > 0, self.ends[numbers - 1], 0).tolist()
        spans = zip(starts, self.ends[numbers].tolist(), strict=True)
        return [self.text[start:stop].decode("utf-8", "surrogateescape") for start, stop in spans]


@dataclass(frozen=True, slots=True)
class FileTable:
    """The files and values of all records.

    Attributes:
        names: Paths of files, relative to the folder.
        values: (files,) int64: of a folder, their sizes in bytes; of an archive, numbers of members.
        files: Field -> (records,) int64, number of the file that it is read from.
        suffixes: Field -> suffixes of its files, in lower case.
        key_lengths: (records,) int64, characters of the first field's file name that are the record's key.
        columns: Field -> a value for each record, from its path or from a row: an array, or texts.
        classes: The names of the labels in the column ``label``, if they are no numbers.
    """

    names: Names
    values: Int64Array
    files: Mapping[str, Int64Array]
    suffixes: Mapping[str, tuple[str, ...]]
    key_lengths: Int64Array
    columns: Mapping[str, Array | list[str]]
    classes: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.key_lengths)

    def names_of(self, field: str, records: Int64Array) -> list[str]:
        """Return the names of the files of a field."""
        return self.names.read(self.files[field][records])

    def keys(self, records: Int64Array) -> list[str]:
        """Return the keys of records."""
        lengths = self.key_lengths[records].tolist()
        names = self.names_of(next(iter(self.files)), records)
        return [name[:length] for name, length in zip(names, lengths, strict=True)]


def in_order(listing: Listing) -> tuple[list[str], Int64Array]:
    """Return the paths and values of a listing by first folder, then folder, then name: the order of torchvision."""
    folders = sorted(listing, key=lambda folder: (folder.partition("/")[0], folder))
    sorted_files = [(f"{folder}/" if folder else "", sorted(listing[folder].items())) for folder in folders]
    names = [prefix + name for prefix, files in sorted_files for name, _ in files]
    values = (value for _, files in sorted_files for _, value in files)
    return names, np.fromiter(values, np.int64, len(names))


def class_table(names: list[str], values: Int64Array, path: str, folders: Iterable[str]) -> FileTable:
    """Return the table of images or audio in class folders, as torchvision's ImageFolder reads them.

    Args:
        names: The files in order; those that are in no folder are left out.
        values: See `FileTable`.
        path: The root, for messages.
        folders: Folders in the root, each of which must have a file.

    Raises:
        ConfigError: There are no class folders, or both images and audio.
        SourceNotFoundError: A class folder is empty.
    """
    inside = [number for number, name in enumerate(names) if "/" in name]
    labels = [names[number].partition("/")[0] for number in inside]
    classes = sorted({*labels})
    if not classes:
        hint = f", but {names[0]}" if names else ""
        message = (
            f"{path} has no class folders of images or audio{hint}: pass labels='labels.csv', or pattern='{{key}}.*'"
        )
        raise ConfigError(message, key="paths", value=path)
    empty = sorted({*folders} - {*classes})
    if empty:
        several = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        message = (
            f"the class folder {path}/{empty[0]}{several} contains no images or audio: remove it, or pass pattern="
        )
        raise SourceNotFoundError(message, path=f"{path}/{empty[0]}")
    table = media_table([names[number] for number in inside], values[inside], path)
    codes = {name: code for code, name in enumerate(classes)}
    column = np.fromiter((codes[label] for label in labels), np.int64, len(labels))
    return replace(table, columns={LABEL: column}, classes=tuple(classes))


def media_table(names: list[str], values: Int64Array, path: str) -> FileTable:
    """Return the table of images or audio, each of which is a record.

    Raises:
        ConfigError: There are both, or neither.
    """
    ends = np.fromiter((name.rindex(".") for name in names), np.int64, len(names))
    suffixes = [name[end + 1 :].lower() for name, end in zip(names, ends.tolist(), strict=True)]
    kinds = {suffix: field_of(suffix) for suffix in {*suffixes}}
    fields = sorted({*kinds.values()})
    if len(fields) > 1:
        examples = " and ".join(names[[kinds[s] for s in suffixes].index(field)] for field in fields)
        message = f"{path} has both images and audio, {examples}: choose one by pattern='{{label}}/{{key}}.jpg'"
        raise ConfigError(message, key="pattern")
    if not fields:
        raise ConfigError(f"{path} contains no images or audio: pass pattern='{{key}}.*'", key="paths", value=path)
    files = {fields[0]: np.arange(len(names), dtype=np.int64)}
    return FileTable(Names.of(names), values, files, {fields[0]: tuple(sorted(kinds))}, ends, {})


def field_of(suffix: str) -> str:
    """Return the name of the field for a suffix: what stands before a known one, else the kind of file.

    Examples:
        >>> [field_of(suffix) for suffix in ("jpg", "left.png", "wav", "json", "bin")]
        ['image', 'left', 'audio', 'json', 'bin']
    """
    decoder = known_extension(suffix)
    stem = suffix.rpartition(".")[0]
    if decoder is None:
        return suffix
    return stem or (decoder.name if decoder.name in ("audio", "image") else suffix)


def full_name(field: str, suffix: str) -> str:
    """Return the name of a field with the suffix of its file, as in a tar archive."""
    return field if field == suffix else f"{field}.{suffix.rpartition('.')[2]}"


def compile_pattern(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """Return a function that matches the relative path of a file; see `FolderOptions.pattern`.

    Raises:
        ConfigError: A name stands twice in the pattern.
    """
    try:
        expressions = [re.compile(_translate(each)) for each in expand_braces(pattern)]
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is wrong: {error}", key="pattern", value=pattern) from error

    def match(name: str) -> re.Match[str] | None:
        return next((found for each in expressions if (found := each.fullmatch(name))), None)

    return match


def _translate(pattern: str) -> str:
    """Return the regular expression of a pattern without alternatives."""
    parts: list[str] = []
    at = 0
    for found in _PLACE.finditer(pattern):
        parts.append(re.escape(pattern[at : found.start()]))
        name = found["name"]
        most = "+?" if name == "key" else "+"  # before ".*", a key ends at the first dot, as in tar archives
        parts.append(f"(?P<{name}>[^/]{most})" if name else "(?:.+/)?" if found["folders"] else "[^/]*")
        at = found.end()
    return "".join([*parts, re.escape(pattern[at:])])


def pattern_table(names: list[str], values: Int64Array, path: str, pattern: str, missing: MissingFile) -> FileTable:
    """Return the table of the files that match a pattern; those of one key are a record.

    Raises:
        ConfigError: No file matches, a record has two files for a field, a record lacks a file of others, or a name in
            braces is also the name of a field.
    """
    match = compile_pattern(pattern)
    rows: dict[str, int] = {}
    files: dict[str, list[int]] = {}
    places: dict[str, list[str]] = {}
    suffixes: dict[str, set[str]] = {}
    for number, name in enumerate(names):
        found = match(name)
        if found is None:
            continue
        key = name[: found.end("key")]
        suffix = name[len(key) :].lstrip("./").lower()
        field = field_of(suffix) or "file"
        if key not in rows:
            rows[key] = len(rows)
            for column in files.values():
                column.append(-1)
            for place, text in found.groupdict().items():
                places.setdefault(place, []).append(text)
        column = files.setdefault(field, [-1] * len(rows))
        if column[rows[key]] >= 0:
            message = f"{path}: {names[column[rows[key]]]} and {name} are both the field {field!r} of {key!r}"
            raise ConfigError(f"{message}: narrow the pattern", key="pattern", value=pattern)
        column[rows[key]] = number
        suffixes.setdefault(field, set()).add(suffix)
    if not rows:
        raise ConfigError(f"no file in {path} matches the pattern {pattern!r}", key="pattern", value=pattern)
    del places["key"]
    if both := sorted({KEY, "sample_rate", *files} & places.keys()):
        message = f"pattern {pattern!r}: {both[0]!r} is also the name of another field: choose another one"
        raise ConfigError(message, key="pattern", value=pattern)
    keys = [*rows]
    numbers = np.array([*files.values()], np.int64)
    kept = _complete(numbers, [*files], keys, path, missing)
    return with_classes(
        FileTable(
            Names.of(names),
            values,
            dict(zip(files, numbers[:, kept], strict=True)),
            {field: tuple(sorted(found)) for field, found in suffixes.items()},
            np.array([len(keys[row]) for row in kept.tolist()], np.int64),
            {place: [texts[row] for row in kept.tolist()] for place, texts in places.items()},
        )
    )


def _complete(
    numbers: Int64Array, fields: Sequence[str], keys: Sequence[str], path: str, missing: MissingFile
) -> Int64Array:
    """Return the rows that have a file for each field; `numbers`, (fields, rows), are -1 where there is none."""
    lacks = numbers < 0
    kept = np.flatnonzero(~lacks.any(0))
    if len(kept) == len(keys) or (missing == "skip" and len(kept)):
        return kept
    row = int(np.argmax(lacks.any(0)))
    field = int(np.argmax(lacks[:, row]))
    other = keys[int(np.argmin(lacks[field]))]
    message = f"{path}: {keys[row]!r} has no file for the field {fields[field]!r}, and {other!r} has one"
    hint = "narrow the pattern, or pass missing='skip' to leave such records out"
    raise ConfigError(f"{message}: {hint}", key="missing", value=missing)


def with_classes(table: FileTable) -> FileTable:
    """Return a table whose column ``label``, if it is of texts, has the numbers of the sorted classes."""
    labels = table.columns.get(LABEL)
    if not isinstance(labels, list):
        return table
    classes, codes = np.unique(np.array(labels, object), return_inverse=True)
    return replace(table, columns={**table.columns, LABEL: codes.astype(np.int64)}, classes=tuple(classes.tolist()))


def join_labels(table: FileTable, text: str, path: str, missing: MissingFile) -> FileTable:
    """Return the table with the other columns of a CSV file, joined by the names of files.

    Args:
        table: Records of one file each.
        text: The CSV file.
        path: Its path, for messages.
        missing: Whether files without a row are left out.

    Raises:
        ConfigError: There is no column of names, a column is also a field, or a file has no row.
        CorruptFileError: A line is not like the first, or a file has no name, two rows, or does not exist.
    """
    header, lines = _parse_csv(text, path)
    name_column = next((name for name in _FILE_COLUMNS if name in header), None)
    if name_column is None:
        message = f"{path} has the columns {', '.join(header)}, and none of {', '.join(_FILE_COLUMNS)}"
        raise ConfigError(message, key="labels", value=path)
    at = header.index(name_column)
    taken = {KEY, "sample_rate", *table.files, *table.columns}
    if wrong := [name for name in header if name in taken or not name or header.count(name) > 1]:
        raise ConfigError(f"{path}: a column cannot be called {wrong[0]!r}: rename it", key="labels", value=path)
    rows: dict[str, int] = {}
    for row, (line, cells) in enumerate(lines):
        name = cells[at].removeprefix("./")
        if rows.setdefault(name, row) != row:
            raise CorruptFileError(
                f"line {line}: {name!r} has two rows, the first at line {lines[rows[name]][0]}", path=path
            )
    names = table.names_of(next(iter(table.files)), np.arange(len(table)))
    gone = rows.keys() - {*names}
    if gone:
        line = min(lines[rows[name]][0] for name in gone)
        name = next(name for name in gone if lines[rows[name]][0] == line)
        several = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
        raise CorruptFileError(f"line {line}{several}: there is no file {name!r}", path=path)
    kept = np.array([number for number, name in enumerate(names) if name in rows], np.int64)
    if len(kept) < len(names) and (missing == "error" or not len(kept)):
        name = next(name for name in names if name not in rows)
        message = f"{path} has no row for {name!r} ({len(names) - len(kept)} of {len(names)} files have none)"
        raise ConfigError(f"{message}: pass missing='skip' to leave such files out", key="missing")
    chosen = [lines[rows[names[number]]][1] for number in kept.tolist()]
    columns = {name: _typed([cells[c] for cells in chosen]) for c, name in enumerate(header) if c != at}
    files = {field: numbers[kept] for field, numbers in table.files.items()}
    return with_classes(replace(table, files=files, key_lengths=table.key_lengths[kept], columns=columns))


def _parse_csv(text: str, path: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the names of the columns, and for each row its line and cells."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise CorruptFileError(f"line {reader.line_num} is not CSV: {error}", path=path) from error
    if not rows:
        raise CorruptFileError("the file is empty, and must begin with the names of columns", path=path)
    header = rows[0][1]
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise CorruptFileError(f"line {line} has {len(row)} cells, and the first has {len(header)}", path=path)
    return header, rows[1:]


def _typed(cells: list[str]) -> Array | list[str]:
    """Return a column as int64 or float64 if all of its cells are such numbers, else as texts."""
    if all(map(_INTEGER.fullmatch, cells)):
        return np.array([*map(int, cells)], np.int64)
    try:
        return cells if any(map(_NO_NUMBER.match, cells)) else np.array([*map(float, cells)], np.float64)
    except ValueError:
        return cells
