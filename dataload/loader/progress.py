"""Where a consumer stands. Pure (no I/O)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cursor", "EpochIteration", "Progress"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """What the consumer has received: all epochs before `epoch`, and of it the steps below `step` but those `missing`.

    Steps are missing only where they come as they are made. They are no more than were in flight, so this stays small
    however far others run ahead of a slow one.
    """

    epoch: int
    step: int
    missing: frozenset[int] = frozenset()

    @property
    def begun(self) -> bool:
        """Whether anything of the epoch was received."""
        return self.step > 0

    @property
    def received(self) -> int:
        """Steps of the epoch that were received."""
        return self.step - len(self.missing)

    @property
    def first(self) -> int:
        """The first step that was not received."""
        return min(self.missing, default=self.step)

    def after(self, step: int, steps: int) -> Cursor:
        """With another step received, of so many in the epoch."""
        missing, reached = self.missing, self.step
        if step < reached:
            missing -= {step}
        else:
            if step > reached:
                missing |= set(range(reached, step))
            reached = step + 1
        return Cursor(self.epoch, reached, missing) if missing or reached < steps else Cursor(self.epoch + 1, 0)


@dataclass(slots=True, eq=False)
class EpochIteration:
    """One iteration of a loader: its epoch, the steps of it that were received, and how many it has."""

    epoch: int
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a loader is.

    Attributes:
        epoch: Number of the epoch.
        epochs: How many there will be, if that was said.
        step: Steps of it that the consumer has received.
        steps: Steps of the epoch.
        rows_per_second: As the consumer saw it, since the loader was made.
    """

    epoch: int
    epochs: int | None
    step: int
    steps: int
    rows_per_second: float

    def __str__(self) -> str:
        of = "" if self.epochs is None else f" of {self.epochs}"
        return f"epoch {self.epoch}{of}, step {self.step} of {self.steps}, {self.rows_per_second:,.0f} rows/s"
