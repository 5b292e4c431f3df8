"""``dataload order``."""

import json as json_module
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer

from dataload.analysis.pictures import check_picture, order_figure, stream_figure
from dataload.api import record_loader
from dataload.cli import options
from dataload.cli.output import count_of, print_json, print_line, print_table
from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.samplers import BatchPlan, BatchPlanner, BatchSampler, BucketBatchSampler
from dataload.samplers.pool_quality import pool_size_for
from dataload.samplers.quality import (
    WHOLE_UP_TO,
    BucketFiller,
    OrderReport,
    ShardLayout,
    global_rows,
    judge_order,
    sample_order,
)
from dataload.samplers.streams.report import StreamPlanner, StreamReport, follow, stream_report
from dataload.types import Sharded

_SHOWN_STEPS = 3
_SHOWN_INDICES = 10
_SHOWN_CHARACTERS = 200
_BLOCK_ROWS = 16_384

Judgement: TypeAlias = tuple[dict[str, Any], Callable[..., Any], Callable[[], None]]
"""The facts that ``--json`` prints, a function that draws them, and one that prints them as text."""


def order_command(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    epoch: Annotated[int, typer.Option(min=0, help="Epoch to show.")] = 0,
    steps: Annotated[str | None, typer.Option(help="Print the indices of a step (10) or a range (0:5).")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Print the indices of this rank only.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks.")] = None,
    state: options.State = None,
    changes: options.Changes = None,
    json: options.JsonFlag = False,
    picture: options.Picture = None,
    quality: Annotated[
        float | None,
        typer.Option(help="Find the pool size that mixes shards to this fraction of a uniform shuffle."),
    ] = None,
) -> None:
    """Show the order in which a config serves its records, and how well it mixes them.

    The batches of all ranks together are compared with those of a uniform
    shuffle; long epochs are sampled. For streams, show how long rows continue.

    With --steps, print only indices: one line, or one JSON object, per step.
    With --state, print what each source of a mixture has given by then.
    """
    _check(steps, rank, picture, quality)
    settings = [*(overrides or ()), *options.ranks_of(rank, world_size)]
    with record_loader(config, overrides=settings) as loader:
        options.load_state(loader, state, changes)
        planner = loader.batch_sampler_of(epoch)
        if steps is not None:
            chosen = options.parse_range(steps, "--steps")
            options.check_steps(chosen, planner.steps(epoch), epoch, "--steps", steps)
            _print_steps(planner, chosen, epoch, rank is not None, json)
            return
        if state is not None:
            _print_given(loader, json)
            return
        if isinstance(planner, StreamPlanner):
            if quality is not None:
                raise ConfigError("--quality is for shuffled orders, but the rows of this config are streams: omit it")
            facts, draw, show = _judge_streams(planner, epoch)
        else:
            facts, draw, show = _judge(loader, epoch, quality)
        if picture is not None:
            draw(f"{facts['order']}, epoch {epoch}").savefig(picture)
    if json:
        print_json({**facts, "picture": picture})
        return
    show()
    if picture is not None:
        print_line(f"wrote {picture}")


def _print_given(loader: Loader[Any], as_json: bool) -> None:
    sources = loader.statistics().sources or {}
    if as_json:
        print_json({"epoch": loader.epoch, "step": loader.step, "sources": {n: asdict(e) for n, e in sources.items()}})
        return
    print_line(f"epoch {loader.epoch}, step {loader.step:,}", "bold")
    columns = {"source": "left", **dict.fromkeys(("share", "records", "epochs", "tokens"), "right")}
    counts = ((n, e, "-" if e.tokens is None else f"{e.tokens:,}") for n, e in sources.items())
    print_table(columns, [(n, f"{e.share:.4g}", f"{e.records:,}", f"{e.epochs:.2f}", count) for n, e, count in counts])


def _check(steps: str | None, rank: int | None, picture: str | None, quality: float | None) -> None:
    if rank is not None and steps is None:
        raise ConfigError("--rank needs --steps: the report covers all ranks together")
    if steps is not None and (picture is not None or quality is not None):
        raise ConfigError(f"--steps prints only indices: omit {'--quality' if picture is None else '--picture'}")
    if picture is not None:
        check_picture(picture)


def _print_steps(planner: BatchPlanner, steps: range, epoch: int, of_rank: bool, as_json: bool) -> None:
    if not as_json:
        ranks = count_of(planner.world_size, "rank")
        whose = f"rank {planner.rank} of {planner.world_size}" if of_rank else f"all of {ranks}"
        print_line(f"epoch {epoch}, steps {steps.start}:{steps.stop} of {planner.steps(epoch)}, {whose}", "bold")
    header = {"epoch": epoch, "rank": planner.rank if of_rank else None, "world_size": planner.world_size}
    for plan in _plans(planner, steps, epoch, of_rank):
        indices = plan.indices.tolist()
        # For packed rows, `valid` does not describe records.
        valid = plan.valid.ravel().tolist() if plan.valid is not None and plan.packing is None else None
        if as_json:
            line = {**header, "step": plan.step, "indices": indices, **({} if valid is None else {"valid": valid})}
            line.update((name, column.tolist()) for name, column in (plan.columns or {}).items())
            typer.echo(json_module.dumps(line))
        else:
            shown = (str(index) if valid is None or valid[i] else f"({index})" for i, index in enumerate(indices))
            typer.echo(f"{plan.step}: {' '.join(shown)}")


def _plans(planner: BatchPlanner, steps: range, epoch: int, of_rank: bool) -> Iterator[BatchPlan]:
    """Yield the plans of the planner's rank, or of all ranks together, computed in blocks."""
    if isinstance(planner, StreamPlanner) and not of_rank:
        # The filler of streams does not depend on the rank and keeps the other rows in position.
        planner, of_rank = planner.with_ranks(rank=0, world_size=1), True
    size = max(1, _BLOCK_ROWS // (planner.rows_per_step * planner.world_size))
    for start in range(steps.start, steps.stop, size):
        block = range(start, min(start + size, steps.stop))
        if of_rank:
            yield from planner.plans(block, epoch=epoch)
            continue
        indices, counts = global_rows(planner, block, epoch=epoch)
        first = 0
        for step, count in zip(block, counts.tolist(), strict=True):
            yield BatchPlan(step, indices[first : first + count])
            first += count


def _judge(loader: Loader[Any], epoch: int, quality: float | None) -> Judgement:
    source, planner = loader.source, loader.batch_sampler
    shards = ShardLayout.of(planner.records, source.shard_lengths if isinstance(source, Sharded) else None)
    sample = sample_order(planner, epoch=epoch)
    report = judge_order(sample, shards)
    facts = _facts(loader, report, shards, quality)
    return facts, partial(order_figure, sample, shards, report), partial(_print, facts, report)


def _facts(loader: Loader[Any], report: OrderReport, shards: ShardLayout, quality: float | None) -> dict[str, Any]:
    """Return everything that ``--json`` prints, except the name of the picture."""
    planner = loader.batch_sampler
    name = " ".join(repr(planner.sampler if isinstance(planner, BatchSampler) else planner).split())
    if len(name) > _SHOWN_CHARACTERS:  # a sampler may hold a long table
        name = f"{name[: _SHOWN_CHARACTERS - 50]} ... {name[-40:]}"
    rows = planner.rows_per_step * planner.world_size
    filler = BucketFiller.of(planner, epoch=report.epoch) if isinstance(planner, BucketBatchSampler) else None
    first = _plans(planner, range(min(_SHOWN_STEPS, report.steps)), report.epoch, of_rank=False)
    pool = None
    if quality is not None:
        pool = {
            "quality": quality,
            "pool_size": pool_size_for(tuple(shards.lengths.tolist()), rows, quality),
            "present_pool_size": getattr(getattr(planner, "sampler", None), "pool_size", None),
            "present_quality": report.mixing.middle,
        }
    return {
        "order": name,
        "records": len(loader.source),
        "steps": report.steps,
        "rows_per_step": rows,
        "rows_vary": not isinstance(planner, BatchSampler),
        "world_size": planner.world_size,
        "first_indices": [plan.indices[:_SHOWN_INDICES].tolist() for plan in first],
        "filler": filler and asdict(filler),
        "report": report.to_json(),
        "pool": pool,
    }


def _print(facts: dict[str, Any], report: OrderReport) -> None:
    print_line(facts["order"], "bold")
    print_line(
        f"{count_of(facts['records'], 'record')}; epoch {report.epoch} has {count_of(report.positions, 'position')} in "
        f"{count_of(facts['steps'], 'step')} of {'about ' if facts['rows_vary'] else ''}"
        f"{count_of(facts['rows_per_step'], 'record')} on {count_of(facts['world_size'], 'rank')}"
    )
    for step, indices in enumerate(facts["first_indices"]):
        print_line(f"step {step}: {' '.join(map(str, indices))}{' ...' if len(indices) == _SHOWN_INDICES else ''}")
    print_line()
    print_table({"": "left", "found": "right", "ideal": "right", "ratio": "right"}, list(_rows(report)))
    print_line()
    for name in ("displacement", "mixing", "multiplicity"):
        print_line(f"{name}: {getattr(report, name).verdict}")
    if filler := facts["filler"]:
        longest, boundary = f"{filler['longest']:.1%}", f"{filler['boundary']:.1%}"
        print_line(
            f"filler: {longest} if batches are padded to their longest record, {boundary} if to the boundary of their "
            "bucket"
        )
    for note in _notes(report):
        print_line(f"note: {note}")
    if facts["pool"] is not None:
        _print_pool(facts["pool"], report)


def _rows(report: OrderReport) -> Iterator[tuple[str, ...]]:
    mean, mixed = report.displacement.mean, report.mixing.per_batch
    yield _row("displacement, mean", mean.found, mean.ideal)
    for q, found, ideal in report.displacement.quantiles:
        yield _row(f"displacement, {q:.0%} quantile", found, ideal)
    yield _row(f"{report.mixing.noun} per batch", mixed.found, mixed.ideal)


def _row(name: str, found: float, ideal: float) -> tuple[str, ...]:
    return name, f"{found:.4g}", f"{ideal:.4g}", f"{found / ideal:.2f}" if ideal else ""


def _notes(report: OrderReport) -> Iterator[str]:
    if report.sampled:
        yield (
            f"all figures are from a sample of {report.looked_at:,} positions, because the epoch has more than "
            f"{WHOLE_UP_TO:,}"
        )
    if report.mixing.noun == "parts":
        yield f"the data have a single shard: {report.mixing.shards} equal parts of the index range stand in for shards"
    if report.multiplicity.repeated or report.multiplicity.never:
        yield "the ideal is a uniform shuffle that serves each record once"


def _print_pool(pool: dict[str, Any], report: OrderReport) -> None:
    size, wanted = pool["pool_size"], pool["quality"]
    if size is None:
        print_line(f"pool: no pool smaller than the data mixes to {wanted:g} of the ideal; use a global shuffle")
    else:
        print_line(
            f"pool: {size:,} records, over {report.mixing.noun} in a random order, mix to {wanted:g} of the ideal in "
            f"the middle of the epoch; a sequential reader holds {size / report.records:.1%} of the data"
        )
    reached = "an unknown fraction" if pool["present_quality"] is None else f"{pool['present_quality']:.3f}"
    present = f", with a pool of {pool['present_pool_size']:,}," if pool["present_pool_size"] else ""
    print_line(f"pool: the current order{present} mixes to {reached} of the ideal there")


def _judge_streams(planner: StreamPlanner, epoch: int) -> Judgement:
    """Judge the streams of an epoch. In ``first_rows``, each row of a step is its ``stream_id`` and ``offset``."""
    report = stream_report(planner, epoch=epoch)
    first = follow(planner, range(min(_SHOWN_STEPS, report.steps)), epoch=report.epoch)
    facts = {
        "order": repr(planner),
        "records": planner.records,
        "steps": report.steps,
        "world_size": planner.world_size,
        "first_rows": np.stack([first.stream_id, first.offset], axis=2)[:, :_SHOWN_INDICES].tolist(),
        "streams": report.to_json(),
    }
    return facts, partial(stream_figure, planner, report), partial(_print_streams, facts, report)


def _print_streams(facts: dict[str, Any], report: StreamReport) -> None:
    lengths = f"{report.shortest:,} to {report.longest:,} records"
    if report.shortest == report.longest:
        lengths = count_of(report.longest, "record")
    chunks = f", {report.chunk:,} records per row" if report.chunk > 1 else ""
    print_line(facts["order"], "bold")
    print_line(
        f"{count_of(facts['records'], 'record')} in {count_of(report.sequences, 'sequence')} of {lengths}; "
        f"epoch {report.epoch} has {count_of(report.steps, 'step')} of {count_of(report.rows, 'row')} on "
        f"{count_of(facts['world_size'], 'rank')}{chunks}"
    )
    print_line("sequence:offset of the first record in each row")
    for step, rows in enumerate(facts["first_rows"]):
        shown = ("-" if stream_id < 0 else f"{stream_id}:{offset}" for stream_id, offset in rows)
        print_line(f"step {step}: {' '.join(shown)}{' ...' if len(rows) < report.rows else ''}")
    print_line()
    continuing = f"{report.continuing:,} of {count_of(report.rows, 'row')}; the others take chunks from anywhere"
    print_line(f"continuing: {'all rows' if report.continuing == report.rows else continuing}")
    beginnings = "none" if report.continuing else "every chunk, because no row continues"
    if report.run_steps is not None:
        beginnings = (
            f"a row starts a new sequence every {report.run_steps:.1f} steps ({report.run_records:.1f} records) on "
            f"average, {count_of(report.beginnings, 'time')} in total"
        )
    print_line(f"beginnings: {beginnings}")
    print_line(f"sequences: each step has rows from {report.per_batch:.1f} different sequences")
    print_line(f"filler: {f'{report.filler:.1%} of the slots hold no record' if report.filler else 'none'}")
    print_line(f"multiplicity: {report.multiplicity.verdict}")
    if report.sampled:
        print_line(f"note: all figures are from a sample of {count_of(report.looked_at, 'step')}")
