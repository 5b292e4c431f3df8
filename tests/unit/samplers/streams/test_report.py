"""The report on streams against a plain count of the rows."""

from collections import Counter

import numpy as np
import pytest
from orders import plans_of

from dataload.samplers.streams.report import stream_report
from dataload.streams import RowMixture, StreamSampler

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
