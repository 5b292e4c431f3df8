"""Samples stacked into a batch, field by field, and values of different lengths padded."""

import warnings
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from operator import itemgetter
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

import numpy as np

from dataload._util.arrays import pooled_empty, stack_alike, to_array
from dataload._util.settings import Least, as_tuple, check_count, check_setting, check_settings, setting_error
from dataload.collate.columns import Ragged, as_list, describe_field, join, like, map_columns, require_text, unequal
from dataload.errors import ConfigError, closest
from dataload.types import Array, Batch, Int64Array

PadValue: TypeAlias = float | Mapping[str, float]
"""The padding value of all fields, or values by field name with 0 for the others."""

IGNORED = -100
"""The label of a token that losses leave out."""

Side: TypeAlias = Literal["left", "right"]
"""The beginning or the end of a sequence."""


@dataclass(frozen=True, slots=True)
class Pad:
    """A policy of `Collate`: fill the values of a field up to one length, along the first axis.

    ``collate={"input_ids": Pad(0), "labels": Pad(-100), "attention_mask": Pad(0)}`` pads each field with its own value.
    Unlike the policy ``"pad"``, it adds no field of lengths.

    Attributes:
        value: The value to fill up with.
        to: Lengths to pad to: a multiple of this number, or the first of these ascending lengths that is enough, so
            that batches have few distinct shapes. By default, the longest value of the batch.
        side: The side to fill up: ``"right"``, or ``"left"`` for generation.
        max_length: Length to which longer values are cut. None cuts nothing.
        truncation_side: The side to cut off: ``"right"`` keeps the beginning, ``"left"`` the end.

    Raises:
        ConfigError: A setting is out of its range; or, in a batch, the field's dtype cannot hold `value`.
    """

    value: float = 0
    to: int | Sequence[int] = 1
    side: Side = "right"
    max_length: Annotated[int, Least(1)] | None = None
    truncation_side: Side = "right"

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "to", check_padded_lengths("to", self.to))

    def cut(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return the arrays, cut to `max_length`."""
        if self.max_length is None:
            return arrays
        kept = slice(self.max_length) if self.truncation_side == "right" else slice(-self.max_length, None)
        return [array[kept] for array in arrays]


def check_pad_value(value: Any, padded: Collection[str] | None) -> None:
    """Raise ConfigError unless `value` is a number or None, or maps `padded` fields (None: unknown) to numbers."""
    given = cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else {}
    numbers = given.values() if isinstance(value, Mapping) else () if value is None else (value,)
    if not all(isinstance(each, Real) for each in numbers):
        raise setting_error("pad_value", value, 'must be a number, or a mapping such as {"labels": -100}')
    for name in () if padded is None else given.keys() - {*padded}:
        message = f"pad_value names {name!r}, which is not a padded field: {closest(name, padded or ())}"
        raise ConfigError(message, key=f"pad_value.{name}", value=given[name])


def fill_of(pad_value: PadValue | None, name: str, dtype: np.dtype[Any]) -> float:
    """Return the padding value of a field, after checking that its dtype can hold it."""
    value = pad_value.get(name, 0) if isinstance(pad_value, Mapping) else pad_value or 0
    if dtype.kind in "USTO":
        what = "objects, which are" if dtype.kind == "O" else "text, which is"
        raise ConfigError(f"field {name!r} holds {what} not padded: set its policy to list", key=name)
    if dtype.kind == "b":
        least, most = 0, 1
    elif dtype.kind in "iu":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    elif dtype.kind == "f" and np.isfinite(value):
        least, most = float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    else:
        return value
    if not least <= value <= most or (dtype.kind != "f" and value != int(value)):
        message = f"pad_value of field {name!r} is {value!r}, but its dtype {dtype} holds {least} to {most}"
        raise ConfigError(f"{message}: choose a number that fits, or convert the field in a transform", key="pad_value")
    return value


def warn_of_padding(padded: Mapping[str, str], stacklevel: int) -> None:
    """Warn if several padded integer fields (name -> dtype) have no `pad_value`."""
    names = sorted(name for name, dtype in padded.items() if "int" in dtype)
    if len(names) > 1:
        warnings.warn(
            f"padding fills the integer fields {', '.join(names)} with 0, which a loss may count as a label: pass "
            f"pad_value={dict.fromkeys(names, 0)} with suitable values (torch's cross_entropy ignores -100), "
            "or pad_value=0 to keep 0; the next release raises an error without pad_value",
            stacklevel=stacklevel + 1,
        )


def check_padded_lengths(key: str, value: Any) -> int | tuple[int, ...]:
    """Return the setting `key`: pad to multiples of a number, or to one of some ascending lengths."""
    if isinstance(value, str) or not isinstance(value, (Sequence, np.ndarray)):
        return check_count(key, value, least=1)
    lengths = tuple(check_count(f"{key}[{i}]", length, least=0) for i, length in enumerate(as_tuple(value)))
    if not lengths or any(after <= before for before, after in pairwise(lengths)):
        raise setting_error(key, value, "must be an integer >= 1 or ascending lengths")
    return lengths


def pad(arrays: Sequence[Array], value: float, to: int | Sequence[int], name: str, side: Side = "right") -> Array:
    """Return arrays padded to the largest extent of each axis, the first rounded up to `to`: ``(rows, *largest)``."""
    longest, *others = (max(extents) for extents in zip(*(array.shape for array in arrays), strict=True))
    length, dtype, left = _round_up(longest, to, name), arrays[0].dtype, side == "left"
    if all(array.shape[1:] == (*others,) for array in arrays):
        filler = np.full((length, *others), value, dtype)
        pieces = [(filler[len(each) :], each) if left else (each, filler[len(each) :]) for each in arrays]
        return laid_out([piece for pair in pieces for piece in pair], (len(arrays), length, *others))
    out = np.full((len(arrays), length, *others), value, dtype)
    for row, array in enumerate(arrays):
        first = length - len(array) if left else 0
        out[(row, slice(first, first + len(array)), *map(slice, array.shape[1:]))] = array
    return out


def laid_out(pieces: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Return pieces of rows, one after another, as an array of this `shape`, copied in one call."""
    dtype = pieces[0].dtype.newbyteorder("=")
    out = (np.empty if dtype.hasobject else pooled_empty)(shape, dtype)
    np.concatenate(pieces, out=out.reshape(shape[0] * shape[1], *shape[2:]))
    return out


def _round_up(length: int, to: int | Sequence[int], name: str) -> int:
    if isinstance(to, int):
        return -(-length // to) * to
    at = bisect_left(to, length)
    if at == len(to):
        message = (
            f"cannot pad {name!r}: a value has length {length}, but the longest of the lengths to pad to is {to[-1]}"
        )
        raise ConfigError(f"{message}; add a length, or cut values off: Pad(max_length=...)", key=f"collate.{name}.pad")
    return to[at]


PolicyName: TypeAlias = Literal["stack", "pad", "ragged", "list"]
Policy: TypeAlias = PolicyName | Mapping[str, int | float | str | Sequence[int]] | Pad
"""Treatment of a field whose values differ in shape; `stack` refuses them. See `Collate`."""

_PAD_SETTINGS = ("value", "side", "max_length", "truncation_side")


@dataclass(frozen=True, slots=True)
class Collate:
    """Stacks samples into a batch, field by field.

    Arrays and numbers of equal shape become one array of shape ``(rows, *shape)``. Dicts and tuples are collated
    inside. Bytes, text, lists and other objects become a list; `pad` and `ragged` make arrays of lists. No samples give
    ``{}``.

    Attributes:
        policies: What to do if the shapes of a field differ, by field name. `pad` fills up with `pad_value` and adds
            the true lengths as ``<field>_length``, (rows,) int64; `ragged` gives a `Ragged`; `list` gives a list.
            ``{"ragged": 2}`` gives a `Ragged` of rows of rows for lists of lists, and so on.
            ``{"pad": 64}`` pads the first axis to a multiple of 64, and ``{"pad": [128, 256, 512]}`` to the first of
            these lengths that is enough, so that batches have few distinct shapes. A `Pad` has its own value, side
            and maximum, and adds no lengths; ``{"pad": 64, "value": -100}`` is ``Pad(to=64, value=-100)``, for configs.
        pad_value: The value that `pad` fills up with, or values by field: ``{"labels": -100}``, where others get 0.
            None is 0, with a warning if more than one integer field is padded.

    Raises:
        ConfigError: A policy is unknown; or, when called, the samples have different fields, or shapes or dtypes that
            their policy does not allow, a value is longer than all lengths to pad to, or `pad_value` does not fit.
    """

    policies: Mapping[str, Policy] = field(default_factory=dict[str, Policy])
    pad_value: PadValue | None = None

    def __post_init__(self) -> None:
        check_setting("policies", self.policies, Mapping[str, Any])
        checked: dict[str, Policy] = {name: _check_policy(policy, name) for name, policy in self.policies.items()}
        object.__setattr__(self, "policies", checked)
        check_pad_value(self.pad_value, [name for name, policy in checked.items() if _adds_lengths(policy)])

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of `samples`, in their order."""
        batch = self.column(list(samples), "") if samples else {}
        if self.policies and self.pad_value is None:
            warn_of_padding(self.padded_fields(batch), stacklevel=2)
        return batch

    def padded_fields(self, batch: Any) -> dict[str, str]:
        """Return the dtypes of the fields of a batch that `pad_value` has filled up."""
        found: dict[str, str] = {}
        map_columns(batch, lambda column, name: found.update({name: str(getattr(column, "dtype", ""))}))
        return {name: found[name] for name, policy in self.policies.items() if _adds_lengths(policy) and name in found}

    def column(self, samples: list[Any], name: str) -> Any:
        """Return the column of a field, or a batch for the name ``""``."""
        first = samples[0]
        if isinstance(first, Mapping):
            return self._collate_dicts(samples, name)
        if isinstance(first, tuple):
            return self._collate_tuples(cast("list[tuple[Any, ...]]", samples), name)
        policy = self.policies.get(name, "stack")
        if policy == "list":
            return samples
        if isinstance(first, str):
            require_text(samples, name)
            return samples
        if isinstance(first, (bytes, bytearray, memoryview)):
            return as_list(samples, name)
        if levels := 1 if policy == "ragged" else cast("int", isinstance(policy, Mapping) and policy.get("ragged", 0)):
            return _ragged(samples, name, levels)
        if policy != "stack":
            arrays = _comparable(samples, name, policy)
            if isinstance(policy, Pad):
                value = fill_of(policy.value, name, arrays[0].dtype)
                return pad(policy.cut(arrays), value, policy.to, name, policy.side)
            value = fill_of(self.pad_value, name, arrays[0].dtype)
            return pad(arrays, value, cast("int", policy["pad"]) if isinstance(policy, Mapping) else 1, name)
        return _stack(samples, name)

    def _collate_dicts(self, samples: list[Mapping[str, Any]], name: str) -> Batch:
        first = samples[0]
        batch: Batch = {}
        for key, values in _columns(samples, name).items():
            path = join(name, key)
            batch[key] = self.column(values, path)
            if _adds_lengths(self.policies.get(path)):
                if f"{key}_length" in first:
                    raise ConfigError(
                        f"padding field {path!r} adds the true lengths as {key}_length, a field that exists: rename it",
                        key=path,
                    )
                batch[f"{key}_length"] = np.array([len(sample[key]) for sample in samples], np.int64)
        return batch

    def _collate_tuples(self, samples: list[tuple[Any, ...]], name: str) -> tuple[Any, ...]:
        for row, sample in enumerate(cast("list[Any]", samples)):
            if not isinstance(sample, (tuple, list)):
                raise unequal(name, 0, "tuple", row, type(sample).__name__)
        lengths = {len(sample) for sample in samples}
        if len(lengths) > 1:
            raise ConfigError(f"samples are tuples of different lengths: {sorted(lengths)}", key=name or None)
        columns = zip(*samples, strict=True)
        batch = [self.column(list(column), join(name, i)) for i, column in enumerate(columns)]
        return like(type(samples[0]), batch)


default_collate: Collate = Collate()


def _adds_lengths(policy: Policy | None) -> bool:
    """Return whether a policy is `pad`, alone or with lengths to pad to."""
    return policy == "pad" or (isinstance(policy, Mapping) and "pad" in policy)


def _check_policy(policy: Any, name: str) -> Policy:
    """Return the policy of a field, with the lengths to pad to as a tuple."""
    key = f"collate.{name}"
    if isinstance(policy, Pad):
        return policy
    if isinstance(policy, Mapping):
        given = cast("Mapping[Any, Any]", policy)
        if set(given) == {"ragged"}:
            return {"ragged": check_count(f"{key}.ragged", given["ragged"], least=1)}
        settings = {name: value for name, value in given.items() if name != "pad"}
        if "pad" not in given or settings.keys() - {*_PAD_SETTINGS}:
            rule = (
                f'must be a policy, {{"ragged": 2}}, or {{"pad": lengths}}, optionally with {", ".join(_PAD_SETTINGS)}'
            )
            raise setting_error(key, policy, rule)
        lengths = check_padded_lengths(f"{key}.pad", given["pad"])
        return Pad(to=lengths, **settings) if settings else {"pad": lengths}
    if policy not in get_args(PolicyName):
        message = f"collate policy of field {name!r} is {policy!r}: {closest(policy, get_args(PolicyName))}"
        raise ConfigError(message, key=key, value=policy)
    return policy


def _columns(samples: list[Any], name: str) -> dict[str, list[Any]]:
    """Return the values of each field; all samples must have the fields of the first."""
    first = samples[0]
    if set(map(type, samples)) == {dict} and set(map(len, samples)) == {len(first)}:
        try:  # all have as many fields as the first: the same ones, if each of those is found
            return {key: list(map(itemgetter(key), samples)) for key in first}
        except KeyError:
            pass
    for row, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise unequal(name, 0, "dict", row, type(sample).__name__)
        if sample.keys() != first.keys():
            differing = sorted(map(str, sample.keys() ^ first.keys()))
            raise ConfigError(
                f"samples in rows 0 and {row} have different fields ({', '.join(differing)} only in one): "
                "choose common ones with fields=[...], or add the missing ones in a transform",
                key=name or None,
            )
    return {key: [sample[key] for sample in samples] for key in first}


def _stack(values: list[Any], name: str) -> Any:
    if isinstance(values[0], (bool, int, float)):
        kinds = {type(value) for value in values}
        if kinds == {int, float}:
            return np.array(values, np.float64)  # JSON writes 1 for 1.0
        if len(kinds) > 1:
            row = next(row for row, value in enumerate(values) if type(value) is not type(values[0]))
            raise unequal(name, 0, type(values[0]).__name__, row, type(values[row]).__name__)
        return _integers(values, name) if kinds == {int} else np.array(values)
    if not hasattr(values[0], "__array__"):
        return as_list(values, name)
    stacked = stack_alike(values)
    if stacked is not None:
        return stacked
    arrays = [to_array(name, value) for value in values]
    first = arrays[0]
    for row, array in enumerate(arrays):
        if array.shape != first.shape or array.dtype != first.dtype:
            raise unequal(name, 0, _describe(first), row, _describe(array))
    return np.stack(arrays)


def _integers(values: list[int], name: str) -> Array:
    array = np.array(values)
    if array.dtype.kind in "iu":
        return array
    if min(values) >= 0 and max(values) < 1 << 64:  # numpy would round some of these to floats
        return np.array(values, np.uint64)
    message = f"{describe_field(name)} holds {max(values, key=abs)}, and a column of integers has 64 bits"
    raise ConfigError(f"{message}: set a collate policy for it: list", key=name or None)


def _ragged(values: list[Any], name: str, levels: int) -> Ragged:
    """Return lists, of lists of lists ... on several levels, with the offsets of each level."""
    if levels == 1 and not values:
        return Ragged(np.empty(0), np.zeros(1, np.int64))
    if levels == 1:
        arrays = _comparable(values, name, "ragged")
        return Ragged(np.concatenate(arrays), _offsets(arrays))
    for row, value in enumerate(values):
        if not isinstance(value, (list, np.ndarray)):
            what = f"cannot collate {describe_field(name)} by 'ragged': a value in row {row} is {type(value).__name__}"
            raise ConfigError(f"{what}, and lists of lists have a list there", key=name or None)
    return Ragged(_ragged([item for value in values for item in value], name, levels - 1), _offsets(values))


def _offsets(values: Sequence[Any]) -> Int64Array:
    return np.cumsum([0, *map(len, values)], dtype=np.int64)


def _comparable(values: list[Any], name: str, policy: Policy) -> list[Array]:
    """Return values as arrays of their common dtype, or raise if they differ in more than `policy` allows."""
    what = f"cannot collate {describe_field(name)} by {'ragged' if policy == 'ragged' else 'pad'!r}"
    try:
        arrays = [np.asarray(value) if isinstance(value, list) else to_array(name, value) for value in values]
    except ConfigError:
        raise
    except ValueError as error:  # numpy's, for lists of lists of unequal lengths
        message = f"{what}: it has lists of lists, whose lengths differ; set its policy to {{'ragged': 2}} or 'list'"
        raise ConfigError(message, key=name or None) from error
    # An empty Python list became float64, which says nothing about the dtype.
    first = next((array for array in arrays if array.size), arrays[0])
    fixed = 1 if policy == "ragged" else first.ndim  # axes from here on must agree
    for row, array in enumerate(arrays):
        if array.ndim == 0:
            raise ConfigError(f"{what}: row {row} is {_describe(array)}, which has no axis", key=name or None)
        unlike = array.ndim != first.ndim or array.shape[fixed:] != first.shape[fixed:]
        if unlike or (array.size and array.dtype != first.dtype):
            other = next(i for i, candidate in enumerate(arrays) if candidate is first)
            may = "along the first axis" if policy == "ragged" else "in their extents"
            raise ConfigError(
                f"{what}: row {other} is {_describe(first)}, row {row} is {_describe(array)}; arrays may differ only "
                f"{may}",
                key=name or None,
            )
    dtype = first.dtype.newbyteorder("=")  # as `np.stack`
    return [array.astype(dtype, copy=False) for array in arrays]


def _describe(array: Array) -> str:
    return f"{array.dtype} {array.shape}"
