"""Map fields to file extensions, and back.

| value | is stored as | unless the field's own name gives the format |
|---|---|---|
| array, numpy scalar | ``name.npy`` | ``npy``, ``x.npy`` |
| int | ``name.cls`` | ``cls``, ``json``, ``x.cls`` |
| float, bool, list, dict | ``name.json`` | ``json``, ``x.json`` |
| str | ``name.txt`` | ``txt``, ``json``, ``x.txt`` |
| bytes | ``name``, unchanged | |

Decoding "auto" removes the added extension, so that a record is read back as it was written. A field whose own
name ends in a known extension (``x.txt``) loses it too; a lone extension (``jpg``, ``cls``) stays.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from dataload.codecs import npz
from dataload.codecs.audio import rate_field
from dataload.codecs.decoders import known_extension
from dataload.codecs.npy import build_npy
from dataload.errors import ConfigError


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
            groups.setdefault(_shorten(name) if name not in kept and known(name) else name, []).append(name)
        fields = {short: tuple(code for name in names for code in full[name]) for short, names in groups.items()}
        meeting = {name for short, names in groups.items() if len(names) > 1 and meet(fields[short]) for name in names}
        if not meeting:
            return fields
        kept |= meeting


def rate_fields(fields: Mapping[str, tuple[int, ...]], is_audio: Callable[[int], bool]) -> dict[str, tuple[int, ...]]:
    """Return the fields with the sample rates of those that are audio, each with the codes of its audio."""
    rates = {rate_field(name): codes for name, codes in fields.items() if all(map(is_audio, codes))}
    return {name: codes for name, codes in rates.items() if name not in fields}


def _shorten(name: str) -> str:
    return name.rpartition(".")[0] or name


def encode_field(name: str, value: Any) -> tuple[str, bytes]:
    """Return the extension and bytes of a value by the table above; raise a ConfigError if it cannot be stored."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return name, bytes(value)
    known = known_extension(name)
    kind = _kind(name, value)
    if known is not None and kind in _FITS.get(known.name, ()):
        return name, _encode(known.name, name, value)
    return f"{name}.{kind}", _encode(kind, name, value)


_FITS = {
    "cls": ("cls",),
    "json": ("json", "cls", "txt"),
    "npy": ("npy",),
    "npz": ("npz",),
    "txt": ("txt",),
}
"""Decoder named by a field -> kinds of values that it restores."""


def _kind(name: str, value: Any) -> str:
    """Return the extension for a value by its type."""
    if isinstance(value, (np.ndarray, np.generic)):
        return "npy"
    if isinstance(value, str):
        return "txt"
    if isinstance(value, int) and not isinstance(value, bool):
        return "cls"
    if isinstance(value, (bool, float, list, tuple, Mapping)):
        items = cast("Mapping[Any, Any]", value).values() if isinstance(value, Mapping) else ()
        return "npz" if any(isinstance(item, (np.ndarray, bytes)) for item in items) else "json"
    raise ConfigError(
        f"field {name!r}: a {type(value).__name__} cannot be stored in a tar archive; give an array, bytes, text, a "
        "number, or a value that JSON can represent",
        key=name,
    )


def _encode(kind: str, name: str, value: Any) -> bytes:
    try:
        if kind == "npy":
            return build_npy(np.asarray(value))
        if kind == "npz":
            return npz.encode(value)
        if kind == "json":
            return json.dumps(value).encode()
        return str(value).encode()
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:  # for example an object array, lone surrogates, or a set in a list
        raise ConfigError(f"field {name!r} cannot be stored as {kind}: {error}", key=name) from error
