"""The conformance suite: checks that any source can be put to, built-in or your own.

Two ways to run them:

- `SourceSuite`: subclass it in a test module, say how to write and to open a data set, and pytest runs every check
  on generated data.
- `check_source`: the read-only checks on data that you have, without pytest.

Names are imported when they are first used: pytest loads this package at start-up for its plugin, and
`check_source` needs neither pytest nor hypothesis.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataload.testing.cases import CheckResult
    from dataload.testing.suite import SourceSuite
    from dataload.testing.traits import SourceTraits
    from dataload.testing.verify import check_source

__all__ = ["CheckResult", "SourceSuite", "SourceTraits", "check_source"]

_PLACES = {
    "CheckResult": "dataload.testing.cases",
    "SourceSuite": "dataload.testing.suite",
    "SourceTraits": "dataload.testing.traits",
    "check_source": "dataload.testing.verify",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
