"""Rows that follow sequences: examples to read, numbers that no model can list, the layout, and the report.

Against plain lists see tests/properties/test_streams.py.
"""

import itertools
import pickle
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from orders import plans_of

from dataload._util.fingerprint import fingerprint
from dataload._util.randomness import derive_key, permute
from dataload.samplers import BatchPlanner
from dataload.samplers.streams.layout import Shuffled, balance
from dataload.samplers.streams.report import stream_report
from dataload.streams import RowMixture, StreamSampler


def sampler(*lengths, **settings):
    return StreamSampler(sequence_lengths=list(lengths), **{"rows": 2, **settings})


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


def part(mode="shuffled", *, rows=2, lengths=(6, 6), **settings):
    return StreamSampler(sequence_lengths=lengths, rows=rows, mode=mode, **settings)


def test_parts_go_on_over_epochs_of_the_first():
    """Epochs of six steps of two rows: a part of 18 chunks comes to its end every three half epochs."""
    mixture = RowMixture(parts=(part("split"), part(lengths=[18])))
    passes = np.concatenate([plan.indices[2:] for e in range(6) for plan in plans_of(mixture, e)]).reshape(4, 18)
    assert np.sort(passes, axis=1).tolist() == [list(range(18))] * 4
    assert len({tuple(each) for each in passes.tolist()}) == 4
    endless = RowMixture(parts=(part("independent", epoch_steps=2), part("independent", seed=1)))
    assert endless.steps(5) == 2
    rows = np.array([plan.indices for epoch in range(6) for plan in plans_of(endless, epoch)])
    assert np.sort(rows, axis=0).T.tolist() == [list(range(12))] * 4


def test_less_than_a_chunk_is_served_whatever_the_tail():
    mixture = RowMixture(parts=(part("split", chunk=4, lengths=[16]), part(chunk=4, lengths=[3])), tail="drop")
    assert (mixture.rows, mixture.rows_per_step) == (4, 16)
    for plan in mixture.plans(range(2), epoch=0):
        assert plan.valid.tolist() == [[True] * 4] * 2 + [[True, True, True, False]] * 2
        assert plan.indices.reshape(4, 4)[2:, :3].tolist() == [[0, 1, 2]] * 2


def array(values):
    return np.array(values, np.int64)


def key(number):
    return derive_key(number, "test", words=2)


def assert_found(layout, expected, places):
    found = layout.find(array(places))
    assert found.sequences.shape == found.within.shape == np.shape(places)
    pairs = zip(found.sequences.ravel().tolist(), found.within.ravel().tolist(), strict=True)
    assert list(pairs) == [expected[place] for place in np.ravel(array(places)).tolist()]


@pytest.mark.parametrize("count", [63, 64, 65, 2047, 2048, 2049, 6144, 20_000])
def test_an_order_of_many_sequences_is_found_from_anywhere_and_by_threads(count):
    units = np.random.default_rng(0).integers(0, 3, count)
    order = permute(np.arange(count), count, key(1)).tolist()
    expected = [(sequence, within) for sequence in order for within in range(units[sequence])]
    total = len(expected)
    for asked in (
        [[0], [total - 1], range(total)],
        [[total - 1], [0]],
        [[total // 2, 1], np.arange(total).reshape(-1, 1, 1)],
    ):
        layout = Shuffled(units, key(1))
        small = len(pickle.dumps(layout))
        for places in asked:
            assert_found(layout, expected, places)
        assert len(pickle.dumps(layout)) == small, "what it has computed is not pickled"

    def ask(number, layout=Shuffled(units, key(1))):  # noqa: B008 - shared by all threads
        for start in range(37 * number, total, 4 * 37):
            assert_found(layout, expected, range(start, min(start + 100, total)))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))


def loads(units, rows, order):
    """The units of each row, after a look at what `balance` has dealt."""
    by_row, bounds = balance(array(units), rows, array(order))
    assert sorted(by_row.tolist()) == list(range(len(units)))
    assert len(bounds) == rows + 1
    assert (bounds[0], bounds[-1]) == (0, len(units))
    parts = [by_row[start:stop].tolist() for start, stop in itertools.pairwise(bounds.tolist())]
    assert [sorted(part, key=order.index) for part in parts] == parts
    return [sum(units[sequence] for sequence in part) for part in parts]


def best(units, rows):
    """The least that the fullest row can have."""
    deals = itertools.product(range(rows), repeat=len(units))
    return min(max(np.bincount(deal, units, minlength=rows), default=0) for deal in deals)


@given(
    units=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    rows=st.integers(1, 3),
    draw=st.randoms(use_true_random=False),
)
@example([5, 5, 4, 4, 3, 3, 3], 3, random.Random(0))
def test_rows_have_about_equally_much(units, rows, draw):
    order = list(range(len(units)))
    draw.shuffle(order)
    found = loads(units, rows, order)
    assert max(found) <= (4 / 3 - 1 / (3 * rows)) * best(units, rows) + 1e-9


LENGTHS = (7, 0, 2, 12, 5)
PLANNERS = {
    "packed": StreamSampler(sequence_lengths=LENGTHS, rows=3, chunk=4, mode="pack", ends="pad"),
    "single records": StreamSampler(sequence_lengths=LENGTHS, rows=2, mode="independent"),
    "only chunks": StreamSampler(sequence_lengths=LENGTHS, rows=2, mode="shuffled", chunk=3, ends="pad"),
    "mixed": RowMixture(
        parts=(
            StreamSampler(sequence_lengths=LENGTHS, rows=3, chunk=4, mode="split", ends="pad"),
            StreamSampler(sequence_lengths=(30,), rows=2, chunk=4, mode="shuffled", ends="pad"),
        )
    ),
}


@pytest.mark.parametrize("name", PLANNERS)
def test_it_says_what_a_loop_counts(name):
    planner = PLANNERS[name]
    parts = planner.parts if name == "mixed" else (planner,)
    continuing = sum(part.rows for part in parts if part.mode != "shuffled")
    beginnings = visits = records = 0
    distinct, valid, served = [], [], Counter()
    for plan in plans_of(planner, 1):
        cells = plan.valid.reshape(planner.rows, -1)
        beginnings += int(plan.columns["is_first"].reshape(cells.shape)[:continuing].sum())
        visits += sum(any(row) for row in cells[:continuing].tolist())
        records += int(cells[:continuing].sum())
        distinct.append(len({*plan.columns["stream_id"].tolist()} - {-1}))
        valid += cells.ravel().tolist()
        served.update(plan.indices[cells.ravel()].tolist())

    report = stream_report(planner, epoch=1)
    assert (report.epoch, report.steps, report.looked_at, report.sampled) == (1, len(distinct), len(distinct), False)
    assert (report.rows, report.continuing, report.chunk) == (planner.rows, continuing, parts[0].chunk)
    assert (report.sequences, report.shortest, report.longest) == (4, 2, 12)
    assert report.beginnings == beginnings
    assert report.run_steps == (visits / beginnings if continuing else None)
    assert report.run_records == (records / beginnings if continuing else None)
    assert report.per_batch == pytest.approx(np.mean(distinct))
    assert report.filler == pytest.approx(1 - np.mean(valid))
    assert report.multiplicity.repeated == sum(times > 1 for times in served.values())
    assert report.multiplicity.never == planner.records - len(served)
    assert report.to_json()["sampled"] is False
