"""Values of golden files, as their notes in JSON say."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from dataload.sources.syrah.layout import DTYPES
from dataload.testing.compare import difference

SYRAH = Path(__file__).parents[1] / "golden" / "syrah"
SYRAH_CASES = json.loads((SYRAH / "manifest.json").read_text())
NEEDS_FLOAT128 = pytest.mark.skipif("float128" not in DTYPES, reason="numpy has no float128 here")


def syrah_cases(expect):
    """Return the files of the original Syrah that are read, or refused, as parameters of a test."""
    return [
        pytest.param(case, id=case["file"], marks=NEEDS_FLOAT128 if "float128" in case["file"] else ())
        for case in SYRAH_CASES
        if case["expect"] == expect
    ]


TORCHRECORD = SYRAH.with_name("torchrecord")
TORCHRECORD_CASES = json.loads((TORCHRECORD / "manifest.json").read_text())


def torchrecord_cases(expect, written_as="torchrecord"):
    """Return the files of the original TorchRecord, or of lmdb, as parameters of a test."""
    return [
        pytest.param(case, id=f"{case['file']}-{case['options'][:20]}")
        for case in TORCHRECORD_CASES
        if (case["format"], case["expect"]) == (written_as, expect)
    ]


def same_bytes(data, expected):
    """Compare bytes with what a note says of them: their digits, or their number and hash."""
    if "hex" in expected:
        return bytes(data).hex() == expected["hex"]
    return expected.get("nbytes", len(data)) == len(data) and hashlib.sha256(data).hexdigest() == expected["sha256"]


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
