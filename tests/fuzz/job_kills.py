"""Kills each kind of job before each operation on files and at each request; lets several write to one destination.

``make kills``, or ``python tests/fuzz/job_kills.py --every 10 --rounds 20 s3/convert``. Run again, a job must leave
what an unbroken run leaves: at an object store with the request served and not, and locally also with its log cut at
every byte. Of several jobs at one destination, whoever does not finish says why, and readers see the records of one.
"""

# ruff: noqa: T201 - a script that tells what it found

import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

os.environ |= {"DATALOAD_CACHE": "0", "OPENBLAS_NUM_THREADS": "1"}

from drive import command_line  # which finds the others

# isort: split
import killed
import numpy as np
from converted import content
from fault_proxy import FaultProxy, Faults
from object_server import ObjectServer

from dataload.errors import DataloadError

# Without a manifest, new shards open as far as they are written.
SEEN = (None, [*range(9)], [*range(3)], [*range(4)], [*range(6)], [0] * 8, [*range(9), 0, 2, 1])
WHOLE = ([*range(9)], [*range(4)], [*range(4, 9)], [0] * 8, [0] * 4)  # of one file or two, new or old
COUNTS: Counter[str] = Counter()
LOST = re.compile(
    r"another (process|conversion)|exists|is the journal of|has changed|cannot (resume|write|merge)|in \d+ parts|"
    r"have not (run|finished)"
)


class Here:
    """Local directories."""

    kind = "local"

    def __init__(self, root: Path) -> None:
        self.root, self.numbers = root, itertools.count()

    def new(self, job: str, suffix: str) -> tuple[str, str, dict]:
        directory = self.root / f"{next(self.numbers)}"
        directory.mkdir()
        place = str(directory), suffix, {}
        killed.prepare(job, *place, forget=lambda name: (directory / name).unlink())
        return place

    def content(self, place: tuple) -> dict:
        # A folder of the manifest, empty, stays until the manifest changes again.
        assert not [*Path(place[0]).glob(".a*.tmp")], "a hidden folder is left over"
        return content(Path(place[0]))

    def half_written(self, job: str, place: tuple) -> list[str]:
        """Return the files at the destination that are neither the old ones nor the new ones as a whole, or missing."""
        files = sorted(Path(place[0]).glob(f"a*.{place[1]}")) if job in killed.FEW else []
        lost = {"overwrite": 2, "rewrite": 1, "rewrite without exchange": 1}.get(job, 0) - len(files)
        return ["lost"] * lost + [path.name for path in files if readable((str(path), *place[1:])) not in WHOLE]

    def drop(self, place: tuple) -> None:
        shutil.rmtree(place[0])

    def count(self, job: str, place: tuple) -> int:
        """Do a job, and return the number of moments at which it may be killed."""
        counted = self.root / "counted"
        assert killed.run(killed.job_killed_before, job, place, killed.NEVER, counted) == 0
        return int(counted.read_text())

    def kill(self, job: str, place: tuple, moment: int) -> int:
        return killed.run(killed.job_killed_before, job, place, moment, self.root / "counted")


class There(Here):
    """Directories of an object store; two moments for each request, before and after the store has served it."""

    kind = "s3"

    def __init__(self, root: Path, server: ObjectServer, proxy: FaultProxy) -> None:
        super().__init__(root)
        self.server, self.proxy, self.bucket = server, proxy, server.bucket()

    def options(self, node: object = "") -> dict:
        cache = self.root / f"node{node}"
        return {"storage_options": self.server.storage_options(self.proxy.endpoint), "remote": {"cache": str(cache)}}

    def new(self, job: str, suffix: str) -> tuple[str, str, dict]:
        name = f"d{next(self.numbers)}"
        place = f"s3://{self.bucket}/{name}", suffix, self.options()
        killed.prepare(job, *place, forget=lambda file: self.server.store(self.bucket).delete(f"{name}/{file}"))
        return place

    def _objects(self, place: tuple) -> list[str]:
        prefix = f"{place[0].rpartition('/')[2]}/"
        return [meta["path"] for meta in self.server.store(self.bucket).list(prefix).collect()]

    def content(self, place: tuple) -> dict:
        copy = self.root / "copy"
        for key in self._objects(place):
            path = copy / key.partition("/")[2]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(self.server.store(self.bucket).get(key).bytes()))
        found = content(copy)
        shutil.rmtree(copy)
        for uploads in self.root.glob("node*/uploads"):
            assert not os.listdir(uploads), "an upload is left over"
        return found

    def half_written(self, job: str, place: tuple) -> list[str]:
        return []

    def drop(self, place: tuple) -> None:
        if objects := self._objects(place):
            self.server.store(self.bucket).delete(objects)

    def count(self, job: str, place: tuple) -> int:
        self.proxy.reset()
        assert killed.run(killed_job, job, place) == 0
        return 2 * self.proxy.served

    def kill(self, job: str, place: tuple, moment: int) -> int:
        self.proxy.reset()
        self.proxy.kill, self.proxy.fatal = lambda: process.kill(), (moment // 2, moment % 2 == 1)
        process = killed.start(killed_job, job, place)
        process.join()
        self.proxy.fatal = None
        code = process.exitcode
        process.close()
        return code


def killed_job(job: str, place: tuple) -> None:
    killed.JOBS[job](*place, again=False)


def readable(place: tuple) -> list[int] | None:
    """Return the numbers of the records that opening the directory gives; None if it is refused."""
    try:
        with killed.opened(*place) as source:
            return [int(np.ravel(record.get("n", record.get("frame")))[0]) for record in source]
    except DataloadError:
        return None


def kill_everywhere(where: Here, job: str, suffix: str, every: int) -> Iterator[str]:
    """Yield what was wrong after a kill at each `every`-th moment of a job."""
    place = where.new(job, suffix)
    moments = where.count(job, place)
    killed.complete(job, *place)
    expected = where.content(place)
    where.drop(place)
    for moment in range(random.randrange(every), moments, every):
        name = f"{where.kind}/{job}/{suffix} at {moment} of {moments}"
        place = where.new(job, suffix)
        try:
            if where.kill(job, place, moment) != -signal.SIGKILL:
                COUNTS["not reached"] += 1  # requests of several threads differ in number
                continue
            COUNTS[f"kills {where.kind}"] += 1
            found = readable(place)
            if found not in SEEN:
                yield f"{name}: readers see {found}"
            if wrong := where.half_written(job, place):
                yield f"{name}: half-written: {wrong}"
            killed.JOBS[job](*place, again=True)
            killed.complete(job, *place)
            if where.content(place) != expected:
                yield f"{name}: another content: {differences(where.content(place), expected)}"
        except Exception as error:
            yield f"{name}: {type(error).__name__}: {error}"
        finally:
            where.drop(place)


def differences(one: dict, other: dict) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def cut_everywhere(where: Here, suffix: str, every: int) -> Iterator[str]:
    """Yield what was wrong after a conversion was killed and its log cut at each `every`-th byte."""
    place, unbroken = where.new("convert", suffix), where.new("convert", suffix)
    killed.JOBS["convert"](*unbroken, again=False)
    moments = where.count("convert", unbroken := where.new("convert", suffix))
    expected = where.content(unbroken)
    log, longest = f".a.{suffix}.convert.log", b""
    for moment in range(moments - 1, 0, -1):  # the last one in which there is a log
        where.drop(place)
        place = where.new("convert", suffix)
        where.kill("convert", place, moment)
        path = Path(place[0], log)
        if path.exists() and (longest := path.read_bytes()).count(b"\n") > 2:
            break
    for cut in range(0, len(longest) + 1, every):
        copy = where.root / "cut"
        shutil.copytree(place[0], copy)
        (copy / log).write_bytes(longest[:cut])
        COUNTS["cuts"] += 1
        try:
            killed.JOBS["convert"](str(copy), suffix, {}, again=True)
            if content(copy) != expected:
                yield f"cut of {suffix} at {cut} of {len(longest)}: {differences(content(copy), expected)}"
        except Exception as error:
            yield f"cut of {suffix} at {cut} of {len(longest)}: {type(error).__name__}: {error}"
        shutil.rmtree(copy)


PLANS = {  # of two or three jobs
    "one plan": [{"resume": True}] * 3,
    "two plans": [{"resume": True}, {"resume": True, "shards": 3}, {"resume": True}],
    "two sources": [{"resume": True}, {"resume": True, "records": 8}],
    "a part twice": [{"part": (1, 2)}, {"part": (1, 2)}, {"part": (2, 2)}],
    "two plans of parts": [{"part": (1, 2)}, {"part": (1, 3), "shards": 3}],
    "overwriting": [{"resume": True}, {"overwrite": True}, {"overwrite": True}],
}


def compete(where: Here, plan: str, suffix: str, chooser: random.Random) -> Iterator[str]:
    """Yield what was wrong after several jobs wrote to one destination at once."""
    place = where.new("convert", suffix)
    settings = PLANS[plan][: chooser.choice((2, 3))]
    told = [where.root / f"told-{number}" for number in range(len(settings))]
    processes = []
    for number, (each, path) in enumerate(zip(settings, told, strict=True)):
        own = (*place[:2], where.options(number) if isinstance(where, There) else {})
        processes.append(killed.start(killed.job_with_pauses, own, each, chooser.random(), path))
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    outcomes = [path.read_text() if path.exists() else "it ended" for path in told]
    for path in told:
        path.unlink(missing_ok=True)
    name = f"{where.kind}/{plan}/{suffix}: {outcomes}"
    COUNTS[f"rounds {where.kind}"] += 1
    COUNTS["jobs that lost"] += len(outcomes) - outcomes.count("done")
    if any(codes) or any(text != "done" and not LOST.search(text) for text in outcomes):
        yield f"{name}: an error that is not about the other"
    found = readable(place)
    if (
        "done" in outcomes
        and plan not in ("a part twice", "two plans of parts")
        and found not in ([*range(9)], [*range(8)])
    ):
        yield f"{name}: readers see {found}"
    try:
        if plan == "a part twice":
            for number in (1, 2):
                killed.written(*place, part=(number, 2))
            killed.written(*place, merge=True)
        elif "done" in outcomes and plan == "one plan":
            killed.JOBS["convert"](*place, again=True)
        else:
            killed.written(*place, overwrite=True)
        alone = where.new("convert", suffix)
        killed.JOBS["convert"](*alone, again=False)
        ours, expected = where.content(place), where.content(alone)
        if any("-of-00003" in file for file in ours):  # the other plan was done first: it is a data set of its own
            ours, expected = (
                {k: v for k, v in each.items() if k in expected and k != "dataload.json"} for each in (ours, expected)
            )
        if ours != expected:
            yield f"{name}: another content: {differences(ours, expected)}"
        where.drop(alone)
    except Exception as error:
        yield f"{name}: {type(error).__name__}: {error}"
    where.drop(place)


def chosen(only: list[str], places: list[Here], kinds: Iterable[str]) -> list[tuple[Here, str, str]]:
    """Return the places, kinds and formats whose names, such as ``s3/convert/tar``, have one of the patterns."""
    return [
        (where, kind, suffix)
        for where, kind, suffix in itertools.product(places, kinds, killed.FORMATS | killed.MORE)
        if (suffix in killed.FORMATS or (kind in killed.FEW and where.kind == "local"))
        and (not only or any(re.search(each, f"{where.kind}/{kind}/{suffix}") for each in only))
    ]


def main() -> int:
    given = command_line(__doc__, every=1, rounds=100, seed=-1, only=[])
    seed = random.randrange(2**32) if given.seed < 0 else given.seed
    random.seed(seed)
    chooser, begun, found = random.Random(seed), time.monotonic(), list[str]()
    multiprocessing.set_forkserver_preload(["dataload.convert", "dataload.convert.indexing", "killed"])
    with tempfile.TemporaryDirectory() as name, ObjectServer() as server, FaultProxy(server.endpoint) as proxy:
        places = [Here(Path(name, "here")), There(Path(name, "there"), server, proxy)]
        for where in places:
            where.root.mkdir()
        searches = [
            *(partial(kill_everywhere, *each) for each in chosen(given.only, places, killed.JOBS)),
            *(partial(cut_everywhere, places[0], suffix) for _, _, suffix in chosen(given.only, places[:1], ["cut"])),
        ]
        for problem in itertools.chain.from_iterable(search(given.every) for search in searches):
            found.append(problem)
            print(problem, flush=True)
        rounds = chosen(given.only, places, PLANS)
        for _ in range(given.rounds if rounds else 0):
            proxy.faults = Faults(latency=chooser.choice((0, 0.003, 0.03)))
            for problem in compete(*chooser.choice(rounds), chooser):
                found.append(problem)
                print(problem, flush=True)
    print(f"{dict(COUNTS)} in {time.monotonic() - begun:.0f} s, seed {seed}: {len(found)} failed")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
