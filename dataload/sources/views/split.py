"""Parts of a source: by a hash of the index or of a value, exact, and alike in the classes of a field."""

from __future__ import annotations

import ast
import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Annotated, Any, Self

import numpy as np

from dataload._util.randomness import derive_word, hash64
from dataload._util.settings import Above, check_choice, check_setting, check_settings, setting_error
from dataload.catalog.arrays import IndexKey, remember, within
from dataload.catalog.facts import require_known
from dataload.errors import ConfigError, closest
from dataload.sources.expression import Expression, field
from dataload.sources.views.select import HELD_OUT, Chosen, Rule, hashed_blocks, identity_of
from dataload.storage.kept import CachedTable
from dataload.types import Array, Int64Array

_TEXTS = (str, bytes, type(None))
_ROWS = 1 << 16  # records whose field is read at once
_SETTINGS = ("exact", "stratify", "group", "by", "seed")
_SIDES = ("train", "test")  # of a fold


@dataclass(frozen=True, slots=True)
class Span(Rule):
    """Records whose hash is in [start, stop) of [0, 1); or those outside, if not `inside`."""

    start: float
    stop: float
    seed: int
    inside: bool = True

    def indices(self, length: int) -> Int64Array:
        part = hashed_blocks(length, self.seed, lambda hashes: _part_of(hashes, np.array([self.start, self.stop])) == 1)
        return part if self.inside else np.setdiff1d(np.arange(length), part, assume_unique=True)


def _part_of(hashes: Array, cuts: Array) -> Int64Array:
    """Return the number of the part of each uint64; `cuts` are the ascending ends of all parts but the last, if < 1."""
    limits = np.array([int(cut * 2.0**64) for cut in cuts.tolist() if cut < 1], np.uint64)
    return np.searchsorted(limits, hashes, side="right")


def check_shares(shares: Any) -> dict[str, float]:
    """Return the shares of parts by name; a ConfigError unless they are numbers that add up to 1."""
    given: dict[str, Any] = dict(shares) if isinstance(shares, Mapping) else {}
    for name, share in given.items():
        check_setting(f"the share of {name!r}", share, Annotated[float, Above(0, most=1)])
    if len(given) < 2 or abs(sum(given.values()) - 1) > 1e-6:
        raise setting_error("the shares of a split", shares, "must be numbers by name that add up to 1")
    return {name: float(share) for name, share in given.items()}


@dataclass(frozen=True, slots=True)
class Division:
    """The rule that deals records to parts with `shares`; see `Source.split` for the settings."""

    shares: tuple[float, ...]
    seed: int
    exact: bool = False
    stratify: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        check_settings(self)

    @classmethod
    def of(cls, shares: Iterable[float], seed: int, by: str | None, settings: Mapping[str, Any]) -> Self:
        """Return the division that the arguments of `Source.split` describe."""
        for name in settings:
            if name not in ("exact", "stratify", "group"):
                raise ConfigError(f"split has no setting {name!r}: {closest(name, _SETTINGS)}", key=name)
        if by is not None and settings.get("group") is not None:
            raise setting_error("by", by, "is the same as group: pass one of them")
        given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        if by is not None:
            given["group"] = by
        return cls(tuple(shares), seed, **given)

    @property
    def cuts(self) -> Array:
        """(parts,), the ends of the parts in [0, 1]."""
        cuts = np.cumsum(self.shares)
        cuts[-1] = 1
        return cuts

    def rules(self, source: Any, *, outside: bool = False) -> list[tuple[Rule, Rule | None]]:
        """Return what selects the records of each part, and, if asked for, all other records."""
        if not (self.exact or self.stratify or self.group):
            ends = [0.0, *self.cuts.tolist()]
            spans = [Span(start, stop, self.seed) for start, stop in pairwise(ends)]
            return [(span, replace(span, inside=False) if outside else None) for span in spans]
        parts = self._kept(source)
        where = [parts == number for number in range(len(self.shares))]
        return [(Chosen(np.flatnonzero(w)), Chosen(np.flatnonzero(~w)) if outside else None) for w in where]

    def _kept(self, source: Any) -> Array:
        """Return the part of each record, from the cache if it is known."""
        require_known([name for name in (self.stratify, self.group) if name], source.fields, source)
        files, length = source._files(), len(source)
        reads = self.stratify or self.group  # else it is computed in no time
        key: IndexKey | None = None
        with suppress(ValueError):  # code that may change without notice
            key = IndexKey.of_filter(files, (repr(self), *identity_of(source))) if files and reads else None

        def unpack(table: CachedTable) -> Array | None:
            found = table.arrays["parts"]
            return found if len(found) == length and within(found, len(self.shares)) else None

        return remember(key, unpack, lambda: self.parts(source), lambda parts: CachedTable({"parts": parts}, {}))

    def parts(self, source: Any) -> Array:
        """Return the part of each record, (records,)."""
        length = len(source)
        hashes = hash64(derive_word(self.seed, HELD_OUT), np.arange(length))
        classes = np.zeros(length, np.int64)
        if self.stratify is not None:
            classes, _ = codes_of(source, self.stratify)
        if self.group is None:
            return _dealt(classes, hashes, np.array(self.shares))
        units, values = codes_of(source, self.group)
        hashes = _hashes(values, self.seed)
        if self.stratify is None and not self.exact:
            return _part_of(hashes, self.cuts).astype(np.uint16)[units]
        return _balanced(units, classes, hashes, np.array(self.shares))[units]

    def report(self, source: Any, names: Sequence[str], parts: Sequence[Int64Array]) -> Iterator[str]:
        """Yield a line for each part, given the indices of its records."""
        total, classes, known = len(source), np.zeros(len(source), np.int64), list[Any]()
        if self.stratify is not None:
            classes, known = codes_of(source, self.stratify)
        for name, share, indices in zip(names, self.shares, parts, strict=True):
            line = f"{name}: {len(indices):,} of {total:,} records, {len(indices) / total:.2%} for {share:.2%}"
            if self.stratify is not None:
                off = np.bincount(classes[indices], minlength=len(known)) - share * np.bincount(classes)
                worst = int(np.argmax(np.abs(off)))
                line += f"; {self.stratify} {known[worst]!r} is {off[worst]:+.1f} records off"
            yield line


def _dealt(classes: Int64Array, ranks: Array, shares: Array) -> Array:
    """Deal the records of each class to parts in the order of `ranks`, each part within one record of its share."""
    order = np.lexsort((ranks, classes))
    counts = np.bincount(classes)
    due, dealt = np.zeros(len(shares)), np.zeros(len(shares), np.int64)  # to each part, of all classes so far
    parts: list[Array] = []
    for count in counts.tolist():
        least = np.floor(count * shares + 1e-9).astype(np.int64)
        due += count * shares
        rest = count - int(least.sum())
        open_for_one = count * shares - least > 1e-9
        behind = np.where(open_for_one, due - dealt - least, -np.inf)
        least[np.argsort(-behind, kind="stable")[:rest]] += 1
        dealt += least
        parts.append(np.repeat(np.arange(len(shares), dtype=np.uint16), least))
    found = np.empty(len(classes), np.uint16)
    found[order] = np.concatenate(parts) if parts else ()
    return found


def _balanced(units: Int64Array, classes: Int64Array, ranks: Array, shares: Array) -> Array:
    """Deal groups to parts, the largest first, each where the classes of its records are missing most."""
    number = int(classes.max(initial=0)) + 1
    pairs, counts = np.unique(units * number + classes, return_counts=True)
    starts = np.searchsorted(pairs // number, np.arange(len(ranks) + 1)).tolist()
    totals, sizes = np.bincount(classes, minlength=number), np.bincount(units, minlength=len(ranks))
    # Lists, as most of many groups have few records: numpy would take ten times as long.
    among, own, total = (pairs % number).tolist(), counts.tolist(), max(1, len(units))
    weights, shares_of = (1 / np.maximum(totals, 1)).tolist(), shares.tolist()
    missing, room = np.outer(shares, totals).tolist(), (shares * len(units)).tolist()  # records, by part
    parts = np.zeros(len(ranks), np.uint16)
    for unit in np.lexsort((ranks, -sizes)).tolist():
        size, counted = sum(own[starts[unit] : starts[unit + 1]]), range(starts[unit], starts[unit + 1])
        best, most = 0, -math.inf
        # The sum of squares of what is missing falls most where the gain is greatest.
        for part, share in enumerate(shares_of):
            gain, lacks = 0.0, missing[part]
            for i in counted:
                gain += (2 * lacks[among[i]] - own[i]) * own[i] * weights[among[i]]
            gain = (gain + (2 * room[part] - size) * size / total) / share
            if gain > most:
                best, most = part, gain
        parts[unit] = best
        for i in counted:
            missing[best][among[i]] -= own[i]
        room[best] -= size
    return parts


def codes_of(source: Any, name: str) -> tuple[Int64Array, list[Any]]:
    """Return a number for the value of a field in each record, (records,) int64, and the values by number, sorted."""
    found: dict[Any, int] = {}
    codes: list[Int64Array] = []
    for start in range(0, len(source), _ROWS):
        column = source.read_batch(range(start, min(start + _ROWS, len(source))), [name])[name]
        if isinstance(column, np.ndarray) and column.ndim == 1:
            values, inverse = np.unique(column, return_inverse=True)
            same = (value if value == value else math.nan for value in values.tolist())  # one NaN for all blocks
            numbers = [found.setdefault(value, len(found)) for value in same]
            codes.append(np.array(numbers, np.int64)[inverse])
        elif isinstance(column, (np.ndarray, Mapping)) or not all(isinstance(each, _TEXTS) for each in column):
            message = f"records are split by numbers or text, and {name!r} is neither"
            raise ConfigError(message, key="stratify", value=name)
        else:
            codes.append(np.array([found.setdefault(value, len(found)) for value in column], np.int64))
    order = sorted(found, key=lambda value: (str(type(value)), value))
    position = np.empty(len(order), np.int64)
    position[[found[value] for value in order]] = np.arange(len(order))
    return position[np.concatenate(codes)] if codes else np.empty(0, np.int64), order


def _hashes(values: list[Any], seed: int) -> Array:
    """Return a hash of each value, (values,) uint64, that no other value changes."""
    key = int(derive_word(seed, HELD_OUT)).to_bytes(8, "little")
    texts = (value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass") for value in values)
    digests = b"".join(hashlib.blake2b(text, digest_size=8, key=key).digest() for text in texts)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def parse(text: str) -> Expression:
    """Return the condition that a text of a config or command states, such as ``"label == 3 and name != 'b'"``."""
    try:
        found = _parsed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        message = (
            f"{text!r} is not a condition such as \"label == 3 and name in ['a', 'b']\": {getattr(error, 'msg', error)}"
        )
        raise ConfigError(message, key="filter", value=text) from error
    if not isinstance(found, Expression):
        raise ConfigError(f"{text!r} names no field", key="filter", value=text)
    return found


_SIGNS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _parsed(node: ast.expr) -> Any:
    """Return an expression, or a constant."""
    if isinstance(node, ast.Name):
        return field(node.id)
    if isinstance(node, ast.BoolOp):
        return reduce(operator.and_ if isinstance(node.op, ast.And) else operator.or_, map(_parsed, node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_parsed(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        if node.func.id == "field":
            return field(ast.literal_eval(node.args[0]))
        if node.func.id == "is_null":
            return _parsed(node.args[0]).is_null()
    if isinstance(node, ast.Compare):
        operands = [_parsed(each) for each in (node.left, *node.comparators)]
        compared = zip(operands, node.ops, operands[1:], strict=False)
        return reduce(operator.and_, (_of_sign(one, sign, other) for one, sign, other in compared))
    return ast.literal_eval(node)


def _of_sign(one: Any, sign: ast.cmpop, other: Any) -> Any:
    if isinstance(sign, (ast.In, ast.NotIn)):
        return one.isin(other) if isinstance(sign, ast.In) else ~one.isin(other)
    if type(sign) not in _SIGNS:
        raise ValueError("values are compared by ==, !=, <, <=, > and >=, or in a list")
    return _SIGNS[type(sign)](one, other)


def select(source: Any, condition: Any, split: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the records that a config or command selects, and a report of the split.

    `condition` is a function, a text for `parse`, or None; `split` is empty or has shares or folds, a part, and
    settings. Of folds, the parts are ``"test-0"``, the first one, ``"train-0"``, all others, and so on.
    """
    if condition is not None:
        source = source.filter(parse(condition) if isinstance(condition, str) else condition)
    if not split:
        return source, ""
    if "part" not in split or ("shares" in split) == ("folds" in split):
        raise ConfigError("a part of the records needs its name, and either shares or folds", key="part")
    settings = {name: split[name] for name in split.keys() - {"shares", "folds", "part"}}
    if "shares" in split:
        parts = found = source.split(split["shares"], **settings)
    else:
        found = source.k_fold(split["folds"], **settings)
        parts = {f"{side}-{n}": part for n, pair in enumerate(found) for side, part in zip(_SIDES, pair, strict=True)}
    check_choice("the part", split["part"], [*parts])
    return parts[split["part"]], found.report
