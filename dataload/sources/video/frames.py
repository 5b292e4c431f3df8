"""Decoded frames that wait for the next steps of a loader, so that a group of pictures is decoded once if they fit."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from dataload.types import Array, BytesArray, Int64Array, StepsAhead

Convert: TypeAlias = Callable[[BytesArray], None]
"""Writes a decoded frame to an array."""

Decode: TypeAlias = Callable[[Sequence[int]], Generator[tuple[int, Convert]]]
"""Yields records, given by ascending indices within one group of pictures, with what writes their frames."""

_Pairs: TypeAlias = list[tuple[int, int]]  # indices of records, ascending, and rows of a batch

_HORIZON = 16  # budgets of frames that are planned: from a pool as large as the budget, 1 in 10^7 comes later
_MOST_PLANNED = 1 << 20  # frames


class DecodedFrames:
    """The frames of a source as one process reads them, by several threads at once.

    Args:
        ends: (groups,) int64, cumulative number of records in the groups of pictures.
        shape: Of a frame.
        decode: Decodes records.
        budget: Most bytes of frames that wait.
    """

    def __init__(self, ends: Int64Array, shape: tuple[int, ...], decode: Decode, budget: int) -> None:
        self.ends: Int64Array = ends
        self.shape: tuple[int, ...] = shape
        self.decode: Decode = decode
        self._most = budget // max(1, int(np.prod(shape)))
        self._plans = list[FramePlan]()

    @property
    def capacity(self) -> int:
        """How many frames may wait for each loader."""
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
                _write(convert, [row for each, row in rest if each == index], out)

    def follow(self, steps: Iterator[StepsAhead], threads: int) -> FramePlan:
        """Begin to decode what the next steps of a loader read."""
        plan = FramePlan(self, steps, self._plans.remove)
        self._plans.append(plan)
        plan.start(threads)
        return plan


def _write(convert: Convert, rows: Sequence[int], out: BytesArray) -> None:
    for row in rows[:1]:
        convert(out[row])
    for row in rows[1:]:
        out[row] = out[rows[0]]


@dataclass(slots=True)
class _Frame:
    image: BytesArray
    uses: deque[int]  # the steps that read it, ascending
    copying: int = 0  # threads


@dataclass(slots=True, eq=False)
class _Block:
    """Planned uses, sorted by index and step, and which of them are over."""

    indices: Int64Array
    steps: Int64Array
    over: Array
    last: int  # step

    def end_use(self, index: int) -> bool:
        """Mark the first use of a record as over; return whether there is one."""
        row = int(np.searchsorted(self.indices, index))
        while row < len(self.indices) and self.indices[row] == index:
            if not self.over[row]:
                self.over[row] = True
                return True
            row += 1
        return False


class FramePlan:
    """An `AheadReader` that decodes what the next steps of one loader read, and keeps it until it is read.

    Frames that do not fit, first those that are read last, are decoded again.
    """

    def __init__(self, frames: DecodedFrames, steps: Iterator[StepsAhead], ended: Callable[[FramePlan], None]) -> None:
        self._frames, self._steps, self._ended = frames, steps, ended
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._held = dict[int, _Frame]()
        self._due = dict[int, list[int]]()  # the held frames by the steps that read them
        self._spare = list[BytesArray]()
        self._making = 0  # frames
        self._busy = set[int]()  # groups that are being decoded
        self._blocks = deque[_Block]()
        self._tasks = deque[int]()  # groups, in the order of their first use
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
            for index in self._due.pop(self._received, ()):  # not read, because of an error
                frame = self._held.get(index)
                if frame is not None and frame.uses and frame.uses[0] <= self._received:
                    frame.uses.popleft()
                    self._drop_unused(index, frame)
            self._received += 1
            while self._blocks and self._blocks[0].last < self._received:
                self._blocks.popleft()
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
        found, missing = list[tuple[int, int, _Frame]](), _Pairs()
        with self._changed:
            # A step that reads a record twice has planned it once.
            planned = {index: any(block.end_use(index) for block in self._blocks) for index in dict(pairs)}
            while group in self._busy:
                self._changed.wait()
            for index, row in pairs:
                if planned[index] and (frame := self._held.get(index)) is not None:
                    frame.copying += 1
                    found.append((index, row, frame))
                elif planned[index]:
                    missing.append((index, row))
            for frame in {index: frame for index, _, frame in found}.values():
                if frame.uses:
                    frame.uses.popleft()
            kept = self._to_keep(group) if missing else {}
            if missing:
                self._busy.add(group)
        try:
            for _, row, frame in found:
                out[row] = frame.image
            if missing:
                self._decode(missing, kept, out)
        finally:
            with self._changed:
                for index, _, frame in found:
                    frame.copying -= 1
                    self._drop_unused(index, frame)
                if missing:
                    self._busy.discard(group)
                self._changed.notify_all()
        return [(index, row) for index, row in pairs if not planned[index]]

    def _decode(self, pairs: _Pairs, kept: Mapping[int, Sequence[int]], out: Any) -> None:
        """Decode frames of a group: `pairs` to the rows of `out`; `kept`, with the steps that read them, to hold."""
        rows = dict[int, list[int]]()
        for index, row in pairs:
            rows.setdefault(index, []).append(row)
        indices, last = sorted({*rows, *kept}), max(rows, default=-1)
        with closing(self._frames.decode(indices)) as decoding:
            for index in indices:
                image = self._room(kept[index][0], evicts=index < last) if index in kept else None
                if index > last and image is None:
                    return  # without room, decoding goes on from here when the next one is read
                is_made = False
                try:
                    _, convert = next(decoding)
                    if image is None:
                        _write(convert, rows.get(index, ()), out)
                    else:
                        convert(image)
                        for row in rows.get(index, ()):
                            out[row] = image
                        is_made = True
                finally:
                    if image is not None:
                        with self._changed:
                            self._making -= 1
                            if is_made and not self._closed:
                                self._held[index] = frame = _Frame(image, deque())
                                self._await(index, frame, kept[index])
                if not rows and self._closed:
                    return

    def _to_keep(self, group: int) -> dict[int, list[int]]:
        """Return the records of a group that are to be read and not held, with the steps that read them."""
        first, stop = int(self._frames.ends[group - 1]) if group else 0, int(self._frames.ends[group])
        kept = dict[int, list[int]]()
        for block in self._blocks:
            rows = slice(*np.searchsorted(block.indices, (first, stop)).tolist())
            left = ~block.over[rows] & (block.steps[rows] >= self._received)
            for index, step in zip(block.indices[rows][left].tolist(), block.steps[rows][left].tolist(), strict=True):
                if index not in self._held:
                    kept.setdefault(index, []).append(step)
        return kept

    def _room(self, step: int, *, evicts: bool) -> BytesArray | None:
        """Return memory for a frame that is next read at `step`; None if all others are read before, or may stay."""
        with self._changed:
            while len(self._held) + self._making >= self._frames.capacity:
                last = max(self._due, default=-1)
                if not evicts or last <= step or self._closed:
                    return None
                index = self._due[last].pop()
                if not self._due[last]:
                    del self._due[last]
                frame = self._held.get(index)
                if frame is not None and frame.uses and frame.uses[-1] == last:
                    frame.uses.pop()
                    self._drop_unused(index, frame)
            self._making += 1
            return self._spare.pop() if self._spare else np.empty(self._frames.shape, np.uint8)

    def _await(self, index: int, frame: _Frame, steps: Sequence[int]) -> None:
        frame.uses.extend(steps)
        for step in steps:
            self._due.setdefault(step, []).append(index)

    def _drop_unused(self, index: int, frame: _Frame) -> None:
        if not frame.uses and not frame.copying and self._held.get(index) is frame:
            del self._held[index]
            self._spare.append(frame.image)

    def _work(self) -> None:
        while (task := self._next_task()) is not None:
            group, kept = task
            with suppress(Exception):  # raised again where the frame is read
                self._decode([], kept, None)
            with self._changed:
                self._busy.discard(group)
                self._changed.notify_all()

    def _next_task(self) -> tuple[int, dict[int, list[int]]] | None:
        """Return the next group to decode and what to keep of it, once that fits; None at the end."""
        while True:
            with self._changed:
                if self._closed:
                    return None
                while self._tasks:
                    kept = {} if self._tasks[0] in self._busy else self._to_keep(self._tasks[0])
                    if not kept or len(kept) > self._frames.capacity:  # then each reader takes what it needs
                        self._tasks.popleft()
                        continue
                    if len(self._held) + self._making + len(kept) > self._frames.capacity:
                        break
                    self._busy.add(self._tasks[0])
                    return self._tasks.popleft(), kept
                if not self._wants_more():
                    self._changed.wait()
                    continue
                self._is_planning = True
            self._plan_more()

    def _wants_more(self) -> bool:
        ahead = sum(len(block.indices) for block in self._blocks if block.last >= self._received)
        most = min(_HORIZON * self._frames.capacity, 2 * int(self._frames.ends[-1]), _MOST_PLANNED)
        return not self._is_planning and ahead < most

    def _plan_more(self) -> None:
        """Plan the next block of steps."""
        found: StepsAhead | None = None
        with suppress(Exception):  # raised again where the loader plans the step
            found = next(self._steps, None)
        with self._changed:
            self._is_planning = found is None  # for good
            if found is None:
                return
            order = np.argsort(found.indices, kind="stable")
            steps = np.arange(self._planned, self._planned + len(found.ends))
            indices, steps = found.indices[order], np.repeat(steps, np.diff(found.ends, prepend=0))[order]
            is_new = (np.diff(indices, prepend=-1) != 0) | (np.diff(steps, prepend=-1) != 0)
            indices, steps = indices[is_new], steps[is_new]
            self._planned += len(found.ends)
            self._blocks.append(_Block(indices, steps, np.zeros(len(indices), np.bool_), self._planned - 1))
            for index, frame in self._held.items():
                rows = slice(*np.searchsorted(indices, (index, index + 1)).tolist())
                self._await(index, frame, steps[rows].tolist())
            groups = np.searchsorted(self._frames.ends, indices, side="right")
            heads = np.flatnonzero(np.diff(groups, prepend=-1))
            first_uses = np.minimum.reduceat(steps, heads) if len(heads) else heads
            self._tasks.extend(groups[heads][np.argsort(first_uses, kind="stable")].tolist())
            self._changed.notify_all()
