"""Hides what an operating system lacks, and uses dataload: `lesser_system.py macos|windows FOLDER [URL]`."""

import builtins
import os
import signal
import socket
import sys

_MACOS = "os.sched_getaffinity os.posix_fadvise os.posix_fallocate os.memfd_create os.pidfd_open os.RWF_NOWAIT"
_MACOS += " mmap.MAP_POPULATE fcntl.F_SETSIG"
_WINDOWS = "os.O_CLOEXEC os.O_DIRECTORY os.O_NOFOLLOW os.O_NONBLOCK os.chown os.fchmod os.fork os.geteuid os.getuid"
_WINDOWS += " os.killpg os.pread os.preadv os.pwrite os.register_at_fork os.sysconf os.uname os.fdatasync"
_WINDOWS += " signal.SIGKILL signal.SIGUSR2 signal.pthread_sigmask socket.AF_UNIX socket.recv_fds socket.send_fds"
_WINDOWS += " mmap.MAP_SHARED mmap.MADV_WILLNEED"


def hide(system):
    """Remove names of modules, files of the kernel, and what `ctypes` finds in the C library."""
    import ctypes
    import mmap
    import multiprocessing  # they use what is hidden
    import tempfile

    import numpy
    import obstore

    del multiprocessing, tempfile, numpy, obstore
    modules = {"os": os, "signal": signal, "socket": socket, "mmap": mmap}
    if system == "windows":
        sys.modules["fcntl"] = sys.modules["resource"] = None
    else:
        import fcntl

        modules["fcntl"] = fcntl
    for name in f"{_MACOS} {_WINDOWS if system == 'windows' else ''}".split():
        module, _, attribute = name.partition(".")
        if module in modules and hasattr(modules[module], attribute):
            delattr(modules[module], attribute)

    def guarded(call):
        def open_or_list(path=".", *args, **options):
            name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
            if name.startswith(("/proc/", "/sys/")) and name != "/proc/self/maps":  # which threadpoolctl reads
                raise FileNotFoundError(path)
            if system == "windows" and call is opened and isinstance(path, str) and os.path.isdir(path):
                raise PermissionError(path)
            return call(path, *args, **options)

        return open_or_list

    opened = os.open
    builtins.open, os.open, os.listdir = guarded(open), guarded(os.open), guarded(os.listdir)
    library = ctypes.CDLL

    def load(name, *args, **options):
        if name is None:
            raise TypeError("no C library by this name")
        return library(name, *args, **options)

    ctypes.CDLL = load


def use(system, folder, url=None):
    """Write, convert, read and load, with what a system has; `url` has the files of `folder`."""
    import numpy as np

    import dataload
    from dataload.convert import convert

    for suffix in ("syr", "tar"):
        with dataload.create(f"{folder}/a.{suffix}", **({"shards": 2} if suffix == "tar" else {})) as writer:
            for number in range(40):
                writer.write({"x": np.full(1000, number, np.float32)})
    with dataload.open(f"{folder}/a.syr") as source:
        convert(source, f"{folder}/b.tar", overwrite=True)
        convert(source, f"{folder}/c.syr", records_per_shard=10, error_report=f"{folder}/bad.jsonl")
    executors = ["threads"] if system == "windows" else ["threads", "processes", "fork"]
    for path, options in (("a.syr", {}), ("b.tar", {"decode": "auto"}), ("c-*.syr", {"map": False})):
        for executor, num_workers in [("threads", 0), *((name, 2) for name in executors)]:
            with dataload.open(f"{folder}/{path}", **options) as source:
                check(source, num_workers=num_workers, executor=executor)
    for mode in ("ranges", "shards") if url else ():
        with dataload.open(f"{url}/a.syr", remote={"mode": mode, "cache": f"{folder}/cache"}) as source:
            check(source, num_workers=2)
    if system == "windows":
        refused = ""
        try:
            dataload.Loader(dataload.RangeSource(8), batch_size=8, num_workers=2, executor="processes")
        except dataload.ConfigError as error:
            refused = str(error)
        assert "worker processes need Linux or macOS: use threads" in refused


def check(source, **workers):
    """Read an epoch of shuffled batches."""
    import dataload

    with dataload.Loader(source, batch_size=8, shuffle=True, **workers) as loader:
        assert sorted(x for batch in loader for x in batch["x"][:, 0]) == list(range(40)), source


if __name__ == "__main__":
    hide(sys.argv[1])
    use(*sys.argv[1:])
