"""``dataload order``."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Any, cast

import typer

from dataload.analysis.pictures import check_picture, order_figure, stream_figure
from dataload.api import from_config
from dataload.cli.options import ConfigFile, JsonFlag, Overrides, Picture
from dataload.cli.order_streams import print_streams, stream_facts
from dataload.cli.output import count_of, print_json, print_line, print_table
from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.samplers import BatchPlan, BatchPlanner, BatchSampler
from dataload.samplers.order_sample import WHOLE_UP_TO, GlobalBatches, OrderSample, Shards, sample_order
from dataload.samplers.pool_quality import pool_size_for
from dataload.samplers.quality import Figure, OrderReport, judge_order
from dataload.samplers.streams.report import StreamPlanner, stream_report
from dataload.types import Sharded

__all__ = ["order_command"]

_SHOWN_STEPS = 3
_SHOWN_INDICES = 10
_SHOWN_CHARACTERS = 200
_BLOCK_ROWS = 16_384


def order_command(
    config: ConfigFile,
    overrides: Overrides = None,
    epoch: Annotated[int, typer.Option("--epoch", min=0, help="Which epoch.")] = 0,
    steps: Annotated[
        str | None, typer.Option("--steps", help="Print the indices of these steps: 10, or 0:5 for the first five.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank's; with --world-size.")] = None,
    world_size: Annotated[int | None, typer.Option("--world-size", min=1, help="Number of ranks.")] = None,
    json: JsonFlag = False,
    picture: Picture = None,
    quality: Annotated[
        float | None, typer.Option("--quality", help="Find the pool that mixes shards to this fraction of the ideal.")
    ] = None,
) -> None:
    """Show in which order a config serves its records, and judge how well that mixes them.

    The batches of all ranks together are compared with those of a uniform shuffle; a long epoch is sampled. Of rows
    that continue it says instead how long they do.

    --steps prints only indices, a line for each step of all ranks, or of --rank; with --json a JSON object each.
    """
    _check(steps, rank, world_size, picture, quality)
    settings = list(overrides or ())
    if world_size is not None:
        settings += [f"loader.world_size={world_size}", f"loader.rank={rank or 0}"]
    if picture is not None:
        check_picture(picture)
    with from_config(config, overrides=settings) as loader, closing(cast("Any", loader.source)):
        if steps is not None:
            planner = loader.batch_sampler
            _print_steps(planner, _parse_steps(steps, planner.steps(epoch), epoch), epoch, rank is not None, json)
            return
        if isinstance(loader.batch_sampler, StreamPlanner):
            _show_streams(loader.batch_sampler, epoch, json, picture, quality)
            return
        order = _Order(loader, epoch)
        facts = order.facts(quality)
        if picture is not None:
            order_figure(order.sample, order.shards, f"{order.name}, epoch {epoch}").savefig(picture)
            facts["picture"] = picture
    if json:
        print_json(facts)
    else:
        _print(facts, order.report)


def _show_streams(
    planner: StreamPlanner, epoch: int, as_json: bool, picture: str | None, quality: float | None
) -> None:
    if quality is not None:
        raise ConfigError(
            "--quality is for orders that shuffle, and rows of streams continue: leave it out",
            key="quality",
            value=quality,
        )
    report = stream_report(planner, epoch=epoch)
    facts = stream_facts(planner, report)
    if picture is not None:
        stream_figure(planner, report, f"{facts['order']}, epoch {epoch}").savefig(picture)
        facts["picture"] = picture
    if as_json:
        print_json(facts)
    else:
        print_streams(facts, report)


def _check(
    steps: str | None, rank: int | None, world_size: int | None, picture: str | None, quality: float | None
) -> None:
    if rank is not None and world_size is None:
        raise ConfigError("--rank needs --world-size", key="rank", value=rank)
    if rank is not None and world_size is not None and rank >= world_size:
        raise ConfigError(f"--rank must be below --world-size, {world_size}, got {rank}", key="rank", value=rank)
    if rank is not None and steps is None:
        raise ConfigError("--rank needs --steps: an order is judged for all ranks together", key="rank", value=rank)
    if steps is not None and (picture is not None or quality is not None):
        name = "--picture" if picture is not None else "--quality"
        raise ConfigError(f"--steps prints indices only: leave out {name}", key="steps", value=steps)


def _parse_steps(text: str, total: int, epoch: int) -> range:
    """``"10"`` as one step, ``"0:5"`` as the first five.

    Raises:
        ConfigError: It is neither, or goes beyond the epoch.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise ConfigError(
            f"--steps must be a step or first:stop, such as 10 or 0:5, got {text!r}", key="steps", value=text
        )
    start = int(match[1])
    stop = start + 1 if match[2] is None else int(match[2])
    if start >= stop:
        raise ConfigError(f"--steps {text} holds no step: the second number must be larger", key="steps", value=text)
    if stop > total:
        raise ConfigError(
            f"--steps {text} goes beyond the end: epoch {epoch} has {count_of(total, 'step')}", key="steps", value=text
        )
    return range(start, stop)


def _print_steps(planner: BatchPlanner, steps: range, epoch: int, of_rank: bool, as_json: bool) -> None:
    ranks = count_of(planner.world_size, "rank")
    if not as_json:
        whose = f"rank {planner.rank} of {planner.world_size}" if of_rank else f"{ranks} together"
        print_line(f"epoch {epoch}, steps {steps.start}:{steps.stop} of {planner.steps(epoch)}, {whose}", "bold")
    place = {"epoch": epoch, "rank": planner.rank if of_rank else None, "world_size": planner.world_size}
    for plan in _plans(planner, steps, epoch, of_rank):
        indices = plan.indices.tolist()
        # Of packed rows `valid` says nothing about records.
        valid = plan.valid.ravel().tolist() if plan.valid is not None and plan.packing is None else None
        if as_json:
            line = {**place, "step": plan.step, "indices": indices, **({} if valid is None else {"valid": valid})}
            line.update((name, column.tolist()) for name, column in (plan.columns or {}).items())
            typer.echo(json_module.dumps(line))
        else:
            shown = (str(index) if valid is None or valid[i] else f"({index})" for i, index in enumerate(indices))
            typer.echo(f"{plan.step}: {' '.join(shown)}")


def _plans(planner: BatchPlanner, steps: range, epoch: int, of_rank: bool) -> Iterator[BatchPlan]:
    """Plans of the planner's rank, or of all ranks together, in blocks."""
    if isinstance(planner, StreamPlanner) and not of_rank:
        # What fills up a batch of streams is no rank's own, and keeps the other rows in their places.
        planner, of_rank = planner.with_ranks(rank=0, world_size=1), True
    size = max(1, _BLOCK_ROWS // (planner.rows_per_step * planner.world_size))
    together = GlobalBatches(planner)
    for start in range(steps.start, steps.stop, size):
        block = range(start, min(start + size, steps.stop))
        if of_rank:
            yield from planner.plans(block, epoch=epoch)
            continue
        indices, counts = together.rows(block, epoch=epoch)
        first = 0
        for step, count in zip(block, counts.tolist(), strict=True):
            yield BatchPlan(step, indices[first : first + count])
            first += count


class _Order:
    """The order of one epoch, looked at.

    Args:
        loader: Whose.
        epoch: Which epoch.
    """

    def __init__(self, loader: Loader[Any], epoch: int) -> None:
        source, self._planner = loader.source, loader.batch_sampler
        self._epoch = epoch
        self._records = len(source)
        lengths = source.shard_lengths if isinstance(source, Sharded) else None
        self.shards = Shards.of(self._planner.records, lengths)
        self.sample: OrderSample = sample_order(self._planner, epoch=epoch)
        self.report: OrderReport = judge_order(self.sample, sample_order(self._planner, epoch=epoch + 1), self.shards)

    @property
    def name(self) -> str:
        """The order as Python writes it, but not all of a long table."""
        planner = self._planner
        text = " ".join(repr(planner.sampler if isinstance(planner, BatchSampler) else planner).split())
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 50]} ... {text[-40:]}"

    def facts(self, quality: float | None) -> dict[str, Any]:
        """All that is known of it, as JSON."""
        planner = self._planner
        steps = range(min(_SHOWN_STEPS, planner.steps(self._epoch)))
        return {
            "order": self.name,
            "records": self._records,
            "steps": planner.steps(self._epoch),
            "rows_per_step": planner.rows_per_step * planner.world_size,
            "rows_vary": not isinstance(planner, BatchSampler),
            "world_size": planner.world_size,
            "first_indices": [
                plan.indices[:_SHOWN_INDICES].tolist() for plan in _plans(planner, steps, self._epoch, of_rank=False)
            ],
            "report": self.report.to_json(),
            "pool": None if quality is None else self._pool(quality),
            "picture": None,
        }

    def _pool(self, quality: float) -> dict[str, Any]:
        rows = self._planner.rows_per_step * self._planner.world_size
        lengths = tuple(self.shards.lengths.tolist())
        return {
            "quality": quality,
            "pool_size": pool_size_for(lengths, rows, quality),
            "present_pool_size": _pool_size(self._planner),
            "present_quality": self.report.mixing.middle,
        }


def _pool_size(planner: BatchPlanner) -> int | None:
    """Positions in the pool of an order that has one."""
    return getattr(getattr(planner, "sampler", None), "pool_size", None)


def _print(facts: dict[str, Any], report: OrderReport) -> None:
    print_line(facts["order"], "bold")
    print_line(
        f"{count_of(facts['records'], 'record')}; epoch {report.epoch} has {count_of(report.positions, 'position')} in "
        f"{count_of(facts['steps'], 'step')} of {'about ' if facts['rows_vary'] else ''}"
        f"{count_of(facts['rows_per_step'], 'record')} on "
        f"{count_of(facts['world_size'], 'rank')}"
    )
    for step, indices in enumerate(facts["first_indices"]):
        print_line(f"step {step}: {' '.join(map(str, indices))}{' ...' if len(indices) == _SHOWN_INDICES else ''}")
    print_line()
    print_table({"": "left", "found": "right", "ideal": "right", "ratio": "right"}, _rows(report))
    print_line(f"mixing in each tenth of the epoch, relative to all of it: {_tenths(report)}")
    print_line()
    for name in ("displacement", "mixing", "decay", "repeats", "multiplicity"):
        print_line(f"{name}: {getattr(report, name).verdict}")
    for note in _notes(report):
        print_line(f"note: {note}")
    if facts["pool"] is not None:
        _print_pool(facts["pool"], report)
    if facts["picture"] is not None:
        print_line(f"picture in {facts['picture']}")


def _rows(report: OrderReport) -> list[tuple[str, ...]]:
    mixing, again, last = report.mixing, report.repeats.again, report.decay.last_to_middle
    rows = [_row("displacement, mean", report.displacement.mean)]
    for q, found, ideal in report.displacement.quantiles:
        rows.append(_row(f"displacement, {q:.0%} are below", Figure(found=found, ideal=ideal, error=0)))
    rows.append(_row(f"{mixing.noun} in a batch", mixing.per_batch))
    if last is not None:
        rows.append(_row("mixing, last tenth to middle", Figure(found=last, ideal=1, error=0)))
    if again is not None:
        rows.append(_row("pairs that meet again", again))
    return rows


def _row(name: str, figure: Figure) -> tuple[str, ...]:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    return name, f"{figure.found:.4g}", f"{figure.ideal:.4g}", ratio


def _tenths(report: OrderReport) -> str:
    return " ".join("-" if tenth is None else f"{tenth:.2f}" for tenth in report.decay.tenths)


def _notes(report: OrderReport) -> Iterator[str]:
    if report.sampled:
        yield (
            f"all figures are from a sample of {report.looked_at:,} positions, "
            f"for the epoch has more than {WHOLE_UP_TO:,}"
        )
    if report.mixing.noun == "parts":
        yield f"the data have one shard: {report.mixing.shards} equal parts of the index range stand for shards"
    if report.multiplicity.repeated or report.multiplicity.never:
        yield "ideal is a uniform shuffle that serves each record once"


def _print_pool(pool: dict[str, Any], report: OrderReport) -> None:
    size, wanted = pool["pool_size"], pool["quality"]
    if size is None:
        print_line(f"pool: none smaller than the data mixes to {wanted:g} of the ideal; a global shuffle does")
    else:
        print_line(
            f"pool: {size:,} behind {report.mixing.noun} in a random order mixes to {wanted:g} of the ideal in the "
            f"middle of the epoch; a reader that goes front to back holds {count_of(size, 'record')}, "
            f"{size / report.records:.1%} of the data"
        )
    reached = "an unknown part" if pool["present_quality"] is None else f"{pool['present_quality']:.3f}"
    present = f", with a pool of {pool['present_pool_size']:,}," if pool["present_pool_size"] else ""
    print_line(f"pool: the present order{present} mixes to {reached} of the ideal there")
