"""A file that shrinks while a loader reads it is an error of that file, for every format and kind of worker."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, threading

import numpy as np
import dataload
from dataload.errors import CorruptFileError, WorkerError

def read_while_it_shrinks(path, workers, executor, cuts):
    target = os.path.join(path, "data.mdb") if os.path.isdir(path) else path
    whole = open(target, "rb").read()
    rng = np.random.default_rng(0)
    caught = 0
    for cut in range(cuts):
        with open(target, "r+b") as stream:
            stream.truncate(len(whole))
            stream.write(whole)
        source = dataload.open(path)
        loader = dataload.Loader(source, batch_size=16, shuffle=True, num_workers=workers, executor=executor)
        shrink = threading.Timer(rng.uniform(0, 0.004), os.truncate, (target, int(rng.integers(0, len(whole)))))
        shrink.start()
        try:
            is_shrinking = True
            while is_shrinking:  # and once more
                is_shrinking = shrink.is_alive()
                for batch in loader:
                    pass
        except WorkerError as error:
            assert isinstance(error.__cause__, CorruptFileError), repr(error.__cause__)
            assert os.path.basename(target) in str(error)
            caught += 1
        shrink.join()
        loader.close()
    print(path, caught, "of", cuts, flush=True)
    assert caught > 0

if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path, workers, executor, cuts = argument.split(",")
        print(path, workers, executor, flush=True)
        read_while_it_shrinks(path, int(workers), executor, int(cuts))
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


SERIAL, THREADS, PROCESSES = "0,threads,10", "2,threads,10", "2,processes,4"
ONCE = {"syr": THREADS, "tar": SERIAL, "array_record": THREADS, "lmdb": PROCESSES, "torchrecord": SERIAL}
"""How each format is read: all of them in one process."""


@pytest.mark.parametrize(
    "wanted",
    [
        ONCE.items(),
        *(
            pytest.param([(suffix, how)], marks=pytest.mark.slow_suite)
            for suffix in ONCE
            for how in (SERIAL, THREADS, PROCESSES)
            if ONCE[suffix] != how
        ),
    ],
)
def test_shrinking(tmp_path, wanted):
    arguments = [f"{write(tmp_path, suffix)},{how}" for suffix, how in wanted]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
