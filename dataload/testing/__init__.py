"""The conformance suite: checks for any source, built-in or your own.

- `SourceSuite`: subclass it in a test module and define how to write and open a data set. pytest then runs every check
  on generated data.
- `check_source`: run the read-only checks on existing data, without pytest.

Names are imported on first use, because pytest loads this package at start-up for its plugin, and because
`check_source` needs neither pytest nor hypothesis.
"""

from typing import TYPE_CHECKING

from dataload._util.lazy import lazy_names

if TYPE_CHECKING:
    from dataload.testing.cases import CheckResult, SourceTraits
    from dataload.testing.suite import SourceSuite
    from dataload.testing.verify import check_source

__all__ = ["CheckResult", "SourceSuite", "SourceTraits", "check_source"]

_HOMES = {
    "CheckResult": "dataload.testing.cases",
    "SourceSuite": "dataload.testing.suite",
    "SourceTraits": "dataload.testing.cases",
    "check_source": "dataload.testing.verify",
}

if not TYPE_CHECKING:  # so that type checkers report names that do not exist
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
