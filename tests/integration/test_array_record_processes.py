"""ArrayRecord across processes: readers and threads of the C++ library must not be carried into children."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from dataload.sources.array_record.reader import ArrayRecordSource

GOLDEN = Path(__file__).parents[1] / "golden" / "arrayrecord"

pytestmark = pytest.mark.slow


@pytest.fixture
def records():
    rng = np.random.default_rng(0)
    return [rng.bytes(5000) for _ in range(400)]  # large enough for the library's own threads


@pytest.fixture
def path(tmp_path, records):
    name = str(tmp_path / "x.array_record")
    writer = ArrayRecordWriter(name, "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return name


def in_fork(work):
    """Exit status of a child that runs `work`; it ends by SIGALRM if that hangs."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_reads_on(path, records):
    request = list(range(0, 400, 3)) * 3

    def check():
        assert source.read(request) == [records[index] for index in request]
        assert source.read([7]) == [records[7]]

    with ArrayRecordSource(path) as source:
        check()
        assert in_fork(check) == 0
        check()  # what the child let go of was its own
        assert in_fork(lambda: in_fork(check) == 0 or os._exit(3)) == 0


def test_new_processes_read(path, records):
    context = multiprocessing.get_context("spawn")
    with ArrayRecordSource(path) as source, ProcessPoolExecutor(2, mp_context=context) as pool:
        source.read([0])
        requests = [[1, 399], [399, 1, 1], list(range(300))]
        assert list(pool.map(source.read, requests)) == [[records[i] for i in request] for request in requests]


def test_a_killed_writer_leaves_nothing_that_opens(tmp_path):
    script = """
        import os, signal, sys
        from dataload.sources.array_record.writer import ArrayRecordWriter
        writer = ArrayRecordWriter(sys.argv[1])
        for _ in range(2000):
            writer.write(os.urandom(1000))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    name = tmp_path / "x.array_record"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), name], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not name.exists()
    assert all(left.startswith(".") for left in os.listdir(tmp_path))


def test_damaged_bytes_give_the_records_or_an_error(tmp_path):
    """Any byte of the records, the headers and the footer; in a process of its own, for the library is C++."""
    script = """
        import sys
        import numpy as np
        from dataload.errors import CorruptFileError, UnsupportedFormatError
        from dataload.sources.array_record.reader import ArrayRecordSource
        original, name = sys.argv[1:]
        good = list(ArrayRecordSource(original))
        data = np.fromfile(original, np.uint8)
        places = np.flatnonzero(data)[:: len(np.flatnonzero(data)) // 300]
        errors = 0
        for place in places.tolist():
            damaged = data.copy()
            damaged[place] ^= 1 << place % 8
            damaged.tofile(name)
            with ArrayRecordSource(name, reader_options="") as source:  # a map does not show flipped data
                try:
                    assert list(source) == good, place
                except (CorruptFileError, UnsupportedFormatError):
                    errors += 1
        assert errors > 200, errors
    """
    for original in ("default", "uncompressed"):
        arguments = [sys.executable, "-c", textwrap.dedent(script), GOLDEN / f"{original}.array_record", tmp_path / "x"]
        assert subprocess.run(arguments, check=False).returncode == 0
