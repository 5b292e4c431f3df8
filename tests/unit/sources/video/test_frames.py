"""Frames that wait for later steps: whatever is planned, each read has its frames, in bounded memory."""

import os
import threading
import time
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataload.sources.video.frames import DecodedFrames
from dataload.types import StepsAhead


class Made:
    """Frames that hold their index, of groups, and how often each group was decoded."""

    def __init__(self, groups):
        self.ends = np.cumsum(groups)
        self.decodes = np.zeros(len(groups), np.int64)
        self.frames = []
        self.lock = threading.Lock()

    def decode(self, indices):
        group = int(np.searchsorted(self.ends, indices[0], side="right"))
        assert list(indices) == sorted({*indices})
        assert indices[-1] < self.ends[group]
        with self.lock:
            self.decodes[group] += 1
        for index in indices:
            self.frames.append(index)
            yield index, lambda index=index: np.full(2, index, np.uint8)


def frames_of(made, budget):
    return DecodedFrames(made.ends, (2,), made.decode, budget)


def planned(steps, blocks):
    cuts = np.linspace(0, len(steps), blocks + 1).astype(int).tolist()
    for start, stop in pairwise(cuts):
        rows = [np.array(step, np.int64) for step in steps[start:stop]]
        if rows:
            yield StepsAhead(0, np.concatenate(rows), np.cumsum([len(each) for each in rows]), len(steps))


@st.composite
def plans(draw):
    groups = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    index = st.integers(0, sum(groups) - 1)
    if draw(st.booleans()):
        order = draw(st.permutations(range(sum(groups))))
        size = draw(st.integers(1, 5))
        return groups, [list(order[start : start + size]) for start in range(0, len(order), size)]
    return groups, draw(st.lists(st.lists(index, max_size=5), max_size=10))


@given(plans(), st.integers(0, 40), st.integers(1, 3), st.integers(0, 2), st.integers(0, 3), st.data())
@settings(deadline=None)
def test_each_read_has_its_frames(plan, budget, blocks, threads, late, data):
    groups, steps = plan
    made = Made(groups)
    frames = frames_of(made, budget)
    with closing(frames.follow(planned(steps, blocks), threads)) as reader:
        read(frames, reader, steps, sum(groups), budget, threads, late, data)
    assert reader.held == 0


def read(frames, reader, steps, count, budget, threads, late, data):
    for number, step in enumerate(steps):
        out = np.full((len(step), 2), 255, np.uint8)
        if step and not data.draw(st.booleans(), label="is lost"):
            frames.read(np.array(step), out)
            assert (out == np.array(step)[:, None]).all()
        unplanned = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=2), label="unplanned"), int)
        out = np.full((len(unplanned), 2), 255, np.uint8)
        frames.read(unplanned, out)
        assert (out == unplanned[:, None]).all()
        assert reader.held <= budget
        if number >= late:
            reader.received()
    for _ in range(late):
        reader.received()
    assert threads or not reader.held, "frames of a step that was lost"


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.randoms(use_true_random=False), st.integers(0, 2))
@settings(deadline=None)
def test_groups_that_fit_are_decoded_once_by_several_threads(groups, random, threads):
    order = list(range(sum(groups)))
    random.shuffle(order)
    made = Made(groups)
    frames = frames_of(made, len(order))
    steps = [order[start : start + 3] for start in range(0, len(order), 3)]
    reader = frames.follow(planned(steps, 1), threads)
    outs = [np.full((len(step), 2), 255, np.uint8) for step in steps]
    pieces = [range(start, len(steps), 3) for start in range(3)]
    workers = [
        threading.Thread(target=lambda piece=piece: [frames.read(np.array(steps[n]), outs[n]) for n in piece])
        for piece in pieces
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    for step, out in zip(steps, outs, strict=True):
        assert (out == np.array(step)[:, None]).all()
    assert (made.decodes == 1).all()
    reader.close()


@pytest.mark.parametrize(("last", "decodes"), [([[4], [0]], [2, 1]), ([[0], [4]], [1, 2])])
def test_frames_that_are_read_last_make_room(last, decodes):
    made = Made([4, 4])
    frames = frames_of(made, 1)
    steps = [[1], [5], *last]  # 0 and 4 are decoded on the way; the one that is read first waits
    reader = frames.follow(planned(steps, 1), 0)
    for step in steps:
        out = np.empty((1, 2), np.uint8)
        frames.read(np.array(step), out)
        assert (out == step[0]).all()
        reader.received()
    assert made.decodes.tolist() == decodes


def test_frames_of_a_step_that_was_lost_make_room():
    frames = frames_of(Made([4]), 4)
    with closing(frames.follow(planned([[1], [0], [0]], 1), 0)) as reader:
        frames.read(np.array([1]), np.empty((1, 2), np.uint8))  # 0 is decoded on the way
        for held in (1, 1, 0):
            reader.received()
            assert reader.held == held


def test_what_does_not_fit_is_decoded_when_it_is_read():
    made = Made([6])
    frames = frames_of(made, 2)
    reader = frames.follow(planned([[0], [1], [2], [3], [4], [5]], 1), 0)
    for index in range(6):
        frames.read(np.array([index]), np.empty((1, 2), np.uint8))
        assert reader.held <= 2
        reader.received()
    assert made.frames == [0, 1, 2, 3, 4, 5]


def test_frames_are_decoded_before_they_are_read():
    made = Made([4, 4])
    with closing(frames_of(made, 8).follow(planned([list(range(8))], 1), 1)) as reader:
        until = time.monotonic() + 15
        while reader.held < 8:
            assert time.monotonic() < until
            os.sched_yield()
        (worker,) = (each for each in threading.enumerate() if each.name.startswith("dataload-video"))
        assert worker.daemon


def test_few_steps_are_planned_beyond_those_that_wait():
    made, steps, taken = Made([1] * 60), [[index] for index in range(60)], []
    frames = frames_of(made, 1)
    with closing(frames.follow((taken.append(step) or step for step in planned(steps, 60)), 1)) as reader:
        for index in range(20):
            until = time.monotonic() + 15
            while not reader.held:
                assert time.monotonic() < until
                os.sched_yield()
            frames.read(np.array([index]), np.empty((1, 2), np.uint8))
            reader.received()
            assert len(taken) <= index + 17, "16 frames ahead of those that are read"


def test_two_loaders_share_the_memory():
    made = Made([4, 4])
    frames = frames_of(made, 8)
    first, second = (frames.follow(planned([list(range(8))], 1), 0) for _ in range(2))
    assert frames.capacity == 4
    second.close()
    second.close()
    assert frames.capacity == 8
    first.close()
