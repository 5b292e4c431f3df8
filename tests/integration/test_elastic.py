"""Global batches are kept on other numbers of ranks, if asked; tests/properties/test_loader.py resumes anywhere."""

import numpy as np
import pytest

from dataload import Loader, MemorySource, RangeSource, WorkerError
from dataload.samplers import GlobalShuffle, PackedBatchSampler

LENGTH = 120


@pytest.mark.parametrize(
    ("size", "sizes"), [({"global_batch_size": 12}, [12] * 10), ({"batch_size": 3}, [12] * 3 + [6] * 2 + [9] * 8)]
)
def test_the_global_batch_is_kept_on_other_ranks_if_asked(size, sizes):
    """Of 4 ranks, 2 and 3; without, the rows of a rank are kept."""
    found, state = [], None
    for world_size, steps in ((4, 3), (2, 2), (3, None)):
        settings = {**size, "shuffle": True, "seed": 1, "world_size": world_size}
        ranks = [Loader(RangeSource(LENGTH), rank=rank, **settings) for rank in range(world_size)]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        for step, parts in enumerate(zip(*ranks, strict=True), 1):
            rows = [part["index"][part.get("valid", slice(None))].tolist() for part in parts]
            found.append([rows[i % world_size][i // world_size] for i in range(sum(map(len, rows)))])
            if step == steps:
                break
        (state,) = {str(loader.state_dict()): loader.state_dict() for loader in ranks}.values()
    assert [len(batch) for batch in found] == sizes
    order = GlobalShuffle(LENGTH, 1).indices(np.arange(LENGTH), epoch=0).tolist()
    assert [i for batch in found for i in batch] == order


def test_lengths_that_are_stale_are_named():
    tokens = [{"tokens": np.full(1 + i * 7 % 23, i, np.int32)} for i in range(LENGTH)]
    planner = PackedBatchSampler(sampler=GlobalShuffle(LENGTH, 5), lengths=[3] * LENGTH, row_length=32, batch_size=2)
    with pytest.raises(WorkerError, match=r"ConfigError: cannot pack field 'tokens': .*compute the lengths again"):
        next(iter(Loader(MemorySource(tokens), sampler=planner)))
