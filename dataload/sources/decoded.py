"""A bounded cache of decoded parts of files, which cannot be read record by record."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from dataload._util.per_process import PerProcess

CACHED_BYTES = 1 << 29
"""Default of the option `cached_bytes`."""


@dataclass(slots=True)
class _Parts:
    lock: threading.Lock = field(default_factory=threading.Lock)
    found: OrderedDict[Hashable, tuple[Any, int]] = field(default_factory=OrderedDict[Hashable, tuple[Any, int]])
    decoding: dict[Hashable, threading.Lock] = field(default_factory=dict[Hashable, threading.Lock])
    bytes: int = 0


class DecodedCache:
    """Decoded parts of files, the last used ones, of at most `limit` bytes; one part stays, whatever its size.

    Thread-safe; each process has its own.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: PerProcess[_Parts] = PerProcess()

    def get(self, key: Hashable, decode: Callable[[], tuple[Any, int]]) -> Any:
        """Return a part; if it is not there, `decode` returns it and its bytes, in one thread at a time."""
        parts = self._parts.get(_Parts)
        with parts.lock:
            found = parts.found.get(key)
            if found is not None:
                parts.found.move_to_end(key)
                return found[0]
            decoding = parts.decoding.setdefault(key, threading.Lock())
        with decoding:
            with parts.lock:
                found = parts.found.get(key)
            if found is None:
                found = decode()
                self._keep(parts, key, found)
        return found[0]

    def _keep(self, parts: _Parts, key: Hashable, found: tuple[Any, int]) -> None:
        with parts.lock:
            parts.decoding.pop(key, None)
            _, before = parts.found.pop(key, (None, 0))
            parts.found[key] = found
            parts.bytes += found[1] - before
            while parts.bytes > self._limit and len(parts.found) > 1:
                parts.bytes -= parts.found.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget all parts."""
        self._parts.drop()

    def __reduce__(self) -> Any:
        return DecodedCache, (self._limit,)
