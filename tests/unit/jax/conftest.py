"""Importing JAX takes seconds and starts threads, so the test modules are only collected where they run."""


def pytest_ignore_collect(config):
    return True if "not train" in config.option.markexpr else None
