"""The log of a job: a line for each finished shard, from which an interrupted job resumes.

A line is the CRC-32 of its JSON in 8 hexadecimal digits, a space, and the JSON. The first one names the job's run and
plan; a log of another run or plan does not count. Damaged lines are dropped, so their shards are done again. The last
line of a shard wins.

A local log is a file. Object stores cannot append, so a log there is a folder of segments, objects of some lines each,
and a claim, which lists the writers whose segments count. A writer replaces the claim under a condition before each
segment, so one that lives on after another has resumed its job fails.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import secrets
import threading
import zlib
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from dataload._util.threads import DaemonThreads
from dataload.catalog.checks import as_content, check_name, is_count
from dataload.catalog.evidence import MOST_THREADS
from dataload.catalog.facts import Evidence, Measures, ShardFacts
from dataload.catalog.statistics import FieldStatistics
from dataload.codecs.npz import build_npy, parse_npy
from dataload.errors import ConfigError, CorruptFileError, SourceError, SourceNotFoundError, printable
from dataload.storage import Remote, is_url, join, parent, storage_of
from dataload.storage.kept import note_place
from dataload.storage.local.files import AppendedFile
from dataload.storage.paths import absolute

_VERSION = 1
_MOST_LINES = 64  # of a segment
_MOST_BYTES = 8 << 20
_SECONDS = 2.0  # from the first line of a segment to its end
_LOCAL_SECONDS = 0.1  # after a block of lines, the next shard is noted at once
_MOST_TRIES = 10
_LONGEST_HOLDER = 300
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_INVALID = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


class Logged(NamedTuple):
    """The facts in a log, by name and key of the shard, and the number of damaged lines."""

    shards: Mapping[tuple[str, str], ShardFacts]
    damaged: int = 0


class Job(NamedTuple):
    """A run of a job, a random text, and a hash of its plan."""

    run: str
    plan: str


class LocalLog:
    """A log in a file. Several threads may note facts."""

    def __init__(self, path: str, most: int) -> None:
        self.path: str = path
        self._most = most
        self._file: AppendedFile | None = None
        self._lines: list[bytes] = []
        self._lock, self._written = threading.Lock(), 0.0

    def load(self, job: Job) -> Logged:
        """Return what was noted for a job."""
        with suppress(SourceNotFoundError):
            return parse_log(storage_of(self.path).read(self.path), job)
        return Logged({})

    def begin(self, job: Job, known: Mapping[tuple[str, str], ShardFacts], *, anew: bool) -> None:  # noqa: ARG002 - this is a new file
        """Open the log for a job, with what is `known` of it; `anew` drops what earlier writers have noted."""
        data = b"".join([header_line(job), *(shard_line(facts, key) for (_, key), facts in known.items())])
        storage_of(self.path).replace(self.path, data, None)
        self._file = AppendedFile(self.path)
        note_place(parent(absolute(self.path)))

    def note(self, facts: ShardFacts, key: str = "") -> None:
        """Add facts; a SourceError if another process has taken over."""
        line = shard_line(facts, key)
        with self._lock:
            self._lines.append(line)
            if len(self._lines) >= self._most or monotonic() - self._written > _LOCAL_SECONDS:
                self._write()

    def _write(self) -> None:
        assert self._file is not None, "it is begun first"
        data = b"".join(self._lines)
        self._lines.clear()
        if data:
            self._file.write(data)
        self._written = monotonic()

    def close(self) -> None:
        """Complete what was noted."""
        if (file := self._file) is not None:
            try:
                self._write()
            finally:
                self._file = None
                file.close()

    def is_ours(self) -> bool:
        """Return whether no other process has taken over since `begin`."""
        return self._file is not None and self._file.is_current()

    def remove(self) -> None:
        self._lines.clear()
        self.close()
        storage_of(self.path).remove(self.path)


class RemoteLog:
    """A log in a folder of an object store, with the methods of `LocalLog`."""

    def __init__(self, path: str, remote: Remote | None, most: int) -> None:
        self.path: str = path
        self._most = most
        self._storage, self._claim = storage_of(path, remote), join(path, "claim")
        self._writer, self._segments = secrets.token_hex(8), 0
        self._job = Job("", "")
        self._writers: list[str] = []  # whose segments count
        self._version: Any = None
        self._lines: list[bytes] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._late: SourceError | None = None  # from the timer

    def load(self, job: Job) -> Logged:
        found = self._storage.load(self._claim)
        self._version = None if found is None else found[1]
        self._job, self._writers = job, list[str]()
        with suppress(*_INVALID):
            claimed = {} if found is None else json.loads(found[0])
            self._writers = [str(each) for each in claimed["writers"] if (claimed["run"], claimed["plan"]) == job]
        names = self._storage.list(self.path) if self._writers else []
        order = {writer: number for number, writer in enumerate(self._writers)}
        segments = sorted((order[w], name) for name in names if (w := name.partition("-")[0]) in order)
        with DaemonThreads(MOST_THREADS) as pool:
            contents = [*pool.map(self._storage.load, [join(self.path, name) for _, name in segments])]
        parts = [parse_log(content[0], job) for content in contents if content is not None]
        return Logged(
            {key: facts for each in parts for key, facts in each.shards.items()}, sum(p.damaged for p in parts)
        )

    def begin(self, job: Job, known: Mapping[tuple[str, str], ShardFacts], *, anew: bool) -> None:  # noqa: ARG002 - segments have it
        if anew or self._job != job:
            self.load(job)  # for the version of the claim
        for _ in range(_MOST_TRIES):
            before = self._writers
            self._writers = [*(() if anew else before), self._writer]
            if self._offer():
                return
            self.load(job)
            if self._writers != before and not anew:
                break  # another one has resumed at the same time; before, the one that lived on has sealed a segment
        raise self._taken_over()

    def note(self, facts: ShardFacts, key: str = "") -> None:
        with self._lock:
            if self._late is not None:
                raise self._late
            self._lines.append(shard_line(facts, key))
            if len(self._lines) >= self._most or sum(map(len, self._lines)) >= _MOST_BYTES:
                self._seal()
            elif self._timer is None:
                self._timer = threading.Timer(_SECONDS, self._seal_late)
                self._timer.daemon = True
                self._timer.start()

    def _seal_late(self) -> None:
        with self._lock:
            try:
                self._seal()
            except SourceError as error:
                self._late = error

    def _seal(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._lines:
            return
        if not self._offer():
            raise self._taken_over()
        path = join(self.path, f"{self._writer}-{self._segments:05d}")
        self._storage.replace(path, b"".join([header_line(self._job), *self._lines]), None)
        self._segments += 1
        self._lines.clear()

    def _offer(self) -> bool:
        """Replace the claim; return False if another process has."""
        claim = {**self._job._asdict(), "writers": self._writers, "host": platform.node(), "pid": os.getpid()}
        try:
            self._version = self._storage.replace(self._claim, json.dumps(claim).encode(), self._version)
        except FileExistsError:
            return False
        return True

    def _taken_over(self) -> SourceError:
        message = f"another process{self._holder()} has taken over {self.path}: wait until it has ended"
        return SourceError(message, path=self.path)

    def _holder(self) -> str:
        with suppress(*_INVALID, SourceError):
            data, _ = self._storage.load(self._claim) or (b"", None)
            claimed = json.loads(data)
            return printable(f" (process {claimed['pid']} on {claimed['host']})", _LONGEST_HOLDER)
        return ""

    def close(self) -> None:
        with self._lock:
            if self._late is not None:
                raise self._late
            self._seal()

    def is_ours(self) -> bool:
        found = self._storage.load(self._claim)
        return found is not None and found[1] == self._version

    def remove(self) -> None:
        self._storage.remove(self.path)


def log_of(path: str, remote: Remote | None = None, *, at_once: bool = False) -> LocalLog | RemoteLog:
    """Return the log at a path or URL; with `at_once`, each line is written by itself."""
    most = 1 if at_once else _MOST_LINES
    return RemoteLog(path, remote, most) if is_url(path) else LocalLog(path, most)


def header_line(job: Job) -> bytes:
    """Return the first line of a log or segment."""
    return _line({"log": _VERSION, **job._asdict()})


def shard_line(facts: ShardFacts, key: str) -> bytes:
    """Return the line of a shard; what is unknown takes no room."""
    found: dict[str, Any] = {"shard": facts.name, "bytes": facts.bytes, "records": facts.records, "key": key}
    found |= {"sha256": facts.sha256, "content": facts.content, "skipped": facts.skipped, **facts.evidence._asdict()}
    if facts.measures is not None:
        found["measures"] = {name: each.to_json() for name, each in facts.measures.fields.items()}
        lengths = facts.measures.lengths.items()
        found["lengths"] = {name: base64.b64encode(build_npy(each)).decode() for name, each in lengths}
    return _line({name: value for name, value in found.items() if value or name in ("bytes", "records", "measures")})


def _line(value: Mapping[str, Any]) -> bytes:
    text = _ENCODER.encode(value).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def parse_log(data: bytes, job: Job) -> Logged:
    """Return what a log or segment of `job` notes; nothing if it is another's."""
    shards: dict[tuple[str, str], ShardFacts] = {}
    *lines, torn = data.split(b"\n")
    header, damaged = None, len(torn[:1])
    for line in lines:
        try:
            value = _parse_line(line)
            if header is None:
                header = value
                if (value["log"], value["run"], value["plan"]) != (_VERSION, *job):
                    return Logged({})
            else:
                shards[value["shard"], value.get("key", "")] = _parse_shard(value)
        except (*_INVALID, ConfigError, CorruptFileError):
            damaged += 1
            if header is None:
                break
    return Logged(shards, damaged)


def _parse_line(line: bytes) -> dict[str, Any]:
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        raise ValueError("the checksum differs")
    return json.loads(text)


def _parse_shard(value: dict[str, Any]) -> ShardFacts:
    counts = [value["bytes"], value["records"], value.get("skipped", 0), value.get("mtime_ns", 0)]
    texts = [value[name] for name in ("key", "sha256", "etag") if name in value]
    if not all(map(is_count, counts)) or {*map(type, texts)} - {str}:
        raise ValueError("not facts about a shard")
    check_name(value["shard"], "shard")
    size, records, skipped, mtime_ns = counts
    content = as_content(value["content"]) if "content" in value else None
    measures = _parse_measures(records, value) if "measures" in value else None
    evidence = Evidence(mtime_ns, value.get("etag"))
    return ShardFacts(value["shard"], size, records, value.get("sha256"), content, evidence, skipped, measures)


def _parse_measures(records: int, value: Mapping[str, Any]) -> Measures:
    lengths = {name: parse_npy(base64.b64decode(text)) for name, text in value.get("lengths", {}).items()}
    if any(each.shape != (records,) or each.dtype.kind != "u" for each in lengths.values()):
        raise ValueError("lengths have one unsigned integer for each record")
    return Measures({name: FieldStatistics.parse(each, name) for name, each in value["measures"].items()}, lengths)
