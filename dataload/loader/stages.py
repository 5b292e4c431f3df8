"""The stages of a step: how long each took, and which one failed."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from dataload.errors import ClosedSourceError, MissingDependencyError
from dataload.executors import WorkerStatus, worker_name
from dataload.loader.rescue import BadRecord

__all__ = ["StageError", "Trace", "is_for_consumer", "run_stage"]


class Trace:
    """What is worth knowing about one step: where it is, how long each stage took, which records were bad.

    Attributes:
        status: Told of each step and sample.
        spans: Stage, begin and end in seconds of `time.perf_counter`, which processes of one machine share.
        bad: Records that were left out or replaced.
    """

    __slots__ = ("bad", "spans", "status")

    def __init__(self, status: WorkerStatus | None = None) -> None:
        self.status = WorkerStatus() if status is None else status
        self.spans: list[tuple[str, float, float]] = []
        self.bad: list[BadRecord] = []


def run_stage(trace: Trace, stage: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, and note in `trace` how long it took.

    Raises:
        StageError: It failed.
    """
    begun = perf_counter()
    try:
        return function(*arguments)
    except StageError:
        raise  # it says more exactly where
    except BaseException as error:
        if is_for_consumer(error):
            raise
        raise StageError(stage, error) from error
    finally:
        trace.spans.append((stage, begun, perf_counter()))


class StageError(Exception):
    """A failure with the stage that it happened in; within dataload only, where it becomes a `WorkerError`.

    Attributes:
        stage: What failed; "" if that is no stage.
        error: How.
        index: The record it was working on, if it was a single one.
    """

    def __init__(self, stage: str, error: BaseException, index: int | None = None) -> None:
        super().__init__(stage, error)
        self.stage = stage
        self.error = error
        self.index = index

    @property
    def record_may_be_at_fault(self) -> bool:
        """Whether other records may do better."""
        if not self.stage.startswith(("read", "transform")):
            return False
        return isinstance(self.error, Exception) and not isinstance(
            self.error, (ClosedSourceError, MissingDependencyError)
        )


def is_for_consumer(error: BaseException) -> bool:
    """Whether it ends the consumer's thread: Ctrl-C, or what a handler of signals raises.

    In a worker there are none of these: what looks like one was raised by a transform, say, by `sys.exit`.
    """
    return not isinstance(error, Exception) and not worker_name().startswith("dataload-")
