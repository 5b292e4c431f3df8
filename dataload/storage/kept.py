"""The files that dataload keeps beside data and in caches: list them and who holds them, and remove them."""

import glob
import hashlib
import json
import os
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from dataload._util.system import IS_POSIX, LOCK_EX, LOCK_NB
from dataload.errors import DataloadError, SourceNotFoundError, printable
from dataload.storage.backend import storage_of
from dataload.storage.errors import file_errors
from dataload.storage.local.atomic import remove_leftovers
from dataload.storage.local.files import lock_file, read_text
from dataload.storage.local.folders import trusted_folder, user_directory
from dataload.storage.paths import base_name, is_url, join
from dataload.storage.remote.jobs import describe_claim, lock, opened
from dataload.storage.remote.settings import Remote

UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{8}-[0-9a-f]+\.tmp")
"""The name of the folder of an `AtomicFile`, and the name of the file in it."""

_PLACES = "places"
_LONGEST_HOLDER = 300


class Kept(NamedTuple):
    """A file or folder that dataload keeps; if `holder`, a process, is "", it may be deleted by the command `removal`.

    `name` names the data to which it belongs, `used` the time of its last use in seconds since 1970, None at URLs.
    """

    path: str
    bytes: int
    used: float | None = None
    holder: str = ""
    kind: str = ""
    name: str = ""
    removal: str = "prune"  # or "all", or "never"


def list_kept(
    directory: str, wanted: Callable[[str], Any] = bool, remote: Remote | None = None, *, living: bool = False
) -> list[Kept]:
    """Return the files and folders whose names are `wanted`, at a URL only hidden ones; none of a missing directory.

    Locks and folders of writers are held as long as a process lives, `living` files as well.
    """
    found: list[Kept] = []
    if is_url(directory):
        storage = storage_of(directory, remote)
        for path in storage.glob(join(glob.escape(directory), ".*")):
            with suppress(SourceNotFoundError):  # some stores list folders that are empty
                if wanted(base_name(path)):
                    found.append(Kept(path, storage.size(path), holder=_claimed_by(path, remote)))
        return found
    with suppress(SourceNotFoundError), file_errors(directory), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, SourceNotFoundError):
                if wanted(entry.name) and not entry.is_symlink():
                    status = entry.stat()
                    size = storage_of(entry.path).size(entry.path) if entry.is_dir() else status.st_size
                    held = living or entry.name.endswith(".lock") or UNFINISHED.fullmatch(entry.name)
                    found.append(Kept(entry.path, size, status.st_mtime, _holder(entry.path) if held else ""))
    return sorted(found)


def _holder(path: str) -> str:
    """Return who holds the lock of a file or folder, "" if it is free."""
    with opened(path) as descriptor:
        if descriptor is None or lock(descriptor, LOCK_EX | LOCK_NB):
            return ""
    with suppress(OSError, ValueError):
        told = read_text(path, _LONGEST_HOLDER) if path.endswith(".lock") else describe_claim(path)
        return printable(told, _LONGEST_HOLDER, kept="") or "a process"
    return "a process"


def _claimed_by(path: str, remote: Remote | None) -> str:
    """Return who writes the log of a job at a URL, unless that was a process of this machine that has ended."""
    with suppress(DataloadError, ValueError, LookupError, TypeError, OverflowError, ProcessLookupError):
        claim: Any = json.loads((storage_of(path, remote).load(join(path, "claim")) or (b"", None))[0])
        with suppress(PermissionError):
            if IS_POSIX and claim["host"] == platform.node():
                os.kill(int(claim["pid"]), 0)
        return printable(f"process {claim['pid']} on {claim['host']}", _LONGEST_HOLDER, kept="")
    return ""


def remove_kept(kept: Kept, remote: Remote | None = None) -> bool:
    """Delete a file, or the folder of a writer or the lock of a process that has ended; return whether it is gone."""
    directory, name = os.path.split(kept.path)
    with suppress(OSError, DataloadError):
        if is_url(kept.path):
            storage_of(kept.path, remote).remove(kept.path)
            return True
        if unfinished := UNFINISHED.fullmatch(name):
            remove_leftovers(os.path.join(directory, unfinished[1]))
        elif name.endswith(".lock"):
            with lock_file(kept.path, kept.path):
                pass
        elif not kept.holder:
            os.unlink(kept.path)
    return not is_url(kept.path) and not os.path.lexists(kept.path)


def touch(path: str) -> None:
    """Note that a file is used now, if this user may."""
    with suppress(OSError):
        os.utime(path)


def note_place(directory: str) -> None:
    """Note in the user's cache that files are kept in a directory, for `noted_places`."""
    root = None if os.environ.get("DATALOAD_CACHE") == "0" else user_directory()
    with suppress(OSError, DataloadError):
        if root is not None:
            name = hashlib.blake2b(os.fsencode(directory), digest_size=10).hexdigest()
            with open(os.path.join(trusted_folder(root, _PLACES), name), "xb") as file:
                file.write(os.fsencode(directory))


def noted_places() -> list[str]:
    """Return the directories that were noted and exist."""
    root = user_directory()
    with suppress(OSError, DataloadError):
        noted = [] if root is None else list_kept(trusted_folder(root, _PLACES, create=False))
        return sorted(filter(os.path.isdir, (os.fsdecode(storage_of(each.path).read(each.path)) for each in noted)))
    return []
