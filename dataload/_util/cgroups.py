"""The control groups of Linux that this process is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

__all__ = ["ControlGroup", "control_groups"]


class ControlGroup(NamedTuple):
    """One group.

    Attributes:
        directory: Where its files are. In a container it may not be there to see.
        version: 1 or 2, which name their files differently.
    """

    directory: Path
    version: int


def control_groups(controller: str, *, membership: Path, root: Path) -> Iterator[ControlGroup]:
    """The groups in which `controller` may limit this process, each before those around it, whose limits count, too.

    Args:
        controller: What is limited: ``"cpu"``, ``"memory"``.
        membership: The file that names the groups, of both versions. Where it cannot be read there are none.
        root: Where they are mounted.
    """
    try:
        lines = membership.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = os.fsdecode(line).split(":", 2)
        if not controllers:
            mount, version = root, 2
        elif controller in controllers.split(","):
            # Several controllers in one hierarchy have a directory together, and mostly a link for each.
            together = root / controllers
            mount, version = together if together.is_dir() else root / controller, 1
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            yield ControlGroup(mount / group, version)
