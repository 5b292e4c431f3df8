"""Kills writers and conversions at random moments: ``make kills``, or ``python tests/fuzz/kills.py --kills 1000``.

A forked child writes a data set, over an old one or not, until SIGKILL ends it: after a random time, or before a random
operation on files. Then the destination must hold all of the old data or all of the new, and the next writer must leave
nothing but its own.
"""

# ruff: noqa: T201 - a script that tells what it found

import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

# Set before numpy starts threads: children are forks.
os.environ |= {"DATALOAD_CACHE": "0", "OPENBLAS_NUM_THREADS": "1"}

import numpy as np
from drive import command_line
from killed import at_operations, kill_before

import dataload
from dataload.catalog.manifest import MANIFEST_NAME
from dataload.convert import convert
from dataload.convert.plan import Target
from dataload.storage.local import atomic as parts

UNCOMPRESSED = "group_size:1,uncompressed"  # read without the package, whose threads would not survive a fork
# format -> (suffix, the writer's options, the reader's)
FORMATS = {
    "syrah": (".syr", {}, {}),
    "torchrecord": (".torchrecord", {}, {}),
    "lmdb": (".lmdb", {"codec": "tensorprotos"}, {"codec": "tensorprotos"}),
    "tar": (".tar", {}, {"decode": "auto"}),
    "array_record": (".array_record", {"codec": "tensorprotos", "options": UNCOMPRESSED}, {"codec": "tensorprotos"}),
    "video": (".mp4", {"pixel_format": "rgb24", "crf": 0, "preset": "ultrafast"}, {}),
}
RECORDS = 24
OLD, NEW = 1, 2


@dataclass(frozen=True)
class Case:
    """One way of writing."""

    format: str
    converts: bool
    over: bool  # an old data set
    exchanges: bool  # whether the system can exchange two directories

    @property
    def path(self) -> str:
        return f"out{FORMATS[self.format][0]}"

    @property
    def files(self) -> tuple[str, ...]:
        suffix = FORMATS[self.format][0]
        return tuple(f"out-{i:05d}-of-00002{suffix}" for i in range(2)) if self.converts else (self.path,)

    @property
    def names(self) -> set[str]:
        """All that may be in the directory in the end."""
        names = set(self.files)
        if self.format == "tar":
            names |= {f"{name.removesuffix('.tar')}.idx" for name in self.files}
        return names | {Target.of(self.path, self.format).journal, MANIFEST_NAME} if self.converts else names


CASES = [
    *(Case(name, converts, over, True) for name, converts, over in product(FORMATS, (False, True), (False, True))),
    *(Case(name, False, over, False) for name, over in product(("lmdb", "torchrecord", "syrah"), (False, True))),
]


def records_of(case: Case, version: int) -> list[dict]:
    if case.format == "video":
        return [{"frame": np.full((64, 64, 3), 100 * version + i, np.uint8)} for i in range(RECORDS)]
    return [{"x": np.full(1000 + i, 1000 * version + i), "name": f"{version}-{i}"} for i in range(RECORDS)]


def write(case: Case, version: int, *, again: bool = False) -> None:
    if not case.exchanges:
        parts._libc_rename = lambda: None
    options = FORMATS[case.format][1]
    if not case.converts:
        over = case.over or (again and os.path.exists(case.path))
        with dataload.create(case.path, format=case.format, overwrite=over, **options) as writer:
            writer.extend(records_of(case, version))
        return
    source = dataload.MemorySource(records_of(case, version))
    resume = again and not case.over
    convert(source, case.path, format=case.format, shards=2, writer_options=options, resume=resume, overwrite=case.over)


def in_child(work: Callable[[int], None], directory: Path) -> tuple[int, int]:
    """Start `work` in a directory; return the process, and a pipe that `work` may write to, closed at its end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    status = 1
    try:
        os.close(reader)
        os.chdir(directory)
        work(writer)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def finish(case: Case, version: int, directory: Path, *, again: bool) -> None:
    child, pipe = in_child(lambda _: write(case, version, again=again), directory)
    os.close(pipe)
    if os.waitpid(child, 0)[1]:
        raise AssertionError(f"writing failed: {'the run after the kill' if again else 'nothing was killed'}")


def count_operations(case: Case, directory: Path) -> tuple[int, float]:
    """Return the number of operations on files in an undisturbed run, and its seconds."""
    count = 0

    def note(number: int) -> None:
        nonlocal count
        count = number + 1

    def work(pipe: int) -> None:
        at_operations(note)
        begun = time.perf_counter()
        write(case, NEW)
        os.write(pipe, f"{count} {time.perf_counter() - begun}".encode())

    child, pipe = in_child(work, directory)
    text = os.read(pipe, 100).split()
    os.close(pipe)
    if os.waitpid(child, 0)[1]:
        raise AssertionError("writing failed")
    return int(text[0]), float(text[1])


def write_and_kill(case: Case, directory: Path, *, operation: int | None, seconds: float) -> bool:
    """Write, and kill the writer before an operation, or else after a time; return whether that was before its end."""

    def work(pipe: int) -> None:
        os.write(pipe, b"begun")
        if operation is not None:
            kill_before(operation)
        write(case, NEW)

    child, pipe = in_child(work, directory)
    os.read(pipe, 5)
    if operation is None and not select.select([pipe], [], [], seconds)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(pipe)
    status = os.waitpid(child, 0)[1]
    if status and not os.WIFSIGNALED(status):
        raise AssertionError("the writer failed before it was killed")
    return bool(status)


def problems(case: Case, directory: Path, versions: set[int], *, absent: bool = False) -> Iterator[str]:
    """Yield what is wrong with the data files, each of which must be one of the versions as a whole, or `absent`."""
    for name in case.files:
        path = directory / name
        if not os.path.lexists(path):
            if not absent:
                yield f"lost: {name}"
            continue
        try:
            with dataload.open(path, format=case.format, **FORMATS[case.format][2]) as source:
                found = [*source]
            [version] = {number // (100 if case.format == "video" else 1000) for number in map(first_number, found)}
            part = case.files.index(name)
            each = RECORDS // len(case.files)
            wanted = records_of(case, version)[part * each : (part + 1) * each]
            assert version in versions
            for record, expected in zip(found, wanted, strict=True):
                assert all(np.array_equal(record[name], value) for name, value in expected.items())
        except Exception as error:
            yield f"half-written: {name}: {type(error).__name__}: {error}"


def first_number(record: dict) -> int:
    return int(np.ravel(record.get("x", record.get("frame")))[0])


def leftovers(case: Case, directory: Path) -> Iterator[str]:
    for name in set(os.listdir(directory)) - case.names:
        yield f"left over: {name}"
    for name in case.files:
        if (directory / name).is_dir() and os.listdir(directory / name) != ["data.mdb"]:
            yield f"left over: {name} has {os.listdir(directory / name)}"


def kill_once(
    case: Case, old: Path, directory: Path, chooser: random.Random, plan: tuple[int, float]
) -> list[str] | None:
    """Return what was wrong after one kill, or None if the writer ended before it."""
    operations, seconds = plan
    shutil.copytree(old, directory)
    before = chooser.randrange(operations) if chooser.random() < 0.5 else None
    if not write_and_kill(case, directory, operation=before, seconds=chooser.uniform(0, seconds)):
        return None
    moment = "time" if before is None else f"operation {before} of {operations}"
    found = list(problems(case, directory, {OLD, NEW} if case.over else {NEW}, absent=not case.over))
    names = set(os.listdir(directory))
    left = not names <= case.names
    # Complete, but slower to open: an archive and its index cannot be replaced at once.
    without = case.format == "tar" and any(
        f"{name.removesuffix('.tar')}.idx" not in names for name in names & {*case.files}
    )
    try:
        finish(case, NEW, directory, again=True)
        found += [*problems(case, directory, {NEW}), *leftovers(case, directory)]
        if case.converts:
            with dataload.open(directory) as source:  # compares the manifest with the files
                assert len(source) == RECORDS, f"the manifest lists {len(source)} records"
    except AssertionError as error:
        found.append(f"failed: {error}")
    COUNTS[moment.split()[0]] += 1
    COUNTS["with leftovers before the next run"] += left
    COUNTS["archives without an index"] += without
    return [f"{case}, killed at {moment}: {problem}" for problem in found]


COUNTS: Counter[str] = Counter()


def main() -> int:
    given = command_line(__doc__, kills=1000, seed=-1)
    seed = random.randrange(2**32) if given.seed < 0 else given.seed
    chooser = random.Random(seed)
    found: list[str] = []
    done: Counter[str] = Counter()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        plans = {}
        cases = chooser.sample(CASES, len(CASES))
        while done.total() < given.kills:
            case = cases[done.total() % len(cases)]
            if case not in plans:
                old, tried = place / f"old-{len(plans)}", place / "tried"
                old.mkdir()
                if case.over:
                    finish(case, OLD, old, again=False)
                shutil.copytree(old, tried)
                plans[case] = old, count_operations(case, tried)
                shutil.rmtree(tried)
            old, plan = plans[case]
            problem = kill_once(case, old, place / "work", chooser, plan)
            shutil.rmtree(place / "work")
            if problem is not None:
                done[case.format] += 1
                found += problem
                print(*problem, sep="\n", end="\n" if problem else "", flush=True)
    kinds = Counter(line.split(": ")[1] for line in found)
    print(f"{done.total()} kills in {time.perf_counter() - begun:.0f} s, seed {seed}: {dict(done)}, {dict(COUNTS)}")
    print(", ".join(f"{kinds[kind]} {kind}" for kind in ("lost", "half-written", "left over", "failed")))
    return 1 if found else 0


if __name__ == "__main__":
    with suppress(ImportError):
        import array_record.python.array_record_module  # noqa: F401 - once, and not in every child
    sys.exit(main())
