"""The pytest plugin: registers the suite's marker for ``--strict-markers``. It imports nothing else."""

from typing import Any


def pytest_configure(config: Any) -> None:
    """Register the marker. pytest calls this function in every project where dataload is installed."""
    config.addinivalue_line(
        "markers", "conformance(group, since): a check of dataload.testing.SourceSuite; select with -m conformance"
    )
