"""Delivery: which jobs are run ahead, how many and how large, and how a step fails that no work can speak for."""

import gc
import itertools
import math
import sys

import pytest

from dataload.errors import WorkerError
from dataload.executors.base import WorkerLostError, WorkerPosition
from dataload.loader import pipeline
from dataload.loader.state import Cursor, EpochPlanners
from dataload.loader.step import StepResult, StepsResult
from dataload.samplers import BatchSampler, Sequential

PLANNERS = EpochPlanners(BatchSampler(sampler=Sequential(7), batch_size=2))  # four steps an epoch


LARGE = BatchSampler(sampler=Sequential(10**6), batch_size=2**16)


class Batch:
    """What a weak reference can be made to."""


class Workers:
    """An executor whose jobs are done when the test says so: by default when they are waited for, the first first."""

    def __init__(self, nbytes=100, seconds=1.0, order=None):
        self.nbytes, self.seconds, self.order = nbytes, seconds, order
        self.jobs, self.waiting, self.cancelled, self.done, self.helped = [], [], [], set(), []

    def submit(self, job):
        self.jobs.append(job)
        workers = self

        class Result:
            def result(self):
                workers.waiting.append(job)
                fields = {"error": None, "rows": 2, "nbytes": workers.nbytes, "spans": [], "bad": [], "worker": "w"}
                steps = range(job.start, job.stop)
                made = [StepResult(epoch=job.epoch, step=step, batch=Batch(), **fields) for step in steps]
                return StepsResult(made, workers.seconds)

            def done(self):
                return job in workers.done

            def run(self):
                workers.helped.append(job)
                return False

            def cancel(self):
                workers.cancelled.append(job)

        return Result()

    def wait_for_any(self, results):
        results = list(results)
        while not any(result.done() for result in results):
            epoch, step = self.order.pop(0)
            self.done |= {job for job in self.jobs if (job.epoch, job.start) == (epoch, step)}

    def in_flight(self):
        return sum(job.stop - job.start for job in self.jobs) - sum(job.stop - job.start for job in self.waiting)


def deliver(workers, planners=PLANNERS, pace=None, **settings):
    given = {"start": Cursor(0, 0), "epochs": None, "window": 3, "max_bytes": 1 << 30, "in_order": True}
    return pipeline.StepDelivery(
        workers, planners, pipeline.TaskSizer() if pace is None else pace, **{**given, **settings}
    )


def paced(steps=1, seconds=1.0, nbytes=100, times=3):
    """A pace that knows the size and the time of a step."""
    pace = pipeline.TaskSizer()
    for _ in range(times):
        pace.learn(steps, seconds, nbytes)
    return pace


def places(delivery, count):
    return [(loaded.epoch, loaded.step) for loaded in itertools.islice(iter(delivery.__next__, None), count)]


def test_goes_on_where_the_consumer_stands_with_what_it_lacks_first():
    for in_order in (True, False):
        workers = Workers(order=[(5, 0), (5, 2), (5, 3), (6, 0)])
        delivery = deliver(workers, start=Cursor(5, 3, frozenset({2, 0})), in_order=in_order)
        assert places(delivery, 4) == [(5, 0), (5, 2), (5, 3), (6, 0)]


def test_what_is_read_ahead_is_what_the_consumer_lacks():
    planners = EpochPlanners(BatchSampler(sampler=Sequential(20), batch_size=2))
    first, second, rest = itertools.islice(pipeline.steps_ahead(planners, Cursor(3, 7, frozenset({4, 1})), None), 3)
    assert [first.indices.tolist(), second.indices.tolist()] == [[2, 3], [8, 9]]
    assert (rest.epoch, rest.epoch_steps) == (3, 10)
    assert (rest.indices.tolist(), rest.ends.tolist()) == ([*range(14, 20)], [2, 4, 6])
    lengths = [len(block.indices) for block in pipeline.steps_ahead(EpochPlanners(LARGE), Cursor(0, 0), 1)]
    assert lengths == [2**17] * 7 + [10**6 - 7 * 2**17]


def test_bytes_bound_what_is_ahead_when_steps_are_made_several_at_a_time():
    workers = Workers(nbytes=100, seconds=1e-6)
    planners = EpochPlanners(BatchSampler(sampler=Sequential(10_000), batch_size=1))
    delivery = deliver(workers, planners, window=4, max_bytes=10_000)
    most = 0
    for received in range(1, 2001):
        next(delivery)
        begun = sum(job.stop - job.start for job in workers.jobs)
        most = max(most, begun - received)
    assert 50 < most < 100
    assert max(job.stop - job.start for job in workers.jobs) == 20  # five jobs may be there at once


class Losing(Workers):
    """Loses its worker at a step of jobs of several steps; of jobs of one step, only if it is always lost."""

    def __init__(self, step, *, always=False, last=False):
        super().__init__(seconds=1e-6)
        self.step, self.always, self.last = step, always, last

    def submit(self, job):
        made = super().submit(job)
        if job.start <= self.step < job.stop and (self.always or job.stop - job.start > 1):
            position = WorkerPosition(0, job.stop - 1 if self.last else self.step, -1)
            made.result = lambda: (_ for _ in ()).throw(WorkerLostError("w", "was killed", position))
        return made


def test_lost_steps_of_a_job_are_told_from_the_others():
    workers = Losing(2)
    found = deliver(workers, pace=paced(4, 4e-6, 0))  # all four steps of an epoch are one job
    assert places(found, 2) == [(0, 0), (0, 1)]
    assert [(job.start, job.stop) for job in workers.jobs if job.epoch == 0] == [(0, 4), (0, 1), (1, 2)]
    for _ in range(2):
        with pytest.raises(WorkerLostError):
            next(found)
    found = deliver(Losing(1, always=True, last=True), pace=paced(4, 4e-6, 0))  # which a job says only at its end
    assert places(found, 1) == [(0, 0)]
    with pytest.raises(WorkerLostError) as caught:
        next(found)
    assert caught.value.position.step == 1


@pytest.mark.parametrize(("together", "expected"), [(False, 1), (True, 8)])
def test_without_a_window_a_task_is_one_step_unless_one_read_serves_several(together, expected):
    workers = Workers()
    planners = EpochPlanners(BatchSampler(sampler=Sequential(100), batch_size=1))
    next(deliver(workers, planners, paced(8, 1e-3, 8, times=4), window=0, together=together))
    assert [job.stop - job.start for job in workers.jobs] == [expected]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("drop", [True, False])
def test_closing_or_dropping_it_cancels_what_is_in_flight(in_order, drop):
    workers = Workers(order=[(0, 0), (0, 1)])
    delivery = deliver(workers, in_order=in_order)
    places(delivery, 2)
    gc.disable()  # so that nothing but the last reference does it
    try:
        if drop:
            del delivery
        else:
            delivery.close()
        assert [(job.epoch, job.start) for job in workers.cancelled] == [(0, 2), (0, 3), (1, 0)]
    finally:
        gc.enable()


@pytest.mark.parametrize("missing", [{0}, {1}, {0, 2}, {3}, {0, 1, 2}])
@pytest.mark.parametrize("reached", [4, 5])
def test_what_is_missing_survives_a_state(missing, reached):
    """Also where the last step, a short one, is among what was received."""
    plans = EpochPlanners(BatchSampler(sampler=Sequential(19), batch_size=2, rank=1, world_size=2))
    cursor = Cursor(2, reached, frozenset(missing))
    state = plans.state(cursor, source="s", order="o")
    assert state.position == min(19, 4 * reached)
    assert state.missing == tuple(4 * step for step in sorted(missing))
    assert state.step_size == 4
    again, restored = EpochPlanners.resume(plans.of(0), state)
    assert restored == cursor
    assert again.state(restored, source="s", order="o") == state


@pytest.mark.parametrize(
    ("position", "step", "indices", "at"),
    [
        (WorkerPosition(3, 2, 5), 2, (4, 5), ", at index 5"),
        (WorkerPosition(3, 2, -1), 2, (4, 5), ""),
        (WorkerPosition(3, 0, 1), 1, (2, 3), ""),  # what it was at has been received
        (WorkerPosition(2, 2, 5), 1, (2, 3), ""),
        (WorkerPosition(4, 2, 5), 1, (2, 3), ""),  # ahead, in the next epoch
        (WorkerPosition(-1, -1, -1), 1, (2, 3), ""),
    ],
)
def test_a_lost_worker_is_an_error_of_a_step_that_is_wanted(position, step, indices, at):
    lost = WorkerLostError("dataload-3", "was killed", position)
    error = pipeline.lost_step(lost, PLANNERS, Cursor(3, 1))
    assert isinstance(error, WorkerError)
    expected = f"step {step} of epoch 3 failed: dataload-3 was killed{at}\n  indices of the step: {indices[0]}, "
    assert str(error).startswith(expected)
    assert (error.step, error.epoch, error.indices, error.worker) == (step, 3, indices, "dataload-3")


def test_what_fails_in_the_consumers_process_is_an_error_of_its_step():
    loaded = next(deliver(Workers(), start=Cursor(1, 2)))
    assert pipeline.apply_in_consumer(loaded, lambda batch: [batch], PLANNERS) == [loaded.batch]

    def finish(batch):
        raise ZeroDivisionError("pinned to nothing")

    with pytest.raises(WorkerError, match="step 2 of epoch 1 failed in batch_transform: ZeroDivisionError") as caught:
        pipeline.apply_in_consumer(loaded, finish, PLANNERS)
    assert caught.value.indices == (4, 5)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "in finish" in caught.value.traceback_text
    assert "traceback" not in str(caught.value).lower()


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


def test_the_consumer_helps_instead_of_waiting_and_only_as_long_as_it_would_wait():
    submit = Recorded()
    submit.first_ends_after = 2
    results = pipeline.ordered_map(submit, range(10), window=lambda: 4, helps=lambda: True)
    assert next(results) == 0
    assert submit.helped == [1, 2]
    assert next(results) == 1  # finished: no help is needed
    assert submit.helped == [1, 2]
    results.close()


def test_the_consumer_helps_with_quick_steps_only():
    for seconds in (1e-4, 1.0):
        workers = Workers(seconds=seconds)
        places(deliver(workers, pace=paced(seconds=seconds)), 3)
        assert bool(workers.helped) == (seconds == 1e-4)


def size_of(sizer, room=1000):
    return len(next(sizer.groups(range(1000), lambda: room)))


def test_quick_steps_are_grouped_and_slow_or_large_ones_are_not():
    for seconds, nbytes, expected in (
        (1e-4, 1, [1, 2, 4, 8, 8]),
        (0.0, 1, [1, 2, 4, 8, 16, 32, 64, 64]),
        (1e-6, 1 << 20, [1, 2, 4, 4]),
        (1.4e-3, 0, [1, 1, 1]),
    ):
        sizer, sizes = pipeline.TaskSizer(), []
        for _ in expected:
            sizes.append(size := size_of(sizer))
            sizer.learn(size, size * seconds, size * nbytes)
        assert sizes == expected
        assert sizer.step_bytes == nbytes
    sizer = paced(seconds=1e-4)
    assert (size_of(sizer), size_of(sizer, 3), size_of(sizer, 0)) == (8, 3, 1)
    assert list(sizer.groups(range(5, 15), lambda: 1000)) == [range(5, 13), range(13, 15)]
    sizes = []
    for _ in range(2):
        sizer.learn(1, 1.0, 0)
        sizes.append(size_of(sizer))
    assert sizes == [8, 1], "one slow task may have been interrupted"
    assert [paced(1, seconds).is_quick() for seconds in (2.9e-3, 3e-3)] == [True, False]


def test_the_tasks_and_steps_that_a_budget_allows():
    def allowed(window, steps, sizer, *, together=False, most=1000):
        budget = pipeline.PrefetchBudget(sizer, window, most, together=together)
        budget.steps = steps
        return budget.tasks(), budget.left(), budget.share()

    known, unknown = paced(nbytes=100), pipeline.TaskSizer()
    assert allowed(4, 0, unknown) == (1, 0, 0)
    assert [allowed(4, steps, known) for steps in (0, 8, 9, 10)] == [(4, 10, 2), (4, 2, 2), (4, 1, 1), (1, 0, 0)]
    assert [allowed(window, 10, known)[0] for window in (0, 1, 2)] == [0, 1, 1]
    assert [allowed(0, 0, known, together=together)[2] for together in (False, True)] == [1, 10]
    assert allowed(4, 7, unknown, most=math.inf)[1] == sys.maxsize - 7
    assert allowed(4, 0, paced(nbytes=0))[1] == 1000
