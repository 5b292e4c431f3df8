"""Logs of jobs: what is noted is read again, wherever the file is cut; who has lost a log stops."""

import base64
import itertools
import os
import threading
from functools import partial

import numpy as np
import pytest

from dataload.catalog import ledger
from dataload.catalog.checks import ContentMark
from dataload.catalog.facts import Evidence, Measures, ShardFacts
from dataload.catalog.ledger import Job, Logged, log_of, parse_log
from dataload.catalog.statistics import FieldStatistics
from dataload.codecs.npz import build_npy
from dataload.errors import SourceError
from dataload.storage import Remote, storage_of

JOB = Job("run", "plan")
FIELD = FieldStatistics(records=2, dtypes={"int32": 2}, shapes={(1,): 1, (2,): 1}, labels=None)
FACTS = (
    ShardFacts("a-0", 10, 3),
    ShardFacts("a-1", 0, 0, "ab" * 32, ContentMark(10, "cd", None), Evidence(17), 4),
    ShardFacts("a-2", 9, 2, content=ContentMark(9, "", "mark"), evidence=Evidence(0, '"e"')),
    ShardFacts("ü", 1, 2, measures=Measures({"x": FIELD}, {"x": np.array([1, 2], np.uint8)})),
)


def whole(facts):
    measures = facts.measures and (facts.measures.fields, {n: x.tolist() for n, x in facts.measures.lengths.items()})
    return facts, facts.evidence, facts.skipped, measures, type(facts.content)


def noted(path, facts=FACTS, **options):
    log = log_of(str(path), **options)
    log.begin(JOB, {}, anew=True)
    for each in facts:
        log.note(each)
    log.close()


def test_what_was_noted_is_read(tmp_path):
    noted(tmp_path / "l")
    found = log_of(str(tmp_path / "l")).load(JOB)
    assert [*map(whole, found.shards.values())] == [*map(whole, FACTS)]
    assert found.damaged == 0


@pytest.mark.parametrize("job", [Job("other", "plan"), Job("run", "other")])
def test_the_log_of_another_job_does_not_count(tmp_path, job):
    noted(tmp_path / "l")
    assert log_of(str(tmp_path / "l")).load(job) == log_of(str(tmp_path / "none")).load(JOB) == Logged({})


def test_a_log_cut_at_every_byte_has_the_shards_before(tmp_path):
    noted(tmp_path / "l")
    data = (tmp_path / "l").read_bytes()
    ends = [index + 1 for index, byte in enumerate(data) if byte == 10]
    for cut in range(len(data)):
        found = parse_log(data[:cut], JOB)
        lines = sum(end <= cut for end in ends)
        assert [*found.shards] == [(each.name, "") for each in FACTS[: max(0, lines - 1)]]
        assert found.damaged == (cut not in (0, *ends))


@pytest.mark.slow_suite
def test_a_flipped_bit_costs_the_shard_of_its_line(tmp_path):
    noted(tmp_path / "l")
    data = (tmp_path / "l").read_bytes()
    first = data.index(b"\n") + 1
    for place in range(first, len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            found = parse_log(bytes(flipped), JOB)
            assert found.damaged
            kept = {name for name, _ in found.shards}
            assert kept < {each.name for each in FACTS}
            assert len(kept) >= len(FACTS) - 2, "a line feed ends two lines at most"


def test_the_last_line_of_a_shard_wins(tmp_path):
    again = ShardFacts("a-0", 11, 4)
    noted(tmp_path / "l", [*FACTS, again])
    assert log_of(str(tmp_path / "l")).load(JOB).shards["a-0", ""] == again


def with_lengths(lengths):
    array = base64.b64encode(build_npy(np.array(lengths[0], lengths[1]))).decode()
    return {"shard": "a", "bytes": 1, "records": 1, "measures": {}, "lengths": {"x": array}}


def test_lengths_are_one_unsigned_integer_for_each_record():
    line = ledger._line(with_lengths(([7], "u1")))
    assert parse_log(ledger.header_line(JOB) + line, JOB).shards["a", ""].measures.lengths["x"].tolist() == [7]


@pytest.mark.parametrize(
    "value",
    [
        *map(with_lengths, [([7, 8], "u1"), ([7], "i4"), ([7.0], "f4"), (7, "u1"), ([[7]], "u1")]),
        [],
        {"shard": "../a", "bytes": 1, "records": 1},
        {"shard": "a", "bytes": -1, "records": 1},
        {"shard": "a", "bytes": 1},
        {"shard": "a", "bytes": 1, "records": 1, "sha256": 5},
        {"shard": "a", "bytes": 1, "records": 1, "content": [1]},
        {"shard": "a", "bytes": 1, "records": 1, "measures": {"x": 3}},
        {"shard": "a", "bytes": 1, "records": 1, "measures": {}, "lengths": {"x": "no base64"}},
    ],
)
def test_a_line_that_makes_no_sense_is_dropped(value):
    data = ledger.header_line(JOB) + ledger._line(value) + ledger.shard_line(FACTS[0], "k")
    assert parse_log(data, JOB) == Logged({("a-0", "k"): FACTS[0]}, 1)


def test_who_resumes_keeps_what_is_known_and_the_other_stops(tmp_path):
    first, second = (log_of(str(tmp_path / "l"), at_once=True) for _ in range(2))
    first.begin(JOB, {}, anew=True)
    first.note(FACTS[0])
    second.begin(JOB, second.load(JOB).shards, anew=False)
    with pytest.raises(SourceError, match=r"another process has taken over .*l: wait until it has ended"):
        first.note(FACTS[1])
    second.note(FACTS[2])
    assert [name for name, _ in log_of(str(tmp_path / "l")).load(JOB).shards] == ["a-0", "a-2"]
    os.unlink(tmp_path / "l")
    with pytest.raises(SourceError, match="has taken over"):
        second.note(FACTS[1])
    first.close()
    second.close()


def test_who_has_lost_a_log_in_blocks_stops_when_it_ends(tmp_path):
    first, second = (log_of(str(tmp_path / "l")) for _ in range(2))
    first.begin(JOB, {}, anew=True)
    first.note(FACTS[0])
    second.begin(JOB, second.load(JOB).shards, anew=False)
    first.note(FACTS[1])
    with pytest.raises(SourceError, match="has taken over"):
        first.close()
    with (tmp_path / "other").open("w") as other:  # which may get the descriptor
        first.close()
        other.write("intact")
    second.remove()
    assert not (tmp_path / "l").exists()


@pytest.mark.parametrize("where", ["local", "store"])
def test_a_log_is_whose_it_was_last(where, tmp_path, request):
    new = partial(log_of, str(tmp_path / "l")) if where == "local" else request.getfixturevalue("folder").log
    first, second = new(), new()
    assert not first.is_ours()
    first.begin(JOB, {}, anew=True)
    assert first.is_ours()
    second.begin(JOB, second.load(JOB).shards, anew=False)
    assert (first.is_ours(), second.is_ours()) == (False, True)
    first.close()
    second.remove()
    assert not second.is_ours()


def test_a_log_is_not_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "l").symlink_to("victim")
    noted(tmp_path / "l")
    assert (tmp_path / "victim").read_text() == "precious"


NUMBERS = itertools.count()


class Folder:
    """A folder of an object store in memory; each log sees it with settings of its own, as other nodes do."""

    def __init__(self):
        self.url = f"memory://ledger-{next(NUMBERS)}/l"

    def log(self, **options):
        return log_of(self.url, Remote.of(None, None), **options)

    @property
    def storage(self):
        return storage_of(self.url, Remote.of(None, None))

    def segments(self):
        return [name for name in self.storage.list(self.url) if name != "claim"]


@pytest.fixture(scope="module")
def store():
    pytest.importorskip("obstore")
    folder = Folder()
    folder.storage.replace(f"{folder.url}/x", b"", None)  # starts obstore's threads, which live as long as the process
    return Folder


@pytest.fixture
def folder(store):
    return store()


@pytest.mark.parametrize(("options", "most", "count"), [({}, 64, 1), ({}, 3, 2), ({"at_once": True}, 64, 4)])
def test_lines_are_gathered_in_segments(folder, monkeypatch, options, most, count):
    monkeypatch.setattr(ledger, "_MOST_LINES", most)
    log = folder.log(**options)
    log.begin(JOB, {}, anew=True)
    for each in FACTS:
        log.note(each)
    assert all(each.daemon for each in threading.enumerate() if isinstance(each, threading.Timer)), "exit does not wait"
    log.close()
    assert len(folder.segments()) == count
    found = folder.log().load(JOB)
    assert [*map(whole, found.shards.values())] == [*map(whole, FACTS)]
    assert folder.log().load(Job("other", "plan")) == Logged({})
    log.remove()
    assert folder.log().load(JOB) == Logged({})
    assert not folder.storage.exists(folder.url)


def impatient(folder, monkeypatch, name):
    """Begin a log that waits for no second shard; the event is set once its method of this name has run."""
    monkeypatch.setattr(ledger, "_SECONDS", 0.0)
    ran, log = threading.Event(), folder.log()
    log.begin(JOB, {}, anew=True)
    real = getattr(log, name)
    monkeypatch.setattr(log, name, lambda: (real(), ran.set()))
    return log, ran


def test_a_segment_does_not_wait_for_the_next_shard(folder, monkeypatch):
    log, sealed = impatient(folder, monkeypatch, "_seal")
    log.note(FACTS[0])
    assert sealed.wait(30)
    assert [name for name, _ in folder.log().load(JOB).shards] == ["a-0"]
    log.close()


def test_who_resumes_in_a_store_keeps_segments_and_the_other_stops(folder):
    first, second = folder.log(at_once=True), folder.log()
    first.begin(JOB, {}, anew=True)
    first.note(FACTS[0])
    known = second.load(JOB).shards
    first.note(FACTS[1])  # still the first one's: nothing is claimed yet
    second.begin(JOB, known, anew=False)
    with pytest.raises(
        SourceError, match=rf"another process \(process {os.getpid()} on .*\) has taken over .*/l: wait"
    ):
        first.note(FACTS[2])
    second.note(FACTS[3])
    second.close()
    assert [name for name, _ in folder.log().load(JOB).shards] == ["a-0", "a-1", "ü"]
    third, late = folder.log(), folder.log()
    known = late.load(JOB).shards
    third.begin(JOB, folder.log().load(JOB).shards, anew=False)
    with pytest.raises(SourceError, match="has taken over"):
        late.begin(JOB, known, anew=False)  # of two that resume at the same time, one goes on
    third = folder.log()
    third.begin(JOB, {}, anew=True)
    assert folder.log().load(JOB) == Logged({}), "what is begun anew counts nothing"


def test_an_error_of_the_timer_is_raised_by_the_next_note(folder, monkeypatch):
    log, failed = impatient(folder, monkeypatch, "_seal_late")
    folder.log().begin(JOB, {}, anew=False)  # takes over
    log.note(FACTS[0])
    assert failed.wait(30)
    for act in (lambda: log.note(FACTS[1]), log.close):
        with pytest.raises(SourceError, match="has taken over"):
            act()


@pytest.mark.parametrize("claim", [b"", b"[]", b'{"writers": 5}', b'{"run": "run", "plan": "plan", "writers": [{}]}'])
def test_a_damaged_claim_counts_no_segment(folder, claim):
    noted(folder.url, remote=Remote.of(None, None))
    found = folder.storage.load(f"{folder.url}/claim")
    folder.storage.replace(f"{folder.url}/claim", claim, found[1])
    assert folder.log().load(JOB) == Logged({})
