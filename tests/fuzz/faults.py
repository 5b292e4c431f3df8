"""Failures of the operating system and of an HTTP store, injected at every call that reading makes.

    make faults                       every call of every format, every error number and every policy
    make faults FORMATS='tar jsonl'   some formats

Whatever fails, the batches are those without a failure, or the job ends with an error that says whose fault it is: the
store's or the machine's. No record is ever called bad. tests/integration/test_searches.py runs a small sample.
"""

# ruff: noqa: T201 - a script that tells how far it is

import builtins
import errno
import functools
import mmap
import os
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from unittest import mock

import numpy as np
from drive import command_line
from object_server import FileHandler, FileServer
from PIL import Image

import dataload
from dataload import Loader
from dataload._util import failures
from dataload.errors import WorkerError
from dataload.testing.compare import difference

SHARDS, RECORDS = 3, 8
CALLS = ("open", "pread", "preadv", "read", "fstat", "stat", "lstat", "scandir", "listdir")
CALLS += ("makedirs", "statvfs", "write", "pwrite", "ftruncate", "fsync", "rename", "unlink", "utime")  # of the cache
NUMBERS = {
    errno.EIO: "store",
    errno.ESTALE: "store",
    errno.EACCES: "store",
    errno.ENOENT: "store",
    errno.ENOSPC: "machine",
    errno.EMFILE: "machine",
    errno.ENOMEM: "machine",
}
"""Error number -> owner of the failure."""

POLICIES = ("raise", "skip", "replace")

WRITTEN = {
    "syrah": ("syr", {}, {}),
    "torchrecord": ("torchrecord", {}, {}),
    "lmdb": ("lmdb", {"codec": "msgpack"}, {"codec": "msgpack"}),
    "tar": ("tar", {}, {"decode": "auto"}),
    "array_record": (
        "array_record",
        {"codec": "msgpack", "options": "group_size:1,uncompressed"},
        {"codec": "msgpack"},
    ),
    "tfrecord": ("tfrecord", {"codec": "msgpack"}, {"codec": "msgpack"}),
    "parquet": ("parquet", {}, {}),
    "arrow": ("arrow", {}, {}),
    "jsonl": ("jsonl", {}, {}),
    "tokens": ("npy", {}, {"format": "tokens", "window": 16}),
    "csv": ("csv", {}, {}),
    "folder": ("", {}, {}),
}
"""Suffix, options of the writer and options of the reader, by format."""


def write(directory, name):
    suffix, writing, reading = WRITTEN[name]
    for shard in range(SHARDS):
        path = directory / f"part-{shard}.{suffix}"
        rows = range(shard * RECORDS, (shard + 1) * RECORDS)
        if name == "tokens":
            np.save(path, np.arange(16 * RECORDS, dtype=np.uint16) + shard)
        elif name == "csv":
            path.write_text("n,x\n" + "".join(f"{n},{n * n}\n" for n in rows))
        elif name == "folder":
            (directory / f"class{shard}").mkdir()
            for n in rows:
                Image.fromarray(np.full((2, 3, 3), n, np.uint8)).save(directory / f"class{shard}" / f"{n}.png")
        else:
            with dataload.create(path, **writing) as writer:
                writer.extend([{"n": n, "x": n * n} if name == "jsonl" else _record(n) for n in rows])
    reading = {"format": name, **reading}  # to ask for installed formats takes longer than the rest
    options = reading if name == "folder" else {"cache": False, **reading}
    place = str(directory) if name == "folder" else str(directory / f"part-*.{suffix}")
    try:
        dataload.open(place, **options).close()
    except dataload.ConfigError:  # the format has no such option
        options = reading
    return lambda place=place, **more: dataload.open(place, **options, **more)


def _record(n):
    return {"x": np.full(50, n, np.int32), "n": np.int64(n)}


class Calls:
    """Counts dataload's own calls of the system, and lets some of them fail."""

    def __init__(self):
        self.made = []
        self._fails = lambda number: False
        self._error = 0

    def fail(self, error, fails):
        self.made, self._error, self._fails = [], error, fails

    def wrap(self, name, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            self.note(name, sys._getframe(1))
            return function(*args, **kwargs)

        return call

    def note(self, name, frame):
        if not str(frame.f_globals.get("__name__")).startswith(("dataload.storage", "dataload.sources")):
            return
        self.made.append(f"{name} in {frame.f_code.co_qualname}")
        if self._fails(len(self.made) - 1):
            raise OSError(self._error, os.strerror(self._error))

    @contextmanager
    def watched(self):
        calls = self

        class Map(mmap.mmap):
            def __new__(cls, *args, **kwargs):
                calls.note("mmap", sys._getframe(1))
                return super().__new__(cls, *args, **kwargs)

        with ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(mock.patch.object(os, name, self.wrap(name, getattr(os, name))))
            stack.enter_context(mock.patch.object(builtins, "open", self.wrap("builtins.open", open)))
            stack.enter_context(mock.patch.object(mmap, "mmap", Map))
            yield self


def epoch(opened, policy, **loading):
    with opened() as source, Loader(source, batch_size=5, on_error=policy, max_bad=1.0, **loading) as loader:
        return list(loader), loader.statistics().bad


def judge(opened, policy, want, owners, **loading):
    """Run an epoch; return "right" or "refused", or what is wrong with it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as that a cache cannot be used
            batches, bad = epoch(opened, policy, **loading)
    except BaseException as error:
        found = error.__cause__ if isinstance(error, WorkerError) else error
        with mock.patch.object(failures, "LIBRARIES", failures.LIBRARIES | {__name__}):  # the injected calls are here
            whose = failures.owner_of(found)
        if whose not in owners:
            return f"{type(found).__name__} is said to be the {whose}'s: {error}"
        return "refused" if isinstance(found, dataload.errors.SourceError) else f"a raw {type(found).__name__}: {error}"
    if bad:
        return f"{bad} records were called bad"
    return difference(batches, want, "batches") or "right"


def try_calls(name, opened, *, policies=POLICIES, numbers=NUMBERS, every=1, most=sys.maxsize, report=print):
    """Let each call of the system fail, once and from then on; return the outcomes, counted."""
    calls, outcomes = Calls(), Counter()
    with calls.watched():
        want, bad = epoch(opened, "raise")
        assert not bad
        made = len(calls.made)
        cases = [(n, number, policy, stays) for n in range(made) for number in numbers for policy in policies
                 for stays in (False, True)]  # fmt: skip
        for n, number, policy, stays in cases[:: max(every, len(cases) // most)]:
            calls.fail(number, (lambda made, n=n: made >= n) if stays else (lambda made, n=n: made == n))
            found = judge(opened, policy, want, {NUMBERS[number]})
            outcomes[found if found in ("right", "refused") else "wrong"] += 1
            if found not in ("right", "refused"):
                at = calls.made[n] if n < len(calls.made) else "no call"
                report(f"{name}: call {n}, {at}, {errno.errorcode[number]}{' for ever' if stays else ''}, "
                       f"on_error={policy!r}: {found}")  # fmt: skip
    return outcomes


class FaultyServer(FileServer):
    """Serves a directory, and lets one kind of fault meet all requests for content from the n-th on."""

    kind, first = None, 0

    def __init__(self, directory):
        self.reads = count()
        super().__init__(directory, _Handler)

    def fail(self, kind, first):
        self.kind, self.first, self.reads = kind, first, count()


class _Handler(FileHandler):
    def answer(self, status, body, headers=None):
        server, kind = self.server, None
        if self.command == "GET" and status in (200, 206) and next(server.reads) >= server.first:
            kind = server.kind
        if kind in ("403", "404", "500", "503"):
            return super().answer(int(kind), b"")
        if kind in ("reset", "cut"):
            self.close_connection = True
            if kind == "cut":
                super().answer(status, body[: len(body) // 2], headers, length=len(body))
            return self.connection.shutdown(2)
        return super().answer(status, {"short": body[:-1], "long": body + b"x" * 100}.get(kind, body), headers)


@contextmanager
def served(name, directory, **more):
    """Serve what `write` has written; yield the server, and what opens the data with a new cache each time."""
    suffix, _, reading = WRITTEN[name]
    with FaultyServer(directory) as server, tempfile.TemporaryDirectory() as cache:
        url = f"{server.endpoint}/part-{{0..{SHARDS - 1}}}.{suffix}"
        caches = count()

        def opened():
            remote = {"retries": 1, "timeout": 2.0, "cache": f"{cache}/{next(caches)}", **more}
            return dataload.open(
                url, **reading, remote=remote, storage_options={"client_options": {"allow_http": True}}
            )

        yield server, opened


def try_cache(name, directory, **choice):
    """Let each call of the system fail that reading by the cache makes; return the outcomes, counted."""
    with served(name, directory, mode="shards", retries=5, timeout=5.0) as (_, opened):
        return try_calls(name, opened, **choice)


HTTP_KINDS = ("403", "404", "500", "503", "reset", "short", "cut", "long")
OVER_HTTP = ("syrah", "tar", "array_record", "tfrecord", "parquet", "arrow", "jsonl", "csv", "tokens")


def try_requests(name, directory, *, policies=POLICIES, kinds=HTTP_KINDS, every=1, most=sys.maxsize, report=print):
    """Let the store fail from each request on; return the outcomes, counted."""
    outcomes = Counter()
    with served(name, directory) as (server, opened):
        want, bad = epoch(opened, "raise")
        assert not bad
        made = next(server.reads)
        cases = [(n, kind, policy) for n in range(made + 1) for kind in kinds for policy in policies]
        for n, kind, policy in cases[:: max(every, len(cases) // most)]:
            server.fail(kind, n)
            found = judge(opened, policy, want, {"store"})
            outcomes[found if found in ("right", "refused") else "wrong"] += 1
            if found not in ("right", "refused"):
                report(f"{name}: request {n}, {kind}, on_error={policy!r}: {found}")
    return outcomes


def main():
    given = command_line(__doc__, formats=[*WRITTEN], every=1)
    total = Counter()
    for name in given.formats:
        with tempfile.TemporaryDirectory() as directory:
            opened = write(Path(directory), name)
            found = {"system": try_calls(name, opened, every=given.every)}
            if name in OVER_HTTP:
                found["HTTP"] = try_requests(name, directory, every=given.every)
                found["cache"] = try_cache(name, directory, every=given.every)
            for what, outcomes in found.items():
                total += outcomes
                print(f"{name:14} {what:8} {dict(outcomes)}", flush=True)
    print(f"{sum(total.values())} cases, {total['wrong']} wrong")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
