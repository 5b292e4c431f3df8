"""Tasks of `MultiStreamLoader` with a given number of steps."""

import contextlib
import itertools
from unittest import mock

from dataload.streams import workers


class Fixed:
    """A sizer whose tasks have sizes that are given, whatever they take."""

    step_bytes = None

    def __init__(self, sizes):
        self.sizes = sizes

    def groups(self, steps, room):
        start = steps.start
        for size in itertools.cycle(self.sizes):
            yield range(start, start + size)
            start += size

    def learn(self, steps, seconds, nbytes):
        pass


@contextlib.contextmanager
def groups_of(*sizes):
    """Make tasks of these sizes; each worker starts at another of them, so that their groups end at different steps."""
    number = itertools.count()

    def sizer():
        first = next(number) % len(sizes)
        return Fixed(sizes[first:] + sizes[:first])

    with mock.patch.object(workers, "TaskSizer", sizer), mock.patch.object(workers, "_MOST_SECONDS", 1e9):
        yield
