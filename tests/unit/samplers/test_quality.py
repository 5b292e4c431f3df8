"""The judgement of orders: figures against plain loops, verdicts on orders known to be good or bad."""

import hashlib
import itertools
import math
import random
import re
import tracemalloc
from collections import Counter
from dataclasses import astuple, dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
from orders import plans_of

from dataload.samplers import BatchSampler, BucketBatchSampler, Mixture, PackedBatchSampler, PoolShuffle, Weighted
from dataload.samplers.basic import GlobalShuffle, Sequential, ShardSequential
from dataload.samplers.pool_quality import PoolTrial, pool_size_for
from dataload.samplers.quality import (
    BucketFiller,
    Figure,
    Mixing,
    Multiplicity,
    ShardLayout,
    expected_shards,
    global_rows,
    order_report,
    sample_order,
    shards_per_batch,
)

SIGMAS = 5


@dataclass(frozen=True)
class Table:
    """An order written out, one row for each epoch."""

    rows: tuple[tuple[int, ...], ...]
    records: int

    def __len__(self):
        return len(self.rows[0])

    def indices(self, positions, *, epoch):
        return np.array(self.rows[epoch], np.int64)[positions]


def table(records, length, *, seed, repeats=False):
    rng = random.Random(seed)
    draw = rng.choices if repeats else rng.sample
    return Table(tuple(tuple(draw(range(records), k=length)) for _ in range(2)), records)


def batches_of(order, size):
    return [order[i : i + size] for i in range(0, len(order), size)]


def shard_of(index, lengths):
    return next(s for s, end in enumerate(itertools.accumulate(lengths)) if index < end)


def hypergeometric(lengths, size):
    """Return how many shards `size` records without replacement come from, on average."""
    records = sum(lengths)
    return float(sum(1 - Fraction(math.comb(records - m, size), math.comb(records, size)) for m in lengths))


@pytest.mark.parametrize("repeats", [False, True])
def test_displacement_is_that_of_a_loop(repeats):
    sampler = table(60, 40, seed=1, repeats=repeats)
    found = order_report(BatchSampler(sampler=sampler, batch_size=7)).displacement
    moved = sorted(abs((i + 0.5) / 60 - (p + 0.5) / 40) for p, i in enumerate(sampler.rows[0]))
    assert found.mean.found == pytest.approx(sum(moved) / 40)
    for q, value, ideal in found.quantiles:
        below = q * 39
        lower, upper = moved[math.floor(below)], moved[math.ceil(below)]
        assert value == pytest.approx(lower + (upper - lower) * (below % 1))
        # Of a uniform permutation: P(|x - y| > d) = (1 - d)^2.
        assert (1 - ideal) ** 2 == pytest.approx(1 - q)


def test_the_error_of_the_mean_is_that_of_its_parts():
    sampler, at = table(60, 60, seed=1), (np.arange(60) + 0.5) / 60
    moved = np.abs((np.array(sampler.rows[0]) + 0.5) / 60 - at) - (at**2 - at + 0.5)
    one, two = (order_report(BatchSampler(sampler=sampler, batch_size=size)).displacement.mean for size in (60, 30))
    assert one.error == pytest.approx(moved.std() / math.sqrt(60))
    assert two.error == pytest.approx(abs(moved[:30].mean() - moved[30:].mean()) / 2)


def test_mixing_is_that_of_a_loop():
    lengths, size = (10, 0, 25, 1, 24), 7
    sampler = table(60, 60, seed=2)
    planner = BatchSampler(sampler=sampler, batch_size=size)
    batches = batches_of(sampler.rows[0], size)
    counts = [len({shard_of(i, lengths) for i in batch}) for batch in batches]
    assert shards_per_batch(sample_order(planner), ShardLayout.of(60, lengths)).tolist() == counts
    expected = [hypergeometric(lengths, len(batch)) for batch in batches]
    found = order_report(planner, shard_lengths=lengths).mixing
    assert (found.shards, found.noun) == (4, "shards"), "an empty shard is none"
    assert found.per_batch.found == pytest.approx(np.mean(counts))
    assert found.per_batch.ideal == pytest.approx(np.mean(expected))
    assert found.middle == pytest.approx(sum(counts[4:6]) / sum(expected[4:6])), "steps 4 and 5 of 9"


SMALL, LARGE = (1, 2, 7, 59, 60), (300, 3_000, 10_000)  # factors are taken together where batches are large


@pytest.mark.parametrize(
    ("lengths", "sizes", "error"),
    [
        *((lengths, SMALL, 1e-12) for lengths in ((60,), (30, 30), (1,) * 60, (5, 15, 40), (59, 1))),
        ((600, 100, 19_300), LARGE, 1e-5),
    ],
)
def test_expected_shards_are_the_hypergeometric(lengths, sizes, error):
    for size in sizes:
        found = expected_shards(ShardLayout(np.cumsum(lengths), files=True), np.array([size, size]))
        assert found.tolist() == pytest.approx([hypergeometric(lengths, size)] * 2, rel=error)


def test_expected_shards_of_many_sizes_are_interpolated():
    shards = ShardLayout(np.arange(1, 101) * 1000, files=True)
    sizes = np.arange(1, 400, 3)
    each = np.concatenate([expected_shards(shards, sizes[i : i + 1]) for i in range(len(sizes))])
    assert np.abs(expected_shards(shards, sizes) / each - 1).max() < 0.01
    few = np.linspace(1, len(each) - 1, 33).astype(np.int64)  # each is computed
    assert expected_shards(shards, sizes[few]).tolist() == each[few].tolist()


@pytest.mark.parametrize(
    ("sampler", "size", "tail"),
    [
        (Weighted([1.0, 0.0, 5.0] * 20, 50, seed=0), 8, "partial"),
        (Mixture((GlobalShuffle(10, 0), GlobalShuffle(100, 1)), (1.0, 1.0), stop="longest"), 8, "partial"),
        (GlobalShuffle(60, 0), 8, "partial"),
        (GlobalShuffle(103, 0), 10, "drop"),
    ],
)
def test_multiplicity_is_that_of_a_counter(sampler, size, tail):
    planner = BatchSampler(sampler=sampler, batch_size=size, tail=tail)
    report = order_report(planner)
    counts = Counter(itertools.chain(*(plan.indices.tolist() for plan in plans_of(planner))))
    found = report.multiplicity
    assert found.repeated == sum(count > 1 for count in counts.values())
    assert found.never == sampler.records - len(counts)
    assert found.positions == report.looked_at == counts.total()
    assert report.steps == planner.steps(0)


LENGTHS = [random.Random(0).randrange(1, 20) for _ in range(101)]


@pytest.mark.parametrize("tail", ["drop", "pad", "partial"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "planner",
    [
        BatchSampler(sampler=GlobalShuffle(101, 0), batch_size=5),
        BucketBatchSampler(lengths=LENGTHS, max_tokens=60, boundaries=(5, 10, 19)),
        PackedBatchSampler(sampler=GlobalShuffle(101, 0), lengths=LENGTHS, row_length=30, batch_size=3, window=32),
    ],
    ids=lambda planner: type(planner).__name__,
)
def test_global_batches_are_those_of_the_ranks(planner, world_size, tail):
    planner = replace(planner, world_size=world_size, rank=0, tail=tail)
    steps = range(planner.steps(1))
    of_ranks = [[] for _ in steps]
    for rank in range(world_size):
        for plan in replace(planner, rank=rank).plans(steps, epoch=1):
            mask = slice(None) if plan.valid is None or plan.packing else plan.valid
            of_ranks[plan.step] += plan.indices[mask].tolist()
    indices, counts = global_rows(planner, steps, epoch=1)
    found = np.split(indices, np.cumsum(counts)[:-1])
    assert [sorted(batch.tolist()) for batch in found] == [sorted(batch) for batch in of_ranks]
    middle, sizes = global_rows(planner, range(1, 3), epoch=1)
    assert middle.tolist() == [*found[1].tolist(), *found[2].tolist()]
    assert sizes.tolist() == [len(found[1]), len(found[2])]


def verdicts(report):
    return [report.displacement.verdict, report.mixing.verdict, report.multiplicity.verdict]


@pytest.mark.parametrize("seed", range(3))
def test_a_global_shuffle_is_ideal(seed):
    records, size, shards = 100_000, 100, 50
    report = order_report(
        BatchSampler(sampler=GlobalShuffle(records, seed), batch_size=size), shard_lengths=(records // shards,) * shards
    )
    batches = records // size
    # The variance of |x - y| is 1/18.
    assert abs(report.displacement.mean.found - 1 / 3) < SIGMAS / math.sqrt(18 * records)
    for q, found, ideal in report.displacement.quantiles:
        density = 2 * (1 - ideal)
        assert abs(found - ideal) < SIGMAS * math.sqrt(q * (1 - q) / records) / density
    # Which shards a batch has is negatively correlated: the sum of their variances is a bound.
    missed = math.comb(records - records // shards, size) / math.comb(records, size)
    deviation = math.sqrt(shards * missed * (1 - missed))
    mixing = report.mixing.per_batch
    assert abs(mixing.found - mixing.ideal) < SIGMAS * deviation / math.sqrt(batches)
    assert verdicts(report) == [FAR, "a batch mixes as many shards as in a uniform shuffle", ONCE]


REVERSED = Table((tuple(reversed(range(2000))),), 2000)
SMALL_POOL = PoolShuffle(ShardSequential((1000,) * 100, 0), 1000, 0)
STAY = "records stay about where they are in index order"
FURTHER = r"records move 1\.50 times as far as in a uniform shuffle"
FAR, ONCE = "records move as far as in a uniform shuffle", "each record occurs once"


@pytest.mark.parametrize(
    ("order", "size", "lengths", "moves", "mixes", "repeats"),
    [
        (SMALL_POOL, 200, (1000,) * 100, ".*", r"6\.\d of 100 shards; in a uniform shuffle 86\.6", ONCE),
        (Sequential(50_000), 50, None, STAY, r"1\.0 of 100 parts; in a uniform shuffle 39\.5", ONCE),
        (REVERSED, 20, None, FURTHER, r"1\.0 of 100 parts; .*", ONCE),
        (
            Weighted([1.0] * 100, 100, seed=0),
            10,
            None,
            ".*",
            ".*",
            r"\d+ records occur more than once, \d+ of 100 never",
        ),
    ],
    ids=["small pool", "no shuffle", "reversed", "weighted"],
)
def test_bad_orders_are_seen(order, size, lengths, moves, mixes, repeats):
    found = verdicts(order_report(BatchSampler(sampler=order, batch_size=size), shard_lengths=lengths))
    for text, pattern in zip(found, (moves, f"a batch mixes {mixes}", repeats), strict=True):
        assert re.fullmatch(pattern, text)


def rounded(value):
    """A report with six digits, as sums differ a little between machines."""
    if isinstance(value, (dict, list, tuple)):
        return [rounded(each) for each in (value.values() if isinstance(value, dict) else value)]
    return f"{value:.6g}" if isinstance(value, float) else value


def test_reports_are_those_recorded():
    """A change of what is measured may record them anew, if the other tests of this file pass."""
    orders = [
        (PoolShuffle(ShardSequential((100,) * 100, 0), 1000, 0), (100,) * 100),
        (GlobalShuffle(3000, 1), (17, 0, 983, 2000)),
        (Weighted([1.0, 3.0] * 50, 700, seed=0), None),
        (REVERSED, (1999, 1)),
    ]
    planners = [(BatchSampler(sampler=each, batch_size=size), shards) for each, shards in orders for size in (7, 64)]
    buckets = BucketBatchSampler(lengths=LENGTHS * 5, max_tokens=60, boundaries=(5, 10, 19))
    rows = {"lengths": [*range(1, 101)] * 30, "row_length": 256, "batch_size": 3}
    planners += [
        (BatchSampler(sampler=GlobalShuffle(10**7, 1), batch_size=64), (10**5,) * 100),
        (buckets, None),
        (PackedBatchSampler(sampler=GlobalShuffle(3000, 1), **rows), None),
    ]
    found = [order_report(planner, shard_lengths=shards).to_json() for planner, shards in planners]
    pools = [PoolTrial((100, 50, 7) * 20, size, 3).mixing(pool) for size in (10, 500) for pool in (1, 64, 3000)]
    text = repr(rounded([*found, pools, astuple(BucketFiller.of(buckets, epoch=0))]))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "dd20391a027379d8", text


def test_verdicts():
    sampled = Multiplicity(records=9, positions=5, whole=False, repeated=0, never=None)
    assert sampled.verdict == "no record occurs twice or more in the 5 sampled positions"
    assert replace(sampled, repeated=2).verdict == "2 records occur twice or more in the 5 sampled positions"
    whole = Multiplicity(records=9, positions=9, whole=True, repeated=2, never=3)
    assert whole.verdict == "2 records occur more than once, 3 of 9 never"
    mixing = Mixing(shards=9, noun="parts", per_batch=Figure(found=4.0, ideal=5.0, error=0.5), middle=None)
    assert mixing.verdict == "a batch mixes as many parts as in a uniform shuffle, within chance"


@pytest.mark.slow_suite
def test_ten_to_the_ten_records_are_judged_in_little_memory():
    tracemalloc.start()
    report = order_report(BatchSampler(sampler=GlobalShuffle(10**10, 0), batch_size=256))
    small, large = (pool_size_for((10**8 // scale,) * 100, 256, 0.5) for scale in (100, 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64e6
    assert large / small == pytest.approx(100, rel=0.02), "a pool that is large beside a batch is a matter of scale"
    assert report.sampled
    assert report.looked_at < 2**18
    assert abs(report.displacement.mean.found - 1 / 3) < SIGMAS / math.sqrt(18 * report.looked_at)
    assert report.mixing.per_batch.ratio == pytest.approx(1, abs=0.01)
    assert report.multiplicity.never is None


def emitted_by_a_list(records, pool_size, seed):
    """The pool as it is run: a list, a random slot at each step."""
    rng = random.Random(seed)
    pool, out = list(range(min(pool_size, records))), []
    for position in range(len(pool), records):
        slot = rng.randrange(len(pool))
        out.append(pool[slot])
        pool[slot] = position
    rng.shuffle(pool)
    return out + pool


@pytest.mark.parametrize("pool_size", [1, 20, 600, 2400, 4700, 8000])
def test_pool_mixing_is_that_of_a_list_that_is_run(pool_size):
    lengths, size = (250,) * 32, 160  # ten batches in the middle fifth of 8,000 records
    orders = [emitted_by_a_list(8000, pool_size, seed)[3200:4800] for seed in range(20)]
    counts = [len({p // 250 for p in batch}) for order in orders for batch in batches_of(order, size)]
    expected = hypergeometric(lengths, size)
    error = np.std(counts) / math.sqrt(len(counts)) / expected
    found = PoolTrial(lengths, size).mixing(pool_size)
    assert found == pytest.approx(np.mean(counts) / expected, abs=5 * error + 0.003)


@pytest.mark.parametrize("lengths", [(400,) * 50, tuple(range(100, 500, 10))])
@pytest.mark.parametrize("quality", [0.2, 0.5, 0.9])
def test_the_pool_size_reaches_the_quality_and_is_the_smallest(lengths, quality):
    size, records = 64, sum(lengths)
    pool_size = pool_size_for(lengths, size, quality, seed=1)
    assert PoolTrial(lengths, size, 1).mixing(pool_size) >= quality
    assert PoolTrial(lengths, size, 1).mixing(pool_size - max(1, pool_size // 64)) < quality
    shards, found = ShardLayout.of(records, lengths), []
    for seed in range(12):
        order = PoolShuffle(ShardSequential(lengths, seed), pool_size, seed)
        positions = np.arange(records * 2 // 5, records * 2 // 5 + records // 5 // size * size)
        shard = np.searchsorted(shards.ends, order.indices(positions, epoch=0), side="right").reshape(-1, size)
        found += [len(set(batch)) for batch in shard.tolist()]
    reached = np.array(found).reshape(12, -1).mean(axis=1) / expected_shards(shards, np.array([size]))
    # Which shards are read in the middle makes a difference of its own, of which the pool's size rests on 16 epochs.
    error = reached.std(ddof=1) * math.sqrt(1 / 12 + 1 / 16)
    assert abs(reached.mean() - quality) < SIGMAS * error
    assert error < 0.02


@pytest.mark.parametrize(
    ("lengths", "size", "quality", "expected"),
    [
        ((1,), 1, 0.5, None),  # no pool is smaller than one record
        ((7,) * 9, 30, 0.9999, None),
        ((64, 1), 4, 0.99999, None),  # the largest pool is a power of two
        ((1000,), 10, 0.99, 1),  # one shard is all that can be mixed
        ((10, 10), 20, 0.99, 1),  # the batch is the epoch
    ],
)
def test_pools_at_the_limits(lengths, size, quality, expected):
    assert pool_size_for(lengths, size, quality, seed=1) == expected


def test_a_batch_of_all_records_mixes_all_shards():
    assert [PoolTrial((5,) * 8, 40).mixing(size) for size in (1, 7, 20, 40)] == [1.0] * 4


@pytest.mark.slow_suite
def test_pool_sizes_grow_with_the_quality_up_to_the_whole_data():
    sizes = [pool_size_for((20,) * 50, 16, quality) for quality in (0.2, 0.5, 0.99)]
    assert sizes == sorted(set(sizes))
    assert sizes[1] == pool_size_for((20,) * 50, 16, 0.5)
    assert 512 < sizes[-1] < 1000, "between powers of two"
    trial = PoolTrial((20,) * 50, 16)
    assert trial.mixing(sizes[-1]) >= 0.99 > trial.mixing(512)


@pytest.mark.parametrize("tail", ["partial", "pad", "drop"])
def test_padding_is_that_of_the_rows_of_an_epoch(tail):
    lengths = [3, 9, 1, 4, 10, 2, 7, 5, 8, 6, 1]
    settings = {"lengths": lengths, "boundaries": [5, 10], "batch_size": 2, "tail": tail}
    world = {} if tail == "partial" else {"rank": 1, "world_size": 2}
    planner = BucketBatchSampler(**settings, **world)
    one = planner.with_ranks(rank=0, world_size=1, tail="drop" if tail == "drop" else "partial")
    batches = [[lengths[i] for i in plan.indices.tolist()] for plan in one.plans(range(one.steps(0)), epoch=0)]
    assert sum(map(len, batches)) == (10 if tail == "drop" else 11)
    used = sum(map(sum, batches))
    longest = sum(len(batch) * max(batch) for batch in batches)
    boundary = sum(len(batch) * (5 if max(batch) <= 5 else 10) for batch in batches)
    assert BucketFiller.of(planner, epoch=0) == BucketFiller(1 - used / longest, 1 - used / boundary)
