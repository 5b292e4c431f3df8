"""The files that dataload keeps beside data and in caches: list them and who holds them, and remove them."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from dataload.errors import DataloadError, SourceError, printable
from dataload.storage.backend import storage_of
from dataload.storage.errors import file_errors
from dataload.storage.local.atomic import remove, remove_leftovers
from dataload.storage.local.files import lock_file, read_text
from dataload.storage.local.folders import trusted_folder, user_directory
from dataload.storage.paths import base_name, is_url, join
from dataload.storage.remote.jobs import living, lock, opened
from dataload.storage.remote.settings import Remote

UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{8}-[0-9a-f]{12}\.tmp")
"""The name of the folder of an `AtomicFile`, and the name of the file in it."""

_PLACES = "places"
_LONGEST_HOLDER = 300


class KeptFile(NamedTuple):
    """A file or folder: its size in bytes, the time of its last use in seconds since 1970, and who holds it, if known.

    `is_own` is False for local files of other users.
    """

    path: str
    bytes: int
    used: float | None = None
    holder: str = ""
    is_own: bool = True


def list_kept(
    directory: str, wanted: Callable[[str], object] = lambda _: True, remote: Remote | None = None
) -> list[KeptFile]:
    """Return the files and folders in a directory whose names are `wanted`, by name; at a URL, only hidden ones."""
    if is_url(directory):
        storage = storage_of(directory, remote)
        paths = [path for path in storage.glob(join(glob.escape(directory), ".*")) if wanted(base_name(path))]
        return [KeptFile(path, storage.size(path)) for path in paths]
    found: list[KeptFile] = []
    with file_errors(directory), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, SourceError):
                if not wanted(entry.name) or entry.is_symlink():
                    continue
                status = entry.stat(follow_symlinks=False)
                is_folder = stat.S_ISDIR(status.st_mode)
                size = storage_of(entry.path).size(entry.path) if is_folder else status.st_size
                locked = UNFINISHED.fullmatch(entry.name) or entry.name.endswith(".lock")
                holder = _holder(entry.path, is_folder) if locked else ""
                own = status.st_uid == os.geteuid()
                found.append(KeptFile(entry.path, size, status.st_mtime, holder, own))
    return sorted(found)


def is_hidden(name: str) -> bool:
    """Return whether a name is that of a hidden file."""
    return name.startswith(".")


def _holder(path: str, is_folder: bool) -> str:
    with opened(path) as descriptor:
        if descriptor is None or lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB):
            return ""
    with suppress(OSError, ValueError):
        return "a process" if is_folder else printable(read_text(path, _LONGEST_HOLDER), _LONGEST_HOLDER, kept="")
    return "a process"


def list_living(directory: str) -> list[KeptFile]:
    """Return the files in a folder of a cache that processes hold as long as they live, and those of dead processes."""
    with suppress(SourceError):
        files = list_kept(directory)
        return [each._replace(holder=_holder(each.path, is_folder=True)) for each in files]
    return []


def remove_kept(kept: KeptFile, remote: Remote | None = None) -> bool:
    """Delete a file, or the folder of a writer or the lock of a process that has ended; return whether it is gone."""
    directory, name = os.path.split(kept.path)
    with suppress(OSError, DataloadError):
        if is_url(kept.path):
            storage_of(kept.path, remote).remove(kept.path)
        elif unfinished := UNFINISHED.fullmatch(name):
            remove_leftovers(os.path.join(directory, unfinished[1]))
        elif name.endswith(".lock"):
            with lock_file(kept.path, kept.path):
                pass
        else:
            remove(kept.path)
        return is_url(kept.path) or not os.path.lexists(kept.path)
    return False


def remove_dead(directory: str) -> None:
    """Delete the files in a folder of a cache that no living process holds."""
    living(directory)


def touch(path: str) -> None:
    """Note that a file is used now, if this user may."""
    with suppress(OSError):
        os.utime(path)


def note_place(directory: str) -> None:
    """Note in the user's cache that files are kept in a directory, for `noted_places`."""
    root = user_directory()
    with suppress(OSError, DataloadError):
        if root is not None:
            name = hashlib.blake2b(os.fsencode(directory), digest_size=10).hexdigest()
            path = os.path.join(trusted_folder(root, _PLACES), name)
            with open(path, "xb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as file:
                file.write(os.fsencode(directory))


def noted_places() -> dict[str, str]:
    """Return the directories that were noted, and the files that note them."""
    root, found = user_directory(), dict[str, str]()
    with suppress(OSError, DataloadError):
        if root is not None:
            for each in list_kept(trusted_folder(root, _PLACES, create=False)):
                found[os.fsdecode(storage_of(each.path).read(each.path))] = each.path
    return found
