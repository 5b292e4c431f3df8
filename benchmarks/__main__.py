"""python -m benchmarks [NAME ...] [--json FILE]: run all cases, or those named; then print a line for each aim."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from time import perf_counter

from benchmarks import (
    adaptive,
    beside,
    cold,
    convert,
    costs,
    execution,
    formats,
    harness,
    images,
    imports,
    orders,
    remote,
    samples,
    tables,
    tokens,
)
from dataload.bench.results import Results
from dataload.bench.runner import describe_run

CASES = {
    **formats.CASES,
    "transforms": samples.transforms,
    "jpeg": samples.jpeg,
    "images": images.images,
    "changed-import": samples.changed_import,
    "peers": beside.peers,
    "own-readers": beside.own_readers,
    "overhead": costs.overhead,
    "open": costs.opening,
    "resume": costs.resuming,
    "unchanged": costs.unchanged,
    "cold": cold.cold,
    "tables": tables.tables,
    "tokens": tokens.tokens,
    "orders": orders.orders,
    "order-start": orders.starting,
    "order-groups": orders.groups,
    "processes": execution.processes,
    "scaling": execution.scaling,
    "import": imports.imports,
    "iterators": execution.iterators,
    "first-batch": execution.first_batch,
    "memory": execution.memory,
    "adaptive": adaptive.adaptive,
    "remote": remote.remote,
    **convert.CASES,
}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CASES], metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--size", default=remote.SIZE, help="bytes of the data of the case remote, such as 2GB")
    arguments = parser.parse_args()
    run = describe_run(shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]))
    machine = {"cpus": run["machine"]["cpus"], **run["versions"]}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(
        f"Steady state: all is open and warm; {harness.ROUNDS} interleaved rounds of {harness.SECONDS:g} s a case.\n"
        "ratio: median of the ratios to the first case of the same round; spread: their quartiles.\n"
        "faults, sys us: page faults and system time for each batch, workers included."
    )
    rows = []
    for name in arguments.names or CASES:
        begun = perf_counter()
        rows += CASES[name](size=arguments.size) if name == "remote" else CASES[name]()
        print(f"  [{name}: {perf_counter() - begun:.0f} s]", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(Results(**run, rows=tuple(rows)).to_json(), indent=1), "utf-8")
    aimed = [row["met"] for row in rows if row.get("met") is not None]
    print("\nAims")
    print("\n".join(harness.summary(rows)))
    print(f"\n{aimed.count(False)} of {len(aimed)} aims not met in this run")


if __name__ == "__main__":
    sys.exit(main())
