"""Loaders whose workers are Ray actors on two simulated nodes: the batches of one thread, whatever is killed."""

import contextlib
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import fleets
import numpy as np
import pytest
from command_line import facts, ok, run
from fleets import RECORDS, bad_at_77, dies_at_77, is_even, noisy, references, reports, slow, slow_at_77, slower, walk
from hostile_server import HostileServer

import dataload
from dataload.errors import ConfigError, WorkerError
from dataload.streams import MultiStreamLoader

ray = pytest.importorskip("ray", reason="Ray is not installed")
from dataload.ray import Fleet  # noqa: E402 - needs Ray

KILLS = int(os.environ.get("KILLS", "4"))  # of actors; of nodes, a tenth

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300 + 60 * KILLS),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture
def nothing_is_left_behind():
    """Ray keeps what it has opened until it is shut down."""


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """The directory with a cache for each of the first two nodes."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def cluster(caches):
    with fleets.ray_cluster(2, caches=caches) as started:
        yield started


@pytest.fixture(autouse=True)
def nothing_is_left_in_the_store(cluster):
    before = references()
    yield
    deadline = time.monotonic() + 10
    while references() - before and time.monotonic() < deadline:
        gc.collect()  # the frames of an error that was raised are a cycle
        time.sleep(0.02)
    assert not references() - before


def loader(source=None, **settings):
    settings = {"batch_size": 8, "shuffle": True, "transform": noisy, "num_workers": 2, "executor": "ray", **settings}
    return dataload.Loader(dataload.RangeSource(RECORDS) if source is None else source, **settings)


def take_all(made):
    for _ in made:
        pass


def values(batch):
    return {name: column.tolist() if hasattr(column, "tolist") else list(column) for name, column in batch.items()}


def serial(epochs=1, **settings):
    with loader(executor="threads", **{**settings, "num_workers": 0}) as made:
        return [values(batch) for _ in range(epochs) for batch in made]


def test_batches_are_those_of_one_thread_and_can_be_written_to(cluster):
    expected = serial(epochs=2)
    with loader() as made:
        found = [batch for _ in range(2) for batch in made]
        statistics = made.statistics()
    assert [values(batch) for batch in found] == expected
    assert all(batch["x"].flags.writeable for batch in found)
    assert (statistics.executor, statistics.workers, statistics.where) == ("ray", 2, "2 actors")
    assert statistics.stages["transform"].seconds > 0.002 * RECORDS
    assert statistics.depth <= 5  # the spans are on this process's clock


def test_columns_may_be_lent(cluster):
    source = dataload.MemorySource({"x": np.arange(400_000.0).reshape(100, 4000), "name": [str(i) for i in range(100)]})
    settings = {"batch_size": 20, "transform": None, "shuffle": False}
    with loader(source, executor=Fleet(writable=False), **settings) as made:
        for number, batch in enumerate(made):
            assert not batch["x"].flags.writeable
            assert batch["x"][0, 0] == 80_000 * number
            assert list(batch["name"]) == [str(i) for i in range(20 * number, 20 * number + 20)]
        del batch


def test_a_state_continues_with_other_workers(cluster):
    expected = serial()
    with loader() as made:
        first = [values(batch) for batch in islice(made, 20)]
        state = made.state_dict()
    with loader(num_workers=1) as made:
        made.load_state_dict(state)
        assert first + [values(batch) for batch in made] == expected


def test_completion_order(cluster):
    with loader(in_order=False) as made:
        found = sorted(index for batch in made for index in batch["index"].tolist())
    assert found == [*range(RECORDS)]


def test_errors_are_those_of_other_workers(cluster):
    with loader(transform=bad_at_77, shuffle=False, executor="threads") as made, pytest.raises(WorkerError) as other:
        take_all(made)
    with loader(transform=bad_at_77, shuffle=False) as made, pytest.raises(WorkerError, match="no 77") as caught:
        take_all(made)
    assert str(caught.value) == str(other.value)
    assert (caught.value.step, caught.value.indices) == (other.value.step, other.value.indices)
    assert isinstance(caught.value.__cause__, ValueError)
    assert f"on node {ray.util.get_node_ip_address()}" in caught.value.worker
    with loader(transform=bad_at_77, shuffle=False, on_error="skip") as made:
        assert sum(len(batch["index"]) for batch in made) == RECORDS - 1
        assert made.statistics().bad == 1


def test_what_does_not_pickle_is_named(cluster):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"need a copy of the transform .*, and .* cannot be pickled") as caught:
        loader(transform=lambda sample: (lock, sample)[1])
    assert caught.value.key == "transform"


def test_a_step_that_kills_three_actors_is_an_error_with_the_causes(cluster):
    with loader(transform=dies_at_77, shuffle=False) as made, pytest.raises(WorkerError) as caught:
        take_all(made)
    assert made.statistics().steps == caught.value.step == 9
    assert str(caught.value).startswith("step 9 of epoch 0 failed: dataload-")
    assert str(caught.value).count("(process ") == 4  # the last worker, and the three with their causes


def test_a_timeout_ends_a_late_actor(cluster):
    with loader(transform=slow_at_77, shuffle=False, timeout=12) as made:  # which must do for a start, too
        late = r"has returned no batch for 1\d\.\d s \(timeout=12\), at index 77"
        with pytest.raises(WorkerError, match=late) as caught:
            take_all(made)
        assert "slow_at_77" in str(caught.value)


def test_ctrl_c_ends_the_wait(cluster):
    with loader(transform=slow_at_77, shuffle=False) as made:
        timer = threading.Timer(6, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            take_all(made)
        assert time.monotonic() - begun < 15


def test_tasks_that_are_cancelled_on_their_way_leave_no_gap(cluster):
    program = [sys.executable, "-c", "import fleets; fleets.break_often()"]
    late = {"RAY_testing_asio_delay_us": "ActorTaskSubmitter::SubmitTask=20000:20000"}  # so that none has arrived
    environment = {**os.environ, **late, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout.splitlines()[-1]) < 15  # Ray waits 30 s for a task that does not come


def test_cancelled_tasks_are_not_made(cluster):
    with loader(transform=slower, shuffle=False, batch_size=1, num_workers=1, prefetch=20) as made:
        for _ in range(3):
            take_all(islice(made, 1))
        (report,) = reports().values()
    assert report["made"] < 30  # of about 60 that were asked for


def test_filter(cluster):
    source = dataload.RangeSource(1000).filter(is_even, num_workers=2, executor="ray")
    assert [record["index"] for record in source][:3] == [0, 2, 4]


LENGTHS = [*range(20, 40)]


def streams(**settings):
    settings = {"batch_size": 4, "mode": "split", "epochs": 1, "seed": 3, "executor": "ray", **settings}
    return MultiStreamLoader(walk, LENGTHS, **settings)


def rows(**settings):
    return loader(epochs=1, batch_size=8, **settings)


def kill_one():
    """Kill an actor that works, and return whether there was one."""
    if processes := [report["process"] for report in reports().values()]:
        os.kill(random.choice(processes), signal.SIGKILL)
    return bool(processes)


class Killer:
    """Kills actors and the second node at random steps, until it has killed as many as it should."""

    def __init__(self, cluster, node, actors, nodes):
        self.cluster, self.node, self.left, self.nodes_left = cluster, node, actors, nodes
        self.chance, self.longest, self.runs = random.Random(7), 0.0, 0

    def through(self, made):
        """The values of all batches."""
        found, asked, killed = [], None, None
        for batch in made:
            self.longest = max(self.longest, time.monotonic() - asked if asked else 0)
            found.append(values(batch))
            if self.left and self.chance.random() < 0.04:
                self.left -= kill_one()
            elif self.nodes_left and not killed and self.chance.random() < 0.02:
                self.nodes_left -= 1
                killed = self.cluster.list_all_nodes()[-1]
                killed.all_processes["raylet"][0].process.kill()  # its workers end with it
            asked = time.monotonic()
        if killed:
            self.cluster.remove_node(killed, allow_graceful=False)
            self.cluster.add_node(**self.node)
        return found


def test_actors_and_nodes_that_are_killed_change_nothing(cluster, caches, record_testsuite_property):
    node = {**fleets.NODE, "env_vars": {"XDG_CACHE_HOME": f"{caches}/1"}}
    killer = Killer(cluster, node, KILLS, KILLS // 10 + 1)
    try:
        while killer.left or killer.nodes_left or killer.runs < 2:
            size, make = killer.chance.choice([1, 2, 3]), (rows, streams)[killer.runs % 2]
            killer.runs += 1
            for rank in range(size):
                with make(num_workers=0, rank=rank, world_size=size) as made:
                    expected = [values(batch) for batch in made]
                with make(num_workers=2, rank=rank, world_size=size) as made:
                    assert killer.through(made) == expected
    finally:
        killed, nodes = KILLS - killer.left, KILLS // 10 + 1 - killer.nodes_left
        what = f"{killed} actors, {nodes} nodes in {killer.runs} runs; longest wait {killer.longest:.1f} s"
        record_testsuite_property("kills", what)


def test_a_frozen_actor_ends_by_the_timeout(cluster):
    expected = serial()
    with loader(num_workers=1, timeout=12) as made:
        batches = iter(made)
        first = values(next(batches))
        (frozen,) = [report["process"] for report in reports().values()]
        os.kill(frozen, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerError, match=r"has returned no batch for \d+\.\d s \(timeout=12\)") as caught:
                take_all(batches)
            assert "it does not answer" in str(caught.value)
            until(lambda: not alive(frozen))
        finally:
            if alive(frozen):
                os.kill(frozen, signal.SIGKILL)
        state = made.state_dict()
        made.load_state_dict(state)
        found = [values(batch) for batch in made]
    assert [first, *expected[1 : state["position"] // 8], *found] == expected


def test_rows_go_on_after_a_worker_is_lost_that_had_nothing_to_do(cluster):
    with streams(num_workers=0) as made:
        expected = [values(batch) for batch in made]
    with streams(num_workers=1, prefetch=1) as made:
        batches = iter(made)
        found = [values(next(batches)) for _ in range(6)]
        (report,) = reports().values()
        until(lambda: not any("run_task" in each["stacks"] for each in reports().values()))
        os.kill(report["process"], signal.SIGKILL)
        until(lambda: not reports())
        assert [*found, *map(values, batches)] == expected


def test_losses_are_logged(cluster, caplog):
    caplog.set_level(logging.WARNING, "dataload")
    with loader() as made:
        batches = iter(made)
        next(batches)
        for report in reports().values():
            os.kill(report["process"], signal.SIGKILL)
        take_all(batches)
    assert "is lost, its batches are made again: The actor died unexpectedly" in caplog.text


def actors_of(name):
    from dataload.ray import list_actors

    return [report for report in list_actors() if report.fleet == name]


def until(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def alive(process):
    """Whether a process runs, or is stopped; not if it has ended and its parent does not know yet."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_steps_go_where_their_shards_are(cluster, caches, tmp_path):
    with dataload.create(tmp_path / "a.syr", shards=24) as writer:
        writer.extend({"x": np.arange(4.0) + index} for index in range(240))

    def answer(handler):
        path = tmp_path / handler.path[1:]
        if not path.is_file():
            return handler.send(b"", status=404)
        start, stop = handler.span(path.stat().st_size)
        headers = {"ETag": '"e"', "Accept-Ranges": "bytes"}
        if "Range" in handler.headers:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{path.stat().st_size}"
        return handler.send(path.read_bytes()[start:stop], headers, 206 if "Range" in handler.headers else 200)

    with HostileServer(answer) as server:
        urls = [f"{server.endpoint}/{path.name}" for path in sorted(tmp_path.glob("*.syr"))]
        source = dataload.open(urls, remote={"mode": "shards"})
        settings = {"batch_size": 10, "shuffle": False, "transform": slow, "executor": Fleet(name="two")}
        with loader(executor=Fleet(name="two")) as ready, loader(source, **settings) as made:
            take_all(islice(ready, 1))
            until(lambda: [bool(actor.node) for actor in actors_of("two")] == [True, True])  # both run
            for _ in range(4):
                assert sum(batch["x"][:, 0].sum() for batch in made) == sum(range(240))
        until(lambda: not actors_of("two"))  # they may still read from the server
    kept = [[path.name for path in caches.glob(f"{number}/**/*.syr*")] for number in range(2)]
    assert len({*kept[0], *kept[1]}) == 24
    assert len(kept[0]) + len(kept[1]) < 24 * 1.5  # by chance, after four epochs, 1.9 times


def test_ranks_share_a_fleet(cluster):
    expected = serial()
    shared = Fleet(name="shared")
    ranks = [loader(executor=shared, rank=rank, world_size=2, batch_size=4) for rank in range(2)]
    found = [[values(batch) for batch in made] for made in ranks]
    rows = [first["index"] + second["index"] for first, second in zip(*found, strict=True)]
    assert sorted(index for row in rows for index in row) == sorted(
        index for batch in expected for index in batch["index"]
    )
    actors = actors_of("shared")
    assert [actor.number for actor in actors] == [0, 1]
    assert [actor.loaders for actor in actors] == [2, 2]
    assert sum(actor.made for actor in actors) >= 2 * len(rows)  # and what was made ahead
    ranks[0].close()
    assert len([*ranks[1]]) == len(rows)
    assert [actor.process for actor in actors_of("shared")] == [actor.process for actor in actors]
    ranks[1].close()
    until(lambda: not actors_of("shared"))


def test_actors_end_with_the_last_process_that_uses_them(cluster):
    def rank():
        program = [sys.executable, "-c", "import fleets; fleets.take_one()"]
        started = subprocess.Popen(
            program, env={**os.environ, "RAY_ADDRESS": cluster.address}, stdout=subprocess.PIPE, text=True
        )
        assert started.stdout.readline() == "has one\n"
        return started

    def kill(rank):
        rank.kill()
        rank.wait()
        rank.stdout.close()

    with contextlib.ExitStack() as ranks:
        first = rank()
        ranks.callback(kill, first)
        processes = [actor.process for actor in actors_of("ranks")]
        ranks.callback(kill, rank())
        kill(first)
        until(lambda: [actor.loaders for actor in actors_of("ranks")] == [1, 1])
        assert [actor.process for actor in actors_of("ranks")] == processes
    until(lambda: not actors_of("ranks"))


def test_detached_workers_stay_until_they_are_stopped(cluster):
    with loader(executor=Fleet(name="kept", detached=True), num_workers=1) as made:
        next(iter(made))
        (process,) = [actor.process for actor in actors_of("kept")]
    until(lambda: [actor.loaders for actor in actors_of("kept")] == [0])
    line = next(line for line in ok("fleet", "status").splitlines() if line.startswith("kept/0"))
    assert line.split()[1:4] == [ray.util.get_node_ip_address(), str(process), "0"]
    (found,) = [actor for actor in facts("fleet", "status") if actor["fleet"] == "kept"]
    assert (found["process"], found["loaders"], found["queue"]) == (process, 0, 0)
    assert found["bytes"] > 8 * 8 * 500
    with loader(executor=Fleet(name="kept", detached=True), num_workers=1) as made:
        next(iter(made))
        assert [actor.process for actor in actors_of("kept")] == [process]
        assert ok("fleet", "stop", "kept") == "ended 1 worker of kept\n"
        assert len([*made]) == RECORDS // 8  # another epoch, by a new worker
    ok("fleet", "stop", "kept")
    until(lambda: not actors_of("kept"))
    done = run("fleet", "stop", "kept")
    assert (done.exit_code, "there is no fleet 'kept'" in done.output) == (2, True)


def test_auto_uses_the_cpus_of_the_cluster(cluster):
    with loader(num_workers="auto") as made:
        assert made.statistics().workers_allowed == ray.cluster_resources()["CPU"]
        batches = [values(batch) for batch in made]
    assert batches == serial()
