"""Overwrites shards in place while a loader reads them: ``make torn``, or ``python tests/fuzz/torn.py --rounds 440``.

In each round a child process overwrites the shards of a data set, piece by piece, with those of another of equal sizes,
or cuts them. Every batch must have whole records of the first data set, and soon the job must end with the error of a
changed file.
"""

# ruff: noqa: T201 - a script that tells what it found

import mmap
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random, random
from statistics import median

import numpy as np
from drive import command_line

# isort: split
from equal_sizes import FORMATS, make

import dataload
from dataload.errors import ChangedFileError, CorruptFileError, WorkerError

OLD, NEW = 1, 2
SHARDS, RECORDS, VALUES = 3, 60, 2000
SECONDS = 2.0  # until the job must have ended, after the last piece
NAMES = [suffix for suffix in FORMATS if suffix not in (".npy", ".csv")]
NOT_KEPT = {".parquet": {"cached_bytes": 0}, ".jsonl.gz": {"cached_bytes": 0}}
NEVER_MAPPED = (".parquet", ".jsonl.gz", ".compressed.array_record", ".folder")
WRITERS = ("pieces", "backwards", "truncating", "mapped", "shrinking")


@dataclass(frozen=True, slots=True)
class Round:
    """What one round does."""

    format: str
    writer: str
    mapped: bool
    workers: int
    executor: str
    on_error: str

    @classmethod
    def of(cls, number: int) -> "Round":
        random, name = Random(number), NAMES[number % len(NAMES)]
        executor = "processes" if random.random() < 0.15 and name in (".syr", ".tar", ".jsonl") else "threads"
        return cls(
            format=name,
            writer=random.choice(WRITERS),
            mapped=name in NEVER_MAPPED or random.random() < 0.7,
            workers=random.choice((0, 2)) if executor == "threads" else 2,
            executor=executor,
            on_error=random.choice(("raise", "skip", "replace")),
        )


def overwrite(path: Path, new: Path, writer: str, pause: float) -> None:
    """Copy a file over another in place."""
    data = new.read_bytes()
    assert len(data) == path.stat().st_size, f"{path} and {new} are of different sizes"
    if writer == "shrinking":
        time.sleep(pause * random())
        os.truncate(path, int(len(data) * random()))
        return
    step = max(1, len(data) // 8)
    starts = [*range(0, len(data), step)]
    with open(path, "wb" if writer == "truncating" else "r+b", buffering=0) as stream:
        if writer == "mapped":
            with mmap.mmap(stream.fileno(), len(data)) as mapping:
                for start in starts:
                    mapping[start : start + step] = data[start : start + step]
                    time.sleep(pause)
            return
        for start in starts[::-1] if writer == "backwards" else starts:
            os.pwrite(stream.fileno(), data[start : start + step], start)
            time.sleep(pause)


def start_overwriting(root: Path, new: Path, writer: str) -> int:
    """Overwrite all files of a data set in a forked child; return its number."""
    child = os.fork()
    if child:
        return child
    files = [file for file in sorted(root.rglob("*")) if file.is_file() and file.name != "lock.mdb"]
    try:
        for file in files:
            overwrite(file, new / file.relative_to(root), writer, 0.0005 if len(files) > 9 else 0.003)
    finally:
        os._exit(0)


def is_right(batch) -> bool:
    """Return whether a batch has whole records of the old data set."""
    if "bin" in batch:
        return all(value == bytes([OLD]) * 4 * VALUES for value in batch["bin"])
    return bool((np.asarray(batch["x"]) == OLD).all())


def run_round(root: Path, this: Round) -> tuple[str, float]:
    """Run one round; return what is wrong, "" for nothing, and the seconds from the last piece to the error."""
    old, new = root / "old", root / "new"
    for root, value in ((old, OLD), (new, NEW)):
        root.mkdir()
        for shard in range(SHARDS):
            make(root / f"part-{shard}{this.format}", this.format, value, RECORDS, VALUES)
    options = FORMATS[this.format][1] | NOT_KEPT.get(this.format, {}) | ({} if this.mapped else {"map": False})
    executor = "fork" if this.executor == "processes" else this.executor
    source = dataload.open([old / f"part-{shard}{this.format}" for shard in range(SHARDS)], **options)
    loader = dataload.Loader(
        source, batch_size=16, shuffle="global", num_workers=this.workers, executor=executor,
        on_error=this.on_error, max_bad=10**9,
    )  # fmt: skip
    child, ended = 0, 0.0
    with source, loader:
        try:
            while True:
                for step, batch in enumerate(loader):
                    if not is_right(batch):
                        return f"{this}: a batch is torn", 0.0
                    if not child and step == 3:
                        child = start_overwriting(old, new, this.writer)
                    if child and not ended and os.waitpid(child, os.WNOHANG)[0]:
                        ended = time.monotonic()
                if ended and time.monotonic() - ended > SECONDS:
                    return f"{this}: no error", 0.0
        except (CorruptFileError, WorkerError) as error:  # the former as an epoch begins
            late = max(0.0, time.monotonic() - ended) if ended else 0.0
            cause = error.__cause__ if isinstance(error, WorkerError) else error
            expected = CorruptFileError if this.writer == "shrinking" else ChangedFileError
            if not isinstance(cause, expected) or "part-" not in str(error):
                return f"{this}: ended by {error}", late
            if loader.statistics().bad:
                return f"{this}: records are called bad", late
            return "", late
        finally:
            if child and not ended:
                os.waitpid(child, 0)


def run(rounds: int, first: int = 0) -> list[str]:
    wrong: list[str] = []
    late: list[float] = []
    kinds: Counter[str] = Counter()
    for number in range(first, first + rounds):
        with tempfile.TemporaryDirectory() as root:
            problem, seconds = run_round(Path(root), Round.of(number))
        kinds[Round.of(number).format] += 1
        if problem:
            wrong.append(f"round {number}: {problem}")
            print(wrong[-1], flush=True)
        else:
            late.append(seconds)
    named = ", ".join(f"{name} {count}" for name, count in kinds.items())
    print(f"{rounds} rounds ({named}): {len(wrong)} wrong; from the last piece to the error "
          f"{median(late or [0]):.3f} s (median), {max(late or [0]):.3f} s (most)")  # fmt: skip
    return wrong


if __name__ == "__main__":
    given = command_line(__doc__, rounds=440, first=0)
    sys.exit(bool(run(given.rounds, given.first)))
