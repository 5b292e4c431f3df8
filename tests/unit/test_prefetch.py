"""ordered_map: the order, the window, the place of an error, and what closing does."""

import pytest

from dataload.executors import SerialExecutor
from dataload.prefetch import ordered_map


class Recorded:
    """An executor's submit that says what was begun, asked for and cancelled."""

    def __init__(self):
        self.submitted, self.asked, self.cancelled = [], [], []

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
