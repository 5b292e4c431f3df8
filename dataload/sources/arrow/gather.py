"""Records of an Arrow file that is not compressed, gathered buffer by buffer into arrays of pyarrow."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from dataload._util.arrays import Claims
from dataload.codecs.arrow import Numbers, is_text, numbers_of, pa_module
from dataload.codecs.expansion import Sizes, check_views, expansion, least_bytes, picked
from dataload.errors import CorruptFileError
from dataload.sources.arrow.columns import Places, of_batch
from dataload.sources.arrow.ipc import Message, pairs_of
from dataload.sources.directory import ShardDirectory, ShardNumbers
from dataload.storage import RecordFile
from dataload.types import Array, Int64Array, TextColumn

_ITEMS = 1 << 19  # of lists, taken at once
_TAKING_BYTES = 32  # for each item while it is taken
_SMALL = 16  # bytes of a value whose copy takes less time than a call


@dataclass(frozen=True, slots=True)
class _Node:
    """An array in each batch: a column, or the items of one."""

    kind: Any  # a type of pyarrow
    number: int  # in `Message.nodes`
    buffer: int  # the number of its first buffer
    children: tuple[_Node, ...]
    width: int  # bytes of a value or an offset; 0 for bits, or if there are neither
    tensor: Any  # the type of tensors that the values are; None if they are none


class Nodes(NamedTuple):
    """The arrays of a schema's columns, and the number of arrays and buffers in a batch."""

    columns: list[_Node]
    counts: tuple[int, int]


def plan_nodes(schema: Any) -> Nodes | None:
    """Return the arrays of a schema's columns; None if a type cannot be gathered."""
    counts = [0, 0]
    nodes = [_plan(each.type, counts) for each in schema]
    known = [node for node in nodes if node is not None]
    return Nodes(known, (counts[0], counts[1])) if len(known) == len(nodes) else None


def _plan(kind: Any, counts: list[int]) -> _Node | None:
    pa = pa_module()
    types, tensor = pa.types, kind if isinstance(kind, pa.FixedShapeTensorType) else None
    kind = getattr(kind, "storage_type", kind)
    number, buffer = counts
    children: Sequence[Any] = ()
    width, buffers = 0, 2
    if types.is_null(kind):
        buffers = 0
    elif types.is_dictionary(kind):
        width = kind.index_type.bit_width // 8
    elif types.is_struct(kind):
        children, buffers = [each.type for each in kind], 1
    elif types.is_fixed_size_list(kind):
        children, buffers = [kind.value_type], 1
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        children = [kind.field(0).type]
        width = 8 if types.is_large_list(kind) else 4
    elif _is_variable(kind):
        width, buffers = 8 if types.is_large_string(kind) or types.is_large_binary(kind) else 4, 3
    elif types.is_primitive(kind) or types.is_fixed_size_binary(kind) or types.is_decimal(kind):
        width = kind.bit_width // 8
    else:  # views, unions, run-end encoding
        return None
    if _size(kind) == 0:
        return None
    counts[0] += 1
    counts[1] += buffers
    found = [_plan(child, counts) for child in children]
    known = tuple(node for node in found if node is not None)
    return _Node(kind, number, buffer, known, width, tensor) if len(known) == len(found) else None


def _size(kind: Any) -> int | None:
    types = pa_module().types
    if types.is_fixed_size_list(kind):
        return kind.list_size
    return kind.byte_width if types.is_fixed_size_binary(kind) else None


def _is_variable(kind: Any) -> bool:
    types = pa_module().types
    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))


class Gatherer:
    """The columns of the batches, which are not compressed, of a file; `nodes` are the arrays of the schema."""

    def __init__(self, file: RecordFile, nodes: Nodes, batches: Sequence[Message]) -> None:
        self._file, self._nodes = file, nodes.columns
        self._dictionaries: dict[int, Sizes] = {}  # what their values expand to, by number of the array
        for found in batches:
            if (len(found.nodes), len(found.buffers)) != (len(batches[0].nodes), len(batches[0].buffers)):
                raise CorruptFileError("a batch has other columns than the first", path=file.path, offset=found.offset)
        self._offsets = np.array([found.offset for found in batches], np.int64)
        self._counts = np.array([found.rows for found in batches], np.int64)
        counts = nodes.counts
        if batches and (len(batches[0].nodes) // 16, len(batches[0].buffers) // 16) != counts:
            raise CorruptFileError("a batch has other columns than the schema", path=file.path, offset=self._offsets[0])
        self._items = pairs_of([found.nodes for found in batches]).reshape(len(batches), counts[0], 2)
        bodies = np.array([(found.body, 0) for found in batches], np.int64).reshape(-1, 1, 2)
        self._buffers = pairs_of([found.buffers for found in batches]).reshape(len(batches), counts[1], 2) + bodies
        for node in self._nodes:
            self._check(node, self._counts, exact=True)
        self._plain = [self._plan_numbers(node) for node in self._nodes]
        self.kinds: list[Any] = [self._kind(node, plain) for node, plain in zip(self._nodes, self._plain, strict=True)]
        self._shared: list[list[ShardNumbers]] = []
        self._alike: tuple[Any, list[tuple[list[int], Places | None]]] = None, []  # of the columns read last

    def of(self, file: RecordFile) -> Self:
        """Return a gatherer of another file whose batches have the same layout and places."""
        found = copy.copy(self)
        found._file, found._dictionaries = file, {}
        return found

    def _plan_numbers(self, node: _Node) -> tuple[Numbers, int, Int64Array] | None:
        """Return what plain numbers a column has, their bytes and their offset in each batch; None for others."""
        numbers = numbers_of(node.kind) if node.tensor is None else numbers_of(node.tensor)
        if numbers is None or numbers.stored != numbers.dtype or numbers.permutation is not None:
            return None
        leaf, nulls = node, 0
        while leaf.children:
            nulls, leaf = nulls + int(self._items[:, leaf.number, 1].sum()), leaf.children[0]
        if nulls or self._items[:, leaf.number, 1].any() or not leaf.width:
            return None
        nbytes = leaf.width * math.prod(numbers.shape)
        return numbers, nbytes, np.ascontiguousarray(self._buffers[:, leaf.buffer + 1, 0])

    def _kind(self, node: _Node, plain: tuple[Numbers, int, Int64Array] | None) -> Any:
        """Return the numbers of a column and their bytes, or the width of its offsets; None if it has neither."""
        if plain is not None:
            return plain[:2]
        return node.width if _is_variable(node.kind) and not self._items[:, node.number, 1].any() else None

    def _tables(self, column: int) -> Sequence[Any]:
        """Return tables of a column that has a kind, (batches,) int64: offsets of numbers; or ends, bytes, counts."""
        if self._shared:
            return self._shared[column]
        plain, buffer = self._plain[column], self._nodes[column].buffer
        offsets, sizes = self._buffers[:, :, 0], self._buffers[:, :, 1]
        return (
            plain[2:] if plain is not None else (offsets[:, buffer + 1], offsets[:, buffer + 2], sizes[:, buffer + 2])
        )

    def joined(self, directory: ShardDirectory) -> Self:
        """Return a gatherer of many files, so far of none. Records and batches are places there."""
        joined = directory.copy_of(self)
        joined._alike = None, []
        joined._shared = [
            [directory.numbers(is_place=table < 2) for table in range(len(self._tables(column)))] if kind else []
            for column, kind in enumerate(self.kinds)
        ]
        return joined

    def join(self, joined: Self, shard: int) -> None:
        """Add this file to a gatherer of many files."""
        for column, tables in enumerate(joined._shared):
            for table, numbers in zip(tables, self._tables(column) if tables else (), strict=True):
                table.put(shard, numbers)

    def numbers(self, columns: tuple[int, ...], batch: Int64Array, rows: Int64Array, claims: Claims) -> dict[int, Any]:
        """Return the plain numbers among columns, by column: small ones of one kind by one call."""
        (known, groups), found = self._alike, dict[int, Any]()
        if known != columns:
            self._alike = columns, (groups := self._group(columns))  # other threads may read other columns
        for several, places in groups:
            numbers, nbytes = self.kinds[several[0]]
            claims.add(nbytes * len(several))
            if places is None:
                starts = np.stack([self._tables(c)[0][batch] for c in several])
                data = self._file.gather((starts + rows * nbytes).ravel(), nbytes)
            else:
                data = places.gather(self._file, batch, rows * nbytes, nbytes)
            values = [*data.view(numbers.dtype).reshape(-1, len(rows), *numbers.shape)]  # faster than `zip` does it
            found.update(zip(several, values, strict=True))
        return found

    def _group(self, columns: Sequence[int]) -> list[tuple[list[int], Places | None]]:
        """Group columns of plain numbers by kind; each group has its places if there is only one file."""
        alike: dict[Any, list[int]] = {}
        for column in columns:
            if isinstance(kind := self.kinds[column], tuple):
                alike.setdefault((column,) if kind[1] > _SMALL else (kind[0].dtype, kind[0].shape), []).append(column)
        if self._shared:
            return [(each, None) for each in alike.values()]
        return [(each, Places.of(np.array([self._tables(c)[0] for c in each]))) for each in alike.values()]

    def column(self, column: int, batch: Int64Array, rows: Int64Array, claims: Claims) -> Any:
        """Return bytes or text as a column; None of others, or if text is not UTF-8."""
        kind, found = self.kinds[column], None
        if kind is not None:
            ends, data, counts = self._tables(column)
            starts, lengths = self._spans(kind, ends, counts, batch, rows, None, claims)
            claims.add(lengths)
            found = self._file.gather_ranges(of_batch(data, batch) + starts, lengths)
            if is_text(self._nodes[column].kind):
                found = TextColumn.checked(found)
        if found is None and self._shared:
            raise CorruptFileError("a column is read one file at a time")
        return found

    def _check(self, node: _Node, counts: Int64Array, *, exact: bool = False) -> None:
        """Check that the buffers of an array hold what the batches claim; it must have at least `counts` items."""
        if not len(counts):
            return
        lengths, nulls = self._items[:, node.number].T
        bad = lengths != counts if exact else lengths < counts
        types = pa_module().types
        if types.is_null(node.kind):
            self._refuse(bad)
            return
        sizes = self._buffers[:, node.buffer :, 1]
        bad |= (sizes[:, 0] < -(-lengths // 8)) & ((sizes[:, 0] > 0) | (nulls > 0))
        if types.is_struct(node.kind):
            for child in node.children:
                self._check(child, lengths)
        elif types.is_fixed_size_list(node.kind):
            size = node.kind.list_size
            bad |= lengths > (1 << 62) // max(1, size)
            self._check(node.children[0], np.where(bad, 0, lengths) * size)
        elif node.children or _is_variable(node.kind):
            bad |= (lengths > 0) & (lengths > sizes[:, 1] // node.width - 1)
            for child in node.children:
                self._check(child, np.zeros_like(lengths))
        else:
            bad |= lengths > (sizes[:, 1] // node.width if node.width else sizes[:, 1] * 8)
        self._refuse(bad)

    def _refuse(self, bad: Array) -> None:
        if bad.any():
            offset = int(self._offsets[np.argmax(bad)])
            raise CorruptFileError("a batch has less than it claims to have", path=self._file.path, offset=offset)

    def take(self, column: int, batch: Int64Array, rows: Int64Array, claims: Claims, empty: Any) -> Any:
        """Return values of a column as an array of pyarrow; `batch` and `rows` there are (rows,) int64."""
        node = self._nodes[column]
        claims.add(least_bytes(node.kind, packed=True))
        return self._take(node, batch, rows, None, claims, empty)

    def _take(
        self, node: _Node, batch: Int64Array, rows: Int64Array, owner: Int64Array | None, claims: Claims, empty: Any
    ) -> Any:
        """Return values; `owner` is the number of each one's record among those read, or None if that is its place."""
        pa = pa_module()
        kind, types, count = node.kind, pa.types, len(rows)
        empty = getattr(empty, "storage", empty)
        if types.is_null(kind):
            return pa.nulls(count)
        valid = self._valid(node, batch, rows)
        if types.is_struct(kind):
            inner = [None if empty is None else empty.field(number) for number in range(len(node.children))]
            arrays = [self._take(c, batch, rows, owner, claims, e) for c, e in zip(node.children, inner, strict=True)]
            kind = pa.struct([field.with_type(array.type) for field, array in zip(kind, arrays, strict=True)])
            return pa.Array.from_buffers(kind, count, [valid], children=arrays)
        inner = empty.values if empty is not None and node.children else None
        if types.is_fixed_size_list(kind):
            size = kind.list_size
            items = self._take_items(node, batch, rows * size, np.full(count, size), owner, claims, inner)
            kind = kind if items.type == kind.value_type else pa.list_(items.type, size)
            array = pa.Array.from_buffers(kind, count, [valid], children=[items])
            if node.tensor is None or array.type != node.tensor.storage_type:
                return array
            return pa.ExtensionArray.from_storage(node.tensor, array)
        if node.children or _is_variable(kind):
            child = node.children[0] if node.children else None
            bases = self._buffers[:, node.buffer + 1, 0]
            counts = self._buffers[:, node.buffer + 2, 1] if child is None else self._items[:, child.number, 0]
            starts, lengths = self._spans(node.width, bases, counts, batch, rows, owner, claims)
            ends = np.zeros(count + 1, np.int64)
            np.cumsum(lengths, out=ends[1:])
            if child is None:
                claims.add(lengths, owner)
                place = self._buffers[batch, node.buffer + 2, 0] + starts
                data = self._file.gather_ranges(place, lengths).parts()[0][0]
                kind = pa.large_string() if types.is_string(kind) or types.is_large_string(kind) else pa.large_binary()
                return pa.Array.from_buffers(kind, count, [valid, pa.py_buffer(ends), pa.py_buffer(data)])
            claims.add(lengths * (least_bytes(child.kind, packed=owner is None) + _TAKING_BYTES), owner)
            items = self._take_items(node, batch, starts, lengths, owner, claims, inner)
            if types.is_map(kind):
                kind, ends = pa.map_(items.type.field(0).type, items.type.field(1).type), ends.astype(np.int32)
            else:
                kind = pa.large_list(items.type)
            return pa.Array.from_buffers(kind, count, [valid, pa.py_buffer(ends)], children=[items])
        data = self._fixed(node, batch, rows)
        if types.is_dictionary(kind):
            return self._take_dictionary(node, valid, data, count, owner, claims, empty)
        return pa.Array.from_buffers(kind, count, [valid, data])

    def _take_dictionary(
        self, node: _Node, valid: Any, data: Any, count: int, owner: Int64Array | None, claims: Claims, empty: Any
    ) -> Any:
        """Return values that are numbers of entries of a dictionary."""
        pa = pa_module()
        if empty is None:
            raise CorruptFileError("the file lacks the dictionary of a column", path=self._file.path)
        numbers = pa.Array.from_buffers(node.kind.index_type, count, [valid, data])
        try:
            found = pa.DictionaryArray.from_arrays(numbers, empty.dictionary)
        except pa.ArrowException as error:
            message = f"a value is not in its dictionary: {error}"
            raise CorruptFileError(message, path=self._file.path, index=int(claims.indices[0])) from error
        if node.number not in self._dictionaries:
            check_views(empty.dictionary, claims.limit, "a dictionary", self._file.path)
            self._dictionaries[node.number] = expansion(empty.dictionary, packed=owner is None)
        claims.add(picked(self._dictionaries[node.number], numbers), owner)
        return found

    def _take_items(
        self,
        node: _Node,
        batch: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        owner: Int64Array | None,
        claims: Claims,
        empty: Any,
    ) -> Any:
        """Return the items of lists, as many as `lengths` from `starts` on."""
        pa, child = pa_module(), node.children[0]
        total = int(lengths.sum())
        if pa.types.is_null(child.kind):
            return pa.nulls(total)
        plain = child.width and not child.children and not pa.types.is_dictionary(child.kind)
        if plain and not _is_variable(child.kind) and not self._items[batch, child.number, 1].any():
            place = self._buffers[batch, child.buffer + 1, 0] + starts * child.width
            data = self._file.gather_ranges(place, lengths * child.width).parts()[0][0]
            return pa.Array.from_buffers(child.kind, total, [None, pa.py_buffer(data)])
        owner = np.arange(len(lengths)) if owner is None else owner
        cuts = np.searchsorted(np.cumsum(lengths), np.arange(_ITEMS, total, _ITEMS))
        pieces: list[Any] = []
        for rows in np.split(np.arange(len(lengths)), np.unique(cuts)):
            sizes = lengths[rows]
            within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes - starts[rows], sizes)
            of = np.repeat(rows, sizes)
            pieces.append(self._take(child, batch[of], within, owner[of], claims, empty))
        return pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)

    def _fixed(self, node: _Node, batch: Int64Array, rows: Int64Array) -> Any:
        """Return a buffer of values of one width."""
        start = self._buffers[batch, node.buffer + 1, 0]
        if not node.width:
            return pa_module().py_buffer(np.packbits(self._bits(start, rows), bitorder="little"))
        return pa_module().py_buffer(self._file.gather(start + rows * node.width, node.width))

    def _bits(self, start: Int64Array, rows: Int64Array) -> Array:
        """Return bits, (rows,) uint8, of bitmaps that begin at these offsets."""
        return self._file.gather(start + rows // 8, 1).reshape(-1) >> (rows % 8).astype(np.uint8) & 1

    def _valid(self, node: _Node, batch: Int64Array, rows: Int64Array) -> Any:
        """Return a buffer with a bit for each value, whether it is not null; None if none is null."""
        some = self._items[batch, node.number, 1] > 0
        if not some.any():
            return None
        valid = np.ones(len(rows), np.uint8)
        valid[some] = self._bits(self._buffers[batch[some], node.buffer, 0], rows[some])
        return pa_module().py_buffer(np.packbits(valid, bitorder="little"))

    def _spans(
        self,
        width: int,
        bases: Int64Array,
        counts: Int64Array,
        batch: Int64Array,
        rows: Int64Array,
        owner: Int64Array | None,
        claims: Claims,
    ) -> tuple[Int64Array, Int64Array]:
        """Return start and length of each value, by offsets of `width` bytes, among the `counts` items of its batch."""
        pairs = self._file.gather(of_batch(bases, batch) + rows * width, 2 * width).view(f"<i{width}")
        starts, stops = pairs.T.astype(np.int64, order="C")
        lengths = stops - starts
        ends = of_batch(counts, batch)
        wrong = starts | stops | lengths | (ends - stops)  # negative if one of them is
        if len(wrong) and int(wrong.min()) < 0:
            row = int(np.argmax(wrong < 0))
            end = np.broadcast_to(ends, wrong.shape)[row]
            raise CorruptFileError(
                f"a value begins at {starts[row]} and ends at {stops[row]} of {end}",
                path=self._file.path,
                offset=int(bases[batch[row : row + 1]][0] + rows[row] * width),
                index=int(claims.indices[row if owner is None else owner[row]]),
            )
        return starts, lengths
