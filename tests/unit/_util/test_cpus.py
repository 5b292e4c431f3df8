"""How many CPUs a process may use, and keeps busy."""

import os
import threading
import time

import pytest

from dataload._util import cpus
from dataload._util.cpus import cpu_demand, usable_cpus


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (0.5, 1), (1.5, 2), (3.0, 3), (64.0, 4)])
def test_affinity_and_quota_together(monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5, 7})
    monkeypatch.setattr(cpus, "cgroup_quota", lambda: quota)
    assert usable_cpus() == expected


def test_this_machine():
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)


def test_demand_counts_what_all_threads_compute_and_not_what_they_wait():
    before = cpu_demand()
    begun = time.process_time()

    def compute():
        while time.process_time() < begun + 0.05:
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert cpu_demand() - before >= 0.05
    assert min(map(demanded_while_waiting, [0.1] * 5)) < 0.05


def demanded_while_waiting(seconds):
    before = cpu_demand()
    threading.Event().wait(seconds)
    return cpu_demand() - before


def test_demand_where_the_system_does_not_tell_how_long_threads_waited(monkeypatch):
    monkeypatch.setattr(os, "listdir", lambda _: (_ for _ in ()).throw(FileNotFoundError()))
    before = time.process_time()
    assert before <= cpu_demand() <= time.process_time()


def test_a_thread_that_ends_meanwhile_is_left_out(monkeypatch):
    listed = os.listdir("/proc/self/task")
    monkeypatch.setattr(os, "listdir", lambda _: ["0", *listed])
    assert cpu_demand() >= time.process_time() * 0.99
