"""The nodes whose caches have, or will have, the shards of a step: a function of the plan and of the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dataload._util.randomness import derive_word, hash64
from dataload.loader.step import StepRange, StepWork
from dataload.types import Int64Array


class Homes:
    """The home of each step of a source of several shards; other work has none."""

    def __init__(self, work: Any) -> None:
        self._work = work if isinstance(work, StepWork) else None
        lengths: Sequence[int] = () if self._work is None else getattr(self._work.fetch.source, "shard_lengths", ())
        self._ends: Int64Array = np.cumsum(lengths, dtype=np.int64)
        self._dealt: tuple[Sequence[str], Int64Array] = (), np.empty(0, np.int64)

    def of(self, task: Any, nodes: Sequence[str]) -> str:
        """Return the node that should make a task; "" if it does not matter."""
        if self._work is None or len(nodes) < 2 or len(self._ends) < 2 or not isinstance(task, StepRange):
            return ""
        if self._dealt[0] != nodes:  # when a node joins or leaves, other nodes keep their shards
            shards = np.arange(len(self._ends))
            scores = [hash64(derive_word(0, "home", node), shards) for node in nodes]
            self._dealt = nodes, np.argmax(scores, axis=0)
        wanted = self._work.plan_of(task, task.start).wanted
        shards = np.searchsorted(self._ends, wanted, side="right")
        counts = np.bincount(self._dealt[1][shards], minlength=len(nodes))
        best = int(np.argmax(counts))
        # Halfway from an even share to all of its records: a shuffle of everything has no homes.
        return nodes[best] if 2 * counts[best] * len(nodes) > (len(nodes) + 1) * len(wanted) else ""
