"""Pydantic models derived from the classes they configure.

A class defines its settings once: the signature gives names and defaults, the annotations give types, and the
docstring gives descriptions. Imported only when a config is read, because pydantic takes 60 ms.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, ForwardRef, Literal, TypeAlias, Union, cast, get_args, get_origin

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model
from pydantic.json_schema import SkipJsonSchema

from dataload._util.settings import hints_of
from dataload.config.problems import NPY_PATTERN, REFERENCE_PATTERN, named_under, resolve_reference
from dataload.executors.base import Fleet
from dataload.types import Sampler

Reference: TypeAlias = Annotated[str, Field(pattern=REFERENCE_PATTERN, examples=["package.module:function"])]
NpyPath: TypeAlias = Annotated[str, Field(pattern=NPY_PATTERN)]
Weight: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Weights: TypeAlias = Annotated[tuple[Weight, ...], Field(strict=False, min_length=1)]
Position: TypeAlias = Annotated[int, Field(strict=False, ge=0)]  # keys are text
NamedWeights: TypeAlias = dict[str, Weight]
Changes: TypeAlias = Annotated[dict[Position, Weights | NamedWeights], Field(min_length=1)]


def _form(weights: Any) -> str:
    """Return the way in which weights are given, so that only its errors are shown."""
    values = cast("Mapping[Any, Any]", weights).values() if isinstance(weights, Mapping) else None
    several = any(isinstance(each, (Mapping, list, tuple)) for each in values or ())
    return "list" if values is None else "changes" if several else "by name"


_Listed: TypeAlias = Annotated[tuple[Weight | Changes | Weights | NamedWeights, ...], Field(strict=False, min_length=1)]
AnyWeights: TypeAlias = Annotated[
    Annotated[Changes, Tag("changes")]
    | Annotated[NamedWeights, Tag("by name")]
    | Annotated[SkipJsonSchema[Changes] | _Listed, Tag("list")],  # for a value that is neither table nor list
    Discriminator(_form),
]

_FUNCTIONS = ("batch_transform", "codec", "collate", "decode", "make_stream", "transform")
_MAY_BE_EMPTY = ("exclude", "shapes", "transform")


class Section(BaseModel):
    """A table of settings."""

    # Strict: "64" is not a number and 1 is not true, because a typo is likelier than such a wish.
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True)

    def given(self) -> dict[str, Any]:
        """Return the settings that were given, so that defaults stay where they are defined."""
        return {name: value for name in self.model_fields_set if (value := getattr(self, name)) is not None}

    def resolved(self, key: str) -> dict[str, Any]:
        """Return the settings that were given, with functions imported; `key` names this table in errors."""
        return {
            name: _resolve(value, f"{key}.{name}") if name in _FUNCTIONS or isinstance(value, _ValueSection) else value
            for name, value in self.given().items()
        }


class _ValueSection(Section):
    """A table that stands for an object of class `of`."""

    of: ClassVar[Any]


@cache
def value_section(of: Any) -> type[_ValueSection]:
    """Return the model of a table that stands for an object of class `of`."""
    fields: dict[str, Any] = settings_of(of)
    summary = str(of.__doc__).partition("\n")[0]
    model = create_model(of.__name__, __base__=_ValueSection, __module__=__name__, __doc__=summary, **fields)
    model.of = of
    return model


def _resolve(value: Any, key: str) -> Any:
    """Import the functions that ``"module:function"`` names, in lists and tables too; other text is built in."""
    if isinstance(value, _ValueSection):
        with named_under(key, type(value).model_fields):
            return value.of(**value.given())
    if isinstance(value, Mapping):
        return {name: _resolve(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, tuple):
        return [_resolve(item, key) for item in value]
    return resolve_reference(value, key) if isinstance(value, str) and ":" in value else value


@cache
def settings_of(target: Any) -> dict[str, tuple[Any, Any]]:
    """Return the arguments of a class as fields for `pydantic.create_model`: name -> (type, field)."""
    hints = hints_of(target if hasattr(target, "__dataclass_fields__") else target.__init__)
    texts = describe(target)
    fields: dict[str, tuple[Any, Any]] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (_config_type(hints[name], name), Field(default, description=texts.get(name)))
    return fields


def describe(target: Any) -> dict[str, str]:
    """Return what a Google-style docstring, or else a base class's docstring, says about each argument or attribute."""
    inherited = describe(target.__base__) if isinstance(target, type) and target.__base__ is not None else {}
    text = inspect.getdoc(target) or ""
    sections = re.findall(r"^(?:Args|Attributes):.*\n((?:(?:    .*)?\n)*)", f"{text}\n", re.MULTILINE)
    parts = re.split(r"^    (\w+): ", "".join(sections), flags=re.MULTILINE)[1:]
    return inherited | {name: " ".join(entry.split()) for name, entry in zip(parts[::2], parts[1::2], strict=True)}


def _config_type(hint: Any, name: str) -> Any:
    """Return the type of a setting for the annotation of an argument, or None if a config cannot hold such a value."""
    hint = hint.type if isinstance(hint, InitVar) else hint
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:  # its bounds know how pydantic says them
        return hint
    if hint == npt.DTypeLike:
        return str
    if origin in (Union, UnionType):
        kinds = [_config_type(arg, name) for arg in args]
        named = (NpyPath, Reference) if str in kinds else ()  # any text may name a file or a function
        kinds = [kind for kind in kinds if kind is not None and kind not in named]
        return Union[tuple(sorted(kinds, key=lambda kind: kind is not NpyPath))]  # noqa: UP007 - made at run time
    if origin in (np.ndarray, npt.NDArray):  # numpy 2.5 no longer expands the alias
        return NpyPath
    if origin is Callable:
        return Reference
    if origin is Mapping:
        return dict[str, _config_type(args[1], name)]
    if origin in (tuple, Sequence):
        least = None if name in _MAY_BE_EMPTY else 1
        return Annotated[tuple[_config_type(args[0], name), ...], Field(strict=False, min_length=least)]
    if hint is Fleet:
        return value_section(hint)
    if hint is Sampler:
        return ForwardRef("OrderConfig")
    if origin is Literal or hint in (int, float, str, bool, NoneType):
        return hint
    return str if hint is Any else None  # other objects have no place in a config
