"""Conditions on fields, which `Source.filter` evaluates column by column."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np

from dataload.codecs.arrow import combined, load_arrow, numbers_of, plain_array, to_column
from dataload.errors import ConfigError
from dataload.types import Array

_COMPARE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {  # with the names of pyarrow's functions
    "==": (operator.eq, "equal"),
    "!=": (operator.ne, "not_equal"),
    "<": (operator.lt, "less"),
    "<=": (operator.le, "less_equal"),
    ">": (operator.gt, "greater"),
    ">=": (operator.ge, "greater_equal"),
}
_JOINED = {"&": "and_kleene", "|": "or_kleene"}

_INT64 = 2**63 - 1
_ALONE = ("field", "is_null", "~")  # need no parentheses

Verdict: TypeAlias = tuple[Any, Any]
"""Whether a condition holds, and whether it does not: arrays of bool, or bool. Neither, where a value is null."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Expression:
    """A condition on the fields of a record, made by `field`.

    Conditions are joined by ``&``, ``|`` and ``~``, in parentheses. As in SQL and Arrow, a comparison with a null
    neither holds nor does not, so that ``~`` of it does not hold either. Numbers are compared exactly, whatever their
    types; no number equals NaN. An array of one value, such as a number of a tf.Example, is compared as this value.

    Attributes:
        operation: ``"field"``, a comparison, ``"in"``, ``"is_null"``, ``"&"``, ``"|"`` or ``"~"``.
        operands: Expressions and constants.

    Examples:
        >>> field("label").isin([3, 5]) & ~(field("name") == "b")
        (field('label') in (3, 5)) & ~(field('name') == 'b')
    """

    operation: str
    operands: tuple[Any, ...]

    def __eq__(self, other: object) -> Expression:  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride]
        return self._compare("==", other)

    def __ne__(self, other: object) -> Expression:  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride]
        return self._compare("!=", other)

    def __lt__(self, other: object) -> Expression:
        return self._compare("<", other)

    def __le__(self, other: object) -> Expression:
        return self._compare("<=", other)

    def __gt__(self, other: object) -> Expression:
        return self._compare(">", other)

    def __ge__(self, other: object) -> Expression:
        return self._compare(">=", other)

    def __hash__(self) -> int:
        return id(self)

    def isin(self, values: Collection[Any]) -> Expression:
        """Return the condition that the value is one of `values`."""
        if isinstance(values, (str, bytes)):
            raise TypeError(f"isin takes a list of values, got the text {values!r}")
        ordered = sorted(values, key=repr) if isinstance(values, (set, frozenset)) else values  # as in every process
        return Expression("in", (self, tuple(map(_constant, ordered))))

    def is_null(self) -> Expression:
        """Return the condition that the value is null."""
        return Expression("is_null", (self,))

    def __and__(self, other: Expression) -> Expression:
        return self._join("&", other)

    def __or__(self, other: Expression) -> Expression:
        return self._join("|", other)

    def __invert__(self) -> Expression:
        return Expression("~", (self,))

    def __bool__(self) -> NoReturn:
        raise TypeError("a condition has no truth by itself: join conditions by &, | and ~, each in parentheses")

    def __repr__(self) -> str:
        if self.operation == "field":
            (name,) = self.operands
            return f"field({name!r})"
        shown = [
            f"({e!r})" if isinstance(e, Expression) and e.operation not in _ALONE else repr(e) for e in self.operands
        ]
        first, *_ = shown
        alone = {"~": f"~{first}", "is_null": f"{first}.is_null()"}
        return alone.get(self.operation) or f" {self.operation} ".join(shown)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, each once."""
        if self.operation == "field":
            return self.operands
        parts = (each.fields for each in self.operands if isinstance(each, Expression))
        return tuple(dict.fromkeys(name for part in parts for name in part))

    def to_arrow(self) -> Any:
        """Return the same condition as a `pyarrow.compute.Expression`."""
        pc = load_arrow("a condition for Arrow", "pyarrow.compute")
        return self._to_arrow(pc, pc.field)

    def _to_arrow(self, pc: Any, column: Callable[[str], Any]) -> Any:
        if self.operation == "field":
            (name,) = self.operands
            return column(name)
        pa = load_arrow("a condition for Arrow")
        first, *others = (e._to_arrow(pc, column) if isinstance(e, Expression) else e for e in self.operands)
        if self.operation in ("~", "is_null"):
            return pc.invert(first) if self.operation == "~" else pc.is_null(first)
        (other,) = others
        if self.operation in _JOINED:
            return getattr(pc, _JOINED[self.operation])(first, other)
        found = _in_arrow(self.operation, first, other, pa, pc)
        # `is_in` and a verdict on all values do not know nulls.
        return pc.if_else(pc.is_null(first), pa.scalar(None, pa.bool_()), found)

    def matches_arrow(self, column: Callable[[str], Any]) -> Array:
        """Return where the condition holds, (rows,) bool, given arrays of pyarrow by name."""
        pa, pc = (load_arrow("a condition for Arrow", module) for module in ("pyarrow", "pyarrow.compute"))
        arrays = {name: _comparable(column(name)) for name in self.fields}
        try:
            found = self._to_arrow(pc, arrays.__getitem__)
            if found.type != pa.bool_():
                raise TypeError("a field alone is a condition only if it is bool")
            return _bits(found.fill_null(False))
        except (pa.ArrowException, TypeError, OverflowError) as error:
            types = ", ".join(f"{name!r} is {array.type}" for name, array in arrays.items())
            raise ConfigError(f"{self!r} does not fit the fields ({types}): {error}", key="filter") from error

    def matches(self, column: Callable[[str], Any]) -> Array:
        """Return where the condition holds, (rows,) bool, given columns of a batch by name."""
        return np.asarray(self.decide(lambda leaf: _verdict(leaf, column))[0])

    def may_match(self, bounds: Callable[[str], tuple[Any, Any] | None]) -> bool:
        """Return whether the condition may hold somewhere, given the least and greatest value of fields, if known."""
        return bool(self.decide(lambda leaf: _bounded(leaf, bounds))[0])

    def decide(self, leaf: Callable[[Expression], Verdict]) -> Verdict:
        """Return the verdict of this condition, from those that `leaf` returns for its single comparisons."""
        if self.operation not in ("&", "|", "~"):
            return leaf(self)
        (holds, fails), *others = (each.decide(leaf) for each in self.operands)
        if self.operation == "~":
            return fails, holds
        ((also_holds, also_fails),) = others
        return (
            (holds & also_holds, fails | also_fails)
            if self.operation == "&"
            else (holds | also_holds, fails & also_fails)
        )

    def _compare(self, operation: str, other: object) -> Expression:
        if isinstance(other, Expression):
            raise TypeError("conditions compare a field with a value: to compare two fields, filter by a function")
        return Expression(operation, (self, _constant(other)))

    def _join(self, operation: str, other: Any) -> Expression:
        if not isinstance(other, Expression):
            raise TypeError(f"{operation} joins conditions, got {other!r}: put each comparison in parentheses")
        return Expression(operation, (self, other))


def field(name: str) -> Expression:
    """Return a field for a condition, such as ``field("label") == 3``; see `Source.filter`."""
    return Expression("field", (name,))


def _comparable(array: Any) -> Any:
    """Return an array of pyarrow in a type whose values pyarrow can compare."""
    pa, pc = (load_arrow("a condition for Arrow", module) for module in ("pyarrow", "pyarrow.compute"))
    stored = getattr(array.type, "storage_type", array.type)
    if pa.types.is_fixed_size_list(stored) and stored.list_size == 1:
        array = combined(array)
        array = pc.list_element(getattr(array, "storage", array), 0)
    kind = getattr(array.type, "value_type", array.type)
    if kind in (pa.string_view(), pa.binary_view()):
        return plain_array(array)
    return plain_array(array).cast(pa.float32()) if kind == pa.float16() else array


def _bits(array: Any) -> Array:
    """Return booleans of pyarrow without nulls, (rows,) bool; pyarrow's own conversion takes ten times as long."""
    array = combined(array)
    stored, start = np.frombuffer(array.buffers()[1] or b"", np.uint8), array.offset
    return np.unpackbits(stored, count=start + len(array), bitorder="little")[start:].view(np.bool_)


def _constant(value: Any) -> Any:
    if value is None:
        raise TypeError("a comparison with None never holds: write is_null")
    return value.item() if isinstance(value, np.generic) and value.dtype.kind not in "mM" else value


def _exactly(operation: str, value: float, kind: np.dtype[Any]) -> tuple[str, Any] | bool:
    """Return a comparison with a number as one with a number of a type, or whether it holds for all of the type."""
    if value != value:
        return operation == "!="
    beyond = (1 if value > 0 else -1) * (math.inf if kind.kind == "f" else 1 << 64)
    if abs(value) > sys.float_info.max:
        near = beyond
    elif kind.kind == "f":
        with np.errstate(over="ignore"):
            near = float(kind.type(value))
    else:
        near = math.floor(value)
    if near != value:  # no number of the type is between them
        if operation in ("==", "!="):
            return operation == "!="
        low, high = ("<", ">=") if near > value else ("<=", ">")
        operation = low if operation[0] == "<" else high
    if kind.kind != "f" and not np.iinfo(kind).min <= near <= np.iinfo(kind).max:
        return operation == "!=" or (operation != "==" and (operation[0] == "<") == (near > 0))
    return operation, near


def _exact_among(values: Collection[Any], kind: np.dtype[Any]) -> list[Any]:
    """Return the numbers that a type can hold exactly."""
    kinds = {*map(type, values)}
    if kind.kind != "f" and kinds == {int}:  # as nearly always; one by one, long lists would take 20 times as long
        least, most = np.iinfo(kind).min, np.iinfo(kind).max
        return [each for each in values if least <= each <= most]
    if kind == np.float64 and kinds == {float}:
        return [each for each in values if each == each]
    found = (_exactly("==", each, kind) for each in values)
    return [each[1] for each in found if not isinstance(each, bool)]


def _are_numbers(values: Collection[Any]) -> bool:
    return {int, float}.issuperset(map(type, values))


def _in_arrow(operation: str, array: Any, other: Any, pa: Any, pc: Any) -> Any:
    """Return where a comparison holds, given an array of pyarrow, or a field of it, whose type is not known yet."""
    kind, types, number = getattr(array, "type", None), pa.types, None
    if kind is not None and (found := _among_times(operation, array, other)) is not None:
        return pa.array(found)
    if kind is not None and any(is_it(kind) for is_it in (types.is_integer, types.is_float32, types.is_float64)):
        number = np.dtype(kind.to_pandas_dtype())
    if operation == "in":
        values = _exact_among(other, number) if number and _are_numbers(other) else [v for v in other if v == v]
        if number is None or number.kind == "f":
            values += [0.0, -0.0] * any(_are_numbers([each]) and each == 0 for each in values)  # two for `is_in`
        return pc.is_in(array, pa.array(values, kind if number else None)) if values else pa.scalar(False)
    if number and _are_numbers([other]):
        found = _exactly(operation, other, number)
        if isinstance(found, bool):
            return pa.scalar(found)
        operation, other = found[0], pa.scalar(found[1], kind)
    elif type(other) is int and other > _INT64:  # pyarrow takes integers for int64
        other = pa.scalar(other, pa.uint64())
    return getattr(pc, _COMPARE[operation][1])(array, other)


_TIMES = {"M": (np.datetime64, date), "m": (np.timedelta64, timedelta)}  # constants, by the kind of a column
_ATTOSECONDS = {
    **{unit: seconds * 10**18 for unit, seconds in (("W", 604_800), ("D", 86_400), ("h", 3600), ("m", 60), ("s", 1))},
    **{unit: 1000**power for power, unit in enumerate(("as", "fs", "ps", "ns", "us", "ms"))},
}


def _among_times(operation: str, array: Any, other: Any) -> Array | None:
    """Return where a comparison of times holds, (rows,) bool; None if they are not such."""
    times, constants = numbers_of(array.type), other if operation == "in" else [other]
    kinds = () if times is None or times.shape else _TIMES.get(times.dtype.kind, ())
    if not constants or not all(isinstance(each, kinds) for each in constants):
        return None
    return _compare_times(operation, to_column(array, ""), other)


def _compare_times(operation: str, values: Array, other: Any) -> Array:
    """Return where a comparison of times holds, (rows,) bool, exactly: numpy's own overflows if units differ."""
    numbers, unit = _ticks(values)
    kind, given = numbers.dtype, list[Any]()
    for each in other if operation == "in" else [other]:
        if not isinstance(each, _TIMES[values.dtype.kind]):
            raise TypeError(f"times are compared with {each!r}")
        if isinstance(each, datetime) and each.tzinfo is not None:
            each = each.astimezone(UTC).replace(tzinfo=None)
        if np.isnat(one := np.array([each], f"{values.dtype.kind}8"))[0]:
            given.append(math.nan)
            continue
        [number], own = _ticks(one)
        given.append(Fraction(int(number) * own, unit))
    known = ~np.isnat(values)
    if operation == "in":
        return known & np.isin(numbers, np.array(_exact_among(given, kind), kind))
    found = _exactly(operation, given[0], kind)
    holds = found if isinstance(found, bool) else _COMPARE[found[0]][0](numbers, found[1])
    return np.where(known, holds, operation == "!=")


def _ticks(times: Array) -> tuple[Array, int]:
    """Return times as int64 numbers of a unit, and that in attoseconds."""
    if times.dtype.kind == "M" and np.datetime_data(times.dtype)[0] in ("Y", "M"):
        times = times.astype("M8[D]")
    unit, count = np.datetime_data(times.dtype)
    if unit not in _ATTOSECONDS:
        raise TypeError(f"times in units of {unit!r} have no fixed length")
    return times.astype(times.dtype.newbyteorder("=")).view(np.int64), count * _ATTOSECONDS[unit]


def _verdict(leaf: Expression, column: Callable[[str], Any]) -> Verdict:
    """Return a verdict on each row."""
    (name,) = leaf.fields
    every, compared = _values(column(name), name), leaf.operands[-1]
    every, valid = np.ma.getdata(every), ~np.ma.getmaskarray(every)
    if every.dtype == object:
        valid = np.fromiter((value is not None for value in every), np.bool_, len(every))
    if leaf.operation == "is_null":
        return ~valid, valid
    values, holds, operation = every[valid], np.zeros(len(valid), np.bool_), leaf.operation
    kind = every.dtype if every.dtype == object else None
    if every.dtype.kind in "iuf" and operation == "in" and _are_numbers(compared):
        compared, kind = _exact_among(compared, every.dtype), every.dtype  # numpy would round some of these to floats
    elif every.dtype.kind in "iuf" and operation in _COMPARE and _are_numbers([compared]):
        found = _exactly(operation, compared, every.dtype)
        if isinstance(found, bool):
            return valid & found, valid & (not found)
        operation, compared = found
    is_text = {isinstance(each, str) for each in (*values[:1], *(compared if leaf.operation == "in" else [compared]))}
    try:
        if leaf.operation == "field":
            if {*map(type, values)} - {bool, np.bool_}:
                raise TypeError("a field alone is a condition only if it is bool")
            holds[valid] = values.astype(np.bool_)
        elif len(is_text) > 1:
            raise TypeError("text is compared with other values")
        elif every.dtype.kind in _TIMES:
            holds[valid] = _compare_times(operation, values, compared)
        elif leaf.operation == "in":
            holds[valid] = np.isin(values, np.array([*compared], kind)) if compared else False
        else:
            if every.dtype == object:
                compared = np.array([compared], object)  # numpy's own text ends before its last zero bytes
            with np.errstate(invalid="ignore"):  # NaN
                holds[valid] = _COMPARE[operation][0](values, compared)
    except TypeError as error:
        raise ConfigError(f"{leaf!r} does not fit the fields: {error}", key="filter") from error
    return holds, valid & ~holds


def _values(column: Any, name: str) -> Array:
    """Return a column as an array of single values, (rows,)."""
    if isinstance(column, np.ndarray) and column.shape[1:] in ((), (1,)):
        return column.reshape(len(column))
    if isinstance(column, (np.ndarray, dict, tuple)):
        raise ConfigError(f"a condition compares single values, and {name!r} has several in a record", key="filter")
    found = np.empty(len(column), object)
    found[:] = [*cast("Sequence[Any]", column)]
    return found


def _bounded(leaf: Expression, bounds: Callable[[str], tuple[Any, Any] | None]) -> Verdict:
    """Return a verdict on whether some value within bounds fulfils a condition, and whether some does not."""
    (name,) = leaf.fields
    known = bounds(name)
    if leaf.operation in ("field", "is_null") or known is None:
        return True, True
    (least, most), other = known, leaf.operands[1]
    try:
        if leaf.operation in ("==", "!=", "in"):
            among = other if leaf.operation == "in" else (other,)
            holds, fails = any(least <= each <= most for each in among), not (least == most and least in among)
            return (fails, holds) if leaf.operation == "!=" else (holds, fails)
        compare = _COMPARE[leaf.operation][0]
        ends = compare(least, other), compare(most, other)
        return any(ends), not all(ends)
    except TypeError:
        return True, True
