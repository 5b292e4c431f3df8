"""The loader of iterators with worker processes: the same batches, states and errors; nothing is left behind."""

import itertools
import os
import signal
import sys
from pathlib import Path

import pytest

from dataload import WorkerError
from dataload.streams import MultiStreamLoader

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("children", "support")]
import streams
import works
from groups import groups_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]

LENGTHS = [3, 0, 17, 1, 8, 5, 2]


def plain(batch):
    return {name: column.tolist() if hasattr(column, "tolist") else column for name, column in batch.items()}


def loader_of(**settings):
    return MultiStreamLoader(streams.count_up, LENGTHS, **{"batch_size": 4, "executor": "processes", **settings})


def test_batches_and_resumes_are_those_of_threads():
    """At each step a state goes on with another executor."""
    settings, steps = {"chunk": 2, "seed": 5}, 12
    with loader_of(executor="threads", **settings) as loader:
        expected = list(map(plain, itertools.islice(loader, steps)))
    for executor in ("processes", "fork"):
        with loader_of(num_workers=2, executor=executor, **settings) as loader:
            states, batches = [loader.state_dict()], []
            for batch in itertools.islice(loader, steps):
                batches.append(plain(batch))
                states.append(loader.state_dict())
            assert batches == expected
    with (
        loader_of(num_workers=1, **settings) as one,
        loader_of(num_workers=4, executor="threads", **settings) as two,
        loader_of(num_workers=0, **settings) as three,
    ):
        for step, loader in zip(range(steps + 1), itertools.cycle([one, two, three]), strict=False):
            loader.load_state_dict(states[step])
            assert list(map(plain, itertools.islice(loader, steps - step))) == expected[step:]


def test_a_failing_stream_is_named():
    settings = {"batch_size": 2, "num_workers": 2, "executor": "processes", "mode": "split", "shuffle": False}
    with MultiStreamLoader(streams.break_at_3, [9, 7], **settings) as loader:
        found = []
        with pytest.raises(WorkerError, match="step 3 of epoch 0 failed in row 1, at item 3 of sequence 1,") as caught:
            found += (batch["x"].tolist() for batch in loader)
        assert found == [[0, 0], [1, 1], [2, 2]]
        assert repr(caught.value.__cause__) == "OSError('the line is dead')"
        assert "in break_at_3" in caught.value.__notes__[0]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_samples_that_cannot_be_sent_are_an_error_of_their_step(size):
    settings = {"batch_size": 1, "executor": "processes", "collate": len}
    with groups_of(size), MultiStreamLoader(streams.unpicklable_at_2, [9], **settings) as loader:
        found = []
        with pytest.raises(WorkerError, match=r"step 2 of epoch 0 failed: dataload-0 .* could not send its batch"):
            found += (batch["data"] for batch in loader)
        assert found == [1, 1]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_killed_worker_is_an_error_that_names_the_stream_and_the_next_for_goes_on(tmp_path, size):
    make = streams.HangAt(4, tmp_path / "mark", kill=True)
    settings = {"batch_size": 2, "num_workers": 2, "executor": "processes", "mode": "split", "shuffle": False}
    with groups_of(size), MultiStreamLoader(make, [5, 4], **settings) as loader:
        batches = iter(loader)
        assert [next(batches)["x"].tolist() for _ in range(2)] == [[0, 0], [1, 1]]
        match = r"step 2 of epoch 0 failed in row 1, at sequence 1, 4: dataload-1 \(.* was killed by SIGKILL"
        with pytest.raises(WorkerError, match=match) as caught:
            next(batches)
        assert caught.value.indices == (1,)
        loader.load_state_dict(loader.state_dict())
        assert [batch["x"].tolist() for batch in loader] == [[2, 2], [3, 3], [4, 0]]
        os.kill(works.workers()[-1], signal.SIGKILL)  # it waits, and its position is of the epoch before
        with pytest.raises(WorkerError, match=r"step 0 of epoch 1 failed: dataload-\d \(.* was killed") as caught:
            next(iter(loader))
        assert (caught.value.step, caught.value.indices) == (0, ())


@pytest.mark.parametrize("leave", ["close", "drop"])
def test_generators_are_closed_in_their_processes(tmp_path, leave):
    loader = MultiStreamLoader(
        streams.NoteClosing(tmp_path), ["a", "b", "c"], batch_size=2, num_workers=2, executor="processes"
    )
    next(iter(loader))
    workers = works.workers()
    assert len(workers) == 2
    if leave == "close":
        loader.close()
    del loader
    assert len(list(tmp_path.iterdir())) == 2
    assert {int(path.name.rsplit("-", 1)[1]) for path in tmp_path.iterdir()} == set(workers)
