"""From the samples of all workers to the batch of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from dataload.collate import default_collate, in_chunks
from dataload.errors import ConfigError, WorkerError, message_of, traceback_of
from dataload.executors import worker_name
from dataload.streams.columns import Stacked, join, samples_of, spread
from dataload.streams.parts import Rows

__all__ = ["ADDED", "BatchMaker"]

ADDED = ("stream_id", "offset", "is_first", "valid")
"""Fields that each batch has beside those of its samples."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMaker:
    """Makes batches, in the consumer's thread.

    Attributes:
        rows: Rows of a batch.
        chunk: Items of a row.
        collate: Samples to a batch.
        transform: ``f(batch)``, or None.
    """

    rows: int
    chunk: int
    collate: Callable[..., Any]
    transform: Callable[[Any], Any] | None

    @property
    def joins(self) -> bool:
        """Whether workers stack their samples, and this only joins what comes of it."""
        return self.collate is default_collate

    def __call__(self, stacked: Sequence[Stacked], rows: Rows, *, epoch: int, step: int) -> Any:
        """The batch of a step.

        Args:
            stacked: The samples of each worker.
            rows: What is known of all rows.
            epoch: For messages.
            step: For messages.

        Raises:
            ConfigError: The samples have a field that is added to batches.
            WorkerError: `collate` or `transform` failed.
        """
        valid = rows.valid.ravel()

        def collated() -> Any:
            return join(stacked, valid) if self.joins else self.collate(spread(samples_of(stacked), valid))

        data = _do("collate", collated, epoch, step)
        if self.chunk > 1:
            data = in_chunks(data, self.rows, self.chunk, strict=False)  # a collate may make anything
        batch: dict[str, Any] = {**cast("Mapping[str, Any]", data)} if isinstance(data, Mapping) else {"data": data}
        if taken := [name for name in ADDED if name in batch]:
            raise ConfigError(
                f"samples have a field {taken[0]!r}, and batches get one of that name: rename it in make_stream",
                key=taken[0],
            )
        first, valid = (flags if self.chunk > 1 else flags[:, 0] for flags in (rows.is_first, rows.valid))
        batch.update(zip(ADDED, (rows.stream_id, rows.offset, first, valid), strict=True))
        transform = self.transform
        return batch if transform is None else _do("batch_transform", lambda: transform(batch), epoch, step)


def _do(stage: str, work: Callable[[], T], epoch: int, step: int) -> T:
    try:
        return work()
    except Exception as error:
        raise WorkerError(
            f"step {step} of epoch {epoch} failed in {stage}: {message_of(error)}",
            step=step,
            epoch=epoch,
            worker=worker_name(),
            traceback_text=traceback_of(error),
        ) from error
