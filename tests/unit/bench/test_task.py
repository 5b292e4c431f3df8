"""One measurement: what it counts, on readings whose batches are known, and on real data in a real process."""

from pathlib import Path

import bench_readings
import pytest

from benchmarks.limits import plan_limits
from benchmarks.workloads import made_data
from dataload.api import open_source
from dataload.bench.data import Choices, plan_loaders, write
from dataload.bench.runner import run_task
from dataload.bench.task import Usage, check_batch, measure


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """200 records of 64 bytes as Syrah."""
    data = made_data("floats-64", 200)
    return data, write(data, "syrah", tmp_path_factory.mktemp("cache"))


def check_record(record):
    return check_batch({name: [value] for name, value in record.items()})[2]


def test_faults_of_workers_count(made):
    answer = measure(made.task(reading="bench_readings:in_a_process", seconds=0.05))
    assert answer.minor_faults > 1000 * answer.batches


def test_the_checksum_is_of_one_epoch(made, monkeypatch):
    answer = measure(made.task(reading="bench_readings:numbers", seconds=0.005))
    # Of each of the 12 values itself and its one byte: 0 to 3, 1 to 4, 2 to 5.
    assert answer.checksum == sum([0, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5]) + 12
    monkeypatch.setattr(bench_readings, "numbers", lambda task: bench_readings.Reading(batches=10**9))
    assert measure(made.task(reading="bench_readings:numbers", seconds=0.001)).checksum is None, "half an epoch"
    with pytest.raises(RuntimeError, match="the reading gave no batch in epoch 0"):
        measure(made.task(reading="bench_readings:nothing"))


def test_a_real_process_on_real_data(written):
    data, one = written
    choices = Choices(orders=("global",), workers=(1,), batch_size=64, seconds=0.05)
    (task,) = plan_loaders(data, {"syrah": one}, choices)
    answer = run_task(task)
    assert answer.checksum == sum(check_record(record) for record in open_records(one)) % 2**64
    assert answer.nbytes == 64 * answer.records > 0
    assert answer.settings == {"executor": "threads", "num_workers": 1, "prefetch": 2}
    assert answer.open_seconds > 0
    assert answer.first_batch_seconds > 0
    assert answer.peak_rss > 10_000_000
    assert answer.cached_rss > 0
    assert answer.peak_rss % 4096 == answer.cached_rss % 4096 == 0, "pages"


def test_rates_and_usage(made):
    assert Usage(3.0, 2.0, 10).since(Usage(1.0, 0.5, 4)) == (2.0, 1.5, 6)
    assert [made.answer(100, seconds=seconds).records_per_second for seconds in (2.0, 0.0)] == [100, 0]


def test_a_system_without_proc_tells_less(made, monkeypatch):
    def read_text(path, *options, read=Path.read_text):
        if path.is_relative_to("/proc"):
            raise FileNotFoundError
        return read(path, *options)

    monkeypatch.setattr(Path, "read_text", read_text)
    answer = measure(made.task(reading="bench_readings:numbers", seconds=0.001))
    assert (answer.peak_rss, answer.cached_rss) == (None, None)


def open_records(one):
    with open_source(one.path) as source:
        yield from source


@pytest.mark.parametrize("number", [0, 1])
def test_limits_read_the_same(written, number):
    data, one = written
    choices = Choices(orders=("global",), workers=(0,), batch_size=64, seconds=0.05)
    task = plan_limits(data, {"syrah": one}, choices)[number]
    answer = measure(task)
    assert answer.checksum == sum(map(check_record, open_records(one))) % 2**64
    assert answer.settings == {"threads": number + 1}


def test_columns_and_records_have_the_same_checksum(written):
    _, one = written
    with open_source(one.path) as source:
        rows, nbytes, checksum = check_batch(source.read_batch(range(200)))
        assert (rows, nbytes) == (200, 200 * 64)
        assert checksum == sum(map(check_record, source)) % 2**64
        assert checksum != sum(map(check_record, source[:199])) % 2**64
