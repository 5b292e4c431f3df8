"""What is kept beside data: its kinds, and what may be deleted."""

import json
import platform
import subprocess
import sys

import numpy as np
import pytest

from dataload.catalog.arrays import list_data, remove
from dataload.storage import Remote, storage_of
from dataload.storage.kept import CachedTable, Place, write_arrays

LENGTHS = f".dataload.lengths-{'0' * 32}.npy"
JOB = (".out.tar.convert.json", ".out.tar.convert.0-of-2.log", ".out.tar.convert.log")


def listed(directory):
    files = list_data(directory)
    return {file.path.rpartition("/")[2]: (file.kind, file.name, file.removal) for file in files}


@pytest.fixture
def directory(tmp_path):
    """An unfinished conversion, and files of others."""
    for name in (*JOB, "out.tar", "notes.txt", LENGTHS):
        (tmp_path / name).write_text("")
    (tmp_path / JOB[0]).write_text(json.dumps({"finished": [1], "shards": [1, 2]}))
    return tmp_path


def test_an_unfinished_conversion_may_be_deleted_and_a_journal_never(directory):
    job = dict.fromkeys(JOB, ("conversion", "out.tar", "all"))
    assert listed(str(directory)) == {**job, LENGTHS: ("lengths", "", "prune")}
    (directory / JOB[0]).write_text(json.dumps({"finished": [1, 2], "shards": [1, 2]}))
    (directory / "dataload.json").write_text(f'"{LENGTHS}"')
    journal = {JOB[0]: ("journal", "out.tar", "never"), LENGTHS: ("lengths", "", "never")}
    assert listed(str(directory)) == {**job, **journal}
    for text in ("", "[]", "{}", '{"finished": 1, "shards": []}'):
        (directory / JOB[0]).write_text(text)
        assert listed(str(directory)) == {LENGTHS: ("lengths", "", "never")}, "the files of another program"


def test_the_lengths_of_an_index_that_has_not_ended_may_be_deleted(directory):
    (directory / ".dataload.json.index.log").write_text("")
    found = listed(str(directory))
    assert found[".dataload.json.index.log"] == ("index", "", "all")
    assert found[LENGTHS] == ("lengths", "", "all")
    (directory / ".dataload.json.index.log").unlink()
    with storage_of("").lock(str(directory / "dataload.json")):  # an append saves them while it has the lock
        assert listed(str(directory))[LENGTHS] == ("lengths", "", "all")


def test_a_job_that_has_begun_keeps_all_its_files(directory):
    found = list_data(str(directory))
    log = str(directory / JOB[2])
    with storage_of(log).lock(log):
        assert [file.path for file in remove(found)] == [str(directory / LENGTHS)]
    assert {path.name for path in directory.iterdir() if path.name in JOB} == {*JOB}
    assert [file.path.rpartition("/")[2] for file in remove(list_data(str(directory)))][-1] == JOB[0], "the head last"
    assert sorted(path.name for path in directory.iterdir() if not path.name.endswith(".lock")) == [
        "notes.txt",
        "out.tar",
    ]


def test_a_filter_of_version_0_2_is_told_by_its_key(tmp_path):
    for name, kind in (("a.tar.0123456789abcdef", "filter"), ("b.tar", "tar")):
        place = Place(str(tmp_path), f".{name}.dataload-index", data=str(tmp_path))
        assert write_arrays(place, f"('0.2', 1, '{kind}', 4)", CachedTable({"x": np.arange(3)}, {}))
    kinds = {".a.tar.0123456789abcdef.dataload-index": "filter", ".b.tar.dataload-index": "table"}
    assert {name: kind for name, (kind, _, _) in listed(str(tmp_path)).items()} == kinds


def test_a_log_at_a_url_is_held_unless_its_writer_was_here_and_has_ended():
    pytest.importorskip("obstore")
    remote = Remote.of(None, None)
    ended, living = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2))
    ended.communicate(b"\n")
    here = {"host": platform.node()}
    claims = {
        "ended": ({**here, "pid": ended.pid}, ""),
        "living": ({**here, "pid": living.pid}, f"process {living.pid} on {platform.node()}"),
        "elsewhere": ({"host": "node-7", "pid": ended.pid}, f"process {ended.pid} on node-7"),
        "damaged": ({**here, "pid": "x"}, ""),
    }
    for name, (claim, _) in claims.items():
        log, head = (f"memory://kept/.{name}.tar.convert.{end}" for end in ("log", "json"))
        storage_of(log, remote).replace(f"{log}/claim", json.dumps(claim).encode(), None)
        storage_of(head, remote).replace(head, b'{"finished": [], "shards": [1]}', None)
    found = {file.name: file.holder for file in list_data("memory://kept", remote) if file.path.endswith(".log")}
    assert found == {f"{name}.tar": holder for name, (_, holder) in claims.items()}
    living.communicate(b"\n")
    assert living.returncode == 0, "looking at it has not stopped it"
