"""Arithmetic of paths. Pure (no I/O)."""

from __future__ import annotations

import os


def base_name(path: str) -> str:
    """Return the last part of a path, with or without a slash at its end."""
    return os.path.basename(os.path.normpath(path))


def parent(path: str) -> str:
    """Return the directory of a path, ``"."`` if it names none."""
    return os.path.dirname(path) or "."


def absolute(path: str) -> str:
    """Return the path from the root: the working directory may change."""
    return os.path.abspath(path)


def join(directory: str, name: str) -> str:
    """Return the path of `name` in `directory`."""
    return os.path.join(directory, name)
