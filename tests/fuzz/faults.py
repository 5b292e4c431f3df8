"""Failures of the operating system and of an HTTP store, injected at every call that reading makes.

    make faults                       every call of every format, every error number and every policy
    make faults FORMATS='tar jsonl'   some formats

Whatever fails, the batches are those without a failure, or the job ends with an error that says whose fault it is: the
store's or the machine's. No record is ever called bad. tests/integration/test_searches.py runs a small sample.
"""

# ruff: noqa: T201 - a script that tells how far it is

from __future__ import annotations

import argparse
import builtins
import errno
import functools
import http.server
import mmap
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from unittest import mock

import numpy as np
from PIL import Image

import dataload
from dataload import Loader
from dataload._util import failures
from dataload.errors import WorkerError
from dataload.testing.compare import difference

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "support"))
from object_server import LoopbackServer  # noqa: E402

GOLDEN = ROOT / "golden"
SHARDS, RECORDS = 3, 8
CALLS = ("open", "pread", "preadv", "read", "fstat", "stat", "lstat", "scandir", "listdir")
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
    """Write shards, and return what opens them."""
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
    """All batches of an epoch, and the number of records that were called bad."""
    with opened() as source, Loader(source, batch_size=5, on_error=policy, max_bad=1.0, **loading) as loader:
        batches = list(loader)
        return batches, loader._bad.spent


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
        return "refused" if isinstance(found, dataload.SourceError) else f"a raw {type(found).__name__}: {error}"
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


class FileServer(LoopbackServer):
    """Serves a directory by ranges, and lets one kind of fault meet all requests for content from the n-th on."""

    def __init__(self, directory):
        self.directory, self.kind, self.first, self.reads = Path(directory), None, 0, count()
        super().__init__(_Handler)

    def fail(self, kind, first):
        self.kind, self.first, self.reads = kind, first, count()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        data = self.content()
        if data is not None:
            self.answer(200, {"Content-Length": str(len(data)), "Accept-Ranges": "bytes"})

    def do_GET(self):
        data, server = self.content(), self.server
        if data is None:
            return
        kind = server.kind if next(server.reads) >= server.first else None
        span, status, headers = self.headers.get("Range"), 200, {}
        if span is not None:
            first, _, last = span.removeprefix("bytes=").partition("-")
            start, stop = int(first or 0), min(int(last or len(data) - 1), len(data) - 1)
            status, headers = 206, {"Content-Range": f"bytes {start}-{stop}/{len(data)}"}
            data = data[start : stop + 1]
        if kind in ("403", "404", "500", "503"):
            self.answer(int(kind), {"Content-Length": "0"})
            return
        if kind == "reset":
            self.close_connection = True
            self.connection.shutdown(2)
            return
        body = {"short": data[:-1], "long": data + b"x" * 100}.get(kind, data)
        length = len(data) if kind == "cut" else len(body)
        self.answer(status, {**headers, "Content-Length": str(length)})
        if kind == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            self.connection.shutdown(2)
        else:
            self.wfile.write(body)

    def content(self):
        path = self.server.directory / self.path.lstrip("/")
        if path.is_file():
            return path.read_bytes()
        self.answer(404, {"Content-Length": "0"})
        return None

    def answer(self, status, headers):
        self.send_response_only(status)
        headers = {"ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT", **headers}
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()

    def log_message(self, *_):
        """Print nothing."""


HTTP_KINDS = ("403", "404", "500", "503", "reset", "short", "cut", "long")
OVER_HTTP = ("syrah", "tar", "array_record", "tfrecord", "parquet", "arrow", "jsonl", "csv", "tokens")


def try_requests(name, directory, *, policies=POLICIES, kinds=HTTP_KINDS, every=1, most=sys.maxsize, report=print):
    """Let the store fail from each request on; return the outcomes, counted."""
    suffix, _, reading = WRITTEN[name]
    outcomes = Counter()
    with FileServer(directory) as server, tempfile.TemporaryDirectory() as cache:
        url = f"{server.endpoint}/part-{{0..{SHARDS - 1}}}.{suffix}"
        caches = count()

        def opened():
            remote = {"retries": 1, "timeout": 2.0, "cache": f"{cache}/{next(caches)}"}
            return dataload.open(
                url, **reading, remote=remote, storage_options={"client_options": {"allow_http": True}}
            )

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
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("formats", nargs="*", help="names; all by default")
    arguments.add_argument("--every", type=int, default=1, help="try only every n-th case")
    given = arguments.parse_args()
    total = Counter()
    for name in given.formats or WRITTEN:
        with tempfile.TemporaryDirectory() as directory:
            opened = write(Path(directory), name)
            begun = time.monotonic()
            found = {"system": try_calls(name, opened, every=given.every)}
            if name in OVER_HTTP:
                found["HTTP"] = try_requests(name, directory, every=given.every)
            for what, outcomes in found.items():
                total += outcomes
                print(f"{name:14} {what:8} {dict(outcomes)}", flush=True)
            print(f"{name:14} {time.monotonic() - begun:6.1f} s", flush=True)
    print(f"{sum(total.values())} cases, {total['wrong']} wrong")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
