"""The journal of a conversion, and the logs of its runs and parts: they say which shards are finished.

The journal is a JSON file beside the destination from which an interrupted conversion resumes. It names the plan when
the conversion begins, and all shards when it ends. In between, a log notes the shards that the conversion, or each of
its partitions, has finished.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from dataload._util.fingerprint import digest
from dataload._util.threads import DaemonThreads
from dataload.catalog.checks import as_content, is_count
from dataload.catalog.evidence import MOST_THREADS
from dataload.catalog.facts import Evidence, ShardFacts
from dataload.catalog.ledger import Job, log_of
from dataload.catalog.manifest import locked
from dataload.convert.mapping import VALUES, check_values
from dataload.convert.plan import Shard, Target
from dataload.errors import ConfigError, SourceError, SourceNotFoundError, and_more
from dataload.jobs.engine import Engine, count_parts, select_part
from dataload.jobs.run import Facts, Head, Ledger, Mode, Refusal, Step, decide
from dataload.storage import Remote, base_name, storage_of

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The identity of a conversion or one of its partitions, and its finished shards."""

    source: str  # fingerprint
    records: int
    format: str  # name of the format being written
    options: dict[str, str]  # everything else that decides the content: the writer's options, as text
    shards: tuple[tuple[str, int, int], ...]  # (file name, first record, last record + 1)
    finished: dict[str, ShardFacts] = dataclasses.field(default_factory=dict[str, ShardFacts])  # by file name
    run: str = ""  # random, so that the logs of two runs differ; not of complete local journals
    parts: int = 0  # the number of parts; 0 if the conversion is one run
    part: int = 0  # its number, from 1; 0 for the whole
    counted: bool = False  # whether the numbers of records may differ from the plan, so that the file has them

    def __post_init__(self) -> None:
        # A saved journal may have been damaged, or made up.
        if not isinstance(self.options, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError("its options are not a table")
        for name, number in (("parts", self.parts), ("part", self.part)):
            if type(number) is not int or number < 0:
                raise TypeError(f"{name} is {number!r}")
        if unknown := self.finished.keys() - {name for name, _, _ in self.shards}:
            raise ValueError(f"it has no shard {min(unknown)!r}, and yet says that it is finished")
        for name, shard in self.finished.items():
            counts = {"size": shard.bytes, "number of records": shard.records, "number skipped": shard.skipped}
            for what, count in counts.items():
                if not is_count(count):
                    raise TypeError(f"the {what} of the shard {name!r} is {count!r}")

    @property
    def complete(self) -> bool:
        return len(self.finished) == len(self.shards)

    @property
    def job(self) -> Job:
        """The run and a hash of all that decides the content, for logs."""
        options = sorted(self.options.items())
        return Job(self.run, digest(self.source, self.records, self.format, options, self.shards))

    def with_finished(self, shards: Iterable[ShardFacts]) -> Journal:
        """Return the journal with these shards as far as they belong to it."""
        planned = {name for name, _, _ in self.shards}
        return replace(self, finished={**self.finished, **{each.name: each for each in shards if each.name in planned}})

    def differences(self, now: Journal) -> Iterator[str]:
        """Yield a line for each difference of the requested conversion, `now`, except partitions once complete."""
        pairs = [(name, getattr(self, name), getattr(now, name)) for name in ("source", "records", "format")]
        options = sorted(self.options.keys() | now.options.keys())
        for name in [each for each in options if each.endswith(VALUES)]:
            function = name.removesuffix(VALUES)
            # Values of another function differ anyway, and 0.2 noted none.
            if name not in self.options or self.options.get(function) != now.options.get(function):
                options.remove(name)
        pairs += [(name, self.options.get(name, "not set"), now.options.get(name, "not set")) for name in options]
        numbers = () if self.complete else ("parts", "part")
        pairs += [(name, getattr(self, name) or "none", getattr(now, name) or "none") for name in numbers]
        for name, before, after in pairs:
            if before != after:
                yield f"{name}: {before} when it began, {after} now"
        if self.shards != now.shards:
            yield f"shards: {_summary(self.shards)} when it began, {_summary(now.shards)} now"

    def to_bytes(self) -> bytes:
        table = {name: getattr(self, name) for name in ("source", "records", "format", "options", "shards")}
        table |= {"finished": {name: self._to_json(shard) for name, shard in self.finished.items()}}
        table |= {"version": _VERSION}
        table |= {"run": self.run} if self.run else {}  # not of local files, as in releases before URLs
        table |= {"parts": self.parts, "part": self.part} if self.parts else {}  # as in releases before parts
        return json.dumps(table, indent=1).encode()

    def _to_json(self, shard: ShardFacts) -> dict[str, Any]:
        evidence = shard.evidence
        elsewhere = {"etag": evidence.etag, "identity": shard.content} if self.run or self.parts else {}
        counts = {"records": shard.records, "skipped": shard.skipped} if self.counted else {}
        return {"bytes": shard.bytes, "sha256": shard.sha256, "mtime_ns": evidence.mtime_ns, **elsewhere, **counts}

    @classmethod
    def parse(cls, data: bytes, path: str) -> Self:
        try:
            table: dict[str, Any] = json.loads(data)
            if (version := table.pop("version")) != _VERSION:
                raise ValueError(f"its version is {version!r}, this release reads {_VERSION}")
            shards = tuple((str(name), int(start), int(stop)) for name, start, stop in table.pop("shards"))
            planned = {name: stop - start for name, start, stop in shards}
            found: dict[str, dict[str, Any]] = table.pop("finished")
            finished = {name: _parse_shard(name, planned.get(name, 0), **shard) for name, shard in found.items()}
            counted = any("records" in shard for shard in found.values())
            return cls(**table, shards=shards, finished=finished, counted=counted)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            message = f"{path} is not a conversion journal ({error}): delete it, or pass overwrite=True to start over"
            raise ConfigError(message, key="resume", value=path) from error


def _parse_shard(
    name: str,
    planned: int,
    *,
    bytes: int,  # noqa: A002 - the key in the file
    sha256: str,
    mtime_ns: int,
    etag: str | None = None,
    identity: Any = None,
    records: int | None = None,
    skipped: int = 0,
) -> ShardFacts:
    content = None if identity is None else as_content(identity)
    count = planned if records is None else records
    return ShardFacts(name, bytes, count, sha256, content, Evidence(mtime_ns, etag), skipped)


class JournalFile:
    """The file of a journal at `path`; a newer version by another run is not replaced."""

    def __init__(self, path: str, remote: Remote | None = None) -> None:
        self.path: str = path
        self._storage = storage_of(path, remote)
        self._version: Any = None

    def load(self) -> Journal | None:
        found = self._storage.load(self.path)
        if found is None:
            return None
        self._version = found[1]
        return Journal.parse(found[0], self.path)

    def save(self, journal: Journal) -> None:
        """Replace the file in one step; a SourceError if another run has replaced or removed it since."""
        if not self.offer(journal):
            message = f"another conversion has taken over {self.path}: wait until it has ended"
            raise SourceError(message, path=self.path)

    def offer(self, journal: Journal) -> bool:
        """Save, but return False if another run has replaced or removed the file."""
        try:
            self._version = self._storage.replace(self.path, journal.to_bytes(), self._version)
        except FileExistsError:
            return False
        return True

    def remove(self) -> None:
        found = self._storage.load(self.path)
        if found is not None and found[1] == self._version:
            self._storage.remove(self.path)


def _summary(shards: Sequence[tuple[str, int, int]]) -> str:
    return f"{len(shards)} ({shards[0][0]}, ...)" if shards else "0"


_MOST_NAMED = 8


class ConversionLedger(Ledger):
    """The journal of a conversion, and the log of one run of it or of one part."""

    again = "finished shards are kept: pass resume=True to continue"

    def __init__(self, target: Target, plan: Sequence[Shard], mode: Mode) -> None:
        at_once = mode.overwrite or target.remote is None
        super().__init__(log_of(target.log(*(mode.part or ())), target.remote, at_once=at_once))
        self.journal: Journal  # since `begin`, with what earlier runs have finished
        self._target, self._plan, self._mode = target, plan, mode
        self._head = JournalFile(target.journal, target.remote)
        self._anew = self._sealed = False

    @property
    def path(self) -> str:
        """The file that belongs to this run or part alone."""
        return self.log.path if self._mode.part else self._head.path

    def begin(self, requested: Journal, engine: Engine | None) -> None:
        """Find what earlier runs of the requested conversion have finished; a ConfigError if it cannot go on."""
        mode, begun = self._mode, self._load()
        if engine is not None:
            self.parts: int = self._count_parts(engine, begun)
            requested = replace(requested, parts=self.parts)
        elif mode.merge and begun is not None:
            requested = replace(requested, parts=begun.parts)
        step, begun = self._decide(requested, begun)
        if step == "begin" and mode.part:
            with locked(self._head.path, self._target.remote):
                step, begun = self._decide(requested, self._load())
                while step == "begin" and not self._head.offer(replace(requested, part=0)):
                    step, begun = self._decide(requested, self._load())  # another part was first
        if step == "begin" or begun is None:
            self._anew, self.journal = True, requested
            return
        self._anew = mode.overwrite
        self.journal = replace(begun, parts=requested.parts, part=requested.part, counted=requested.counted)
        if step == "go on" and not begun.complete and not mode.overwrite:
            self.journal = self._noted(self.journal)
        if not begun.complete:
            resuming = mode.resume and bool(self.journal.finished or begun.parts)
            check_values(begun.options, requested.options, self._subject, resuming=resuming)
        if step == "join":
            self.changed: str = "run its part again"
            self.journal = replace(self.journal, finished=self._joined())
        elif step == "check":
            self.changed = "the parts are merged, so pass resume=True without a part to write it again"
        self.complete: bool = self.journal.complete
        self._sealed = begun.complete
        self.known: Facts = {(name, ""): facts for name, facts in self.journal.finished.items()}

    @property
    def _subject(self) -> str:
        asked = (
            "resume" if self._mode.resume else "merge" if self._mode.merge else "write a part without overwrite=True"
        )
        return f"cannot {asked}: {self._head.path}"

    def _load(self) -> Journal | None:
        try:
            return self._head.load()
        except ConfigError:
            if not self._mode.overwrite:
                raise
            return None  # it is replaced

    def _count_parts(self, engine: Engine, begun: Journal | None) -> int:
        """Return the number of parts of the run of an engine, by default as in the run to resume."""
        if not self._mode.resume or begun is None or begun.complete:
            return count_parts(engine, len(self._plan))
        if not begun.parts:
            message = f"the conversion of {self._head.path} was begun without an engine: continue without one, or pass"
            raise ConfigError(f"{message} overwrite=True to start over", key="engine")
        return engine.parts or begun.parts

    def _decide(self, requested: Journal, begun: Journal | None) -> tuple[Step, Journal | None]:
        mode = self._mode
        fresh = not (mode.resume or mode.part or mode.merge or mode.overwrite)
        taken = self._target.existing(self._plan) if fresh or (begun is None and not mode.overwrite) else []
        if taken and begun is None:
            begun = self._load()  # written by a part on another machine just now
        differences = [] if begun is None else [*begun.differences(replace(requested, part=0))]
        head: Head = "none"
        if begun is not None:
            head = "complete" if begun.complete else "parts" if begun.parts else "one run"
        shared = self._target.is_shared
        step = decide(mode, head, same=not differences, taken=bool(taken), shared=shared)
        if step == "begin" or step == "go on" or step == "check" or step == "join":
            return step, begun
        raise self._refusal(step, begun, differences, taken)

    def _refusal(
        self, step: Refusal, begun: Journal | None, differences: Sequence[str], taken: Sequence[str]
    ) -> Exception:
        path = self._head.path
        if step == "not begun":
            return SourceNotFoundError(f"there is no {path}: run the parts before you merge them", path=path)
        if step == "not in parts":
            message = f"{path} is the journal of a conversion without parts: pass resume=True to finish it"
            return ConfigError(message, key="merge", value=path)
        if step == "different":
            lines = "".join(f"\n  {line}" for line in differences)
            return ConfigError(f"{self._subject} is the journal of a different conversion{lines}", key="resume")
        if step == "exists":
            unfinished = begun is not None and not begun.complete
            resuming = "resume=True to continue the interrupted conversion, or " if unfinished else ""
            message = f"{taken[0]} exists{and_more(len(taken))}: choose another name, or pass {resuming}overwrite=True"
            return ConfigError(f"{message} to replace it", key="overwrite", value=taken[0])
        parts = f" in {begun.parts} parts" if begun is not None and begun.parts else ""
        remedy = "pass resume=True to continue it, or overwrite=True"
        if parts:
            remedy = "run the parts that are missing and merge them (an engine does both with resume=True), or pass"
            remedy += " overwrite=True"
        message = f"{path} is the journal of an unfinished conversion{parts}: {remedy} to start over"
        return ConfigError(message, key="part" if parts else "resume", value=path)

    def _noted(self, journal: Journal) -> Journal:
        """Return a journal, of the whole or of a part, with the shards in its log or in the receipt of version 0.2."""
        number, count = self._mode.part or (0, 0)
        if not count and journal.parts:
            return journal  # the parts find their logs
        found, damaged = self._logged(journal, number, count)
        if damaged:
            lines = f"{damaged} damaged line{'s' if damaged > 1 else ''}"
            self.warning: str = f"{lines} of {self.log.path} did not count: their shards were written again"
        return found

    def _logged(self, journal: Journal, number: int, count: int) -> tuple[Journal, int]:
        target, journal, is_own = self._target, replace(journal, part=number), (number, count) == self._mode.part
        log = self.log if is_own or not count else log_of(target.log(number, count), target.remote)
        logged = log.load(journal.job)
        if logged.shards or not count:
            return journal.with_finished(logged.shards.values()), logged.damaged
        file = JournalFile(target.receipt(number, count), target.remote)
        if (receipt := file.load()) is None:
            return journal, logged.damaged
        if lines := "".join(f"\n  {line}" for line in receipt.differences(journal)):
            message = f"part {number}/{count} has to run again with overwrite=True: {file.path} is the journal of a"
            raise ConfigError(f"{message} different conversion{lines}", key="resume")
        return journal.with_finished(receipt.finished.values()), logged.damaged

    def _joined(self) -> dict[str, ShardFacts]:
        """Return the shards in the logs of all parts, which must have finished."""
        count = self.journal.parts
        with DaemonThreads(MOST_THREADS) as pool:
            logs = [*pool.map(partial(self._logged, self.journal, count=count), range(1, count + 1))]
        finished = {name: facts for journal, _ in logs for name, facts in journal.finished.items()}
        each = [select_part(self._plan, number, count) for number in range(1, count + 1)]
        missing = [f"{n}/{count}" for n, own in enumerate(each, 1) if {shard.name for shard in own} - finished.keys()]
        if missing:
            message = f"parts {', '.join(missing[:_MOST_NAMED])}{and_more(len(missing), _MOST_NAMED)} have not run,"
            raise ConfigError(f"{message} or have not finished: run them, again if need be", key="merge", value=missing)
        self._target.existing(self._plan)  # one request for the versions of all objects
        return {shard.name: finished[shard.name] for shard in self._plan}

    def start(self, facts: Facts, *, in_parts: bool) -> None:
        journal, target = replace(self.journal, finished={}), self._target
        self._sealed = False
        if self._anew and not journal.part:
            self._head.save(journal)  # parts find their plan there
        if self._mode.overwrite:
            for number in (journal.part,) if journal.part else range(1, journal.parts + 1):
                target.storage.remove(target.receipt(number, journal.parts))
        if not in_parts:
            self.log.begin(journal.job, facts, anew=self._anew)
        elif target.remote is not None:
            target.remote.listings.clear()  # other processes will write there

    def discard(self) -> None:
        if self._mode.part or self._anew:
            self.log.remove()
        if self._anew and not self._mode.part and not (self.parts and self._logs()):
            self._head.remove()

    def _logs(self) -> list[str]:
        """Return the paths of the logs and receipts of parts, also of earlier runs with another number of parts."""
        start = self._target.journal.removesuffix("json")
        names = re.compile(rf"{re.escape(base_name(start))}\d+-of-\d+\.(log|json)")
        found = self._target.storage.glob(f"{glob.escape(start)}*-of-*")
        return [path for path in found if names.fullmatch(base_name(path))]

    def join(self) -> Facts:
        return {(name, ""): facts for name, facts in self._joined().items()}

    def replaceable(self, todo: Sequence[Shard]) -> set[str]:
        """Return the paths of shards that may be replaced: without a lock, another run may be writing missing files."""
        mode = self._mode
        if mode.overwrite:
            return {shard.path for shard in todo}
        known = {shard.path for shard in todo if (shard.name, "") in self.known}
        return known.union(self._target.existing(todo)) if mode.resume or mode.part else set()

    def seal(self, finished: Mapping[str, ShardFacts]) -> None:
        """Save the complete journal: if it is local without the run, because earlier releases wrote none."""
        self.journal = replace(self.journal, finished=dict(finished))
        if not self._sealed:
            self._head.save(self.journal if self._target.is_shared else replace(self.journal, run=""))
        self._sealed = True

    def clear(self) -> None:
        """Remove the logs of a complete conversion, and write the journal that a single run writes."""
        for path in self._logs() if self._mode.overwrite or self.journal.parts else ():
            self._target.storage.remove(path)
        self.log.remove()
        if self.journal.parts:
            self.journal, self._sealed = replace(self.journal, parts=0), False
            self.seal(self.journal.finished)
