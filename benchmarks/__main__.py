"""python -m benchmarks [NAME ...] [--json FILE]: run all cases, or those named."""

import argparse
import json
import shlex
import sys
from pathlib import Path

from benchmarks import adaptive, cases, execution, orders
from dataload.bench.results import Results
from dataload.bench.runner import describe_run

CASES = {
    "overhead": cases.overhead,
    "syrah-4k": lambda: cases.syrah(1024, 200_000, 256, 0.8, 1.3),
    "syrah-64": lambda: cases.syrah(16, 1_000_000, 1024, 0.25),
    "lmdb": lambda: cases.lmdb_raw(4096, 100_000, 256),
    "torchrecord": lambda: cases.torchrecord(1024, 50_000, 256),
    "array_record": lambda: cases.array_record(4096, 100_000, 256, "group_size:1", 0.95, 0.95),
    "array_record-uncompressed": lambda: cases.array_record(4096, 100_000, 256, "group_size:1,uncompressed", 6),
    "tar-4k": lambda: cases.tar(4096, 100_000, 256),
    "tar-110k": lambda: cases.tar(110_000, 20_000, 256),
    "tokens": cases.tokens,
    "open": cases.opening,
    "orders": orders.orders,
    "order-start": orders.starting,
    "order-reading": orders.reading,
    "processes": execution.processes,
    "scaling": execution.scaling,
    "jpeg": execution.jpeg,
    "first-batch": execution.first_batch,
    "memory": execution.memory,
    "iterators": execution.iterators,
    "adaptive": adaptive.adaptive,
}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CASES], metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    run = describe_run(shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]))
    machine = {"cpus": run["machine"]["cpus"], **run["versions"]}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    rows = [row for name in arguments.names or CASES for row in CASES[name]()]
    if arguments.json:
        arguments.json.write_text(json.dumps(Results(**run, rows=tuple(rows)).to_json(), indent=1), "utf-8")
    aimed = [row["met"] for row in rows if row.get("met") is not None]
    print(f"\n{aimed.count(False)} of {len(aimed)} aims not met in this run")


if __name__ == "__main__":
    sys.exit(main())
