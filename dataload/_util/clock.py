"""The parts of a read that are spent decoding and waiting for downloads, as the code that does it reports them.

A loader measures how long a read takes, but not when the bytes are in memory and decoding begins. It therefore makes a
`DecodeClock` the current one of its thread while it reads. Code that decodes enters `decoding`, and code that waits for
bytes from another machine enters `downloading`.
"""

from contextvars import ContextVar, Token
from time import perf_counter
from typing import ClassVar

_DECODES, _READS, _WAITS = 1, 2, 4
_CURRENT: ContextVar["DecodeClock | None"] = ContextVar("dataload.decode_clock", default=None)


class DecodeClock:
    """Adds up the seconds that the current thread spends decoding or waiting for downloads, within ``with clock:``.

    There, the thread reads for `reader`, see `current_reader`.
    """

    __slots__ = ("_token", "phases", "reader", "seconds", "waited")

    def __init__(self, reader: int = 0) -> None:
        self.reader: int = reader
        self.seconds: float = 0.0  # of decoding
        self.waited: float = 0.0  # seconds
        self.phases: int = 0  # those in progress
        self._token: Token[DecodeClock | None] | None = None

    def take_seconds(self) -> float:
        """Return the seconds of decoding since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def take_wait(self) -> float:
        """Return the seconds of waiting since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited

    def __enter__(self) -> None:
        self._token = _CURRENT.set(self)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)
            self._token = None


def current_reader() -> int:
    """Return the number of the loader for which this thread reads; 0 if it is not known."""
    clock = _CURRENT.get()
    return 0 if clock is None else clock.reader


class _Phase:
    """Adds the time within its ``with`` block to the thread's clock, unless the phase is in progress already."""

    __slots__ = ("_begun", "_clock")
    _phase: ClassVar[int]
    _within: ClassVar[int] = 0  # the phase that it interrupts

    def __enter__(self) -> None:
        clock = _CURRENT.get()
        self._clock = None if clock is None or clock.phases & (self._phase | self._within) != self._within else clock
        if self._clock is not None:
            self._clock.phases += self._phase
            self._begun = perf_counter()

    def __exit__(self, *_: object) -> None:
        clock = self._clock
        if clock is None:
            return
        seconds = perf_counter() - self._begun
        clock.phases -= self._phase
        if self._phase == _DECODES:
            clock.seconds += seconds
        elif clock.phases & ~_WAITS == _DECODES:
            clock.seconds -= seconds  # `decoding` adds all of its time when it ends
        if self._phase == _WAITS:
            clock.waited += seconds


class decoding(_Phase):
    """Counts the time within ``with decoding():`` as decoding, where a loader would count it as reading.

    Enter it once for many records, when their bytes are in memory. It costs half a microsecond, does nothing outside of
    a loader, and may be nested. Codecs and the decoders of tar components are counted without it.

    Examples:
        >>> class Images:
        ...     def __len__(self):
        ...         return 10
        ...     def __getitem__(self, index):
        ...         data = bytes([index]) * 4
        ...         with decoding():
        ...             return {"image": np.frombuffer(data, np.uint8).reshape(2, 2)}
    """

    __slots__ = ()
    _phase = _DECODES


class reading(_Phase):
    """Counts the time within ``with reading():`` as reading also inside of `decoding`: for bytes read on demand."""

    __slots__ = ()
    _phase, _within = _READS, _DECODES


class downloading(_Phase):
    """Counts the time within ``with downloading():`` as waiting for a download. May be nested."""

    __slots__ = ()
    _phase = _WAITS
