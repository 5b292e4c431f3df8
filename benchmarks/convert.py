"""Converting and writing: to every format, beside bare reading and bare writing, ``cp``, and the packages' own writers.

Each job is run from beginning to end, in interleaved rounds. All that writes also flushes to the disk, as our writers
do before they publish a file: ``cp`` is followed by ``fsync``. Sources are in the page cache.
"""

import functools
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from threading import Event, Thread
from time import perf_counter

import dataload
from benchmarks.costs import own_memory
from benchmarks.formats import SIZES
from benchmarks.harness import ROOT, against, aim, blobs, made, show
from benchmarks.workloads import floats, repeat_records
from dataload._util.indexing import even_split
from dataload.bench.task import used
from dataload.codecs.tensorprotos import encode
from dataload.convert import convert
from dataload.convert.blocks import BlockSize, read_records
from dataload.loader.step import nbytes as nbytes_of

ROUNDS = 5
SHARDS = 4
_COUNTS = {"64": 1 << 17, "4k": 3 << 14, "110k": 1 << 11}
_PAIRS = {  # format written: format read, suffix written, and how each is opened and written
    "syrah": ("torchrecord", "syr", {}),
    "torchrecord": ("syrah", "torchrecord", {}),
    "tar": ("syrah-bytes", "tar", {}),
    "lmdb": ("array_record", "lmdb", {}),
    "array_record": ("lmdb", "array_record", {"options": "group_size:1,uncompressed"}),
    "array_record-compressed": ("lmdb", "array_record", {"options": "group_size:1"}),
}
_ARRAYS = ("torchrecord", "syrah")
_READ = {  # the end of the file's name, and how it is written
    "torchrecord": (".torchrecord", {}),
    "syrah": (".syr", {}),
    "syrah-bytes": ("-bytes.syr", {}),
    "lmdb": (".lmdb", {"field": "bin"}),
    "array_record": ("-uncompressed.array_record", {"field": "bin", "options": "group_size:1,uncompressed"}),
}


@dataclass
class Job:
    """Work to be timed from beginning to end; `prepare` runs before each round, untimed."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    seconds: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])


def run_jobs(title, jobs, records, nbytes):
    """Time jobs in interleaved rounds; prints and returns a row for each."""
    for number in range(ROUNDS + 1):
        for job in jobs:
            job.prepare()
            before, begun = used(), perf_counter()
            job.run()
            took, usage = perf_counter() - begun, used().since(before)
            if number:  # the first round warms up
                job.seconds.append(took)
                job.cpu.append(usage.user + usage.system)
    figures = [
        {
            "case": job.name,
            "records_per_second": records / median(job.seconds),
            "MB/s": nbytes / median(job.seconds) / 1e6,
            "cpu_us_per_record": median(job.cpu) / records * 1e6,
        }
        for job in jobs
    ]
    rates = ([records / one for one in job.seconds] for job in jobs)
    return [{**row, "rates": each} for row, each in zip(show(title, title, figures), rates, strict=True)]


def emptied(work):
    """A function that empties a directory, and ends what the last job left to write."""

    def empty():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        os.sync()

    return empty


def flush(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def source_of(form, size):
    """Path and options of the data read, `_COUNTS` records of about `size` bytes, in the page cache."""
    count, nbytes = _COUNTS[size], SIZES[size].nbytes
    end, options = _READ[form]
    different = floats(nbytes // 4) if form in _ARRAYS else blobs(nbytes)
    counted = {"num_records": count} if form == "torchrecord" else {}
    return made(f"{nbytes}-{count}{end}", different, count, **options, **counted)


def in_memory(form, size):
    """The same records, in memory."""
    nbytes, count = SIZES[size].nbytes, _COUNTS[size]
    if form in _ARRAYS:
        return repeat_records(floats(nbytes // 4), count)
    records = repeat_records(blobs(nbytes), count)
    return records if form == "syrah-bytes" else [record["bin"] for record in records]


def read_all(source):
    """Read all records by blocks, as `convert` does, and drop them."""
    size, start = BlockSize(), 0
    while start < len(source):
        records = read_records(source, start, min(start + size.records, len(source)))
        size.learn(records)
        start += len(records)


def write_all(directory, suffix, records, options):
    """Write records from memory, to as many shards as `convert`."""
    for shard, (start, stop) in enumerate(even_split(len(records), SHARDS)):
        some = records[start:stop]
        more = {"num_records": len(some)} if suffix == "torchrecord" else {}
        with dataload.create(directory / f"{shard}.{suffix}", **options, **more) as writer:
            writer.extend(some)


def convert_part(path, destination, options, part):
    """Convert in this process; return the most memory of its own, in bytes, without pages of mapped files."""
    peak, ended = 0, Event()

    def watch():
        nonlocal peak
        while not ended.wait(0.005):
            peak = max(peak, own_memory())

    watching = Thread(target=watch)
    watching.start()
    try:
        with dataload.open(path) as source:
            convert(source, destination, shards=SHARDS, writer_options=options, part=part)
    finally:
        ended.set()
        watching.join()
    return peak


def converting(form, size):
    """From a fitting source to `form`: bare reading, bare writing, one process, two processes, and ``cp``."""
    read, suffix, options = _PAIRS[form]
    path, records, count = source_of(read, size), in_memory(read, size), _COUNTS[size]
    work = ROOT / f"convert-{os.getpid()}"
    target, fresh, peaks = work / f"d.{suffix}", emptied(work), []

    def in_processes(parts):
        running = [pool.submit(convert_part, path, str(target), options, (i + 1, parts)) for i in range(parts)]
        peaks.append(max(job.result() for job in running))
        convert(source, target, shards=SHARDS, writer_options=options, merge=True)

    with ExitStack() as held:
        source = held.enter_context(dataload.open(path))
        pool = held.enter_context(ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")))
        held.callback(shutil.rmtree, work, ignore_errors=True)
        list(pool.map(len, ["", ""]))
        jobs = [
            Job("bare reading", lambda: read_all(source)),
            Job("bare writing", lambda: write_all(work, suffix, records, options), fresh),
            Job("convert", lambda: convert(source, target, shards=SHARDS, writer_options=options), fresh),
            Job("convert, one part in a process, merged", lambda: in_processes(1), fresh),
            Job("convert, two parts in two processes, merged", lambda: in_processes(2), fresh),
        ]
        title = f"To {form} from {read}, {SIZES[size].name}, {SHARDS} shards"
        rows = run_jobs(title, jobs, count, nbytes_of(records))
    slower = [max(pair) for pair in zip(jobs[0].seconds, jobs[1].seconds, strict=True)]
    ratios = [limit / mine for limit, mine in zip(slower, jobs[2].seconds, strict=True)]
    loops = [(a + b) / c for a, b, c in zip(*(job.seconds for job in jobs[:3]), strict=True)]
    both = [(a + b) / c for a, b, c in zip(jobs[0].cpu, jobs[1].cpu, jobs[2].cpu, strict=True)]
    print(f"  {'CPU of reading and writing / CPU of convert':64} {median(both):10.4g}")
    return [
        *rows,
        aim(title, "convert / the slower of reading and writing", median(ratios), 0.8, ratios=ratios),
        aim(title, "convert / reading, then writing", median(loops), 0.8, ratios=loops),
        against(rows[4], rows[3], 1.8, "two processes / one"),
        aim(title, "greatest memory of a process, MB, without mapped files", max(peaks) / 1e6, most=400),
    ]


def copying():
    """Tar archives with components of 110 KB, beside ``cp`` of the same bytes to the same file system."""
    records = in_memory("syrah-bytes", "110k")
    first, work = ROOT / f"copied-{os.getpid()}.tar", ROOT / f"copy-{os.getpid()}"
    target, fresh = work / "d.tar", emptied(work)

    def write(path):
        with dataload.create(path) as writer:
            writer.extend(records)

    def copy():
        subprocess.run(["cp", first, target], check=True)
        flush(target)

    try:
        write(first)
        title = "Writing a tar archive, 110 KB"
        jobs = [Job("cp, fsync", copy, fresh), Job("dataload.create", lambda: write(target), fresh)]
        rows = run_jobs(title, jobs, len(records), first.stat().st_size)
    finally:
        first.unlink(missing_ok=True)
        shutil.rmtree(work, ignore_errors=True)
    return [*rows, against(rows[1], rows[0], 0.8)]


def beside_own(size):
    """The writers of TorchRecord, LMDB and ArrayRecord beside those of the packages that own the formats."""
    import lmdb
    from array_record.python import array_record_module

    count = _COUNTS[size]
    values, arrays = in_memory("lmdb", size), in_memory("syrah", size)
    total = sum(map(len, values))
    work = ROOT / f"own-{os.getpid()}"
    fresh = emptied(work)

    def ours(name, records, **options):
        with dataload.create(work / name, **options) as writer:
            writer.extend(records)

    def put(data, database=None, batch=1000):
        size_of_map = 2 * total + (count << 8) + (1 << 26)
        with lmdb.open(str(work / "own"), map_size=size_of_map, max_dbs=1, sync=False, lock=False) as environment:
            opened = environment.open_db(database) if database else None
            for start in range(0, count, batch):
                with environment.begin(write=True, db=opened) as transaction:
                    for number, value in enumerate(data[start : start + batch], start):
                        transaction.put(b"%010d" % number, value, append=True)
            environment.sync(True)

    def own_array_record(options):
        writer = array_record_module.ArrayRecordWriter(str(work / "own.array_record"), options)
        for value in values:
            writer.write(value)
        writer.close()
        flush(work / "own.array_record")

    found = []
    groups = {"uncompressed": "group_size:1,uncompressed", "compressed": "group_size:1"}
    pairs = [
        ("LMDB", "txn.put, 1,000 in a transaction", lambda: put(values), lambda: ours("d.lmdb", values)),
        (
            "TorchRecord",
            "protobuf's bytes by our codec, txn.put",
            lambda: put([*map(encode, arrays)], b"db0"),
            lambda: ours("d.torchrecord", arrays, num_records=count),
        ),
        *(
            (
                f"ArrayRecord, {name}",
                "array_record's ArrayRecordWriter",
                functools.partial(own_array_record, options),
                functools.partial(ours, "d.array_record", values, options=options),
            )
            for name, options in groups.items()
        ),
    ]
    try:
        for name, its, own, mine in pairs:
            jobs = [Job(its, own, fresh), Job("dataload.create", mine, fresh)]
            rows = run_jobs(f"Writing {name}, {SIZES[size].name}", jobs, count, total)
            found += [*rows, against(rows[1], rows[0], 0.9)]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return found


CASES = {
    **{f"convert-{form}-{size}": functools.partial(converting, form, size) for size in SIZES for form in _PAIRS},
    "copy-tar": copying,
    **{f"writers-{size}": functools.partial(beside_own, size) for size in SIZES},
}
