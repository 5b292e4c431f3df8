"""The stages of a config: the same batches with one stage more each time show where the time goes."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dataload.api import record_loader
from dataload.bench.runner import Spread
from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.loader.step import nbytes

if TYPE_CHECKING:
    from dataload.config.models import DataloadConfig

_KEPT_BATCHES = 64
_KEPT_BYTES = 1 << 28
_ALONE = "loader.num_workers=0"
_AS_IT_IS, _FROM_MEMORY = "the config as it is", "the same batches from memory"


@dataclass(frozen=True, slots=True)
class StageTime:
    """The time of one batch of a config up to and including the stage `name`, and the rate over all batches."""

    name: str
    batch_seconds: Spread
    rows_per_second: float


@dataclass(frozen=True, slots=True)
class StageReport:
    """Times with one more stage each, then of the unchanged config and of batches from memory; the verdict."""

    stages: tuple[StageTime, ...]
    verdict: str
    notes: tuple[str, ...]


def as_list(samples: list[Any]) -> list[Any]:
    """Collate nothing: return the samples."""
    return samples


def stage_overrides(settings: DataloadConfig) -> dict[str, list[str]]:
    """Return, by name of the last stage, the overrides of a config that leave only its first stages. Pure."""
    loader, source = settings.loader, settings.source
    decode = source is not None and not isinstance(source, tuple) and source.decode is not None
    without = {
        "decode": ["source.decode=null"] if decode else [],
        "transform": _without(loader, "transform"),
        "collate": [f"loader.collate={__name__}:as_list", *_without(loader, "pad_value")],
        "batch_transform": _without(loader, "batch_transform"),
    }
    columns = loader.transform is None and loader.collate is None
    if columns:
        del without["collate"]
    names = [name for name, taken in without.items() if taken]
    stages = {"source, collated" if columns else "source": names}
    for i, name in enumerate(names):
        stages[f"+ {name}"] = names[i + 1 :]
    return {name: [*(text for left in out for text in without[left]), _ALONE] for name, out in stages.items()}


def _without(loader: Any, name: str) -> list[str]:
    return [] if getattr(loader, name) is None else [f"loader.{name}=null"]


def measure_stages(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    seconds: float = 2.0,
    repeats: int = 3,
) -> StageReport:
    """Run a config with one stage more each time, in interleaved rounds of about `seconds` each."""
    from dataload.config import read_config  # pydantic takes 60 ms to import

    overrides = [*overrides, "loader.epochs=null"]  # a measurement takes as many epochs as it needs
    settings = read_config(config, overrides)
    variants = {**stage_overrides(settings), _AS_IT_IS: list[str]()}
    times: dict[str, list[tuple[float, int]]] = {name: [] for name in (*variants, _FROM_MEMORY)}
    verdict, kept = "", list[Any]()
    for _ in range(repeats):
        for name, more in variants.items():
            with record_loader(config, overrides=[*overrides, *more]) as loader:
                times[name].append(_time_batches(_endless(loader), seconds))
                if name == _AS_IT_IS:
                    verdict, kept = loader.statistics().verdict, _keep(loader)
        times[_FROM_MEMORY].append(_time_batches(cycle(kept), seconds / 4))
        kept.clear()
    rows = settings.rows_per_rank() or 1
    stages = (
        StageTime(
            name,
            Spread.of([took / steps for took, steps in found]),
            rows * sum(steps for _, steps in found) / sum(took for took, _ in found),
        )
        for name, found in times.items()
    )
    return StageReport(tuple(stages), verdict, tuple(_notes(settings)))


def _endless(loader: Loader[Any]) -> Iterator[Any]:
    while True:
        if not len(loader):
            raise ConfigError("the config has no step: there is nothing to measure", key="loader.batch_size")
        yield from loader


def _time_batches(batches: Iterable[Any], seconds: float) -> tuple[float, int]:
    """Return the time and the number of batches after the first, which includes the start of the workers."""
    taken = iter(batches)
    next(taken)
    gc.collect()
    begun = perf_counter()
    steps = 0
    while True:
        next(taken)
        steps += 1
        took = perf_counter() - begun
        if took > seconds:
            return took, steps


def _keep(loader: Loader[Any]) -> list[Any]:
    """Return some batches of a loader, few enough for memory."""
    kept: list[Any] = []
    for batch in islice(_endless(loader), _KEPT_BATCHES):
        kept.append(batch)
        if nbytes(kept) > _KEPT_BYTES:
            break
    return kept


def _notes(settings: DataloadConfig) -> Iterator[str]:
    if isinstance(settings.source, tuple):
        yield "decoding is part of the source: with several sources it is not measured apart"
    if settings.rows_per_rank() is None:
        yield "batches differ in rows: records/s are batches/s"
    yield "copying to a device is not part of a config: wrap the loader in dataload.torch.DeviceLoader"
