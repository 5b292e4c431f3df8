"""The records of a folder: which files and values each has, also by CSV files and JSON Lines. Pure (no I/O)."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np

from dataload._util.indexing import expand_braces
from dataload.codecs.decoders import known_extension
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError, and_more, closest
from dataload.sources.folder import SPLITS, MissingFile
from dataload.storage import Listing
from dataload.types import Array, FieldSpec, Int64Array

KEY = "__key__"
LABEL = "label"
_PLACE = re.compile(r"\{(?P<name>[A-Za-z_]\w*)\}|(?P<folders>\*\*/)|(?P<any>\*)")


@dataclass(frozen=True, slots=True)
class Names:
    """Relative paths, which take a byte a character and 8 bytes each."""

    text: bytes
    ends: Int64Array

    @classmethod
    def of(cls, names: Sequence[str]) -> Names:
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
    """The files and values of all records. Arrays are int64.

    `names` are the files, `values` (files,) their sizes in bytes in a folder, and numbers of members in an archive.
    `files` (records,) are numbers of files, and `suffixes` in lower case, by field. `key_lengths` (records,) counts the
    characters of the first field's file name that are the record's key. `columns` have a value per record; `classes`
    are the names of labels that are not numbers.
    """

    names: Names
    values: Int64Array
    files: Mapping[str, Int64Array]
    suffixes: Mapping[str, tuple[str, ...]]
    key_lengths: Int64Array
    columns: Mapping[str, Array | list[Any]]
    classes: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.key_lengths)

    def names_of(self, field: str, records: Int64Array) -> list[str]:
        return self.names.read(self.files[field][records])

    def spec(self, name: str) -> FieldSpec:
        """Return the specification of a column."""
        column = self.columns[name]
        if not isinstance(column, list):
            return FieldSpec(str(column.dtype), ())
        return FieldSpec("str", ()) if all(isinstance(value, str) for value in column) else FieldSpec("unknown")

    def keys(self, records: Int64Array) -> list[str]:
        lengths = self.key_lengths[records].tolist()
        names = self.names_of(next(iter(self.files)), records)
        return [name[:length] for name, length in zip(names, lengths, strict=True)]


def copy_rows(column: Array | list[Any], rows: Int64Array) -> list[Any]:
    """Return values of a column, which belong to the caller; values of JSON may be nested."""
    return [deepcopy(column[i]) for i in rows.tolist()] if isinstance(column, list) else column[rows].tolist()


def in_order(listing: Listing) -> tuple[list[str], Int64Array]:
    """Return the paths and values of a listing by first folder, then folder, then name: the order of torchvision."""
    folders = sorted(listing, key=lambda folder: (folder.partition("/")[0], folder))
    sorted_files = [(f"{folder}/" if folder else "", sorted(listing[folder].items())) for folder in folders]
    names = [prefix + name for prefix, files in sorted_files for name, _ in files]
    values = (value for _, files in sorted_files for _, value in files)
    return names, np.fromiter(values, np.int64, len(names))


def class_table(names: list[str], values: Int64Array, path: str, folders: Iterable[str], within: str = "") -> FileTable:
    """Return the table of images or audio in class folders below `within`, as torchvision's ImageFolder reads them."""
    # Files that are in no folder are left out, a class folder without a file is refused.
    start = len(within)
    inside = [number for number, name in enumerate(names) if name.startswith(within) and "/" in name[start:]]
    inside.sort(key=lambda number: names[number][start:].partition("/")[0])  # stable: in a split, too
    labels = [names[number][start:].partition("/")[0] for number in inside]
    if not inside:
        has = f"{path} has {names[0]}{and_more(len(names))}, but" if names else f"{path} has"
        message = f"{has} no class folders of images or audio: pass labels='labels.csv', or pattern='{{key}}.*'"
        raise ConfigError(message, key="paths", value=path)
    if empty := sorted({*folders} - {*labels}):
        message = f"the class folder {path}/{empty[0]}{and_more(len(empty))} contains no images or audio"
        raise SourceNotFoundError(f"{message}: remove it, or pass pattern=", path=f"{path}/{empty[0]}")
    table = media_table([names[number] for number in inside], values[inside], path)
    return with_classes(replace(table, columns={LABEL: labels}))


def split_prefix(split: str | None, folders: Iterable[str], path: str, *, is_folder: bool) -> str:
    """Return the path of the folder of a split, with a slash; nothing if folders are not splits."""
    known = sorted({*folders})
    if not split or (split == "auto" and not (len(known) > 1 and all(name.lower() in SPLITS for name in known))):
        return ""
    if split == "auto":
        which = next((name for name in known if name.lower().startswith("train")), known[0])
        opened = f"open one of them, dataload.open('{path.rstrip('/')}/{which}'), or " if is_folder else ""
        message = f"{path} has the folders {', '.join(known)}, which are names of splits, not of classes: {opened}pass"
        raise ConfigError(f"{message} split={which!r}; if they are classes, pass split=None", key="split")
    if split not in known:
        message = f"{path} has no folder of the split {split!r}: {closest(split, known)}"
        raise ConfigError(message, key="split", value=split)
    return f"{split}/"


def media_table(names: list[str], values: Int64Array, path: str) -> FileTable:
    """Return the table of images or audio, one file per record; both together, or neither, are refused."""
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
    [field] = fields
    files = {field: np.arange(len(names), dtype=np.int64)}
    return FileTable(Names.of(names), values, files, {field: tuple(sorted(kinds))}, ends, {})


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
    """Return a function that matches the relative path of a file; see `FolderOptions.pattern`."""
    try:
        expressions = [re.compile(_translate(each)) for each in expand_braces(pattern)]
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is wrong: {error}", key="pattern", value=pattern) from error

    def match(name: str) -> re.Match[str] | None:
        return next((found for each in expressions if (found := each.fullmatch(name))), None)

    return match


def _translate(pattern: str) -> str:
    """Return the regular expression of a pattern without alternatives."""
    parts, at = list[str](), 0
    for found in _PLACE.finditer(pattern):
        parts.append(re.escape(pattern[at : found.start()]))
        name = found["name"]
        most = "+?" if name == "key" else "+"  # before ".*", a key ends at the first dot, as in tar archives
        parts.append(f"(?P<{name}>[^/]{most})" if name else "(?:.+/)?" if found["folders"] else "[^/]*")
        at = found.end()
    return "".join([*parts, re.escape(pattern[at:])])


def pattern_table(names: list[str], values: Int64Array, path: str, pattern: str, missing: MissingFile) -> FileTable:
    """Return the table of the files that match a pattern, with a record for the files of each key."""
    match = compile_pattern(pattern)
    rows, files = dict[str, int](), dict[str, list[int]]()
    places: dict[str, list[str]] = {}
    suffixes: dict[str, set[str]] = {}
    for number, name in enumerate(names):
        found = match(name)
        assert found is not None, "only such files are listed"
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
    """Return the rows that have a file for each field; `numbers`, (fields, rows), are -1 for missing files."""
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
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        return table
    classes = sorted({*labels})
    if classes and not classes[0]:
        warnings.warn("rows without a label are the class '', number 0: give them one, or leave them out", stacklevel=2)
    codes = {name: code for code, name in enumerate(classes)}
    column = np.fromiter((codes[label] for label in labels), np.int64, len(labels))
    return replace(table, columns={**table.columns, LABEL: column}, classes=tuple(classes))


_FILE_COLUMNS = ("file", "filename", "file_name")
_INTEGER = re.compile(r"-?(0|[1-9]\d*)")
_NO_NUMBER = re.compile(r"[+-]?0\d|.*_", re.DOTALL)  # a code such as 007; Python takes 1_000


class Sheet(NamedTuple):
    """A file with a row for each file of a folder."""

    path: str  # for messages
    data: bytes | memoryview
    folder: str = ""  # to which its names are relative; ends with a slash

    def text(self) -> str:
        try:
            return str(self.data, "utf-8-sig")
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"it is not UTF-8: {error.reason}", path=self.path, offset=error.start) from error


def join_labels(table: FileTable, sheets: Sequence[Sheet], missing: MissingFile, within: str = "") -> FileTable:
    """Return the table with the other columns of CSV files or JSON Lines, joined by the names of files."""
    # Files without a row are left out if `missing`; rows for files that are not `within` are ignored.
    columns: list[str] = []
    rows: dict[str, tuple[Sheet, int, list[Any]]] = {}
    for sheet in sheets:
        header, lines = (_parse_json if sheet.path.endswith(".jsonl") else _parse_csv)(sheet.text(), sheet.path)
        at = _find_names(header, sheet.path, {KEY, "sample_rate", *table.files, *table.columns})
        others = [name for name in header if name != header[at]]
        columns = columns or others
        if {*others} != {*columns}:
            message = f"{sheet.path} has the columns {', '.join(others)}, and {sheets[0].path} {', '.join(columns)}"
            raise ConfigError(f"{message}: give all the same columns", key="labels", value=sheet.path)
        order = [header.index(name) for name in columns]
        for line, cells in lines:
            name = sheet.folder + str(cells[at]).removeprefix("./")
            if not name.startswith(within):
                continue
            first = rows.setdefault(name, (sheet, line, [cells[c] for c in order]))
            if first[:2] != (sheet, line):
                other = "" if first[0] is sheet else f" of {first[0].path}"
                message = f"line {line}: {name!r} has two rows, the first at line {first[1]}{other}"
                raise CorruptFileError(message, path=sheet.path)
    names = table.names_of(next(iter(table.files)), np.arange(len(table)))
    if gone := rows.keys() - {*names}:
        name = min(gone, key=lambda name: (sheets.index(rows[name][0]), rows[name][1]))
        message = f"line {rows[name][1]}{and_more(len(gone))}: there is no file {name!r} in the folder"
        raise CorruptFileError(message, path=rows[name][0].path)
    kept = np.array([number for number, name in enumerate(names) if name in rows], np.int64)
    if len(kept) < len(names) and (missing == "error" or not len(kept)):
        name = next(name for name in names if name not in rows)
        message = f"{sheets[0].path} has no row for {name!r} ({len(names) - len(kept)} of {len(names)} files have none)"
        raise ConfigError(f"{message}: pass missing='skip' to leave such files out", key="missing")
    chosen = [rows[names[number]][2] for number in kept.tolist()]
    typed = _of_json if any(sheet.path.endswith(".jsonl") for sheet in sheets) else _typed
    joined = {
        name: typed([cells[c] for cells in chosen], f"{sheets[0].path}: {name!r}") for c, name in enumerate(columns)
    }
    files = {field: numbers[kept] for field, numbers in table.files.items()}
    return with_classes(replace(table, files=files, key_lengths=table.key_lengths[kept], columns=joined))


def _find_names(header: list[str], path: str, taken: set[str]) -> int:
    """Return the column with the names of files; others must not be called like one of the fields `taken`."""
    if wrong := [name for name in header if name in taken or not name or header.count(name) > 1]:
        raise ConfigError(f"{path}: a column cannot be called {wrong[0]!r}: rename it", key="labels", value=path)
    if found := [header.index(name) for name in _FILE_COLUMNS if name in header]:
        return found[0]
    names = " or ".join(map(repr, _FILE_COLUMNS))
    message = f"{path}: the column with the names of files must be called {names}, but the columns are"
    raise ConfigError(f"{message} {', '.join(map(repr, header)) or 'missing'}", key="labels", value=path)


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


def _parse_json(text: str, path: str) -> tuple[list[str], list[tuple[int, list[Any]]]]:
    """Return the names of the fields, and for each object its line and values."""
    header: list[str] = []
    rows: list[tuple[int, list[Any]]] = []
    for line, row in enumerate(text.split("\n"), 1):  # `splitlines` would split at U+2028, too
        try:
            found: Any = json.loads(row) if row.strip() else None
        except (ValueError, RecursionError) as error:
            raise CorruptFileError(f"line {line} is not JSON: {error}", path=path) from error
        if found is None:
            continue
        header = header or [*cast("dict[str, Any]", found if isinstance(found, dict) else {})]
        if not isinstance(found, dict) or found.keys() != {*header}:
            message = f"line {line} must be an object with the fields of the first, {', '.join(header) or 'if any'}"
            raise CorruptFileError(message, path=path)
        rows.append((line, [found[name] for name in header]))
    return header, rows


def _of_json(values: list[Any], _: str) -> Array | list[Any]:
    """Return a column as an array if its values are all numbers or all truth values, else unchanged."""
    kinds = {*map(type, values)}
    dtype = np.bool_ if kinds == {bool} else np.int64 if kinds == {int} else np.float64
    with suppress(OverflowError):
        return np.array(values, dtype) if kinds in ({bool}, {int}, {float}, {int, float}) else values
    return values


def _typed(cells: list[str], column: str) -> Array | list[str]:
    """Return a column as int64 or float64 if all of its cells are such numbers, else as texts."""
    if all(map(_INTEGER.fullmatch, cells)):
        with suppress(OverflowError, ValueError):
            return np.array([*map(int, cells)], np.int64)
        return cells  # floats would round them
    try:
        return cells if any(map(_NO_NUMBER.match, cells)) else np.array([*map(float, cells)], np.float64)
    except ValueError:
        odd = [cell for cell in cells if not _INTEGER.fullmatch(cell)]
        if 2 * len(odd) < len(cells):  # a class without a name would shift the numbers of the others
            warnings.warn(f"{column} is read as text, because {odd[0]!r} among numbers is not one", stacklevel=2)
        return cells
