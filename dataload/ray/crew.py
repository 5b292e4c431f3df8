"""The actors of one loader: which are wanted, which have started, and which one gets a task."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from time import monotonic, sleep
from typing import Any

from dataload._util.lazy import load_optional
from dataload.errors import text_of
from dataload.executors.base import Fleet, WorkerLostError, WorkerPosition
from dataload.ray import NAMESPACE
from dataload.ray.actor import FleetActor, clock_offset

_log = logging.getLogger("dataload")

POLL_SECONDS = 0.05  # while actors start, or tasks wait for one
_LOOK_SECONDS = 0.25  # once all have started: asking Ray for each of them takes 30 us
UNKNOWN = WorkerPosition(-1, -1, -1)

_FAILED_STARTS, _START_PAUSE = 5, 0.5  # Ray may not have noticed yet that a node or a named actor is gone
_IDLE_SECONDS = 30.0  # after which an actor that is not wanted any more ends
_REPORT_SECONDS = 0.5
_SETTLE_SECONDS = 10.0  # without another node, after which the shards are divided although actors start
_AVOIDED_SECONDS = 30.0  # a node that does not answer


@dataclass(slots=True, eq=False)
class Actor:
    """An actor as one loader sees it."""

    handle: Any
    number: int
    loaded: Any = None  # the reference to the result of `FleetActor.load`, until that is there
    node: str = ""
    name: str = ""
    tasks: dict[int, Any] = field(default_factory=dict[int, Any])  # asked for and not received, by number
    turn: int = 0  # to choose by: fewest tasks, then by turns, so that steps in a row go to different actors
    idle_since: float = 0.0
    lease: Any = None  # a result that never comes: its error says that the actor is lost

    def give(self, number: int, task: Any) -> None:
        """Note a task that the actor is asked for."""
        self.tasks[number] = task
        self.turn = (len(self.tasks) << 48) + number

    def take(self, number: int) -> None:
        if self.tasks.pop(number, None) is not None:
            self.turn -= 1 << 48


class Crew:
    """The actors of one loader, which has `content`, a pickle of its work. Numbers are counted from `first`."""

    def __init__(self, ray: Any, fleet: Fleet, content: bytes, size: int, *, first: int, shares: bool) -> None:
        self._ray, self._fleet, self._first = ray, fleet, first
        self.size: int = size
        self._is_shared = fleet.name is not None and shares
        self.loader: str = uuid.uuid4().hex
        own = f"{fleet.name or socket.gethostname()}-{os.getpid()}-{self.loader[:6]}"
        self.name: str = fleet.name if fleet.name is not None and shares else own
        self._content: Any = ray.put(content)
        self._kind: Any = ray.remote(concurrency_groups={"report": 1, "lease": 1})(FleetActor)
        self.actors: list[Actor] = []
        self._usable: list[Actor] = []  # those that are wanted
        self.nodes: tuple[str, ...] = ()  # of the actors
        self._leaders: dict[str, Actor] = {}  # of each node the one that reads ahead
        self.starting: list[Actor] = []
        self._looked, self._start_at, self._starts, self._failed = 0.0, 0.0, 0, 0
        self._avoids_until = self._settles_at = 0.0
        self._check_room()

    def _check_room(self) -> None:
        wanted, found = self.size * self._fleet.num_cpus, self._ray.cluster_resources().get("CPU", 0)
        if wanted > found:
            message = f"{self.size} workers of {self._fleet.num_cpus:g} CPUs need {wanted:g}, and the Ray cluster has"
            warnings.warn(f"{message} {found:g}: using as many as fit until nodes join", RuntimeWarning, stacklevel=2)

    @property
    def _wanted(self) -> range:
        return range(self._first, self._first + self.size)

    def use(self, size: int) -> None:
        """Want this many actors from now on. Others end once they are idle for a while."""
        self.size = size
        for actor in [each for each in self.starting if each.number not in self._wanted]:
            self.starting.remove(actor)
            self._end(actor)
        self._looked = 0.0

    def fill(self) -> list[tuple[Actor, Any]]:
        """Now and then note which actors have started, are missing or unwanted; return lost ones, and errors."""
        now = monotonic()
        pause = POLL_SECONDS if self.starting or len(self._usable) < self.size else _LOOK_SECONDS
        if now - self._looked <= pause and self.actors:
            return []
        lost = list[tuple[Actor, Any]]()
        for actor in self._those_done(self.actors, "lease"):
            try:
                self._ray.get(actor.lease)
            except self._ray.exceptions.RayError as error:
                self.kill(actor, error)
                lost.append((actor, error))
        self._looked = now
        if now >= self._start_at:
            known = {each.number for each in (*self.actors, *self.starting)}
            self.starting += [self._start(number) for number in self._wanted if number not in known]
        self._welcome(now)
        for actor in [*self.actors]:
            if actor.tasks or actor.number in self._wanted:
                actor.idle_since = now
            elif now - actor.idle_since > _IDLE_SECONDS:
                self.actors.remove(actor)
                self._end(actor)
        self._usable = [each for each in self.actors if each.number in self._wanted]
        self._leaders = {each.node: each for each in reversed(self.actors)}
        nodes = tuple(sorted(self._leaders))
        if nodes != self.nodes:
            self.nodes, self._settles_at = nodes, now + _SETTLE_SECONDS
        return lost

    def _those_done(self, actors: Sequence[Actor], result: str) -> list[Actor]:
        done = self.done(getattr(each, result) for each in actors)
        return [each for each in actors if getattr(each, result) in done]

    def _start(self, number: int) -> Actor:
        fleet = self._fleet
        options: dict[str, Any] = {"num_cpus": fleet.num_cpus, "namespace": NAMESPACE}
        options |= {} if fleet.memory is None else {"memory": fleet.memory}
        options |= {"scheduling_strategy": "SPREAD"} if fleet.scheduling == "spread" else {}
        if monotonic() < self._avoids_until:
            options["scheduling_strategy"] = self._elsewhere
        options["name"], self._starts = f"{self.name}/{number}", self._starts + 1
        if self._is_shared:
            options |= {"get_if_exists": True, "lifetime": "detached"}
        else:  # Ray still knows the name of an actor that has just died
            options["name"] += f".{self._starts}"
        start = self._kind.options(**options).remote
        actor = Actor(start(number, fleet.num_cpus, shared=self._is_shared, ends=not fleet.detached), number)
        self.load(actor)
        return actor

    def load(self, actor: Actor) -> None:
        """Send the work to an actor that does not have it."""
        handle = actor.handle
        actor.lease = handle.lease.options(concurrency_group="lease").remote()
        leases = [actor.lease] if self._is_shared else []  # in a list, because Ray would wait for it otherwise
        actor.loaded = handle.load.remote(self.loader, self._content, clock_offset(), os.getcwd(), leases)

    def _welcome(self, now: float) -> None:
        """Note which actors have started; a `WorkerLostError` if none can."""
        for actor in self._those_done(self.starting, "loaded"):
            self.starting.remove(actor)
            try:
                actor.node, actor.name = self._ray.get(actor.loaded)
            except self._ray.exceptions.RayError as error:
                self._failed += 1
                self._start_at = now + _START_PAUSE
                if self._failed == _FAILED_STARTS:
                    self._failed = 0
                    reason = f"cannot be started: {text_of(error)}"
                    raise WorkerLostError(f"{self.name}/{actor.number}", reason, UNKNOWN) from error
            else:
                self._failed, actor.loaded = 0, None
                self.actors.append(actor)

    def nodes_for(self, actor: Actor) -> tuple[str, ...]:
        """Return the nodes among which the shards are divided, if this actor reads ahead for its own."""
        # More nodes may soon have actors; but where Ray lacks CPUs for all actors, some never start.
        is_settled = not self.starting or monotonic() > self._settles_at
        return self.nodes if self._leaders.get(actor.node) is actor and is_settled else ()

    def choose(self, in_flight: int | None, avoided: set[str], home: Callable[[Sequence[str]], str]) -> Actor | None:
        """Return the actor for the next task: on its home, and not on a node to be avoided, if that is possible.

        Of `in_flight` tasks each actor has about its share, so that those that start later find some; None ignores it.
        """
        room = sys.maxsize if in_flight is None else 1 + -(-in_flight // max(1, self.size))
        first = min(self._usable, key=attrgetter("turn"), default=None)  # it has the fewest tasks
        if first is None or len(first.tasks) >= room:
            return None
        best = home(self.nodes)
        if not (best or avoided):
            return first
        free = [each for each in self._usable if len(each.tasks) < room]
        # A home may have some tasks more than others, which would otherwise wait for shards of one node after another.
        most = len(first.tasks) + room // 2
        return min(free, key=lambda each: (each.node in avoided, len(each.tasks) > most, each.node != best, each.turn))

    def done(self, references: Iterable[Any], seconds: float = 0.0, count: int | None = None) -> set[Any]:
        """Wait for some results, by default for none, and return the references of those that are there."""
        asked = [*references]
        if not asked:
            sleep(min(seconds, POLL_SECONDS))
            return set()
        return {*self._ray.wait(asked, num_returns=count or len(asked), timeout=seconds)[0]}

    def describe(self, actor: Actor | None) -> tuple[str, WorkerPosition, str]:
        """Return an actor's name, its position, and the stack of its work."""
        if actor is None:
            return f"fleet {self.name}", UNKNOWN, "no worker has started: Ray has no CPUs free, or starts workers"
        try:
            report = actor.handle.report.options(concurrency_group="report").remote()
            found = self._ray.get(report, timeout=_REPORT_SECONDS)
        except self._ray.exceptions.RayError as error:
            return actor.name, UNKNOWN, f"it does not answer: {text_of(error)}"
        return actor.name, found["position"], found["stacks"]

    def kill(self, actor: Actor | None, error: Any = None) -> None:
        """End an actor that is late, or is lost with an error, even if others use it."""
        if actor in self.actors:
            self.actors.remove(actor)
            self._looked = 0.0
            if error is not None:
                reason = text_of(error).splitlines()[0]
                _log.warning("%s is lost, its batches are made again: %s", actor.name, reason)
            if isinstance(error, self._ray.exceptions.ActorUnavailableError):
                self._avoid(actor.node)
            with contextlib.suppress(Exception):  # it is gone
                self._ray.kill(actor.handle)

    def _avoid(self, node: str) -> None:
        """Start actors elsewhere, if that is possible, until Ray has noticed that a node is lost."""
        strategies = load_optional("ray.util.scheduling_strategies", needed_by="a fleet", extra="ray")
        labels = [label for each in self._ray.nodes() for label, value in each["Labels"].items() if value == node]
        if labels:
            not_there = {labels[0]: strategies.NotIn(node)}
            self._elsewhere: Any = strategies.NodeLabelSchedulingStrategy({}, soft=not_there)
            self._avoids_until = monotonic() + _AVOIDED_SECONDS

    def _end(self, actor: Actor) -> None:
        actor.loaded = actor.lease = None
        with contextlib.suppress(Exception):  # it is gone
            if self._is_shared:
                actor.handle.forget.remote(self.loader)
            else:
                self._ray.kill(actor.handle)

    def close(self) -> None:
        """End all actors, or let others have them."""
        for actor in (*self.actors, *self.starting):
            self._end(actor)
            actor.tasks.clear()  # they refer to it, and it to its actor
        for actors in (self.actors, self.starting, self._usable):
            actors.clear()
        self._content = None
