"""Batches that mix rows of several stream samplers. Pure (no I/O)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from dataload._util.caches import Memo
from dataload._util.settings import setting_error
from dataload.errors import ConfigError
from dataload.samplers.batch import BatchPlan, BatchPlanner
from dataload.samplers.common import ArrayValue, PerRecord, set_fields
from dataload.samplers.streams.sampler import Cells, StreamSampler, check_rows, plans_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowMixture(ArrayValue, PerRecord, BatchPlanner):
    """Batches that mix rows of several stream samplers, for example half continuing and half shuffled.

    The rows of the first part come first, then the next part's, and so on. Every rank has equally many rows of each
    part. The column ``is_stream``, (rows,) bool, is True for rows that continue: all except those of parts with
    ``mode="shuffled"``.

    The first part determines the epoch. The other parts continue endlessly across epochs; each serves all of its
    chunks before it repeats one.

    Attributes:
        parts: The stream samplers, with equal `chunk`. All but the first must have ``mode="shuffled"`` or
            ``"independent"`` and no `epoch_steps`.

    Raises:
        ConfigError: `parts` is empty, or a part is not a stream sampler or does not fit the first.

    Examples:
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
        set_fields(self, parts=parts)
        if not parts or not all(isinstance(part, StreamSampler) for part in parts):
            raise setting_error("parts", parts, "must hold at least one StreamSampler")
        for i, part in enumerate(parts[1:], 1):
            name = f"parts[{i}]"
            if part.mode not in ("shuffled", "independent") or part.epoch_steps is not None:
                rule = "mode='shuffled' or 'independent' and no epoch_steps, because parts[0] determines the epoch"
                raise setting_error(name, part, f"must have {rule}")
            if part.chunk != parts[0].chunk:
                raise setting_error(f"{name}.chunk", part.chunk, f"must equal that of parts[0], {parts[0].chunk}")
            if not part.items(0) and parts[0].items(0):
                raise ConfigError(f"{name} has no chunks to serve: {part!r}", key=name, value=part)
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
    def source_lengths(self) -> tuple[int, ...]:
        """See `source_lengths_of`; every part is for all records."""
        return (min(part.records for part in self.parts),)

    @property
    def rows(self) -> int:
        """Rows per step of all ranks together."""
        return sum(part.rows for part in self.parts)

    @property
    def order(self) -> Any:
        """The orders of the parts."""
        return type(self).__name__, *(part.order for part in self.parts)

    @property
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""
        return max(part.records for part in self.parts)

    @property
    def items_per_step(self) -> int:
        """Rows per step of one rank."""
        return self.rows // self.world_size

    @property
    def rows_per_step(self) -> int:
        """Records per step of one rank."""
        return self.items_per_step * self.parts[0].chunk

    def items(self, epoch: int) -> int:
        """Return the number of rows in all steps of an epoch."""
        return self._whole()[0].steps(epoch) * self.rows

    def resume(self, position: int) -> tuple[Self, int]:
        """See `BatchPlanner.resume`. Positions are multiples of `rows`, because steps cannot be divided."""
        return self.with_ranks(origin=0), position // self.rows

    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:
        """See `BatchPlanner.plans`."""
        first = self.origin // self.rows
        block = range(first + steps.start, first + steps.stop)
        rows = [np.arange(self.rank, part.rows, self.world_size) for part in self.parts]
        parts = [part.cells(mine, block, epoch=epoch) for part, mine in zip(self._whole(), rows, strict=True)]
        cells = Cells(*(np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)))
        is_stream = np.repeat([part.mode != "shuffled" for part in self.parts], list(map(len, rows)))
        return plans_of(cells, steps, {"is_stream": is_stream})

    def _whole(self) -> tuple[StreamSampler, ...]:
        """Return the parts for all ranks together; all but the first endless, with epochs as long as the first's."""
        whole = self._endless.recall(self.tail)
        if whole is None:
            first, *others = (part.with_ranks(rank=0, world_size=1, origin=0, tail=self.tail) for part in self.parts)
            steps = max(1, first.steps(0))
            whole = self._endless.keep(self.tail, (first, *(replace(part, epoch_steps=steps) for part in others)))
        return whole
