"""The parts of a read that are spent decoding and waiting for downloads, as the code that does it reports them.

A loader measures how long a read takes, but not when the bytes are in memory and decoding begins. It therefore makes a
`DecodeClock` the current one of its thread while it reads, and whatever decodes enters `decoding`; whatever waits for
bytes from another machine enters `downloading`.
"""

from contextvars import ContextVar, Token
from time import perf_counter

_CURRENT: ContextVar["DecodeClock | None"] = ContextVar("dataload.decode_clock", default=None)


class DecodeClock:
    """Adds up the seconds that the current thread spends decoding or waiting for downloads, within ``with clock:``."""

    __slots__ = ("_token", "reads", "runs", "seconds", "waited", "waits")

    def __init__(self) -> None:
        self.seconds: float = 0.0  # of decoding
        self.waited: float = 0.0  # seconds
        self.runs: bool = False  # whether something is being decoded
        self.waits: bool = False  # whether it waits for a download
        self.reads: bool = False  # whether that is interrupted by `reading`
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


class decoding:
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

    __slots__ = ("_begun", "_clock")

    def __enter__(self) -> None:
        clock = _CURRENT.get()
        self._clock = None if clock is None or clock.runs else clock
        if self._clock is not None:
            self._clock.runs = True
            self._begun = perf_counter()

    def __exit__(self, *_: object) -> None:
        clock = self._clock
        if clock is not None:
            clock.seconds += perf_counter() - self._begun
            clock.runs = False


class reading:
    """Counts the time within ``with reading():`` as reading also inside of `decoding`: for bytes read on demand."""

    __slots__ = ("_begun", "_clock")

    def __enter__(self) -> None:
        clock = _CURRENT.get()
        self._clock = clock if clock is not None and clock.runs and not clock.reads else None
        if self._clock is not None:
            self._clock.reads = True
            self._begun = perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.seconds -= perf_counter() - self._begun  # `decoding` adds all of its time when it ends
            self._clock.reads = False


class downloading:
    """Counts the time within ``with downloading():`` as waiting for a download. May be nested."""

    __slots__ = ("_begun", "_clock")

    def __enter__(self) -> None:
        clock = _CURRENT.get()
        self._clock = None if clock is None or clock.waits else clock
        if self._clock is not None:
            self._clock.waits = True
            self._begun = perf_counter()

    def __exit__(self, *_: object) -> None:
        clock = self._clock
        if clock is not None:
            clock.waits = False
            waited = perf_counter() - self._begun
            clock.waited += waited
            if clock.runs and not clock.reads:
                clock.seconds -= waited
