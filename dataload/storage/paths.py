"""Path arithmetic. Pure (no I/O)."""

import os


def base_name(path: str) -> str:
    """Return the last component of a path, which may end in a slash."""
    return os.path.basename(os.path.normpath(path))


def parent(path: str) -> str:
    """Return the directory of a path; ``"."`` for a bare name."""
    return os.path.dirname(path) or "."


def absolute(path: str) -> str:
    """Return the absolute path, which stays valid if the working directory changes."""
    return os.path.abspath(path)


def join(directory: str, name: str) -> str:
    """Return the path of `name` in `directory`."""
    return os.path.join(directory, name)
