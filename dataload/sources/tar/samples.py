"""Tables of the samples in an archive, at most 16 bytes per member.

A sample is a run of adjacent regular files with the same key: the path up to the first dot of the base name. The rest
is the extension, which names the component. The name of a file without a dot is both key and extension. Hidden files
(whose base name starts with a dot) are not components and do not interrupt a run.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataload.sources.tar.header import BLOCK, Member
from dataload.types import Array, Int64Array

_UnsignedArray = npt.NDArray[np.unsignedinteger[Any]]


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Return key and extension of a member; None if it is not a component.

    Example:
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
    """Keys of the samples.

    Attributes:
        text: All keys concatenated; a str, at one byte per character, if they are ASCII.
        ends: End of each key, (samples,); or the length of all, (1,).
    """

    text: str | bytes
    ends: Array

    @classmethod
    def of_lengths(cls, blob: bytes, lengths: Int64Array) -> Keys:
        """Create from concatenated names and their lengths, (samples,)."""
        same = len(lengths) > 0 and bool((lengths == lengths[0]).all())
        text = blob.decode("ascii") if blob.isascii() else blob
        return cls(text, lengths[:1].copy() if same else narrow(np.cumsum(lengths)))

    def names(self, samples: Int64Array) -> list[str]:
        """Return the keys of `samples`, (rows,) int64."""
        if len(self.ends) == 1:
            stops = (samples + 1) * int(self.ends[0])
            starts = stops - int(self.ends[0])
        else:
            stops = self.ends[samples]
            starts = np.where(samples > 0, self.ends[samples - 1], 0)
        text = self.text
        spans = zip(starts.tolist(), stops.tolist(), strict=True)
        if isinstance(text, str):
            return [text[start:stop] for start, stop in spans]
        return [decode_name(text[start:stop]) for start, stop in spans]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self.text) + self.ends.nbytes


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Locations of the components of all samples; components are numbered in sample order.

    Attributes:
        extensions: Extensions by code, in order of first occurrence.
        codes: Extension codes: (width,) if every sample has the same components, else (components,).
        ends: (samples,) number of the first component after each sample; None if all have `width`.
        blocks: (components,) start of the data, in blocks of 512 bytes.
        sizes: (components,) size in bytes.
        keys: Keys of the samples; None if the index has no names.
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

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        parts = (self.codes, self.ends, self.blocks, self.sizes, self.keys)
        return sum(part.nbytes for part in parts if part is not None)

    def offsets(self, components: Int64Array | slice) -> Int64Array:
        """Return the byte offsets of the data of `components`."""
        return self.blocks[components].astype(np.int64) * BLOCK

    def lengths(self, components: Int64Array | slice) -> Int64Array:
        """Return the sizes in bytes of the data of `components`."""
        return self.sizes[components].astype(np.int64)

    def meet(self, codes: Sequence[int]) -> bool:
        """Return whether any sample has two components with these codes."""
        hits = np.flatnonzero(np.isin(self.codes, np.asarray(codes, self.codes.dtype)))
        if self.ends is None:
            return len(hits) > 1
        samples = np.searchsorted(self.ends, hits, side="right")
        return bool((samples[1:] == samples[:-1]).any())

    def start(self, sample: int) -> int:
        """Return the number of a sample's first component."""
        if self.ends is None:
            return sample * len(self.codes)
        return int(self.ends[sample - 1]) if sample else 0

    def all_components(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return all components of `samples`, for archives whose samples differ in components.

        Returns:
            Numbers of the components, (n,) int64, and the row in `samples` of each, (n,) int64.
        """
        assert self.ends is not None
        stops = self.ends[samples].astype(np.int64)
        starts = np.where(samples > 0, self.ends[samples - 1], 0)
        rows = np.repeat(np.arange(len(samples)), stops - starts)
        before = np.cumsum(stops - starts) - (stops - starts)
        return np.arange(len(rows)) + (starts - before)[rows], rows

    def sample(self, component: int) -> int:
        """Return the number of the sample to which a component belongs."""
        if self.ends is None:
            return component // len(self.codes)
        return int(np.searchsorted(self.ends, component, side="right"))

    def code(self, component: int) -> int:
        """Return the extension code of a component."""
        return int(self.codes[component % len(self.codes) if self.ends is None else component])

    def first(self, codes: Sequence[int]) -> Array | int:
        """Return for every sample the number of its first component with one of these codes.

        Returns:
            (samples,) int32 or int64, -1 for none; or, if all samples have the same components, the position within
            each sample, -1 for none.
        """
        hits = np.flatnonzero(np.isin(self.codes, np.asarray(codes, self.codes.dtype)))
        if self.ends is None:
            return int(hits[0]) if len(hits) else -1
        out = np.full(len(self), -1, np.int32 if len(self.blocks) < 2**31 else np.int64)
        samples = np.searchsorted(self.ends, hits, side="right")
        out[samples[::-1]] = hits[::-1]  # the first of several is written last
        return out


def build_table(
    extensions: Sequence[str],
    codes: _UnsignedArray,
    counts: Int64Array,
    blocks: Array,
    sizes: Array,
    keys: Keys | None,
) -> SampleTable:
    """Return a table in its most compact form.

    Args:
        extensions: See `SampleTable`.
        codes: (components,) extension codes.
        counts: (samples,) components per sample, at least 1.
        blocks: See `SampleTable`.
        sizes: See `SampleTable`.
        keys: See `SampleTable`.
    """
    ends: Array | None = np.cumsum(counts)
    if len(counts) and bool((counts == counts[0]).all()):
        width = int(counts[0])
        if bool((codes.reshape(-1, width) == codes[:width]).all()):
            codes, ends = codes[:width].copy(), None
    elif not len(counts):
        ends = None
    return SampleTable(
        tuple(extensions), codes, None if ends is None else narrow(ends), narrow(blocks), narrow(sizes), keys
    )


def narrow(numbers: Array) -> Array:
    """Return non-negative numbers in 4 bytes each if they fit."""
    fits = not len(numbers) or int(numbers.max()) < 2**32
    return numbers.astype(np.uint32 if fits else np.int64, copy=False)


def group_members(members: Iterable[Member]) -> SampleTable:
    """Return the table of an archive, given its members in order."""
    extensions: dict[bytes, int] = {}
    codes, counts, blocks, sizes = array("L"), array("q"), array("q"), array("q")
    blob, key_lengths = bytearray(), array("q")
    last: bytes | None = None
    for name, offset, size in members:
        parts = split_name(name)
        if parts is None:
            continue
        key, extension = parts
        if key == last:
            counts[-1] += 1
        else:
            last = key
            counts.append(1)
            blob += key
            key_lengths.append(len(key))
        codes.append(extensions.setdefault(extension, len(extensions)))
        blocks.append(offset // BLOCK)
        sizes.append(size)
    return build_table(
        [decode_name(extension) for extension in extensions],
        code_array(np.array(codes, np.uint64), len(extensions)),
        np.array(counts, np.int64),
        np.array(blocks, np.int64),
        np.array(sizes, np.int64),
        Keys.of_lengths(bytes(blob), np.array(key_lengths, np.int64)),
    )


def code_array(codes: _UnsignedArray, extensions: int) -> _UnsignedArray:
    """Return codes below `extensions` in as few bytes as possible."""
    return codes.astype(np.uint8 if extensions <= 1 << 8 else np.uint16 if extensions <= 1 << 16 else np.uint32)
