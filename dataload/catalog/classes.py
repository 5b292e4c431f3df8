"""The names of classes: what the numbers in a field of labels stand for. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dataload.errors import ConfigError
from dataload.types import FieldSpec


def classes_of(fields: Mapping[str, FieldSpec]) -> dict[str, tuple[str, ...]]:
    """Return the names of classes, by field, as far as they are known."""
    return {name: spec.classes for name, spec in fields.items() if spec.classes is not None}


def with_classes(fields: Mapping[str, FieldSpec], classes: Mapping[str, tuple[str, ...]]) -> dict[str, FieldSpec]:
    """Return the fields, with names of classes added to those of integers that have none."""
    return {
        name: replace(spec, classes=classes[name])
        if name in classes and spec.classes is None and spec.dtype.startswith(("int", "uint"))
        else spec
        for name, spec in fields.items()
    }


def common_classes(parts: Iterable[tuple[str, Mapping[str, FieldSpec]]], key: str) -> dict[str, tuple[str, ...]]:
    """Return the names of classes by field; labels that mean other classes in other data are a ConfigError of `key`.

    `parts` are data that are read together: pairs of a name, for messages, and fields.
    """
    known: dict[str, tuple[str, tuple[str, ...]]] = {}
    for part, fields in parts:
        for name, classes in classes_of(fields).items():
            first, expected = known.setdefault(name, (part, classes))
            if classes != expected:
                message = f"field {name!r} stands for other classes in {first} than in {part}"
                raise ConfigError(
                    f"{message}: open the folders as one list of paths, which numbers all classes", key=key
                )
    return {name: classes for name, (_, classes) in known.items()}
