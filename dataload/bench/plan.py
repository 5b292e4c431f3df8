"""Which measurements answer the question. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataload.bench.data import Data, Written
from dataload.bench.task import Order, Task

__all__ = ["Choices", "plan_limits", "plan_loaders"]

_READINGS = "dataload.bench.readings"
_STREAM_READINGS = "dataload.bench.stream_readings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What is to be compared.

    Attributes:
        orders: Orders.
        workers: Numbers of workers.
        batch_size: Records per batch.
        executor: Of the workers.
        seconds: Of each measurement, about.
        cold: Whether each begins with a cold page cache.
        seed: Of the orders.
    """

    orders: tuple[Order, ...]
    workers: tuple[int, ...]
    batch_size: int
    executor: str = "threads"
    seconds: float = 2.0
    cold: bool = False
    seed: int = 0

    def task(self, data: Data, written: Written, **settings: Any) -> Task:
        """A task of these choices; `settings` are those that differ."""
        values: dict[str, Any] = {
            "workload": data.name,
            "path": written.path,
            "format": written.facts.format,
            "order": "global",
            "workers": 0,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "seconds": self.seconds,
            "options": {"open": written.options},
        }
        return Task(**{**values, **settings})


def plan_limits(data: Data, written: Mapping[str, Written], choices: Choices) -> list[Task]:
    """What the machine and the formats' own libraries can do: the first is what all rows are compared with."""
    some = next(iter(written.values()))
    if "generator" in written:
        reading = f"{_STREAM_READINGS}:bare_generators"
        return [choices.task(data, some, kind="limit", name="bare generators, 1 process", reading=reading)]
    name, reading = ("decode", "decode_loop") if data.decodes else ("copy in memory", "gather")
    limits = [
        choices.task(
            data, some, kind="limit", name=f"{name}, {threads}", reading=f"{_READINGS}:{reading}", workers=workers
        )
        for workers, threads in ((1, "1 thread"), (2, "2 threads"))
    ]
    for name, format_name, reading in (
        ("lmdb txn.get", "lmdb", "lmdb_get"),
        ("array_record read", "array_record", "array_record_read"),
    ):
        if format_name in written:
            bare = choices.task(data, written[format_name], kind="limit", name=name, reading=f"{_READINGS}:{reading}")
            limits.append(bare)
    return limits


def plan_loaders(data: Data, written: Mapping[str, Written], choices: Choices) -> list[Task]:
    """`dataload.Loader` over each format, in each order, with each number of workers.

    Generators have one order, and are read by `dataload.streams.MultiStreamLoader`.
    """
    if "generator" in written:
        return [
            choices.task(
                data,
                written["generator"],
                kind="dataload",
                name="dataload",
                reading=f"{_STREAM_READINGS}:multistream",
                order="sequential",
                workers=workers,
            )
            for workers in choices.workers
        ]
    return [
        choices.task(
            data,
            one,
            kind="dataload",
            name="dataload",
            reading=f"{_READINGS}:loader",
            order=order,
            workers=workers,
            cold=choices.cold,
            options={"open": one.options, "executor": choices.executor},
        )
        for one in written.values()
        for order in choices.orders
        for workers in choices.workers
    ]
