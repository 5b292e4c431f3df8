"""The stages of a WebDataset pipeline: pure functions of a sample or batch. They pickle if the user's functions do."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from dataload._util.optional import load_optional
from dataload.codecs.decoders import IMAGE_KINDS, decode_image, known_extension
from dataload.errors import ConfigError, CorruptFileError, closest
from dataload.transforms import SampleContext

Handler: TypeAlias = Callable[[str, bytes], Any]
"""A function ``f(".extension", data)`` that returns the decoded value, or None to leave it to the next handler."""

# Extensions that WebDataset decodes in addition to dataload's, as the extension of dataload that means the same.
_SYNONYMS = {"transcript": "txt", "index": "cls", "inx": "cls", "id": "cls", "jsn": "json"}
_UNDECODED = frozenset(("cbor", "gz", "mp", "msg", "pickle", "pkl", "pth", "pyd", "tb", "ten"))
_IMAGES = {
    **IMAGE_KINDS,
    "apng": "PNG",
    "dib": "DIB",
    "ico": "ICO",
    "jfif": "JPEG",
    "jp2": "JPEG2000",
    "jpe": "JPEG",
    "pcx": "PCX",
    "tga": "TGA",
}
# Type of the result (none is an array), colours (none is RGB), and "8" if values stay bytes.
_SPECS = ["l", "l8", "rgb", "rgb8", "torch", "torchl", "torchl8", "torchrgb", "torchrgb8", "pil", "pill", "pilrgb"]


class Stage:
    """A stage of a pipeline: a function of a sample or batch, with the name that error messages show."""

    def __init__(self, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        self.__qualname__ = name
        self._function = function
        self._arguments = arguments

    def __call__(self, sample: Any) -> Any:
        return self._function(sample, *self._arguments)


def add_url(
    paths: Sequence[str], ends: Sequence[int], sample: dict[str, Any], context: SampleContext
) -> dict[str, Any]:
    """Add the path of the sample's archive; `ends` are the cumulative numbers of samples in the archives."""
    url = paths[bisect.bisect_right(ends, context.index)]
    return {"__key__": sample["__key__"], "__url__": url, "__local_path__": url, **sample}


def run(stages: Sequence[Callable[[Any], Any]], batch: Any) -> Any:
    """Pass `batch` through all `stages`."""
    for stage in stages:
        batch = stage(batch)
    return batch


def apply(sample: Any, function: Callable[[Any], Any]) -> Any:
    """Implement ``map(function)``. A dict keeps its ``__key__``."""
    result = function(sample)
    if result is None:
        raise TypeError(
            "the function of map() returned None: WebDataset drops such a sample, but here every sample has a "
            "position; raise an exception instead, with handler=warn_and_continue"
        )
    if isinstance(sample, dict) and isinstance(result, dict):
        result["__key__"] = sample.get("__key__")
    return result


def apply_by_name(sample: Mapping[str, Any], functions: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Implement ``map_dict(name=function)``."""
    return {**sample, **{name: function(sample[name]) for name, function in functions.items()}}


def apply_by_position(sample: Sequence[Any], functions: Sequence[Callable[[Any], Any] | None]) -> tuple[Any, ...]:
    """Implement ``map_tuple(function, ...)``. None leaves a value alone, as does a missing function."""
    values = list(sample)
    for position, function in enumerate(functions[: len(values)]):
        if function is not None:
            values[position] = function(values[position])
    return tuple(values)


def rename(sample: Mapping[str, Any], names: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Implement ``rename(new="old")``. If `keep`, components without a new name stay."""
    replaced = {old for choices in names.values() for old in _choices(choices)}
    kept = {name: value for name, value in sample.items() if name not in replaced} if keep else {}
    return {**kept, **{name: _first(sample, choices, required=True) for name, choices in names.items()}}


def to_tuple(sample: Mapping[str, Any], names: Iterable[Any], required: bool) -> tuple[Any, ...]:
    """Implement ``to_tuple("jpg;png", "cls")``."""
    return tuple(_first(sample, choices, required=required) for choices in names)


def _choices(names: Any) -> list[str]:
    return names.split(";") if isinstance(names, str) else list(names)


def _first(sample: Mapping[str, Any], names: Any, *, required: bool) -> Any:
    for name in _choices(names):
        if name in sample:
            return sample[name]
    if required:
        raise ValueError(f"sample {sample.get('__key__')!r} has none of {names!r}; it has {', '.join(sample)}")
    return None


def collate(samples: Sequence[Any]) -> Any:
    """Collate as WebDataset does: stack numbers, arrays and tensors, and make lists of everything else."""
    first = samples[0]
    if isinstance(first, dict):
        for sample in samples:
            if sample.keys() != first.keys():
                differing = ", ".join(sorted(map(str, sample.keys() ^ first.keys())))
                raise ConfigError(f"samples of a batch have different components ({differing}): choose with to_tuple()")
        return {name: _stack([sample[name] for sample in samples], name) for name in first}
    return tuple(_stack(list(column), position) for position, column in enumerate(zip(*samples, strict=True)))


def _stack(values: list[Any], name: Any) -> Any:
    first = values[0]
    if isinstance(first, (int, float)):
        return np.array(values)
    if isinstance(first, np.ndarray):
        stack: Any = np.stack
    elif type(first).__module__.partition(".")[0] == "torch":
        stack = load_optional("torch", needed_by="batched()", extra="torch").stack
    else:
        return values
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) > 1:
        raise ConfigError(
            f"component {name!r} has the shapes {shapes} in one batch: make them equal, or pass collation_fn="
        )
    return stack(values)


def decode(sample: Any, handlers: Sequence[Handler], only: frozenset[str] | None, keep_decoded: bool) -> dict[str, Any]:
    """Implement ``decode()`` for all components, or for those in `only`.

    A component that is not bytes was decoded before: it stays if `keep_decoded`, and is an error otherwise.
    """
    if not isinstance(sample, dict):
        raise TypeError(f"decode() takes samples as dicts, got {type(sample).__name__}: call it before to_tuple()")
    decoded = dict(sample)
    for name, data in sample.items():
        if name.startswith("__") or (only is not None and name not in only):
            continue
        if isinstance(data, bytes):
            try:
                decoded[name] = _decode_component(name, data, handlers)
            except CorruptFileError as error:
                raise CorruptFileError(f"component {name!r} of sample {sample.get('__key__')!r}: {error}") from error
        elif not keep_decoded:
            raise TypeError(
                f"component {name!r} is {type(data).__name__}, not bytes: decode once, or with partial=True"
            )
    return decoded


def _decode_component(name: str, data: bytes, handlers: Sequence[Handler]) -> Any:
    """Return the first value that a handler returns, else the value for the extension."""
    for handler in handlers:
        value = handler(f".{name}", data)
        if value is not None:
            return value
    extension = name.rpartition(".")[2]
    if extension in _UNDECODED:
        raise ConfigError(
            f"component {name!r}: there is no decoder for .{extension}, and nothing is unpickled: pass one with "
            f"decode(handle_extension({extension!r}, function)), or leave the component out with only=",
            key="decode",
            value=name,
        )
    decoder = known_extension(_SYNONYMS.get(extension, extension))
    return data if decoder is None or decoder.name in ("audio", "image") else decoder.decode(data)


def handle_extension(extensions: str, function: Callable[[bytes], Any]) -> Handler:
    """Return a handler for ``decode()`` that calls `function` for components with these space-separated extensions."""
    return partial(_call_for, [extension.split(".") for extension in extensions.lower().split()], function)


def _call_for(extensions: list[list[str]], function: Callable[[bytes], Any], key: str, data: bytes) -> Any:
    parts = key.lower().split(".")
    return function(data) if any(parts[-len(wanted) :] == wanted for wanted in extensions) else None


def image_handler(spec: str) -> Handler:
    """Return a handler for ``decode()`` that decodes images as WebDataset's ``"rgb"``, ``"torchrgb8"`` or ``"pil"``."""
    if spec not in _SPECS:
        is_alpha = spec.endswith(("rgba", "rgba8"))
        hint = "; for transparency, pass handle_extension('png', function)" if is_alpha else ""
        raise ConfigError(f"decode({spec!r}): {closest(spec, _SPECS)}{hint}", key="decode", value=spec)
    return partial(_image, spec)


def _image(spec: str, key: str, data: bytes) -> Any:
    kind = _IMAGES.get(key.rpartition(".")[2].lower())
    if kind is None:
        return None
    image: Any = decode_image(data, kind=kind)
    is_picture, is_grey = spec.startswith("pil"), spec.removeprefix("pil").rstrip("8").endswith("l")
    if is_picture or is_grey:
        pillow = load_optional("PIL.Image", needed_by=f"decode({spec!r})", extra="tar", package="pillow")
        picture = pillow.fromarray(image)
        picture = picture.convert("L") if is_grey else picture
        if is_picture:
            return picture
        image = np.array(picture)
    if not spec.endswith("8"):
        image = image.astype(np.float32) / 255.0
    if spec.startswith("torch"):
        torch = load_optional("torch", needed_by=f"decode({spec!r})", extra="torch")
        image = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1) if image.ndim == 3 else image))
    return image
