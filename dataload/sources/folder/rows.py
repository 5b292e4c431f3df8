"""Rows of CSV files and JSON Lines that describe the files of a folder. Pure (no I/O)."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.folder import MissingFile
from dataload.sources.folder.table import KEY, FileTable, with_classes
from dataload.types import Array

_FILE_COLUMNS = ("file", "filename", "file_name")
_INTEGER = re.compile(r"-?(0|[1-9]\d{0,17})")
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
    gone = rows.keys() - {*names}
    if gone:
        name = min(gone, key=lambda name: (sheets.index(rows[name][0]), rows[name][1]))
        several = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
        message = f"line {rows[name][1]}{several}: there is no file {name!r}"
        raise CorruptFileError(message, path=rows[name][0].path)
    kept = np.array([number for number, name in enumerate(names) if name in rows], np.int64)
    if len(kept) < len(names) and (missing == "error" or not len(kept)):
        name = next(name for name in names if name not in rows)
        message = f"{sheets[0].path} has no row for {name!r} ({len(names) - len(kept)} of {len(names)} files have none)"
        raise ConfigError(f"{message}: pass missing='skip' to leave such files out", key="missing")
    chosen = [rows[names[number]][2] for number in kept.tolist()]
    typed = _of_json if any(sheet.path.endswith(".jsonl") for sheet in sheets) else _typed
    joined = {name: typed([cells[c] for cells in chosen]) for c, name in enumerate(columns)}
    files = {field: numbers[kept] for field, numbers in table.files.items()}
    return with_classes(replace(table, files=files, key_lengths=table.key_lengths[kept], columns=joined))


def _find_names(header: list[str], path: str, taken: set[str]) -> int:
    """Return the column with the names of files; others must not be called like one of the fields `taken`."""
    if wrong := [name for name in header if name in taken or not name or header.count(name) > 1]:
        raise ConfigError(f"{path}: a column cannot be called {wrong[0]!r}: rename it", key="labels", value=path)
    for name in _FILE_COLUMNS:
        if name in header:
            return header.index(name)
    message = f"{path} has the columns {', '.join(header)}, and none of {', '.join(_FILE_COLUMNS)}"
    raise ConfigError(message, key="labels", value=path)


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
    for line, row in enumerate(text.splitlines(), 1):
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


def _of_json(values: list[Any]) -> Array | list[Any]:
    """Return a column as an array if its values are all numbers or all truth values, else unchanged."""
    kinds = {*map(type, values)}
    dtype = np.bool_ if kinds == {bool} else np.int64 if kinds == {int} else np.float64
    try:
        return np.array(values, dtype) if kinds in ({bool}, {int}, {float}, {int, float}) else values
    except OverflowError:
        return values


def _typed(cells: list[str]) -> Array | list[str]:
    """Return a column as int64 or float64 if all of its cells are such numbers, else as texts."""
    if all(map(_INTEGER.fullmatch, cells)):
        return np.array([*map(int, cells)], np.int64)
    try:
        return cells if any(map(_NO_NUMBER.match, cells)) else np.array([*map(float, cells)], np.float64)
    except ValueError:
        return cells
