"""A loader on Ray where no cluster runs, the page that shows one, and what needs no cluster."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dataload
from dataload.loader.step import StepRange

pytest.importorskip("ray", reason="Ray is not installed")
from dataload.ray import crew as crew_module
from dataload.ray.actor import Homes, NodeAhead
from dataload.ray.crew import Crew, Fleet

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fleet.md"


@pytest.mark.ray
def test_a_local_cluster_starts_where_there_is_none(tmp_path):
    (program,) = re.findall(r"```python\n(# train.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(program)
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["1000"], done.stderr
    assert done.stderr.count("no Ray cluster runs here, and RAY_ADDRESS names none: started one of") == 1


def test_steps_have_homes_among_the_nodes(tmp_path):
    with dataload.create(tmp_path / "a.syr", shards=16) as writer:
        writer.extend({"x": np.arange(4.0) + index} for index in range(320))
    source = dataload.open(tmp_path)

    def homes(nodes, source=source, batch_size=10, **settings):
        with dataload.Loader(source, batch_size=batch_size, **settings) as loader:
            found = Homes(loader._work)
            return [found.of(StepRange(0, 0, step, step + 1), nodes) for step in range(len(loader))]

    nodes = ["a", "b", "c", "d"]
    found = homes(nodes)
    assert found[::2] == found[1::2]  # a shard is two steps
    assert set(found) == {*nodes}
    fewer = homes(nodes[:3])
    assert [new for old, new in zip(found, fewer, strict=True) if old != "d"] == [old for old in found if old != "d"]
    assert {
        *homes(nodes[:1]),
        *homes(nodes, dataload.RangeSource(320)),
        *homes(nodes, shuffle="global", batch_size=80),
    } == {""}


class AheadSource(dataload.RangeSource):
    """Keeps what it is to read ahead, as the reader, which counts what was received."""

    shard_lengths = [5] * 40

    def read_ahead(self, steps, fields, *, here, share=1.0):
        self.steps, self.received_steps, self.is_closed = steps, 0, False
        return self

    def received(self):
        self.received_steps += 1

    def close(self):
        self.is_closed = True


def test_a_node_reads_ahead_what_its_homes_need():
    nodes, source = ("a", "b"), AheadSource(200)
    with dataload.Loader(source, batch_size=5) as loader:
        homes, ahead = Homes(loader._work), NodeAhead(loader._work, "a")
        tasks = [StepRange(0, 0, step, step + 1) for step in range(40)]
        own = [task.start for task in tasks if homes.of(task, nodes) == "a"]
        ahead.follow(tasks[3], nodes)
        block = next(source.steps)
        assert block.indices.tolist() == [index for step in own if step >= 3 for index in range(5 * step, 5 * step + 5)]
        assert block.ends.tolist() == [5 * n for n in range(1, 1 + sum(step >= 3 for step in own))]
        assert next(source.steps).epoch == 1
        ahead.follow(tasks[20], nodes)
        assert source.received_steps == sum(3 <= step < 20 for step in own)
        ahead.follow(tasks[10], nodes)  # a state was loaded
        assert next(source.steps).indices[0] == 5 * min(step for step in own if step >= 10)
        ahead.follow(tasks[21], ())  # another actor reads ahead now
        assert source.is_closed
        ahead.follow(tasks[30], ("a",))
        assert next(source.steps).indices.tolist() == [*range(150, 200)]


class NoRoom:
    """Ray with CPUs for two actors, each on a node of its own; others are pending for ever."""

    class exceptions:
        RayError = RuntimeError

    def __init__(self):
        self.started = 0

    def cluster_resources(self):
        return {"CPU": 2.0}

    def put(self, value):
        return value

    def get(self, result):
        return result

    def wait(self, results, **_):
        return [result for result in results if result[0]], []

    def remote(self, **_):
        return lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.start))

    def start(self, *_, **__):
        self.started += 1
        node = (f"node {self.started}", "") if self.started <= 2 else ("", str(self.started))
        lease = SimpleNamespace(remote=lambda: ("", f"lease {node}"))
        return SimpleNamespace(
            load=SimpleNamespace(remote=lambda *_: node), lease=SimpleNamespace(options=lambda **_: lease)
        )


def test_actors_that_find_no_room_do_not_keep_others_from_reading_ahead(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(crew_module, "monotonic", lambda: now[0])
    with pytest.warns(RuntimeWarning, match="3 workers of 1 CPUs need 3, and the Ray cluster has 2"):
        crew = Crew(NoRoom(), Fleet(), b"", 3, first=0, shares=False)
    crew.fill()
    assert [crew.nodes_for(actor) for actor in crew.actors] == [(), ()], "the third may start soon"
    now[0] = 20.0
    crew.fill()
    assert [crew.nodes_for(actor) for actor in crew.actors] == [("node 1", "node 2")] * 2
