"""The runner: rounds, failures, agreement; and that no process outlives its time."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from dataload.bench.runner import agreeing, measure_all, run_task


def test_repeats_are_interleaved(made):
    tasks = [made.task(workers=workers) for workers in (1, 2, 3)]
    asked, seen = [], []

    def run(task):
        asked.append(task.workers)
        return made.answer(100 * len(asked))

    measured = measure_all(tasks, 2, run=run, progress=seen.append)
    assert asked == [1, 2, 3, 1, 2, 3]
    assert seen == [0, 1, 2, 3, 4, 5]
    assert [measurement.task for measurement in measured] == tasks
    assert [[round(a.records_per_second) for a in m.answers] for m in measured] == [[100, 400], [200, 500], [300, 600]]


def test_what_failed_is_not_tried_again_and_keeps_its_answers(made):
    asked = []

    def run(task):
        asked.append(task.workers)
        failed = (task.workers == 1) or (task.workers == 2 and asked.count(2) == 2)
        return f"failure {len(asked)}" if failed else made.answer(1)

    measured = measure_all([made.task(workers=workers) for workers in (1, 2, 3)], 3, run=run)
    assert asked == [1, 2, 3, 2, 3, 3]
    assert [(len(m.answers), m.error) for m in measured] == [(0, "failure 1"), (1, "failure 4"), (3, None)]


def test_a_reading_of_something_else_loses_its_figures(made):
    def measured(*checksums, **task):
        measurement = made.ours(**task)
        return type(measurement)(measurement.task, tuple(made.answer(1, checksum=one) for one in checksums))

    good, unknown, limit = measured(5, 5), measured(None), measured(6, kind="limit")
    wrong, torn = measured(6, 6, kind="peer"), measured(5, 6)
    found = agreeing([limit, unknown, good, wrong, torn])
    assert found[:3] == (limit, unknown, good)
    assert [m.answers for m in found[3:]] == [(), ()]
    assert found[3].error == "read other records: checksum 6, expected 5"
    assert found[4].error == "read other records: checksum -1, expected 5"


@pytest.fixture
def reading(made, monkeypatch):
    """A task with a reading of tests/children/bench_readings.py."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "children"))
    return lambda name: made.task(reading=f"bench_readings:{name}", seconds=0.01)


@pytest.mark.parametrize(
    ("name", "message"), [("failing", r"OSError: the file\x1b[31m is gone"), ("silent", "exit status 3")]
)
def test_a_failing_reading_is_one_line(reading, name, message):
    assert run_task(reading(name)) == message


@pytest.mark.slow_suite
def test_a_hanging_reading_is_given_up_with_all_its_processes(reading, tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for seconds in (1, 4, 14):  # until it begins in time
            task = dataclasses.replace(reading("hanging"), path=pipe)
            assert run_task(task, timeout=seconds) == f"did not end within {seconds} s"
            os.set_blocking(end, True)
            if found := os.read(end, 100):
                break
        assert found == b"begun"
        assert os.read(end, 100) == b"", "the end comes when no process holds the pipe any more"
    finally:
        os.close(end)


def test_the_interpreter_of_another_environment(made):
    missing = run_task(made.task(), interpreters={"dataload": "/no/such/python"})
    assert missing == "/no/such/python cannot be run: No such file or directory"
    others = run_task(made.task(), interpreters={"dataload": "/bin/false", "Grain": sys.executable})
    assert others == "exit status 1"
