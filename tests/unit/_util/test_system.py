"""The CPUs and the memory that a process may use, from files of control groups as Linux writes them."""

import os
import threading
import time

import pytest

from dataload._util import system
from dataload._util.system import available_bytes, cgroup_quota, cpu_demand, usable_cpus


def files(root, texts):
    for name, text in texts.items():
        path = root / os.fsdecode(name.encode())  # as Linux has it, whatever the locale
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


MEMINFO = {"proc/meminfo": "MemTotal: 8000 kB\nMemAvailable: 4000 kB\n"}
VERSION_2 = {
    **MEMINFO,
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/b/memory.max": "max",
    "sys/fs/cgroup/a/b/memory.current": "5",
    "sys/fs/cgroup/a/memory.max": "1000000",
    "sys/fs/cgroup/a/memory.current": "900000",
    "sys/fs/cgroup/a/memory.stat": "anon 100\ninactive_file 200000\nactive_file 1000\nshmem 50\n",
}
VERSION_1 = {
    **MEMINFO,
    "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/x\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1200",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 50\ntotal_active_file 10\n",
}


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({}, 1 << 62),
        (MEMINFO, 4_096_000),
        ({**MEMINFO, "proc/self/cgroup": "0::/a/b\n"}, 4_096_000),
        (VERSION_2, 301_000),
        (VERSION_1, 0),
        ({**VERSION_1, "sys/fs/cgroup/memory/memory.usage_in_bytes": "900"}, 160),
    ],
)
def test_what_is_left_is_the_least_of_machine_and_groups(tmp_path, texts, expected):
    files(tmp_path, texts)
    assert available_bytes(tmp_path) == expected


V1 = {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("membership", "groups", "expected"),
    [
        ("0::/\n", {"": {"cpu.max": "150000 100000\n"}}, 1.5),
        ("0::/\n", {"": {"cpu.max": "max 100000\n"}}, None),
        ("0::/job\n", {}, None),
        # The smallest limit on the way up counts.
        ("0::/a/b\n", {"a": {"cpu.max": "2 1"}, "a/b": {"cpu.max": "max 1"}, "": {"cpu.max": "4 1"}}, 2.0),
        ("0::/a/b\n", {"a": {"cpu.max": "2 1"}, "a/b": {"cpu.max": "50000 100000"}}, 0.5),
        # Groups outside the container are not visible; names need not be ASCII.
        ("0::/../../elsewhere\n", {"": {"cpu.max": "300000 100000"}}, 3.0),
        ("0::/größe/job\n", {"größe": {"cpu.max": "50000 100000"}}, 0.5),
        # Version 1, with one directory for several controllers, and with a directory for each.
        (
            "4:memory:/x\n1:cpu,cpuacct:/job\n0::/\n",
            {"cpu,cpuacct/job": V1, "cpu,cpuacct": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}},
            2.5,
        ),
        ("1:cpu,cpuacct:/job\n", {"cpu/job": V1}, 2.5),
    ],
)
def test_quotas(tmp_path, membership, groups, expected):
    texts = {f"sys/fs/cgroup/{group}/{name}": text for group, made in groups.items() for name, text in made.items()}
    files(tmp_path, {"proc/self/cgroup": membership, **texts})
    assert cgroup_quota(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (0.5, 1), (1.5, 2), (3.0, 3), (64.0, 4)])
def test_affinity_and_quota_together(monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5, 7})
    monkeypatch.setattr("dataload._util.system.cgroup_quota", lambda: quota)
    assert usable_cpus() == expected


def test_demand_counts_the_nanoseconds_that_threads_waited_for_a_cpu(monkeypatch):
    monkeypatch.setattr(system.os, "listdir", lambda _: ["1", "2"])
    monkeypatch.setattr(system, "_read", lambda _: b"7 2000000000 9")
    before = time.process_time()
    assert 4 <= cpu_demand() - before < 5


def test_demand_counts_what_all_threads_compute_and_not_what_they_wait():
    until = time.process_time() + 0.05

    def compute():
        while time.process_time() < until:
            sum(range(1000))

    def demanded_while(work):
        before = cpu_demand()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return cpu_demand() - before

    assert demanded_while(compute) >= 0.04
    assert min(demanded_while(lambda: threading.Event().wait(0.1)) for _ in range(5)) < 0.05
