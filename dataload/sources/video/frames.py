"""Decoded frames that wait for the next steps of a loader, so that a group of pictures is decoded once if they fit."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from dataload._util.arrays import BufferLeases
from dataload._util.threads import LONGEST_SLEEP
from dataload.types import BytesArray, Int64Array, StepsAhead

Convert: TypeAlias = Callable[[], BytesArray]
"""Returns a decoded frame as an array."""

Decode: TypeAlias = Callable[[Sequence[int]], Generator[tuple[int, Convert]]]
"""Yields records, given by ascending indices within one group of pictures, with what converts their frames."""

_Pairs: TypeAlias = list[tuple[int, int]]  # indices of records, ascending, and rows of a batch

_HORIZON = 16  # budgets of frames that are planned: from a pool as large as the budget, 1 in 10^7 comes later
_ALLOCATED = 1 << 25  # bytes
_MOST_PLANNED = 1 << 19  # frames, at 250 bytes each


class DecodedFrames:
    """The frames of a source as one process reads them, by several threads at once. At most `most` frames wait.

    `ends`, (groups,) int64, are the cumulative numbers of records in the groups of pictures; `shape` is of a frame.
    """

    def __init__(self, ends: Int64Array, shape: tuple[int, ...], decode: Decode, most: int) -> None:
        self.ends: Int64Array = ends
        self.shape: tuple[int, ...] = shape
        self.decode: Decode = decode
        self._most = most
        self._plans = list[FramePlan]()

    @property
    def capacity(self) -> int:
        """Maximum number of frames that wait for each loader."""
        return self._most // max(1, len(self._plans))

    def read(self, indices: Int64Array, out: BytesArray) -> None:
        """Write the frames of records, (rows,) int64, to the rows of `out`."""
        order = np.argsort(indices, kind="stable")
        groups = np.searchsorted(self.ends, indices[order], side="right")
        starts = np.flatnonzero(np.diff(groups, prepend=-1)).tolist()
        pairs = list(zip(indices[order].tolist(), order.tolist(), strict=True))
        for start, stop in pairwise([*starts, len(pairs)]):
            rest = pairs[start:stop]
            for plan in [*self._plans]:
                rest = plan.read(int(groups[start]), rest, out)
            for index, convert in self.decode(sorted({index for index, _ in rest})) if rest else ():
                image = convert()
                for row in [row for each, row in rest if each == index]:
                    out[row] = image

    def follow(self, steps: Iterator[StepsAhead], threads: int) -> FramePlan:
        """Begin to decode what the next steps of a loader read."""
        plan = FramePlan(self, steps, self._plans.remove)
        self._plans.append(plan)
        plan.start(threads)
        return plan


class FramePlan:
    """An `AheadReader` that decodes what the next steps of one loader read, and keeps it until it is read.

    Frames that do not fit, first those that are read last, are decoded again.
    """

    def __init__(self, frames: DecodedFrames, steps: Iterator[StepsAhead], ended: Callable[[FramePlan], None]) -> None:
        self._frames, self._steps, self._ended = frames, steps, ended
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._uses = dict[int, dict[int, list[int]]]()  # by group and record: the steps that read it, ascending
        self._held = dict[int, BytesArray]()
        self._due = dict[int, list[tuple[int, int]]]()  # groups and records of held frames, by their next step
        self._spare = list[BytesArray]()  # memory of frames: each thread would keep its own for `malloc`
        self._leases = BufferLeases()
        self._making = 0  # frames
        self._busy = set[int]()  # groups that are being decoded
        self._tasks = deque[int]()  # groups, in the order of their first use
        self._ahead = 0  # planned uses
        self._planned = self._received = 0  # steps
        self._is_planning = self._closed = False

    def start(self, threads: int) -> None:
        """Plan the first steps, and decode in the background."""
        self._plan_more()
        for number in range(threads):
            threading.Thread(target=self._work, name=f"dataload-video-{number}", daemon=True).start()

    @property
    def held(self) -> int:
        """Number of frames that wait."""
        with self._changed:
            return len(self._held)

    def received(self) -> None:
        with self._changed:
            self._received += 1
            for group, index in self._due.pop(self._received - 1, ()):  # not read, because of an error
                self._next_use(group, index)
            self._changed.notify_all()

    def close(self) -> None:
        if os.getpid() != self._process:
            return
        with self._changed:
            if not self._closed:
                self._closed = True
                self._ended(self)
            self._held.clear()
            self._spare.clear()
            self._changed.notify_all()

    def read(self, group: int, pairs: _Pairs, out: BytesArray) -> _Pairs:
        """Write the frames of a group that are planned to the rows of `out`, and return the others."""
        images = dict[int, BytesArray]()
        with self._changed:
            while group in self._busy:
                self._changed.wait(LONGEST_SLEEP)
            # A step that reads a record twice has planned it once.
            planned = {index for index, _ in pairs if self._next_use(group, index) is not None}
            for index in planned:
                if index in self._held:
                    images[index] = self._held[index]
                self._end_use(group, index)
            missing = [(index, row) for index, row in pairs if index in planned and index not in images]
            kept = self._to_keep(group) if missing else set[int]()
            if missing:
                self._busy.add(group)
        if missing:
            self._decode(group, missing, kept, out)
        for index, row in pairs:
            if index in images:
                out[row] = images[index]
        return [(index, row) for index, row in pairs if index not in planned]

    def _decode(self, group: int, pairs: _Pairs, kept: set[int], out: Any) -> None:
        """Decode frames of a busy group: `pairs` to the rows of `out`, and `kept` to hold."""
        rows = dict[int, list[int]]()
        for index, row in pairs:
            rows.setdefault(index, []).append(row)
        indices, last = sorted({*rows, *kept}), max(rows, default=-1)
        try:
            with closing(self._frames.decode(indices)) as decoding:
                for index in indices:
                    holds = index in kept and self._has_room(group, index, evicts=index < last)
                    if index > last and not holds:
                        return  # without room, decoding goes on from here when the next one is read
                    self._take(group, index, decoding, rows.get(index, ()), out, holds=holds)
                    if not rows and self._closed:
                        return
        finally:
            with self._changed:
                self._busy.discard(group)
                self._changed.notify_all()

    def _take(self, group: int, index: int, decoding: Any, rows: Sequence[int], out: Any, *, holds: bool) -> None:
        """Write the next decoded frame to rows of `out`, and hold it if there `_has_room`."""
        image: BytesArray | None = None
        try:
            convert = next(decoding)[1]
            if holds:
                block = self._block()
                image = self._leases.lend(block, partial(self._spare.append, block)).reshape(self._frames.shape)
                image[...] = convert()
            elif rows:
                image = convert()
            for row in rows:
                out[row] = image
        finally:
            if holds:
                with self._changed:
                    self._making -= 1
                    step = self._next_use(group, index)
                    if image is not None and step is not None and not self._closed:
                        self._held[index] = image
                        self._due.setdefault(step, []).append((group, index))

    def _block(self) -> BytesArray:
        """Return memory for a frame; many are allocated at once, so that the system can give huge pages."""
        with self._changed:
            if not self._spare:
                size = int(np.prod(self._frames.shape))
                count = min(max(1, _ALLOCATED // size), self._frames.capacity)
                self._spare.extend(np.empty((count, size), np.uint8)[::-1])
            return self._spare.pop()

    def _next_use(self, group: int, index: int) -> int | None:
        """Return the next step that reads a record, and forget those that are over because of an error."""
        steps = self._uses.get(group, {}).get(index, [])
        while steps and steps[0] < self._received:
            self._end_use(group, index)
        return steps[0] if steps else None

    def _end_use(self, group: int, index: int) -> None:
        uses = self._uses[group]
        self._ahead -= 1
        del uses[index][0]
        if not uses[index]:
            del uses[index]
            self._held.pop(index, None)
        elif index in self._held:
            self._due.setdefault(uses[index][0], []).append((group, index))

    def _to_keep(self, group: int) -> set[int]:
        """Return the records of a group that are to be read and not held."""
        planned = [index for index in self._uses.get(group, ()) if index not in self._held]
        return {index for index in planned if self._next_use(group, index) is not None}

    def _has_room(self, group: int, index: int, *, evicts: bool) -> bool:
        """Return whether a frame may be made and held; not if all others are read before it, or may stay."""
        with self._changed:
            step = self._next_use(group, index)
            while len(self._held) + self._making >= self._frames.capacity:
                last = max(self._due, default=-1)
                if not evicts or step is None or last <= step or self._closed:
                    return False
                found = self._due[last].pop()
                if not self._due[last]:
                    del self._due[last]
                if self._next_use(*found) == last:
                    self._held.pop(found[1], None)
            self._making += 1
            return True

    def _work(self) -> None:
        while (task := self._next_task()) is not None:
            with suppress(Exception):  # raised again where the frame is read
                self._decode(task[0], [], task[1], None)

    def _next_task(self) -> tuple[int, set[int]] | None:
        """Return the next group to decode and what to keep of it, once that fits; None at the end."""
        while True:
            with self._changed:
                if self._closed:
                    return None
                while self._tasks:
                    kept = set[int]() if self._tasks[0] in self._busy else self._to_keep(self._tasks[0])
                    if not kept or len(kept) > self._frames.capacity:  # then each reader takes what it needs
                        self._tasks.popleft()
                        continue
                    if len(self._held) + self._making + len(kept) > self._frames.capacity:
                        break
                    self._busy.add(self._tasks[0])
                    return self._tasks.popleft(), kept
                most = min(_HORIZON * self._frames.capacity, 2 * int(self._frames.ends[-1]), _MOST_PLANNED)
                if self._is_planning or self._ahead >= most:
                    self._changed.wait()
                    continue
                self._is_planning = True
            self._plan_more()

    def _plan_more(self) -> None:
        """Plan the next block of steps."""
        found: StepsAhead | None = None
        with suppress(Exception):  # raised again where the loader plans the step
            found = next(self._steps, None)
        with self._changed:
            self._is_planning = found is None  # for good
            if found is None:
                return
            groups = np.searchsorted(self._frames.ends, found.indices, side="right").tolist()
            steps = np.repeat(np.arange(len(found.ends)), np.diff(found.ends, prepend=0)) + self._planned
            self._planned += len(found.ends)
            for group, index, step in zip(groups, found.indices.tolist(), steps.tolist(), strict=True):
                uses = self._uses.setdefault(group, {}).setdefault(index, [])
                if uses[-1:] != [step]:
                    uses.append(step)
                    self._ahead += 1
            self._tasks.extend(dict.fromkeys(groups))
            self._changed.notify_all()
