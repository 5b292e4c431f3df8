"""The measurements that answer a question. Pure (no I/O)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataload.bench.data import Data, Written
from dataload.bench.task import Order, Task

_READINGS = "dataload.bench.readings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The settings to compare; each measurement takes about `seconds`."""

    orders: tuple[Order, ...]
    workers: tuple[int, ...]
    batch_size: int
    executor: str = "threads"
    seconds: float = 2.0
    cold: bool = False
    seed: int = 0

    def task(self, data: Data, **settings: Any) -> Task:
        """Return a task with these choices and other settings."""
        return Task(workload=data.name, batch_size=self.batch_size, seed=self.seed, seconds=self.seconds, **settings)


def plan_limits(data: Data, written: Mapping[str, Written], choices: Choices) -> list[Task]:
    """Plan the limits of the machine, and bare loops over the formats' own libraries, in each order.

    Every row is compared with the first limit of its order.
    """
    first = next(iter(written))
    name, reading = ("decode", "decode_loop") if data.decodes else ("copy in memory", "gather")
    limits = [
        (first, f"{name}, 1 thread", reading, 1),
        (first, f"{name}, 2 threads", reading, 2),
        ("lmdb", "lmdb txn.get, nothing copied", "lmdb_get", 0),
        ("array_record", "array_record read", "array_record_read", 0),
    ]
    orders = choices.orders
    if "generator" in written:
        limits = [("generator", "bare generators, 1 process", "bare_generators", 0)]
        orders = ("sequential",)
    return [
        choices.task(
            data,
            kind="limit",
            name=name if order == orders[0] else f"{name}, {order}",
            path=written[form].path,
            format=form,
            reading=f"{_READINGS}:{reading}",
            order=order,
            workers=workers,
            options={"open": written[form].options},
        )
        for order in orders
        for form, name, reading, workers in limits
        if form in written
    ]


def plan_loaders(data: Data, written: Mapping[str, Written], choices: Choices) -> list[Task]:
    """Plan this library's loader over each format, in each order, with each number of workers.

    Generators have one order, and are read by `dataload.streams.MultiStreamLoader`.
    """
    made = "generator" in written
    orders: tuple[Order, ...] = ("sequential",) if made else choices.orders
    executor = {} if made else {"executor": choices.executor}
    return [
        choices.task(
            data,
            kind="dataload",
            name="dataload",
            path=one.path,
            format=one.facts.format,
            reading=f"{_READINGS}:{'multistream' if made else 'loader'}",
            order=order,
            workers=workers,
            cold=choices.cold and not made,
            options={"open": one.options, **executor},
        )
        for one in written.values()
        for order in orders
        for workers in choices.workers
    ]
