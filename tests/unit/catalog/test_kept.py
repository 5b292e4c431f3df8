"""What is kept beside data: its kinds, and what may be deleted."""

import json

import pytest

from dataload.catalog.arrays import list_data, remove
from dataload.storage import storage_of

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
