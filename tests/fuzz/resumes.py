"""Jobs that stop and go on, at random: ``make resumes``, or ``python tests/fuzz/resumes.py --count 20000``.

A combination is a data set, an order, an error policy and so on, and is a pure function of its number. The job runs
once without workers and without a stop, and once with stops: after some steps the state is saved as JSON, and other
loaders, with other workers, executors and ranks, go on from it. Both must receive the same batches; if the number of
ranks or the batch size changes, the same items one after another.
"""

import atexit
import json
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from drive import drive
from resumable import Resumable

import dataload
from dataload import Loader, MemorySource
from dataload.samplers import BucketBatchSampler, Mixture, PackedBatchSampler, PoolShuffle, Weighted
from dataload.samplers.basic import GlobalShuffle, Lanes, Repeat, Sequential, ShardSequential, Subset
from dataload.sources import ConcatSource
from dataload.streams import MultiStreamLoader, StreamSampler
from dataload.testing.compare import difference

SHARDS = (9, 17, 5, 10)
RECORDS = sum(SHARDS)
LENGTHS = tuple(1 + i * 7 % 11 for i in range(RECORDS))
BAD = frozenset((3, 20, 21, 40))
MOST_STEPS = 40
RARE = 400  # one combination of so many has process workers

SAMPLERS = {
    "sequential": lambda seed: Sequential(RECORDS),
    "subset": lambda seed: Subset(GlobalShuffle(RECORDS, seed), slice(3, 30, 2)),
    "repeat": lambda seed: Repeat(GlobalShuffle(11, seed), 3),
    "global": lambda seed: GlobalShuffle(RECORDS, seed),
    "shards": lambda seed: ShardSequential(SHARDS, seed),
    "pool": lambda seed: PoolShuffle(ShardSequential(SHARDS, seed), 8, seed),
    "lanes": lambda seed: Lanes(ShardSequential(SHARDS, seed), 12, pool_size=4, seed=seed),
    "weighted": lambda seed: Weighted(np.arange(1, RECORDS + 1), 37, seed),
    "without replacement": lambda seed: Weighted(np.arange(1, RECORDS + 1), 20, seed, replacement=False),
    "mixture": lambda seed: Mixture((GlobalShuffle(20, seed), Sequential(RECORDS - 20)), (1, 2), stop="longest"),
    "changing mixture": lambda seed: Mixture(
        (GlobalShuffle(20, seed), Sequential(RECORDS - 20)), {0: (1, 2), 10: (3, 1), 25: (1, 4)}, stop="longest"
    ),
}
STREAMS = ("split", "pack", "independent", "shuffled")
FORMATS = ("range", "memory", "concat", "syr", "tar", "lmdb", "torchrecord", "array_record", "compressed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Everything that decides the batches."""

    format: str
    order: str
    seed: int
    tail: str
    on_error: str
    exclude: bool
    transform: bool
    epochs: int

    @classmethod
    def of(cls, random: Random) -> "Combination":
        kind = random.choice(("sampler", "sampler", "packing", "buckets", "stream", "multistream"))
        order = {"sampler": random.choice(list(SAMPLERS)), "stream": f"stream {random.choice(STREAMS)}"}.get(kind, kind)
        on_error = random.choice(("raise", "raise", "skip", "replace")) if order != "multistream" else "raise"
        return cls(
            format=random.choice(FORMATS) if on_error == "raise" else "bad",
            order=order if order != "multistream" else f"multistream {random.choice(('split', 'independent'))}",
            seed=random.randrange(100),
            tail=random.choice(("drop", "pad", "partial")),
            on_error=on_error,
            exclude=on_error == "raise" and kind == "sampler" and random.random() < 0.2,
            transform=random.random() < 0.3,
            epochs=random.choice((1, 2)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that decides no record: the ranks and their rows, and the workers."""

    world: int
    batch_size: int
    num_workers: int = 0
    executor: str = "threads"
    prefetch: int = 1
    in_order: bool = True

    def elsewhere(self, random: Random, ranks: tuple[tuple[int, int], ...], *, processes: bool) -> "Run":
        world, batch_size = random.choice(ranks)
        workers = random.choice((0, 0, 1, 2, 3))
        executor = "processes" if processes else "threads"
        return Run(
            world=world, batch_size=batch_size, num_workers=workers, executor=executor,
            prefetch=random.randint(1, 3), in_order=self.in_order,
        )  # fmt: skip


class Bad:
    """A source some of whose records cannot be read."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in BAD:
            raise ValueError(f"record {index} is bad")
        return record(index)


def record(index: int) -> dict[str, Any]:
    return {"index": np.int64(index), "tokens": np.full(LENGTHS[index], index, np.int32)}


def draw(sample: dict[str, Any], context: Any) -> dict[str, Any]:
    return {**sample, "drawn": int(context.generator.integers(1 << 30))}


def stream_of(sequence: range) -> Any:
    return ({"index": i} for i in sequence)


def seekable(sequence: range) -> Any:
    return Resumable([*stream_of(sequence)])


@cache
def directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="dataload-resumes-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    ends = np.cumsum(SHARDS)
    for suffix in ("syr", "tar", "lmdb", "torchrecord", "array_record", "compressed"):
        for shard, end in enumerate(ends):
            options: dict[str, Any] = (
                {"codec": "tensorprotos"} if suffix in ("lmdb", "array_record", "compressed") else {}
            )
            if suffix == "array_record":
                options["options"] = "group_size:1,uncompressed"
            name = suffix if suffix != "compressed" else "array_record"
            with dataload.create(
                path / f"{suffix}-{shard}.{name}", format=name if name != "syr" else None, **options
            ) as writer:
                writer.extend(map(record, range(end - SHARDS[shard], end)))
    return path


@cache
def source_of(format: str) -> Any:  # noqa: A002
    if format == "bad":
        return Bad()
    if format == "range":
        return MemorySource([record(i) for i in range(RECORDS)])
    if format == "memory":
        return [record(i) for i in range(RECORDS)]
    if format == "concat":
        ends = np.cumsum(SHARDS)
        return ConcatSource(
            [MemorySource([record(i) for i in range(e - n, e)]) for n, e in zip(SHARDS, ends, strict=True)]
        )
    paths = sorted(map(str, directory().glob(f"{format}-*[!x]")))
    options: dict[str, Any] = {"codec": "tensorprotos"} if format in ("lmdb", "array_record", "compressed") else {}
    if format == "tar":
        options = {"decode": "auto"}
    return dataload.open(paths, **options)


def close_sources() -> None:
    for format in FORMATS:  # noqa: A001
        close = getattr(source_of(format), "close", None)
        if close is not None:
            close()
    source_of.cache_clear()


def build(what: Combination, run: Run, rank: int) -> Any:
    ranks = {"rank": rank, "world_size": run.world}
    common = {"executor": run.executor, "prefetch": run.prefetch, "epochs": what.epochs, "seed": what.seed}
    kind, _, mode = what.order.partition(" ")
    if kind == "multistream":
        sequences = [range(start, start + 1 + start % 7) for start in range(0, 120, 8)]
        return MultiStreamLoader(
            seekable if what.transform else stream_of, sequences, batch_size=run.batch_size, mode=mode,
            chunk=1 + what.seed % 3, ends=("next", "pad", "drop")[what.seed % 3], num_workers=run.num_workers,
            **{**common, "epochs": what.epochs if mode == "split" else None}, **ranks,
        )  # fmt: skip
    common |= {"num_workers": run.num_workers, "in_order": run.in_order, "on_error": what.on_error}
    if what.transform:
        common["transform"] = draw
    if what.exclude:
        common["exclude"] = [1, 7, 30]
    if kind == "packing":
        planner: Any = PackedBatchSampler(
            sampler=GlobalShuffle(RECORDS, what.seed), lengths=LENGTHS, row_length=14, batch_size=run.batch_size,
            window=8, tail=what.tail, **ranks,
        )  # fmt: skip
        return Loader(source_of(what.format), sampler=planner, **{**common, "transform": only_tokens})
    if kind == "buckets":
        planner = BucketBatchSampler(lengths=LENGTHS, max_tokens=24, seed=what.seed, tail=what.tail, **ranks)
    elif kind == "stream":
        planner = StreamSampler(
            sequence_lengths=SHARDS, rows=run.world * run.batch_size, chunk=1 + what.seed % 3, seed=what.seed,
            mode=mode, tail=what.tail, **ranks,
        )  # fmt: skip
    else:
        common |= {"batch_size": run.batch_size, "tail": what.tail, **ranks}
        planner = SAMPLERS[what.order](what.seed)
    return Loader(source_of(what.format), sampler=planner, collate={"tokens": "pad"}, **common)


def only_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": sample["tokens"]}


def job(what: Combination, runs: list[Run], stops: list[int]) -> list[list[Any]]:
    """Run a job to its end, or for `MOST_STEPS`, and stop after so many steps of each of `runs` but the last.

    Returns:
        For each step, the batches of all ranks.
    """
    received: list[list[Any]] = []
    states: list[str] | None = None
    for run, stop in zip(runs, [*stops, MOST_STEPS], strict=True):
        loaders = [build(what, run, rank) for rank in range(run.world)]
        try:
            if states is not None:
                for rank, loader in enumerate(loaders):
                    loader.load_state_dict(json.loads(states[rank % len(states)]))
            steps = deliveries(loaders, min(stop, MOST_STEPS - len(received)))
            received += steps
            if steps and isinstance(steps[-1], str):  # an error
                return received
            states = [json.dumps(loader.state_dict()) for loader in loaders]
        finally:
            for loader in loaders:
                loader.close()
    return received


def deliveries(loaders: list[Any], most: int) -> list[list[Any]]:
    """Return the next steps, at most so many, over the ends of epochs."""
    found: list[list[Any]] = []
    while len(found) < most:
        iterators = [iter(loader) for loader in loaders]
        begun = len(found)
        while len(found) < most:
            try:
                batches = [next(iterator, None) for iterator in iterators]
            except dataload.WorkerError as error:
                return [*found, f"{error.epoch} {error.step} {error.indices}"]
            if all(batch is None for batch in batches):
                break
            found.append(batches)
        for iterator in iterators:
            iterator.close()
        if len(found) == begun:
            break
    return found


def items_of(what: Combination, steps: list[list[Any]]) -> list[Any]:
    """Return the items of steps in the order of the data, whatever the ranks are."""
    kind = what.order.partition(" ")[0]
    found: list[Any] = []
    for batches in steps:
        if kind == "buckets":
            found += [[row for row in rows_of(batch) if row] for batch in batches]
            continue
        rows = [rows_of(batch) for batch in batches]
        found += [each[place] for place in range(max(map(len, rows))) for each in rows if place < len(each)]
    return [item for item in found if item]


def received(what: Combination, steps: list[list[Any]], *, unordered: bool, others: bool) -> list[list[Any]]:
    """Return what must be the same, in one list or in one for each rank."""
    if unordered:
        return [sorted(map(repr, steps))]
    if others:
        items = items_of(what, steps)
        # Batches without bad or excluded records are shorter, which hides how ranks take turns.
        return [sorted(items) if (what.on_error == "skip" or what.exclude) else items]
    errors = [step for step in steps if isinstance(step, str)]
    by_rank = zip(*(step for step in steps if not isinstance(step, str)), strict=True)
    return [*([batch for batch in batches if batch is not None] for batches in by_rank), errors]


def rows_of(batch: dict[str, Any]) -> list[Any]:
    if "segment_ids" in batch:
        valid = batch.get("valid", np.ones(len(batch["tokens"]), bool))
        return [
            row[segments > 0].tolist()
            for row, segments in zip(batch["tokens"][valid], batch["segment_ids"][valid], strict=True)
        ]
    valid = batch.get("valid", np.ones(batch["index"].shape, bool))
    return [row[keep].tolist() for row, keep in zip(np.atleast_1d(batch["index"]), valid, strict=True)]


def check(number: int, *, processes: bool | None = None) -> str:
    """Run one combination; returns what kind it is, and raises AssertionError if a batch differs."""
    random = Random(number)
    what = Combination.of(random)
    kind = what.order.partition(" ")[0]
    world = random.choice((1, 2, 3))
    batch_size = 6 // world if "stream" in kind else random.randint(1, 6)
    rare = random.randrange(RARE) == 0 if processes is None else processes
    replaces = what.on_error == "replace"
    unordered = "stream" not in kind and not replaces and random.random() < 0.15
    # Bad records are replaced by others of the same step, and "drop" drops what does not fill a step.
    steps_matter = kind == "multistream" or replaces or (what.tail == "drop" and kind != "stream")
    others = not unordered and not steps_matter and random.random() < 0.5
    if unordered:
        world = 1
    ranks = ((world, batch_size),)
    if others:
        ranks = ((1, 6), (2, 3), (3, 2), (6, 1)) if kind == "stream" else ((1, 4), (2, 3), (3, 1), (1, 1))
    first = Run(world=world, batch_size=batch_size, in_order=not unordered)
    stops = [random.randint(0, 9) for _ in range(random.randint(1, 3))]
    runs = [first, *(first.elsewhere(random, ranks, processes=rare) for _ in stops)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = job(what, [replace(first, in_order=True)], [])
        found = job(what, runs, stops)
    got, want = (received(what, steps, unordered=unordered, others=others) for steps in (found, wanted))
    if max(len(found), len(wanted)) == MOST_STEPS:  # and not all that there is
        if unordered or (others and (what.on_error == "skip" or what.exclude)):
            return "too long"
        pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(got, want, strict=True)]
        got, want = ([pair[side] for pair in pairs] for side in (0, 1))
    problem = difference(got, want, "received")
    if problem:
        raise AssertionError(f"{problem}\n{what}\nstops {stops}\n" + "\n".join(map(str, runs)))
    return kind + (", other ranks" if others else ", unordered" if unordered else "") + (", processes" if rare else "")


if __name__ == "__main__":
    sys.exit(drive(__doc__, "count", 20_000, check))
