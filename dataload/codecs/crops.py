"""Transforms of images: parts of them, resized, from the bytes of their files."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from dataload._util.arrays import MAX_RECORD_BYTES, pooled_empty
from dataload._util.lazy import load_optional
from dataload._util.settings import Above, Least, as_tuple, check_settings, setting_error
from dataload.codecs.decoders import check_pixels, decode_image, is_jpeg, load_simplejpeg, size_in_header
from dataload.errors import ConfigError, CorruptFileError, closest
from dataload.transforms import SampleContext
from dataload.types import Array

_TRIES = 10  # of random crops, as many as torchvision's
_SHRINKS = (8, 4, 2)  # libjpeg-turbo decodes at these fractions with SIMD; at others it is slower than at full size
_DTYPES = ("uint8", "uint16", "int16", "float32", "float64")  # that OpenCV resizes
_CHANNELS = 4  # at most; more of them at the end, and these at the beginning, are an image with channels first
_Box = tuple[int, int, int, int]  # top, left, height, width


@dataclass(frozen=True, kw_only=True)
class _Crop:
    """The base class of crops; see `RandomResizedCrop`."""

    size: int | tuple[int, int]
    field: str = "jpg"
    exact: bool = False
    max_record_bytes: Annotated[int, Least(1)] = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        sides = as_tuple(self._sides)
        if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in sides):
            raise setting_error("size", self.size, "must be a number of pixels, or height and width")
        check_settings(self)

    @property
    def _sides(self) -> tuple[int, int]:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def _cut(self, sample: Any, box: Callable[[int, int], _Box], *, mirrored: bool = False) -> dict[str, Any]:
        """Return the sample with a part of its image, (height, width, 3) uint8, which `box` chooses by its size."""
        if not isinstance(sample, Mapping) or self.field not in sample:
            found = closest(self.field, [*map(str, sample)]) if isinstance(sample, Mapping) else type(sample).__name__
            raise ConfigError(f"the sample has no field {self.field!r}: {found}", key="field", value=self.field)
        pixels, (top, left, height, width) = self._decoded(sample[self.field], box)
        cv2 = load_optional("cv2", needed_by=type(self).__name__, extra="images", package="opencv-python-headless")
        image = cv2.resize(pixels[top : top + height, left : left + width], self._sides[::-1])
        image = cv2.flip(image, 1) if mirrored else image
        return {**sample, self.field: image.reshape(*self._sides, *pixels.shape[2:])}  # OpenCV drops a single channel

    def _decoded(self, data: Any, box: Callable[[int, int], _Box]) -> tuple[Array, _Box]:
        """Return an image, perhaps smaller than stored, and where in it the chosen part is."""
        if data is None or (isinstance(data, np.ndarray) and not data.size):
            raise CorruptFileError(f"the sample has no image in field {self.field!r}")
        if isinstance(data, bytearray):
            data = bytes(data)
        if not isinstance(data, (bytes, memoryview)):
            pixels = self._checked(data)
            return pixels, box(*pixels.shape[:2])
        size = size_in_header(data) if is_jpeg(data) else None
        if size is None:
            pixels = decode_image(data, limit=self.max_record_bytes)
            return pixels, box(*pixels.shape[:2])
        check_pixels(*size, self.max_record_bytes)
        top, left, height, width = box(*size)
        wanted = self._sides
        fits = (by for by in _SHRINKS if height >= by * wanted[0] and width >= by * wanted[1])
        by = 1 if self.exact else next(fits, 1)
        small = -(-size[0] // by), -(-size[1] // by)
        # Recycled memory: a new block for each image costs more page faults than the rest of the transform.
        out = pooled_empty((*small, 3), np.uint8)
        try:
            load_simplejpeg().decode_jpeg(data, "RGB", min_height=small[0], min_width=small[1], buffer=out)
        except ValueError as error:
            raise CorruptFileError(f"a JPEG image cannot be decoded: {error}") from error
        return out, (top // by, left // by, height // by, width // by)

    def _checked(self, data: Any) -> Array:
        """Return pixels in this machine's byte order, which OpenCV takes for granted."""
        shape, dtype = getattr(data, "shape", ()), getattr(data, "dtype", None)
        is_image = isinstance(data, np.ndarray) and len(shape) in (2, 3) and data.dtype.name in _DTYPES
        if not is_image or (len(shape) == 3 and shape[0] <= _CHANNELS < shape[2]):
            found = type(data).__name__ if dtype is None else f"{type(data).__name__} of shape {shape} and {dtype}"
            raise ConfigError(
                f"{type(self).__name__} takes the bytes of an image's file, or pixels as an array (height, width, "
                f"channels) of {', '.join(_DTYPES)}; field {self.field!r} holds a {found}",
                key="field",
                value=self.field,
            )
        return data.astype(data.dtype.newbyteorder("="), copy=False)


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop(_Crop):
    """Crops a random part of each image, resizes it and mirrors some images, like torchvision's transforms.

    Open the data with ``decode=None``, so that the transform gets the encoded files. It decodes JPEG at an eighth, a
    quarter or half of its size where enough pixels remain, which halves the time for photographs of a few megapixels
    and aliases less than resizing from full size. The random numbers depend only on the seed, the epoch and the index.

    Examples:
        crop = RandomResizedCrop(size=224)
        loader = dataload.Loader(dataload.open("train.tar"), batch_size=256, shuffle=True, transform=crop)

    Attributes:
        size: Pixels of a side, or height and width.
        field: Field that holds the file of an image, or its pixels, (height, width, channels) uint8.
        scale: Least and greatest share of the image's area.
        ratio: Least and greatest width by height.
        mirrored: Share of images that are mirrored.
        exact: Always decode at full size. The decoded pixels then equal Pillow's, before OpenCV resizes them.
        max_record_bytes: See the options of formats.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    mirrored: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("scale", 1.0), ("ratio", math.inf)):
            given = as_tuple(getattr(self, name))
            if len(given) != 2 or not 0 < given[0] <= given[1] <= most:
                rule = f"must be two numbers that ascend, above 0 and up to {most}"
                raise setting_error(name, getattr(self, name), rule)
        if not 0 <= self.mirrored <= 1:
            raise setting_error("mirrored", self.mirrored, "must be a share of the images, from 0 to 1")

    def __call__(self, sample: Any, context: SampleContext) -> dict[str, Any]:
        """Return the sample with a part of its image."""
        draw = context.generator.random

        def box(height: int, width: int) -> _Box:
            (least, most), logs = self.scale, [math.log(each) for each in self.ratio]
            for _ in range(_TRIES):
                area, log, down, right = draw(4).tolist()
                area = height * width * (least + area * (most - least))
                ratio = math.exp(logs[0] + log * (logs[1] - logs[0]))
                rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
                if 0 < rows <= height and 0 < columns <= width:
                    return int(down * (height - rows + 1)), int(right * (width - columns + 1)), rows, columns
            return _centre(height, width, min(max(width / height, self.ratio[0]), self.ratio[1]))

        return self._cut(sample, box, mirrored=bool(draw() < self.mirrored))


@dataclass(frozen=True, kw_only=True)
class CenterCrop(_Crop):
    """Crops the centre of each image and resizes it, for validation; see `RandomResizedCrop`.

    Attributes:
        share: Share of the longest sides that fit; 224 / 256 is torchvision's `Resize(256)` and `CenterCrop(224)`.
    """

    share: Annotated[float, Above(0, 1)] = 224 / 256

    def __call__(self, sample: Any) -> dict[str, Any]:
        """Return the sample with the centre of its image."""
        ratio = self._sides[1] / self._sides[0]
        return self._cut(sample, lambda height, width: _centre(height, width, ratio, self.share))


def _centre(height: int, width: int, ratio: float, share: float = 1.0) -> _Box:
    """Return the largest central part with a ratio of width to height, or a share of its sides."""
    rows = max(1, round(share * min(height, width / ratio)))
    columns = max(1, round(share * min(width, height * ratio)))
    return (height - rows) // 2, (width - columns) // 2, rows, columns
