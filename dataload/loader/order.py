"""The plan of a loader, from its arguments: the order, the ranks it is dealt to, and the batch size."""

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar

from dataload._util.indexing import even_split
from dataload._util.interactive import INSTEAD, instead
from dataload._util.randomness import derive_keys
from dataload.catalog.facts import row_bytes
from dataload.collate import Pack
from dataload.errors import ConfigError
from dataload.samplers import (
    BatchPlanner,
    BatchSampler,
    GlobalShuffle,
    Mixture,
    PackedBatchSampler,
    PoolShuffle,
    Sequential,
    ShardSequential,
)
from dataload.samplers.batch import Tail
from dataload.samplers.common import source_lengths_of
from dataload.sources.base import Source
from dataload.sources.views.concat import ConcatSource, MixedSource
from dataload.types import RandomAccessSource, Sampler, Sharded

SelfT = TypeVar("SelfT")
P = ParamSpec("P")

_INSTEAD = "; dataload.torch.DataLoader takes torch's arguments"


def explains_arguments(init: Callable[Concatenate[SelfT, P], None]) -> Callable[Concatenate[SelfT, P], None]:
    """Decorate the constructor of a loader: an argument that it does not have raises a TypeError with its name here."""
    known = [*inspect.signature(init).parameters][1:]

    @functools.wraps(init)
    def checked(self: SelfT, /, *args: P.args, **settings: P.kwargs) -> None:
        name = type(self).__name__
        if len(args) > 1:
            message = f"{name} takes the source and then named arguments: write batch_size={args[1]!r}"
            raise TypeError(message + _INSTEAD)
        for argument in settings:
            if argument not in known:
                torch = _INSTEAD if argument in INSTEAD["loader argument"] else ""
                advice = instead("loader argument", argument, known)
                raise TypeError(f"{name} has no argument {argument!r}{advice}{torch}")
        init(self, *args, **settings)

    return checked


def refuse_torch_sampler(sampler: Any) -> None:
    """Raise TypeError for a sampler of torch."""
    for kind in type(sampler).__mro__:
        if kind.__module__.startswith("torch.") and kind.__name__ in INSTEAD["sampler"]:
            advice = f"{instead('sampler', kind.__name__)}; dataload.torch.DataLoader takes it as it is"
            raise TypeError(f"{type(sampler).__name__} is a sampler of torch{advice}")


Shuffle: TypeAlias = Literal["global", "shards"]
"""Shuffle all records at once; or read shards in a random order, through a pool."""


class DistributedRank(TypedDict):
    """The rank of a process in a distributed training job.

    Attributes:
        rank: Rank of the process, in [0, world_size).
        world_size: Number of processes that read different data.
    """

    rank: int
    world_size: int


_SMALLEST_POOL = 1024
_LONGEST_PIECE = 32_768  # records
_POOL_BYTES = 1 << 29  # of decoded records: half of the default of the option `frame_bytes`


def plan_batches(
    source: RandomAccessSource[Any],
    *,
    batch_size: int | None,
    global_batch_size: int | None,
    sampler: Any,
    shuffle: bool | Shuffle,
    seed: int,
    tail: Tail | None,
    rank: int | None,
    world_size: int | None,
) -> BatchPlanner:
    """Return the plan that the arguments of `dataload.Loader` ask for."""
    rank, world_size = rank_and_world_size(rank, world_size, sampler, rank_later=True)
    if tail is None:
        tail = "partial" if world_size == 1 else "pad"
    if isinstance(sampler, BatchPlanner):
        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        for name, value in {**sizes, "shuffle": shuffle or None}.items():
            if value is not None:
                message = f"{type(sampler).__name__} chooses the order and the batches: leave {name} out"
                raise ConfigError(message, key=name, value=value)
        plan = sampler.with_ranks(rank=rank, world_size=world_size, tail=tail)
    else:
        order = _order(source, sampler, shuffle, seed)
        _warn_of_groups(source, order, world_size)
        rows = rows_per_rank(batch_size, global_batch_size, world_size)
        if rows is None:
            raise ConfigError(
                "give batch_size, global_batch_size or a sampler that makes batches", key="batch_size", value=None
            )
        plan = BatchSampler(sampler=order, batch_size=rows, rank=rank, world_size=world_size, tail=tail)
    _check_records(plan, source)
    return plan


def tail_of(tail: Tail | None, collate: Any, sampler: Any) -> Tail | None:
    """Return the tail of an order, which cannot be padded where records are packed within their step."""
    if not isinstance(collate, Pack) or isinstance(sampler, PackedBatchSampler):
        return tail
    if tail == "pad":
        message = "rows that are packed within a step have no filler to mark: choose tail='drop' or 'partial'"
        raise ConfigError(message, key="tail", value=tail)
    return tail or "partial"


def _check_records(plan: BatchPlanner, source: RandomAccessSource[Any]) -> None:
    """Raise ConfigError if the order was made for another source, as far as it can tell."""
    found, made_for = len(source), source_lengths_of(plan) or (len(source),)
    lengths = tuple(map(len, source.sources)) if isinstance(source, ConcatSource) else ()
    message, total = "", sum(made_for)
    if total != found:
        hint = f"build a new one, or pass source[:{total}]" if total < found else "build a new one"
        message = f"the sampler was made for a source of {total} records, and this one has {found}: {hint}"
    elif plan.records > found:
        message = f"the sampler chooses from {plan.records} records, and the source has {found}"
    elif len(made_for) == len(lengths) and made_for != lengths:
        message = f"the sampler mixes sources of {made_for} records, and these have {lengths}: pass lengths={lengths}"
    if message:
        raise ConfigError(message, key="sampler", value=plan.order)


def rows_per_rank(batch_size: int | None, global_batch_size: int | None, world_size: int) -> int | None:
    """Return the batch size of each rank, which is given directly or for all ranks together; None if neither is."""
    if global_batch_size is None:
        return batch_size
    if batch_size is not None:
        message = "batch_size is for one rank and global_batch_size for all: give one of them"
        raise ConfigError(message, key="global_batch_size", value=global_batch_size)
    if global_batch_size % world_size:
        raise ConfigError(
            f"global_batch_size is {global_batch_size}, which {world_size} ranks cannot share equally: give a multiple "
            "of every number of ranks that the job may run on",
            key="global_batch_size",
            value=global_batch_size,
        )
    return global_batch_size // world_size


def default_order(source: RandomAccessSource[Any], shuffle: bool | Shuffle, seed: int) -> Sampler:
    """Return the order of a source without a sampler: index order, shuffled, or mixed by weights."""
    if not isinstance(source, MixedSource):
        return shuffled(source, shuffle, seed) if shuffle else Sequential(len(source))
    count = len(source.sources)
    seeds = derive_keys([seed] * count, "part of a mix", range(count), 1)[:, 0].tolist()
    samplers = [default_order(each, shuffle, own) for each, own in zip(source.sources, seeds, strict=True)]
    named = dict(zip(source.names, samplers, strict=True)) if source.names else samplers
    lengths, limits = tuple(map(len, source.sources)), source.max_epochs
    return Mixture(named, source.weights, source.stop, seed, lengths=lengths, max_epochs=limits)


def shuffled(source: RandomAccessSource[Any], shuffle: Literal[True] | Shuffle, seed: int) -> Sampler:
    """Return the order that ``shuffle=`` stands for."""
    # True depends on the data, never on the machine, because every machine must get the same order.
    if shuffle is True:
        shuffle = "shards" if getattr(source, "reads_in_order", False) else "global"
    if shuffle == "global":
        return GlobalShuffle(len(source), seed)
    lengths = shard_lengths(source)
    return PoolShuffle(ShardSequential(lengths, seed), default_pool_size(source, lengths), seed)


def shard_lengths(source: RandomAccessSource[Any]) -> tuple[int, ...]:
    """Return the records per shard, in index order, for an order by shards; one shard if the source does not say."""
    # Long shards are cut into equal pieces, short enough for a pool to hold two. Otherwise no pool could mix the start
    # of one large file with its end. A piece is still long enough to be read as fast as the whole file.
    if isinstance(source, Source):
        lengths = source.groups
    else:
        lengths = source.shard_lengths if isinstance(source, Sharded) else (len(source),)
    pieces = ((length, -(-length // _LONGEST_PIECE) or 1) for length in lengths)
    return tuple(stop - start for length, parts in pieces for start, stop in even_split(length, parts))


def default_pool_size(source: RandomAccessSource[Any], lengths: Sequence[int]) -> int:
    """Return the size of a pool that shuffles the shards of `source`, in records, given their `shard_lengths`."""
    # Two shards fit, so that neighbours in a batch come from several shards; a pool of 1,024 is always cheap.
    size = max(2 * len(source) // len(lengths), _SMALLEST_POOL)
    if not isinstance(source, Source) or source.groups == source.shard_lengths:
        return size
    # Groups are decoded as a whole, and what is in the pool waits in memory.
    return min(size, max(1, _POOL_BYTES // max(1, row_bytes(source.fields))))


def _warn_of_groups(source: RandomAccessSource[Any], order: Sampler, world_size: int) -> None:
    """Warn of a shuffle of records that are decoded in groups, such as frames, if they do not fit in memory."""
    shuffles = isinstance(order, (GlobalShuffle, PoolShuffle))
    if not (shuffles and isinstance(source, Source) and source.reads_in_order):
        return
    many, groups = len(source), source.groups
    if many < 2 * len(groups) or groups == source.shard_lengths:
        return
    if isinstance(order, PoolShuffle):
        _warn_of_pool(source, min(order.pool_size, many), world_size)
        return
    if many * row_bytes(source.fields) <= 2 * _POOL_BYTES:
        return
    pool = default_pool_size(source, shard_lengths(source))
    warnings.warn(
        f"records are decoded in groups of {many / len(groups):,.0f}, and a global shuffle decodes a whole group "
        f"for nearly every record: shuffle='shards' decodes each once, and mixes them in a pool of {pool:,} records",
        stacklevel=2,
    )


def _warn_of_pool(source: Source[Any], pool: int, world_size: int) -> None:
    """Warn if a rank's part of the pool takes more memory than `frame_bytes`."""
    held: int | None = getattr(getattr(source, "options", None), "frame_bytes", None)
    size = row_bytes(source.fields)
    if held is None or pool * size <= held * world_size:
        return
    fits, needed = held * world_size // size, -(-pool * size // world_size)
    warnings.warn(
        f"the order mixes records in a pool of {pool:,}, and the option frame_bytes holds {fits:,} decoded ones, so "
        f"groups are decoded several times: take a smaller pool, or raise frame_bytes to {needed:,}",
        stacklevel=2,
    )


def _order(source: RandomAccessSource[Any], sampler: Any, shuffle: bool | Shuffle, seed: int) -> Sampler:
    if sampler is None:
        return default_order(source, shuffle, seed)
    if shuffle:
        raise ConfigError("shuffle and sampler both choose the order: give one of them", key="shuffle", value=shuffle)
    refuse_torch_sampler(sampler)  # first, because one of them has an attribute `indices`
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"a sampler needs __len__ and indices(positions, epoch=); {type(sampler).__name__} does not have both: for "
            "chosen records, pass source[indices]"
        )
    return sampler


_LAUNCHERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
"""Variables of Open MPI, and of Slurm in a step that ``srun`` started."""


def rank_and_world_size(
    rank: int | None = None, world_size: int | None = None, plan: Any = None, *, rank_later: bool = False
) -> tuple[int, int]:
    """Return the rank and the number of ranks.

    The first that knows them counts: the arguments, `plan`, a launcher. Without any, they are 0 and 1.
    Launchers say it by torch.distributed once that is initialised, by RANK and WORLD_SIZE, or by variables of their
    own. With `rank_later`, a rank that is not known yet is 0.
    """
    # A JAX program of several processes has to say which rank it wants, because only its sharding tells which processes
    # read the same data.
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size go together: give both or neither", key="rank", value=rank)
    if rank is not None and world_size is not None:
        return rank, world_size
    if isinstance(plan, BatchPlanner) and plan.world_size > 1:
        return plan.rank, plan.world_size
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if not given:
        if (processes := _jax_processes()) > 1:
            raise ConfigError(
                f"this JAX program has {processes} processes, and each of them would read all of the data: pass rank= "
                "and world_size=, which dataload.jax.distributed_place(sharding) returns (or 0 and 1 to read all)",
                key="rank",
                value=None,
            )
        places = ([_number(os.environ.get(name)) for name in names] for names in _LAUNCHERS)
        return next(((place[0], place[1]) for place in places if place[0] is not None and place[1] is not None), (0, 1))
    rank, world_size = (_number(given.get(name)) for name in ("RANK", "WORLD_SIZE"))
    if "RANK" not in given and world_size and (world_size == 1 or (rank_later and world_size > 0)):
        return 0, world_size
    if rank is None or world_size is None or not 0 <= rank < world_size:
        # Going on would give every rank all of the data.
        found = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigError(
            f"the environment has {found}: RANK and WORLD_SIZE are both needed, as integers, and RANK from 0 to "
            "WORLD_SIZE - 1; set them, or pass rank= "
            "and world_size=, or initialise torch.distributed before the first batch",
            key="rank",
            value=given.get("RANK"),
        )
    return rank, world_size


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _jax_processes() -> int:
    """Return the number of processes of the JAX program in this process, as far as JAX knows it; 1 without JAX."""
    # JAX is not imported and no backend is started for this, which only private names allow. A test compares the result
    # with JAX's own.
    distributed, backends = (sys.modules.get(f"jax._src.{name}") for name in ("distributed", "xla_bridge"))
    started = getattr(backends, "backends_are_initialized", None)
    if backends is not None and started is not None and started():
        return backends.process_count()  # processes of TPUs find each other without `jax.distributed`
    return getattr(getattr(distributed, "global_state", None), "num_processes", None) or 1
