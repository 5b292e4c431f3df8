"""Small files that expand to huge ones, for every container of every format: none may take more than was promised.

    make bombs                        all formats
    make bombs FORMATS='arrow csv'    some of them

The promise: memory at most twice the data (the file, and what was asked for) plus 64 MiB plus `max_record_bytes`, and
time linear in both; a hostile file costs an error within 5 s. Each bomb runs in a forked process, with 16 MiB as
`max_record_bytes`. Bombs are generated from the types that a format can nest: see `bombs_of_tables` and its neighbours.
"""

# ruff: noqa: T201 - a script that tells what it found

import importlib
import os
import pkgutil
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from drive import command_line

import dataload
from dataload.errors import DataloadError
from dataload.types import BytesColumn

LIMIT = 16 << 20  # max_record_bytes
FIXED = 64 << 20
SECONDS = 5.0  # of CPU
MOST_BYTES = 3 << 30  # of address space beside what the process has; array_record's threads reserve much
ROOT = Path(__file__).parents[2]
MODULES = ["cramjam", "google.protobuf", "lmdb", "msgpack", "simplejpeg", "soundfile"]
MODULES += [f"PIL.{kind}ImagePlugin" for kind in ("Bmp", "Gif", "Png", "Ppm", "Tiff", "WebP")]
RECORDS = 8  # read at once
LINEAR = {"x.jsonl": b"{}\n", "x.csv": b"1\n", "x.tfrecord": bytes(16)}


@dataclass(frozen=True)
class Bomb:
    """A file or folder that is small for what it claims.

    Attributes:
        name: What it is.
        make: Writes it into an empty folder, and returns what to open; None if no file has such a type.
        options: Options of `dataload.open`.
        times: How many times the data it may take; more than twice is an exception that SECURITY.md names.
        more: Bytes that it may take besides, an exception, too.
    """

    name: str
    make: Callable[[Path], Path | None]
    options: Mapping[str, Any] = field(default_factory=dict)
    times: int = 2
    more: int = 0


def main() -> int:
    given = command_line(__doc__, formats=[], only="", all=False, linear=False)
    from bombs_of_records import FORMATS

    import_all()
    warm_up()

    failed = count = 0
    for name in given.formats or FORMATS:
        for bomb in FORMATS[name]():
            if given.only in bomb.name:
                found = try_bomb(bomb)
                count += 1
                failed += bool(found.broken)
                if found.broken or given.all:
                    print(f"{name:14} {bomb.name:60} {found}", flush=True)
    for name, line in LINEAR.items() if given.linear else ():
        found = slower_than_linear(name, line)
        failed += bool(found)
        print(f"{name}: {found or 'linear'}")
    print(f"{count} bombs, {failed} break the promise")
    return 1 if failed else 0


def import_all() -> None:
    """Import what formats need, so that it does not count as the memory that a file takes."""
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    for folder in ("codecs", "sources", "convert"):
        for found in pkgutil.walk_packages([str(ROOT / "dataload" / folder)], f"dataload.{folder}."):
            with suppress(ImportError):
                importlib.import_module(found.name)


def warm_up() -> None:
    """Read good files, so that what is imported on first use does not count either."""
    with tempfile.TemporaryDirectory() as directory:
        for name in ("a.arrow", "a.parquet", "a.jsonl.gz", "a.csv"):
            path = Path(directory, name)
            if name.endswith(".csv"):
                path.write_text("x,t,l\n1,a,2\n")
            else:
                with dataload.create(path) as writer:
                    writer.write({"x": 1, "t": "a", "l": [["a"], []]})
            with dataload.open(path) as source:
                source.read([0])
                source.read_batch([0])


@dataclass(frozen=True)
class Found:
    """What a bomb took.

    Attributes:
        memory: Bytes at the peak, beside those before.
        allowed: Bytes that it may take.
        seconds: Of CPU.
        outcome: What happened, in words.
        broken: Why the promise is broken; empty if it holds.
    """

    memory: int
    allowed: int
    seconds: float
    outcome: str
    broken: str

    def __str__(self) -> str:
        sizes = f"{self.memory >> 20:6} of {self.allowed >> 20:5} MiB {self.seconds:6.2f} s"
        return f"{sizes}  {self.broken or 'kept'}: {self.outcome[:150]}"


def try_bomb(bomb: Bomb) -> Found:
    """Make a bomb, and open and read it in a forked process."""
    with tempfile.TemporaryDirectory() as directory:
        path = _make(bomb, Path(directory))
        if path is None:
            return Found(0, 0, 0.0, "there is no such file", "")
        size = sum(each.stat().st_size for each in Path(directory).rglob("*") if each.is_file())
        # The pages of a mapped file count once more, though they are the kernel's.

        def most(asked: int) -> int:
            return size + bomb.times * (size + asked) + FIXED + LIMIT + bomb.more

        return _in_child(lambda report: _read(path, {"max_record_bytes": LIMIT, **bomb.options}, most, report))


def _make(bomb: Bomb, directory: Path) -> Path | None:
    """Write a bomb in a process of its own: libraries that were used for it may not be used in a fork."""
    text, _, _ = _fork(lambda report: report(str(bomb.make(directory) or "none")))
    if not text:
        raise AssertionError(f"{bomb.name}: it cannot be made")
    return None if text == ["none"] else Path(text[0])


def _fork(run: Callable[[Callable[[str], None]], None]) -> tuple[list[str], int, float]:
    """Run a function in a fork; return the lines that it reports, its status and its seconds of CPU."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            run(lambda line: os.write(writing, line.replace("\n", " ").encode()[:2000] + b"\n"))
        except BaseException:
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        lines = stream.read().splitlines()
    _, status, used = os.wait4(child, 0)
    return lines, status, used.ru_utime + used.ru_stime


def _in_child(run: Callable[[Callable[[str], None]], None]) -> Found:
    def limited(report: Callable[[str], None]) -> None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        run(report)

    lines, status, seconds = _fork(limited)
    peaks = [tuple(map(int, line.split()[1:3])) for line in lines if line.startswith("peak ")]
    texts = [line for line in lines if not line.startswith("peak ")]
    memory, allowed = max(peaks, key=lambda peak: peak[0] - peak[1], default=(0, 0))
    broken = ""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        broken = "TIME" if number == signal.SIGPROF else f"KILLED by {signal.Signals(number).name}"
    elif os.WEXITSTATUS(status):
        broken = "WRONG ERROR"
    elif memory > allowed:
        broken = "MEMORY"
    return Found(memory, allowed, seconds, "; ".join(texts), broken)


def _read(path: Path, options: dict[str, Any], most: Callable[[int], int], report: Callable[[str], None]) -> None:
    """Do with a file what users do; report peaks of memory, with the most for what was asked, and what happened."""
    warnings.simplefilter("ignore")
    used = _memory("VmSize:")
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.RLIM_INFINITY))
    source, length, base = None, 0, _memory("VmRSS:")

    def step(name: str, run: Callable[[], Any]) -> Any:
        report(name)
        _forget_peak()
        try:
            found = run()
        except (DataloadError, IndexError) as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, MemoryError):
                    raise AssertionError("it took all memory before it was refused") from error
                cause = cause.__cause__
            found = None
            report(f"{type(error).__name__}: {error}")
        peak = max(_memory("VmHWM:"), _memory("VmRSS:")) - base
        report(f"peak {peak} {most(size_of(found))}")
        return found

    def start() -> Any:
        source = dataload.open(path, **options)
        return source, len(source)

    source, length = step("open", start) or (None, 0)
    if source is None:
        return
    report(f"{length} records")
    last = list(range(max(0, length - RECORDS), length))
    for name, run in {
        "a record": lambda: source[0],
        "records": lambda: source.read(range(min(length, RECORDS))),
        "batch": lambda: source.read_batch(range(min(length, RECORDS))),
        "last batch": lambda: source.read_batch(last) if length < 1 << 62 else None,
    }.items():
        step(name, run)
    source.close()


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def size_of(value: Any) -> int:
    """Return the bytes that a value takes, with all that is in it."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, BytesColumn):
        return sum(map(len, value)) + 16 * len(value)
    size = sys.getsizeof(value) + 16
    if isinstance(value, Mapping):
        return size + sum(size_of(key) + size_of(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        # None, and small objects that are shared, are counted once for each reference.
        return size + sum(map(size_of, value))
    return size


def slower_than_linear(name: str, line: bytes, times: int = 4) -> str:
    """Return why the time is not linear in the size of a text; empty if it is."""
    sizes = [1 << 22, times << 22]

    def write(folder: Path, size: int) -> Path:
        (folder / name).write_bytes(b"x\n" * name.endswith("csv") + line * (size // len(line)))
        return folder / name

    small, large = (
        min(
            try_bomb(Bomb(name, lambda folder, size=size: write(folder, size), {"max_record_bytes": 1 << 30})).seconds
            for _ in range(3)
        )
        for size in sizes
    )
    most = 2 * times * max(small, 0.05)
    return f"{small:.2f} s, and {large:.2f} s for {times} times its size" if large > most else ""


if __name__ == "__main__":
    sys.exit(main())
