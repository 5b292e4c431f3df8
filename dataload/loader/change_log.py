"""The log of changes of weights: a JSON line for each, written before the change is made.

A line has the number of its change, and takes the place of an earlier change of this number and of all later ones: a
run that resumes may decide otherwise. Number 0 is the start of the run, and names its order.
"""

from __future__ import annotations

import json
import os
import platform
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from dataload._util.settings import check_directory
from dataload.errors import ConfigError, CorruptFileError, DataloadError, StateMismatchError, printable
from dataload.loader.state import MOST_SETTINGS, OrderIdentity
from dataload.samplers import Mixture
from dataload.samplers.mixture_changes import Change
from dataload.storage import absolute, is_url
from dataload.storage.local.files import append_text, read_text


class _Mark(NamedTuple):
    """Identifies a change."""

    number: int
    epoch: int
    position: int
    checksum: int  # of weights and counts


class ChangeLog:
    """The changes of weights in a file."""

    def __init__(self, path: str | os.PathLike[str], order: OrderIdentity) -> None:
        self._order = order
        self._ever: set[_Mark] = set()
        try:
            if is_url(os.fspath(path)):
                raise ValueError("nothing can be appended to a URL")
            self._path: str = absolute(os.fspath(path))  # the working directory may change
            check_directory(self._path, "changes")
            self._now: list[_Mark] = [mark for mark, _ in self._read()]
        except (OSError, TypeError, ValueError) as error:
            if isinstance(error, DataloadError):
                raise
            message = f"changes must be the path of a log of changes of weights, got {path!r}: {error}"
            raise ConfigError(message, key="changes", value=path) from error

    @property
    def is_new(self) -> bool:
        """Whether nothing has been written to the log yet."""
        return not self._now

    def changes(self) -> tuple[Change, ...]:
        """Return the changes of the run."""
        return tuple(Change.from_json(entry) for mark, entry in self._read() if mark.number)

    def check(self, changes: Sequence[Change]) -> None:
        """Refuse the changes in a state if they are not in the log; an empty log may begin with them."""
        for mark in map(_mark, changes if self._now else ()):
            if mark not in self._ever:
                raise StateMismatchError(
                    f"{self._path} is not the log of the run that saved this state: it lacks change {mark.number}, "
                    f"from position {mark.position} of epoch {mark.epoch} on; name that log, or a new file"
                )

    def follow(self, mixture: Mixture) -> None:
        """Append the changes of a mixture that the log does not have, in place of those that it has instead."""
        marks, known = [_mark(change) for change in mixture.changes], {*self._now}
        if self._now and self._now[-1] == (marks[-1] if marks else self._now[0]):  # counts depend on all before
            return
        # If all are known, the last one is written again, which ends those after it.
        first = next((n for n, mark in enumerate(marks) if mark not in known), max(0, len(marks) - 1))
        entries: list[dict[str, Any]] = []
        if not self._now or not marks:
            entries = [{"number": 0, "order": self._order.fingerprint, "settings": self._order.text}]
        names = mixture.names or [*map(str, range(len(mixture.samplers)))]
        for n, change in enumerate(mixture.changes[first:], first):
            before = mixture.changes[n - 1].weights.tolist() if n else [None] * len(names)
            rows = zip(names, change.weights.tolist(), before, strict=True)
            entries.append({**change.to_json(), "weights": {name: new for name, new, old in rows if new != old}})
        by = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "host": platform.node(), "pid": os.getpid()}
        append_text(self._path, "".join(json.dumps({**entry, **by}) + "\n" for entry in entries), sync=True)
        for entry in entries:
            self._put(self._now, _mark_of(entry))

    def _put(self, kept: list[_Mark], mark: _Mark) -> None:
        while kept and kept[-1].number >= mark.number:
            kept.pop()
        kept.append(mark)
        self._ever.add(mark)

    def _read(self) -> list[tuple[_Mark, dict[str, Any]]]:
        """Return the start and the changes that count; lines that were not written to their end do not."""
        kept, entries = list[_Mark](), dict[_Mark, dict[str, Any]]()
        text = ""
        with suppress(FileNotFoundError):
            text = read_text(self._path)
        for number, line in enumerate(text.splitlines(), 1):
            if (found := _parse(line)) is None:
                continue
            mark, entry = found
            if not mark.number and entry.get("order") != self._order.fingerprint:
                there = printable(str(entry.get("settings")), MOST_SETTINGS)
                raise ConfigError(
                    f"changes: {self._path} is the log of a run with another order: name another file\n"
                    f"  {there} in the log\n  {self._order.text} here",
                    key="changes",
                    value=self._path,
                )
            if kept and 0 < kept[-1].number < mark.number - 1:
                message = f"line {number} has change {mark.number} after change {kept[-1].number}: lines were lost"
                raise CorruptFileError(message, path=self._path)
            self._put(kept, mark)
            entries[mark] = entry
        return [(mark, entries[mark]) for mark in kept]


def _mark(change: Change) -> _Mark:
    return _mark_of(change.to_json())


def _mark_of(entry: Mapping[str, Any]) -> _Mark:
    if not entry["number"]:
        return _Mark(0, 0, 0, 0)
    content = zlib.crc32(str(entry.get("sources") or entry["components"]).encode())
    return _Mark(int(entry["number"]), int(entry["epoch"]), int(entry["position"]), content)


def _parse(line: str) -> tuple[_Mark, dict[str, Any]] | None:
    with suppress(ValueError, TypeError, KeyError):
        entry = json.loads(line)
        return _mark_of(entry), entry
    return None
