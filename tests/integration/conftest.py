"""Shared by the tests of several parts together."""

import pytest


@pytest.fixture(autouse=True)
def started(threads_of_obstore):
    """Any of these tests may read data at URLs."""
