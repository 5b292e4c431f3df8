"""RowMixture: rows to look at; against plain lists see tests/properties/test_streams.py."""

import numpy as np
from orders import plans_of

from dataload.streams import RowMixture, StreamSampler


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
