"""Fetching ahead for sources that consist of others."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from dataload.types import AheadReader, Int64Array, StepsAhead

_MOST_UNUSED = 32  # blocks of steps, after which a source that none of them reads is not planned any further


class StepsByPart:
    """Steps over several sources, as each sees them; `ends`, (sources,) int64, is the cumulative number of records.

    Steps are computed when the first iterator needs them, and kept until all have had them. Iterators may be used in
    different threads.
    """

    def __init__(self, steps: Iterator[StepsAhead], ends: Int64Array) -> None:
        self._steps = steps
        self._ends = ends
        self._lock = threading.Lock()
        self._kept: dict[int, deque[StepsAhead]] = {part: deque() for part in range(len(ends))}

    def of(self, part: int) -> Iterator[StepsAhead]:
        """Yield the steps with the indices of one source, which may be none."""
        start = int(self._ends[part - 1]) if part else 0
        unused = 0
        while unused < _MOST_UNUSED and (block := self._next(part)) is not None:
            inside = (block.indices >= start) & (block.indices < self._ends[part])
            counts = np.cumsum(inside)
            ends = np.where(block.ends > 0, counts[block.ends - 1], 0) if len(counts) else block.ends
            unused = 0 if len(counts) and counts[-1] else unused + 1
            yield replace(block, indices=block.indices[inside] - start, ends=ends)
        self.drop(part)

    def drop(self, part: int) -> None:
        """Say that nobody wants the steps of a source any more. May be called twice."""
        with self._lock:
            self._kept.pop(part, None)

    def _next(self, part: int) -> StepsAhead | None:
        with self._lock:
            if not self._kept[part]:
                block = next(self._steps, None)
                if block is None:
                    return None
                for kept in self._kept.values():
                    kept.append(block)
            return self._kept[part].popleft()


class SeveralAhead:
    """Several `AheadReader` as one."""

    def __init__(self, readers: Sequence[AheadReader]) -> None:
        self._readers = readers

    def received(self) -> None:
        for reader in self._readers:
            reader.received()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
