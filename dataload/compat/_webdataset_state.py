"""The iterations of WebDataset pipelines, their positions and their states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from dataload._util.fingerprint import fingerprint
from dataload.compat._webdataset_io import FluidInterface
from dataload.errors import ConfigError, StateMismatchError
from dataload.loader.state import LoaderState

if TYPE_CHECKING:
    from dataload.compat._webdataset_pipeline import WebDataset


class Progress(NamedTuple):
    """How far a worker is: pass, samples of its share that were used, and values in all passes."""

    number: int = 0
    used: int = 0
    given: int = 0


class Run:
    """An iteration over a data set, or over a loader of it.

    Args:
        epoch: Number of the data set's epoch.
        position: Where it begins: samples of all ranks in that epoch, over all passes.
        passes: Passes that are over.
        given: Values that were given before.
    """

    def __init__(self, epoch: int, position: int = 0, passes: int = 0, given: int = 0) -> None:
        self.epoch, self.position, self.passes, self.given = epoch, position, passes, given
        self.resumed, self.over = position > 0, False
        self.counts: Mapping[str, int] = {}  # of the state that it continues
        self.progress: dict[int, Progress] = {}  # of each worker that has given a value

    def reached(self, data: WebDataset, workers: int) -> tuple[int, int]:
        """Return the position of the consumer, and the values that the data set has given."""
        if not self.progress:
            return self.position, self.given
        number, used, given = next(iter(self.progress.values()))
        if data.place()[3] > 1:  # in a worker of torch's, which knows only its own part
            return self.position if self.resumed else 0, given
        order = data.order()
        share = data.share(order, 0, 0, 1)
        if workers > 1:
            chunk = share.chunk
            chunks = sum(-(-each.used // chunk) for each in self.progress.values())
            for worker in range(workers):
                most = len(data.share(order, self.position, worker, workers))
                expected = min(chunk * -(-(chunks - worker) // workers), most)
                if data.repetitions != 1 or self.progress.get(worker, Progress()).used != expected:
                    raise ConfigError(
                        "each worker is at another position, since a sample was left out, or with repeat() or "
                        "with_epoch() before WebLoader: call them after it, or take the state between epochs",
                        key="num_workers",
                    )
            used = chunks * chunk
        before, start = divmod(self.position, len(order))
        start = start if number == before else 0
        return number * len(order) + min(start + used * share.world_size, len(order)), given


def state_of(data: WebDataset, epoch: int, position: int = 0, **counts: int) -> dict[str, Any]:
    """Return the state of a pipeline; `counts` are what a position does not tell."""
    order = data.order()
    whole, passes = data.epoch_order(order)
    batching, world_size = data.plan().batching, data.place()[1]
    least = batching.size * world_size if batching and not batching.partial else 1  # samples that make a value
    length = len(order)
    if not counts and passes == 1 and length:  # each pass of an endless epoch counts as one
        epoch, position = epoch + position // length, position % length
    if not counts and position > length * passes - least:
        epoch, position = epoch + bool(position), 0
    state = LoaderState(
        epoch=epoch,
        position=min(position, len(whole)),
        length=len(whole),
        source=data.archives().fingerprint(),
        order=fingerprint(whole),
    ).to_json()
    return {**state, "webdataset": {"position": position, **counts}} if counts else state


def run_of(data: WebDataset, state: Mapping[str, Any]) -> Run:
    """Return the iteration that continues at a state, also one of a `dataload.Loader`."""
    values = dict(state)
    counts = values.pop("webdataset", {})
    saved = LoaderState.from_json(values)
    saved.check(LoaderState.from_json(state_of(data, saved.epoch)))
    if not isinstance(counts, dict) or not all(type(count) is int and count >= 0 for count in counts.values()):
        raise StateMismatchError(f"webdataset in the state must be counts, found {counts!r}")
    run = Run(saved.epoch, counts.get("position", saved.position))
    run.counts, run.resumed = counts, run.resumed or "used" in counts
    return run


class Resumable(FluidInterface):
    """The iterations and the state of a `WebDataset` and of a `WebLoader`."""

    repetitions: int
    nsamples: int
    workers = 1
    run: Run | None = None  # the last iteration
    _next: Run | None = None  # where the next one begins, if that was set
    _epoch = 0  # of the next one
    _knows_epoch = False  # in a worker, too

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch, or over the rest of it after `load_state_dict`."""
        run = self.run = self._next or Run(self.first_epoch())
        self._next, self._epoch = None, run.epoch + 1
        return self._values(run)

    def _values(self, run: Run) -> Iterator[Any]:
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

    def one_pass(self, run: Run) -> Iterator[Any]:
        """Yield the values of a pass."""
        raise NotImplementedError

    def end_pass(self, run: Run) -> None:
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
        made = super().compose(*args)  # type: ignore[misc]
        made.run = made._next = None
        return made

    def begin(self, run: Run) -> None:
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
            return state_of(data, self._epoch)
        if self.limit is not None and run.given >= self.limit:
            return state_of(data, run.epoch + 1)
        inexact = self.inexact()
        if inexact is not None and run.progress:
            raise ConfigError(
                f"{inexact} holds samples back or counts them, so there is no exact position within an epoch: take "
                "the state between epochs, or use shuffle() before batched(), and stages that work on single samples",
                key="state_dict",
            )
        position, given = run.reached(data, self.workers)
        return state_of(data, run.epoch, position, **self.counts(run, given))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, with the same stages. Reads no sample.

        Raises:
            ConfigError: The archives are read as streams.
            StateMismatchError: The state is of other data or another order.
        """
        run = run_of(self.dataset(), state)
        run.passes, run.given = self.restored(run)
        self._next = run

    def inexact(self) -> Any:
        """Return the first stage that does not work on single samples, or None."""
        raise NotImplementedError

    def counts(self, run: Run, given: int) -> dict[str, int]:
        """Return what the position does not tell; the data set has given `given` values."""
        raise NotImplementedError

    def restored(self, run: Run) -> tuple[int, int]:
        """Return the passes and values before a run that continues at a state."""
        raise NotImplementedError

    def dataset(self) -> WebDataset:
        """Return the data set that gives the samples."""
        raise NotImplementedError
