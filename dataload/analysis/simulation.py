"""The downloads of some nodes of a job in virtual time. Pure (no I/O)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataload.analysis.job import Job, steps_of
from dataload.analysis.node import Machine, Node, Rank
from dataload.samplers._common import Float64Array
from dataload.types import Int64Array

_LOOKS = 500  # of a rank's plan while all steps are made; it takes another when a shard arrives, or is missing
_MOST_LOOKS = 8_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of a simulation of nodes.

    Attributes:
        steps: Simulated steps, of the job as it was given (thinned or not).
        total_steps: Steps of all epochs.
        waits: (steps,), seconds for which the job waited before each step.
        first_bytes: Most bytes that a node had downloaded when the first batch was complete.
        epoch_bytes: (epochs, nodes), bytes that nodes downloaded for each epoch.
        again_bytes: (epochs, nodes), those of them that had been downloaded for the same epoch before.
        range_bytes: (epochs, nodes), those that were read by range, because the cache had no room for their shard.
    """

    steps: int
    total_steps: int
    waits: Float64Array
    first_bytes: float
    epoch_bytes: Float64Array
    again_bytes: Float64Array
    range_bytes: Float64Array


def simulate(
    job: Job,
    machine: Machine,
    nodes: Sequence[int],
    epochs: int,
    *,
    whole: Job | None = None,
    only_first: bool = False,
) -> Run:
    """Run some nodes of a job with shards in their caches; they wait for each other at every step.

    Args:
        job: The job.
        machine: What each node has.
        nodes: The nodes.
        epochs: Number of epochs, or as much of them as takes a few seconds.
        whole: The job before it was thinned, from which the first step is taken.
        only_first: Simulate only the first step.
    """
    found = [Node(job, machine, epochs) for _ in nodes]
    read = [steps_of(job, job.ranks(nodes), epoch) for epoch in range(epochs)]
    first: list[Int64Array | None] = [None] * len(read[0])
    if whole is not None:
        blocks = steps_of(whole, whole.ranks(nodes), 0, 1)
        first = [np.unique(np.searchsorted(whole.ends, block.indices, side="right")) for block in blocks]
    ranks = [
        Rank(job, [blocks[number] for blocks in read], machine, found[number // job.ranks_per_node], first[number])
        for number in range(len(nodes) * job.ranks_per_node)
    ]
    total = sum(len(blocks[0].ends) for blocks in read)
    simulation = _Simulation(found, ranks, machine.step_seconds * job.steps_per_step, -(-total // _LOOKS))
    while simulation.position < (1 if only_first else total) and simulation.looks < _MOST_LOOKS:
        simulation.go_on()
    return simulation.result(total)


class _Simulation:
    """The clock of some nodes."""

    def __init__(self, nodes: Sequence[Node], ranks: Sequence[Rank], step_seconds: float, pause: int) -> None:
        self._nodes, self._ranks, self._step_seconds, self._pause = nodes, ranks, step_seconds, pause
        self.position = self.looks = 0
        self._now = self._due = 0.0
        self._first_bytes = 0.0
        self._waits: list[float] = []
        self._stuck = False
        self._asked = -1  # the last step for which a reader had to wait

    def go_on(self) -> None:
        """Go on to the next event."""
        reads = self._now >= self._due
        for rank in self._ranks:
            if rank.looks or rank.roomless:
                self.looks += 1
                rank.act(self.position, reads=reads)
        if reads:
            ready = [rank.is_ready(self.position, stuck=self._stuck) for rank in self._ranks]
            if all(ready):
                self._end_step()
                return
            if self._asked != self.position:  # those that wait look at once
                self._asked = self.position
                for rank, is_ready in zip(self._ranks, ready, strict=True):
                    rank.looks = rank.looks or not is_ready
                return
        lines = [node.line.seconds_left() for node in self._nodes]
        left = min(lines)
        if self._due - self._now > 0:
            left = min(left, self._due - self._now)
        self._stuck = left == math.inf  # readers help themselves in the end
        if self._stuck:
            return
        self._now = self._due if left == self._due - self._now else self._now + left
        for node, seconds in zip(self._nodes, lines, strict=True):
            owner = node.line.advance(left, complete=seconds <= left)
            if owner is not None:
                _end_request(node, *owner)

    def _end_step(self) -> None:
        self._waits.append(self._now - self._due)
        if not self.position:
            self._first_bytes = max(node.line.sent for node in self._nodes)
        self.position += 1
        for rank in self._ranks:
            rank.end_step()
            rank.looks = rank.looks or self.position % self._pause == 0
        self._due = self._now + self._step_seconds

    def result(self, total: int) -> Run:
        """Return what has happened."""
        columns = [(node.epoch_bytes, node.again_bytes, node.range_bytes) for node in self._nodes]
        epoch_bytes, again_bytes, range_bytes = np.stack(columns, axis=2)
        return Run(
            steps=self.position,
            total_steps=total,
            waits=np.array(self._waits),
            first_bytes=self._first_bytes,
            epoch_bytes=epoch_bytes,
            again_bytes=again_bytes,
            range_bytes=range_bytes,
        )


def _end_request(node: Node, rank: Rank, shard: int, by_range: bool) -> None:
    if by_range:
        rank.end_range(shard)
        return
    node.end_part(shard)
    rank.end_request()
