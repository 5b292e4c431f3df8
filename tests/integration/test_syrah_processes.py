"""Syrah across processes: writers that are killed, readers that are forked and spawned, and too few descriptors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from dataload.sources.syrah.reader import SyrahSource
from dataload.sources.syrah.writer import SyrahWriter

pytestmark = pytest.mark.slow

RECORDS = [{"x": np.arange(500) + i, "t": f"text {i}"} for i in range(40)]


def write(path, records=RECORDS):
    with SyrahWriter(path) as writer:
        writer.extend(records)
    return path


def sums(source, indices):
    return [int(record["x"].sum()) for record in source.read(indices)]


EXPECTED = [int(record["x"].sum()) for record in RECORDS]


WRITER = """
import os, sys
import numpy as np
from dataload.sources.syrah.writer import SyrahWriter

writer = SyrahWriter(sys.argv[1], overwrite=True)
records = [{"x": np.arange(50_000) + i} for i in range(100)]
for record in records[: int(sys.argv[2])]:
    writer.write(record)
if sys.argv[2] == "100":
    # in the middle of `close`, when all is written but the rename
    os.replace = lambda *_: (print("ready", flush=True), sys.stdin.read())
    writer.close()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("after", [1, 100, *(pytest.param(after, marks=pytest.mark.slow_suite) for after in (0, 50))])
def test_a_killed_writer_harms_nothing_and_leaves_nothing_that_opens(tmp_path, after):
    path = write(tmp_path / "data.syr")
    before = path.read_bytes()
    command = [sys.executable, "-c", WRITER, str(path), str(after)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
    assert path.read_bytes() == before
    leftovers = [entry for entry in tmp_path.iterdir() if entry != path]
    assert all(entry.name.startswith(".") for entry in leftovers)  # no pattern and no directory listing takes it up
    assert len(leftovers) == 1
    if after < 100:
        with pytest.raises(ValueError, match="a writer that was never closed"):
            len(SyrahSource(leftovers[0] / path.name))
    with SyrahWriter(path, overwrite=True) as writer:
        writer.write({"x": 1})
    assert list(tmp_path.iterdir()) == [path]
    assert len(SyrahSource(path)) == 1


def read_some(source, start):
    return sums(source, range(start, 40, 4))


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow_suite)])
def test_readers_in_other_processes(tmp_path, method):
    source = SyrahSource(write(tmp_path / "data.syr"))
    assert sums(source, [0]) == EXPECTED[:1]
    with multiprocessing.get_context(method).Pool(2) as pool:
        found = pool.starmap(read_some, [(source, start) for start in range(4)])
        pool.close()
        pool.join()
    assert [value for values in zip(*found, strict=True) for value in values] == EXPECTED
    assert sums(source, range(40)) == EXPECTED
    if method == "forkserver":
        multiprocessing.forkserver._forkserver._stop()


def test_many_forked_children_and_their_parent_read_at_once(tmp_path):
    source = SyrahSource(write(tmp_path / "data.syr"))
    assert sums(source, [0]) == EXPECTED[:1]
    children = []
    for seed in range(6):
        child = os.fork()
        if not child:
            indices = np.random.default_rng(seed).integers(0, 40, 400)
            os._exit(sums(source, indices) != [EXPECTED[i] for i in indices])
        children.append(child)
    indices = np.random.default_rng(99).integers(0, 40, 400)
    assert sums(source, indices) == [EXPECTED[i] for i in indices]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6


def test_more_shards_than_descriptors(tmp_path):
    """100 shards, 40 descriptors, four threads."""
    for shard in range(100):
        write(tmp_path / f"{shard:03d}.syr", [{"x": np.array([shard * 2 + row])} for row in range(2)])
    program = textwrap.dedent(f"""
        import glob, os, resource
        from concurrent.futures import ThreadPoolExecutor
        import numpy as np
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        from dataload.sources.syrah.reader import SyrahSource
        source = SyrahSource(sorted(glob.glob({str(tmp_path)!r} + "/*.syr")))
        assert len(source) == 200
        assert [int(record["x"][0]) for record in source] == list(range(200))
        assert source.read_batch(range(200))["x"][:, 0].tolist() == list(range(200))
        def work(seed):
            indices = np.random.default_rng(seed).integers(0, 200, 300)
            return source.read_batch(indices)["x"][:, 0].tolist() == indices.tolist()
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(8)))
        assert len(os.listdir("/proc/self/fd")) < 40
        assert len(source.fingerprint()) == 32
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
