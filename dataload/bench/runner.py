"""Measurements in interleaved rounds, with a new process for each repeat of a task, and their results, also as text."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Self

from dataload._util.system import usable_cpus
from dataload.bench.task import Answer, Task
from dataload.errors import printable

_TEXTS = ("reader", "format", "order")
_NUMBERS = ("workers", "records/s", "spread", "first touch/s", "faults/batch", "sys us/batch")
RATE_COLUMNS = {name: "left" if name in _TEXTS else "right" for name in _TEXTS + _NUMBERS}
"""Heading -> ``"left"`` or ``"right"``, for `rate_cells`.

"records/s" and all figures per batch are of the steady state, "first touch/s" is the rate of the first epoch.
"""

FILE_COLUMNS = {"format": "left", "records": "right", "MB": "right", "bytes/record": "right", "write MB/s": "right"}
"""Heading -> side, for `file_rows`."""


def describe_task(task: Task) -> str:
    """Return a task in a few words: ``"dataload, syrah, global, 2 workers"``."""
    if task.kind == "limit":
        return task.name
    return f"{task.name}, {task.format}, {task.order}, {task.workers} worker{'' if task.workers == 1 else 's'}"


def problems(measurements: Sequence[Measurement]) -> list[str]:
    """Return a line for each measurement that failed, was impossible, or ended before its last repeat."""
    return [f"{describe_task(m.task)}: {m.error}" for m in measurements if m.error is not None]


def rate_cells(measurement: Measurement) -> dict[str, str]:
    """Return the texts of a measurement by the headings of `RATE_COLUMNS`; `problems` explains missing rates."""
    task, answers, rate = measurement.task, measurement.answers, measurement.records_per_second
    head = {"reader": task.name, "format": task.format, "order": task.order, "workers": str(task.workers)}
    if rate is None:
        return head | {"records/s": "none"}
    spread = f"{rate.low / rate.median:.2f}-{rate.high / rate.median:.2f}" if rate.median and len(answers) > 1 else ""
    return head | {
        "records/s": f"{rate.median:,.0f}",
        "spread": spread,
        "first touch/s": number(a.first_touch_rate for a in answers),
        "faults/batch": number(a.minor_faults / a.batches for a in answers if a.batches),
        "sys us/batch": number(a.system_seconds / a.batches * 1e6 for a in answers if a.batches),
    }


def file_rows(files: Sequence[FileFacts]) -> list[tuple[str, ...]]:
    """Return one row for each format of a workload, as `FILE_COLUMNS`."""
    return [
        (
            file.format,
            f"{file.records:,}",
            f"{file.nbytes / 1e6:,.1f}",
            f"{file.nbytes / max(1, file.records):,.0f}",
            f"{file.nbytes / 1e6 / file.write_seconds:,.0f}" if file.write_seconds else "",
        )
        for file in files
    ]


def number(values: Iterable[float | None]) -> str:
    """Return the median of the known values, with a digit after the point where it is below 10."""
    known = [value for value in values if value is not None]
    return "" if not known else f"{median(known):,.{1 if 0 < median(known) < 9.95 else 0}f}"


RESULTS_VERSION = 2
_PACKAGES = ("dataload", "numpy", "lmdb", "array-record", "pymongo", "protobuf", "simplejpeg", "torch")
_LEAST_TIMEOUT = 120.0
_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of several values: quartiles, or the lowest and highest of fewer than four."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Self:
        """Return the spread of one or more values."""
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values))
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)


@dataclass(frozen=True, slots=True)
class Measurement:
    """A task and the answers of the repeats that succeeded; `error` says why there are none, or fewer."""

    task: Task
    answers: tuple[Answer, ...]
    error: str | None = None

    @property
    def rates(self) -> list[float]:
        """Records per second of each repeat."""
        return [answer.records_per_second for answer in self.answers]

    @property
    def records_per_second(self) -> Spread | None:
        """Spread of the rates; None without an answer."""
        return Spread.of(self.rates) if self.answers else None


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size and cost of a data set in one format; `write_seconds` is None for generators, which have no file."""

    workload: str
    format: str
    records: int
    nbytes: int
    write_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A run of ``dataload bench`` or of ``python -m benchmarks``, whose cases are `rows`."""

    date: str  # ISO 8601 in UTC
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    command: str
    files: tuple[FileFacts, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    rows: tuple[Mapping[str, Any], ...] = ()
    version: int = RESULTS_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_all(
    tasks: Sequence[Task],
    repeats: int,
    *,
    run: Callable[[Task], Answer | str],
    progress: Callable[[int], None] | None = None,
) -> tuple[Measurement, ...]:
    """Measure tasks in rounds, with checksums in the first; return one measurement per task, in order."""
    answers: dict[int, list[Answer]] = {i: [] for i in range(len(tasks))}
    errors: dict[int, str] = {}
    done = 0
    for repeat, (i, task) in product(range(repeats), enumerate(tasks)):
        if i in errors:
            continue
        if progress is not None:
            progress(done)
        done += 1
        found = run(replace(task, whole=not repeat))
        if isinstance(found, str):
            errors[i] = found
        else:
            answers[i].append(found)
    return tuple(Measurement(task, tuple(answers[i]), errors.get(i)) for i, task in enumerate(tasks))


def run_task(
    task: Task, *, interpreters: Mapping[str, str] | None = None, timeout: float | None = None
) -> Answer | str:
    """Measure a task in a new process, by the interpreter given for its name if any; return the answer or an error."""
    python = (interpreters or {}).get(task.name, sys.executable)
    limit = _LEAST_TIMEOUT + 40 * task.seconds if timeout is None else timeout
    try:
        status, output, errors = _run(
            [python, "-c", "from dataload.bench.task import main; main()"], json.dumps(asdict(task)), limit
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {limit:g} s"
    except OSError as error:
        return f"{python} cannot be run: {error.strerror}"
    lines = output.splitlines()
    if status or not lines:
        said = [line for line in errors.splitlines() if line.strip()] or [f"exit status {status}"]
        return printable(said[-1], _MESSAGE_CHARACTERS)
    return Answer(**json.loads(lines[-1]))


def _run(command: Sequence[str], given: str, timeout: float) -> tuple[int, str, str]:
    """Return the exit status, standard output and standard error of a command that imports this package."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
        start_new_session=True,  # a process group: workers that outlive the process would keep the pipes open
    )
    with process:
        try:
            output, errors = process.communicate(given, timeout)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # it has ended
                if sys.platform == "win32":
                    process.kill()
                else:
                    os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output, errors


def child_environment() -> dict[str, str]:
    """Return the environment of a child that finds this package and the peers, even if they are not installed."""
    packages = [sys.modules[name].__file__ for name in ("dataload", "benchmarks") if name in sys.modules]
    folders = dict.fromkeys(str(Path(file).parents[1]) for file in packages if file is not None)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (*folders, os.environ.get("PYTHONPATH"))))}


def agreeing(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Replace answers of readers that read other records than this library by an error; limits decode nothing."""
    ours = (_checksum(measurement) for measurement in measurements if measurement.task.kind == "dataload")
    expected = next((checksum for checksum in ours if checksum is not None), None)
    return tuple(
        replace(m, answers=(), error=f"read other records: checksum {_checksum(m)}, expected {expected}")
        if m.task.kind != "limit" and _checksum(m) not in (None, expected)
        else m
        for m in measurements
    )


def _checksum(measurement: Measurement) -> int | None:
    found = {answer.checksum for answer in measurement.answers if answer.checksum is not None}
    return found.pop() if len(found) == 1 else -1 if found else None


def describe_run(command: str) -> dict[str, Any]:
    """Return the fields of `Results` that describe the run: date, machine, versions and command."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": _processor(),
            "cpus": usable_cpus(),
            "memory": None if sys.platform == "win32" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "versions": {"python": platform.python_version(), **versions(*_PACKAGES)},
        "command": command,
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = ((package, next(iter(distributions(name=package)), None)) for package in packages)
    return {package: distribution.version for package, distribution in found if distribution is not None}


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        text = ""
    names = re.findall(r"^model name\s*: (.+)", text, re.MULTILINE)
    return names[0] if names else platform.processor() or platform.machine()
