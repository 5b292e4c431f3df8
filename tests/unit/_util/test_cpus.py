"""How many CPUs a process may use, from files as Linux writes them."""

import os
import threading
import time

import pytest

from dataload._util import cpus
from dataload._util.cpus import cgroup_quota, cpu_demand, usable_cpus


@pytest.fixture
def groups(tmp_path):
    """Makes the file of memberships and those of groups, and reads the quota."""

    def make(membership, **files):
        (tmp_path / "cgroup").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "fs" / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return cgroup_quota(str(tmp_path / "cgroup"), str(tmp_path / "fs"))

    return make


def test_a_limit_of_the_group(groups):
    assert groups("0::/\n", cpu_DOT_max="150000 100000\n") == 1.5


def test_no_limit(groups):
    assert groups("0::/\n", cpu_DOT_max="max 100000\n") is None
    assert groups("0::/job\n") is None


def test_the_smallest_limit_on_the_way_up_counts(groups):
    files = {"a__cpu_DOT_max": "200000 100000", "a__b__cpu_DOT_max": "max 100000", "cpu_DOT_max": "400000 100000"}
    assert groups("0::/a/b\n", **files) == 2.0
    assert groups("0::/a/b\n", a__b__cpu_DOT_max="50000 100000") == 0.5


def test_a_group_outside_the_container_is_not_there_to_see(groups):
    assert groups("0::/../../elsewhere\n", cpu_DOT_max="300000 100000") == 3.0


def test_groups_of_version_1(groups):
    job = {"cpu,cpuacct__job__cpu.cfs_quota_us": "250000", "cpu,cpuacct__job__cpu.cfs_period_us": "100000"}
    above = {"cpu,cpuacct__cpu.cfs_quota_us": "-1", "cpu,cpuacct__cpu.cfs_period_us": "100000"}
    assert groups("4:memory:/x\n1:cpu,cpuacct:/job\n0::/\n", **job, **above) == 2.5


def test_a_directory_for_each_controller_of_version_1(groups):
    job = {"cpu__job__cpu.cfs_quota_us": "50000", "cpu__job__cpu.cfs_period_us": "100000"}
    assert groups("1:cpu,cpuacct:/job\n", **job) == 0.5


def test_the_name_of_a_group_need_not_be_ascii(groups):
    assert groups("0::/größe/job\n", größe__cpu_DOT_max="50000 100000") == 0.5


def test_no_control_groups(tmp_path):
    assert cgroup_quota(str(tmp_path / "none"), str(tmp_path)) is None


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
