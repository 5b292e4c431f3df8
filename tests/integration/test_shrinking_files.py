"""A file that shrinks while a loader reads it is an error of that file, for every format and kind of worker."""

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import os, sys, threading

import numpy as np
import dataload
from dataload.errors import CorruptFileError, WorkerError

path, workers, executor = sys.argv[1], int(sys.argv[2]), sys.argv[3]
target = os.path.join(path, "data.mdb") if os.path.isdir(path) else path
whole = open(target, "rb").read()
rng = np.random.default_rng(0)
source = dataload.open(path)
loader = dataload.Loader(source, batch_size=16, shuffle=True, num_workers=workers, executor=executor)
outcomes = []
for cut in range(int(sys.argv[4])):
    with open(target, "r+b") as stream:
        stream.truncate(len(whole))
        stream.write(whole)
    shrink = threading.Timer(rng.uniform(0, 0.004), os.truncate, (target, int(rng.integers(0, len(whole)))))
    shrink.start()
    try:
        for _ in range(3):
            for batch in loader:
                pass
        outcomes.append(None)
    except WorkerError as error:
        assert isinstance(error.__cause__, CorruptFileError), repr(error.__cause__)
        assert os.path.basename(target) in str(error)
        outcomes.append(type(error.__cause__).__name__)
    shrink.join()
loader.close()
print(outcomes.count("CorruptFileError"), "of", len(outcomes))
"""


def write(tmp_path, suffix):
    import dataload

    options = {"options": "group_size:1,uncompressed"} if suffix == "array_record" else {}
    path = str(tmp_path / f"data.{suffix}")
    with dataload.create(path, **options) as writer:
        for i in range(600):
            content = bytes([i % 256]) * (2000 + i)
            writer.write(content if suffix in ("array_record", "lmdb") else {"x": content, "n": i})
    return path


@pytest.mark.parametrize(
    "workers", [(0, "threads"), (2, "threads"), (2, "processes")], ids=["serial", "threads", "processes"]
)
@pytest.mark.parametrize("suffix", ["syr", "tar", "array_record", "lmdb", "torchrecord"])
def test_shrinking(tmp_path, suffix, workers):
    path = write(tmp_path, suffix)
    number, executor = workers
    arguments = [path, str(number), executor, "4" if executor == "processes" else "20"]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *arguments], capture_output=True, text=True, timeout=55
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr}"
    caught, of = map(int, done.stdout.split()[::2])
    assert 0 < caught <= of or executor == "processes"
