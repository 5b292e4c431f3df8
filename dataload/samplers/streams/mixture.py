"""Rows that continue beside rows from anywhere, in one batch. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from dataload._util.memo import Memo
from dataload.errors import ConfigError
from dataload.samplers import BatchPlan, BatchPlanner
from dataload.samplers._values import ArrayValue
from dataload.samplers.streams.cells import check_rows, join, plans_of
from dataload.samplers.streams.sampler import StreamSampler

__all__ = ["RowMixture"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowMixture(ArrayValue, BatchPlanner):
    """Batches with rows of several sorts: half that continue and half from anywhere, say.

    First come the rows of the first part, then those of the next, and so on; on several ranks each has as many of each
    part. The column ``is_stream``, (rows,) bool, tells which continue: all but those of ``mode="shuffled"``.

    An epoch is one of the first part. The others go on and on meanwhile, through all of their chunks before any comes
    again.

    Attributes:
        parts: Rows of one `chunk`; all but the first ``"shuffled"`` or ``"independent"``, and without `epoch_steps`.

    Raises:
        ConfigError: There are no such parts.

    Example:
        >>> from dataload.streams import RowMixture, StreamSampler
        >>> continuing = StreamSampler(sequence_lengths=[6, 6], rows=2)
        >>> mixture = RowMixture(parts=(continuing, StreamSampler(sequence_lengths=[6, 6], rows=2, mode="shuffled")))
        >>> mixture.plans(range(1), epoch=0)[0].columns["is_stream"].tolist()
        [True, True, False, False]
    """

    parts: tuple[StreamSampler, ...]
    _endless: Memo[tuple[StreamSampler, ...]] = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts: tuple[Any, ...] = tuple(self.parts)
        object.__setattr__(self, "parts", parts)
        if not parts or not all(isinstance(part, StreamSampler) for part in parts):
            raise ConfigError(f"parts must be one StreamSampler or more, got {parts!r}", key="parts", value=parts)
        for i, part in enumerate(parts[1:], 1):
            if part.mode not in ("shuffled", "independent") or part.epoch_steps is not None:
                raise ConfigError(
                    f"parts[{i}] must have mode='shuffled' or 'independent' and no epoch_steps, for its epochs are "
                    f"those of parts[0]; got {part!r}",
                    key="parts",
                    value=part,
                )
            if part.chunk != parts[0].chunk:
                raise ConfigError(
                    f"parts must have one chunk, got {parts[0].chunk} in parts[0] and {part.chunk} in parts[{i}]",
                    key="chunk",
                    value=part.chunk,
                )
            if not part.items(0) and parts[0].items(0):
                raise ConfigError(f"parts[{i}] has no chunk to serve: {part!r}", key="parts", value=part)
        BatchPlanner.__post_init__(self)

    def check_dealing(self) -> None:
        """See `BatchPlanner.check_dealing`."""
        BatchPlanner.check_dealing(self)
        for part in self.parts:
            check_rows(part.rows, self.world_size)
        check_rows(self.rows, self.world_size, self.origin)

    def __repr__(self) -> str:
        return f"RowMixture(parts={self.parts!r})"

    @property
    def rows(self) -> int:
        """Rows of all ranks together."""
        return sum(part.rows for part in self.parts)

    @property
    def order(self) -> Any:
        """The orders of the parts."""
        return type(self).__name__, *(part.order for part in self.parts)

    @property
    def records(self) -> int:
        """Indices are below this."""
        return max(part.records for part in self.parts)

    @property
    def items_per_step(self) -> int:
        """Rows of one rank."""
        return self.rows // self.world_size

    @property
    def rows_per_step(self) -> int:
        """Records per step of one rank."""
        return self.items_per_step * self.parts[0].chunk

    def items(self, epoch: int) -> int:
        """Rows of all steps of an epoch."""
        return self._whole()[0].steps(epoch) * self.rows

    def resume(self, position: int) -> tuple[Self, int]:
        """See `BatchPlanner.resume`. Where it is no step that this order has, its state is of another order."""
        return self.with_ranks(origin=0), position // self.rows

    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:
        """See `BatchPlanner.plans`."""
        first = self.origin // self.rows
        block = range(first + steps.start, first + steps.stop)
        rows = [np.arange(self.rank, part.rows, self.world_size) for part in self.parts]
        cells = [part.cells(mine, block, epoch=epoch) for part, mine in zip(self._whole(), rows, strict=True)]
        is_stream = np.repeat([part.mode != "shuffled" for part in self.parts], list(map(len, rows)))
        return plans_of(join(cells), steps, {"is_stream": is_stream})

    def _whole(self) -> tuple[StreamSampler, ...]:
        """The parts on all ranks together; all but the first with its epochs, and without an end."""
        whole = self._endless.recall(self.tail)
        if whole is None:
            first, *others = (part.with_ranks(rank=0, world_size=1, origin=0, tail=self.tail) for part in self.parts)
            steps = max(1, first.steps(0))
            whole = self._endless.keep(self.tail, (first, *(part.with_epoch(steps) for part in others)))
        return whole
