"""Values of golden files, as their notes in JSON say."""

import numpy as np

from dataload.testing.compare import difference


def value_of(noted):
    """Return the value that a note describes: bytes, an array, or what JSON can hold."""
    if isinstance(noted, list):
        return [value_of(item) for item in noted]
    if not isinstance(noted, dict):
        return noted
    if isinstance(noted.get("bytes"), str):
        return bytes.fromhex(noted["bytes"])
    if noted.keys() == {"value"}:
        return noted["value"]
    if "dtype" not in noted:
        return {name: value_of(inner) for name, inner in noted.items()}
    if "hex" in noted:
        return np.frombuffer(bytes.fromhex(noted["hex"]), noted["dtype"]).reshape(noted["shape"])
    values = [value_of(value) for value in noted["values"]] if noted["dtype"] == "object" else noted["values"]
    return np.array(values, noted["dtype"]).reshape(noted["shape"])


def assert_same(found, expected):
    """Types, dtypes, shapes and values are equal."""
    message = difference(found, expected, "record")
    assert message is None, message
