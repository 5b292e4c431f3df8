"""The iterations of WebDataset pipelines, their positions and their states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

from dataload.compat._webdataset_io import FluidInterface
from dataload.compat._webdataset_stages import Share
from dataload.errors import ConfigError
from dataload.types import Sampler


class Progress(NamedTuple):
    """The position of a worker."""

    lane: int  # which worker's share it reads; see `Share`
    number: int = 0  # of the pass
    used: int = 0  # samples of the share
    given: int = 0  # values in all passes


class OrderedData(Protocol):
    """The part of a `WebDataset` that positions and states need."""

    repetitions: int

    def order(self) -> Sampler: ...
    def place(self) -> tuple[int, int, int, int]: ...
    def share(self, order: Sampler, start: int, worker: int, workers: int) -> Share: ...
    def state_at(
        self, epoch: int, position: int = 0, offsets: Sequence[Progress] = (), **counts: int
    ) -> dict[str, Any]: ...
    def run_at(self, state: Mapping[str, Any]) -> PassState: ...


class PassState:
    """An iteration over a data set, or over a loader of it."""

    # `position` is where it begins: samples of all ranks in that epoch, over all passes. `offsets` say how far each
    # worker is from there, if that differs; the one first that gives the next value.
    def __init__(
        self, epoch: int, position: int = 0, offsets: Sequence[Progress] = (), counts: Mapping[str, int] | None = None
    ) -> None:
        self.epoch: int = epoch
        self.position: int = position
        self.offsets: Sequence[Progress] = offsets
        self.counts: Mapping[str, int] = counts or {}
        self.passes = self.given = 0
        self.workers: int = self.counts.get("workers", 0)  # that have offsets
        self.resumed: bool = position > 0 or len(offsets) > 0
        self.over: bool = False
        self.progress: dict[int, Progress] = {
            offset.lane: offset for offset in offsets
        }  # of lanes that have given a value
        self.last: int = offsets[0].lane - 1 if offsets else 0  # the lane of the last value

    def check(self, workers: int) -> None:
        """Raise a ConfigError unless there are as many workers as have offsets."""
        if self.offsets and self.workers != workers:
            raise ConfigError(
                f"the state is of {self.workers} workers, each of which is at another position (since samples were "
                f"left out, or because of repeat() or with_epoch() before WebLoader), and here are {workers}: use as "
                "many as before",
                key="num_workers",
            )

    def start(self, order: Sampler, number: int) -> int:
        """Return the position where a pass begins."""
        before, start = divmod(self.position, max(1, len(order)))
        return start if number == before else 0

    def reached(self, data: OrderedData, workers: int) -> tuple[int, Sequence[Progress]]:
        """Return the position of the consumer; and how far each worker is from there, if that differs."""
        if not self.progress:
            return self.position, ()
        order, own_workers = data.order(), data.place()[3]
        if own_workers > 1:  # in a worker of torch's, which knows only its own lane
            return self.position, [self.progress[self.last]]
        lanes = [(self.last + 1 + turn) % workers for turn in range(workers)]
        offsets = [self.progress.get(lane, Progress(lane)) for lane in lanes]
        shares = [data.share(order, self.start(order, offset.number), offset.lane, workers) for offset in offsets]
        number, chunk, used = offsets[0].number, shares[0].chunk, offsets[0].used
        if workers > 1:
            chunks = sum(-(-offset.used // chunk) for offset in offsets)
            expected = [min(chunk * -(-(chunks - share.worker) // workers), len(share)) for share in shares]
            if data.repetitions != 1 or [offset.used for offset in offsets] != expected:
                return self.position, offsets
            used = chunks * chunk
        start = self.start(order, number)
        return number * len(order) + min(start + used * shares[0].world_size, len(order)), ()


class Resumable(FluidInterface):
    """The iterations and the state of a `WebDataset` and of a `WebLoader`."""

    repetitions: int
    nsamples: int
    workers = 1
    run: PassState | None = None  # the last iteration
    _next: PassState | None = None  # where the next one begins, if that was set
    _epoch = 0  # of the next one
    _knows_epoch = False  # in a worker, too

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch, or over the rest of it after `load_state_dict`."""
        run = self.run = self._next or PassState(self.first_epoch())
        self._next, self._epoch = None, run.epoch + 1
        self.enter(run)
        return self._values(run)

    def _values(self, run: PassState) -> Iterator[Any]:
        limit = self.limit
        while run.passes < self.repetitions and (limit is None or run.given < limit):
            before = run.given
            for value in self.one_pass(run):
                run.given += 1
                yield value
                if limit is not None and run.given >= limit:
                    break
            if run.given == before and not run.resumed:
                break
            self.end_pass(run)
        run.over = True

    def one_pass(self, run: PassState) -> Iterator[Any]:
        """Yield the values of a pass."""
        raise NotImplementedError

    def end_pass(self, run: PassState) -> None:
        """Move to the next pass."""
        run.passes, run.resumed = run.passes + 1, False

    def first_epoch(self) -> int:
        """Return the epoch of a new iteration."""
        return self._epoch

    @property
    def limit(self) -> int | None:
        """Values of an epoch, if ``with_epoch`` or ``repeat(nbatches=)`` says so."""
        return self.nsamples if self.repetitions != 1 and self.nsamples > 0 else None

    def compose(self, *args: Any) -> Self:
        """Return a copy of the pipeline with more stages."""
        made = super().compose(*args)
        made.run = made._next = None
        return made

    def begin(self, run: PassState) -> None:
        """Make the next iteration begin at a position."""
        self._next = run

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration serve `epoch`, unless it was set to a position of it."""
        if self._next is None or self._next.epoch != epoch:
            self._next, self._epoch = None, epoch
        self._knows_epoch = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the consumer, for JSON.

        Raises:
            ConfigError: The position is not exact, or the archives are read as streams; the message says why.
        """
        data, run = self.dataset(), self._next or self.run
        if run is None or run.over:
            return data.state_at(self._epoch)
        if self.limit is not None and run.given >= self.limit:
            return data.state_at(run.epoch + 1)
        inexact = self.inexact()
        if inexact is not None and run.progress:
            raise ConfigError(
                f"{inexact} holds samples back or counts them, so there is no exact position within an epoch: take "
                "the state between epochs, or use shuffle() before batched(), and stages that work on single samples",
                key="state_dict",
            )
        position, offsets = run.reached(data, self.workers)
        workers = {"workers": max(self.workers, data.place()[3])} if offsets else {}
        return data.state_at(run.epoch, position, offsets, **self.counts(run), **workers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, with the same stages. Reads no sample.

        Raises:
            ConfigError: The archives are read as streams.
            StateMismatchError: The state is of other data or another order.
        """
        self._next = self.dataset().run_at(state)
        self.enter(self._next)

    def inexact(self) -> Any:
        """Return the first stage that does not work on single samples, or None."""
        raise NotImplementedError

    def counts(self, run: PassState) -> dict[str, int]:
        """Return what the position does not tell."""
        raise NotImplementedError

    def enter(self, run: PassState) -> None:
        """Set the passes and values before a run."""
        raise NotImplementedError

    def dataset(self) -> OrderedData:
        """Return the data set that gives the samples."""
        raise NotImplementedError
