"""Jobs that share a cache, at random: ``make jobs``, or ``python tests/fuzz/cache_jobs.py --rounds 200``.

A round is a pure function of its number: two or three processes read data sets of sixteen shards at URLs through one
cache, whose budget is between one shard and all of the data. Some are killed after some steps, and start again. Each
must receive the batches that it would read from local files, never wait for 10 s, and end, or say what it needs.
"""

# ruff: noqa: T201 - a script that tells how far it is

import faulthandler
import hashlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from drive import drive  # first: it adds tests/support to the path
from object_server import FileServer
from remote_sets import FORMATS, write_shards

import dataload
from dataload.errors import DataloadError
from dataload.samplers import PoolShuffle, ShardSequential

SHARDS, RECORDS, BYTES = 16, 12, 900
NAMES = ("syr", "tar", "uncompressed", "lmdb", "array_record")
WHOLE = ("lmdb", "array_record")
BRACES = f"{{00..{SHARDS - 1:02}}}"
LONGEST = 10.0  # seconds without a batch
TIMEOUT = 4.8  # of the setting `remote.timeout`
TOLD = ("do not fit into the", "can only be read as a whole, and the other jobs in the cache", "has no room for")


def settings_of(order: str, batch: int, epochs: int) -> dict[str, Any]:
    lengths = (RECORDS,) * SHARDS
    orders = {
        "shards": lambda: {"sampler": ShardSequential(lengths, 3)},
        "pool": lambda: {"sampler": PoolShuffle(ShardSequential(lengths, 4), 2 * RECORDS, 4)},
        "in order": lambda: {"shuffle": False},
        "global": lambda: {"shuffle": "global", "seed": 5},
    }
    return {**orders[order](), "batch_size": batch, "epochs": epochs}


def digests(path: str, name: str, given: tuple[str, int, int], workers: dict[str, Any], **options: Any):
    """Yield a hash of each batch."""
    with (
        dataload.open(path, **FORMATS[name][2], **options) as source,
        dataload.Loader(source, **settings_of(*given), **workers) as loader,
    ):
        for _ in range(given[2]):
            for batch in loader:
                yield hashlib.sha256(b"".join(np.asarray(batch[name]).tobytes() for name in sorted(batch))).hexdigest()


def run_job(connection: Any, *given: Any, **options: Any) -> None:
    """Run in a process of its own: send what is read, and how it ended."""
    faulthandler.register(signal.SIGUSR1)
    try:
        for digest in digests(*given, **options):
            connection.send(digest)
        connection.send(None)
    except DataloadError as error:
        connection.send((type(error).__name__, str(error)))


def busy() -> float:
    """Return how much longer everything takes, because the machine has too much to do."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


class Job:
    """A job of a round, which is killed after each of some numbers of steps."""

    def __init__(self, data: "Data", random: Random, remote: dict[str, Any]) -> None:
        self.name = random.choice(NAMES)
        order = random.choice(("shards", "pool", "in order", "global"))
        self.given = order, random.choice((4, 7)), random.choice((1, 2))
        self.workers = {"num_workers": random.choice((0, 0, 2))}
        self.kills = [random.randrange(1, 12) for _ in range(random.choice((0, 0, 1, 2)))]
        self.path, self.remote = f"{data.server.endpoint}/{data.pattern(self.name)}", remote
        self.expected = data.expected(self.name, self.given)
        self.told = ""
        self.process: Any = None

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self.found: list[str] = []
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=run_job,
            args=(theirs, self.path, self.name, self.given, self.workers),
            kwargs={"remote": self.remote},
        )
        self.process.start()
        theirs.close()
        self.moved = time.monotonic()

    def hangs(self) -> bool:
        """Return whether there was no batch for long; a machine with too much to do has more time."""
        factor = busy()
        if self.name in WHOLE and not self.found:  # it opens its shards one after another, or says what it needs
            factor *= 6
        return time.monotonic() - self.moved > factor * LONGEST

    def look(self) -> bool:
        """Take a message; return whether the job goes on."""
        self.moved = time.monotonic()
        try:
            message = self.connection.recv()
        except EOFError:
            raise AssertionError(f"{self}: ended without a word") from None
        if isinstance(message, str):
            assert message == self.expected[len(self.found)], f"{self}: step {len(self.found)} differs"
            self.found.append(message)
            if self.kills and len(self.found) == self.kills[0]:
                del self.kills[0]
                self.process.kill()
                self.end()
                self.start()
            return True
        if message is None:
            assert len(self.found) == len(self.expected), f"{self}: {len(self.found)} steps"
        else:
            self.told = f"{message[0]}: {message[1]}"
            if message[0] == "StoreError":  # the server is slow, because the machine has too much to do
                print(f"{self} starts again: {self.told}", flush=True)
                self.told = ""
                self.end()
                self.start()
                return True
            assert self.name in WHOLE, f"{self}: {self.told}"
            assert any(text in self.told for text in TOLD), f"{self}: {self.told}"
        self.end()
        return False

    def end(self) -> None:
        self.process.join()
        self.process.close()
        self.connection.close()

    def __repr__(self) -> str:
        return f"{self.name} {self.given} {self.workers}"


class Data:
    """The data sets, locally and on a server."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in NAMES:
            (directory / name).mkdir()
            write_shards(directory / name, name, SHARDS, RECORDS, BYTES)
        self.sizes = {name: [file.stat().st_size for file in self.files(name)] for name in NAMES}
        self.server = FileServer(directory)
        self.expected = cache(self._expected)

    def files(self, name: str) -> list[Path]:
        return sorted((self.directory / name).glob(self.pattern(name).partition("/")[2].replace(BRACES, "*")))

    def pattern(self, name: str) -> str:
        return f"{name}/part-{BRACES}.{FORMATS[name][0]}" + ("/data.mdb" if name == "lmdb" else "")

    def _expected(self, name: str, given: tuple[str, int, int]) -> list[str]:
        return list(digests(str(self.directory / self.pattern(name)), name, given, {}))


def run_round(data: Data, number: int, directory: Path) -> str:
    random = Random(number)
    remote: dict[str, Any] = {"cache": str(directory), "mode": "shards", "timeout": TIMEOUT * busy(), "connections": 4}
    jobs = [Job(data, random, remote) for _ in range(random.choice((2, 3)))]
    sizes = [size for name in {job.name for job in jobs} for size in data.sizes[name]]
    one, everything = max(sizes), sum(sizes) + 1
    part = random.choice((0.0, random.random() ** 3, random.random(), 1.0))
    remote["budget"] = int(one + part * (everything - one))
    ends: list[str] = []
    try:
        for job in jobs:
            job.start()
        running = list(jobs)
        while running:
            ready = wait([job.connection for job in running], 0.2)
            for job in list(running):
                if job.connection in ready and not job.look():
                    running.remove(job)
                    ends.append("told what it needs" if job.told else "complete")
                elif job.hangs():
                    os.kill(job.process.pid, signal.SIGUSR1)  # prints its stacks
                    time.sleep(1)
                    raise AssertionError(f"{job}: no batch for {LONGEST} s after {len(job.found)} steps")
        for job in jobs:
            if job.told:  # alone it has all of the budget
                check_alone(job, data)
        kept = sum(path.stat().st_size for path in (directory / "shards").iterdir())
        assert kept <= remote["budget"], f"{kept} bytes are in the cache"
    finally:
        for job in jobs:
            with suppress(ValueError):
                job.process.kill()
                job.end()
    return ", ".join(sorted(ends))


def check_alone(job: Job, data: Data) -> None:
    """Run a job that had no room beside others; only if the budget is too small for it alone may it say so again."""
    told, job.told, job.kills = job.told, "", []
    job.start()
    while job.connection.poll(6 * LONGEST):
        if not job.look():
            assert not job.told or "do not fit into the" in job.told, f"{job} alone: {job.told}; before: {told}"
            return
    raise AssertionError(f"{job} alone: no batch for {LONGEST} s")


def main() -> int:
    multiprocessing.get_context("forkserver").set_forkserver_preload(["dataload", "obstore", "numpy", "remote_sets"])
    with tempfile.TemporaryDirectory(prefix="cache-jobs-", ignore_cleanup_errors=True) as directory:
        data = Data(Path(directory))

        def check(number: int) -> str:
            with tempfile.TemporaryDirectory(prefix="cache-") as root:
                return run_round(data, number, Path(root))

        with data.server:
            return drive(__doc__, "rounds", 200, check)


if __name__ == "__main__":
    sys.exit(main())
