"""What the loader's arguments ask for: order, batches, ranks."""

import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from dataload import ConfigError, Loader, RangeSource, WorkerError
from dataload.loader.order import shuffled
from dataload.samplers import BucketBatchSampler, Mixture, PackedBatchSampler, PoolShuffle, Weighted
from dataload.samplers.basic import GlobalShuffle, Lanes, Repeat, Sequential, ShardSequential, Subset
from dataload.samplers.batch import BatchPlanner, BatchSampler
from dataload.sources import ConcatSource
from dataload.streams import MultiStreamLoader, RowMixture, StreamSampler
from dataload.types import FieldSpec


class Remote(RangeSource):
    """A source in shards that says that order matters."""

    reads_in_order = True

    def __init__(self, *shard_lengths):
        super().__init__(sum(shard_lengths))
        self._lengths = shard_lengths

    @property
    def shard_lengths(self):
        return self._lengths


def test_a_shuffle_is_global_unless_the_source_reads_in_order():
    assert Loader(RangeSource(9), batch_size=2, shuffle=True, seed=3).batch_sampler.order == GlobalShuffle(9, 3)
    assert Loader(RangeSource(9), batch_size=2).batch_sampler.order == Sequential(9)
    remote = Remote(3000, 1000, 2000)
    by_shards = PoolShuffle(ShardSequential((3000, 1000, 2000), 3), 4000, 3)
    assert Loader(remote, batch_size=2, shuffle=True, seed=3).batch_sampler.order == by_shards
    assert Loader(remote, batch_size=2, shuffle="global", seed=3).batch_sampler.order == GlobalShuffle(6000, 3)
    assert Loader(remote, batch_size=2).batch_sampler.order == Sequential(6000)
    assert shuffled([1, 2, 3], "shards", 7) == PoolShuffle(ShardSequential((3,), 7), 1024, 7)


@pytest.mark.parametrize(("shards", "pool_size"), [((10,) * 4, 1024), ((5000,) * 4, 10_000), ((10**6,) * 4, 64_516)])
def test_the_pool_holds_two_shards_and_never_few_records(shards, pool_size):
    assert shuffled(Remote(*shards), "shards", 0).pool_size == pool_size


class Frames(Remote):
    """Records of eight bytes that are decoded in groups."""

    groups = (2, 2)
    fields = RangeSource(1).fields


def test_a_global_shuffle_of_groups_that_do_not_fit_into_memory_is_warned_of():
    def warned(groups, shuffle="global", shards=None):
        frames = Frames(*(shards or (sum(groups),)))
        frames.groups = groups
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Loader(frames, batch_size=2, shuffle=shuffle).close()
        return [str(each.message) for each in caught]

    half = 1 << 26  # records, of which two halves fill a gigabyte
    (message,) = warned((half, half + 1))
    assert message.startswith("records are decoded in groups of 67,108,864, and a global shuffle decodes a whole group")
    assert message.endswith("and mixes them in a pool of 65,520 records")
    for groups, settings in [
        ((half, half), {}),  # they fit
        ((2 * half + 1,), {}),  # a group is a shard
        ((half, half + 1), {"shuffle": "shards"}),
        ((half, half + 1), {"shuffle": False}),
    ]:
        assert warned(groups, **settings) == []


@pytest.mark.parametrize(("fields", "pool_size"), [({}, 1024), ({"x": FieldSpec("uint8", (1 << 30,))}, 1)])
def test_a_pool_of_records_that_are_decoded_in_groups_fits_into_memory(fields, pool_size):
    frames = Frames(4)
    frames.fields = fields
    assert shuffled(frames, "shards", 0).pool_size == pool_size


def test_long_shards_are_cut_so_that_one_large_file_is_shuffled_too():
    order = shuffled(Remote(100_000, 3), "shards", 0)
    assert order.parent.shard_lengths == (25_000, 25_000, 25_000, 25_000, 3)
    assert shuffled(Remote(0, 32_768), "shards", 0).parent.shard_lengths == (0, 32_768)
    large = shuffled(RangeSource(10**7), "shards", 0)
    first = large.indices(np.arange(2560), epoch=0)
    assert len(np.unique(first // 32_768)) > 1


def test_a_batch_sampler_gets_rank_and_tail_of_the_loader(monkeypatch):
    planner = BucketBatchSampler(lengths=[1, 2, 3, 4], batch_size=2)
    assert Loader(RangeSource(4), sampler=planner).batch_sampler == planner
    found = Loader(RangeSource(4), sampler=planner, rank=1, world_size=3).batch_sampler
    assert (found.rank, found.world_size, found.tail) == (1, 3, "pad")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Loader(RangeSource(4), sampler=planner).batch_sampler.world_size == 2
    own = BucketBatchSampler(lengths=[1, 2, 3, 4], batch_size=2, rank=4, world_size=5)
    assert Loader(RangeSource(4), sampler=own).batch_sampler.rank == 4


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "-2"},
        *({"RANK": rank, "WORLD_SIZE": "4"} for rank in ("one", "4", "-1")),
        {"RANK": "", "WORLD_SIZE": ""},
    ],
)
def test_half_an_environment_is_refused(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match="both needed, as integers, and RANK from 0 to WORLD_SIZE - 1; set them, or pass rank="
    ):
        Loader(RangeSource(4), batch_size=2)
    assert Loader(RangeSource(4), batch_size=2, rank=0, world_size=1).batch_sampler.world_size == 1


def first_rows(loader):
    return next(iter(loader))["index"].tolist()


def test_a_launcher_is_asked_for_the_rank_when_the_first_batch_is_wanted(monkeypatch):
    """Lightning, for example, sets WORLD_SIZE in a second process, and the rank only when it trains."""
    built_first = Loader(RangeSource(8), batch_size=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = Loader(RangeSource(8), batch_size=2)
    assert (len(loader), len(built_first)) == (2, 2)
    assert loader.state_dict() == built_first.state_dict()
    assert (loader.batch_sampler.world_size, loader.batch_sampler_of(3).world_size) == (2, 2)
    with pytest.raises(ConfigError, match=r"the environment has WORLD_SIZE='2': .* or initialise torch.distributed"):
        next(iter(loader))
    monkeypatch.setenv("RANK", "1")
    assert first_rows(loader) == first_rows(built_first) == [1, 3]
    monkeypatch.setenv("RANK", "0")
    assert first_rows(loader) == [1, 3], "a rank that was used never changes"


def test_a_state_that_was_loaded_before_the_rank_was_known_is_dealt_to_the_ranks(monkeypatch):
    saved = Loader(RangeSource(12), batch_size=2, rank=0, world_size=1)
    next(iter(saved))
    loader = Loader(RangeSource(12), batch_size=2)
    loader.load_state_dict(saved.state_dict())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert [batch["index"].tolist() for batch in loader] == [[3, 5], [7, 9], [11, 11]]
    loader = Loader(RangeSource(12), batch_size=2)
    loader.set_epoch(3)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert first_rows(loader) == [1, 4]
    assert loader.batch(0, 1)["index"].tolist() == [7, 10]
    assert loader.epoch == 4


LAUNCHERS = [
    {"RANK": "1", "WORLD_SIZE": "2"},  # torchrun, accelerate launch, Ray Train
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
]


@pytest.mark.parametrize("variables", LAUNCHERS)
def test_launchers_say_the_rank(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert first_rows(Loader(RangeSource(8), batch_size=2)) == [1, 3]


def test_torch_says_the_rank_once_its_processes_know_each_other(monkeypatch):
    loader = Loader(RangeSource(8), batch_size=2)
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 1, get_world_size=lambda: 2
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert first_rows(loader) == [1, 3]


def test_a_task_of_slurm_outside_of_a_step_reads_all(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")  # in a batch script
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")  # without its size
    assert first_rows(Loader(RangeSource(8), batch_size=2)) == [0, 1]
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert first_rows(Loader(RangeSource(8), batch_size=2)) == [0, 1]


@pytest.mark.parametrize("known", [(2, False, 1), (2, True, 2), (None, True, 2)])
def test_a_jax_program_of_several_processes_needs_a_rank(monkeypatch, known):
    """By what the modules say in which JAX keeps what it knows of its processes."""
    client, started, backend = known
    state = SimpleNamespace(num_processes=client)
    backends = SimpleNamespace(backends_are_initialized=lambda: started, process_count=lambda: backend)
    monkeypatch.setitem(sys.modules, "jax._src.distributed", SimpleNamespace(global_state=state))
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", backends)
    message = (
        "this JAX program has 2 processes, and each of them would read all of the data: pass rank= and world_size="
    )
    with pytest.raises(ConfigError, match=message):
        Loader(RangeSource(4), batch_size=2)
    with pytest.raises(ConfigError, match=message):
        MultiStreamLoader(iter, [[1]], batch_size=1)
    assert Loader(RangeSource(4), batch_size=2, rank=0, world_size=1).batch_sampler.world_size == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Loader(RangeSource(4), batch_size=2).batch_sampler.world_size == 2


def test_ranks_share_a_global_batch_equally():
    planner = Loader(RangeSource(24), global_batch_size=12, rank=1, world_size=4).batch_sampler
    assert (planner.batch_size, planner.world_size, planner.rank) == (3, 4, 1)


BATCHES = BatchSampler(sampler=Sequential(10), batch_size=2)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "give batch_size, global_batch_size or a sampler that makes batches"),
        ({"batch_size": 1, "global_batch_size": 4}, "batch_size is for one rank and global_batch_size for all: give"),
        ({"global_batch_size": 0}, "global_batch_size must be an integer >= 1, got 0"),
        (
            {"global_batch_size": 64, "rank": 2, "world_size": 3},
            "global_batch_size is 64, which 3 ranks cannot share equally: give a multiple of every number of ranks",
        ),
        ({"global_batch_size": 4, "rank": 0, "world_size": 0}, "world_size must be an integer >= 1, got 0"),
        ({"global_batch_size": 4, "sampler": BATCHES}, "BatchSampler chooses the order and the batches: leave global_"),
        ({"shuffle": True, "sampler": BATCHES}, "BatchSampler chooses the order and the batches: leave shuffle out"),
        ({"batch_size": 1, "shuffle": "shard"}, "shuffle must be True, False, 'global' or 'shards'; got 'shard'"),
        ({"batch_size": 1, "sampler": Sequential(11)}, "the sampler chooses from 11 records, and the source has 10"),
        (
            {
                "sampler": PackedBatchSampler(sampler=Sequential(2), lengths=[1] * 10, row_length=2, batch_size=1),
                "collate": {"x": "pad"},
            },
            r"packed rows are laid out by dataload.Pack: leave collate out, or pass Pack\(pad_value=...\)",
        ),
    ],
)
def test_wrong_settings_are_named(settings, match):
    with pytest.raises(ConfigError, match=match):
        Loader(RangeSource(10), **settings)


def made_for(n):
    """All kinds of orders with a value for each of n records, and orders over these."""
    weighted, shards = Weighted([1.0] * n, 4, seed=0), ShardSequential((n - 3, 3), seed=0)
    streams = StreamSampler(sequence_lengths=[n - 3, 3], rows=1)
    return [
        weighted,
        shards,
        Subset(weighted, [0, 1]),
        Repeat(shards, 2),
        Lanes(PoolShuffle(shards, 4, seed=0), 2),
        GlobalShuffle(n, 0, parent=shards),
        Mixture((Sequential(n - 3), ShardSequential((3,), 0)), (1, 1), lengths=(n - 3, 3)),
        BucketBatchSampler(lengths=[1] * n, batch_size=2),
        PackedBatchSampler(sampler=Sequential(4), lengths=[1] * n, row_length=2, batch_size=1),
        BatchSampler(sampler=weighted, batch_size=1),
        streams,
        RowMixture(parts=(streams, StreamSampler(sequence_lengths=[n], rows=1, mode="shuffled"))),
    ]


@pytest.mark.parametrize("n", [9, 10, 11])
def test_samplers_are_compared_with_the_source(n):
    match = rf"^the sampler was made for a source of {n} records, and this one has 10: build a new one"
    match += r", or pass source\[:9\]$" if n == 9 else "$"
    for order in made_for(n):
        given = {"sampler": order} if isinstance(order, BatchPlanner) else {"sampler": order, "batch_size": 1}
        if n == 10:
            Loader(RangeSource(10), **given).close()
            continue
        with pytest.raises(ConfigError, match=match) as refused:
            Loader(RangeSource(10), **given)
        assert refused.value.key == "sampler"


def test_parts_of_a_mixture_are_compared_with_those_of_the_source():
    order = Mixture((Sequential(3), Sequential(7)), (1, 1))
    both = ConcatSource([RangeSource(5), RangeSource(5)])
    message = r"the sampler mixes sources of \(3, 7\) records, and these have \(5, 5\): pass lengths=\(5, 5\)"
    packed = PackedBatchSampler(sampler=order, lengths=[1] * 10, row_length=2, batch_size=1)
    for given in ({"sampler": order, "batch_size": 1}, {"sampler": packed}):
        with pytest.raises(ConfigError, match=message):
            Loader(both, **given)
    Loader(ConcatSource([RangeSource(3), RangeSource(7)]), batch_size=1, sampler=order).close()
    Loader(ConcatSource([both, RangeSource(0), RangeSource(0)]), batch_size=1, sampler=order).close()


def test_orders_of_ones_own_may_say_for_which_source_they_are():
    class Own:
        source_lengths = (4,)

        def __len__(self):
            return 2

        def indices(self, positions, *, epoch):
            return positions + 9

    with pytest.raises(ConfigError, match="the sampler was made for a source of 4 records, and this one has 10"):
        Loader(RangeSource(10), batch_size=1, sampler=Own())
    Own.source_lengths = None
    with Loader(RangeSource(10), batch_size=2, sampler=Own()) as loader, pytest.raises(WorkerError, match="IndexError"):
        next(iter(loader))
