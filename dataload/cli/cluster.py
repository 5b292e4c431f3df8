"""``dataload plan`` and ``dataload fleet``: jobs on many machines."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Annotated, Any, TypeAlias, cast

import numpy as np
import typer
from rich.filesize import decimal

from dataload._util.indexing import even_split
from dataload.analysis.job_plan import Cluster, ClusterPlan, plan_job
from dataload.api import open_source
from dataload.cli.options import ConfigFile, JsonFlag, Overrides, command_group
from dataload.cli.output import count_of, print_json, print_line, print_table
from dataload.config import read_config
from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.sources.base import Source, SubsetSource
from dataload.sources.file_source import FileSource
from dataload.sources.memory import RangeSource
from dataload.sources.registry import get_format
from dataload.sources.views.concat import ConcatSource
from dataload.storage import RemoteOptions, storage_of
from dataload.storage.remote.settings import parse_bytes
from dataload.types import FieldSpec, Int64Array, Sharded


def plan_command(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 8,
    bandwidth: Annotated[str, typer.Option(help="Network bandwidth of each node, in bytes per second.")] = "1GB/s",
    cache: Annotated[
        str | None, typer.Option(help="Size of each node's cache. Default: remote.budget, or room for all shards.")
    ] = None,
    records: Annotated[int | None, typer.Option(min=1, help="Number of records, to plan without data.")] = None,
    shards: Annotated[int | None, typer.Option(min=1, help="Number of shards, to plan without data.")] = None,
    record_bytes: Annotated[str | None, typer.Option(help="Size of a record, to plan without data.")] = None,
    json: JsonFlag = False,
) -> None:
    """Plan a job on many machines: downloads, cache and load, computed from the order without reading data.

    Example: dataload plan train.toml --nodes 128 --gpus 8 --bandwidth 10GB/s --cache 1TB

    Without data: dataload plan train.toml --nodes 128 --records 10000000000 --shards 100000 --record-bytes 100kB
    """
    line = parse_bytes("--bandwidth", bandwidth.removesuffix("/s"))
    settings = read_config(config, [*(overrides or ()), f"loader.world_size={nodes * gpus}", "loader.rank=0"])
    options = RemoteOptions.parse({} if settings.remote is None else settings.remote.given())
    given = options.budget if cache is None else cache
    budget = None if given is None else parse_bytes("--cache", given)
    job = _open_job(settings, nodes, gpus, _counted(records, shards, record_bytes), record_bytes)
    _check_cache(job, budget)
    plan = plan_job(job, bandwidth=line, budget=budget, mode=options.mode)
    if json:
        print_json({**plan.to_json(), "picture": None})
        return
    _print_plan(plan, budget)


def _open_job(settings: Any, nodes: int, gpus: int, counted: Source[Any] | None, record_bytes: str | None) -> Cluster:
    """Open the data, or take those that are only counted."""
    if counted is not None and len(settings.sources()) != 1:
        raise ConfigError("--records stands for one data set: the config must have one [source]", key="records")

    def opened(*paths: Any, **options: Any) -> Source[Any]:
        return open_source(*paths, **options) if counted is None else counted

    try:
        loader = settings.build(opened)
    except ConfigError as error:
        if error.key is None or not error.key.endswith("lanes"):
            raise
        ranks = nodes * gpus
        raise ConfigError(
            f"{nodes} nodes of {gpus} are {ranks} ranks: {error}; set lanes to {ranks}, or to a multiple",
            key=error.key,
            value=error.value,
        ) from error
    if not isinstance(loader, Loader):
        loader.close()
        raise ConfigError("sampler.kind is 'iterators': streams have no order to plan by", key="sampler.kind")
    with loader, closing(cast("Any", loader.source)) as source:
        lengths = source.shard_lengths if isinstance(source, Sharded) else (len(source),)
        sizes, records = shards_of(source, parse_bytes("--record-bytes", record_bytes or 1))
        return Cluster(
            planner=loader.batch_sampler,
            ends=np.cumsum(lengths, dtype=np.int64),
            sizes=sizes,
            records=int(records.sum()),
            ranks_per_node=gpus,
        )


class _Counted(RangeSource):
    """A data set with a known size and no data."""

    def __init__(self, records: int, shards: int) -> None:
        super().__init__(records)
        self._lengths = tuple(stop - start for start, stop in even_split(records, shards))

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        return self._lengths

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return {}


def _counted(records: int | None, shards: int | None, record_bytes: str | None) -> Source[Any] | None:
    given = [value is not None for value in (records, shards, record_bytes)]
    if any(given) and not all(given):
        raise ConfigError("--records, --shards and --record-bytes stand for data: give all three", key="records")
    if records is None or shards is None:
        return None
    if shards > records:
        raise ConfigError(f"--shards must be at most --records, {records}, got {shards}", key="shards", value=shards)
    return _Counted(records, shards)


def shards_of(source: Any, record_bytes: int) -> Int64Array:
    """Return bytes and records of each shard, (2, shards) int64; without files, by an assumed size per record."""
    if isinstance(source, ConcatSource):
        return np.concatenate([shards_of(part, record_bytes) for part in source.sources], axis=1)
    lengths = np.array(source.shard_lengths if isinstance(source, Sharded) else (len(source),))
    if isinstance(source, FileSource):
        entry = get_format(source.format_name)
        sizes = [storage_of(path, source.remote).size(entry.file(path)) for path in source.paths]
        return np.array([sizes, lengths])
    if isinstance(source, SubsetSource):  # whole shards are downloaded, if they have records of it
        ends = np.cumsum(source.parent.shard_lengths)
        found = shards_of(source.parent, record_bytes)[:, np.unique(np.searchsorted(ends, source.indices, "right"))]
        return found if found.shape[1] == len(lengths) else found.sum(axis=1, keepdims=True)
    return np.array([lengths * record_bytes, lengths])


def _check_cache(job: Cluster, budget: int | None) -> None:
    largest = int(job.sizes.max())
    if budget is not None and budget < largest:
        raise ConfigError(
            f"a cache of {decimal(budget)} has no room for the largest shard, {decimal(largest)}: raise --cache (or "
            f"remote.budget) to several shards for each of the {job.ranks_per_node} ranks of a node, or write smaller "
            "shards with dataload convert",
            key="cache",
            value=budget,
        )


def _print_plan(plan: ClusterPlan, budget: int | None) -> None:
    ranks = plan.nodes * plan.ranks_per_node
    print_line(
        f"{count_of(plan.nodes, 'node')} of {count_of(plan.ranks_per_node, 'rank')} ({ranks:,}); "
        f"{count_of(plan.shards, 'shard')} of {decimal(plan.data_bytes)}; {count_of(plan.steps, 'step')} per epoch",
        "bold",
    )
    print_line(f"mode {plan.mode.mode}: {plan.mode.reason}")
    print_line()
    mean, most = plan.node_bytes
    rows = [
        ("bytes that a node reads in an epoch", f"{decimal(int(mean))} (most: {decimal(int(most))})"),
        ("cache to download each shard once", decimal(plan.together_bytes) if plan.together_bytes else "-"),
        ("downloads before the first batch", f"at least {decimal(plan.first_bytes)}"),
        ("time to the first batch", f"at least {plan.first_seconds:,.1f} s"),
        ("nodes that read the same shard", f"{plan.readers[0]:,.1f} (most: {plan.readers[1]:,})"),
        ("of them within 1% of an epoch", f"up to {plan.readers_at_once:,}"),
    ]
    print_table({"": "left", "plan": "left"}, rows)
    for note in _notes(plan, budget):
        print_line(f"note: {note}")


def _notes(plan: ClusterPlan, budget: int | None) -> list[str]:
    notes: list[str] = []
    if plan.walked < 1:
        notes.append(f"only {plan.walked:.3%} of an epoch's records were looked at, at even intervals")
    if budget is not None and plan.together_bytes > budget:
        notes.append(
            "the cache is smaller than what a node reads at the same time, so that shards are downloaded again or read "
            f"by range: give --cache {decimal(plan.together_bytes)} or more, a smaller pool, or smaller shards"
        )
    if plan.mode.mode == "shards" and plan.readers[0] > plan.nodes / 2 > 0.5:
        notes.append(f"every node reads nearly every shard: lanes ({plan.nodes * plan.ranks_per_node}) keep them apart")
    return notes


Address: TypeAlias = Annotated[
    str | None, typer.Option(help="The Ray cluster. Default: RAY_ADDRESS, or the one that runs on this machine.")
]

_RIGHT = ("process", "loaders", "queue", "made", "bytes")
_COLUMNS = {name: "right" if name in _RIGHT else "left" for name in ("fleet", "node", *_RIGHT)}

fleet_command: Any = command_group("Show and end the workers of loaders on a Ray cluster.")


@fleet_command.command("status")
def status_command(address: Address = None, json: JsonFlag = False) -> None:
    """List the workers of all fleets: their nodes, the loaders that use them, the batches they are asked for, bytes."""
    from dataload.ray import list_actors  # needs Ray

    reports = list_actors(address)
    if json:
        print_json([asdict(report) for report in reports])
        return
    if not reports:
        print_line("no fleet has a worker here")
        return
    rows = [asdict(each) | {"fleet": f"{each.fleet}/{each.number}", "bytes": decimal(each.bytes)} for each in reports]
    print_table(_COLUMNS, [tuple(str(row[name]) for name in _COLUMNS) for row in rows])


@fleet_command.command("stop")
def stop_command(name: Annotated[str, typer.Argument(help="Name of the fleet.")], address: Address = None) -> None:
    """End all workers of a fleet. Loaders that still use it start others."""
    from dataload.ray import stop_fleet  # needs Ray

    ended = stop_fleet(name, address)
    if not ended:
        raise ConfigError(f"there is no fleet {name!r}: `dataload fleet status` lists them", key="name", value=name)
    print_line(f"ended {count_of(ended, 'worker', 'workers')} of {name}")
