"""Streams of the tests of `MultiStreamLoader`: a module that worker processes can import."""

import os
import signal
import time
from pathlib import Path

import numpy as np


def count_up(length):
    """A generator that cannot seek: the numbers below `length`, as samples with fields."""
    for number in range(length):
        yield {"x": number, "y": np.full(3, number, np.float32), "word": f"w{number}"}


class Counting:
    """A stream with a state of its own: it goes on where that says, and makes no item before."""

    made = 0  # items, over all of them in this process

    def __init__(self, length):
        self.length = length
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.length:
            raise StopIteration
        Counting.made += 1
        self.next += 1
        return {"x": self.next - 1}

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def break_at_3(length):
    for number in range(length):
        if length == 7 and number == 3:
            raise OSError("the line is dead")
        yield {"x": number}


def unpicklable_at_2(length):
    for number in range(length):
        yield {"x": (lambda: None) if number == 2 else 0}


def noisy(length, context):
    for number in range(length):
        yield {"x": number, "noise": context.generator.random(), "row": context.row, "epoch": context.epoch}


class HangAt:
    """Does not come back from item 2 of sequences of a length, unless there is a file; writes its process into that."""

    def __init__(self, length, mark, *, kill=False):
        self.length, self.mark, self.kill = length, Path(mark), kill

    def __call__(self, length):
        for number in range(length):
            if length == self.length and number == 2 and not self.mark.exists():
                self.mark.write_text(str(os.getpid()))
                if self.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                while self.mark.exists():
                    time.sleep(0.02)
            yield {"x": number}

    def let_go(self):
        self.mark.unlink()


class NoteClosing:
    """Generators that write down that they were closed."""

    def __init__(self, directory):
        self.directory = Path(directory)

    def __call__(self, name):
        try:
            for number in range(1000):
                yield {"x": number}
        finally:
            (self.directory / f"{name}-{os.getpid()}").touch()
