"""The journal of a conversion, and the logs of its runs and parts: they say which shards are finished."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from dataload._util.threads import DaemonThreads
from dataload.catalog.evidence import MOST_THREADS
from dataload.catalog.facts import ShardFacts
from dataload.catalog.ledger import log_of
from dataload.catalog.manifest import locked
from dataload.convert.journal import Journal, JournalFile
from dataload.convert.mapping import check_values
from dataload.convert.plan import Shard, Target
from dataload.errors import ConfigError, SourceNotFoundError
from dataload.jobs.engine import Engine, count_parts, select_part
from dataload.jobs.run import Facts, Head, Ledger, Mode, Refusal, Step, decide
from dataload.storage import base_name

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
            several = f" (and {len(taken) - 1} more)" if len(taken) > 1 else ""
            unfinished = begun is not None and not begun.complete
            resuming = "resume=True to continue the interrupted conversion, or " if unfinished else ""
            message = f"{taken[0]} exists{several}: choose another name, or pass {resuming}overwrite=True to replace it"
            return ConfigError(message, key="overwrite", value=taken[0])
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
            several = f" (and {len(missing) - _MOST_NAMED} more)" if len(missing) > _MOST_NAMED else ""
            message = f"parts {', '.join(missing[:_MOST_NAMED])}{several} have not run, or have not finished"
            raise ConfigError(f"{message}: run them, again if need be", key="merge", value=missing)
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
        mode, target = self._mode, self._target
        if mode.overwrite or ((mode.resume or mode.part) and not target.is_shared):
            return {shard.path for shard in todo}
        known = {shard.path for shard in todo if (shard.name, "") in self.known}
        return known.union(target.existing(todo)) if mode.resume or mode.part else set()

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
