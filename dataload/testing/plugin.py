"""The pytest plugin: registers the suite's marker, so that it runs under ``--strict-markers``. Imports nothing."""

from __future__ import annotations

from typing import Any

__all__ = ["pytest_configure"]


def pytest_configure(config: Any) -> None:
    """Called by pytest at start-up, in every project where dataload is installed."""
    config.addinivalue_line(
        "markers", "conformance(group, since): a check of dataload.testing.SourceSuite; select with -m conformance"
    )
