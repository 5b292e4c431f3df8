"""Every wrong setting of every order: which one, what was found, what is allowed."""

import re
from functools import partial

import numpy as np
import pytest

from dataload import ConfigError
from dataload._util.fingerprint import fingerprint
from dataload.samplers import (
    GlobalShuffle,
    Lanes,
    Mixture,
    PoolShuffle,
    Repeat,
    Sequential,
    ShardSequential,
    Subset,
    Weighted,
)

FIVE = Sequential(5)
MOST = 2**48


class NoOrder:
    def __len__(self):
        return 5


NO_ORDER = NoOrder()


def case(make, key, value, message):
    return pytest.param(make, key, value, message, id=message[:60])


COUNTS = [
    case(lambda: Sequential(-1), "length", -1, f"length must be an integer in [0, {MOST + 1}), got -1"),
    case(lambda: GlobalShuffle(MOST + 1, 0), "length", MOST + 1, f"in [0, {MOST + 1}), got {MOST + 1}"),
    case(lambda: PoolShuffle(FIVE, 0, 0), "pool_size", 0, "pool_size must be an integer in [1, 2147483649), got 0"),
    case(lambda: PoolShuffle(FIVE, 2**31 + 1, 0), "pool_size", 2**31 + 1, "[1, 2147483649), got 2147483649"),
    case(lambda: Lanes(FIVE, 0), "lanes", 0, "lanes must be an integer in [1, 65537), got 0"),
    case(lambda: Lanes(FIVE, 65_537), "lanes", 65_537, "lanes must be an integer in [1, 65537), got 65537"),
    case(lambda: Lanes(FIVE, 2, 0), "pool_size", 0, "pool_size must be an integer in [1, 2147483649), got 0"),
    case(lambda: Repeat(FIVE, 0), "times", 0, f"times must be an integer in [1, {MOST // 5 + 1}), got 0"),
    case(lambda: Repeat(FIVE, MOST // 5 + 1), "times", MOST // 5 + 1, f"[1, {MOST // 5 + 1}), got {MOST // 5 + 1}"),
    case(lambda: Repeat(Sequential(0), MOST + 1), "times", MOST + 1, f"[1, {MOST + 1}), got {MOST + 1}"),
    case(lambda: Weighted([1], -1, 0), "num_samples", -1, f"num_samples must be an integer in [0, {MOST + 1}), got -1"),
    case(lambda: Weighted([1], MOST + 1, 0), "num_samples", MOST + 1, f"in [0, {MOST + 1}), got {MOST + 1}"),
    case(
        lambda: Weighted([1, 0, 2], 3, 0, replacement=False),
        "num_samples",
        3,
        "num_samples must be at most 2, the number of records with a positive weight, if they are drawn "
        "without replacement; got 3",
    ),
    case(lambda: Mixture((FIVE,), (1,), window=0), "window", 0, "window must be an integer >= 1, got 0"),
]

SEEDS = [
    case(make, "seed", seed, f"seed must be an integer, got {seed!r} ({type(seed).__name__})")
    for seed, make in [
        (1.5, lambda: GlobalShuffle(5, 1.5)),
        ("1", lambda: ShardSequential((5,), "1")),
        (None, lambda: PoolShuffle(FIVE, 2, None)),
        (True, lambda: Weighted([1], 1, True)),
        (2.0, lambda: Lanes(FIVE, 2, seed=2.0)),
        ((1,), lambda: Mixture((FIVE,), (1,), seed=(1,))),
    ]
]

LENGTHS = [
    case(
        lambda: ShardSequential((), 0),
        "shard_lengths",
        (),
        "shard_lengths must hold at least one number of records, got ()",
    ),
    case(
        lambda: ShardSequential(5, 0),
        "shard_lengths",
        5,
        "shard_lengths must hold at least one number of records, got 5",
    ),
    case(
        lambda: ShardSequential((3, -1), 0), "shard_lengths[1]", -1, "shard_lengths[1] must be an integer >= 0, got -1"
    ),
    case(
        lambda: ShardSequential("ab", 0), "shard_lengths[0]", "a", "shard_lengths[0] must be an integer >= 0, got 'a'"
    ),
    case(
        lambda: ShardSequential((MOST, 1), 0),
        "shard_lengths",
        (MOST, 1),
        f"shard_lengths must have a sum of at most {MOST}, got {MOST + 1}",
    ),
    case(lambda: GlobalShuffle(4, 0, parent=FIVE), "length", 4, "length must be the parent's, 5, got 4"),
    case(
        lambda: Mixture((FIVE, FIVE), (1, 1), lengths=(5,)),
        "lengths",
        (5,),
        "lengths must hold one length for each of the 2 samplers, got 1",
    ),
    case(
        lambda: Mixture((FIVE, FIVE), (1, 1), lengths=(5, 4)),
        "lengths[1]",
        4,
        "lengths[1] must be at least 5, the records that samplers[1] chooses from, got 4",
    ),
]

SAMPLERS = [
    case(make, key, value, f"{key} must be a sampler, with __len__ and indices(positions, epoch=), got {value!r}")
    for make, key, value in [
        (lambda: PoolShuffle(5, 2, 0), "parent", 5),
        (lambda: Lanes([1, 2], 2), "parent", [1, 2]),
        (lambda: Subset(None, [0]), "parent", None),
        (lambda: Repeat(NO_ORDER, 2), "parent", NO_ORDER),
        (lambda: GlobalShuffle(5, 0, parent=range(5)), "parent", range(5)),
        (lambda: PoolShuffle(Sequential, 2, 0), "parent", Sequential),
        (lambda: Mixture((FIVE, 5), (1, 1)), "samplers[1]", 5),
    ]
]

WEIGHTS = [
    case(partial(Weighted, weights, 1, 0), "weights", value, message)
    for weights, value, message in [
        ([], [], "weights must hold at least one number, got []"),
        (3, 3, "weights must hold at least one number, got 3"),
        ("12", "12", "weights must hold at least one number, got '12'"),
        (["1", "2"], ["1", "2"], "weights must hold at least one number, got ['1', '2']"),
        ([[1, 2]], [[1, 2]], "weights must hold at least one number, got [[1, 2]]"),
        ([1, [2]], [1, [2]], "weights must hold at least one number, got [1, [2]]"),
        ([1j], [1j], "weights must hold at least one number, got [1j]"),
        ([1, {}], [1, {}], "weights must hold at least one number, got [1, {}]"),
        ([1, 10**400], [1, 10**400], "weights must hold at least one number, got [1, 1000"),
        ([1, -2.5], -2.5, "weights must be finite and not negative, got -2.5 at position 1"),
        ([float("inf"), 1], float("inf"), "weights must be finite and not negative, got inf at position 0"),
        ([0, 0], [0, 0], "weights must not all be zero"),
    ]
    # each its own, not the last of the loop
]

MIXTURES = [
    case(
        lambda: Mixture(FIVE, (1,)),
        "samplers",
        FIVE,
        "samplers must hold one sampler per part, got Sequential(length=5)",
    ),
    case(lambda: Mixture((), ()), "weights", (), "weights must hold at least one number, got ()"),
    case(lambda: Mixture((FIVE,), 1), "weights", 1, "weights must hold at least one number, got 1"),
    case(
        lambda: Mixture((FIVE, FIVE), "ab"),
        "weights",
        ("a", "b"),
        "weights must hold at least one number, got ('a', 'b')",
    ),
    case(
        lambda: Mixture((FIVE, FIVE), (1, (2, 3))),
        "weights",
        (1, (2, 3)),
        "weights must hold at least one number, got (1, (2, 3))",
    ),
    case(
        lambda: Mixture((FIVE, FIVE), (1, 2, 3)),
        "weights",
        (1.0, 2.0, 3.0),
        "weights must hold one weight for each of the 2 samplers, got 3: (1.0, 2.0, 3.0)",
    ),
    case(
        lambda: Mixture((FIVE, FIVE), ((1, 2), (3,))),
        "weights",
        (3.0,),
        "weights must hold one weight for each of the 2 samplers, got 1: (3.0,)",
    ),
    case(lambda: Mixture((FIVE, FIVE), (1, -1)), "weights", -1.0, "got -1.0 at position 1"),
    case(lambda: Mixture((FIVE, FIVE), ((1, 1), (0, 0))), "weights", (0.0, 0.0), "weights must not all be zero"),
    case(
        lambda: Mixture((FIVE, FIVE), (1, 1), stop="frist"),
        "stop",
        "frist",
        "stop is 'frist': did you mean 'first'? Known: first, longest, never",
    ),
    case(
        lambda: Mixture((FIVE, Sequential(0)), (1, 1)),
        "samplers[1]",
        0,
        "samplers[1] is empty: set its weight to 0",
    ),
    case(
        lambda: Mixture((FIVE, FIVE), (199, 1), window=20),
        "window",
        20,
        "window must be at least 200, so that weights[1], 1.0, gets a position; got 20",
    ),
    case(
        lambda: Mixture((Sequential(MOST // 2), FIVE), (1, 3), window=4, stop="longest"),
        "stop",
        "longest",
        "stop='longest' makes epochs of 56294995342",
    ),
]

SUBSETS = [
    case(
        partial(Subset, FIVE, selection),
        "selection",
        selection,
        f"selection must be a slice or integers in [-5, 5): {message}",
    )
    for selection, message in [
        ([0, 5], "index 5 is out of range for 5 records"),
        ([-6], "index -6 is out of range for 5 records"),
        (range(3, 9), "index 8 is out of range for 5 records"),
        (range(0, 2**70, 2**69), f"index {2**69} is out of range for 5 records"),
        (range(-6, 2), "index -6 is out of range for 5 records"),
        ([0.5], "'float' object cannot be interpreted as an integer"),
        ([True], "indices must be integers, got bool"),
        (None, "'NoneType' object is not iterable"),
        (slice(0, 5, 0), "slice step cannot be zero"),
        (slice(0, 2.5), "slice indices must be integers"),
    ]
]


@pytest.mark.parametrize(
    ("make", "key", "value", "message"),
    [*COUNTS, *SEEDS, *LENGTHS, *SAMPLERS, *WEIGHTS, *MIXTURES, *SUBSETS],
)
def test_a_wrong_setting_is_named(make, key, value, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        make()
    assert caught.value.key == key
    assert caught.value.value == value


def test_an_array_with_a_wrong_weight_is_shown_by_that():
    weights = np.ones(100_000)
    weights[77] = np.nan
    with pytest.raises(ConfigError, match="weights must be finite and not negative, got nan at position 77"):
        Weighted(weights, 1, 0)


INT = np.int16(3)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (Sequential(INT), Sequential(3)),
        (GlobalShuffle(INT, INT), GlobalShuffle(3, 3)),
        (ShardSequential(np.array([3, 3]), INT), ShardSequential((3, 3), 3)),
        (PoolShuffle(FIVE, INT, INT), PoolShuffle(FIVE, 3, 3)),
        (Lanes(FIVE, INT, INT, INT), Lanes(FIVE, 3, 3, 3)),
        (Repeat(FIVE, INT), Repeat(FIVE, 3)),
        (Weighted([1], INT, INT), Weighted([1], 3, 3)),
        (Mixture([FIVE], [1], "first", INT, INT, [np.int16(5)]), Mixture((FIVE,), (1,), "first", 3, 3, (5,))),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_numpy_integer_is_the_number_and_no_other_value(given, plain):
    assert given == plain
    assert repr(given) == repr(plain)
    assert fingerprint(given) == fingerprint(plain), "a state saved with the one would be refused by the other"
    assert type(len(given)) is int
