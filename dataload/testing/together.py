"""Checks of several sources in one process: starting a process per source is most of what these checks cost."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dataload.testing.cases import Maker
from dataload.testing.checks.concurrency import fork_after_read, fork_before_read, new_process_reads

if TYPE_CHECKING:
    from dataload.testing.suite import SourceSuite

TOGETHER: Mapping[str, Callable[[Sequence[Maker]], None]] = {
    "check_new_process": new_process_reads,
    "check_fork_after_read": fork_after_read,
    "check_fork_before_read": fork_before_read,
}
"""Checks that `SourceSuite.processes_together` leaves to `check_together`, by name."""


def check_together(name: str, backends: Sequence["SourceSuite"], directory: Path) -> None:
    """Run one of the checks in `TOGETHER` on several backends. The error names the source that failed."""
    with contextlib.ExitStack() as stack:
        makers = [Maker(backend, directory / str(number)) for number, backend in enumerate(backends)]
        TOGETHER[name]([stack.enter_context(maker) for maker in makers])
