"""Shares of a cache: equal parts of what is left when each job has what it needs."""

import json
import os

import pytest

from dataload.storage.remote import jobs
from dataload.storage.remote.jobs import LivingFile, Shares, describe_jobs


@pytest.fixture(autouse=True)
def always_look(monkeypatch):
    monkeypatch.setattr(jobs, "_SECONDS_BETWEEN_LOOKS", -1.0)


def other(root, job, process, share=1.0, need=0, **more):
    content = {**more, "job": job, "process": process, "reads": f"data of {process}", "share": share, "need": need}
    return LivingFile(str(root / "jobs"), "job-", json.dumps(content).encode())


def test_jobs_alive_divide_the_budget(tmp_path):
    limit = [1000]
    own = Shares(str(tmp_path), lambda: limit[0], "part-00.tar", 1.0)
    assert (own.look(), own.budget(), own.left()) == ([], 1000, 1000)
    others = [other(tmp_path, 1, 1), other(tmp_path, 2, 2, share=0.0)]
    assert own.budget() == 333
    limit[0] = 600
    assert own.budget() == 200
    del others[0]
    assert (own.budget(), own.left()) == (300, 600)
    others.append(other(tmp_path, os.getppid(), 3))  # the parent is another job, unless ranks share it
    assert own.budget() == 200
    del others[1]
    assert describe_jobs(str(tmp_path)).count("process") == 2
    others.append(LivingFile(str(tmp_path / "jobs"), "job-", b"{of a later version"))
    assert own.budget() == 200
    assert "unknown data" in describe_jobs(str(tmp_path))


def test_each_job_has_what_it_needs(tmp_path):
    own = Shares(str(tmp_path), lambda: 1000, "part-00.mdb", 1.0, 300)
    others = [other(tmp_path, 1, 1, need=500)]
    assert (own.budget(), own.left()) == (300 + 200 // 2, 500)
    others.append(other(tmp_path, 2, 2, need=400))
    assert (own.budget(), own.left()) == (300, 100)
    others.append(other(tmp_path, 3, 3, need=100, since=1e12))  # it has to wait, not this one
    assert (own.budget(), own.left()) == (300, 100)
    others.append(other(tmp_path, 4, 4, need=200))
    assert own.left() == 0, "others need more than there is"
    assert f"process {os.getpid()} reads part-00.mdb and needs 300 bytes" in describe_jobs(str(tmp_path))


def test_loaders_of_a_process_and_ranks_of_a_job_divide_its_share(tmp_path):
    def shares(reads, *share, **given):
        return Shares(str(tmp_path), lambda: 1000, reads, *share, **given)

    train, joined = shares("train", 0.5), shares("train", 0.5)
    assert train.budget() == joined.budget() == 500
    validation = shares("val", 1.0)
    assert (train.budget(), validation.budget()) == (250, 500)
    plain = shares("val")
    assert plain.budget() == 1000  # plans of the same process make room
    del train, joined, validation
    assert plain.budget() == 1000
    rank = shares("train", 1.0, ranks=4, sharers=4)
    del plain
    assert rank.budget() == 250  # also before the others have registered
    ranks = [other(tmp_path, os.getppid(), process) for process in (1, 2, 3)]
    assert rank.budget() == 250
    ranks.append(other(tmp_path, 77, 77))
    assert rank.budget() == 125
    fits = shares("train", 1.0, ranks=4, sharers=1)
    del rank
    assert fits.budget() == 500  # all data fit: ranks read the same


def test_a_claim_is_registered_again_in_a_cache_that_was_deleted(tmp_path):
    own = Shares(str(tmp_path), lambda: 1000, "train", 1.0)
    (file,) = (tmp_path / "jobs").iterdir()
    file.unlink()
    (tmp_path / "jobs").rmdir()
    assert own.budget() == 1000
    assert len([*(tmp_path / "jobs").iterdir()]) == 1
    del own
    assert not [*(tmp_path / "jobs").iterdir()]
