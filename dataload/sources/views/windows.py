"""Windows over sequences: records of several consecutive records of another source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeAlias, cast, get_args

import numpy as np

from dataload._util.arrays import pooled_empty, split_records
from dataload._util.fingerprint import digest
from dataload._util.settings import Above, Seconds, as_tuple, check_choice, check_count, check_setting
from dataload.catalog.checks import shorten
from dataload.catalog.facts import require_known
from dataload.collate.columns import like
from dataload.errors import ConfigError
from dataload.sources.base import Source, ViewSource
from dataload.sources.expression import Expression
from dataload.sources.memory import owned
from dataload.sources.prefetch import ComponentPrefetch, shared_steps
from dataload.sources.shards import Location
from dataload.sources.views.adapt import WrappedSource, as_source
from dataload.sources.views.clock import Clock
from dataload.types import AheadReader, Array, Batch, FieldSpec, Int64Array, ReadsAhead, StepsAhead

Ends: TypeAlias = Literal["drop", "pad"]
"""What to do with windows that reach beyond their sequence."""

_IS_PAD = "is_pad"
_Rate = Annotated[float, Above(0, noun="a number a second")]
_LARGEST_OFFSET = 1 << 31


def windows(
    source: Any,
    sequence_lengths: Any,
    length: int | None = None,
    stride: int = 1,
    *,
    ends: Ends = "drop",
    offsets: Mapping[str, Sequence[int]] | None = None,
    seconds: float | None = None,
    fps: float | None = None,
) -> WindowSource:
    """Return a source whose records are windows over the sequences of another one, for time series and robots.

    A window has an anchor, a record of the source. Without `length`, a field has the value of the anchor, unchanged.
    With `length`, it has the values of the anchor and the records after it: ``(length, *shape)``. A field in `offsets`
    has the values of the records at these distances from the anchor instead: ``(len(offsets), *shape)``. Bytes,
    text and tuples become a tuple of values. A window never leaves its sequence.

    Args:
        source: What `dataload.open` returns, or anything else that a `Loader` takes; records need fields.
        sequence_lengths: (sequences,) numbers of records, in index order; see `dataload.sequence_lengths`.
        length: Records per window; None for the anchor alone.
        stride: Records from one anchor to the next in its sequence.
        ends: ``"drop"`` leaves out windows that would reach beyond their sequence. ``"pad"`` makes every `stride`-th
            record an anchor, from the first to the last of each sequence, and repeats the sequence's first or last
            record where the window reaches beyond. Bool masks are True for padding: ``<field>_is_pad``,
            (len(offsets),), for each field in `offsets`, and with `length` one ``is_pad``, (length,), for all others.
        offsets: Distances from the anchor in records, by field name: ``{"action": [0, 1, 2], "image": [-1, 0]}``.
        seconds: Seconds that a window lasts, instead of `length`, for records with a field ``time``, in seconds or as
            numpy's times.
        fps: Records per second, whatever the rate of a sequence is: the record at each instant is the last one whose
            time is not after it. `length` and `offsets` then count instants, 1 / `fps` apart. Times are compared in
            microseconds. The field ``audio`` of videos has the samples of the window's span.

    Raises:
        ConfigError: The lengths do not add up to the number of records; a field is unknown; a setting is out of
            range; times do not rise within a sequence; or no sequence is long enough for a window.
        TypeError: `source` is not a source.

    Examples:
        >>> from dataload import MemorySource, windows
        >>> source = MemorySource({"x": [0, 1, 2, 10, 11]})
        >>> [record["x"].tolist() for record in windows(source, [3, 2], 2)]
        [[0, 1], [1, 2], [10, 11]]
    """
    if seconds is not None:
        if length is not None or fps is None:
            raise ConfigError("seconds= goes with fps=, and takes the place of length", key="seconds", value=seconds)
        length = max(1, round(check_setting("seconds", seconds, Seconds) * check_setting("fps", fps, _Rate)))
    check_setting("offsets", offsets, Mapping[str, Any] | None)
    return WindowSource(as_source(source), sequence_lengths, length, stride, ends, offsets or {}, fps)


class WindowSource(ViewSource[dict[str, Any]]):
    """Windows over the sequences of another source; see `windows`."""

    def __init__(
        self,
        parent: Source[Any],
        sequence_lengths: Any,
        length: int | None,
        stride: int,
        ends: Ends,
        offsets: Mapping[str, Sequence[int]],
        fps: float | None = None,
    ) -> None:
        self._parents = (parent,)
        self._parent = parent
        check_choice("ends", ends, get_args(Ends))
        self._pads = ends == "pad"
        length = None if length is None else check_count("length", length, least=1)
        stride = check_count("stride", stride, least=1)
        spans = tuple(name for name in parent.fields or () if parent._lasting(name, 1) is not None)
        for name in spans:
            if fps is None or name in offsets:
                message = f"{name!r} has the time span of a window: pass seconds= and fps=, and no offsets for it"
                raise ConfigError(message, key="fps" if fps is None else f"offsets.{name}")
        self._groups = _group(parent, length, offsets, spans, (length or 1) / (fps or 1))
        lengths = _check_lengths(sequence_lengths, len(parent))
        stops = np.cumsum(lengths)
        self._clock = None if fps is None else Clock.of(parent, lengths, check_setting("fps", fps, _Rate))
        reach = np.concatenate([[0], *(group.offsets for group in self._groups)])
        before, after = (0, 0) if self._pads else (int(reach.min()), int(reach.max()))
        lows, highs = stops - lengths - before, stops - after
        if self._clock is not None:
            lows, highs = self._clock.inside(stops - lengths, stops, before, after)
        self._spans = _Spans.of(stops - lengths, stops, lows, highs, stride)
        if len(parent) and not len(self):
            raise ConfigError(
                f"no sequence is long enough for a window: it takes {int(np.ptp(reach)) + 1} records, and the longest "
                f"sequence has {int(lengths.max())}: pass ends='pad', or shorter windows",
                key="length",
                value=length,
            )
        digest_of_lengths = hashlib.blake2b(lengths.tobytes(), digest_size=16).hexdigest()
        self._identity = (digest_of_lengths, length, stride, ends, *(() if fps is None else (float(fps),)))
        self._fields = self._specs()

    def _specs(self) -> dict[str, FieldSpec]:
        group_of = {name: group for group in self._groups for name in group.names}
        found = dict[str, FieldSpec]()
        for name, spec in self._parent.fields.items():
            span = self._parent._lasting(name, group_of[name].seconds)
            found[name] = group_of[name].spec(spec) if span is None else span[0]
        for group in self._groups if self._pads else ():
            for mask in group.masks:
                if mask in found:
                    message = f"ends='pad' adds the mask {mask!r}, and the records have a field of that name: rename it"
                    raise ConfigError(message, key="ends", value="pad")
                found[mask] = FieldSpec("bool", (len(group.offsets),))
        return found

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def sequence_lengths(self) -> Int64Array:
        """(sequences,) int64, the number of windows in each sequence that has one; for `StreamSampler`."""
        return self._spans.counts[self._spans.counts > 0]

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Fields of the parent, with an axis for the records of a window, and the masks."""
        return self._fields

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Number of windows whose anchor is in a shard of the parent, for each that has one."""
        return self._anchored(self._parent.shard_lengths)

    @property
    def groups(self) -> tuple[int, ...]:
        return self._anchored(self._parent.groups)

    def _anchored(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        before = self._spans.count_before(np.cumsum(lengths))
        return tuple(n for n in np.diff(before, prepend=0).tolist() if n) or (0,)

    def _locate(self, index: int) -> Location:
        return self._parent.locate(int(self._spans.of_windows(np.array([index]))[0][0]))

    def _read(self, indices: Int64Array) -> list[dict[str, Any]]:
        return split_records(self._read_columns(indices, None), len(indices))

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        chosen = dict.fromkeys(self._check(fields))
        found: Batch = {}
        groups = [(group, [name for name in group.names if name in chosen]) for group in self._groups]
        for group, names in [each for each in groups if each[0].seconds]:
            anchors = self._spans.of_windows(indices)[0]
            spans = {name: self._parent._lasting(name, group.seconds) for name in names}
            found |= {name: span[1](anchors) for name, span in spans.items() if span is not None}
        wanted = [(group, names, *self._records(group, indices)) for group, names in groups if not group.seconds]
        for group, _, _, is_pad in wanted if self._pads else ():
            found |= {mask: is_pad.copy() for mask in group.masks if mask in chosen}
        wanted = [each for each in wanted if each[1]]
        # Each field is read for the records that need it. Records that come whole are read once for all fields.
        for together in [wanted] if self._reads_whole and wanted else [[each] for each in wanted]:
            records = np.concatenate([records.ravel() for _, _, records, _ in together])
            unique, inverse = np.unique(records, return_inverse=True)
            if len(unique) == len(records):  # in the requested order, nothing has to be moved
                unique, inverse = records, None
            columns = self._parent.read_batch(unique, [name for _, names, _, _ in together for name in names])
            start = 0
            for group, names, records, _ in together:
                rows = np.arange(start, start + records.size) if len(together) > 1 else None
                where = rows if inverse is None else inverse[start : start + records.size]
                found |= {name: _cut(columns[name], where, records.shape, group.has_axis) for name in names}
                start += records.size
        return {name: found[name] for name in chosen}

    def _matches(self, condition: Expression, indices: Int64Array | None) -> Int64Array:
        alone = {name for group in self._groups if not group.has_axis for name in group.names}
        if self._clock is not None or not alone.issuperset(condition.fields):
            return super()._matches(condition, indices)
        anchors = self._spans.of_windows(np.arange(len(self)) if indices is None else indices)[0]
        return self._parent._matches(condition, anchors)  # which knows its nulls

    @property
    def _reads_whole(self) -> bool:
        return isinstance(self._parent, WrappedSource) and not self._parent.reads_columns

    def _check(self, fields: tuple[str, ...] | None) -> Sequence[str]:
        require_known(fields or (), self._fields)
        return tuple(self._fields) if fields is None else fields

    def _records(self, group: _Group, indices: Int64Array) -> tuple[Int64Array, Array]:
        """Return the records of windows, and which of them are padding; both (rows, offsets)."""
        anchors, firsts, stops = self._spans.of_windows(indices)
        if self._clock is not None:
            return self._clock.records(anchors, group.offsets, firsts, stops)
        reached = anchors[:, None] + group.offsets
        if not self._pads:
            return reached, np.zeros(0, np.bool_)
        inside = np.clip(reached, firsts[:, None], stops[:, None] - 1)
        return inside, inside != reached

    def read_ahead(
        self, steps: Iterator[StepsAhead], fields: Sequence[str] | None, *, here: bool, share: float = 1.0
    ) -> AheadReader | None:
        parent, chosen = self._parent, {*self._check(None if fields is None else tuple(fields))}
        groups = [(group, [name for name in group.names if name in chosen]) for group in self._groups]
        groups = [each for each in groups if each[1]]
        groups = [each for each in groups if not each[0].seconds] or groups  # a span needs no other records
        if not isinstance(parent, ReadsAhead) or not groups:
            return None

        def start(some: Sequence[tuple[_Group, list[str]]], steps: Iterator[StepsAhead]) -> AheadReader | None:
            blocks = (self._parent_steps([group for group, _ in some], block) for block in steps)
            names = [name for _, names in some for name in names]
            return parent.read_ahead(blocks, names, here=here, share=share)  # all read the same shards

        together = [groups] if self._reads_whole else [[each] for each in groups]
        return ComponentPrefetch.of(map(start, together, shared_steps(steps, len(together))))

    def _parent_steps(self, groups: Sequence[_Group], block: StepsAhead) -> StepsAhead:
        records = np.concatenate([self._records(group, block.indices)[0] for group in groups], axis=1)
        return replace(block, indices=records.ravel(), ends=block.ends * records.shape[1])

    def fingerprint(self) -> str:
        groups = [(group.names, group.offsets.tolist(), group.has_axis) for group in self._groups]
        return digest("windows", self._parent.fingerprint(), self._identity, groups)

    def __repr__(self) -> str:
        return f"WindowSource({self._parent!r}, {len(self)} windows in {len(self._spans.counts)} sequences)"


@dataclass(frozen=True, slots=True)
class _Group:
    """The fields that come from the same records of a window; `masks` are the names of their masks."""

    names: tuple[str, ...]
    offsets: Int64Array
    has_axis: bool
    masks: tuple[str, ...]
    seconds: float = 0.0  # of a span of time, which is read as a whole

    def spec(self, spec: FieldSpec) -> FieldSpec:
        """Return the specification of a field in a window."""
        if not self.has_axis:
            return spec
        if spec.dtype in ("bytes", "str"):  # tuples have neither dtype nor shape
            return FieldSpec("unknown")
        return replace(spec, shape=None if spec.shape is None else (len(self.offsets), *spec.shape))


@dataclass(frozen=True, slots=True)
class _Spans:
    """The anchors of all windows, by arithmetic; arrays are (sequences,) int64.

    `ends` is the cumulative number of windows. The anchor of window i, if it is in a sequence, is ``origin + i *
    stride``. `firsts` and `stops` are the first record of a sequence and the one after its last.
    """

    counts: Int64Array
    ends: Int64Array
    origins: Int64Array
    firsts: Int64Array
    stops: Int64Array
    stride: int

    @classmethod
    def of(cls, firsts: Int64Array, stops: Int64Array, lows: Int64Array, highs: Int64Array, stride: int) -> Self:
        """Return the windows of sequences whose anchors are in [low, high)."""
        counts = np.maximum(0, (highs - lows - 1) // stride + 1)
        ends = np.cumsum(counts)
        return cls(counts, ends, lows - (ends - counts) * stride, firsts, stops, stride)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def of_windows(self, indices: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the anchor of each window, and first record and stop of its sequence; all (rows,) int64."""
        sequences = np.searchsorted(self.ends, indices, side="right")
        return self.origins[sequences] + indices * self.stride, self.firsts[sequences], self.stops[sequences]

    def count_before(self, records: Int64Array) -> Int64Array:
        """Return the number of windows whose anchor is before each of `records`, (n,) int64."""
        if not len(self.ends):
            return np.zeros_like(records)
        sequences = np.minimum(np.searchsorted(self.stops, records, side="left"), len(self.ends) - 1)
        number = -((self.origins[sequences] - records) // self.stride)  # of the first window at or after the record
        ends = self.ends[sequences]
        return np.clip(number, ends - self.counts[sequences], ends)


def _check_lengths(lengths: Any, records: int) -> Int64Array:
    """Return the lengths of sequences that have so many records together, as an array of its own."""
    advice = "compute them with dataload.sequence_lengths(source, ...)"
    try:
        given = np.array(lengths)
    except (TypeError, ValueError):
        given = np.zeros(())
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        message = f"sequence_lengths must be integers in one dimension, got {shorten(repr(lengths))}: {advice}"
        raise ConfigError(message, key="sequence_lengths")
    for outside in np.flatnonzero((given < 0) | (given > records))[:1].tolist():
        message = f"sequence_lengths[{outside}] is {given[outside]}, and the source has {records} records: {advice}"
        raise ConfigError(message, key="sequence_lengths", value=int(given[outside]))
    total = int(given.sum(dtype=np.float64))  # exact up to 2^53, and never overflows
    if total != records:
        message = f"sequence_lengths have a sum of {total}, and the source has {records} records: {advice}"
        raise ConfigError(message, key="sequence_lengths", value=total)
    return given.astype(np.int64)


def _group(
    parent: Source[Any],
    length: int | None,
    offsets: Mapping[str, Sequence[int]],
    spans: tuple[str, ...],
    seconds: float,
) -> tuple[_Group, ...]:
    known = parent.fields
    if not known:
        message = f"windows need records with fields, and {parent!r} has none: choose a codec, or let records be dicts"
        raise ConfigError(message, key="source")
    grouped: dict[tuple[int, ...], list[str]] = {}
    require_known(offsets, known, key="offsets")
    for name, given in offsets.items():
        grouped.setdefault(_check_offsets(name, given), []).append(name)
    rest = tuple(name for name in known if name not in offsets and name not in spans)
    plain = [_Group(rest, np.arange(length or 1), length is not None, () if length is None else (_IS_PAD,))]
    return (
        *(plain if rest else ()),
        *([_Group(spans, np.arange(length or 1), True, (), seconds)] if spans else ()),
        *(
            _Group(tuple(names), np.array(distances, np.int64), True, tuple(f"{name}_{_IS_PAD}" for name in names))
            for distances, names in grouped.items()
        ),
    )


def _check_offsets(name: str, given: Any) -> tuple[int, ...]:
    found = () if isinstance(given, (str, Mapping)) else as_tuple(given)
    right = all(isinstance(each, (int, np.integer)) and not isinstance(each, bool) for each in found)
    if not found or not right or max(abs(int(each)) for each in found) >= _LARGEST_OFFSET:
        message = f"offsets of {name!r} must be integers, such as [-1, 0], got {shorten(repr(given))}"
        raise ConfigError(message, key=f"offsets.{name}", value=given)
    return tuple(map(int, found))


def _cut(column: Any, where: Int64Array | None, shape: tuple[int, int], has_axis: bool) -> Any:
    """Return a field of windows from a column: its values at `where`, None for all in order, as rows of `shape`."""
    if isinstance(column, dict):
        inner = cast("dict[str, Any]", column)
        return {name: _cut(each, where, shape, has_axis) for name, each in inner.items()}
    if isinstance(column, tuple):
        parts, rows = cast("tuple[Any, ...]", column), np.arange(shape[0] * shape[1]) if where is None else where
        taken = (rows[at :: shape[1]] for at in range(shape[1]))
        values = tuple(like(type(parts), (_cut(part, each, (shape[0], 1), False) for part in parts)) for each in taken)
        return values if has_axis else values[0]
    if not isinstance(column, np.ndarray):
        values = column if where is None else [owned(column[at]) for at in where.tolist()]
        return tuple(values[at :: shape[1]] for at in range(shape[1])) if has_axis else values
    found = cast("Array", column)
    if where is not None:
        make = np.empty if found.dtype.hasobject else pooled_empty
        out = make((len(where), *found.shape[1:]), found.dtype)
        found = np.take(found, where, axis=0, out=out, mode="clip")
    return found.reshape(*shape, *found.shape[1:]) if has_axis else found
