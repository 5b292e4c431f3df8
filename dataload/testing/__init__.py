"""The conformance suite: checks for any source, built-in or your own.

- `SourceSuite`: subclass it in a test module and define how to write and open a data set. pytest then runs every check
  on generated data.
- `check_source`: run the read-only checks on existing data, without pytest.

Names are imported on first use, because pytest loads this package at start-up for its plugin, and because
`check_source` needs neither pytest nor hypothesis.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataload.testing.cases import CheckResult
    from dataload.testing.suite import SourceSuite
    from dataload.testing.traits import SourceTraits
    from dataload.testing.verify import check_source

__all__ = ["CheckResult", "SourceSuite", "SourceTraits", "check_source"]

_MODULES = {
    "CheckResult": "dataload.testing.cases",
    "SourceSuite": "dataload.testing.suite",
    "SourceTraits": "dataload.testing.traits",
    "check_source": "dataload.testing.verify",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
