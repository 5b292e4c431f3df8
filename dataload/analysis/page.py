"""Pages of batches and records: one HTML file without scripts, which asks no network.

Everything in a record is text to escape, or pixels and samples to encode again.
None of its bytes reach the page unchanged.
"""

from __future__ import annotations

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dataload._util.arrays import as_array
from dataload.analysis.shown import (
    Shown,
    ShownRow,
    as_integers,
    columns_of,
    describe_column,
    describe_record,
    overview,
    preview,
)
from dataload.catalog.statistics import FieldStatistics
from dataload.codecs.audio import decode_audio, decode_rate, rate_field
from dataload.codecs.decoders import decode_image
from dataload.errors import DataloadError, printable
from dataload.types import Array

Pixels: TypeAlias = npt.NDArray[np.uint8]

_LEAST_SIDE = 8  # smaller arrays are read more easily as numbers
_IMAGE_LIMIT = 1 << 28  # bytes of memory to decode one image with: 22 megapixels
_AUDIO_LIMIT = 1 << 26
_AUDIO_SECONDS = 30
_LEAST_SECONDS = 0.01  # fewer numbers are features of a record
_RATES = range(1000, 400_001)


class Audio(NamedTuple):
    """Samples, (frames, channels) float32 in [-1, 1], and frames per second."""

    samples: npt.NDArray[np.float32]
    rate: int


def find_image(value: Any) -> Pixels | None:
    """Return a value as an image, (height, width, 3) uint8; None if it is none."""
    # Images are the bytes of an image file; and arrays of uint8, or of floats with three channels, of shape (height,
    # width), (height, width, 1 or 3) or (1 or 3, height, width). Floats outside [0, 1] are scaled to their range.
    if isinstance(value, (bytes, memoryview)):
        try:
            return decode_image(cast("bytes", value), limit=_IMAGE_LIMIT)
        except DataloadError:  # no image, a broken one, or no library to decode it
            return None
    if not isinstance(value, np.ndarray) or value.ndim not in (2, 3) or not value.size:
        return None
    array = cast("Array", value)
    if array.ndim == 3 and array.shape[2] not in (1, 3):
        array = np.moveaxis(array, 0, 2)
    channels = array.shape[2] if array.ndim == 3 else 1
    kinds = "uf" if channels == 3 else "u"
    if channels not in (1, 3) or min(array.shape[:2]) < _LEAST_SIDE or array.dtype.kind not in kinds:
        return None
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return None
    return np.broadcast_to(_to_bytes(array).reshape(*array.shape[:2], channels), (*array.shape[:2], 3))


def _to_bytes(array: Array) -> Pixels:
    if array.dtype.kind == "u":
        return array.astype(np.uint8, copy=False)
    floats = np.nan_to_num(array.astype(np.float32), posinf=0, neginf=0)
    low, high = float(floats.min()), float(floats.max())
    if low < 0 or high > 1:
        floats = (floats - low) / max(high - low, 1e-9)
    return (floats * 255).astype(np.uint8)


def find_audio(record: Any, name: str) -> Audio | None:
    """Return the audio in the field of a record; None if it is none."""
    # Audio is the bytes of an audio file, or a float array of 10 ms or more, (frames,) or (frames, channels), in a
    # record with its sample rate, see `rate_field`.
    value: Any = as_array(record[name])
    if isinstance(value, (bytes, memoryview)):
        try:
            return Audio(decode_audio(cast("bytes", value), limit=_AUDIO_LIMIT), decode_rate(cast("bytes", value)))
        except DataloadError:
            return None
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.ndim not in (1, 2) or not value.size:
        return None
    fields = cast("Mapping[str, Any]", record)
    rate = next((fields[each] for each in (rate_field(name), "sample_rate") if each in fields), None)
    samples = cast("Array", value).reshape(len(value), -1)
    try:
        rate = int(np.asarray(rate).reshape(-1)[0]) if rate is not None else 0
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if rate not in _RATES or samples.shape[1] > 2 or len(samples) < _LEAST_SECONDS * rate:
        return None
    return Audio(samples.astype(np.float32), rate)


def thumbnail(image: Pixels, side: int) -> Pixels:
    """Return an image reduced by a whole factor, so that neither side is longer than `side`: means of its pixels."""
    factor = -(-max(image.shape[:2]) // side)
    if factor <= 1:
        return np.ascontiguousarray(image)
    factors = min(factor, image.shape[0]), min(factor, image.shape[1])
    height, width = image.shape[0] // factors[0], image.shape[1] // factors[1]
    tiles = image[: height * factors[0], : width * factors[1]].reshape(height, factors[0], width, factors[1], 3)
    return tiles.mean(axis=(1, 3)).astype(np.uint8)


def to_png(image: Pixels) -> bytes:
    """Return the PNG file of an image, (height, width, 3) uint8."""
    height, width, _ = image.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with the number of its filter: none
    lines[:, 1:] = image.reshape(height, 3 * width)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 6)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def to_wav(audio: Audio) -> bytes:
    """Return the WAV file of the first half minute of some audio, in 16 bits."""
    samples = np.nan_to_num(audio.samples[: _AUDIO_SECONDS * audio.rate])
    data = (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
    channels = audio.samples.shape[1]
    form = struct.pack("<HHIIHH", 1, channels, audio.rate, audio.rate * channels * 2, channels * 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


_SIDE = 192  # pixels of an image's longer side
_SMALL = 112
_CHARACTERS = 2000  # of a text
_TOKENS = 400
_BARS = 30
_PLAN_COLUMNS = {  # drawn as such
    *("stream_id", "offset", "is_first", "valid", "segment_ids", "positions", "position_ids", "seq_idx"),
}
_IDS, _BESIDE = "input_ids", ("labels", "attention_mask")
_STRIP = 6  # images of a row with several
_COLOURS = 6  # of segments, in page.css

Words: TypeAlias = Callable[[int], str]
"""The text of a token."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of batches or records."""

    title: str
    about: Sequence[str]
    shown: Sequence[Shown]
    words: Words | None = None  # the texts of tokens, if a tokenizer is known
    statistics: Mapping[str, FieldStatistics] | None = None  # of the fields, drawn as histograms

    def to_html(self) -> str:
        links = [f'<a href="#s{n}">{_text(each.title)}</a>' for n, each in enumerate(self.shown)]
        nav = f"<nav>{''.join(links)}</nav>" if len(links) > 1 else ""
        about = "".join(f'<p class="soft where">{_text(line)}</p>' for line in self.about)
        sections = "".join(self._section(n, each) for n, each in enumerate(self.shown))
        style = (files("dataload.analysis") / "page.css").read_text(encoding="utf-8")
        histograms = _histograms(self.statistics) if self.statistics else ""
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{_text(self.title)}</title><style>{style}</style></head>"
            f"<body><h1>{_text(self.title)}</h1>{about}{nav}{histograms}{sections}</body></html>\n"
        )

    def _section(self, number: int, shown: Shown) -> str:
        fields = overview(shown, _images) if shown.batch is None else _fields_table(shown.batch)
        rows = "".join(_row(each, shown, self.words) for each in shown.rows)
        left = shown.total - len(shown.rows)
        more = f'<p class="soft">and {left:,} more rows, which --rows adds</p>' if left else ""
        wide = " wide" if any(_is_wide(row.values) for row in shown.rows) else ""
        return f'<h2 id="s{number}">{_text(shown.title)}</h2>{fields}<div class="rows{wide}">{rows}</div>{more}'


def _text(value: str) -> str:
    """Escape text, and control characters in it."""
    return escape(printable(value, None, kept="\n\t"))


def _fields_table(batch: Any) -> str:
    lines: list[str] = []
    for name, column in columns_of(batch):
        cells = [name or "batch", *describe_column(column)]
        lines.append(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>")
    head = "<tr><th>field</th><th>dtype</th><th>shape</th><th>values</th></tr>"
    return f'<div class="scroll"><table>{head}{"".join(lines)}</table></div>'


def _is_wide(values: Any) -> bool:
    """Return whether a row needs the width of the page, as packed ones do."""
    return isinstance(values, Mapping) and _segments(cast("Mapping[str, Any]", values)) is not None


def _segments(columns: Mapping[str, Any]) -> Array | None:
    """Return the segment of each element of a packed row; None if it is none."""
    return found if (found := as_integers(columns.get("segment_ids"))) is not None and found.size else None


def _row(row: ShownRow, shown: Shown, words: Words | None) -> str:
    values: Any = row.values
    columns = cast("Mapping[str, Any]", values) if isinstance(values, Mapping) else {}
    badges = [f'<span class="badge">{_text(text)}</span>' for text in _badges(row, columns)]
    where = "".join(f'<p class="soft where">{_text(describe_record(record))}</p>' for record in row.records[:_BARS])
    if len(row.records) > _BARS:
        where += f'<p class="soft where">and {len(row.records) - _BARS} more records</p>'
    segments = _segments(columns)
    bar = "" if segments is None else _segment_bar(segments)
    is_planned = segments is not None or {"stream_id", "valid"} & columns.keys()
    drawn = (_PLAN_COLUMNS if is_planned else set[str]()) | _drawn_with_tokens(columns)
    fields = "".join(
        f"<dt>{_text(name)}</dt><dd>{_value(values, name, value, segments, words, shown.classes.get(name, ()))}</dd>"
        for name, value in columns_of(values)
        if name not in drawn
    )
    kind = ' class="filler"' if row.filler else ""
    title = f"record {row.records[0].index:,}" if shown.batch is None else f"row {row.row}"
    return f"<article{kind}><h3>{title}{''.join(badges)}</h3>{where}{bar}<dl>{fields}</dl></article>"


def _badges(row: ShownRow, columns: Mapping[str, Any]) -> Iterable[str]:
    if row.filler:
        yield "filler"
    if {"stream_id", "offset", "is_first"} <= columns.keys():
        yield f"stream {columns['stream_id']}, from record {columns['offset']}"
        first = np.asarray(as_array(columns["is_first"])).reshape(-1)
        yield "begins here" if first[:1].any() else f"continues row {row.row} of the step before"
        if first[1:].any():
            yield f"another begins at {int(np.flatnonzero(first[1:])[0]) + 1}"


def _segment_bar(ids: Array) -> str:
    """Draw the segments of a packed row."""
    cuts = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    parts: list[str] = []
    for start, stop in pairwise(cuts):
        colour = f' class="c{(int(ids[start]) - 1) % _COLOURS}"' if ids[start] else ""
        parts.append(f'<i{colour} style="width:{100 * (stop - start) / max(1, len(ids)):.3f}%"></i>')
    return f'<div class="bar" title="{len(np.unique(ids[ids > 0]))} segments">{"".join(parts)}</div>'


def _value(
    record: Any, name: str, value: Any, segments: Array | None, words: Words | None, classes: Sequence[str]
) -> str:
    """Return one value of a row: pictures, a player, text, tokens or numbers."""
    value = as_array(value)
    media = _images(value) or _player(record, name)
    if media:
        return media
    if isinstance(value, bytes) and (text := _as_text(value)) is not None:
        value = text
    if isinstance(value, str):
        more = "..." if len(value) > _CHARACTERS else ""
        return f"<pre>{_text(value[:_CHARACTERS])}{more}</pre>"
    numbers = as_integers(value)
    if numbers is not None and numbers.size > 1:
        return _tokens(numbers, _kinds(record, name, len(numbers), segments), words)
    return f'<span class="mono">{_text(preview(value, classes))}</span>'


def _images(value: Any) -> str:
    """Return an image, or the first images of a row of several; "" if a value is none."""
    several = isinstance(value, np.ndarray) and value.ndim == 4
    images = [image for each in (value[:_STRIP] if several else [value]) if (image := find_image(each)) is not None]
    if not images:
        return ""
    height, width = images[0].shape[:2]
    count = f"{len(images)} of {len(cast('Any', value))}: " if several else ""
    drawn = "".join(map(_image, images))
    return f'<div class="strip">{drawn}</div><span class="soft">{count}{height} x {width}</span>'


def _player(record: Any, name: str) -> str:
    """Return a player of the audio in a field; "" without audio."""
    audio = find_audio(record, name) if isinstance(record, Mapping) and name in record else None
    if audio is None:
        return ""
    data = b64encode(to_wav(audio)).decode()
    text = f"{len(audio.samples) / audio.rate:.2f} s, {audio.rate:,} Hz, channels: {audio.samples.shape[1]}"
    return f'<audio controls src="data:audio/wav;base64,{data}"></audio><span class="soft">{text}</span>'


def _image(image: Pixels) -> str:
    data = b64encode(to_png(thumbnail(image, _SIDE))).decode()
    times = _SMALL // max(image.shape[:2])  # enlarge small ones
    size = f' width="{times * image.shape[1]}" height="{times * image.shape[0]}"' if times > 1 else ""
    return f'<img alt=""{size} src="data:image/png;base64,{data}">'


def _as_text(value: bytes) -> str | None:
    """Return bytes as text, if they look like it."""
    try:
        text = bytes(value[: _CHARACTERS + 4]).decode(errors="strict" if len(value) <= _CHARACTERS else "ignore")
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() or all(c.isprintable() or c in "\n\r\t" for c in text) else None


def _labels_of(columns: Mapping[str, Any], name: str) -> tuple[Array | None, Array | None]:
    """Return labels and mask beside a field of tokens, ``input_ids``, if the labels are its tokens or none."""
    found: list[Array | None] = [None, None]
    if name.endswith(_IDS) and name in columns and (ids := as_integers(columns[name])) is not None:
        for at, other in enumerate(_BESIDE):
            column = as_integers(columns.get(name.removesuffix(_IDS) + other))
            found[at] = column if column is not None and column.shape == ids.shape else None
        if found[0] is not None and bool(((found[0] >= 0) & (found[0] != ids)).any()):
            found[0] = None
    return found[0], found[1]


def _drawn_with_tokens(columns: Mapping[str, Any]) -> set[str]:
    """Return the labels and masks that the colours of tokens show."""
    ids = [name for name in map(str, columns) if name.endswith(_IDS)]
    beside = [(name.removesuffix(_IDS), _labels_of(columns, name)) for name in ids]
    return {stem + _BESIDE[at] for stem, found in beside for at, column in enumerate(found) if column is not None}


def _kinds(record: Any, name: str, length: int, segments: Array | None) -> list[str]:
    """Return the classes of tokens: a colour for each segment, and what is learnt and what is padding."""
    labels, mask = _labels_of(record, name) if isinstance(record, Mapping) else (None, None)
    ids = segments if segments is not None and len(segments) == length else mask
    kinds = [""] * length
    for at in range(min(length, _TOKENS)):
        if ids is not None:
            kinds[at] = "pad" if not ids[at] else "" if ids is mask else f"t{(int(ids[at]) - 1) % _COLOURS}"
        if labels is not None and labels[at] >= 0:
            kinds[at] = f"{kinds[at]} learnt".lstrip()
    return kinds


def _tokens(values: Array, kinds: Sequence[str], words: Words | None) -> str:
    """Draw numbers one by one, to show the boundaries of tokens; a line underlines each segment."""
    parts: list[str] = []
    for value, kind in zip(values[:_TOKENS].tolist(), kinds, strict=False):
        named = words is not None and value >= 0  # -100 is no token
        word, title = (words(value), f' title="{value}"') if named and words else (str(value), "")
        kind = kind and f' class="{kind}"'
        parts.append(f"<span{kind}{title}>{_text(word)}</span>")
    more = f' <span class="soft">and {len(values) - _TOKENS:,} more</span>' if len(values) > _TOKENS else ""
    return f'<div class="tokens mono">{"".join(parts)}</div>{more}'


def _histograms(statistics: Mapping[str, FieldStatistics]) -> str:
    """Return a histogram of the labels or of the shapes of each field that has several."""
    drawn: list[str] = []
    for name, field in statistics.items():
        counts: dict[str, int] = {}
        what = "value"
        if field.labels and len(field.labels) > 1:
            counts = {str(label): count for label, count in field.labels.items()}
        elif field.shapes and len(field.shapes) > 1:
            what, counts = "length" if all(len(shape) == 1 for shape in field.shapes) else "shape", {}
            for shape, count in sorted(field.shapes.items()):
                counts[" x ".join(map(str, shape))] = count
        if counts:
            drawn.append(f"<article><h3>{_text(name)}: records per {what}</h3>{_bars(counts)}</article>")
    return f'<h2>The whole data set</h2><div class="rows">{"".join(drawn)}</div>' if drawn else ""


def _bars(counts: Mapping[str, int]) -> str:
    """Draw horizontal bars; neighbours share one if there are many."""
    items = [*counts.items()]
    group = math.ceil(len(items) / _BARS)
    shared: list[tuple[str, int]] = []
    for start in range(0, len(items), group):
        part = items[start : start + group]
        label = part[0][0] if len(part) == 1 else f"{part[0][0]} to {part[-1][0]}"
        shared.append((label, sum(count for _, count in part)))
    most = max(count for _, count in shared)
    lines = [
        f'<text x="88" y="{18 * n + 13}" text-anchor="end">{_text(printable(label, 14))}</text>'
        f'<rect class="hist" x="94" y="{18 * n + 3}" width="{max(1, 120 * count / most):.1f}" height="12"/>'
        f'<text x="{99 + 120 * count / most:.1f}" y="{18 * n + 13}">{count:,}</text>'
        for n, (label, count) in enumerate(shared)
    ]
    return f'<svg viewBox="0 0 280 {18 * len(shared) + 4}" role="img">{"".join(lines)}</svg>'
