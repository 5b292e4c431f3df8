"""ordered_map and unordered_map: the order, the window, the place of an error, what closing does; and the pace."""

import pytest

from dataload.executors import SerialExecutor
from dataload.loader.prefetch import TaskSizer, ordered_map, unordered_map


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
    for number, value in enumerate(ordered_map(submit, range(20), window=lambda: window)):
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

    results = ordered_map(Recorded(), endless(), window=lambda: 2)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(taken) == 7
    results.close()


def test_an_error_comes_at_its_place_and_cancels_what_is_ahead():
    submit = Recorded()
    seen = []
    with pytest.raises(ValueError, match="bad task"):
        seen.extend(ordered_map(submit, [0, 1, "bad", 3, 4, 5], window=lambda: 2))
    assert submit.asked == [0, 1, "bad"]
    assert submit.cancelled == [3, 4]


def test_closing_cancels_what_is_in_flight():
    submit = Recorded()
    results = ordered_map(submit, range(10), window=lambda: 3)
    next(results)
    results.close()
    assert submit.cancelled == [1, 2, 3]


def test_serial_tasks_run_when_they_are_asked_for():
    done = []
    executor = SerialExecutor(lambda task, status: done.append(task))
    results = ordered_map(executor.submit, range(3), window=lambda: 0)
    next(results)
    assert done == [0]
    results.close()
    assert executor.submit(3).cancel() is None
    assert done == [0]
    executor.close()


class Settling(Recorded):
    """An executor of which one task after another gets done, in an order that is told beforehand."""

    def __init__(self, order):
        super().__init__()
        self.order = list(order)

    def wait_for_any(self, results):
        """Lets tasks end until one of these has."""
        while not any(result.done() for result in list(results)):
            self.finished.add(self.order.pop(0))


def unordered(submit, tasks, window, section=lambda task: 0):
    return unordered_map(submit, tasks, window=lambda: window, wait_for_any=submit.wait_for_any, section=section)


def test_unordered_results_come_as_they_are_done():
    submit = Settling([2, 0, 3, 5, 1, 4])
    results = unordered(submit, range(6), 2)
    for expected, in_flight in ((2, 3), (0, 4), (3, 5), (5, 6), (1, 6), (4, 6)):
        assert next(results) == expected
        assert len(submit.submitted) == in_flight
    with pytest.raises(StopIteration):
        next(results)
    assert submit.cancelled == []


def test_unordered_sections_follow_one_another():
    submit = Settling([5, 3, 4, 1, 0, 2])  # tasks of the second section are done first
    assert list(unordered(submit, range(6), 10, section=lambda task: task // 3)) == [1, 0, 2, 3, 4, 5]
    assert submit.submitted == list(range(6))


def test_an_unordered_error_comes_when_its_task_is_done_and_cancels_the_others():
    submit = Settling([1, "bad"])
    results = unordered(submit, [0, 1, "bad", 3], 5)
    assert next(results) == 1
    with pytest.raises(ValueError, match="bad task"):
        next(results)
    assert submit.cancelled == [0, 3]


def test_closing_an_unordered_map_cancels_what_is_in_flight():
    submit = Settling([1, 0])
    results = unordered(submit, range(10), 3)
    assert next(results) == 1
    results.close()
    assert submit.cancelled == [0, 2, 3]


@pytest.mark.parametrize("mapping", ["ordered", "unordered"])
def test_the_window_is_asked_before_each_task(mapping):
    submit, allowed = Settling(range(100)), [0]
    settings = {"window": lambda: allowed[0]}
    if mapping == "ordered":
        results = ordered_map(submit, range(100), **settings)
    else:
        results = unordered_map(
            submit, range(100), **settings, wait_for_any=submit.wait_for_any, section=lambda task: 0
        )
    in_flight = []
    for window in (0, 3, 3, 1, 1, 5):
        allowed[0] = window
        next(results)
        in_flight.append(len(submit.submitted) - len(submit.asked))
    results.close()
    assert in_flight == [0, 3, 3, 2, 1, 5]  # what is in flight is not called back


def unlimited():
    return 10**9


def test_steps_are_grouped_until_a_task_takes_a_millisecond():
    pace = TaskSizer()
    groups = pace.groups(range(5, 1000), unlimited)
    sizes, covered = [], []
    for group in groups:
        sizes.append(len(group))
        covered += group
        pace.note(len(group), len(group) * 100e-6, 0)
    assert covered == list(range(5, 1000))
    assert sizes[:5] == [1, 2, 4, 8, 8]
    assert set(sizes[4:-1]) == {8}


def test_slow_steps_go_one_by_one_and_the_fastest_not_without_bound():
    pace = TaskSizer()
    for size in (1, 2, 4, 8, 16, 32, 64, 64):
        assert len(next(pace.groups(range(1000), unlimited))) == size
        pace.note(size, 0.0, 0)
    pace.note(64, 64 * 0.2, 0)
    assert len(next(pace.groups(range(1000), unlimited))) == 1


def test_the_consumer_helps_instead_of_waiting_and_only_as_long_as_it_would_wait():
    submit = Recorded()
    submit.first_ends_after = 2
    results = ordered_map(submit, range(10), window=lambda: 4, helps=lambda: True)
    assert next(results) == 0
    assert submit.helped == [1, 2]
    assert next(results) == 1  # finished: no help is needed
    assert submit.helped == [1, 2]
    results.close()


def test_the_consumer_waits_when_tasks_are_long_or_all_have_begun():
    submit = Recorded()
    next(ordered_map(submit, range(10), window=lambda: 4))
    assert submit.helped == []
    submit = Recorded()
    submit.begun = set(range(10))
    assert list(ordered_map(submit, range(10), window=lambda: 4, helps=lambda: True)) == list(range(10))
    assert submit.helped == []


def test_only_short_tasks_are_helped_with():
    pace = TaskSizer()
    assert not pace.is_quick()
    pace.note(1, 1e-4, 0)
    assert pace.is_quick()
    pace.note(2, 0.1, 0)
    assert not pace.is_quick()


def test_a_group_is_no_larger_than_there_is_room_for_but_one_step():
    pace = TaskSizer()
    assert pace.step_bytes is None
    for _ in range(6):
        pace.note(4, 1e-6, 100)
    assert pace.step_bytes == 25
    rooms = iter([10, 3, 0, -5, 100])
    assert list(map(len, pace.groups(range(100), lambda: next(rooms, 100)))) == [10, 3, 1, 1, 64, 21]
