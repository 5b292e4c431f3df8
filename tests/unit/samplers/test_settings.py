"""Every wrong setting of every order and planner: which one, what was found, what is allowed."""

import math
import re
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from dataload import ConfigError
from dataload._util.fingerprint import fingerprint
from dataload.samplers import BatchPlan, BatchPlanner, BatchSampler, Mixture, PackedBatchSampler, PoolShuffle, Weighted
from dataload.samplers.basic import GlobalShuffle, Lanes, Repeat, Sequential, ShardSequential, Subset
from dataload.samplers.batch import servings_of
from dataload.samplers.buckets import BucketBatchSampler
from dataload.samplers.pool_quality import pool_size_for
from dataload.samplers.quality import order_report
from dataload.streams import RowMixture, StreamSampler

FIVE = Sequential(5)
TWO = (FIVE, FIVE)
MOST = 2**48


class NoOrder:
    def __len__(self):
        return 5


NO_ORDER = NoOrder()


def counted(make, name, value, least, below):
    return make, f"{name} must be an integer in [{least}, {below}), got {value}"


COUNTS = [
    counted(lambda: Sequential(-1), "length", -1, 0, MOST + 1),
    counted(lambda: GlobalShuffle(MOST + 1, 0), "length", MOST + 1, 0, MOST + 1),
    counted(lambda: PoolShuffle(FIVE, 0, 0), "pool_size", 0, 1, 2**31 + 1),
    counted(lambda: PoolShuffle(FIVE, 2**31 + 1, 0), "pool_size", 2**31 + 1, 1, 2**31 + 1),
    counted(lambda: Lanes(FIVE, 0), "lanes", 0, 1, 65_537),
    counted(lambda: Lanes(FIVE, 65_537), "lanes", 65_537, 1, 65_537),
    counted(lambda: Lanes(FIVE, 2, 0), "pool_size", 0, 1, 2**31 + 1),
    counted(lambda: Repeat(FIVE, 0), "times", 0, 1, MOST // 5 + 1),
    counted(lambda: Repeat(FIVE, MOST // 5 + 1), "times", MOST // 5 + 1, 1, MOST // 5 + 1),
    counted(lambda: Repeat(Sequential(0), MOST + 1), "times", MOST + 1, 1, MOST + 1),
    counted(lambda: Weighted([1], -1, 0), "num_samples", -1, 0, MOST + 1),
    counted(lambda: Weighted([1], MOST + 1, 0), "num_samples", MOST + 1, 0, MOST + 1),
    (
        lambda: Weighted([1, 0, 2], 3, 0, replacement=False),
        "num_samples must be at most 2, the records with a positive weight, if drawn without replacement; got 3",
    ),
    (lambda: Mixture((FIVE,), (1,), window=0), "window must be an integer >= 1 or 'any', got 0"),
]

SEEDS = [
    (make, f"seed must be an integer, got {seed!r}")
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
    (partial(ShardSequential, lengths, 0), message)
    for lengths, message in [
        ((), "shard_lengths must hold at least one number of records, got ()"),
        (5, "shard_lengths must hold at least one number of records, got 5"),
        ((3, -1), "shard_lengths[1] must be an integer >= 0, got -1"),
        ("ab", "shard_lengths[0] must be an integer >= 0, got 'a'"),
        ((MOST, 1), f"shard_lengths must have a sum of at most {MOST}, got {MOST + 1}"),
    ]
] + [(lambda: GlobalShuffle(4, 0, parent=FIVE), "length must be the parent's, 5; got 4")]

SAMPLERS = [
    (make, f"{name} must be a sampler, with __len__ and indices(positions, epoch=); got {value!r}")
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

ONE_NAN = np.ones(100_000)
ONE_NAN[77] = np.nan
NO_NUMBERS = [[], 3, "12", ["1", "2"], [[1, 2]], [1, [2]], [1j], [1, {}], [1, 10**400]]
WEIGHTS = [
    (partial(Weighted, weights, 1, 0), message)
    for weights, message in [
        *((wrong, f"weights must be a list of one or more numbers, got {wrong!r}") for wrong in NO_NUMBERS),
        ([1, -2.5], "weights must be finite and not negative, got -2.5 at position 1"),
        ([float("inf"), 1], "weights must be finite and not negative, got inf at position 0"),
        (ONE_NAN, "weights must be finite and not negative, got nan at position 77"),
        ([0, 0], "weights must not all be zero"),
    ]
]

ONE_EACH = "weights must hold one weight for each of the 2 samplers, got "
BY_POSITION = "weights must hold weights by position in the epoch, from 0 on"
MIXTURES = [
    (partial(Mixture, *settings), message)
    for settings, message in [
        ((FIVE, (1,)), "samplers must hold one sampler per component, got Sequential(length=5)"),
        (((), ()), "samplers must hold one sampler per component, got ()"),
        (((FIVE,), 1), "weights must be a list of one or more numbers, got 1"),
        ((TWO, "ab"), "weights must be a list of one or more numbers, got ('a', 'b')"),
        ((TWO, (1, (2, 3))), "weights must be a list of one or more numbers, got (1, (2, 3))"),
        ((TWO, (1, 2, 3)), f"{ONE_EACH}(1.0, 2.0, 3.0)"),
        ((TWO, ((1, 2), (3,))), f"{ONE_EACH}(3.0,)"),
        ((TWO, {0: (1, 1), 3: (1,)}), f"{ONE_EACH}(1.0,)"),
        ((TWO, {2: (1, 1)}), "weights must hold weights for position 0, and once for each other; got [2]"),
        ((TWO, {0: (1, 1), 1.5: (1, 1)}), f"{BY_POSITION} and below"),
        (
            (TWO, {"a": 1}),
            "weights must be 2 numbers in order, or by position from 0 on: the samplers have no names; got {'a': 1}",
        ),
        (({"a": FIVE, "b": FIVE}, {0: {"a": 1}}), "weights must hold one number for each name; missing: 'b'"),
        (
            (TWO, {0: (1, 1), 9: (1, 2)}),
            "weights change at position 9, and stop='first' ends epochs at 9: change them earlier, give weights for",
        ),
        ((TWO, (1, 1), "first", 0, None, None, 0), "global_batch_size must be an integer >= 1, got 0"),
        ((TWO, (1, -1)), "weights must be finite and not negative, got -1.0 at position 1"),
        ((TWO, ((1, 1), (0, 0))), "weights must not all be zero"),
        ((TWO, (1, 1), "frist"), "stop is 'frist': did you mean 'first'? Choose from first, longest, never"),
        (((FIVE, Sequential(0)), (1, 1)), "samplers[1] is empty: set its weight to 0"),
        (({"a": FIVE, "b": Sequential(0)}, (1, 1)), "samplers[1], 'b', is empty: set its weight to 0"),
        ((TWO, (199, 1), "first", 0, 20), "window must be 'any' or at least 200, so that weights[1], 1.0, gets a pos"),
        (((Sequential(MOST // 2), FIVE), (1, 3), "longest", 0, 4), "stop='longest' makes epochs of 56294995342"),
        ((TWO, (1, 1), "first", 0, None, (5,)), "lengths must hold one length for each of the 2 samplers, got (5,)"),
        (
            (TWO, (1, 1), "first", 0, None, (5, 4)),
            "lengths[1] must be at least 5, the records that samplers[1] chooses from; got 4",
        ),
    ]
]

WITHOUT_END = Mixture((FIVE, Sequential(0)), (1, 0), "never")
MIXTURES.append((partial(WITHOUT_END.changed, 3, (1, 1)), "samplers[1] is empty: set its weight to 0"))

SUBSETS = [
    (partial(Subset, FIVE, selection), f"selection must be a slice or integers in [-5, 5): {message}")
    for selection, message in [
        ([0, 5], "index 5 is out of range for 5 records"),
        ([-6], "index -6 is out of range for 5 records"),
        (range(3, 9), "index 8 is out of range for 5 records"),
        (range(0, 2**70, 2**69), f"index {2**69} is out of range for 5 records"),
        (range(-6, 2), "index -6 is out of range for 5 records"),
        ([0.5], "indices must be integers: 'float' object cannot be interpreted as an integer"),
        ([True], "indices must be integers, got bool"),
        (None, "'NoneType' object is not iterable"),
        (slice(0, 5, 0), "slice step cannot be zero"),
        (slice(0, 2.5), "slice indices must be integers"),
    ]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Own(BatchPlanner):
    """A planner of the user's, whose annotation of `heat` is for nobody to check."""

    heat: int
    records, order, items_per_step = 4, "own", 2

    def items(self, epoch):
        return 4

    def plans(self, steps, *, epoch):
        return [BatchPlan(step, np.arange(2)) for step in steps]


def planners(kind, defaults, wrong):
    return [(partial(kind, **{**defaults, **settings}), message) for settings, message in wrong]


ENDLESS = Mixture((Sequential(3),), (1,), "never")
BATCHES = planners(
    BatchSampler,
    {"sampler": Sequential(4), "batch_size": 1},
    [
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"batch_size": True}, "batch_size must be an integer >= 1, got True"),
        ({"world_size": 0}, "world_size must be an integer >= 1, got 0"),
        ({"world_size": 2, "rank": 2}, "rank must be an integer in [0, 2), got 2"),
        ({"rank": -1}, "rank must be an integer in [0, 1), got -1"),
        ({"origin": -1}, "origin must be an integer >= 0, got -1"),
        ({"tail": "dorp"}, "tail is 'dorp': did you mean 'drop'"),
        (
            {"sampler": Lanes(Sequential(40), 6), "world_size": 4},
            "lanes must be a multiple of world_size, 4, so that each rank has its own; got 6",
        ),
    ],
)
BUCKETS = planners(
    BucketBatchSampler,
    {"lengths": [5, 1, 3]},
    [
        ({"max_tokens": 9, "batch_size": 2}, "give either max_tokens or batch_size, got 9 and 2"),
        ({}, "give either max_tokens or batch_size, got None and None"),
        ({"max_tokens": 2, "boundaries": (1, 3, 5)}, "max_tokens must be at least 5, the boundary of the longest"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"batch_size": 1, "group": 0}, "group must be an integer >= 1, got 0"),
        ({"batch_size": 1, "boundaries": (3, 3, 9)}, "boundaries must ascend, got (3, 3, 9)"),
        ({"batch_size": 1, "boundaries": (3,)}, "boundaries must reach the longest record, 5; got (3,)"),
        ({"batch_size": 1, "boundaries": ()}, "boundaries must hold at least one length, got ()"),
        ({"batch_size": 1, "boundaries": 5}, "boundaries must hold at least one length, got 5"),
        ({"batch_size": 1, "boundaries": (1.5, 9)}, "boundaries[0] must be an integer >= 0, got 1.5"),
        ({"batch_size": 1, "seed": "x"}, "seed must be an integer, got 'x'"),
        ({"batch_size": 1, "shuffle": "false"}, "shuffle must be True or False, got 'false'"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer >= 1 or None, got 1.5"),
        ({"batch_size": 1, "rank": 1}, "rank must be an integer in [0, 1), got 1"),
        ({"batch_size": 1, "lengths": [1, -2]}, "lengths must be 0 or more, got -2 for record 1"),
        *(
            ({"batch_size": 1, "lengths": wrong}, "lengths must be integers, one per record")
            for wrong in ([0.5], [[1]], [[1], 2])
        ),
    ],
)
PACKED = planners(
    PackedBatchSampler,
    {"sampler": Sequential(3), "lengths": [1, 5, 2], "row_length": 8, "batch_size": 2},
    [
        ({"row_length": 4}, "row_length must be at least 5, the length of record 1, unless overlong is 'truncate'"),
        ({"row_length": 0}, "row_length must be an integer >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"window": 0}, "window must be an integer >= 1, got 0"),
        ({"overlong": "cut"}, "overlong is 'cut'"),
        ({"strategy": "best_fit"}, "strategy is 'best_fit': did you mean 'best-fit'"),
        ({"lengths": [1, 5]}, "lengths must hold one length for each of the 3 records, got 2"),
        ({"lengths": "abc"}, "lengths must be integers"),
        ({"sampler": 3}, "sampler must be a sampler, with __len__ and indices"),
        ({"world_size": 0}, "world_size must be an integer >= 1, got 0"),
        ({"sampler": ENDLESS}, "an epoch is packed before it begins, and the sampler's epoch never ends"),
    ],
)
STREAMS = planners(
    StreamSampler,
    {"sequence_lengths": [4, 4], "rows": 2},
    [
        ({"sequence_lengths": 7}, "sequence_lengths must be integers, one per sequence"),
        ({"sequence_lengths": [1.5]}, "sequence_lengths must be integers, one per sequence"),
        ({"sequence_lengths": [4, -1]}, "sequence_lengths must be 0 or more, got -1 for sequence 1"),
        ({"sequence_lengths": [2**48, 1]}, "sequence_lengths must have a sum of at most 281474976710656"),
        ({"sequence_lengths": [2**62] * 4}, "sequence_lengths must have a sum of at most 281474976710656"),
        ({"rows": 0}, "rows must be an integer >= 1, got 0"),
        ({"rows": 2.0}, "rows must be an integer >= 1, got 2.0"),
        ({"chunk": 0}, "chunk must be an integer >= 1, got 0"),
        ({"mode": "splt"}, "mode is 'splt': did you mean 'split'"),
        ({"ends": "wrap"}, "ends is 'wrap': choose from drop, next, pad"),
        ({"seed": 0.5}, "seed must be an integer, got 0.5"),
        ({"tail": "dorp"}, "tail is 'dorp': did you mean 'drop'"),
        ({"mode": "independent", "epoch_steps": 0}, "epoch_steps must be an integer >= 1, got 0"),
        ({"epoch_steps": 3}, "epoch_steps is for endless rows, but with mode='split' an epoch is one"),
        ({"mode": "pack", "epoch_steps": 3}, "with mode='pack' an epoch is one pass through the data"),
        ({"ends": "pad", "random_start": True}, "random_start has no effect with ends='pad'"),
        ({"mode": "pack", "random_start": True}, "random_start with ends='next' would cut sequences"),
        (
            {"rows": 3, "world_size": 2},
            "rows must be a multiple of world_size, 2, so that each rank has its own; got 3",
        ),
        ({"rows": 4, "origin": 6}, "origin must be a multiple of rows, 4: steps of streams cannot be divided"),
        ({"rank": 2, "world_size": 2}, "rank must be an integer in [0, 2), got 2"),
    ],
)


def part(mode="shuffled", *, rows=2, lengths=(6, 6), **settings):
    return StreamSampler(sequence_lengths=lengths, rows=rows, mode=mode, **settings)


UNEVEN = (part("split", rows=4), part(rows=2))
ROWS = planners(
    RowMixture,
    {"parts": UNEVEN},
    [
        ({"parts": ()}, "parts must hold at least one StreamSampler, got ()"),
        ({"parts": (BatchSampler(sampler=FIVE, batch_size=2),)}, "parts must hold at least one StreamSampler, got"),
        ({"parts": (part("split"), part("pack"))}, "parts[1] must have mode='shuffled' or 'independent' and no ep"),
        ({"parts": (part("split"), part(), part("independent", epoch_steps=3))}, "parts[2] must have mode='shuff"),
        ({"parts": (part("split"), part(chunk=2))}, "parts[1].chunk must equal that of parts[0], 1; got 2"),
        ({"parts": (part("split"), part(lengths=(0, 0)))}, "parts[1] has no chunks to serve: StreamSampler"),
        ({"parts": (part("split", chunk=4), part(lengths=[3], chunk=4, ends="drop"))}, "parts[1] has no chunks"),
        ({"world_size": 3}, "rows must be a multiple of world_size, 3, so that each rank has its own; got 4"),
        ({"world_size": 4}, "rows must be a multiple of world_size, 4, so that each rank has its own; got 2"),
        ({"origin": 4}, "origin must be a multiple of rows, 6: "),
        ({"tail": "dorp"}, "tail is 'dorp': did you mean 'drop'"),
    ],
)

EMPTY = BatchSampler(sampler=GlobalShuffle(3, 0), batch_size=4, tail="drop")
NINE = BatchSampler(sampler=GlobalShuffle(9, 0), batch_size=4)
FUNCTIONS = [
    (partial(order_report, EMPTY), "the order has no steps to measure"),
    (partial(order_report, EMPTY.with_ranks(origin=3)), "the order has no steps"),
    (partial(order_report, NINE, epoch=-1), "epoch must be an integer >= 0, got -1"),
    (partial(order_report, NINE, shard_lengths=(4, 4)), "shard_lengths add up to 8, but the order serves record 8"),
    (partial(order_report, NINE, shard_lengths=(10, -1)), "shard_lengths[1] must be an integer >= 0, got -1"),
    *(
        (partial(pool_size_for, (9, 9), 4, q), f"quality must be a number above 0 and below 1, got {q!r}")
        for q in (0, 1, -0.5, 90, math.nan, True, "0.5")
    ),
    (partial(pool_size_for, (9, 9), 0, 0.5), "batch_size must be an integer >= 1, got 0"),
    (partial(pool_size_for, (), 4, 0.5), "shard_lengths must hold at least one number of records"),
    (partial(pool_size_for, (0, 0), 4, 0.5), "the sum of shard_lengths must be an integer >= 1, got 0"),
    (partial(pool_size_for, (9, 9), 4, 0.5, seed=0.5), "seed must be an integer, got 0.5"),
    (partial(servings_of, NINE, -1, epoch=0), "index must be an integer >= 0, got -1"),
    (partial(servings_of, NINE, 0, epoch=-1), "epoch must be an integer >= 0, got -1"),
]
ORDERS = [*COUNTS, *SEEDS, *LENGTHS, *SAMPLERS, *WEIGHTS, *MIXTURES, *SUBSETS]
OWN = planners(
    Own,
    {"heat": 0.5},
    [
        ({"world_size": 2, "rank": 2}, "rank must be an integer in [0, 2), got 2"),
        ({"origin": -1}, "origin must be an integer >= 0, got -1"),
    ],
)
PLANNERS = [*OWN, *BATCHES, *BUCKETS, *PACKED, *STREAMS, *ROWS]


@pytest.mark.parametrize(
    ("make", "message"),
    [*ORDERS, *PLANNERS, *FUNCTIONS],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_a_wrong_setting_is_named(make, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        make()
    name = re.match(r"[\w\[\].]+", message)[0]
    assert caught.value.key == name or name in ("the", "an", "give", "with")
    shown = re.search(r"got (.+?)( at position \d+| for \w+ \d+| \(\w+\))?$", message)
    if shown and name not in ("selection", "give"):
        assert shown[1] in (repr(caught.value.value), str(caught.value.value))


def test_fields_of_other_planners_are_left_to_them():
    assert Own(heat=0.5).with_ranks(world_size=np.int8(2)).world_size == 2


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
        (
            PackedBatchSampler(sampler=FIVE, lengths=[1] * 5, row_length=INT, batch_size=INT, window=INT),
            PackedBatchSampler(sampler=FIVE, lengths=[1] * 5, row_length=3, batch_size=3, window=3),
        ),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_numpy_integer_is_the_number_and_no_other_value(given, plain):
    assert given == plain
    assert repr(given) == repr(plain)
    assert fingerprint(given) == fingerprint(plain), "a state saved with the one would be refused by the other"
    assert isinstance(given, PackedBatchSampler) or type(len(given)) is int
