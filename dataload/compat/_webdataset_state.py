"""The positions of WebDataset pipelines, and their states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dataload._util.fingerprint import fingerprint
from dataload.errors import ConfigError, StateMismatchError
from dataload.loader.state import LoaderState
from dataload.types import Sampler

if TYPE_CHECKING:
    from dataload.compat._webdataset_pipeline import WebDataset


class Part(NamedTuple):
    """How far a worker is: `used` samples of its share (see `Share`) of what follows `start` in a pass."""

    lane: int = 0
    number: int = 0  # of the pass
    start: int = 0
    used: int = 0
    given: int = 0  # values, in all passes


class Run:
    """An iteration over a pipeline.

    Args:
        epoch: Number of the epoch.
        parts: Where it begins: one for all workers, or one for each.
        passes: Passes that are over, of a `WebLoader`.
        given: Values that it has given.
    """

    def __init__(self, epoch: int, parts: Sequence[Part] = (), passes: int = 0, given: int = 0) -> None:
        self.epoch, self.parts, self.passes, self.given = epoch, parts, passes, given
        self.resumed, self.over = bool(parts), False
        self.now: dict[int, Part] = {}  # how far each lane is
        self.last = -1  # the lane of the last value

    def part_of(self, worker: int, workers: int) -> Part:
        """Return where a worker begins, and continue there."""
        if not self.parts:
            return Part(worker)
        first = self.parts[0]
        if len(self.parts) != workers and (len(self.parts) > 1 or first.given):
            raise ConfigError(
                f"the state is of {len(self.parts)} workers, and here are {workers}: since a sample was left out, or "
                "with with_epoch(), each has a position of its own; use as many workers as before",
                key="num_workers",
            )
        part = self.parts[worker] if len(self.parts) > 1 else first._replace(lane=worker)
        self.passes, self.given = part.number, part.given
        return part

    def place(self, workers: int) -> Sequence[Part]:
        """Return how far each worker is, the one first that gives the next value."""
        begun = list(self.parts)
        if len(begun) != workers or workers == 1:
            first = begun[0] if begun else Part()
            begun = [first._replace(lane=lane) for lane in range(workers)]
        parts = {part.lane: part for part in begun} | self.now
        lanes = [part.lane for part in begun]
        turn = lanes.index(self.last) + 1 if self.now else 0
        return [parts[lane] for lane in lanes[turn:] + lanes[:turn]]


def state_of(
    data: WebDataset, epoch: int, parts: Sequence[Part] = (), outer: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """Return the state of a pipeline; `outer` are the passes and the values of a `WebLoader`."""
    source, order = data.archives(), data.order()
    whole, passes = data.epoch_order(order)
    position = _position(data, order, parts)
    if position is not None and data.limit is None:
        number, start = divmod(position, max(1, len(order)))
        parts = [Part(number=number, start=start)] if position else ()
        if position == len(order) * passes and position and outer == (0, 0):
            epoch, position, parts = epoch + 1, 0, ()
    exact = position is not None and (not parts or data.limit is None) and outer == (0, 0)
    state = LoaderState(
        epoch=epoch,
        position=position if exact and position is not None else 0,
        length=len(whole),
        source=source.fingerprint(),
        order=fingerprint(whole),
    ).to_json()
    if not exact and (parts or outer != (0, 0)):
        state["webdataset"] = {"parts": [list(part) for part in parts], "outer": list(outer)}
    return state


def _position(data: WebDataset, order: Sampler, parts: Sequence[Part]) -> int | None:
    """Return the position over all passes; None if the workers are not at one position."""
    if not parts:
        return 0
    first, workers = parts[0], len(parts)
    if any((part.number, part.start) != (first.number, first.start) for part in parts):
        return None
    shares = [data.share(order, part._replace(used=0), workers) for part in parts]
    chunk, used = shares[0].chunk, first.used
    if workers > 1:
        chunks = sum(-(-part.used // chunk) for part in parts)
        for part, share in zip(parts, shares, strict=True):
            if part.used != min(chunk * -(-(chunks - part.lane) // workers), len(share)):
                return None
        used = chunks * chunk
    return first.number * len(order) + min(first.start + used * shares[0].world_size, len(order))


def run_of(data: WebDataset, state: Mapping[str, Any]) -> Run:
    """Return the iteration that continues at a state, also one that `dataload.Loader` has saved."""
    values = dict(state)
    extra = values.pop("webdataset", None)
    saved = LoaderState.from_json(values)
    saved.check(LoaderState.from_json(state_of(data, saved.epoch)))
    if extra is not None:
        try:
            return Run(saved.epoch, [Part(*map(int, part)) for part in extra["parts"]], *map(int, extra["outer"]))
        except (TypeError, ValueError, KeyError) as error:
            raise StateMismatchError(f"webdataset in the state must have parts and outer, found {extra!r}") from error
    order = data.order()
    number, start = divmod(saved.position, max(1, len(order)))
    batching, world_size = data.plan().batching, data.place()[1]
    given = saved.position // ((batching.size if batching else 1) * world_size) if data.limit is not None else 0
    return Run(saved.epoch, [Part(number=number, start=start, given=given)] if saved.position else ())
