"""Statistics of a data set's fields as a manifest keeps them: exact, however they are merged. Pure (no I/O).

Whatever is not bounded by nature is bounded here, and what would exceed its bound is left out altogether. So statistics
of parts, merged in any grouping, equal the statistics of the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

from dataload.catalog.checks import (
    HEX,
    LARGEST,
    STORED_OPTIONS,
    as_column,
    as_object,
    as_table,
    is_count,
    wrong_value,
)
from dataload.errors import ConfigError

Number: TypeAlias = "int | float"
Key = TypeVar("Key")

MOST_FIELDS = 1000
MOST_SHAPES = 1000
MOST_LABELS = 10_000
LONGEST_LABEL = 64
"""Characters, or bytes, of a text that counts as a label."""

_MOST_AXES = 64
_SUM = re.compile(r"(-?\d{1,1000})(?:/(\d{1,400}))?")
_LENGTHS_NAME = re.compile(r"\.dataload\.lengths-[0-9a-f]{32}\.npy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The numbers in a field, all elements of arrays included: how many are finite, NaN and infinite.

    The other attributes describe the finite ones. They are None without any, and `squares`, the sum of squares, also if
    one is too large; `total` is not rounded.
    """

    finite: int = 0
    nan: int = 0
    infinite: int = 0
    minimum: Number | None = None
    maximum: Number | None = None
    total: Fraction = Fraction(0)
    squares: Fraction | None = Fraction(0)

    @property
    def mean(self) -> float | None:
        """The mean of the finite ones; None if there is none."""
        return float(self.total / self.finite) if self.finite else None

    @property
    def std(self) -> float | None:
        """The standard deviation of the finite ones, for which they are the whole population; None if unknown."""
        if not self.finite or self.squares is None:
            return None
        return math.sqrt(max(Fraction(0), self.squares / self.finite - (self.total / self.finite) ** 2))

    def merge(self, other: Self) -> Self:
        """Return the numbers of both."""
        smallest = [each for each in (self.minimum, other.minimum) if each is not None]
        largest = [each for each in (self.maximum, other.maximum) if each is not None]
        return type(self)(
            finite=self.finite + other.finite,
            nan=self.nan + other.nan,
            infinite=self.infinite + other.infinite,
            # Of 1 and 1.0, the integer, whichever comes first.
            minimum=min(smallest, default=None, key=lambda end: (end, isinstance(end, float))),
            maximum=max(largest, default=None, key=lambda end: (end, isinstance(end, int))),
            total=self.total + other.total,
            squares=None if self.squares is None or other.squares is None else self.squares + other.squares,
        )

    def to_json(self) -> dict[str, Any]:
        names = ("finite", "nan", "infinite", "minimum", "maximum")
        sums = {"total": str(self.total), "squares": None if self.squares is None else str(self.squares)}
        return {**{name: getattr(self, name) for name in names}, **sums}

    @classmethod
    def parse(cls, value: Any, where: str) -> Self:
        """Build the value from parsed JSON; raise a ConfigError if it is impossible."""
        table = as_table(value, where, ("finite", "nan", "infinite", "minimum", "maximum", "total", "squares"))
        for name in ("finite", "nan", "infinite"):
            _check_count(table[name], f"{where}.{name}")
        ends = table["minimum"], table["maximum"]
        known = all(type(end) in (int, float) and math.isfinite(end) for end in ends) and ends[0] <= ends[1]
        if not (known if table["finite"] else ends == (None, None)):
            raise wrong_value(f"{where}.minimum", "two ascending numbers, minimum and maximum,", ends)
        sums: dict[str, Any] = {"total": _parse_sum(table["total"], f"{where}.total"), "squares": None}
        if table["squares"] is not None:
            sums["squares"] = _parse_sum(table["squares"], f"{where}.squares")
        return cls(**{**table, **sums})


class Length(NamedTuple):
    """Lengths of a field's values: the extent of the first axis, or the number of bytes or characters."""

    shortest: int
    longest: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldStatistics:
    """Statistics of one field: how many records have it, and how many have each dtype, shape and label.

    Dtypes are ``"bytes"``, ``"str"``, names of numpy dtypes or of classes. `shapes`, in ascending order, is None if
    there are more than `MOST_SHAPES`; `axes`, the extents, is None if the number of axes differs. `labels` is None
    unless all values are integers or short text, and at most `MOST_LABELS`.
    """

    records: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict[str, int])
    shapes: Mapping[tuple[int, ...], int] | None = field(default_factory=dict[tuple[int, ...], int])
    axes: tuple[tuple[int, int], ...] | None = None
    length: Length | None = None
    numbers: Numbers | None = None
    labels: Mapping[int | str, int] | None = field(default_factory=dict[int | str, int])

    def merge(self, other: Self) -> Self:
        """Return the statistics of the records of both."""
        if not self.records or not other.records:
            return self if self.records else other
        axes = length = None
        if self.axes is not None and other.axes is not None and len(self.axes) == len(other.axes):
            axes = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(self.axes, other.axes, strict=True))
        if self.length is not None and other.length is not None:
            (a, b, c), (d, e, f) = self.length, other.length
            length = Length(min(a, d), max(b, e), c + f)
        numbers = self.numbers or other.numbers
        if self.numbers is not None and other.numbers is not None:
            numbers = self.numbers.merge(other.numbers)
        return type(self)(
            records=self.records + other.records,
            dtypes=_added(self.dtypes, other.dtypes, LARGEST) or {},
            shapes=_added(self.shapes, other.shapes, MOST_SHAPES),
            axes=axes,
            length=length,
            numbers=numbers,
            labels=_added(self.labels, other.labels, MOST_LABELS),
        )

    @property
    def varies_in_length(self) -> bool:
        """Whether all values have a length, and two differ."""
        return self.length is not None and self.length.shortest < self.length.longest

    def to_json(self) -> dict[str, Any]:
        return {
            "records": self.records,
            "dtypes": dict(sorted(self.dtypes.items())),
            "shapes": _columns("shape", self.shapes),
            "axes": None if self.axes is None else [list(axis) for axis in self.axes],
            "length": None if self.length is None else list(self.length),
            "numbers": None if self.numbers is None else self.numbers.to_json(),
            "labels": _columns("value", self.labels),
        }

    @classmethod
    def parse(cls, value: Any, where: str) -> Self:
        """Build the value from parsed JSON; raise a ConfigError if it is impossible."""
        table = as_table(value, where, ("records", "dtypes", "shapes", "axes", "length", "numbers", "labels"))
        records = table["records"]
        _check_count(records, f"{where}.records")
        dtypes = as_object(table["dtypes"], f"{where}.dtypes")
        if not all(map(is_count, dtypes.values())) or sum(dtypes.values()) != records:
            raise wrong_value(f"{where}.dtypes", f"numbers with the sum {records}", dtypes)
        return cls(
            records=records,
            dtypes=dtypes,
            shapes=_parse_shapes(table["shapes"], records, f"{where}.shapes"),
            axes=_parse_axes(table["axes"], f"{where}.axes"),
            length=_parse_length(table["length"], records, f"{where}.length"),
            numbers=None if table["numbers"] is None else Numbers.parse(table["numbers"], f"{where}.numbers"),
            labels=_parse_labels(table["labels"], records, f"{where}.labels"),
        )


class LengthsFile(NamedTuple):
    """A file with the length of a field in each record: a hidden .npy file beside the shards, named by its content."""

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, nbytes: int, sha256: str) -> Self:
        """Return the file of so many bytes with that hash."""
        return cls(f".dataload.lengths-{sha256[:32]}.npy", nbytes, sha256)

    @classmethod
    def parse(cls, value: Any, where: str) -> Self:
        """Build the value from parsed JSON; raise a ConfigError if it is impossible."""
        match as_column(value, where):
            case (str() as name, nbytes, str() as sha256) if (
                _LENGTHS_NAME.fullmatch(name) and is_count(nbytes) and len(sha256) == 64 and HEX.fullmatch(sha256)
            ):
                return cls(name, nbytes, sha256)
            case _:
                raise wrong_value(where, "the name, the size and the SHA-256 of a file of lengths", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSetStatistics:
    """Statistics of a data set, which belong to the shards of its entry in a manifest.

    `options` are the reader's, see `STORED_OPTIONS`; `selected` the measured fields, None for all; `lengths`
    files with the lengths of fields that differ in length.
    """

    options: Mapping[str, Any]
    selected: tuple[str, ...] | None
    fields: Mapping[str, FieldStatistics]
    lengths: Mapping[str, LengthsFile] = field(default_factory=dict[str, LengthsFile])

    def to_json(self) -> dict[str, Any]:
        fields = {name: each.to_json() for name, each in self.fields.items()}
        return {
            "options": dict(self.options),
            "selected": None if self.selected is None else list(self.selected),
            "fields": fields,
            "lengths": {name: list(file) for name, file in self.lengths.items()},
        }

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Build the value from parsed JSON; raise a ConfigError if it is impossible."""
        table = as_table(value, "statistics", ("options", "selected", "fields", "lengths"))
        options = as_object(table["options"], "statistics.options")
        for name in options:
            if name not in STORED_OPTIONS or not STORED_OPTIONS[name](options[name]):
                raise wrong_value(f"statistics.options.{name}", "an option that a manifest may set", options[name])
        selected = table["selected"]
        if selected is not None and {*map(type, as_column(selected, "statistics.selected"))} - {str}:
            raise wrong_value("statistics.selected", "names of fields, or null", selected)
        fields = as_object(table["fields"], "statistics.fields")
        if len(fields) > MOST_FIELDS:
            raise wrong_value("statistics.fields", f"at most {MOST_FIELDS} fields", len(fields))
        files = as_object(table["lengths"], "statistics.lengths")
        if unknown := files.keys() - fields.keys():
            raise wrong_value("statistics.lengths", "only names of fields", min(unknown))
        return cls(
            options=options,
            selected=None if selected is None else tuple(selected),
            fields={name: FieldStatistics.parse(each, f"statistics.fields.{name}") for name, each in fields.items()},
            lengths={name: LengthsFile.parse(each, f"statistics.lengths.{name}") for name, each in files.items()},
        )


def merge_fields(
    one: Mapping[str, FieldStatistics], other: Mapping[str, FieldStatistics]
) -> dict[str, FieldStatistics]:
    """Return the statistics of the records of both, by field, in the order in which fields appear."""
    merged = dict(one)
    for name, each in other.items():
        merged[name] = merged[name].merge(each) if name in merged else each
    if len(merged) > MOST_FIELDS:
        message = f"the records have more than {MOST_FIELDS:,} different fields: name those that you want"
        raise ConfigError(message, key="fields")
    return merged


def _added(one: Mapping[Key, int] | None, other: Mapping[Key, int] | None, most: int) -> dict[Key, int] | None:
    """Return the sums of both counts; None if one is None or there are too many keys."""
    if one is None or other is None:
        return None
    added = dict(one)
    for key, count in other.items():
        added[key] = added.get(key, 0) + count
    return added if len(added) <= most else None


def _columns(name: str, counts: Mapping[Any, int] | None) -> dict[str, Any] | None:
    if counts is None:
        return None
    keys = sorted(counts, key=lambda key: (isinstance(key, str), key))
    plain = [list(key) if isinstance(key, tuple) else key for key in keys]
    return {name: plain, "records": [counts[key] for key in keys]}


def _parse_columns(value: Any, name: str, records: int, most: int, where: str) -> Iterator[tuple[Any, int]]:
    table = as_table(value, where, (name, "records"))
    keys, counts = as_column(table[name], f"{where}.{name}"), as_column(table["records"], f"{where}.records")
    if len(keys) != len(counts) or len(keys) > most:
        raise wrong_value(where, f"at most {most} values with a number each", f"{len(keys)} and {len(counts)}")
    if not all(map(is_count, counts)) or sum(counts) != records:
        raise wrong_value(f"{where}.records", f"numbers with the sum {records}", counts)
    return zip(keys, counts, strict=True)


def _parse_shapes(value: Any, records: int, where: str) -> dict[tuple[int, ...], int] | None:
    if value is None:
        return None
    shapes: dict[tuple[int, ...], int] = {}
    for key, count in _parse_columns(value, "shape", records, MOST_SHAPES, where):
        shape = as_column(key, where)
        if len(shape) > _MOST_AXES or not all(map(is_count, shape)) or shape in shapes:
            raise wrong_value(where, f"different shapes of up to {_MOST_AXES} axes", key)
        shapes[shape] = count
    return shapes


def _parse_labels(value: Any, records: int, where: str) -> dict[int | str, int] | None:
    if value is None:
        return None
    labels: dict[int | str, int] = {}
    for label, count in _parse_columns(value, "value", records, MOST_LABELS, where):
        fits = type(label) is int if not isinstance(label, str) else len(label) <= LONGEST_LABEL
        if not fits or label in labels or (isinstance(label, int) and abs(label) > 2 * LARGEST + 1):
            raise wrong_value(where, "different integers or short texts", label)
        labels[label] = count
    return labels


def _parse_axes(value: Any, where: str) -> tuple[tuple[int, int], ...] | None:
    if value is None:
        return None
    axes = tuple(as_column(axis, where) for axis in as_column(value, where))
    for axis in axes:
        if len(axes) > _MOST_AXES or len(axis) != 2 or not all(map(is_count, axis)) or axis[0] > axis[1]:
            raise wrong_value(where, f"the ends of up to {_MOST_AXES} axes", value)
    return axes


def _parse_length(value: Any, records: int, where: str) -> Length | None:
    if value is None:
        return None
    found = as_column(value, where)
    if len(found) == 3 and all(map(is_count, found)):
        length = Length(*found)
        if length.shortest * records <= length.total <= length.longest * records:
            return length
    raise wrong_value(where, f"the shortest length, the longest, and the sum of {records}", value)


def _parse_sum(value: Any, where: str) -> Fraction:
    match = _SUM.fullmatch(value) if type(value) is str else None
    denominator = 1 if match is None or match[2] is None else int(match[2])
    if match is None or denominator.bit_count() != 1:
        raise wrong_value(where, "an integer, or a fraction of one and a power of two, as text", value)
    return Fraction(int(match[1]), denominator)


def _check_count(value: Any, where: str) -> None:
    if not is_count(value):
        raise wrong_value(where, f"an integer from 0 to {LARGEST}", value)
