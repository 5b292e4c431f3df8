"""Run a job: find what is done, do the rest here or by an engine, and publish the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from threading import Lock
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from dataload._util.threads import DaemonThreads
from dataload.catalog.evidence import MOST_THREADS, is_same
from dataload.catalog.facts import ShardFacts
from dataload.errors import ConfigError
from dataload.jobs.engine import Engine, select_part
from dataload.storage import Remote

Key: TypeAlias = tuple[str, str]
"""Name of a shard, and what decides its facts besides the plan."""

Facts: TypeAlias = Mapping[Key, ShardFacts]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (done, total) at the start and after each step."""


class Unit(Protocol):
    """A shard of a job, whose `size` is its share in the progress."""

    @property
    def key(self) -> Key: ...

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...


U = TypeVar("U", bound=Unit)
R = TypeVar("R", covariant=True)  # result


class Mode(NamedTuple):
    """Whether existing files are kept or replaced, and which part runs; see `dataload.convert.convert`."""

    resume: bool = False
    overwrite: bool = False
    part: tuple[int, int] | None = None
    merge: bool = False

    def check(self, engine: object) -> None:
        """Raise a ConfigError if these exclude each other."""
        if self.resume and self.overwrite:
            raise ConfigError("resume keeps existing files, overwrite replaces them: pass only one", key="overwrite")
        if self.merge and (self.part is not None or self.overwrite or self.resume):
            message = "merge writes no shards: pass it without part, resume and overwrite"
            raise ConfigError(message, key="merge", value=self.merge)
        if engine is not None and (self.part is not None or self.merge):
            message = "an engine runs all parts and merges them: pass it without part and merge"
            raise ConfigError(message, key="engine")


Head: TypeAlias = Literal["none", "one run", "parts", "complete"]
"""What the journal at the destination says: of an unfinished run, or of unfinished parts."""

Step: TypeAlias = Literal["begin", "go on", "check", "join"]
Refusal: TypeAlias = Literal["exists", "unfinished", "in parts", "different", "not begun", "not in parts"]


def decide(mode: Mode, head: Head, *, same: bool, taken: bool, shared: bool) -> Step | Refusal:
    """Return what to do at a destination, or why nothing can be done.

    Args:
        mode: What the user asks for.
        head: The state of the journal there.
        same: Whether the journal has the plan that is asked for, and as many parts.
        taken: Whether a shard of the plan exists; without a journal, or if this is neither a resume, part nor merge.
        shared: Whether other machines may write there; this one cannot see their locks.
    """
    if mode.overwrite:
        return "go on" if mode.part and same and head == "parts" else "begin"
    if head == "none":
        return "not begun" if mode.merge else "exists" if taken else "begin"
    if not (mode.resume or mode.part or mode.merge):
        if head == "parts":
            return "in parts"
        return "exists" if taken else "unfinished" if head == "one run" and shared else "begin"
    if not same:
        return "different"
    if mode.merge:
        return "join" if head == "parts" else "check" if head == "complete" else "not in parts"
    return "check" if mode.part and head == "complete" else "go on"


class Done(NamedTuple, Generic[U]):
    """The result of a run or part: facts about its shards; earlier runs have finished `known` of them."""

    units: Sequence[U]
    facts: Facts
    known: frozenset[Key]
    notes: tuple[str, ...] = ()
    rest: tuple[Any, ...] = ()  # what `Job.run` returned


class Ledger:
    """The shards that earlier runs have finished, and the log of this run, if it has one.

    Attributes:
        known: The facts noted before.
        changed: What to do about a shard that has changed since; "" if it is done again.
        complete: Whether nothing is left to do, except for shards that have changed.
        parts: The number of parts that an engine runs.
        warning: A note about damage; "" without any.
        again: Advice after Ctrl-C.
    """

    changed: str = ""
    complete: bool = False
    warning: str = ""
    again: str = ""

    def __init__(self, log: Any = None, parts: int = 0) -> None:
        self.known: Facts = {}
        self.parts: int = parts
        self.log: Any = log  # of `log_of`, or None

    def start(self, facts: Facts, *, in_parts: bool) -> None:
        """Begin to note, with what is still true, or prepare the destination for parts."""

    def note(self, key: Key, facts: ShardFacts) -> None:
        """Note that a shard is finished. Several threads may."""
        if self.log is not None:
            self.log.note(facts, key[1])

    def close(self) -> None:
        """Complete what was noted."""
        if self.log is not None:
            self.log.close()

    def is_ours(self) -> bool:
        """Return whether no other process has taken over."""
        return self.log is None or self.log.is_ours()

    def discard(self) -> None:
        """Remove what this run has begun, because it has finished nothing."""

    def join(self) -> Facts:
        """Return the facts that all parts have noted; a ConfigError if one has not finished."""
        return {}


class Job(Protocol[U, R]):
    """A job over shards, made anew from the same arguments in each process that runs a part of it."""

    @property
    def units(self) -> Sequence[U]:
        """All shards in the order of the result, whatever has been done."""
        ...

    @property
    def remote(self) -> Remote | None: ...

    def ledger(self, mode: Mode, engine: Engine | None) -> AbstractContextManager[Ledger]:
        """Lock the destination and decide what to do there; a ConfigError if nothing can be done."""
        ...

    def run(self, todo: Sequence[U], ledger: Any, here: Here[U]) -> Iterable[Any]:
        """Do shards, and note each when its result is durable; after an error, note what is finished, too."""
        ...

    def finish(self, done: Done[U], ledger: Any, mode: Mode) -> R:
        """Publish the result, unless this is a part, and return a report. A kill at any point can be repeated."""
        ...


@dataclass(frozen=True, slots=True)
class Here(Generic[U]):
    """Callbacks of a running job: `note` for a finished shard, `advance` for progress. Several threads may."""

    note: Callable[[U, ShardFacts], None]
    advance: Callable[[int], None]
    known: Facts
    done: int  # size of what is known


def run_job(
    make: Callable[[], Job[U, R]], mode: Mode, *, engine: Engine | None = None, progress: Progress | None = None
) -> R:
    """Run the job that `make` returns, here or, if there is an engine, in parts that call `make` in other processes."""
    mode.check(engine)
    job = make()
    own = job.units if mode.part is None else select_part(job.units, *mode.part)
    with job.ledger(mode, engine) as ledger:
        try:
            if engine is None or ledger.complete:
                done = _run_here(job, own, ledger, progress)
            else:
                done = _run_parts(job, make, engine, ledger, progress)
        except KeyboardInterrupt as interrupt:
            if mode.part is None and ledger.again:
                interrupt.add_note(ledger.again)
            raise
        return job.finish(done, ledger, mode)


def run_part(make: Callable[[], Job[Any, Any]], *, part: tuple[int, int], progress: Progress | None) -> Done[Any]:
    """Run a part in a process of an engine."""
    job, mode = make(), Mode(part=part)
    own = select_part(job.units, *part)
    with job.ledger(mode, None) as ledger:
        return _run_here(job, own, ledger, progress)._replace(units=(), facts={})  # the log has them


def _run_parts(
    job: Job[U, Any], make: Callable[[], Any], engine: Engine, ledger: Ledger, progress: Progress | None
) -> Done[U]:
    total = sum(unit.size for unit in job.units)
    ledger.start({}, in_parts=True)
    try:
        parts: list[Done[U]] = engine.run(
            partial(run_part, make), ledger.parts, lambda done: progress(done, total) if progress else None
        )
    except BaseException:
        ledger.discard()
        raise
    facts = _held(job, job.units, ledger.join(), "run its part again")
    known = frozenset(key for part in parts for key in part.known)
    notes = tuple(note for part in parts for note in part.notes)
    return Done(job.units, facts, known, notes, tuple(each for part in parts for each in part.rest))


def _run_here(job: Job[U, Any], own: Sequence[U], ledger: Ledger, progress: Progress | None) -> Done[U]:
    """Do what is missing of the units of this run or part."""
    known = _held(job, own, ledger.known, ledger.changed)
    notes = [ledger.warning] if ledger.warning else []
    lost = [unit for unit in own if unit.key in ledger.known and unit.key not in known]
    notes += [f"{unit.path} has changed since it was finished and was written again" for unit in lost]
    todo = [unit for unit in own if unit.key not in known]
    facts, lock, total = dict(known), Lock(), sum(unit.size for unit in own)
    done = total - sum(unit.size for unit in todo)

    def note(unit: U, found: ShardFacts) -> None:
        ledger.note(unit.key, found)
        with lock:
            facts[unit.key] = found

    def advance(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            if progress is not None:
                progress(done, total)

    advance(0)
    rest: tuple[Any, ...] = ()
    if todo:
        ledger.start(known, in_parts=False)
        try:
            rest = (*job.run(todo, ledger, Here(note, advance, known, done)),)
            ledger.close()
        except BaseException:
            with suppress(Exception):  # report the first error
                if not facts and ledger.is_ours():
                    ledger.discard()
                ledger.close()
            raise
    return Done(own, facts, frozenset(known), tuple(notes), rest)


def _held(job: Job[U, Any], units: Sequence[U], known: Facts, changed: str) -> dict[Key, ShardFacts]:
    """Return the facts that are still true; if `changed` is advice, all must be."""
    noted = [unit for unit in units if unit.key in known]
    with DaemonThreads(MOST_THREADS) as pool:
        facts = (known[unit.key] for unit in noted)
        held = [*pool.map(is_same, facts, (unit.path for unit in noted), repeat(job.remote))]
    if changed and not all(held):
        path = noted[held.index(False)].path
        message = f"{path} is missing, or has changed since it was finished: {changed}"
        raise ConfigError(message, key="part", value=path)
    return {unit.key: known[unit.key] for unit, is_held in zip(noted, held, strict=True) if is_held}
