"""Which members of an archive make a sample, kept in at most 16 bytes a member.

A sample is a run of adjacent regular files with one key. The key is the path up to the first dot of the base
name; the rest is the extension, which names the component. A file without a dot is its own key and extension.
Hidden files (base name starting with a dot) are no components, and do not part a run.
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
    """Key and extension of a member; None for one that is no component.

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
    """A name as text; bytes that are no UTF-8 survive as surrogates, as in Python's file names."""
    return name.decode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of the samples.

    Attributes:
        text: All of them back to back; as text if they are ASCII, which takes a byte a character then.
        ends: (samples,) where each ends; or (1,), the length that all have.
    """

    text: str | bytes
    ends: Array

    @classmethod
    def of_lengths(cls, blob: bytes, lengths: Int64Array) -> Keys:
        """From names back to back and their lengths, (samples,)."""
        same = len(lengths) > 0 and bool((lengths == lengths[0]).all())
        text = blob.decode("ascii") if blob.isascii() else blob
        return cls(text, lengths[:1].copy() if same else narrow(np.cumsum(lengths)))

    def names(self, samples: Int64Array) -> list[str]:
        """The names of `samples`, (rows,) int64."""
        if len(self.ends) == 1:
            stops = (samples + 1) * int(self.ends[0])
            starts = stops - int(self.ends[0])
        else:
            stops = self.ends[samples]
            starts = np.where(samples > 0, self.ends[samples - 1], 0)
        text = self.text
        places = zip(starts.tolist(), stops.tolist(), strict=True)
        if isinstance(text, str):
            return [text[start:stop] for start, stop in places]
        return [decode_name(text[start:stop]) for start, stop in places]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self.text) + self.ends.nbytes


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Where the components of every sample lie: components are numbered in the order of the samples.

    Attributes:
        extensions: Extension by code, in order of first occurrence.
        codes: Extension codes: (width,) where every sample has the same components, else (components,).
        ends: (samples,) number of the first component after each sample; None where all have `width`.
        blocks: (components,) where the data start, in blocks of 512 bytes.
        sizes: (components,) bytes.
        keys: Names of the samples; None where an index without names was read.
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
        """Byte offsets of the data of `components`."""
        return self.blocks[components].astype(np.int64) * BLOCK

    def lengths(self, components: Int64Array | slice) -> Int64Array:
        """Bytes of the data of `components`."""
        return self.sizes[components].astype(np.int64)

    def meet(self, codes: Sequence[int]) -> bool:
        """Whether any sample has two components with these codes."""
        hits = np.flatnonzero(np.isin(self.codes, np.asarray(codes, self.codes.dtype)))
        if self.ends is None:
            return len(hits) > 1
        samples = np.searchsorted(self.ends, hits, side="right")
        return bool((samples[1:] == samples[:-1]).any())

    def start(self, sample: int) -> int:
        """The number of the first component of one sample."""
        if self.ends is None:
            return sample * len(self.codes)
        return int(self.ends[sample - 1]) if sample else 0

    def all_components(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The components of `samples` one after another, where samples differ in them.

        Returns:
            (n,) int64 numbers of components, and (n,) int64 which of `samples` each belongs to.
        """
        assert self.ends is not None
        stops = self.ends[samples].astype(np.int64)
        starts = np.where(samples > 0, self.ends[samples - 1], 0)
        rows = np.repeat(np.arange(len(samples)), stops - starts)
        before = np.cumsum(stops - starts) - (stops - starts)
        return np.arange(len(rows)) + (starts - before)[rows], rows

    def sample(self, component: int) -> int:
        """The number of the sample that one component belongs to."""
        if self.ends is None:
            return component // len(self.codes)
        return int(np.searchsorted(self.ends, component, side="right"))

    def code(self, component: int) -> int:
        """The extension code of one component."""
        return int(self.codes[component % len(self.codes) if self.ends is None else component])

    def first(self, codes: Sequence[int]) -> Array | int:
        """For every sample the number of its first component with one of these codes.

        Returns:
            (samples,) int32 or int64, -1 where a sample has none; or, where all samples have the same components,
            the one place within each, -1 for none.
        """
        hits = np.flatnonzero(np.isin(self.codes, np.asarray(codes, self.codes.dtype)))
        if self.ends is None:
            return int(hits[0]) if len(hits) else -1
        out = np.full(len(self), -1, np.int32 if len(self.blocks) < 2**31 else np.int64)
        samples = np.searchsorted(self.ends, hits, side="right")
        out[samples[::-1]] = hits[::-1]  # of several the first is written last
        return out


def build_table(
    extensions: Sequence[str],
    codes: _UnsignedArray,
    counts: Int64Array,
    blocks: Array,
    sizes: Array,
    keys: Keys | None,
) -> SampleTable:
    """A table in its smallest form.

    Args:
        extensions: By code.
        codes: (components,).
        counts: (samples,) components of each, at least 1.
        blocks: (components,).
        sizes: (components,).
        keys: Names of the samples.
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
    """Numbers that are not negative, in 4 bytes each where they fit."""
    fits = not len(numbers) or int(numbers.max()) < 2**32
    return numbers.astype(np.uint32 if fits else np.int64, copy=False)


def group_members(members: Iterable[Member]) -> SampleTable:
    """The samples of an archive, from its members in their order."""
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
    """Codes below `extensions`, in as few bytes as that needs."""
    return codes.astype(np.uint8 if extensions <= 1 << 8 else np.uint16 if extensions <= 1 << 16 else np.uint32)
