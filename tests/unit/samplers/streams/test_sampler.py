"""StreamSampler: examples to read, numbers that no model can list; against plain lists see
tests/properties/test_streams.py.
"""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from orders import plans_of

from dataload import ConfigError, Loader, MemorySource, RangeSource, StateMismatchError
from dataload._util.fingerprint import fingerprint
from dataload.samplers import BatchPlanner
from dataload.samplers.quality import global_rows, order_report
from dataload.streams import StreamSampler


def sampler(*lengths, **settings):
    return StreamSampler(sequence_lengths=list(lengths), **{"rows": 2, **settings})


MODES = ("split", "pack", "independent", "shuffled")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:.* has no batches:UserWarning")
def test_without_records_there_are_no_steps(mode):
    endless = {"epoch_steps": 4} if mode in ("independent", "shuffled") else {}
    for lengths, ends in (((), "next"), ((0,), "pad"), ((0, 0, 0), "drop")):
        starts = {"random_start": True} if (mode, ends) != ("pack", "next") and ends != "pad" else {}
        for settings in ({}, endless, starts):
            empty = sampler(*lengths, mode=mode, ends=ends, **settings)
            assert (empty.steps(0), empty.items(0), empty.records, plans_of(empty)) == (0, 0, 0, [])
            with Loader(RangeSource(0), sampler=empty) as loader:
                assert list(loader) == list(loader) == []


HUGE = [10**12, 3, 10**12 + 7, 0, 10**11]


@pytest.mark.parametrize("mode", ["split", "pack", "independent"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_sequences_may_be_longer_than_any_memory(mode, chunk):
    huge = sampler(*HUGE, rows=4, chunk=chunk, mode=mode)
    ends = np.cumsum(HUGE)
    steps = huge.steps(0)
    for start in (0, steps // 3, steps - 5):
        before = None
        for plan in huge.plans(range(start, start + 5), epoch=1):
            indices, valid = plan.indices.reshape(4, chunk), plan.valid.reshape(4, chunk)
            is_first, offset, stream = (plan.columns[name] for name in ("is_first", "offset", "stream_id"))
            begins = is_first.reshape(4, chunk)
            for row in np.flatnonzero(valid[:, 0]).tolist():
                assert stream[row] == np.searchsorted(ends, indices[row, 0], side="right")
                assert offset[row] == indices[row, 0] - (ends[stream[row]] - HUGE[stream[row]])
                steady = np.flatnonzero(valid[row, 1:] & ~begins[row, 1:])
                assert (indices[row, steady + 1] == indices[row, steady] + 1).all()
                if before is not None and not begins[row, 0]:
                    assert indices[row, 0] == before[row] + 1
            before = indices[:, -1]
    shares = {"split": sum(HUGE) / 4, "independent": sum(HUGE) / 4, "pack": HUGE[2]}
    assert steps == pytest.approx(shares[mode] / chunk, abs=1)


def test_chunks_of_huge_sequences_come_from_anywhere():
    huge = sampler(*HUGE, rows=4, chunk=1000, mode="shuffled", ends="drop")
    assert huge.steps(0) == -(-sum(length // 1000 for length in HUGE) // 4)
    (plan,) = huge.plans(range(10**8, 10**8 + 1), epoch=3)
    assert (np.diff(plan.indices.reshape(4, 1000), axis=1) == 1).all()
    assert (plan.columns["offset"] % 1000 == 0).all()


def test_the_order_of_endless_chunks_does_not_depend_on_the_tail():
    chunks = sampler(7, mode="shuffled", chunk=3, epoch_steps=4)
    for tail in ("drop", "partial"):
        same = replace(chunks, tail=tail)
        assert same.order == chunks.order
        for mine, others in zip(chunks.plans(range(4), epoch=1), same.plans(range(4), epoch=1), strict=True):
            assert mine.wanted.tolist() == others.wanted.tolist()
    # Less than a chunk is a chunk all the same, where there is no end at which to leave it out.
    (plan,) = sampler(2, mode="shuffled", chunk=3, epoch_steps=1, tail="drop").plans(range(1), epoch=0)
    assert plan.wanted.tolist() == [0, 1, 0, 1]


def test_it_is_a_value():
    lengths = np.array([4, 5])
    one = StreamSampler(sequence_lengths=lengths, rows=2, chunk=2, seed=3)
    lengths[0] = 100
    assert one == sampler(4, 5, chunk=2, seed=3)
    assert hash(one) == hash(sampler(4, 5, chunk=2, seed=3))
    changes = [{"seed": 4}, {"chunk": 1}, {"rows": 4}, {"mode": "pack"}, {"ends": "pad"}, {"random_start": True}]
    others = [sampler(5, 4, chunk=2, seed=3), *(replace(one, **change) for change in changes)]
    assert len({one, *others}) == 8
    assert len({fingerprint(each.order) for each in (one, *others)}) == 8
    assert fingerprint(one.with_ranks(world_size=2, rank=1, tail="drop").order) == fingerprint(one.order)
    assert repr(one) == (
        "StreamSampler(2 sequences, 9 records, rows=2, chunk=2, mode='split', ends='next', seed=3, "
        "random_start=False, epoch_steps=None)"
    )
    plans_of(one)
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert [plan.indices.tolist() for plan in plans_of(again)] == [plan.indices.tolist() for plan in plans_of(one)]
    assert isinstance(one, BatchPlanner)
    with pytest.raises(ValueError, match="read-only"):
        one.sequence_lengths[0] = 9


@pytest.mark.parametrize(
    "other", [sampler(6, 6, 8, rows=6), sampler(6, 6, 8, rows=4, seed=1), sampler(6, 6, 8, rows=4, chunk=2)]
)
def test_the_state_of_another_order_is_refused(other):
    with (
        Loader(RangeSource(20), sampler=sampler(6, 6, 8, rows=4)) as loader,
        Loader(RangeSource(20), sampler=other) as elsewhere,
    ):
        next(iter(loader))
        with pytest.raises(StateMismatchError, match=r"order \(the sampler or its seed\)"):
            elsewhere.load_state_dict(loader.state_dict())


def test_the_source_and_the_ranks_must_fit():
    with pytest.raises(
        ConfigError, match=r"the sampler was made for a source of 20 records, and this one has 19: build a new one$"
    ):
        Loader(RangeSource(19), sampler=sampler(6, 6, 8))
    with pytest.raises(ConfigError):
        Loader(RangeSource(20), sampler=sampler(10, 10, rows=4), rank=0, world_size=3)


def test_what_a_consumer_writes_into_a_batch_is_in_no_other():
    with Loader(RangeSource(20), sampler=sampler(6, 6, 8)) as loader:
        start = loader.state_dict()
        before = [{name: column.copy() for name, column in batch.items()} for batch in loader]
        loader.load_state_dict(start)
        for batch in loader:
            for column in batch.values():
                column[...] = 0
        loader.load_state_dict(start)
        for batch, expected in zip(loader, before, strict=True):
            assert all(np.array_equal(batch[name], expected[name]) for name in expected)


def test_records_need_not_be_dicts():
    with Loader(MemorySource([f"r{i}" for i in range(6)]), sampler=sampler(3, 3, mode="pack", chunk=3)) as loader:
        (batch,) = loader
    assert list(batch) == ["data", "stream_id", "offset", "is_first", "valid"]
    assert sorted(batch["data"]) == [["r0", "r1", "r2"], ["r3", "r4", "r5"]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 3])
def test_orders_can_be_judged(mode, chunk):
    streams = sampler(*[50] * 40, rows=8, chunk=chunk, mode=mode)
    report = order_report(streams.with_ranks(world_size=2, rank=1))
    served = streams.steps(0) * streams.rows_per_step if mode == "independent" else 2000
    assert (report.records, report.steps, report.looked_at) == (2000, streams.steps(0), served)
    assert report == order_report(streams)  # whatever the ranks
    assert report.multiplicity.verdict == "each record occurs once" or mode == "independent"
    json.dumps(report.to_json())
    for world in (1, 2, 4):
        dealt = streams.with_ranks(rank=world - 1, world_size=world, tail="pad")
        indices, counts = global_rows(dealt, range(streams.steps(0)), epoch=0)
        cuts = np.cumsum(counts)[:-1]
        assert [each.tolist() for each in np.split(indices, cuts)] == [
            plan.wanted.tolist() for plan in plans_of(streams)
        ]
