"""Shards of a cache compared with their recorded lengths and hashes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from dataclasses import dataclass
from typing import Any, Literal, cast

from dataload.storage.local.living import is_at, lock, opened
from dataload.storage.remote.cache import CachedFile

_NAME = re.compile(r"[^~]*~[0-9a-f]{20}~(\d+)(?:~([0-9a-f]{32}))?")


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of comparing a shard with what is known about it.

    Attributes:
        path: Its file.
        by: The evidence: "sha256", "md5" or "length"; None if the name of the file tells nothing.
        problem: The difference; None if there is none.
    """

    path: str
    by: Literal["sha256", "md5", "length"] | None
    problem: str | None = None


def check_shard(file: CachedFile, sha256: str | None = None, *, md5: bool = True) -> Checked | None:
    """Compare a shard with its recorded length, and with a hash if one is known; None if it has gone meanwhile.

    Args:
        file: The shard.
        sha256: Its SHA-256, if known; used in place of the MD5.
        md5: Whether to compare with the MD5 in its name. The ETags of encrypted objects may only look like one.
    """
    with opened(file.path) as descriptor:
        # The lease keeps it from being evicted, but tells nobody that the shard is in use.
        if descriptor is None or not lock(descriptor, fcntl.LOCK_SH) or not is_at(descriptor, file.path):
            return None
        named = _NAME.fullmatch(file.name)
        if named is None:
            return Checked(file.path, None)
        size = os.fstat(descriptor).st_size
        if size != int(named[1]):
            return Checked(file.path, "length", f"it has {size} bytes, and the object has {named[1]}")
        by, expected = ("sha256", sha256) if sha256 else ("md5", named[2] if md5 else None)
        if expected is None:
            return Checked(file.path, "length")
        found = _digest(descriptor, by)
        differs = f"its {by.upper()} is {found}, and that of the object is {expected}"
        return Checked(file.path, cast("Any", by), None if found == expected else differs)


def _digest(descriptor: int, algorithm: str) -> str:
    with open(descriptor, "rb", closefd=False) as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
