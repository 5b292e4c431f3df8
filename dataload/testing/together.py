"""Checks of several sources in one process, because starting a process per source dominates their cost."""

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
"""Names of the checks that `SourceSuite.processes_together` leaves to `check_together`."""


def check_together(name: str, backends: Sequence["SourceSuite"], directory: Path) -> None:
    """Run a check in `TOGETHER` on several backends. The error names the failing source."""
    with contextlib.ExitStack() as stack:
        makers = [Maker(backend, directory / str(number)) for number, backend in enumerate(backends)]
        TOGETHER[name]([stack.enter_context(maker) for maker in makers])
