"""What the conformance suites of tests/conformance share."""

import hashlib
import json

import numpy as np
from made_files import npy

from dataload.testing import SourceSuite
from dataload.testing.checks.concurrency import fork_after_read, fork_before_read, new_process_reads

TOGETHER = {
    "check_new_process": new_process_reads,
    "check_fork_after_read": fork_after_read,
    "check_fork_before_read": fork_before_read,
}
"""Checks that one process runs for all formats with `processes_together`."""


class FormatSuite(SourceSuite):
    """The conformance suite of a format that tests/conformance/test_together.py reads in one process.

    Attributes:
        processes_together: Whether the checks in `TOGETHER` are left to tests/conformance/test_together.py.
        source: The class under test, or a function that makes a source.
        options: Its options.
        keyed: Whether the source adds the keys of `members`.
    """

    processes_together = True
    written_once = True
    source = None
    options = {}  # noqa: RUF012 - nobody changes it
    keyed = False

    def __init_subclass__(cls, **keywords):
        super().__init_subclass__(**keywords)
        for check in TOGETHER if cls.processes_together else ():
            if check not in cls.expected_failures:
                setattr(cls, check.replace("check_", "test_", 1), None)  # pytest ignores None

    def open(self, path):
        return type(self).source(path, **self.options)

    def expected(self, records):
        return [{"__key__": f"{i:06d}", **record} for i, record in enumerate(records)] if self.keyed else records


def members(records):
    """Yield name and content of the file of each value, as a user would name them."""
    for index, record in enumerate(records):
        for name, value in record.items():
            suffix, data = encoded(value)
            yield f"{index:06d}.{name}{suffix}", data


def encoded(value):
    """Return the suffix of a file with a value, and its content."""
    if isinstance(value, bytes):
        return "", value
    if isinstance(value, str):
        return ".txt", value.encode()
    if isinstance(value, int):
        return ".json", json.dumps(value).encode()
    return ".npy", npy(value)


def digest_of(record, size):
    """Return bytes that differ for any two records, for formats that cannot keep what these hold."""
    found = hashlib.blake2b(digest_size=size)
    for name, value in record.items():
        content = (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
        found.update(repr((name, content)).encode())
    return found.digest()


def flip(path, *places):
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 1
    path.write_bytes(data)
