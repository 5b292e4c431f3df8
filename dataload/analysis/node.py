"""A node in virtual time: its line, its cache, and its ranks with the plans that loaders make. Pure (no I/O)."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dataload.analysis.job import Job
from dataload.sources.ahead import shard_uses
from dataload.storage.remote.ahead import SHARDS_AT_ONCE
from dataload.storage.remote.choice import rank_budget, sharers_of
from dataload.storage.remote.plan import Download, Evict, ShardPlan
from dataload.storage.remote.requests import GAP
from dataload.types import Int64Array, StepsAhead

_MOST_PARTS = 16  # of a shard; finer ones only take longer

_Owner: TypeAlias = "tuple[Rank, int, bool]"
"""A rank, a shard, and whether its records are read by range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The line, the cache and the pace of a node.

    Attributes:
        bandwidth: Bytes per second of a node.
        budget: Bytes of its cache; None means no limit.
        step_seconds: Seconds that the model takes for a step.
        connections: Requests at once of a rank.
        part_bytes: Most bytes of a request.
    """

    bandwidth: float
    budget: int | None
    step_seconds: float
    connections: int = 16
    part_bytes: int = 8 << 20


class _Line:
    """A node's line, which all requests under way share alike."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._served = 0.0  # bytes of each request that is under way all the time
        self._ends: list[tuple[float, int, _Owner]] = []
        self._number = 0
        self.sent: float = 0.0

    def start(self, nbytes: float, owner: _Owner) -> None:
        self._number += 1
        heapq.heappush(self._ends, (self._served + nbytes, self._number, owner))

    def seconds_left(self) -> float:
        """Return the seconds until the next request is complete."""
        return (self._ends[0][0] - self._served) * len(self._ends) / self._bandwidth if self._ends else math.inf

    def advance(self, seconds: float, *, complete: bool) -> _Owner | None:
        """Let time pass; return the owner of the request that is complete then."""
        if not self._ends:
            return None
        self.sent += seconds * self._bandwidth
        self._served += seconds * self._bandwidth / len(self._ends)
        return heapq.heappop(self._ends)[2] if complete else None


class Rank:
    """A rank, which downloads as `ShardsAhead` does."""

    def __init__(
        self, job: Job, epochs: Sequence[StepsAhead], machine: Machine, node: Node, first: Int64Array | None
    ) -> None:
        self.node = node
        self.plan: ShardPlan = ShardPlan(node.sizes, node.rank_budget)
        self._uses = shard_uses(iter(epochs), job.ends, np.arange(len(job.ends)))
        self._machine = machine
        self.coming: set[int] = set()  # shards that it downloads, or waits for while another rank does
        self.roomless: list[int] = []  # those of them for which the cache has no room yet
        self.looks: bool = True  # at its plan, which may have changed
        self._evicting: Evict | None = None  # as soon as it has arrived
        self._job, self._steps = job, [(block, step) for block in epochs for step in range(len(block.ends))]
        self._parts: deque[tuple[int, float]] = deque()
        self._requests = 0
        self._by_range: dict[int, bool] = {}  # the shards that the step reads by range: whether that is done
        self._last: dict[int, list[tuple[int, int]]] = {}  # by shard: the last step of each epoch, and the epoch
        shards, ends, before = [], [0], 0
        for block in epochs:
            steps = np.repeat(np.arange(len(block.ends)), np.diff(block.ends, prepend=0))
            found = np.searchsorted(job.ends, block.indices, side="right")
            step, shard = np.divmod(np.unique(steps * len(job.ends) + found), len(job.ends))
            shards.append(shard)
            ends.extend((ends[-1] + np.searchsorted(step, np.arange(len(block.ends)), side="right")).tolist())
            for each, last in dict(zip(shard.tolist(), step.tolist(), strict=True)).items():
                self._last.setdefault(each, []).append((before + last, block.epoch))
            before += len(block.ends)
        if first is not None:
            shards[0] = np.concatenate([first, shards[0][ends[1] :]])
            ends[1:] = [end + len(first) - ends[1] for end in ends[1:]]
        self._shards, self._ends = np.concatenate(shards), ends

    def epoch_of(self, shard: int, position: int) -> int:
        """Return the epoch for which a shard is downloaded at a step."""
        uses = self._last[shard]
        return next((epoch for last, epoch in uses if last >= position), uses[-1][1])

    def act(self, position: int, *, reads: bool) -> None:
        """Carry out the plan as far as it goes, while a step is read or not."""
        waiting = self._waiting(position) if reads else []
        self.looks = False
        for shard in list(self.roomless):
            if self.node.has_room(shard):
                self.roomless.remove(shard)
                self._download(shard, position)
        self.plan.receive(position)
        for shard in self.plan.resident.intersection(waiting) - self.coming:
            if shard not in self.node.present:
                self.plan.lose(shard)
        while self._evicting is None or self._evicting.shard not in self.coming:
            if self._evicting is not None:
                self.node.evict(self._evicting.shard, self)
                self._evicting = None
            if self.plan.wants_more():
                self.plan.extend(next(self._uses, ()))
                continue
            if len(self.coming) >= SHARDS_AT_ONCE:
                break
            action = self.plan.next(waiting)
            if action is None:
                break
            if isinstance(action, Download):
                self._download(action.shard, position)
            else:
                self._evicting = action

    def _download(self, shard: int, position: int) -> None:
        node = self.node
        if shard in node.present:
            node.lease(shard, self)
            return
        self.coming.add(shard)
        if shard in node.arriving:
            node.arriving[shard].waiting.append(self)
        elif not node.has_room(shard):
            self.roomless.append(shard)
        else:
            parts = max(1, min(_MOST_PARTS, math.ceil(node.sizes[shard] / self._machine.part_bytes)))
            node.begin(shard, _Arrival(self, parts, self.epoch_of(shard, position)))
            self._parts.extend([(shard, node.sizes[shard] / parts)] * parts)
            self.request()

    def request(self) -> None:
        """Begin as many requests as there are connections."""
        while self._parts and self._requests < self._machine.connections:
            shard, nbytes = self._parts.popleft()
            self._requests += 1
            self.node.line.start(nbytes, (self, shard, False))

    def end_request(self) -> None:
        """Say that a request is complete."""
        self._requests -= 1
        self.request()

    def _waiting(self, position: int) -> list[int]:
        """Return the shard for which the reader of a step waits: it asks for one after another."""
        start, stop = self._ends[position : position + 2]
        missing = (shard for shard in self._shards[start:stop].tolist() if not self._is_here(shard))
        return [*islice(missing, 1)]

    def _is_here(self, shard: int) -> bool:
        return shard in self.node.present or shard in self._by_range

    def is_ready(self, position: int, *, stuck: bool) -> bool:
        """Return whether the next step can be read; begin to read by range what the plan leaves out."""
        start, stop = self._ends[position : position + 2]
        ready = True
        for shard in self._shards[start:stop].tolist():
            if shard in self.node.present:
                self.node.present.move_to_end(shard)
            elif shard in self._by_range:
                ready = ready and self._by_range[shard]
            elif stuck or (self.plan.is_by_range(shard) and shard not in self.coming):
                self._by_range[shard] = ready = False
                nbytes = self._bytes_by_range(shard, position)
                self.node.read_by_range(nbytes, self.epoch_of(shard, position), (self, shard, True))
            else:
                return False
        return ready

    def _bytes_by_range(self, shard: int, position: int) -> float:
        """Return the bytes of a step's records of a shard, with the gaps that are fetched along."""
        block, step = self._steps[position]
        indices = block.indices[block.ends[step - 1] if step else 0 : block.ends[step]]
        ends, each = self._job.ends, self._job.record_bytes
        inside = np.unique(indices[np.searchsorted(ends, indices, side="right") == shard])
        gaps = (np.diff(inside) - 1) * self._job.records_per_row
        return each * (len(inside) * self._job.records_per_row + float(gaps[gaps * each <= GAP].sum()))

    def end_range(self, shard: int) -> None:
        """Say that the records of a step that are read by range have arrived."""
        self._by_range[shard] = True

    def end_step(self) -> None:
        """Forget what was read by range."""
        self._by_range.clear()


@dataclass(slots=True)
class _Arrival:
    """A shard that is being downloaded."""

    by: Rank
    parts: int
    epoch: int
    waiting: list[Rank] = field(default_factory=list["Rank"])


class Node:
    """A node: its line, and its cache, which works as `ShardCache` does."""

    def __init__(self, job: Job, machine: Machine, epochs: int) -> None:
        self.sizes: list[int] = job.sizes.tolist()
        self.line: _Line = _Line(machine.bandwidth)
        self.present: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self.arriving: dict[int, _Arrival] = {}
        self._leases: dict[int, set[Rank]] = {}
        self._free = math.inf if machine.budget is None else machine.budget
        self._deletes, self.rank_budget = True, machine.budget  # see `ShardsAhead`
        if machine.budget is not None:
            sharers = sharers_of(sum(self.sizes), job.ranks_per_node, machine.budget)
            self._deletes = sharers == 1
            self.rank_budget = rank_budget(machine.budget, 1.0, sharers, max(self.sizes))
        self._fetched: set[tuple[int, int]] = set()
        self.epoch_bytes: npt.NDArray[np.float64] = np.zeros(epochs)
        self.again_bytes: npt.NDArray[np.float64] = np.zeros(epochs)
        self.range_bytes: npt.NDArray[np.float64] = np.zeros(epochs)

    def has_room(self, shard: int) -> bool:
        """Return whether there is room for a shard, which is made by evicting shards that nobody has a lease of."""
        while self._free < self.sizes[shard]:
            unused = next((each for each in self.present if not self._leases.get(each)), None)
            if unused is None:
                return False
            self._remove(unused)
        return True

    def begin(self, shard: int, arrival: _Arrival) -> None:
        """Begin the download of a shard."""
        self.arriving[shard] = arrival
        self._free -= self.sizes[shard]
        self.epoch_bytes[arrival.epoch] += self.sizes[shard]
        if (shard, arrival.epoch) in self._fetched:
            self.again_bytes[arrival.epoch] += self.sizes[shard]
        self._fetched.add((shard, arrival.epoch))

    def end_part(self, shard: int) -> None:
        """Say that a part of a shard has arrived, perhaps the last one."""
        arrival = self.arriving[shard]
        arrival.parts -= 1
        if arrival.parts:
            return
        del self.arriving[shard]
        self.present[shard] = None
        for rank in (arrival.by, *arrival.waiting):
            rank.coming.discard(shard)
            rank.looks = True
            self.lease(shard, rank)

    def lease(self, shard: int, rank: Rank) -> None:
        """Keep a shard for a rank."""
        self._leases.setdefault(shard, set()).add(rank)
        self.present.move_to_end(shard)

    def evict(self, shard: int, rank: Rank) -> None:
        """End a rank's lease; of a rank that is alone, delete the shard."""
        self._leases.get(shard, set()).discard(rank)
        if self._deletes and shard in self.present and not self._leases.get(shard):
            self._remove(shard)

    def _remove(self, shard: int) -> None:
        del self.present[shard]
        self._free += self.sizes[shard]

    def read_by_range(self, nbytes: float, epoch: int, owner: _Owner) -> None:
        """Begin to read records by range."""
        self.range_bytes[epoch] += nbytes
        self.epoch_bytes[epoch] += nbytes
        self.line.start(nbytes, owner)
