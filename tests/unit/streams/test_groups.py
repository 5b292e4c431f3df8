"""Steps made in groups: the same batches, states and errors as one by one, whatever the sizes of the groups."""

import itertools
import json
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload import WorkerError, default_collate
from dataload.executors.base import Result, SerialExecutor, WorkerLostError, WorkerPosition
from dataload.streams import MultiStreamLoader, workers
from dataload.streams.messages import RowResults, RowTask, Stacked, Step, cut, join, samples_of, stack

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("children", "support")]
import streams
from groups import groups_of


def mixed_samples(length):
    """Samples that stack in some steps only, or to other dtypes."""
    for number in range(length):
        yield {"x": 2**63 if number == 3 else number, "y": 0.5 if number == 5 else number, "z": (number, b"b")}


def outcome(case, steps=20, epochs=2, state=None):
    """All batches, the state after each, and the error at the end if there is one."""
    make, lengths, settings = case
    found = []
    with MultiStreamLoader(make, lengths, **settings) as loader:
        if state is not None:
            loader.load_state_dict(state)
        try:
            for _ in range(epochs):
                found += ((repr(batch), json.dumps(loader.state_dict())) for batch in itertools.islice(loader, steps))
        except Exception as error:
            found.append((type(error).__name__, str(error), json.dumps(loader.state_dict())))
    return found


CASES = st.tuples(
    st.sampled_from([streams.Counting, streams.break_at_3, streams.noisy, mixed_samples]),
    st.lists(st.sampled_from([0, 1, 2, 3, 4, 7, 30]), min_size=1, max_size=6).map(lambda lengths: [*lengths, 11]),
    st.fixed_dictionaries(
        {
            "batch_size": st.integers(1, 4),
            "mode": st.sampled_from(["independent", "split"]),
            "chunk": st.sampled_from([1, 2, 3]),
            "ends": st.sampled_from(["next", "pad", "drop"]),
            "collate": st.sampled_from([None, default_collate.__call__]),
            "num_workers": st.integers(1, 4),
            "prefetch": st.integers(1, 3),
        }
    ),
)


@given(CASES, st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_groups_of_any_size_equal_groups_of_one_also_after_a_resume(case, sizes, data):
    with groups_of(1):
        expected = outcome(case)
    with groups_of(*sizes):
        assert outcome(case) == expected
        states = [each[1] for each in expected if len(each) == 2]
        if states and case[2]["mode"] == "independent":
            step = data.draw(st.integers(0, len(states) - 1))
            found = outcome(case, len(expected) - step - 1, epochs=1, state=json.loads(states[step]))
            assert found == expected[step + 1 :]


def test_a_stream_may_fill_the_same_buffer_again():
    def fill(length):
        buffer = np.zeros((), np.int64)
        for buffer[()] in range(length):
            yield buffer

    with groups_of(3), MultiStreamLoader(fill, [6], batch_size=1, chunk=2, mode="split") as loader:
        assert [batch["data"].tolist() for batch in loader] == [[[0, 1]], [[2, 3]], [[4, 5]]]


@pytest.mark.parametrize("collate", [None, np.stack])
def test_a_stream_may_fill_the_same_buffer_again_while_its_last_sample_is_collated(collate):
    def fill(length):
        tokens = np.zeros(1, np.int64) if collate else [0]
        for tokens[0] in range(length):
            yield tokens
        ended.set()

    def wait(batch):
        assert ended.wait(10)
        return batch

    ended = threading.Event()
    settings = {"batch_size": 1, "mode": "split", "collate": collate, "batch_transform": wait, "prefetch": 9}
    with groups_of(1), MultiStreamLoader(fill, [3], **settings) as loader:
        assert [int(batch["data"][0][0]) for batch in loader] == [0, 1, 2]


class Losing(SerialExecutor):
    """Loses a worker in place of each result that `lost` has a 1 for."""

    def __init__(self, work, lost, again):
        super().__init__(work)
        self.lost, self.again = iter(lost), again

    def submit(self, task):
        made = super().submit(task)
        result = made.result

        def lose():
            if next(self.lost):
                raise WorkerLostError("one", "is lost", WorkerPosition(-1, -1, -1), again=self.again)
            return result()

        return SimpleNamespace(result=lose, cancel=made.cancel)


@pytest.mark.parametrize(("lost", "again", "steps"), [("11011000111", True, 4), ("001", False, 2), ("111", True, 0)])
def test_a_worker_that_is_lost_is_replaced_unless_it_is_the_third_of_a_step(monkeypatch, lost, again, steps):
    settings = {"batch_size": 2, "mode": "split", "seed": 1}
    with MultiStreamLoader(streams.count_up, [9, 5, 8], **settings) as loader:
        expected = [batch["x"].tolist() for batch in itertools.islice(loader, steps)]
    monkeypatch.setattr(workers, "make_executor", lambda work, *_, **__: Losing(work, map(int, lost), again))
    with groups_of(1), MultiStreamLoader(streams.count_up, [9, 5, 8], num_workers=1, **settings) as loader:
        batches = iter(loader)
        assert [next(batches)["x"].tolist() for _ in range(steps)] == expected
        with pytest.raises(WorkerError, match="is lost"):
            next(batches)


def test_a_loader_that_is_closed_cancels_what_it_has_asked_for(monkeypatch):
    asked, cancelled = [], []

    class Noting(SerialExecutor):
        def submit(self, task):
            asked.append(super().submit(task))
            return SimpleNamespace(result=asked[-1].result, cancel=lambda: cancelled.append(task))

    monkeypatch.setattr(workers, "make_executor", lambda work, *_, **__: Noting(work))
    with groups_of(1), MultiStreamLoader(streams.count_up, [99], batch_size=1, num_workers=1) as loader:
        next(iter(loader))
    assert len(cancelled) == len(asked) - 1 > 0


@dataclass
class Recorded:
    """An executor whose steps take a given time and memory, of columns or of others. It writes down the tasks."""

    seconds: float
    values: int = 1
    of: str = "columns"
    tasks: list = field(default_factory=list)

    def submit(self, task):
        self.tasks.append(task)
        return Made(self, task)


@dataclass
class Made(Result):
    executor: Recorded
    task: RowTask

    def result(self):
        most, values = self.task.most, self.executor.values
        data, form = np.zeros((most, values)), (np.dtype(float), (values,))
        stacked, state = {
            "columns": (Stacked(most, data, form), None),
            "samples": (Stacked(most, samples=[*data]), None),
            "states": (Stacked(most, data[:, :1], (np.dtype(float), (1,))), data[:1]),
        }[self.executor.of]
        made = [Step([(0, 0, 0, 0, 0)], [[True]], 1, [0.0, 0.0], (state,), [data])] * most
        spans = [[("read", 0.0, 0.0)]] * most
        return RowResults.of(made, stacked, [], spans, "worker", most * self.executor.seconds)


@pytest.mark.parametrize(
    ("seconds", "values", "settings", "sizes"),
    [
        (1e-4, 1, {}, [1, 1, 1, 2, 4, 8, 8, 8, 8]),  # they grow while steps are short
        (8e-3, 1, {}, [1] * 9),
        (8e-3, 1, {"hand_over": 20}, [1, 1, 1, 2, 2, 2, 2, 2, 2]),  # as where a result is a message
        (1e-6, 1 << 17, {}, [1, 1, 1, 2, 4, 4, 4, 4, 4]),  # of some megabytes
        (1e-6, 1 << 17, {"of": "samples"}, [1, 1, 1, 2, 4, 4, 4, 4, 4]),
        (1e-6, (1 << 17) - 1, {"of": "states"}, [1, 1, 1, 2, 4, 4, 4, 4, 4]),
        (1e-6, 1 << 20, {}, [1] * 9),
        (1e-6, 1, {"hand_over": 0, "window": 0}, [1] * 9),
    ],
)
def test_a_task_is_as_large_as_is_of_use(seconds, values, settings, sizes):
    settings = {"window": 2, "hand_over": 1, **settings}
    executor = Recorded(seconds, values, settings.pop("of", "columns"))
    made = workers.RowSteps(executor, itertools.count(1), slice(0, 1), RowTask(0, 0, 5, ("start",)), **settings)
    made.request()
    assert len(executor.tasks) == settings["window"] + 1  # the one that is waited for
    for step in range(5, 65):
        made.request()
        made.take(step, ())
    assert [task.most for task in executor.tasks[:9]] == sizes
    assert [task.starts for task in executor.tasks[:3]] == [("start",), (), ()]


VALUES = st.sampled_from([1, 2, 2**63, 2**64, 0.5, True, "a", b"b", None, (1, "x"), {"a": 1}, {"a": 1, "b": 2}])


@given(st.lists(st.lists(VALUES, max_size=3) | st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5))
def test_stacked_steps_are_cut_into_what_they_were(samples):
    stacked = stack([value for each in samples for value in each])
    for found, expected in zip(cut(stacked, [*map(len, samples)]), samples, strict=True):
        assert found.count == len(expected)
        assert [*map(repr, samples_of([found]))] == [*map(repr, expected)]
        if expected:
            joined = collated(join, [found], np.ones(found.count, bool))
            assert joined == collated(default_collate, expected)


class Image:
    """Of another library, as torch's tensors."""

    def __init__(self, *shape):
        self.shape = shape

    def __array__(self, dtype=None, copy=None):
        return np.zeros(self.shape, dtype)


X = np.zeros(2)


@pytest.mark.parametrize(
    ("alike", "pairs"),
    [
        (True, [(1, 2), (-(2**63), 2**63 - 1), (1.0, 2.0), ("a", "bc"), (b"a", b""), (X, X + 1), (Image(2), Image(2))]),
        (True, [({"x": 1, "y": X}, {"y": X, "x": 2}), ((1, "a"), (2, "b")), (np.int8(1), np.int8(2)), (None, None)]),
        (False, [(1, 2.0), (1, True), (2**63, 2**63), (0, 2**63), ("a", b"a"), (X, X[:1]), (X, X.astype(np.float32))]),
        (False, [({"x": 1}, {"y": 1}), ({"x": X}, {"x": X[1:]}), ((1,), (1, 2)), ((1, "a"), (1, 2)), ((1,), [1])]),
        (False, [(np.int8(1), np.int16(1)), (np.int8(1), np.zeros((), np.int8)), (Image(2), Image(3)), (None, 1)]),
    ],
)
def test_workers_stack_samples_that_are_alike(alike, pairs):
    for pair in pairs:
        assert (stack([*pair]).form is not None) == alike, pair
    assert stack([]) == Stacked(0, samples=[])


def collated(function, *arguments):
    try:
        return repr(function(*arguments))
    except Exception as error:
        return str(error)
