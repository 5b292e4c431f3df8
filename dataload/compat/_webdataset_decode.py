"""How WebDataset's ``decode()`` makes values of components, by dataload's decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from dataload._util.optional import load_optional
from dataload.codecs.decoders import DECODERS, decode_image
from dataload.errors import ConfigError, CorruptFileError, closest

__all__ = ["Decode", "Handler", "handle_extension", "image_handler"]

Handler: TypeAlias = Callable[[str, bytes], Any]
"""``f(".extension", data)``; None means that it does not decode this one."""

_BASIC = {
    **dict.fromkeys(("txt", "text", "transcript"), "txt"),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), "cls"),
    **dict.fromkeys(("json", "jsn"), "json"),
    "npy": "npy",
    "npz": "npz",
}
_UNDECODED = frozenset(("cbor", "gz", "mp", "msg", "pickle", "pkl", "pth", "pyd", "tb", "ten"))
_IMAGES = frozenset((*DECODERS["image"].extensions, "apng", "dib", "ico", "jfif", "jp2", "jpe", "pcx", "tga"))
# Name -> what it becomes (an array, a tensor, a picture), its colours, and "8" where numbers stay bytes.
_SPECS = {
    **{
        f"{kind}{colours}{bits}": (kind, colours, bits)
        for kind in ("", "torch")
        for colours in ("l", "rgb")
        for bits in ("", "8")
    },
    "torch": ("torch", "rgb", ""),
    "pil": ("pil", "rgb", "8"),
    "pilrgb": ("pil", "rgb", "8"),
    "pill": ("pil", "l", "8"),
}


@dataclass(frozen=True, slots=True)
class Decode:
    """Decodes the components of a sample: the first handler that does not give None, else what the extension says.

    Attributes:
        handlers: ``f(".extension", bytes)``.
        only: Components to decode; None means all.
        partial: Leave alone what is not bytes any more, instead of raising.
    """

    handlers: tuple[Handler, ...]
    only: frozenset[str] | None
    partial: bool

    def __call__(self, sample: Any) -> dict[str, Any]:
        """The decoded sample."""
        if not isinstance(sample, dict):
            raise TypeError(f"decode() takes samples as dicts, got {type(sample).__name__}: call it before to_tuple()")
        return {name: self._value(name, value, sample) for name, value in sample.items()}

    def _value(self, name: str, value: Any, sample: Mapping[str, Any]) -> Any:
        if name.startswith("__") or (self.only is not None and name not in self.only):
            return value
        if not isinstance(value, bytes):
            if self.partial:
                return value
            raise TypeError(
                f"component {name!r} is {type(value).__name__}, not bytes: decode once, or with partial=True"
            )
        try:
            return self._decode(name, value)
        except CorruptFileError as error:
            raise CorruptFileError(f"component {name!r} of sample {sample.get('__key__')!r}: {error}") from error

    def _decode(self, name: str, data: bytes) -> Any:
        for handler in self.handlers:
            value = handler(f".{name}", data)
            if value is not None:
                return value
        extension = name.rpartition(".")[2]
        if extension in _UNDECODED:
            raise ConfigError(
                f"component {name!r}: nothing here decodes (or unpickles) .{extension}: pass what does, "
                f"decode(handle_extension({extension!r}, function)), or leave it out with only=",
                key="decode",
                value=name,
            )
        return DECODERS[_BASIC[extension]].decode(data) if extension in _BASIC else data


def handle_extension(extensions: str, function: Callable[[bytes], Any]) -> Handler:
    """A handler for `Decode` that calls `function` for components of these extensions, separated by spaces."""
    return partial(_call_for, [extension.split(".") for extension in extensions.lower().split()], function)


def _call_for(extensions: list[list[str]], function: Callable[[bytes], Any], key: str, data: bytes) -> Any:
    parts = key.lower().split(".")
    return function(data) if any(parts[-len(wanted) :] == wanted for wanted in extensions) else None


def image_handler(spec: str) -> Handler:
    """A handler for `Decode` that decodes images as WebDataset's ``"rgb"``, ``"torchrgb8"``, ``"pil"`` and so on.

    Raises:
        ConfigError: There is no such name, or it keeps transparency.
    """
    if spec not in _SPECS:
        alpha = (
            ", transparency is dropped: pass handle_extension('png', function)"
            if spec.endswith(("rgba", "rgba8"))
            else ""
        )
        raise ConfigError(f"decode({spec!r}): {closest(spec, _SPECS)}{alpha}", key="decode", value=spec)
    return partial(_image, spec)


def _image(spec: str, key: str, data: bytes) -> Any:
    if key.rpartition(".")[2].lower() not in _IMAGES:
        return None
    kind, colours, bits = _SPECS[spec]
    image: Any = decode_image(data)
    if colours == "l" or kind == "pil":
        picture = load_optional("PIL.Image", needed_by=f"decode({spec!r})", extra="tar", package="pillow").fromarray(
            image
        )
        picture = picture.convert("L") if colours == "l" else picture
        image = picture if kind == "pil" else np.array(picture)
    if not bits:
        image = image.astype(np.float32) / 255.0
    if kind == "torch":
        torch = load_optional("torch", needed_by=f"decode({spec!r})", extra="torch")
        image = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1) if image.ndim == 3 else image))
    return image
