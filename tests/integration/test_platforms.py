"""The basic uses on a system without the calls and files that only Linux has."""

import builtins
import fcntl
import mmap
import os

import numpy as np
import pytest

import dataload
from dataload.bench.child import drop_cached
from dataload.convert import convert
from dataload.errors import ConfigError
from dataload.executors import transport as shared_memory
from dataload.storage.local import atomic as parts
from dataload.storage.local import record_files as readahead

_OF_LINUX = {
    os: "sched_getaffinity posix_fadvise posix_fallocate memfd_create pidfd_open RWF_NOWAIT",
    fcntl: "F_SETSIG",
    mmap: "MAP_POPULATE",
}


@pytest.fixture
def elsewhere(monkeypatch):
    """Remove what only Linux has."""
    for module, names in _OF_LINUX.items():
        for name in names.split():
            monkeypatch.delattr(module, name, raising=False)
    monkeypatch.setattr(parts, "_libc_rename", lambda: None)
    monkeypatch.setattr(readahead, "_DO_NOT_WAIT", None)
    monkeypatch.setattr(shared_memory, "_MAP_FLAGS", mmap.MAP_SHARED)
    for module, name in ((builtins, "open"), (os, "open"), (os, "listdir")):
        monkeypatch.setattr(module, name, _without_kernel_files(getattr(module, name)))


def _without_kernel_files(call):
    def guarded(path=".", *args, **kw):
        name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if (
            name.startswith(("/proc/", "/sys/")) and name != "/proc/self/maps"
        ):  # which threadpoolctl reads on Linux only
            raise FileNotFoundError(path)
        return call(path, *args, **kw)

    return guarded


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("executor", [{}, {"executor": "fork"}])
def test_without_linux(tmp_path, executor):
    with dataload.create(tmp_path / "a.syr") as writer:
        for number in range(40):
            writer.write({"x": np.full(10_000, number, np.float32)})  # too large for a pipe
    with dataload.open(tmp_path / "a.syr") as source:
        convert(source, tmp_path / "b.tar")
    settings = {"batch_size": 8, "shuffle": True, "seed": 0, "num_workers": 2, **executor}
    for path, options in (("a.syr", {}), ("b.tar", {"decode": "auto"})):
        with dataload.open(tmp_path / path, **options) as source, dataload.Loader(source, **settings) as loader:
            found = np.concatenate([batch["x"][:, 0] for batch in loader])
        assert sorted(found) == list(range(40))


@pytest.mark.usefixtures("elsewhere")
def test_cold_reads_need_a_call_that_drops_pages(tmp_path):
    with pytest.raises(ConfigError, match="this system cannot drop files from its page cache: leave --cold out"):
        drop_cached(str(tmp_path))
