"""Heartbeats, what a wait says when it takes long, and how executors are found. What needs Ray is in integration."""

import os
import re
import sys
import warnings

import numpy as np
import pytest

import dataload
from dataload._util.threads import LONGEST_SLEEP
from dataload.errors import ConfigError, MissingDependencyError
from dataload.executors import base
from dataload.executors.base import (
    Fleet,
    SerialExecutor,
    StallMonitor,
    TimeoutPolicy,
    WorkerLostError,
    WorkerPosition,
    WorkerStatus,
)
from dataload.executors.threads import ThreadExecutor


def test_a_heartbeat_is_seen_through_the_same_memory():
    memory = np.zeros(100, np.uint8)
    worker, consumer = WorkerStatus(memory), WorkerStatus(memory)
    assert consumer.position() == WorkerPosition(-1, -1, -1)
    worker.at(0, 0)
    assert consumer.position() == WorkerPosition(0, 0, -1)
    worker.at(3, 2**40, 5)
    worker.at_index(2**50)
    assert consumer.position() == WorkerPosition(3, 2**40, 2**50)
    assert not worker.is_cancelled(0)
    consumer.cancel(4)
    consumer.cancel(2)  # takes nothing back
    assert [worker.is_cancelled(number) for number in (0, 4, 5)] == [True, True, False]
    worker.stage = 2
    assert consumer.stage == 2
    assert WorkerStatus().position() == WorkerPosition(-1, -1, -1)


def test_a_watch_warns_half_way_and_then_gives_up(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(base, "monotonic", lambda: now[0])
    described = "somebody", WorkerPosition(1, 2, 3), "stacks"
    watch = StallMonitor(TimeoutPolicy(timeout=20))
    assert (watch.next_look(), watch.is_due()) == (LONGEST_SLEEP, False)
    now[0] += 9.9
    watch.look(lambda: described)  # too early for a warning
    assert watch.next_look() == pytest.approx(0.1)
    now[0] += 0.1
    assert watch.is_due()
    with pytest.warns(RuntimeWarning, match=r"no batch for 10\.0 s: somebody is at step 2 of epoch 1, index 3\nstacks"):
        watch.look(lambda: described)
    assert not watch.is_due()
    now[0] += 12
    assert (watch.next_look(), watch.is_due()) == (0, True)
    with pytest.raises(WorkerLostError) as caught:
        watch.look(lambda: described)
    assert caught.value.reason == "has returned no batch for 22.0 s (timeout=20)"
    assert (caught.value.worker, caught.value.position, caught.value.stacks) == described


@pytest.mark.parametrize(
    ("position", "locate", "told"),
    [
        (WorkerPosition(0, 0, 0), None, "is at step 0 of epoch 0, index 0\nstacks"),
        (WorkerPosition(-1, -1, -1), None, "has not started it\nstacks"),
        (
            WorkerPosition(1, 2, 3),
            lambda at: (0, f"in row {at.index}"),
            "is at step 2 of epoch 1, index 0\nin row 3\nstacks",
        ),
        (WorkerPosition(1, 2, 3), lambda _: (-1, ""), "is at step 2 of epoch 1\nstacks"),
    ],
)
def test_a_watch_without_a_timeout_warns_less_and_less_often(monkeypatch, position, locate, told):
    now, warned = [100.0], []
    monkeypatch.setattr(base, "monotonic", lambda: now[0])
    watch = StallMonitor(TimeoutPolicy(warn_after=4, locate=locate))
    for second in range(1, 33):
        now[0] = 100.0 + second
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch.look(lambda: ("somebody", position, "stacks"))
        warned += [(second, str(each.message)) for each in caught]
    assert warned == [(second, f"no batch for {second}.0 s: somebody {told}") for second in (4, 8, 16, 32)]


FORKED = (
    "was forked while it made a batch, by a transform for example, and both processes continued: end the child with "
    "os._exit()"
)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("waits", [True, False])
def test_a_task_that_forks_without_workers_is_an_error_in_both_processes(waits):
    def work(task, status):
        status.at(0, task)
        if task == 1 and (child := os.fork()):
            children.append(child)
            if waits:
                statuses.append(os.waitpid(child, 0)[1])
        return task

    here, children, statuses = os.getpid(), [], []
    executor = SerialExecutor(work)
    assert executor.submit(0).result() == 0
    try:
        value, lost = executor.submit(1).result(), None
    except WorkerLostError as error:
        value, lost = None, error
    if os.getpid() != here:
        os._exit(7 if lost is not None and lost.reason == FORKED and lost.position == WorkerPosition(-1, -1, -1) else 1)
    if not waits:
        statuses.append(os.waitpid(children[0], 0)[1])
        if value == 1:  # the child was later
            with pytest.raises(WorkerLostError, match=re.escape(FORKED)):
                executor.submit(2).result()
            lost = None
    assert os.waitstatus_to_exitcode(statuses[0]) == 7
    assert lost is None or (lost.worker, lost.reason, lost.position) == ("MainThread", FORKED, WorkerPosition(0, 1, -1))
    assert executor.submit(3).result() == 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_task_that_forks_a_thread_is_an_error_and_the_child_ends(capfd):
    def work(task, status):
        status.at(0, task)
        if task == 1 and (child := os.fork()):
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return task

    statuses = []
    executor = ThreadExecutor(work, 1)
    assert executor.submit(0).result() == 0
    with pytest.raises(WorkerLostError) as caught:
        executor.submit(1).result()
    lost = caught.value
    assert (lost.worker, lost.reason, lost.position) == ("dataload-0", FORKED, WorkerPosition(0, 1, -1))
    assert statuses == [1]
    assert re.fullmatch(rf"dataload-0 \(process \d+\) {re.escape(FORKED)}\n", capfd.readouterr().err)
    assert executor.submit(2).result() == 2
    executor.close()


def test_settings_are_checked():
    fleet = Fleet(num_cpus=2, name="train", detached=True)
    assert fleet == Fleet(num_cpus=2, name="train", detached=True)
    assert hash(fleet)
    for settings, message in [
        ({"num_cpus": 0}, "num_cpus must be a number above 0, got 0"),
        ({"memory": "4GB"}, "memory must be an integer >= 1 or None, got '4GB'"),
        ({"scheduling": "sprad"}, "scheduling is 'sprad': did you mean 'spread'"),
        ({"name": "a/b"}, "name must be text without a slash, got 'a/b'"),
        ({"name": ""}, "name must be text without a slash, got ''"),
        ({"detached": True}, "detached needs a name, by which other processes find the workers; got True"),
        ({"writable": 1}, "writable must be True or False, got 1"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            Fleet(**settings)
        assert caught.value.key == next(iter(settings))


@pytest.mark.parametrize("executor", ["rai", 5, None, ["ray"], Fleet])
def test_executors_are_names_or_fleets(executor):
    with pytest.raises(ConfigError, match="executor") as caught:
        dataload.Loader(dataload.RangeSource(3), batch_size=1, executor=executor)
    assert caught.value.key == "executor"


@pytest.mark.parametrize("executor", ["ray", Fleet()])
def test_without_ray_the_error_says_what_to_install(monkeypatch, executor):
    for name in [name for name in sys.modules if name.split(".")[0] == "ray" or name.startswith("dataload.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"needs ray: pip install 'dataload\[ray\]'"):
        dataload.Loader(dataload.RangeSource(3), batch_size=1, executor=executor, num_workers=1)


def test_configs_have_a_table_of_it():
    config = {"source": {"path": "range:4"}, "loader": {"batch_size": 4, "executor": {"num_cpus": 0.5, "name": "a"}}}
    with dataload.from_config(config) as loader:
        assert len([*loader]) == 1
    wrong = {"loader": {"batch_size": 4, "executor": {"nme": "a"}}}
    with pytest.raises(ConfigError, match="did you mean 'name'") as caught:
        dataload.from_config({**config, **wrong})
    assert caught.value.key == "loader.executor.nme"
    contradicting = {"loader": {"batch_size": 4, "executor": {"detached": True}}}
    with pytest.raises(ConfigError, match="detached needs a name") as caught:
        dataload.from_config({**config, **contradicting})
    assert caught.value.key == "loader.executor.detached"
