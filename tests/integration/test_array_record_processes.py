"""ArrayRecord across processes: readers and threads of the C++ library must not be carried into children."""

import os
import signal

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from written import written

from dataload.errors import ConfigError
from dataload.sources.array_record.reader import ArrayRecordSource

pytestmark = pytest.mark.slow


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
def test_a_forked_child_reads_uncompressed_files_and_is_refused_the_package(tmp_path):
    rng = np.random.default_rng(0)
    records = [rng.bytes(5000) for _ in range(400)]  # large enough for the library's own threads
    path, plain = (str(tmp_path / name) for name in ("x.array_record", "plain.array_record"))
    writer = ArrayRecordWriter(path, "group_size:1,brotli:1")
    for record in records:
        writer.write(record)
    writer.close()
    written(plain, records, options="group_size:1,uncompressed")
    request = list(range(0, 400, 3)) * 3

    def check(source):
        assert source.read(request) == [records[index] for index in request]
        assert source.read([7]) == [records[7]]

    def check_refused():
        message = (
            "the package array_record was used before this process was forked, and does not work in a fork: start "
            "workers with multiprocessing_context=\"forkserver\" (torch's DataLoader) or executor='forkserver' "
            "(dataload's loaders), or convert the data with options='group_size:1,uncompressed', which is read without "
            "the package"
        )
        for attempt in (lambda: source.read(request), lambda: len(source), lambda: source[7]):
            with pytest.raises(ConfigError) as caught:
                attempt()
            assert str(caught.value) == message

    with ArrayRecordSource(path) as source, ArrayRecordSource(plain) as uncompressed:
        check(uncompressed)
        check(source)
        assert in_fork(check_refused) == 0
        assert in_fork(lambda: check(uncompressed)) == 0
        assert in_fork(lambda: in_fork(check_refused) == 0 or os._exit(3)) == 0
        check(source)
