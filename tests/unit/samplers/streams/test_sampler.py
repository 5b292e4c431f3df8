"""StreamSampler: examples to read, numbers that no model can list; against plain lists see
tests/properties/test_streams.py.
"""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from orders import plans_of

from dataload._util.fingerprint import fingerprint
from dataload.samplers import BatchPlanner
from dataload.streams import StreamSampler


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
