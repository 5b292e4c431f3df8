"""Runs measurements: each repeat of each task in a process of its own, in turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dataload.bench.results import Measurement
from dataload.bench.task import Answer, Task
from dataload.errors import printable

__all__ = ["agreeing", "child_environment", "measure_all", "run_task"]

_LEAST_TIMEOUT = 120.0
_MESSAGE_CHARACTERS = 300


def measure_all(
    tasks: Sequence[Task],
    repeats: int,
    *,
    run: Callable[[Task], Answer | str],
    progress: Callable[[int], None] | None = None,
) -> tuple[Measurement, ...]:
    """Measure tasks, round after round, for machines drift: what is compared is measured at one time.

    A task that fails once is not tried again. Checksums are of the first round.

    Args:
        tasks: What to measure.
        repeats: Rounds.
        run: Gives the answer, or says why there is none: `run_task`.
        progress: Called with the number of measurements that are done.

    Returns:
        One measurement per task, in their order.
    """
    answers: dict[int, list[Answer]] = {i: [] for i in range(len(tasks))}
    errors: dict[int, str] = {}
    done = 0
    for repeat in range(repeats):
        for i, task in enumerate(tasks):
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
    """Measure a task in a new process.

    Args:
        task: The task.
        interpreters: For tasks by their name: the Python to run them with, of another environment.
        timeout: Seconds until it is given up; None for 2 minutes and 40 times what the task takes.

    Returns:
        The answer; or why there is none, in one line.
    """
    python = (interpreters or {}).get(task.name, sys.executable)
    limit = _LEAST_TIMEOUT + 40 * task.seconds if timeout is None else timeout
    try:
        status, output, errors = _run([python, "-m", "dataload.bench.child"], json.dumps(task.to_json()), limit)
    except subprocess.TimeoutExpired:
        return f"no end after {limit:g} s"
    except OSError as error:
        return f"{python} cannot be run: {error.strerror}"
    lines = output.splitlines()
    if status or not lines:
        said = [line for line in errors.splitlines() if line.strip()] or [f"exit status {status}"]
        return printable(said[-1], _MESSAGE_CHARACTERS)
    return Answer.from_json(json.loads(lines[-1]))


def _run(command: Sequence[str], given: str, timeout: float) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command, which finds this package."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
        start_new_session=True,  # a group with its workers, which would keep the pipes open after it
    )
    with process:
        try:
            output, errors = process.communicate(given, timeout)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output, errors


def child_environment() -> dict[str, str]:
    """The environment of a child that finds this package, also where it is not installed."""
    package = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}


def agreeing(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """The measurements with an error for each that read something else than the first one with a checksum.

    Limits read bytes without decoding them, so they are compared only where their fields are the same.
    """
    ours = (_checksum(measurement) for measurement in measurements if measurement.task.kind == "dataload")
    expected = next((checksum for checksum in ours if checksum is not None), None)
    return tuple(
        replace(m, answers=(), error=f"read something else: checksum {_checksum(m)}, expected {expected}")
        if m.task.kind != "limit" and _checksum(m) not in (None, expected)
        else m
        for m in measurements
    )


def _checksum(measurement: Measurement) -> int | None:
    found = {answer.checksum for answer in measurement.answers if answer.checksum is not None}
    return found.pop() if len(found) == 1 else -1 if found else None
