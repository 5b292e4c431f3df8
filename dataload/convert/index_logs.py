"""The logs of an index: one of each run, or of each partition until they are merged."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from contextlib import suppress

from dataload._util.fingerprint import digest
from dataload._util.threads import DaemonThreads
from dataload.catalog.evidence import MOST_THREADS
from dataload.catalog.ledger import Job, log_of
from dataload.catalog.manifest import MANIFEST_NAME, Manifest
from dataload.catalog.store import read_manifest, remove_lengths
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.jobs.engine import select_part
from dataload.jobs.run import Facts, Key, Ledger, Mode
from dataload.storage import Remote, base_name, is_url, join, storage_of
from dataload.storage.local.folders import discard_untrusted
from dataload.storage.remote.settings import node_folder

_JOB = Job("", "")  # any run may use the lines of any other

_START = f".{MANIFEST_NAME}.index"
_NAME = re.compile(rf"{re.escape(_START)}\.(\d+)-of-(\d+)\.log")
_RECEIPT = re.compile(rf"\.{re.escape(MANIFEST_NAME)}\.\d+-of-\d+")  # of version 0.2
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


class IndexLedger(Ledger):
    """The log of an index, or of one part of it. There is no journal: the key of a line decides its facts."""

    again = "finished shards are kept: run it again to continue"

    def __init__(self, directory: str, remote: Remote, keys: Sequence[Key], mode: Mode, parts: int) -> None:
        self.path: str = log_path(directory, remote, mode.part)
        super().__init__(log_of(self.path, remote), parts)
        self._directory, self._remote, self._keys = directory, remote, keys
        self._parts: Sequence[str] = ()  # the logs of parts that were joined
        self._merges = mode.merge or parts > 0
        if mode.merge:
            self.changed: str = "run its part again"
            self.known: Facts = self.join()
        else:
            self.known = self.log.load(_JOB).shards

    def start(self, facts: Facts, *, in_parts: bool) -> None:  # noqa: ARG002 - other keys stay, too
        if not in_parts:
            self.log.begin(_JOB, self.known, anew=False)

    def discard(self) -> None:
        if not self.parts and not self.known:
            self.log.remove()

    def join(self) -> Facts:
        """Return the facts in all logs; a ConfigError if a shard is in none."""
        directory = self._directory
        names = [base_name(path) for path in _glob(directory, f"{_START}.*-of-*.log", self._remote)]
        counts = sorted({int(match[2]) for name in names if (match := _NAME.fullmatch(name))})
        if not counts and storage_of(self.path).exists(self.path):  # of a merge that was killed
            counts = [1]
        if not counts:
            raise SourceNotFoundError(f"no part of an index of {directory} has run: run the parts", path=directory)
        if len(counts) > 1:
            message = f"{directory} has logs of {' and of '.join(map(str, counts))} parts: delete those that are wrong"
            raise ConfigError(f"{message} ({_START}.*)", key="merge", value=directory)
        self._parts = [join(directory, name) for name in names if _NAME.fullmatch(name)]
        with DaemonThreads(MOST_THREADS) as pool:
            logs = [*pool.map(self._load, (self.path, *self._parts))]
        known = {key: facts for log in logs for key, facts in log.items()}
        count = counts[0]
        missing = [f"{n}/{count}" for n in range(1, count + 1) if {*select_part(self._keys, n, count)} - known.keys()]
        if missing:
            several = f" (and {len(missing) - _MOST_NAMED} more)" if len(missing) > _MOST_NAMED else ""
            message = f"parts {', '.join(missing[:_MOST_NAMED])}{several} have not finished with these shards and"
            raise ConfigError(f"{message} options: run them, again if need be", key="merge", value=missing)
        return known

    def _load(self, path: str) -> Facts:
        return log_of(path, self._remote).load(_JOB).shards

    def clear(self, facts: Facts) -> None:
        """Delete the logs; after a merge, the log with all facts stays until the lock is released."""
        if not self._merges:
            self.log.remove()
            return
        self.log.begin(_JOB, facts, anew=True)
        for path in self._parts:
            log_of(path, self._remote).remove()

    def end(self) -> None:
        """Delete the log that a merge has left, without the lock: it may run again until its last operation."""
        if self._merges and self.is_ours():
            self.log.remove()


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
