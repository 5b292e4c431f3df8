"""A file that shrinks while a loader reads it is an error of that file, for every format and kind of worker."""

import os
import threading

import numpy as np
import pytest

import dataload
from dataload.errors import CorruptFileError, WorkerError


def write(directory, suffix):
    options = {"options": "group_size:1,uncompressed"} if suffix == "array_record" else {}
    path = directory / f"data.{suffix}"
    with dataload.create(path, **options) as writer:
        for i in range(600):
            content = bytes([i % 256]) * (2000 + i)
            writer.write(content if suffix in ("array_record", "lmdb") else {"x": content, "n": i})
    return path


def read_while_it_shrinks(path, workers, executor, cuts):
    """Cut the file at random moments and places; return the errors of the loaders that have noticed."""
    target = path / "data.mdb" if path.is_dir() else path
    whole = target.read_bytes()
    rng = np.random.default_rng(0)
    caught = []
    for _ in range(cuts):
        with open(target, "r+b") as stream:
            stream.truncate(len(whole))
            stream.write(whole)
        settings = {"batch_size": 16, "shuffle": True, "num_workers": workers, "executor": executor}
        shrink = threading.Timer(rng.uniform(0, 0.004), os.truncate, (target, int(rng.integers(0, len(whole)))))
        with dataload.open(path) as source, dataload.Loader(source, **settings) as loader:
            shrink.start()
            try:
                is_shrinking = True
                while is_shrinking:  # and once more
                    is_shrinking = shrink.is_alive()
                    for _ in loader:
                        pass
            except (CorruptFileError, WorkerError) as error:  # the former as an epoch begins
                caught.append(error)
            shrink.join()
    return caught


HOW = {"serial": (0, "threads", 10), "threads": (2, "threads", 10), "processes": (2, "processes", 4)}
ONCE = {"syr": "threads", "tar": "serial", "array_record": "threads", "lmdb": "processes", "torchrecord": "serial"}


@pytest.mark.parametrize(
    ("suffix", "how"),
    [
        pytest.param(suffix, how, marks=() if ONCE[suffix] == how else pytest.mark.slow_suite)
        for suffix in ONCE
        for how in HOW
    ],
)
def test_shrinking(tmp_path, suffix, how):
    path = write(tmp_path, suffix)
    errors = read_while_it_shrinks(path, *HOW[how])
    assert errors
    assert all(isinstance(error, CorruptFileError) or isinstance(error.__cause__, CorruptFileError) for error in errors)
    assert all(path.name in str(error) for error in errors)
