"""python -m benchmarks.instructions [NAME ...] [--json FILE]: instructions of the hot loops.

Seconds depend on who else is on the machine; instructions repeat, so that a change of a few percent is seen in one run.
They are counted by `valgrind --tool=callgrind`, or by `perf stat -e instructions:u` where the processor's counters can
be read. Each case runs twice in a process of its own, with few and with many loops; the difference over the loops has
no start of Python in it. Two such files are compared by `benchmarks/compare.py`.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

import dataload
from dataload.bench.results import Results
from dataload.bench.runner import describe_run
from dataload.collate import default_collate
from dataload.samplers import GlobalShuffle, PoolShuffle, ShardSequential

WARM_UP = 2


def indices(order, first):
    return nullcontext(partial(order.indices, np.arange(16_384) + first, epoch=0))


@contextmanager
def loader_steps():
    with dataload.Loader(dataload.RangeSource(10_000_000), batch_size=256, shuffle=True) as loader:
        batches = iter(loader)
        yield lambda: list(islice(batches, 64))


@contextmanager
def syrah_read_batch():
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "data.syr")
        with dataload.create(path) as writer:
            writer.extend({"x": np.full(16, i, np.float32)} for i in range(2_000))
        batches = np.random.default_rng(0).permutation(2_000)[:1_792].reshape(7, 256)
        with dataload.open(path) as source:
            yield lambda: [source.read_batch(rows) for rows in batches]


def collate():
    return nullcontext(partial(default_collate, [{"x": np.full(16, i, np.float32), "y": i} for i in range(256)]))


def pool():
    return PoolShuffle(ShardSequential((65_536,) * 16, 0), 1024, 0)


# Name -> indices, steps or records of one loop; loops, enough to hide the 100,000 instructions by which two starts of
# Python differ; and a function that returns the loop as a context, which ends with its files.
CASES = {
    "GlobalShuffle.indices, an index": (16_384, 100, lambda: indices(GlobalShuffle(1_000_000, 0), 0)),
    "PoolShuffle.indices, an index": (16_384, 25, lambda: indices(pool(), 500_000)),
    "Loader over RangeSource, a step of 256": (64, 10, loader_steps),
    "Syrah read_batch of 256, a record": (7 * 256, 200, syrah_read_batch),
    "collate of 256, a sample": (256, 50, collate),
}


class Counter(NamedTuple):
    """A tool that counts: its name, the start of its command line, and a pattern of the count in its standard error."""

    name: str
    command: tuple[str, ...]
    pattern: str

    def count(self, command):
        """Return the instructions of a command; None where the tool cannot tell."""
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*self.command, *command], capture_output=True, text=True, env=environment, check=False)
        found = re.search(self.pattern, done.stderr, re.MULTILINE)
        return int(found[1]) if done.returncode == 0 and found else None


COUNTERS = (
    Counter("perf", ("perf", "stat", "-x", ";", "-e", "instructions:u"), r"^(\d+);[^;]*;instructions"),
    Counter("callgrind", ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"), r"Collected : (\d+)"),
)


def find_counter(counters=COUNTERS):
    """Return the first tool that is installed and counts something."""
    counting = (c for c in counters if shutil.which(c.command[0]) and c.count(["/bin/true"]))
    return next(counting, None)


def run_loops(name, loops):
    """Run a case: the work of a counted process."""
    _, _, prepare = CASES[name]
    with prepare() as work:
        for _ in range(loops):
            work()


def instructions_per_item(counter, name):
    """Return the instructions of one item of a case.

    Raises:
        RuntimeError: The tool gave no count.
    """
    items, loops, _ = CASES[name]
    script = "import sys; from benchmarks.instructions import run_loops; run_loops(sys.argv[1], int(sys.argv[2]))"
    counts = [counter.count([sys.executable, "-c", script, name, str(number)]) for number in (WARM_UP, WARM_UP + loops)]
    if None in counts:
        raise RuntimeError(f"{counter.name} gave no count of {name!r}: run the command without it to see why")
    return (counts[1] - counts[0]) / loops / items


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"beginnings of: {'; '.join(CASES)}")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parsed = parser.parse_args(arguments)
    counter = find_counter()
    if counter is None:
        print("instructions cannot be counted here: valgrind is not installed, and perf sees no hardware counters")
        return
    title, rows = f"instructions, counted by {counter.name}", []
    for name in CASES:
        if not parsed.names or name.startswith(tuple(parsed.names)):
            count = instructions_per_item(counter, name)
            print(f"{name:42} {count:14,.1f}", flush=True)
            rows.append({"title": title, "case": name, "instructions": count})
    if parsed.json:
        run = describe_run(shlex.join(["python", "-m", "benchmarks.instructions", *sys.argv[1:]]))
        parsed.json.write_text(json.dumps(Results(**run, rows=tuple(rows)).to_json(), indent=1), "utf-8")


if __name__ == "__main__":
    main()
