"""Waits for other threads and processes, which end by progress or by a deadline."""

import math
import time
from collections.abc import Callable
from typing import Any

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks


class Wait:
    """A wait that begins now, and is over after so many `seconds` in which nothing has changed.

    It is over after `most` seconds in spite of progress. `pause` sleeps for so many seconds.
    """

    def __init__(self, seconds: float, most: float = math.inf, pause: Callable[[float], Any] = time.sleep) -> None:
        self._seconds = seconds
        self._begun = self._last = time.monotonic()
        self._most = most
        self.pause = pause
        self._next = _SHORTEST_PAUSE
        self._seen: Any = None

    def goes_on(self, progress: Any = None) -> bool:
        """Pause before the next look; return False if the wait is over. Another value of `progress` prolongs it."""
        now = time.monotonic()
        if progress is not None and progress != self._seen:
            self._seen, self._last = progress, now
        if now - self._last >= self._seconds or now - self._begun >= self._most:
            return False
        self.pause(self._next)
        self._next = min(_LONGEST_PAUSE, 1.5 * self._next)
        return True
