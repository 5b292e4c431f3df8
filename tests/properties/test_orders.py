"""Any composition of orders equals the same composition of lists, however its positions are asked for."""

import contextlib
import dataclasses
import itertools
import os
import pickle
import subprocess
import sys

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dataload import ConfigError
from dataload._util.fingerprint import digest, fingerprint
from dataload._util.randomness import KEY_WORDS, derive_key, hash64, permute
from dataload.samplers import Mixture, PoolShuffle, Weighted
from dataload.samplers.basic import GlobalShuffle, Lanes, Repeat, Sequential, ShardSequential, Subset
from dataload.types import Sampler

# Large orders take a while to draw.
COMPOSED = settings(suppress_health_check=[HealthCheck.too_slow])

LONGEST = 1500  # positions, so that the lists below are soon made

seeds = st.integers(-3, 3) | st.integers()
epochs = st.integers(0, 3) | st.integers(0, 2**40)
lengths = st.integers(3, 80) | st.integers(0, 80)  # seldom empty
pool_sizes = st.integers(1, 12) | st.sampled_from([50, 10**6])


# Weights of few digits, or they would not fit into a window.
def rows_of(parts):
    return st.lists(st.integers(0, 20), min_size=parts, max_size=parts).filter(any).map(tuple)


@st.composite
def weighted(draw):
    weights = draw(st.integers(1, 30).flatmap(rows_of))
    replacement = draw(st.booleans())
    most = 60 if replacement else sum(weight > 0 for weight in weights)
    return Weighted(weights, draw(st.integers(most // 2, most)), draw(seeds), replacement=replacement)


@st.composite
def subsets(draw, parents):
    parent = draw(parents)
    length = len(parent)
    positions = st.lists(st.integers(-length, length - 1), max_size=40) if length else st.just([])
    return Subset(parent, draw(st.slices(length) | positions))


@st.composite
def mixtures(draw, parents):
    samplers = draw(st.lists(parents, min_size=1, max_size=3))
    rows = draw(st.lists(rows_of(len(samplers)), min_size=1, max_size=3).map(tuple))
    for row in rows:
        if any(weight and not len(sampler) for weight, sampler in zip(row, samplers, strict=True)):
            return samplers[0]  # an empty part can have no weight
    window = draw(st.none() | st.integers(70, 200))
    lengths = draw(st.none() | st.just(tuple(sampler.records + extra for extra, sampler in enumerate(samplers))))
    settings = draw(st.sampled_from(["first", "longest"])), draw(seeds), window, lengths
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(1, 300), min_size=len(rows), max_size=len(rows), unique=True))
        changing = dict(zip([0, *starts], rows, strict=False))
        with contextlib.suppress(ConfigError):  # an epoch may end before the last change
            return Mixture(tuple(samplers), (rows[-1], changing) if draw(st.booleans()) else changing, *settings)
    weights = rows[0] if len(rows) == 1 and draw(st.booleans()) else rows
    return Mixture(tuple(samplers), weights, *settings)


LEAVES = (
    lengths.map(Sequential),
    st.builds(GlobalShuffle, lengths, seeds),
    st.builds(ShardSequential, st.lists(st.integers(0, 20), min_size=1, max_size=8).map(tuple), seeds),
    weighted(),
)


def compositions(parents):
    return (
        parents.flatmap(lambda parent: st.builds(GlobalShuffle, st.just(len(parent)), seeds, st.just(parent))),
        st.builds(PoolShuffle, parents, pool_sizes, seeds),
        st.builds(Lanes, parents, st.integers(1, 9), st.none() | pool_sizes, seeds),
        st.builds(Repeat, parents, st.integers(1, 4)),
        subsets(parents),
        mixtures(parents),
    )


def nested(depth):
    """Orders with `depth` others between them and a leaf; st.recursive, which bounds leaves, seldom makes deep ones."""
    if not depth:
        return st.sampled_from(LEAVES).flatmap(lambda leaf: leaf)
    parents = nested(depth - 1)
    deep = st.sampled_from(compositions(parents)).flatmap(lambda composition: composition)
    return deep.filter(lambda sampler: len(sampler) <= LONGEST)


samplers = st.integers(0, 3).flatmap(nested)


def listed(sampler, epoch):
    """The order as a list, by the plain meaning of each sort."""
    match sampler:
        case Sequential(length):
            return list(range(length))
        case GlobalShuffle(length, seed, parent):
            items = list(range(length)) if parent is None else listed(parent, epoch)
            places = permute(np.arange(length), length, derive_key(seed, "shuffle", epoch, words=KEY_WORDS))
            return [items[place] for place in places]
        case ShardSequential(lengths, seed):
            ends = [0, *itertools.accumulate(lengths)]
            key = derive_key(seed, "shards", epoch, words=KEY_WORDS)
            shards = permute(np.arange(len(lengths)), len(lengths), key)
            return [index for shard in shards for index in range(ends[shard], ends[shard + 1])]
        case PoolShuffle(parent, pool_size, seed):
            return pooled(listed(parent, epoch), pool_size, seed, epoch)
        case Lanes(parent, lanes, pool_size, seed):
            return with_ranks(listed(parent, epoch), lanes, pool_size, seed, epoch)
        case Subset(parent, selection):
            items = listed(parent, epoch)
            return [items[position] for position in selection]
        case Repeat(parent, times):
            return [index for r in range(times) for index in listed(parent, epoch * times + r)]
        case Weighted():
            return drawn(sampler, epoch)
        case Mixture():
            return mixed(sampler, epoch)
    raise AssertionError(sampler)


def pooled(items, pool_size, seed, epoch):
    coming = iter(items)
    pool = list(itertools.islice(coming, pool_size))
    slots = hash64(derive_key(seed, "pool", epoch, words=1)[0], np.arange(len(items) - len(pool))).tolist()
    emitted = []
    for slot, item in zip([(bits >> 32) * len(pool) >> 32 for bits in slots], coming, strict=True):
        emitted.append(pool[slot])
        pool[slot] = item
    drain_key = derive_key(seed, "pool-drain", epoch, words=KEY_WORDS)
    return emitted + [pool[slot] for slot in permute(np.arange(len(pool)), len(pool), drain_key)]


def with_ranks(items, lanes, pool_size, seed, epoch):
    spans = []
    for lane in range(lanes):
        size = -(-(len(items)) // (lanes - lane))
        span, items = items[:size], items[size:]
        if pool_size is not None:
            span = pooled(span, pool_size, int(derive_key(seed, "lane", lane, words=1)[0]), epoch)
        spans.append(span)
    return [item for turn in itertools.zip_longest(*spans) for item in turn if item is not None]


def drawn(sampler, epoch):
    weights = sampler.weights.tolist()
    count = sampler.num_samples if sampler.replacement else len(weights)
    key = derive_key(sampler.seed, "weighted" if sampler.replacement else "weighted-urn", epoch, words=1)[0]
    numbers = [((bits >> 12) + 0.5) / 2**52 for bits in hash64(key, np.arange(count)).tolist()]
    if sampler.replacement:
        ends = list(itertools.accumulate(weights))
        return [next(i for i, end in enumerate(ends) if end > number * ends[-1]) for number in numbers]
    waits = {i: -np.log(number) / weights[i] for i, number in enumerate(numbers) if weights[i]}
    return sorted(waits, key=waits.__getitem__)[: sampler.num_samples]


def mixed(mixture, epoch):
    parts = len(mixture.samplers)

    def turns(epoch):
        # A part of one record has no other index than the part's number.
        one_each = Mixture((Sequential(1),) * parts, mixture.weights, "never", mixture.seed, mixture.window)
        return one_each.indices(np.arange(len(mixture)), epoch=epoch).tolist()

    firsts = [0, *itertools.accumulate(mixture.lengths or [sampler.records for sampler in mixture.samplers])]
    coming = []
    for part, sampler in enumerate(mixture.samplers):
        draws = max(turns(one).count(part) for one in range(3))  # later epochs have the weights of the third
        passes = -(-draws // max(1, len(sampler)))
        epochs = range(epoch * passes, (epoch + 1) * passes)
        coming.append(itertools.chain(*(listed(sampler, one) for one in epochs)))
    return [next(coming[part]) + firsts[part] for part in turns(epoch)]


@COMPOSED
@given(sampler=samplers, epoch=epochs)
def test_an_order_is_the_list_that_it_describes(sampler, epoch):
    found = sampler.indices(np.arange(len(sampler)), epoch=epoch)
    assert found.dtype == np.int64
    assert found.tolist() == listed(sampler, epoch)
    assert isinstance(sampler, Sampler)
    if found.size:
        assert found.min() >= 0
        assert found.max() < sampler.records


@COMPOSED
@given(sampler=samplers, other=epochs, epoch=epochs, data=st.data())
def test_any_split_and_any_order_of_positions_gives_the_same(sampler, epoch, other, data):
    n = len(sampler)
    whole = sampler.indices(np.arange(n), epoch=epoch)
    some = st.lists(st.integers(0, n - 1), max_size=30) if n else st.just([])
    positions = np.array(data.draw(some), np.int64)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(positions)), max_size=4)))
    fresh = pickle.loads(pickle.dumps(sampler))
    found = [np.empty(0, np.int64)]
    for part in np.split(positions, cuts):
        before = part.copy()
        indices = fresh.indices(part, epoch=epoch)
        assert np.array_equal(part, before), "positions were modified"
        assert not np.shares_memory(indices, part)
        assert indices.dtype == np.int64
        assert indices.shape == part.shape
        found.append(indices.copy())
        indices[:] = -1  # the caller's own
        fresh.indices(np.arange(n)[: len(part)], epoch=other)  # what else was asked for does not matter
    assert np.array_equal(np.concatenate(found), whole[positions])
    start, stop = sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))
    read_only = np.arange(start, stop)
    read_only.setflags(write=False)
    assert np.array_equal(sampler.indices(read_only, epoch=epoch), whole[start:stop])


@COMPOSED
@given(sampler=samplers, epoch=epochs)
def test_a_value_is_the_same_before_and_after_use_and_in_a_pickle(sampler, epoch):
    fresh = pickle.dumps(sampler)
    whole = sampler.indices(np.arange(len(sampler)), epoch=epoch)
    assert pickle.dumps(sampler) == fresh, "what it has computed went into the pickle"
    loaded = pickle.loads(fresh)
    assert loaded == sampler
    assert hash(loaded) == hash(sampler)
    assert repr(loaded) == repr(sampler)
    assert fingerprint(loaded) == fingerprint(sampler)
    assert np.array_equal(loaded.indices(np.arange(len(loaded)), epoch=epoch), whole)


def described(value):
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if not f.name.startswith("_")]
        return type(value).__name__, [described(getattr(value, name)) for name in names]
    if isinstance(value, tuple):
        return [described(item) for item in value]
    return repr(value.tolist() if isinstance(value, np.ndarray) else value)


@settings(COMPOSED, max_examples=settings().max_examples // 2)
@given(one=samplers, other=samplers)
def test_values_are_equal_when_their_fields_are(one, other):
    alike = described(one) == described(other)
    assert (one == other) == alike
    assert (fingerprint(one) == fingerprint(other)) == alike
    if alike:
        assert hash(one) == hash(other)


SCRIPT = """
import pickle, sys
import numpy as np
from dataload._util.fingerprint import digest, fingerprint
for sampler in pickle.load(sys.stdin.buffer):
    order = sampler.indices(np.arange(len(sampler)), epoch=3).tolist()
    print(fingerprint(sampler), digest(order))
"""


@settings(max_examples=1, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(samplers, min_size=20, max_size=30))
def test_another_process_with_another_hash_seed_agrees(chosen):
    answers = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            input=pickle.dumps(chosen),
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout.decode()
        for hash_seed in ("1", "2")
    }
    orders = [sampler.indices(np.arange(len(sampler)), epoch=3).tolist() for sampler in chosen]
    expected = [f"{fingerprint(s)} {digest(order)}\n" for s, order in zip(chosen, orders, strict=True)]
    assert answers == {"".join(expected)}
