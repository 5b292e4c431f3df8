"""Steps made in groups: the same batches, states and errors as one by one, whatever the sizes of the groups."""

import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataload import WorkerError, default_collate
from dataload.executors import Result
from dataload.streams import MultiStreamLoader, workers
from dataload.streams.columns import Stacked, cut, merge, stack
from dataload.streams.parts import PartGroup, PartTask, Step

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("children", "support")]
import streams
from groups import groups_of


def plain(batch):
    return {name: column.tolist() if hasattr(column, "tolist") else column for name, column in batch.items()}


def outcome(case, steps=25, epochs=2, state=None):
    """All batches, the state after each, and the error at the end if there is one."""
    found = []
    with MultiStreamLoader(MAKE[case["stream"]], case["lengths"], **case["settings"]) as loader:
        if state is not None:
            loader.load_state_dict(state)
        try:
            for _ in range(epochs):
                found.extend(
                    (repr(batch), json.dumps(loader.state_dict())) for batch in itertools.islice(loader, steps)
                )
        except Exception as error:
            found.append((type(error).__name__, str(error), json.dumps(loader.state_dict())))
    return found


def mixed_samples(length):
    """Samples that stack in some steps only, or to other dtypes."""
    for number in range(length):
        yield {"x": 2**63 if number == 3 else number, "y": 0.5 if number == 5 else number, "z": (number, b"b")}


MAKE = {
    "count_up": streams.count_up,
    "Counting": streams.Counting,
    "break_at_3": streams.break_at_3,
    "noisy": streams.noisy,
    "mixed": mixed_samples,
}


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 7, 30]), min_size=1, max_size=6))
    mode = draw(st.sampled_from(["independent", "split"]))
    return {
        "stream": draw(st.sampled_from(sorted(MAKE))),
        "lengths": [*lengths, 11],
        "settings": {
            "batch_size": draw(st.integers(1, 4)),
            "mode": mode,
            "tail": draw(st.sampled_from([None, "pad"])) if mode == "split" else None,
            "chunk": draw(st.sampled_from([1, 2, 3])),
            "ends": draw(st.sampled_from(["next", "pad", "drop"])),
            "collate": draw(st.sampled_from([None, default_collate.__call__])),
            "seed": draw(st.integers(0, 3)),
            "max_workers": draw(st.integers(1, 4)),
            "prefetch": draw(st.integers(1, 3)),
        },
    }


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=3)


@settings(max_examples=30)
@given(cases(), SIZES, st.data())
def test_groups_of_any_size_equal_groups_of_one_also_after_a_resume(case, sizes, data):
    with groups_of(1):
        expected = outcome(case)
    with groups_of(*sizes):
        assert outcome(case) == expected
    states = [each[1] for each in expected if len(each) == 2]
    if states and case["settings"]["mode"] == "independent":
        step = data.draw(st.integers(0, len(states) - 1))
        with groups_of(*sizes):
            found = outcome(case, steps=len(expected) - step - 1, epochs=1, state=json.loads(states[step]))
        assert found == expected[step + 1 :]


@pytest.mark.parametrize("max_workers", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_a_stream_has_a_state_after_each_step_of_a_group(size, max_workers):
    settings_ = {"batch_size": 2, "mode": "split", "shuffle": False, "max_workers": max_workers}
    with groups_of(size), MultiStreamLoader(streams.Counting, [10, 6], **settings_) as loader:
        found = [(plain(batch), json.loads(json.dumps(loader.state_dict()))) for batch in loader]
        for step in range(6):
            assert found[step][1]["streams"] == [{"next": step + 1}] * 2
        for step, (_, state) in enumerate(found):
            loader.load_state_dict(state)
            assert [plain(batch) for batch in loader] == [batch for batch, _ in found[step + 1 :]] or step == 9


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("max_workers", [1, 3])
def test_an_error_comes_at_its_step_in_a_group(size, max_workers):
    settings_ = {"batch_size": 3, "mode": "split", "shuffle": False, "max_workers": max_workers}
    with groups_of(size), MultiStreamLoader(streams.break_at_3, [9, 2, 5, 4, 7], **settings_) as loader:
        for _ in range(2):
            found = []
            with pytest.raises(WorkerError, match="step 5 of epoch 0 failed in row 1, at item 3 of sequence 4"):
                found += (plain(batch)["x"] for batch in loader)
            assert found == [[0, 0, 0], [1, 1, 1], [2, 0, 2], [3, 1, 3], [4, 2, 4]]
            assert loader.state_dict()["step"] == 5
            loader.load_state_dict({**loader.state_dict(), "step": 0, "rows": [[0, 0, 0]] * 3})


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_an_error_behind_the_end_of_an_epoch_is_none(tail):
    """The worker goes on to the failing sequence in the same task, but the epoch ends before."""
    settings_ = {"batch_size": 2, "mode": "split", "shuffle": False, "max_workers": 2, "tail": tail}
    lengths = [9, 2, 7] if tail == "drop" else [2, 2]
    with groups_of(64), MultiStreamLoader(streams.break_at_3, lengths, **settings_) as loader:
        assert [batch["x"].tolist() for batch in loader] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("sizes", [(16,), (16, 1)])
def test_a_stuck_worker_is_an_error_of_its_step_after_the_steps_of_its_task_before(tmp_path, sizes):
    make = streams.HangAt(4, tmp_path / "mark")
    settings_ = {"batch_size": 2, "mode": "split", "shuffle": False, "max_workers": 2}
    found = []
    with groups_of(*sizes), MultiStreamLoader(make, [5, 4], timeout=0.5, **settings_) as loader:
        with (
            pytest.warns(RuntimeWarning) as warned,
            pytest.raises(WorkerError, match=r"step 2 of epoch 0 failed in row 1, at sequence 1, 4: dataload-1 has"),
        ):
            found += (batch["x"].tolist() for batch in loader)
        assert any("threads did not stop" in str(warning.message) for warning in warned)
        assert found == [[0, 0], [1, 1]]
        assert loader.state_dict()["step"] == 2
        make.let_go()
        make.length = -1  # it hangs no more
        loader.load_state_dict(loader.state_dict())
        assert [batch["x"].tolist() for batch in loader] == [[2, 2], [3, 3], [4, 0]]


def test_a_task_that_takes_too_long_ends_early():
    case = {"stream": "Counting", "lengths": [5, 9, 2], "settings": {"batch_size": 2, "max_workers": 2}}
    with groups_of(1):
        expected = outcome(case)
    sizes = []
    of = PartGroup.of

    def note(made, *rest):
        sizes.append(len(made))
        return of(made, *rest)

    with groups_of(64), mock.patch.object(workers, "_MOST_SECONDS", 0), mock.patch.object(PartGroup, "of", note):
        assert outcome(case) == expected
    assert set(sizes) == {1}


# --- the sizes of tasks --------------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """An executor whose steps take a given time and memory. It writes down the tasks."""

    seconds: float
    values: int = 1
    tasks: list = field(default_factory=list)

    def submit(self, task):
        self.tasks.append(task)
        return Made(self, task)


@dataclass
class Made(Result):
    executor: Recorded
    task: PartTask

    def result(self):
        most = self.task.most
        stacked = Stacked(1, np.zeros((1, self.executor.values)), (np.dtype(float), (self.executor.values,)))
        made = [Step([(0, 0, 0, 0, 0)], [[True]], 1, [0.0, 0.0], (None,), stacked)] * most
        return PartGroup.of(made, [], [[("read", 0.0, 0.0)]] * most, "worker", most * self.executor.seconds)


def tasks_of(executor, steps, **settings_):
    made = workers.PartSteps(executor, PartTask(0, 0, 5, ("start",), 1), **{"window": 2, "hand_over": 1, **settings_})
    for _ in range(steps):
        made.request()
        made.take()
    return executor.tasks


def test_the_first_task_is_one_step_and_tasks_grow_while_steps_are_short():
    tasks = tasks_of(Recorded(1e-4), 60)
    assert [task.most for task in tasks[:9]] == [1, 1, 1, 2, 4, 8, 8, 8, 8]
    assert [task.starts for task in tasks[:3]] == [("start",), (), ()]


def test_longer_steps_are_grouped_where_a_result_is_a_message():
    assert {task.most for task in tasks_of(Recorded(8e-3), 20)} == {1}
    assert max(task.most for task in tasks_of(Recorded(8e-3), 20, hand_over=20)) == 2


def test_a_task_has_at_most_some_megabytes():
    assert max(task.most for task in tasks_of(Recorded(1e-6, values=1 << 17), 20)) == 4
    assert max(task.most for task in tasks_of(Recorded(1e-6, values=1 << 20), 20)) == 1


def test_without_a_hand_over_each_step_is_a_task_of_its_own():
    tasks = tasks_of(Recorded(1e-6), 5, hand_over=0, window=0)
    assert [task.most for task in tasks] == [1] * 5


# --- merged columns ------------------------------------------------------------------------------------------------

VALUES = st.sampled_from([1, 2, 2**63, 0.5, True, "a", b"b", None, (1, "x"), {"a": 1}, {"a": 1, "b": 2}])


@given(st.lists(st.lists(VALUES, max_size=3) | st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5))
def test_merged_steps_are_cut_into_what_they_were(samples):
    steps = [stack(each) for each in samples]
    merged = merge(steps)
    again = cut(merged[0], [step.count for step in steps]) if len(merged) < len(steps) else merged
    for found, expected in zip(again, steps, strict=True):
        assert found.count == expected.count
        if expected.count:
            assert repr((found.columns, found.form, found.samples)) == repr(
                (expected.columns, expected.form, expected.samples)
            )


def test_steps_that_are_alike_are_merged():
    assert [each.columns.tolist() for each in merge([stack([1, 2]), stack([]), stack([3])])] == [[1, 2, 3]]
    assert len(merge([stack([1, 2]), stack([2**63])])) == 2
