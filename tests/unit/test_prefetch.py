"""ordered_map: the order, the window, the place of an error, and what closing does."""

import pytest

from dataload.executors import SerialExecutor
from dataload.prefetch import Pace, ordered_map


class Recorded:
    """An executor's submit that says what was begun, asked for and cancelled."""

    def __init__(self):
        self.submitted, self.asked, self.cancelled = [], [], []
        # For helping: what workers have begun, what is finished, and with which task the first one ends.
        self.begun, self.finished, self.helped, self.first_ends_after = {0}, set(), [], None

    def __call__(self, task):
        self.submitted.append(task)
        recorded = self

        class Result:
            def result(self):
                recorded.asked.append(task)
                if task == "bad":
                    raise ValueError("bad task")
                return task

            def cancel(self):
                recorded.cancelled.append(task)

            def done(self):
                return task in recorded.finished

            def run(self):
                if task in recorded.begun:
                    return False
                recorded.helped.append(task)
                recorded.finished |= {0, task} if recorded.first_ends_after == task else {task}
                return True

        return Result()


@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_yields_in_order_with_a_bounded_window(window):
    submit = Recorded()
    for number, value in enumerate(ordered_map(submit, range(20), window=window)):
        assert value == number
        assert len(submit.submitted) <= min(20, number + 1 + window)
    assert submit.submitted == submit.asked == list(range(20))
    assert submit.cancelled == []


def test_takes_no_more_tasks_than_the_window_needs():
    taken = []

    def endless():
        while True:
            taken.append(len(taken))
            yield taken[-1]

    results = ordered_map(Recorded(), endless(), window=2)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(taken) == 7
    results.close()


def test_an_error_comes_at_its_place_and_cancels_what_is_ahead():
    submit = Recorded()
    seen = []
    with pytest.raises(ValueError, match="bad task"):
        seen.extend(ordered_map(submit, [0, 1, "bad", 3, 4, 5], window=2))
    assert submit.asked == [0, 1, "bad"]
    assert submit.cancelled == [3, 4]


def test_closing_cancels_what_is_in_flight():
    submit = Recorded()
    results = ordered_map(submit, range(10), window=3)
    next(results)
    results.close()
    assert submit.cancelled == [1, 2, 3]


def test_serial_tasks_run_when_they_are_asked_for():
    executor = SerialExecutor()
    done = []
    results = ordered_map(lambda task: executor.submit(done.append, task), range(3), window=0)
    next(results)
    assert done == [0]
    results.close()
    assert executor.submit(len, "abc").cancel() is None
    executor.close()


def test_steps_are_grouped_until_a_task_takes_a_millisecond():
    pace = Pace()
    groups = pace.groups(range(5, 1000))
    sizes, covered = [], []
    for group in groups:
        sizes.append(len(group))
        covered += group
        pace.note(len(group), len(group) * 100e-6)
    assert covered == list(range(5, 1000))
    assert sizes[:5] == [1, 2, 4, 8, 10]
    assert set(sizes[4:-1]) <= {9, 10}


def test_slow_steps_go_one_by_one_and_the_fastest_not_without_bound():
    pace = Pace()
    for size in (1, 2, 4, 8, 16, 32, 64, 64):
        assert len(next(pace.groups(range(1000)))) == size
        pace.note(size, 0.0)
    pace.note(64, 64 * 0.2)
    assert len(next(pace.groups(range(1000)))) == 1


def test_the_consumer_helps_instead_of_waiting_and_only_as_long_as_it_would_wait():
    submit = Recorded()
    submit.first_ends_after = 2
    results = ordered_map(submit, range(10), window=4, helps=lambda: True)
    assert next(results) == 0
    assert submit.helped == [1, 2]
    assert next(results) == 1  # finished: no help is needed
    assert submit.helped == [1, 2]
    results.close()


def test_the_consumer_waits_when_tasks_are_long_or_all_have_begun():
    submit = Recorded()
    next(ordered_map(submit, range(10), window=4))
    assert submit.helped == []
    submit = Recorded()
    submit.begun = set(range(10))
    assert list(ordered_map(submit, range(10), window=4, helps=lambda: True)) == list(range(10))
    assert submit.helped == []


def test_only_short_tasks_are_helped_with():
    pace = Pace()
    assert not pace.is_quick()
    pace.note(1, 1e-4)
    assert pace.is_quick()
    pace.note(2, 0.1)
    assert not pace.is_quick()
