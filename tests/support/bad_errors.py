"""Exceptions that do not travel between processes."""

import threading


class Demanding(Exception):
    """Its pickle cannot be undone: its constructor asks for more than its message."""

    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")


class Holding(Exception):
    """Cannot be pickled."""

    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()
