"""Samples of tar archives, in a table of at most 16 bytes a member, and the tables of many archives as one. No I/O.

A sample is a run of adjacent regular files with the same key. The key is the path up to the first dot of the base
name; the rest is the extension, which names the component. The name of a file without a dot is both its key and its
extension. Hidden files (base name starting with a dot) are ignored, and do not interrupt a run.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dataload._util.caches import Memo
from dataload._util.indexing import distinct
from dataload.codecs.audio import rate_field
from dataload.codecs.decoders import DECODERS, Decoder, for_extension, known_extension
from dataload.sources.directory import WITHIN, ShardDirectory, ShardNumbers
from dataload.sources.tar import TarOptions
from dataload.sources.tar.header import BLOCK, Member
from dataload.storage.core import core
from dataload.types import Array, BytesColumn, Int64Array, TextColumn


@dataclass(frozen=True, slots=True)
class TarSettings:
    """The options of a source, and decoders by extension or last part of it."""

    options: TarOptions
    decoders: Mapping[str, Decoder]
    last: Memo[Any] = field(default_factory=lambda: Memo(1), compare=False, repr=False)  # see `TarReader`

    def decoder(self, extension: str) -> Decoder:
        name = extension if self.options.case_sensitive else extension.lower()
        chosen = self.decoders.get(name) or self.decoders.get(name.rpartition(".")[2])
        return for_extension(chosen or self.known(name) or DECODERS["bytes"], name, self.options.max_record_bytes)

    def known(self, name: str) -> Decoder | None:
        """Return the decoder that the last part of an extension names, if that is what decides."""
        decode = self.options.decode
        found = known_extension(name) if decode in ("auto", "written") else None
        return None if found is not None and found.name in ("audio", "image") and decode == "written" else found

    def is_audio(self, extension: str) -> bool:
        """Return whether components with an extension are decoded as audio."""
        decoder = self.decoder(extension)
        return decoder.name == "audio" and not decoder.own


@dataclass(frozen=True, slots=True)
class Field:
    """A field of one archive.

    `first`, (samples,), is each sample's component, or one number its position in every sample; -1 for none. `others`
    are decoders by extension code, where they differ from `decoder`.
    """

    name: str
    decoder: Decoder
    first: Array | int
    others: Mapping[int, Decoder]

    def only(self, name: str) -> bool:
        """Return whether the built-in decoder of that name decodes all of its values."""
        return self.decoder.name == name and not self.decoder.own and not self.others


def name_fields(
    extensions: Sequence[str],
    *,
    known: Callable[[str], Any],
    case_sensitive: bool,
    meet: Callable[[tuple[int, ...]], bool],
) -> dict[str, tuple[int, ...]]:
    """Return the fields of an archive: name -> codes of extensions, in order of first occurrence.

    The last part of an extension, if it is `known`, is removed from longer ones. Extensions that become equal are one
    field (``image.jpg`` of some samples and ``image.png`` of others), unless a sample has two of them: `meet` says
    whether any sample has two of these codes. Without `case_sensitive`, names are in lower case.

    Examples:
        >>> several = ["image.npy", "cls", "a.txt", "a.cls"]
        >>> name_fields(several, known=known_extension, case_sensitive=True, meet=lambda _: True)
        {'image': (0,), 'cls': (1,), 'a.txt': (2,), 'a.cls': (3,)}
    """
    full: dict[str, tuple[int, ...]] = {}
    for code, extension in enumerate(extensions):
        name = extension if case_sensitive else extension.lower()
        full[name] = (*full.get(name, ()), code)
    kept: set[str] = set()  # names that are not shortened
    while True:
        groups: dict[str, list[str]] = {}
        for name in full:
            short = name.rpartition(".")[0] if name not in kept and known(name) else ""
            groups.setdefault(short or name, []).append(name)
        fields = {short: tuple(code for name in names for code in full[name]) for short, names in groups.items()}
        meeting = {name for short, names in groups.items() if len(names) > 1 and meet(fields[short]) for name in names}
        if not meeting:
            return fields
        kept |= meeting


def rate_fields(fields: Mapping[str, tuple[int, ...]], is_audio: Callable[[int], bool]) -> dict[str, tuple[int, ...]]:
    """Return the fields with the sample rates of those that are audio, each with the codes of its audio."""
    rates = {rate_field(name): codes for name, codes in fields.items() if all(map(is_audio, codes))}
    return {name: codes for name, codes in rates.items() if name not in fields}


_FEW_KEYS = 16  # to cut, for which numpy's calls take longer
_MARKED = re.compile(r"__[^/]*__(/|$)")
_UnsignedArray = npt.NDArray[np.unsignedinteger[Any]]


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Return the key and extension of a member, or None if it is not a component.

    Examples:
        >>> split_name(b"train/v1.0/000017.left.png")
        (b'train/v1.0/000017', b'left.png')
    """
    base = name.rfind(b"/") + 1
    dot = name.find(b".", base)
    if dot < 0:
        return (name, name) if base < len(name) else None
    return (name[:dot], name[dot + 1 :]) if dot > base else None


def decode_name(name: bytes) -> str:
    """Decode a name; bytes that are not UTF-8 become surrogates, as in Python's file names."""
    return name.decode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of all samples, back to back in `text`; `ends` is (samples,), or (1,) the length that all have."""

    text: bytes
    ends: Array

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> Keys:
        lengths = np.array([*map(len, keys)], np.int64)
        same = len(lengths) > 0 and bool((lengths == lengths[0]).all())
        return cls(b"".join(keys), narrow(lengths[:1] if same else np.cumsum(lengths)))

    def names(self, samples: Int64Array) -> list[str]:
        """Return the keys of `samples`, (rows,) int64."""
        if len(self.ends) == 1 and len(samples) <= _FEW_KEYS:
            length = int(self.ends[0])
            return [decode_name(self.text[sample * length : (sample + 1) * length]) for sample in samples.tolist()]
        return [*self.column(samples)]

    def column(self, samples: Int64Array) -> TextColumn | list[str]:
        """Return the keys of `samples`, (rows,) int64; as a list unless all are UTF-8."""
        if len(self.ends) == 1:
            lengths = np.full(len(samples), int(self.ends[0]))
            starts = samples * lengths
        else:
            starts = np.where(samples > 0, self.ends[samples - 1], 0).astype(np.int64)
            lengths = self.ends[samples] - starts
        return key_column(lengths, lambda out: core().gather_ranges(out, self.text, starts, lengths, -1))


def key_column(lengths: Int64Array, gather: Callable[[Array], Any]) -> TextColumn | list[str]:
    """Return keys of these lengths, (rows,) int64, whose bytes `gather` writes to an array."""
    data = np.empty(int(lengths.sum()), np.uint8)
    gather(data)
    column = BytesColumn.packed(data, np.cumsum(lengths))
    checked = TextColumn.checked(column)
    return [*map(decode_name, column)] if checked is None else checked


@dataclass(frozen=True, slots=True)
class SampleTable:
    """The location of every component; components are numbered in the order of the samples.

    `codes` of extensions are (width,) if every sample has the same components, else (components,); `extensions` are in
    order of first occurrence. `ends` (samples,) are the first component after each sample, None if all have `width`.
    `blocks` are offsets of data in blocks of 512 bytes, `sizes` are bytes, (components,). Without names, `keys` is
    None.
    """

    extensions: tuple[str, ...]
    codes: _UnsignedArray
    ends: Array | None
    blocks: Array
    sizes: Array
    keys: Keys | None

    def __len__(self) -> int:
        if self.ends is not None:
            return len(self.ends)
        return len(self.blocks) // len(self.codes) if len(self.codes) else 0

    def is_like(self, other: SampleTable) -> bool:
        """Return whether all samples of both have the same components."""
        same = self.ends is None and other.ends is None and self.extensions == other.extensions
        return same and self.codes.tobytes() == other.codes.tobytes()

    def offsets(self, components: Int64Array | slice) -> Int64Array:
        """Return the byte offsets of the data of `components`."""
        return self.blocks[components].astype(np.int64) * BLOCK

    def lengths(self, components: Int64Array | slice) -> Int64Array:
        """Return the sizes in bytes of `components`."""
        return self.sizes[components].astype(np.int64)

    def span(self, component: int) -> tuple[int, int]:
        """Return the byte offset and the size of one component."""
        return int(self.blocks[component]) * BLOCK, int(self.sizes[component])

    def meet(self, codes: Sequence[int]) -> bool:
        """Return whether any sample has two components with these codes."""
        hits = np.flatnonzero(np.isin(self.codes, np.asarray(codes, self.codes.dtype)))
        if self.ends is None:
            return len(hits) > 1
        samples = np.searchsorted(self.ends, hits, side="right")
        return bool((samples[1:] == samples[:-1]).any())

    def start(self, sample: int) -> int:
        """Return the number of the first component of a sample."""
        if self.ends is None:
            return sample * len(self.codes)
        return int(self.ends[sample - 1]) if sample else 0

    def all_components(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the components of `samples`, if they differ in them, and each one's place in `samples`; (n,) int64."""
        assert self.ends is not None
        stops = self.ends[samples].astype(np.int64)
        starts = np.where(samples > 0, self.ends[samples - 1], 0)
        rows = np.repeat(np.arange(len(samples)), stops - starts)
        before = np.cumsum(stops - starts) - (stops - starts)
        return np.arange(len(rows)) + (starts - before)[rows], rows

    def sample(self, component: int) -> int:
        if self.ends is None:
            return component // len(self.codes)
        return int(np.searchsorted(self.ends, component, side="right"))

    def code(self, component: int) -> int:
        return int(self.codes[component % len(self.codes) if self.ends is None else component])

    def first(self, codes: Sequence[int]) -> Array | int:
        """Return the first component of each sample with one of these codes, -1 for none; one int if all alike."""
        hits = np.flatnonzero(np.isin(self.codes, np.asarray(codes, self.codes.dtype)))
        if self.ends is None:
            return int(hits[0]) if len(hits) else -1
        out = np.full(len(self), -1, np.int32 if len(self.blocks) < 2**31 else np.int64)
        samples = np.searchsorted(self.ends, hits, side="right")
        out[samples[::-1]] = hits[::-1]  # if there are several, the first is written last
        return out

    def oddity(self) -> str | None:
        """Return names that WebDataset reads differently, or refuses: without a dot, equal, or reserved."""
        lower = list(dict.fromkeys(name.lower() for name in self.extensions))
        names = np.array([lower.index(name.lower()) for name in self.extensions], np.int64)[self.codes]
        samples = np.arange(len(self))
        if self.ends is not None:
            samples = np.repeat(samples, np.diff(self.ends.astype(np.int64), prepend=0))
            names = samples * len(lower) + names
        if len(distinct(names)) < len(names):
            return "a sample has two files of one name"
        if self.keys is None:
            return None
        ends = self.keys.ends.astype(np.int64)
        lengths = np.full(len(self), ends[0]) if len(ends) == 1 else np.diff(ends, prepend=0)
        for code, name in enumerate(self.extensions):
            alike = np.flatnonzero(lengths == len(name.encode("utf-8", "surrogateescape")))
            if self.ends is not None:
                alike = np.intersect1d(alike, samples[self.codes == code], assume_unique=True)
            if name in self.keys.names(alike):
                return f"the file {name!r} has no extension"
        if b"__" in self.keys.text and any(_MARKED.match(key) for key in self.keys.names(np.arange(len(self)))):
            return "some names begin with __ and end with __"
        return None

    def components(self, first: Array | int, samples: Int64Array) -> Int64Array:
        """Return the component of each of `samples`, (rows,), given the result of `first`; -1 for none."""
        if not isinstance(first, int):
            return first[samples]
        return samples * len(self.codes) + first if first >= 0 else np.full(len(samples), -1, np.int64)


def build_table(
    extensions: Iterable[bytes],
    codes: Sequence[int],
    counts: Sequence[int],
    blocks: Sequence[int],
    sizes: Sequence[int],
    keys: Sequence[bytes] | None,
) -> SampleTable:
    """Make a table in its smallest form; `counts` are components per sample, at least 1, and `codes` of components."""
    names = tuple(map(decode_name, extensions))
    numbers = np.array(codes, np.min_scalar_type(max(len(names) - 1, 0)))
    ends, width = np.cumsum(np.array(counts, np.int64)), counts[0] if counts else len(numbers)
    alike = not counts or (counts.count(width) == len(counts) and (numbers.reshape(-1, width) == numbers[:width]).all())
    return SampleTable(
        names,
        numbers[:width].copy() if alike else numbers,
        None if alike else narrow(ends),
        narrow(np.array(blocks, np.int64)),
        narrow(np.array(sizes, np.int64)),
        None if keys is None else Keys.of(keys),
    )


def narrow(numbers: Array) -> Array:
    """Return non-negative numbers as uint32 if they fit, else as int64."""
    fits = not len(numbers) or int(numbers.max()) < 2**32
    return np.asarray(numbers, np.uint32 if fits else np.int64)


def group_members(members: Iterable[Member]) -> SampleTable:
    """Group the members of an archive, in archive order."""
    extensions: dict[bytes, int] = {}
    codes, counts, blocks, sizes = array("L"), array("q"), array("q"), array("q")
    keys: list[bytes] = []
    for name, offset, size in members:
        parts = split_name(name)
        if parts is None:
            continue
        key, extension = parts
        if keys and key == keys[-1]:
            counts[-1] += 1
        else:
            counts.append(1)
            keys.append(key)
        codes.append(extensions.setdefault(extension, len(extensions)))
        blocks.append(offset // BLOCK)
        sizes.append(size)
    return build_table(extensions, codes, counts, blocks, sizes, keys)


class SharedSamples:
    """The tables of many archives, with the methods of `SampleTable`. Samples, components and offsets are places."""

    ends = None

    def __init__(self, directory: ShardDirectory, table: SampleTable) -> None:
        self.extensions: tuple[str, ...] = table.extensions
        self.codes: _UnsignedArray = table.codes
        self.first: Callable[[Sequence[int]], Array | int] = table.first
        self.keys: SharedKeys = SharedKeys(directory)
        self._blocks: ShardNumbers = directory.numbers(BLOCK, is_place=True)
        self._sizes: ShardNumbers = directory.numbers()
        self.offsets: Callable[[Int64Array], Int64Array] = self._blocks.__getitem__
        self.lengths: Callable[[Int64Array], Int64Array] = self._sizes.__getitem__

    def join(self, shard: int, table: SampleTable) -> None:
        """Add the table of an archive."""
        self._blocks.put(shard, table.blocks)
        self._sizes.put(shard, table.sizes)
        if table.keys is not None:
            self.keys.join(shard, table.keys, len(table))

    def components(self, first: int, samples: Int64Array) -> Int64Array:
        """See `SampleTable.components`."""
        if first < 0:
            return np.full(len(samples), -1, np.int64)
        within = samples & WITHIN
        return samples - within + within * len(self.codes) + first


class SharedKeys:
    """The keys of many archives; see `Keys`."""

    def __init__(self, directory: ShardDirectory) -> None:
        self._lengths: set[int | None] = set()  # of the keys of each archive; None if they vary
        self._ends: ShardNumbers = directory.numbers()
        self._texts = core().Maps(len(self._ends))

    def join(self, shard: int, keys: Keys, samples: int) -> None:
        """Add the keys of an archive."""
        self._texts.put_memory(shard, keys.text)
        length = int(keys.ends[0]) if len(keys.ends) == 1 else None
        self._lengths.add(length)
        if length is not None:
            self._ends.put_line(shard, length, length, samples)
        else:
            self._ends.put(shard, keys.ends)

    def names(self, samples: Int64Array) -> list[str]:
        """Return the keys of samples, (rows,) int64."""
        return [*self.column(samples)]

    def column(self, samples: Int64Array) -> TextColumn | list[str]:
        """See `Keys.column`."""
        within, same = samples & WITHIN, next(iter(self._lengths)) if len(self._lengths) == 1 else None
        if same is not None:
            starts, lengths = within * same, np.full(len(samples), same)
        else:
            starts = np.where(within > 0, self._ends[samples - (within > 0)], 0)
            lengths = self._ends[samples] - starts
        places = samples - within + starts
        return key_column(lengths, lambda out: self._texts.gather_ranges(out, places, lengths))
