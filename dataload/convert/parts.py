"""Begin a conversion or one of its partitions, and merge partitions, checking that all belong to one plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from dataload._util.threads import DaemonThreads
from dataload.catalog.evidence import is_same
from dataload.catalog.facts import ShardFacts
from dataload.catalog.ledger import log_of
from dataload.catalog.store import locked
from dataload.convert.function_values import check_values
from dataload.convert.journal import Journal, JournalFile, Ledger
from dataload.convert.plan import Shard, log_path, receipt_path, select_part
from dataload.errors import ConfigError, SourceNotFoundError
from dataload.storage import Remote, is_url, parent, storage_of
from dataload.storage.local.atomic import remove_leftovers

_MOST_THREADS = 8  # they mostly wait for a store
_MOST_NAMED = 8
_REMEDY_OF_WHOLE = "the parts are merged, so pass resume=True without a part to write it again"


def begin(
    ledger: Ledger,
    requested: Journal,
    plan: Sequence[Shard],
    remote: Remote | None,
    *,
    resume: bool,
    overwrite: bool,
) -> Journal:
    """Return the journal of a conversion with its finished shards if it can be resumed, else `requested`."""
    file, path = ledger.head, ledger.head.path
    ledger.anew = True
    if overwrite:
        file.skip()
        return requested
    begun = file.load()
    if begun is not None and resume:
        ledger.anew = False
        begun = begun if begun.complete else ledger.noted(begun)
        resuming = bool(begun.finished) or begun.parts > 0
        check_same(begun, requested, f"cannot resume: {path}", resuming=resuming)
        return replace(begun, parts=0)
    unfinished = begun is not None and not begun.complete
    if begun is not None and unfinished and begun.parts:
        message = f"{path} is the journal of an unfinished conversion in {begun.parts} parts: run the parts that are"
        remedy = "missing and merge them (an engine does both with resume=True), or pass overwrite=True to start over"
        raise ConfigError(f"{message} {remedy}", key="part")
    taken = _existing(plan, remote)
    if not taken and unfinished and is_url(path):  # its run may be alive; there is no lock
        message = (
            f"{path} is the journal of an unfinished conversion: pass resume=True to continue it, or overwrite=True"
        )
        raise ConfigError(f"{message} to start over", key="resume", value=path)
    if taken:
        raise _taken_error(taken, "resume=True to continue the interrupted conversion, or " if unfinished else "")
    return requested


def begin_part(
    ledger: Ledger,
    requested: Journal,
    plan: Sequence[Shard],
    remote: Remote | None,
    *,
    overwrite: bool,
) -> Journal:
    """Return the requested partition with its finished shards; the first one writes the journal of the whole."""
    path = ledger.head.path
    whole = _enter(path, replace(requested, part=0), plan, remote, overwrite=overwrite)
    part = replace(whole, part=requested.part, counted=requested.counted)
    own = select_part(plan, requested.part, requested.parts)
    if whole.complete:
        _check_unchanged(whole, own, remote, _REMEDY_OF_WHOLE)
        return replace(part, finished={shard.name: whole.finished[shard.name] for shard in own})
    if overwrite:
        ledger.anew = True
        receipt = receipt_path(path, requested.part, requested.parts)
        storage_of(receipt, remote).remove(receipt)
        return part
    begun = ledger.noted(part)
    return begun if begun.finished else _with_receipt(path, part, remote, "cannot write part {} without overwrite=True")


def _with_receipt(path: str, part: Journal, remote: Remote | None, subject: str) -> Journal:
    """Return the journal of a partition with what its receipt says, if version 0.2 has begun it."""
    file = JournalFile(receipt_path(path, part.part, part.parts), remote)
    found = file.load()
    if found is None:
        return part
    check_same(found, part, f"{subject.format(f'{part.part}/{part.parts}')}: {file.path}")
    return part.with_finished(found.finished.values())


def merged(file: JournalFile, requested: Journal, plan: Sequence[Shard], remote: Remote | None) -> Journal:
    """Return the complete journal of a conversion whose partitions have all finished."""
    path, begun = file.path, file.load()
    if begun is None:
        raise SourceNotFoundError(f"there is no {path}: run the parts before you merge them", path=path)
    check_same(begun, replace(requested, parts=begun.parts), f"cannot merge: {path}")
    remedy = _REMEDY_OF_WHOLE
    if not begun.complete:
        remedy = "run its part again"
        if not begun.parts:
            message = f"{path} is the journal of a conversion without parts: pass resume=True to finish it"
            raise ConfigError(message, key="merge", value=path)
        begun = replace(begun, finished=_finished(path, begun, plan, remote), counted=requested.counted)
    _existing(plan, remote)  # one request for the versions of all objects
    _check_unchanged(begun, plan, remote, remedy)
    return begun


def clear(ledger: Ledger, journal: Journal, remote: Remote | None) -> None:
    """Remove the logs of a complete conversion, and make its journal that of a single run."""
    path = ledger.head.path
    for number in range(1, journal.parts + 1):
        for each in (log_path(path, number, journal.parts), receipt_path(path, number, journal.parts)):
            storage_of(each, remote).remove(each)
    ledger.log.remove()
    ledger.seal(replace(journal, parts=0))


def check_same(begun: Journal, requested: Journal, subject: str, *, resuming: bool = False) -> None:
    """Raise, beginning with `subject`, if a journal belongs to another conversion than requested."""
    if differences := "".join(f"\n  {line}" for line in begun.differences(requested)):
        raise ConfigError(f"{subject} is the journal of a different conversion{differences}", key="resume")
    if not begun.complete:
        check_values(begun.options, requested.options, subject, resuming=resuming)


def _enter(path: str, requested: Journal, plan: Sequence[Shard], remote: Remote | None, *, overwrite: bool) -> Journal:
    """Return the journal of a conversion in partitions; the first partition creates it from `requested`."""
    if not overwrite and (begun := JournalFile(path, remote).load()) is not None:
        check_same(begun, requested, f"cannot write a part without overwrite=True: {path}")
        return begun
    with locked(path, remote):
        if not is_url(path):
            remove_leftovers(path)
        while True:
            file = JournalFile(path, remote)
            begun = _load(file, overwrite=overwrite)
            if begun is not None:
                differs = any(begun.differences(requested))
                if not overwrite:
                    check_same(begun, requested, f"cannot write a part without overwrite=True: {path}")
                if not differs and not (overwrite and begun.complete):
                    return begun
            elif not overwrite and (taken := _existing(plan, remote)):
                if is_url(path) and file.load() is not None:
                    continue  # written by a partition on another node
                raise _taken_error(taken)
            if file.offer(requested):
                return requested


def _load(file: JournalFile, *, overwrite: bool) -> Journal | None:
    try:
        return file.load()
    except ConfigError:
        if not overwrite:
            raise
        return None  # it is replaced


def _finished(path: str, begun: Journal, plan: Sequence[Shard], remote: Remote | None) -> dict[str, ShardFacts]:
    """Return the shards in the logs of all partitions, which must have finished."""
    count = begun.parts

    def load(number: int) -> Mapping[str, ShardFacts]:
        part = replace(begun, part=number)
        logged = log_of(log_path(path, number, count), remote).load(part.job).shards
        if logged:
            return part.with_finished(logged.values()).finished
        return _with_receipt(path, part, remote, "cannot merge part {}, run it again with overwrite=True").finished

    with DaemonThreads(_MOST_THREADS) as pool:
        logs = [*pool.map(load, range(1, count + 1))]
    finished: dict[str, ShardFacts] = {}
    missing: list[str] = []
    for number, log in enumerate(logs, 1):
        names = {shard.name for shard in select_part(plan, number, count)}
        found = {name: log[name] for name in names & log.keys()}
        if len(found) < len(names):
            missing.append(f"{number}/{count}")
        finished |= found
    if missing:
        several = f" (and {len(missing) - _MOST_NAMED} more)" if len(missing) > _MOST_NAMED else ""
        message = f"parts {', '.join(missing[:_MOST_NAMED])}{several} have not run, or have not finished"
        raise ConfigError(f"{message}: run them, again if need be", key="merge", value=missing)
    return {shard.name: finished[shard.name] for shard in plan}


def _check_unchanged(journal: Journal, shards: Sequence[Shard], remote: Remote | None, remedy: str) -> None:
    for shard in shards:
        if not is_same(journal.finished[shard.name], shard.path, remote):
            message = f"{shard.path} is missing, or has changed since it was finished: {remedy}"
            raise ConfigError(message, key="part", value=shard.path)


def _taken_error(taken: Sequence[str], resuming: str = "") -> ConfigError:
    several = f" (and {len(taken) - 1} more)" if len(taken) > 1 else ""
    message = f"{taken[0]} exists{several}: choose another name, or pass {resuming}overwrite=True to replace it"
    return ConfigError(message, key="overwrite", value=taken[0])


def _existing(plan: Sequence[Shard], remote: Remote | None) -> list[str]:
    if not is_url(plan[0].path):
        return [shard.path for shard in plan if os.path.exists(shard.path)]
    directory = parent(plan[0].path)
    names: set[str] = set()
    with suppress(SourceNotFoundError):
        names.update(storage_of(directory, remote).list(directory))  # one request, also for the versions
    return [shard.path for shard in plan if shard.name in names]


def replaceable(
    plan: Sequence[Shard], begun: Journal, remote: Remote | None, *, resume: bool, overwrite: bool
) -> set[str]:
    if overwrite or (resume and remote is None):
        return {shard.path for shard in plan}
    # Without a lock, another run may be writing missing files.
    known = {shard.path for shard in plan if shard.name in begun.finished}
    return known.union(_existing(plan, remote)) if resume else set()


def without_damaged(journal: Journal, plan: Sequence[Shard], notes: list[str], remote: Remote | None) -> Journal:
    """Return `journal` without the shards that have changed since they were finished, and note each."""
    intact = dict(journal.finished)
    for shard in plan:
        if shard.name in intact and not is_same(intact[shard.name], shard.path, remote):
            del intact[shard.name]
            notes.append(f"{shard.path} has changed since it was finished and was written again")
    return replace(journal, finished=intact)
