"""The reader of one tar archive."""

import copy
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, cast

import numpy as np

from dataload._util.arrays import check_lengths, split_records, split_rows
from dataload._util.clock import decoding
from dataload.catalog.facts import spec_of
from dataload.codecs.decoders import DECODERS, decode_images
from dataload.codecs.npz import npy_layout
from dataload.collate import default_collate
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.directory import ShardDirectory
from dataload.sources.encoded import decoded, integers, located
from dataload.sources.shards import ShardReader
from dataload.sources.tar import KEY
from dataload.sources.tar.samples import Field, SharedSamples, TarSettings, name_fields, rate_fields
from dataload.sources.tar.table import index_path, load_table, name_from_archive, open_archives
from dataload.storage import RecordFile, storage_of
from dataload.types import Array, Batch, BytesColumn, FieldSpec, Int64Array, Record

_END_BYTES = 4096
_HEADER_BYTES = 4096
"""Bytes that are read to find the header of a .npy file."""


class TarReader(ShardReader[Record]):
    """Reads one archive by its `index`; every sample must have the `selected` fields unless `missing` allows less."""

    def __init__(
        self, path: str, index: str | Literal[False] | None, settings: TarSettings, selected: tuple[str, ...] | None
    ) -> None:
        self._file = storage_of(path, settings.options.remote_settings).map(path, mapped=settings.options.map)
        self._settings = settings
        self._table = load_table(
            self._file,
            index,
            on_damage=settings.options.on_damage,
            verify_index=settings.options.verify_index,
            cache=settings.options.cache,
            remote=settings.options.remote_settings,
        )
        # Archives whose samples all have the same components share the plan of their fields.
        layout = (self._table.extensions, self._table.codes.tobytes()) if self._table.ends is None else None
        if (plan := settings.last.recall(layout)) is None:
            plan = self._plan() if layout is None else settings.last.keep(layout, self._plan())
        self._codes, self._rates, self._planned = plan
        self._specs: dict[str, FieldSpec] | None = None
        self._kept: Int64Array | None = None  # numbers of the samples to read, if some are skipped
        self._limit = settings.options.max_record_bytes
        self._has_large = bool((self._table.sizes > self._limit).any())
        if selected is not None and len(self._table):
            self._apply_missing(tuple(name for name in selected if name != KEY))

    def _plan(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], dict[str, Field]]:
        """Return the codes of each field and of those that are sample rates, and no field so far."""
        settings, table = self._settings, self._table
        sensitive = settings.options.case_sensitive
        codes = name_fields(table.extensions, known=settings.known, case_sensitive=sensitive, meet=table.meet)
        codes.pop(KEY, None)
        rates = rate_fields(codes, lambda code: settings.is_audio(table.extensions[code]))
        return codes | rates, rates, {}

    def __len__(self) -> int:
        return len(self._table) if self._kept is None else len(self._kept)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The key and the fields of all samples, in order of first occurrence; empty without samples."""
        if self._specs is None:
            self._specs = {name: self._spec(self._field(name)) for name in self._codes}
            if len(self._table):
                self._specs = {KEY: FieldSpec("str", ()), **self._specs}
        return self._specs

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        """Return records; without `fields` each has the fields of its sample."""
        samples = self._samples(indices)
        if fields is None and self._table.ends is not None:
            return self._records(samples)
        names = (KEY, *self._codes) if fields is None else fields
        return split_records({name: self._values(name, samples) for name in names}, len(samples))

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        if fields is None and self._table.ends is not None:
            return default_collate(self.read(indices, None))
        samples = self._samples(indices)
        names = (KEY, *self._codes) if fields is None else fields
        together = self._together(names, samples)
        return {name: self._column(name, samples, together.get(name)) for name in names}

    def _together(self, names: Sequence[str], samples: Int64Array) -> dict[str, BytesColumn]:
        """Return the contents of several fields without gaps, which are copied at once; none of arrays."""
        found = dict[str, Int64Array]()
        for field in (self._field(name) for name in names if name != KEY):
            components = self._table.components(field.first, samples)
            if not field.others and not field.only("npy") and int(components.min()) >= 0:
                found[field.name] = components
        if len(found) < 2:  # read by itself
            return {}
        contents, rows = self._file.gather_ranges(*self._spans(np.concatenate([*found.values()]))), len(samples)
        return {name: contents[at * rows : (at + 1) * rows] for at, name in enumerate(found)}

    def ranges(self, indices: Int64Array, fields: tuple[str, ...] | None) -> tuple[Int64Array, Int64Array]:
        """See `ShardReader.ranges`; without ranges of keys that only the archive has."""
        samples = self._samples(indices)
        if fields is None and self._table.ends is not None:
            components, _ = self._table.all_components(samples)
        else:
            names = self._codes if fields is None else [name for name in fields if name != KEY]
            found = [self._table.components(self._field(name).first, samples) for name in names]
            components = np.concatenate(found) if found else samples[:0]
            components = components[components >= 0]
        return self._table.offsets(components), self._table.lengths(components)

    def shared(self) -> tuple[RecordFile, Any] | None:
        table = self._table
        if table.ends is not None or table.keys is None or self._kept is not None or not len(table):
            return None
        if any(self._field(name).others for name in self._codes):
            return None
        return self._file, (table.extensions, table.codes.tolist())

    def layout_ranges(self) -> Sequence[tuple[int, int]] | None:
        return () if self._settings.options.index is None and self.shared() is not None else None

    def like(self, paths: Sequence[str], versions: Int64Array) -> Iterator[Self | None]:
        indexes, checks = [*map(index_path, paths)], self._settings.options.verify_index
        for path, found in zip(paths, open_archives(paths, indexes, versions, checks=checks), strict=True):
            if found is None or not found[1].is_like(self._table):
                yield None
                continue
            other, (identity, table) = copy.copy(self), found
            other._file, other._table = cast("Any", self._file).moved(path, identity), table
            other._has_large = bool((table.sizes > self._limit).any())
            yield other

    def joined(self, directory: ShardDirectory) -> Self:
        joined, table = directory.copy_of(self), SharedSamples(directory, self._table)
        joined._table = cast("Any", table)
        joined._has_large = False
        return joined

    def join(self, joined: Any, shard: int) -> None:
        joined._table.join(shard, self._table)
        joined._has_large |= self._has_large

    def oddity(self) -> str | None:
        return self._table.oddity()

    def release(self) -> None:
        """Close the file, and keep the table."""
        self._file.release()

    def identity(self) -> str:
        """Return a hash of the table and of both ends of the first and last components: archives end in zeros."""
        table, found = self._table, hashlib.blake2b(digest_size=16)
        for numbers in (table.blocks, table.sizes, table.codes, table.ends):
            found.update(b"" if numbers is None else numbers.tobytes())
        found.update("\0".join(table.extensions).encode("utf-8", "surrogateescape"))
        for component in (0, len(table.blocks) - 1) if len(table.blocks) else ():
            offset, length = table.span(component)
            found.update(self._file.read(offset, min(length, _END_BYTES)))
            found.update(self._file.read(offset + max(0, length - _END_BYTES), min(length, _END_BYTES)))
        return found.hexdigest()

    def key(self, index: int) -> str:
        return self._key(self._samples(np.array([index])).item())

    def _samples(self, indices: Int64Array) -> Int64Array:
        return indices if self._kept is None else self._kept[indices]

    def _field(self, name: str) -> Field:
        field = self._planned.get(name)
        if field is None:
            codes = self._codes.get(name, ())
            decoders = {code: self._settings.decoder(self._table.extensions[code]) for code in codes}
            decoders |= dict.fromkeys(self._rates.get(name, ()), DECODERS["sample_rate"])
            decoder = decoders[codes[0]] if codes else self._settings.decoder(name)
            others = {code: other for code, other in decoders.items() if other is not decoder}
            if codes and self._table.meet(codes):
                message = f"{self._file.path}: a sample has several files for the field {name!r}: the first one is read"
                warnings.warn(message, stacklevel=2)
            field = Field(name, decoder, self._table.first(codes), others)
            self._planned[name] = field
        return field

    def _spec(self, field: Field) -> FieldSpec:
        """Describe a field by its first component. The sizes of all components show whether shapes vary."""
        kind = field.decoder.name
        if field.decoder.own or any(other.own or other.name != kind for other in field.others.values()):
            return _UNKNOWN
        if field.decoder.spec is not None:
            return field.decoder.spec
        components = self._table.components(field.first, np.arange(len(self._table)))
        components = components[components >= 0]
        try:
            value = self._decode(field, components[:1])[0]
        except (CorruptFileError, UnsupportedFormatError):
            return _UNKNOWN
        if isinstance(value, (dict, list)) or value is None:
            return _UNKNOWN
        spec = spec_of(value)
        if kind == "npy" and bool((self._table.sizes[components] != self._table.sizes[components[0]]).any()):
            return FieldSpec(spec.dtype, (None,) * len(spec.shape or ()))
        return spec

    def _apply_missing(self, names: tuple[str, ...]) -> None:
        if self._settings.options.missing == "error":
            # The source itself reports a name that no sample has.
            names = tuple(name for name in names if name in self._codes)
        present = np.ones(len(self._table), bool)
        everything = np.arange(len(self._table))
        for name in names:
            field = self._field(name)
            if isinstance(field.first, int) and field.first >= 0:
                continue
            lacking = self._table.components(field.first, everything) < 0
            if self._settings.options.missing != "skip" and bool(lacking.any()):
                self._empty(field, int(np.argmax(lacking)))
            present &= ~lacking
        if self._settings.options.missing == "skip" and not present.all():
            self._kept = np.flatnonzero(present)

    def _empty(self, field: Field, sample: int) -> Any:
        """Return the value of a missing component, or raise a ConfigError."""
        missing, empty = self._settings.options.missing, field.decoder.empty
        if missing == "empty" and empty is not None:
            return empty()
        hint = (
            f", and values decoded as {field.decoder.name} have no empty value: choose missing='skip', or decode it as "
            "'bytes'"
            if missing == "empty"
            else ": choose missing='skip' to leave such samples out, or missing='empty' to read an empty value"
        )
        key = self._key(sample)
        message = f"{self._file.path}: sample {sample} ({key!r}) has no field {field.name!r}{hint}"
        raise ConfigError(message, key="missing", value=missing)

    def _key(self, sample: int) -> str:
        [key] = self._keys(np.array([sample]))
        return key

    def _keys(self, samples: Int64Array) -> list[str]:
        if self._table.keys is not None:
            return self._table.keys.names(samples)
        return [name_from_archive(self._table, self._table.start(sample), self._file) for sample in samples.tolist()]

    def _records(self, samples: Int64Array) -> list[Record]:
        """Return records with all fields of each sample, if samples differ in their fields."""
        components, rows = self._table.all_components(samples)
        codes = self._table.codes[components]
        values: list[dict[str, Any]] = [{} for _ in components]
        for name, own in self._codes.items():
            where = np.flatnonzero(np.isin(codes, np.asarray(own, codes.dtype)))
            for at, value in zip(where.tolist(), self._decode(self._field(name), components[where]), strict=True):
                values[at][name] = value
        records: list[Record] = [{KEY: key} for key in self._keys(samples)]
        for row, found in zip(rows.tolist(), values, strict=True):
            for name, value in found.items():
                records[row].setdefault(name, value)
        return records

    def _values(self, name: str, samples: Int64Array) -> list[Any]:
        if name == KEY:
            return self._keys(samples)
        field = self._field(name)
        components = self._table.components(field.first, samples)
        rows = self._rows(field, components)
        return self._each(field, samples, components) if rows is None else split_rows(rows)

    def _column(self, name: str, samples: Int64Array, contents: BytesColumn | None) -> Any:
        """Return a column; `contents` come from `_together`, if it has them."""
        if name == KEY:
            return self._keys(samples) if self._table.keys is None else self._table.keys.column(samples)
        field = self._field(name)
        components = self._table.components(field.first, samples)
        if contents is None and (field.only("bytes") or field.only("cls")) and int(components.min()) >= 0:
            contents = self._file.gather_ranges(*self._spans(components))
        if contents is not None and field.only("bytes"):
            return contents
        if contents is not None and field.only("cls") and (numbers := integers(contents)) is not None:
            return numbers
        rows = self._rows(field, components, contents)
        if rows is not None:
            # like np.stack, which default_collate calls
            return np.asarray(rows, rows.dtype.newbyteorder("="))
        values = self._each(field, samples, components, contents)
        if field.only("bytes"):
            return values
        with decoding():  # of the batch's column
            return default_collate.column(values, name)

    def _each(
        self, field: Field, samples: Int64Array, components: Int64Array, contents: BytesColumn | None = None
    ) -> list[Any]:
        """Return the values of a field, decoded one by one."""
        lacking = components < 0
        if not lacking.any():
            return self._decode(field, components, contents)
        found = iter(self._decode(field, components[~lacking]))
        pairs = zip(samples.tolist(), lacking.tolist(), strict=True)
        return [self._empty(field, sample) if lacks else next(found) for sample, lacks in pairs]

    def _rows(self, field: Field, components: Int64Array, contents: BytesColumn | None = None) -> Array | None:
        """Return the values of a field as one array, (rows, *shape), if they are arrays or images alike; else None."""
        if int(components.min()) < 0:
            return None
        if field.only("npy"):
            return self._arrays(components)
        if not field.only("image"):
            return None
        contents = self._file.gather_ranges(*self._spans(components)) if contents is None else contents
        with decoding():
            return decode_images(list(contents.views()), field.decoder.kind, self._limit)

    def _arrays(self, components: Int64Array) -> Array | None:
        """Return the arrays of .npy components, (rows, *shape), if all have the same header; otherwise None."""
        offsets, sizes = self._spans(components)
        size = int(sizes.max())
        if not size or int(sizes.min()) != size:
            return None
        try:
            layout = npy_layout(self._file.read(int(offsets[0]), min(size, _HEADER_BYTES)))
        except CorruptFileError:
            return None  # the general path raises it again, with its offset
        if layout.start + layout.nbytes != size:
            return None
        headers = self._file.gather(offsets, layout.start)
        if bool((headers != headers[0]).any()):
            return None
        return layout.rows(self._file.gather(offsets + layout.start, layout.nbytes))

    def _spans(self, components: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the offsets and sizes of components that all exist."""
        sizes = self._table.lengths(components)
        if self._has_large and int(sizes.max()) > self._limit:
            samples = np.array([self._table.sample(component) for component in components.tolist()])
            check_lengths(sizes, self._limit, samples, self._file.path)
        return self._table.offsets(components), sizes

    def _decode(self, field: Field, components: Int64Array, contents: BytesColumn | None = None) -> list[Any]:
        """Return the values of components that all exist; `contents` are read unless they are given."""
        if field.others:
            return self._decode_by_code(field, components)
        pieces: Any
        if contents is None and (field.only("bytes") or field.decoder.small):
            pieces = self._file.copies(*self._spans(components))
        else:
            contents = self._file.gather_ranges(*self._spans(components)) if contents is None else contents
            pieces = contents if field.decoder.small else contents.views()
        if field.only("bytes"):
            return pieces

        def locate(error: Exception, row: int) -> Exception:
            offset, sample = self._table.span(int(components[row]))[0], self._table.sample(int(components[row]))
            what = f"field {field.name!r} of {self._key(sample)!r}"
            return located(error, self._file.path, sample, what, offset, own=field.decoder.own)

        return decoded(map(field.decoder.decode, pieces), len(components), locate)

    def _decode_by_code(self, field: Field, components: Int64Array) -> list[Any]:
        codes = self._table.codes[components]  # one for each component: with several decoders, samples differ
        values: list[Any] = [None] * len(components)
        for code in np.unique(codes).tolist():
            where = np.flatnonzero(codes == code)
            one = replace(field, decoder=field.others.get(code, field.decoder), others={})
            for at, value in zip(where.tolist(), self._decode(one, components[where]), strict=True):
                values[at] = value
        return values


_UNKNOWN = FieldSpec("unknown")
