"""The logs of an index: one of each run, or of each partition until they are merged."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from dataload._util.fingerprint import digest
from dataload._util.threads import DaemonThreads
from dataload.catalog.facts import ShardFacts
from dataload.catalog.ledger import Job, Logged, log_of
from dataload.catalog.manifest import MANIFEST_NAME, Manifest
from dataload.catalog.store import read_manifest, remove_lengths
from dataload.convert.index_plan import PlannedSet, select_planned
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.storage import Remote, base_name, is_url, join, storage_of
from dataload.storage.local.folders import discard_untrusted
from dataload.storage.remote.settings import node_folder

JOB = Job("", "")
"""The job of each of these logs: the key of a line says what its facts depend on, so any run may use them."""

_START = f".{MANIFEST_NAME}.index"
_NAME = re.compile(rf"{re.escape(_START)}\.(\d+)-of-(\d+)\.log")
_RECEIPT = re.compile(rf"\.{re.escape(MANIFEST_NAME)}\.\d+-of-\d+")  # of version 0.2
_MOST_THREADS = 8
_MOST_NAMED = 8


def log_path(directory: str, remote: Remote, part: tuple[int, int] | None) -> str:
    """Return the path of a log: beside the shards, or of a whole index at a URL in the node's cache."""
    if part is not None:
        return join(directory, f"{_START}.{part[0]}-of-{part[1]}.log")
    if not is_url(directory):
        return join(directory, f"{_START}.log")
    folder = node_folder(remote, "indexing")
    if folder is None:
        raise ConfigError("the home directory cannot keep a log: set remote.cache", key="remote.cache")
    return discard_untrusted(os.path.join(folder, f"{digest(directory)}.log"))


@dataclass(frozen=True, slots=True)
class IndexLogs:
    """The logs of all `count` partitions of an index, by number."""

    directory: str
    remote: Remote
    count: int
    paths: Mapping[int, str]

    @classmethod
    def find(cls, directory: str, remote: Remote) -> Self:
        names = [base_name(path) for path in _glob(directory, f"{_START}.*-of-*.log", remote)]
        found = {(int(match[1]), int(match[2])): match[0] for name in names if (match := _NAME.fullmatch(name))}
        counts = sorted({count for _, count in found})
        whole = log_path(directory, remote, None)
        if not counts and storage_of(whole).exists(whole):  # of a merge that was killed
            counts = [1]
        if not counts:
            raise SourceNotFoundError(f"no part of an index of {directory} has run: run the parts", path=directory)
        if len(counts) > 1:
            message = f"{directory} has logs of {' and of '.join(map(str, counts))} parts: delete those that are wrong"
            raise ConfigError(f"{message} ({_START}.*)", key="merge", value=directory)
        return cls(directory, remote, counts[0], {number: join(directory, name) for (number, _), name in found.items()})

    def load(self, planned: Sequence[PlannedSet]) -> dict[tuple[str, str], ShardFacts]:
        """Return the facts in all logs by name and key; a ConfigError if a shard is in none."""
        with DaemonThreads(_MOST_THREADS) as pool:
            logs = [*pool.map(self._load, (log_path(self.directory, self.remote, None), *self.paths.values()))]
        known = {key: facts for log in logs for key, facts in log.shards.items()}
        missing = [
            f"{number}/{self.count}"
            for number in range(1, self.count + 1)
            for own in [select_planned(planned, number, self.count)]
            if any((name, each.key) not in known for each in own for name in each.names)
        ]
        if missing:
            several = f" (and {len(missing) - _MOST_NAMED} more)" if len(missing) > _MOST_NAMED else ""
            message = f"parts {', '.join(missing[:_MOST_NAMED])}{several} have not finished with these shards and"
            raise ConfigError(f"{message} options: run them, again if need be", key="merge", value=missing)
        return known

    def _load(self, path: str) -> Logged:
        return log_of(path, self.remote).load(JOB)

    def changed_error(self, planned: PlannedSet, path: str) -> ShardFacts:
        """Raise the error about a shard that is not what its part has indexed."""
        message = f"cannot merge, because {path} has changed since it was indexed: run its part again"
        raise ConfigError(message, key="merge", value=planned.pattern)

    def remove(self, known: Mapping[tuple[str, str], ShardFacts]) -> None:
        """Delete the logs; that of the whole has what is `known` meanwhile, so that a killed merge can be repeated."""
        whole = log_of(log_path(self.directory, self.remote, None))
        whole.begin(JOB, known, anew=True)
        for path in self.paths.values():
            log_of(path, self.remote).remove()
        whole.remove()


def remove_old(directory: str, remote: Remote) -> None:
    """Remove what version 0.2 keeps of indexes that it has not finished, and lengths that only its receipts name."""
    for path in _glob(directory, f".{MANIFEST_NAME}.*", remote):
        name, storage = base_name(path), storage_of(directory, remote)
        if _RECEIPT.fullmatch(name) and (found := storage.load(join(directory, name))) is not None:
            with suppress(CorruptFileError):
                kept = read_manifest(directory, remote) or Manifest()
                remove_lengths(directory, Manifest.parse(found[0], path), kept, remote)
        if _RECEIPT.fullmatch(name) or re.fullmatch(rf"{re.escape(_START)}(\.\d+-\d+)?", name):
            storage.remove(join(directory, name))


def _glob(directory: str, pattern: str, remote: Remote) -> Sequence[str]:
    return storage_of(directory, remote).glob(join(glob.escape(directory), pattern))
