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


def case(make, value, message):
    """A wrong setting; the message begins with its name."""
    return pytest.param(make, value, message, id=message[:60])


def a_count(make, name, value, least, below):
    return case(make, value, f"{name} must be an integer in [{least}, {below}), got {value}")


COUNTS = [
    a_count(lambda: Sequential(-1), "length", -1, 0, MOST + 1),
    a_count(lambda: GlobalShuffle(MOST + 1, 0), "length", MOST + 1, 0, MOST + 1),
    a_count(lambda: PoolShuffle(FIVE, 0, 0), "pool_size", 0, 1, 2**31 + 1),
    a_count(lambda: PoolShuffle(FIVE, 2**31 + 1, 0), "pool_size", 2**31 + 1, 1, 2**31 + 1),
    a_count(lambda: Lanes(FIVE, 0), "lanes", 0, 1, 65_537),
    a_count(lambda: Lanes(FIVE, 65_537), "lanes", 65_537, 1, 65_537),
    a_count(lambda: Lanes(FIVE, 2, 0), "pool_size", 0, 1, 2**31 + 1),
    a_count(lambda: Repeat(FIVE, 0), "times", 0, 1, MOST // 5 + 1),
    a_count(lambda: Repeat(FIVE, MOST // 5 + 1), "times", MOST // 5 + 1, 1, MOST // 5 + 1),
    a_count(lambda: Repeat(Sequential(0), MOST + 1), "times", MOST + 1, 1, MOST + 1),
    a_count(lambda: Weighted([1], -1, 0), "num_samples", -1, 0, MOST + 1),
    a_count(lambda: Weighted([1], MOST + 1, 0), "num_samples", MOST + 1, 0, MOST + 1),
    case(
        lambda: Weighted([1, 0, 2], 3, 0, replacement=False),
        3,
        "num_samples must be at most 2, the records with a positive weight, if drawn without replacement; got 3",
    ),
    case(lambda: Mixture((FIVE,), (1,), window=0), 0, "window must be an integer >= 1, got 0"),
]

SEEDS = [
    case(make, seed, f"seed must be an integer, got {seed!r} ({type(seed).__name__})")
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
    case(partial(ShardSequential, lengths, 0), value, message)
    for lengths, value, message in [
        ((), (), "shard_lengths must hold at least one number of records, got ()"),
        (5, 5, "shard_lengths must hold at least one number of records, got 5"),
        ((3, -1), -1, "shard_lengths[1] must be an integer >= 0, got -1"),
        ("ab", "a", "shard_lengths[0] must be an integer >= 0, got 'a'"),
        ((MOST, 1), MOST + 1, f"shard_lengths must have a sum of at most {MOST}, got {MOST + 1}"),
    ]
] + [case(lambda: GlobalShuffle(4, 0, parent=FIVE), 4, "length must be the parent's, 5; got 4")]

SAMPLERS = [
    case(make, value, f"{name} must be a sampler, with __len__ and indices(positions, epoch=); got {value!r}")
    for make, name, value in [
        (lambda: PoolShuffle(5, 2, 0), "parent", 5),
        (lambda: Lanes([1, 2], 2), "parent", [1, 2]),
        (lambda: Subset(None, [0]), "parent", None),
        (lambda: Repeat(NO_ORDER, 2), "parent", NO_ORDER),
        (lambda: GlobalShuffle(5, 0, parent=range(5)), "parent", range(5)),
        (lambda: PoolShuffle(Sequential, 2, 0), "parent", Sequential),
        (lambda: Mixture((FIVE, 5), (1, 1)), "samplers[1]", 5),
    ]
]

NO_NUMBERS = [[], 3, "12", ["1", "2"], [[1, 2]], [1, [2]], [1j], [1, {}], [1, 10**400]]
WEIGHTS = [
    case(partial(Weighted, weights, 1, 0), value, message)
    for weights, value, message in [
        *((wrong, wrong, f"weights must hold at least one number, got {wrong!r}") for wrong in NO_NUMBERS),
        ([1, -2.5], -2.5, "weights must be finite and not negative, got -2.5 at position 1"),
        ([float("inf"), 1], float("inf"), "weights must be finite and not negative, got inf at position 0"),
        ([0, 0], [0, 0], "weights must not all be zero"),
    ]
]

TWO = (FIVE, FIVE)
MIXTURES = [
    case(partial(Mixture, *settings), value, message)
    for settings, value, message in [
        ((FIVE, (1,)), FIVE, "samplers must hold one sampler per part, got Sequential(length=5)"),
        (((), ()), (), "samplers must hold one sampler per part, got ()"),
        (((FIVE,), 1), 1, "weights must hold at least one number, got 1"),
        ((TWO, "ab"), ("a", "b"), "weights must hold at least one number, got ('a', 'b')"),
        ((TWO, (1, (2, 3))), (1, (2, 3)), "weights must hold at least one number, got (1, (2, 3))"),
        (
            (TWO, (1, 2, 3)),
            (1.0, 2.0, 3.0),
            "weights must hold one weight for each of the 2 samplers, got (1.0, 2.0, 3.0)",
        ),
        ((TWO, ((1, 2), (3,))), (3.0,), "weights must hold one weight for each of the 2 samplers, got (3.0,)"),
        ((TWO, {0: (1, 1), 3: (1,)}), (1.0,), "weights must hold one weight for each of the 2 samplers, got (1.0,)"),
        ((TWO, {2: (1, 1)}), [2], "weights must hold weights for position 0, and once for each other; got [2]"),
        (
            (TWO, {0: (1, 1), 1.5: (1, 1)}),
            1.5,
            "weights must hold weights by position in the epoch, from 0 on and below",
        ),
        (
            (TWO, {0: (1, 1), 9: (1, 2)}),
            9,
            "weights change at position 9, and stop='first' ends epochs at 9: change them earlier, give weights for",
        ),
        (
            (TWO, {"a": 1, "b": 1}),
            {"a": 1, "b": 1},
            "weights must hold weights by position in the epoch, from 0 on, or by the names of the samplers; got {'a'",
        ),
        (
            ({"a": FIVE, "b": FIVE}, {0: {"a": 1}}),
            {"a": 1},
            "weights must hold weights by position in the epoch, from 0",
        ),
        ((TWO, (1, 1), "first", 0, None, None, 0), 0, "global_batch_size must be an integer >= 1, got 0"),
        ((TWO, (1, -1)), -1.0, "weights must be finite and not negative, got -1.0 at position 1"),
        ((TWO, ((1, 1), (0, 0))), (0.0, 0.0), "weights must not all be zero"),
        ((TWO, (1, 1), "frist"), "frist", "stop is 'frist': did you mean 'first'? Known: first, longest, never"),
        (((FIVE, Sequential(0)), (1, 1)), 0, "samplers[1] is empty: set its weight to 0"),
        (
            (TWO, (199, 1), "first", 0, 20),
            20,
            "window must be at least 200, so that weights[1], 1.0, gets a position; got 20",
        ),
        (
            ((Sequential(MOST // 2), FIVE), (1, 3), "longest", 0, 4),
            "longest",
            "stop='longest' makes epochs of 56294995342",
        ),
        (
            (TWO, (1, 1), "first", 0, None, (5,)),
            (5,),
            "lengths must hold one length for each of the 2 samplers, got (5,)",
        ),
        (
            (TWO, (1, 1), "first", 0, None, (5, 4)),
            4,
            "lengths[1] must be at least 5, the records that samplers[1] chooses from; got 4",
        ),
    ]
]

SUBSETS = [
    case(partial(Subset, FIVE, selection), selection, f"selection must be a slice or integers in [-5, 5): {message}")
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
    ("make", "value", "message"), [*COUNTS, *SEEDS, *LENGTHS, *SAMPLERS, *WEIGHTS, *MIXTURES, *SUBSETS]
)
def test_a_wrong_setting_is_named(make, value, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        make()
    assert caught.value.key == re.match(r"[\w\[\]]+", message)[0]
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
