"""The engine `ray` on a cluster of two simulated nodes: the bytes of one run, whatever is killed."""

import hashlib
import os
import subprocess
import sys
import threading
import time

import pytest
from command_line import ok
from fleets import ray_cluster
from part_sources import COUNT, Eventful, Waiting

import dataload
from dataload.convert import convert
from dataload.errors import ConfigError, CorruptFileError, SourceError, SourceNotFoundError

ray = pytest.importorskip("ray", reason="Ray is not installed")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

SHARDS = 5
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture
def nothing_is_left_behind():
    """Ray keeps what it has opened until it is shut down."""


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(2, NODE) as started:
        yield started


def hashes(directory):
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.endswith(".convert.json")]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def expected(tmp_path):
    """The hashes of what one run without an engine writes."""
    (tmp_path / "one").mkdir()
    (tmp_path / "parts").mkdir()
    convert(Eventful(tmp_path / "log", "die", times=0), tmp_path / "one/b.syr", shards=SHARDS)
    return hashes(tmp_path / "one")


def run(source, tmp_path, **options):
    from dataload.ray import convert

    return convert(source, tmp_path / "parts/b.syr", **{"shards": SHARDS, **options})


def test_a_worker_that_is_killed_changes_nothing(cluster, expected, tmp_path):
    source = Eventful(tmp_path / "log", "die")
    seen = []
    report = run(source, tmp_path, memory="10MB", progress=lambda *of: seen.append(of))
    assert hashes(tmp_path / "parts") == expected
    assert len(source.events()) == 1
    assert (report.records, report.resumed, report.notes) == (COUNT, 0, ())
    assert (seen[0], seen[-1]) == ((0, COUNT), (COUNT, COUNT))
    assert ray.is_initialized(), "it was initialised by its user"


def test_index_and_verify(cluster, expected, tmp_path):
    (tmp_path / "one/dataload.json").unlink()
    engine = tmp_path / "one", "--engine", "ray:parts=3"
    assert "40 records in 5 shards" in ok("index", "--manifest", *engine)
    assert "40 records in 5 files: all can" in ok("verify", *engine)
    assert {*hashes(tmp_path / "one")} == {*expected}


def test_errors_keep_their_class_and_are_not_tried_again(cluster, expected, tmp_path):
    source = Eventful(tmp_path / "log", "corrupt", times=99)
    with pytest.raises(CorruptFileError, match=r"^part 3/5 on node .*: a\.tar, byte 512, record 3: the checksum is wr"):
        run(source, tmp_path)
    assert len(source.events()) == 1
    match = r"^part 3/5 on node .*: there is no /data/a\.tar \(all machines of the cluster need the same paths: use"
    with pytest.raises(SourceNotFoundError, match=match):
        run(Eventful(tmp_path / "missing", "miss"), tmp_path, resume=True)


def test_a_worker_that_is_always_killed_is_named(cluster, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("dataload.ray._RETRIES", 1)
    source = Eventful(tmp_path / "log", "die", times=99)
    with pytest.raises(SourceError, match=r"Ray cannot run part 3/5: "):
        run(source, tmp_path)
    assert len(source.events()) == 2


def test_ctrl_c_deletes_what_is_half_written_and_can_be_resumed(cluster, expected, tmp_path):
    slow = Eventful(tmp_path / "log", "pause", at=33)

    def interrupt(*_):
        if slow.events():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run(slow, tmp_path, progress=interrupt)
    assert caught.value.__notes__ == ["finished shards are kept: pass resume=True to continue"]
    assert not [*(tmp_path / "parts").glob(".*.tmp"), *(tmp_path / "parts").glob("*.lock")]
    assert run(Eventful(tmp_path / "log", "die", times=0), tmp_path, resume=True).resumed > 0
    assert hashes(tmp_path / "parts") == expected


def test_settings(cluster, expected, tmp_path, monkeypatch):
    source = Eventful(tmp_path / "log", "die", times=0)
    with pytest.raises(ConfigError, match="Ray is initialised already: leave address='auto' out, or call"):
        run(source, tmp_path, address="auto")
    source.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"engine 'ray' sends the source and all options to other processes, and the"):
        run(source, tmp_path, overwrite=True)
    del source.lock
    with pytest.raises(ConfigError, match=r"cpus must be a number above 0, got -1"):
        run(source, tmp_path, cpus=-1)

    def interrupt(*_):
        raise KeyboardInterrupt

    with (
        pytest.warns(RuntimeWarning, match=r"needs 64 CPU, 0 memory, and no .* \(at most 1 CPU, .* memory\): waiting"),
        pytest.raises(KeyboardInterrupt),
    ):
        run(source, tmp_path, cpus=64, overwrite=True, progress=interrupt)

    def refuse(**_):
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigError, match=r"cannot connect to the Ray cluster at 'node:1': nobody answers"):
        run(source, tmp_path, overwrite=True, address="node:1")


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_node_that_is_removed_changes_nothing(cluster, expected, tmp_path):
    source = Waiting(tmp_path / "log")
    _, second = cluster.list_all_nodes()

    def remove():
        while len(set(source.events())) < 2:  # both nodes are in the middle of a part
            time.sleep(0.05)
        cluster.remove_node(second, allow_graceful=False)
        while all(map(alive, source.events())):
            time.sleep(0.05)
        (tmp_path / "go").touch()

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    run(source, tmp_path)
    thread.join()
    assert hashes(tmp_path / "parts") == expected
    assert len(cluster.list_all_nodes()) == 1


def test_the_command_line_connects_and_leaves(cluster, expected, tmp_path):
    (tmp_path / "two").mkdir()
    command = ["convert", "one/b-00000-of-00005.syr", "two/b.tar", "--shards", "2", "--engine", "ray"]
    done = subprocess.run(
        [sys.executable, "-m", "dataload", *command],
        cwd=tmp_path, env={**os.environ, "RAY_ADDRESS": cluster.address}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 records in two/b-{00000..00001}-of-00002.tar" in done.stdout
    with dataload.open(tmp_path / "two", decode="auto") as converted:
        assert [record["n"] for record in converted] == list(range(8))


def test_lengths_of_a_transform_are_measured_on_the_cluster(cluster, tmp_path):
    (tmp_path / "talks.jsonl").write_text('{"text": "a"}\n{"text": "bc"}\n' * 50)
    os.utime(tmp_path / "talks.jsonl", (1_700_000_000, 1_700_000_000))
    (tmp_path / "twice.py").write_text("def twice(sample):\n    return {'text': sample['text'] * 2}\n")
    done = subprocess.run(
        [sys.executable, "-m", "dataload", "stats", "talks.jsonl", "--map", "twice:twice", "--engine", "ray:parts=2"],
        cwd=tmp_path, env={**os.environ, "RAY_ADDRESS": cluster.address}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert ["text", "2", "to", "4", "3.0", "300"] in [line.split() for line in done.stdout.splitlines()]
    assert done.stdout.splitlines()[-1] == "kept"
