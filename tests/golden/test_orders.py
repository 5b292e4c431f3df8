"""The orders of this ORDER_VERSION, as they must stay: a checkpoint of an earlier release continues in them.

To change one on purpose, raise `ORDER_VERSION` and write orders.json anew: ``python tests/golden/test_orders.py``.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from dataload._util.randomness import ORDER_VERSION
from dataload.samplers import Mixture, PoolShuffle, Weighted
from dataload.samplers.basic import GlobalShuffle, Lanes, Repeat, Sequential, ShardSequential, Subset
from dataload.streams import RowMixture, StreamSampler

GOLDEN = Path(__file__).with_name("orders.json")

SHARDS = ShardSequential((30, 7, 0, 41, 1, 22, 19, 80), 3)
LARGE_SHARDS = ShardSequential((10**7 - 1,) * 1000, -1)

ORDERS = {
    "sequential": Sequential(20),
    "global": GlobalShuffle(10**10, 1),
    "global of global": GlobalShuffle(200, 5, parent=GlobalShuffle(200, 6)),
    "shards": SHARDS,
    "many shards": LARGE_SHARDS,
    "pool": PoolShuffle(Sequential(200), 10, 2),
    "pool of one": PoolShuffle(Sequential(20), 1, 2),
    "pool of all": PoolShuffle(Sequential(50), 10**6, 2),
    "large pool": PoolShuffle(Sequential(10**10), 65_536, 2**70),
    "shards -> pool": PoolShuffle(SHARDS, 32, 4),
    "lanes": Lanes(GlobalShuffle(203, 1), 4),
    "lanes with pools": Lanes(Sequential(203), 4, 8, 9),
    "shards -> lanes -> pool": Lanes(SHARDS, 8, 12, 5),
    "many shards -> lanes -> pool": Lanes(LARGE_SHARDS, 64, 1024, 5),
    "subset by slice": Subset(GlobalShuffle(200, 3), slice(190, 3, -7)),
    "subset by positions": Subset(GlobalShuffle(200, 3), [5, 5, -1, 0, 77]),
    "repeat": Repeat(GlobalShuffle(17, 8), 5),
    "weighted": Weighted([0.5, 0, 3, 1e-3, 7, 1 / 3], 10**6, 6),
    "weighted urn": Weighted(np.arange(100) * 0.37, 99, 6, replacement=False),
    "mixture, first": Mixture((GlobalShuffle(100, 1), SHARDS, Sequential(50)), (0.5, 0.2, 0.3), "first", 7),
    "mixture, longest": Mixture((GlobalShuffle(30, 1), SHARDS), (1, 2), "longest", 7, window=30, lengths=(60, 300)),
    "mixture, never": Mixture((GlobalShuffle(100, 1), Weighted([1, 2], 9, 3)), (1.4142135, 1), "never", 8),
    "mixture, any window": Mixture((GlobalShuffle(10**6, 1), SHARDS, Sequential(5)), (1, 0.3, 1e-9), "never", 7),
    "mixture, many": Mixture(
        tuple(GlobalShuffle(700 + n, n) for n in range(60)), tuple(1 / n**1.2 for n in range(1, 61)), window="any"
    ),
    "mixture, weights by epoch": Mixture((Sequential(90), GlobalShuffle(90, 2)), ((1, 9), (1, 1), (1, 0)), "first", 9),
    "mixture, weights by position": Mixture(
        (GlobalShuffle(100, 1), SHARDS, Sequential(50)), {0: (1, 1, 0), 5: (5, 2, 3), 16: (1, 1, 9)}, "longest", 7
    ),
    "mixture, limits": Mixture(
        tuple(GlobalShuffle(n, n) for n in (9000, *range(20, 80))),
        (1, *(1 / (300 + n % 7) for n in range(60))),
        "never",
        7,
        max_epochs=(3, *(1.5, 2, 1) * 20),
    ),
}
EPOCHS = (0, 1, 12)


def stream(mode, ends, *, lengths=(30, 7, 0, 41, 1, 22, 19, 80), rows=4, chunk=3, tail="pad", **settings):
    return StreamSampler(
        sequence_lengths=lengths, rows=rows, chunk=chunk, mode=mode, ends=ends, seed=5, tail=tail, **settings
    )


MODES, ENDS, MANY = ("split", "pack", "independent", "shuffled"), ("next", "pad", "drop"), np.arange(5_000) * 37 % 101
STARTS = {(mode, ends) for mode in MODES for ends in ("next", "drop")} - {("pack", "next")}

STREAMS = {
    **{f"{mode}, {ends}": stream(mode, ends) for mode in MODES for ends in ENDS},
    **{f"{mode}, {ends}, random start": stream(mode, ends, random_start=True) for mode, ends in sorted(STARTS)},
    **{f"{mode}, many": stream(mode, "next", lengths=MANY, chunk=1, rows=8) for mode in MODES},
    "independent, epochs of 7": stream("independent", "next", epoch_steps=7),
    "shuffled, epochs of 7": stream("shuffled", "next", epoch_steps=7),
    "split, drop the tail": stream("split", "next", tail="drop"),
    "shuffled, drop the tail": stream("shuffled", "next", tail="drop"),
    "mixture": RowMixture(
        parts=(stream("split", "next"), stream("shuffled", "pad", rows=2), stream("independent", "drop", rows=2)),
        tail="pad",
    ),
}


def case(kind, epoch):
    """The order at its beginning, its end and some places between, in no order of theirs."""
    sampler = ORDERS[kind]
    length = len(sampler)
    chosen = {*range(12), *(length * part // 7 for part in range(1, 7)), *range(length - 6, length)}
    positions = sorted((position for position in chosen if 0 <= position < length), key=lambda p: (p % 3, p))
    return {"order": kind, "epoch": epoch, "positions": positions, "indices": found(sampler, epoch, positions)}


def stream_case(kind, epoch):
    """Some steps: what each row has, -1 where that only fills up, and the places where a row begins anew."""
    planner = STREAMS[kind]
    total = planner.steps(epoch)
    steps = sorted({0, 1, total // 2, total - 1})
    plans = [planner.plans(range(step, step + 1), epoch=epoch)[0] for step in steps]
    return {
        "streams": kind,
        "epoch": epoch,
        "total": total,
        "steps": steps,
        "indices": [np.where(plan.valid.ravel(), plan.indices, -1).tolist() for plan in plans],
        "first": [np.flatnonzero(plan.columns["is_first"]).tolist() for plan in plans],
    }


def found(sampler, epoch, positions):
    return sampler.indices(np.array(positions, np.int64), epoch=epoch).tolist()


@pytest.fixture(scope="module")
def golden():
    content = json.loads(GOLDEN.read_text())
    assert content["order_version"] == ORDER_VERSION, "orders changed: write a new golden file and raise ORDER_VERSION"
    return content


def test_global_shuffle(golden):
    for case in golden["global_shuffle"]:
        sampler = GlobalShuffle(case["length"], case["seed"])
        assert found(sampler, case["epoch"], case["positions"]) == case["indices"], case


@pytest.mark.parametrize("kind", ORDERS)
def test_orders(golden, kind):
    kept = [case for case in golden["orders"] if case["order"] == kind]
    assert [case["epoch"] for case in kept] == list(EPOCHS)
    for case in kept:
        assert found(ORDERS[kind], case["epoch"], case["positions"]) == case["indices"], case


def test_no_order_is_kept_that_is_not_tested(golden):
    assert {case["order"] for case in golden["orders"]} == set(ORDERS)


@pytest.mark.parametrize("kind", STREAMS)
def test_streams(golden, kind):
    kept = [case for case in golden["streams"] if case["streams"] == kind]
    assert kept == [stream_case(kind, epoch) for epoch in EPOCHS]


def test_no_stream_is_kept_that_is_not_tested(golden):
    assert {case["streams"] for case in golden["streams"]} == set(STREAMS)


def write():
    kept = json.loads(GOLDEN.read_text())["global_shuffle"]
    for case_ in kept:
        case_["indices"] = found(GlobalShuffle(case_["length"], case_["seed"]), case_["epoch"], case_["positions"])
    tables = {"global_shuffle": kept, "orders": [case(kind, epoch) for kind in ORDERS for epoch in EPOCHS]}
    tables["streams"] = [stream_case(kind, epoch) for kind in STREAMS for epoch in EPOCHS]
    lines = [f' "order_version": {ORDER_VERSION}']
    for name, cases in tables.items():
        rows = ",\n".join(f"  {json.dumps(row)}" for row in cases)  # a line for each, to see in a diff which changed
        lines.append(f' "{name}": [\n{rows}\n ]')
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write()
