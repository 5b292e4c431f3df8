"""A source for tests of engines: its records are numbers, and something happens at some of them."""

import os
import signal
import time
from pathlib import Path

import numpy as np

import dataload
from dataload.errors import CorruptFileError, SourceNotFoundError

COUNT = 40


class Eventful:
    """`COUNT` records. The first `times` processes that read record `at` have an event, and note it in `log`."""

    def __init__(self, log, event, at=17, times=1):
        self.log, self.event, self.at, self.times = str(log), event, at, times

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        if index == self.at and len(self.events()) < self.times:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()}\n")
            getattr(self, self.event)()
        return {"x": np.arange(index, index + 50.0), "n": index}

    def __repr__(self):
        return "Eventful()"

    def fingerprint(self):
        """The same records are the same data."""
        return "numbers"

    def events(self):
        return [int(line) for line in Path(self.log).read_text().split()] if os.path.exists(self.log) else []

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def corrupt(self):
        raise CorruptFileError("the checksum is wrong", path="a.tar", offset=512, index=3)

    def raise_own(self):
        class Odd(Exception):
            """Does not pickle."""

        raise Odd("strange")

    def hang(self):
        time.sleep(100)

    def pause(self):
        time.sleep(1)

    def miss(self):
        raise SourceNotFoundError("there is no /data/a.tar", path="/data/a.tar")


class Waiting(Eventful):
    """Each process waits, at its first record but one, until the file ``go`` exists beside the log."""

    def __init__(self, log):
        super().__init__(log, "wait", at=-1)

    def __getitem__(self, index):
        go = Path(self.log).with_name("go")
        if index and not go.exists():
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()}\n")
            while not go.exists():
                time.sleep(0.05)
        return super().__getitem__(index)


class Unloadable(Eventful):
    """Cannot be unpickled."""

    def __setstate__(self, state):
        raise KeyError("lost")


class Secret:
    """May not be sent to other processes."""

    def __reduce__(self):
        raise dataload.ConfigError("not sent", key="secret", value=None)
