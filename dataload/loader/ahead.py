"""Tells a source which records the next steps read, so that it can fetch them before."""

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from dataload.loader.state import Cursor, EpochPlanners
from dataload.types import AheadReader, ReadsAhead, StepsAhead

_BLOCK_ROWS = 1 << 17  # many, because a pool has to be found again for each block


class ReadAhead:
    """The fetching for one loader, if `source` reads ahead and `here`, in this process.

    It does not refer to the loader, whose end stops it. `fields` are those that are read; None means all.
    """

    def __init__(self, source: Any, fields: Sequence[str] | None, *, here: bool) -> None:
        self._source = source if isinstance(source, ReadsAhead) else None
        self._fields = fields
        self._here = here
        self.reader: AheadReader | None = None

    def start(self, planners: EpochPlanners, start: Cursor, epochs: int | None) -> None:
        """Fetch what the steps from `start` read, up to epoch `epochs` or for ever."""
        self.stop()
        if self._source is not None:
            self.reader = self._source.read_ahead(steps_ahead(planners, start, epochs), self._fields, here=self._here)

    def stop(self) -> None:
        """Stop fetching. May be called twice."""
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()


def steps_ahead(planners: EpochPlanners, start: Cursor, epochs: int | None) -> Generator[StepsAhead]:
    """Yield the steps that a loader makes from `start`, in blocks; it ends like `StepDelivery`."""
    for epoch, planner, missing, steps in planners.epochs_from(start, epochs):
        size = max(1, _BLOCK_ROWS // planner.rows_per_step)
        blocks = [range(step, step + 1) for step in missing]
        blocks += [steps[first : first + size] for first in range(0, len(steps), size)]
        for block in blocks:
            rows = [plan.indices for plan in planner.plans(block, epoch=epoch)]
            yield StepsAhead(epoch, np.concatenate(rows), np.cumsum([len(indices) for indices in rows]), steps.stop)
