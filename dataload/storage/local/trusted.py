"""Folders and files of caches, trusted only if no other user could have written them."""

import os
import stat
import sys
from itertools import accumulate

from dataload.errors import ConfigError
from dataload.storage.errors import system_error


def user_directory() -> str | None:
    """Return the user's cache directory, which may not exist; None without a home directory."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(chosen):  # the specification says to ignore relative paths
        chosen = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return os.path.join(chosen, "dataload") if os.path.isabs(chosen) else None


def distrust(status: os.stat_result, *owners: int) -> str | None:
    """Return why a user other than this one, root and `owners` could have written a file or folder; else None."""
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "it is neither a file nor a folder"
    if status.st_uid not in {os.geteuid(), 0, *owners}:
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "all users may write to it"
    return f"its group {status.st_gid} may write to it" if status.st_mode & stat.S_IWGRP else None


def trusted_folder(root: str, *names: str, create: bool = True) -> str:
    """Return the folder ``root/names`` of a cache; ConfigError if another user could have written to any of them."""
    for path in accumulate((root, *names), os.path.join):
        try:
            if create:
                os.makedirs(path, 0o700, exist_ok=True)
            status = os.stat(path, follow_symlinks=path == root)
            if path == user_directory() and status.st_uid == os.geteuid() and status.st_mode & 0o022:
                os.chmod(path, 0o700)  # version 0.2 left its mode to the umask
                status = os.stat(path)
        except OSError as error:
            raise system_error("create the cache", root, error) from error
        if reason := distrust(status):
            raise ConfigError(
                f"{path} cannot be used as a cache, because {reason}: run `chmod go-w {path}` if no other user "
                "has written to it, or set remote.cache to a directory that only you can change",
                key="remote.cache",
                value=root,
            )
    return os.path.join(root, *names)


def discard_untrusted(path: str) -> str:
    """Delete a file that another user could have written, if it exists, and return its path."""
    if os.path.lexists(path) and distrust(os.lstat(path)):
        os.unlink(path)
    return path
