"""``tf.train.SequenceExample``, decoded by protobuf.

A SequenceExample is ``SequenceExample{context{feature: map<string, Feature>}, feature_lists{feature_list: map<string,
FeatureList>}}``, and a FeatureList is one Feature for each step. All are fields of one record:

| field | decoded |
|---|---|
| a feature of the context | as in an Example, see `dataload.codecs.example` |
| a list of numbers, equally many in each step | (steps, n) float32 or int64 |
| any other list | list of the values of its steps |
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataload._util.arrays import FIELD_BYTES, MAX_RECORD_BYTES, check_size
from dataload.codecs.example import feature_value, parse_message
from dataload.errors import ConfigError, CorruptFileError


def decode(data: bytes | memoryview, limit: int = MAX_RECORD_BYTES) -> dict[str, Any]:
    """Decode a serialized SequenceExample to its fields, of at most `limit` bytes."""
    message = parse_message("SequenceExample", data)
    context, lists = message.context.feature, message.feature_lists.feature_list
    count = len(context) + len(lists) + sum(len(lists[name].feature) for name in lists)
    check_size(FIELD_BYTES * count, limit, f"a SequenceExample of {count:,} features")
    record = {name: feature_value(context[name]) for name in sorted(context)}
    for name in sorted(lists):
        if name in record:
            raise CorruptFileError(
                f"{name!r} is a feature of the context and a feature list: decode such records by a function of bytes"
            )
        record[name] = _join([feature_value(feature) for feature in lists[name].feature])
    return record


def _join(steps: list[Any]) -> Any:
    """Return the values of steps as one array if their dtypes and shapes agree."""
    kinds = {(step.dtype, step.shape) if isinstance(step, np.ndarray) else None for step in steps}
    return np.stack(steps) if len(kinds) == 1 and None not in kinds else steps


def encode(record: Mapping[str, Any]) -> bytes:  # noqa: ARG001 - the signature of codecs
    """Raise a ConfigError: a record does not say which of its fields are the context."""
    raise ConfigError("codec 'sequence_example' only reads: write records with example, msgpack or npz", key="codec")
