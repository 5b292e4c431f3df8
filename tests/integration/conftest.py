"""Shared by the tests of several parts together."""

import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def threads_of_obstore():
    """Start the threads of obstore, which live as long as the process, before a test counts what it leaves behind."""
    if importlib.util.find_spec("obstore") is not None:
        import obstore

        obstore.put(obstore.store.MemoryStore(), "x", b"")
