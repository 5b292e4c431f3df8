"""Arithmetic of paths and URLs. Pure (no I/O)."""

import glob
import os
import re
from urllib.parse import unquote

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


def is_url(path: str) -> bool:
    """Return whether `path` is a URL."""
    return _SCHEME.match(path) is not None


def local_path(path: str) -> str:
    """Return the path of a ``file://`` URL; anything else stays as it is."""
    if path[:7].lower() != "file://":
        return path
    host, slash, rest = path[7:].partition("/")
    return f"{slash}{unquote(rest)}" if host in ("", "localhost") else path


def base_name(path: str) -> str:
    """Return the last component of a path, which may end in a slash."""
    if is_url(path):
        return path.rstrip("/").rpartition("/")[2]
    return os.path.basename(os.path.normpath(path))


def parent(path: str) -> str:
    """Return the directory of a path; ``"."`` for a bare name."""
    if is_url(path):
        return path.rstrip("/").rpartition("/")[0]
    return os.path.dirname(path) or "."


def absolute(path: str) -> str:
    """Return the absolute path, which stays valid if the working directory changes."""
    return path if is_url(path) else os.path.abspath(path)


def join(directory: str, name: str) -> str:
    """Return the path of `name` in `directory`."""
    return f"{directory.rstrip('/')}/{name}" if is_url(directory) else os.path.join(directory, name)


def has_wildcards(path: str) -> bool:
    """Return whether `path` contains ``*``, ``?`` or ``[``."""
    return glob.has_magic(path)
