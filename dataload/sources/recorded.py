"""Reader options that our writers record in a file, in a place that all other readers skip.

A record is one line of text, ``dataload: {"codec": "tensorprotos"}``: in tar archives a PAX comment for all members,
in ArrayRecord files padding, in LMDB the rest of the first page. Files come from anywhere, so only options that a
manifest may set are accepted.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, cast

from dataload.catalog.checks import STORED_OPTIONS

MOST_BYTES = 256
"""Greatest length of a record."""

_MARK = b"dataload: "


def build_recorded(options: Mapping[str, Any]) -> bytes:
    """Return the line that records `options`; nothing if there are none."""
    return _MARK + json.dumps(dict(options), sort_keys=True).encode() if options else b""


def parse_recorded(data: bytes, names: Collection[str]) -> dict[str, Any]:
    """Return the options called `names` that are recorded at the start of `data`; none if they make no sense."""
    if not data.startswith(_MARK):
        return {}
    with suppress(ValueError, RecursionError):
        found = json.loads(data[len(_MARK) : MOST_BYTES].partition(b"\0")[0])
        if isinstance(found, dict):
            options = cast("dict[str, Any]", found)
            return {name: options[name] for name in names if name in options and STORED_OPTIONS[name](options[name])}
    return {}
