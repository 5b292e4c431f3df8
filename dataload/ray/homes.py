"""The nodes whose caches have, or will have, the shards of a step: a function of the plan and of the nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from dataload._util.randomness import derive_word, hash64
from dataload.loader.pipeline import steps_ahead
from dataload.loader.state import Cursor, EpochPlanners
from dataload.loader.step import StepRange, StepWork
from dataload.types import AheadReader, Int64Array, ReadsAhead, StepsAhead


class Homes:
    """The home of each step of a source of several shards; other work has none."""

    def __init__(self, work: Any) -> None:
        self._work = work if isinstance(work, StepWork) else None
        lengths: Sequence[int] = () if self._work is None else getattr(self._work.fetch.source, "shard_lengths", ())
        self._ends: Int64Array = np.cumsum(lengths, dtype=np.int64)
        self._dealt: tuple[Sequence[str], Int64Array] = (), np.empty(0, np.int64)

    def of(self, task: Any, nodes: Sequence[str]) -> str:
        """Return the node that should make a task; "" if it does not matter."""
        work = self._work
        if work is None or len(nodes) < 2 or len(self._ends) < 2 or not isinstance(task, StepRange):
            return ""
        wanted = [work.plan_of(task, step).wanted for step in range(task.start, task.stop)]
        return self.of_indices(np.concatenate(wanted), nodes)

    def of_indices(self, wanted: Int64Array, nodes: Sequence[str]) -> str:
        """Return the node that should read records; "" if it does not matter."""
        if len(nodes) < 2 or len(self._ends) < 2:
            return ""
        if self._dealt[0] != nodes:  # when a node joins or leaves, other nodes keep their shards
            shards = np.arange(len(self._ends))
            scores = [hash64(derive_word(0, "home", node), shards) for node in nodes]
            self._dealt = nodes, np.argmax(scores, axis=0)
        shards = np.searchsorted(self._ends, wanted, side="right")
        counts = np.bincount(self._dealt[1][shards], minlength=len(nodes))
        best = int(np.argmax(counts))
        # Halfway from an even share to all of its records: a shuffle of everything has no homes.
        return nodes[best] if 2 * counts[best] * len(nodes) > (len(nodes) + 1) * len(wanted) else ""


class NodeAhead:
    """Downloads into a node's cache what its actors will read for one loader; one of them has it."""

    def __init__(self, work: Any, node: str) -> None:
        self._work, self._node = work, node
        source = work.fetch.source if isinstance(work, StepWork) else None
        self._source = source if isinstance(source, ReadsAhead) else None
        self._homes = Homes(work)
        self._nodes: Sequence[str] = ()
        self._last = 0, 0
        self._coming: deque[tuple[int, int]] = deque()  # epochs and steps that `_reader` was given
        self._reader: AheadReader | None = None

    def follow(self, task: Any, nodes: Sequence[str]) -> None:
        """Read ahead of a task, which this actor makes now; not at all without `nodes`, as another actor does."""
        if self._source is None or not isinstance(task, StepRange) or task.plans is not None:
            return
        if nodes != self._nodes or task.epoch < self._last[0]:
            self.close()
            self._nodes, self._coming = nodes, deque()
            if nodes:
                fields = self._work.fetch.fields
                self._reader = self._source.read_ahead(self._own(task, self._homes, self._coming), fields, here=False)
        self._last = task.epoch, task.start
        while self._reader is not None and self._coming and self._coming[0] < self._last:
            self._coming.popleft()
            self._reader.received()

    def _own(self, task: StepRange, homes: Homes, coming: deque[tuple[int, int]]) -> Iterator[StepsAhead]:
        """Yield the steps from a task on that belong to this node, or to no node."""
        planner = self._work.planner
        planners = EpochPlanners(planner, task.epoch, planner.with_ranks(origin=task.origin))
        epoch, steps = task.epoch, count(task.start)
        for block in steps_ahead(planners, Cursor(task.epoch, task.start), None):
            if block.epoch != epoch:
                epoch, steps = block.epoch, count()
            own: list[Int64Array] = []
            for wanted, step in zip(np.split(block.indices, block.ends[:-1]), steps, strict=False):
                if homes.of_indices(wanted, self._nodes) in ("", self._node):
                    own.append(wanted)
                    coming.append((epoch, step))
            if own:
                yield replace(block, indices=np.concatenate(own), ends=np.cumsum([len(each) for each in own]))

    def close(self) -> None:
        """Stop downloading."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
