"""python -m benchmarks [NAME ...] [--json FILE]: run all cases, or those named; then print a line for each aim.

python -m benchmarks --made WORKLOAD [--formats ...] [--peers ...]: compare formats and other loaders on made data.
"""

import argparse
import importlib
import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from time import perf_counter

import dataload
from benchmarks import (
    adaptive,
    beside,
    chat,
    convert,
    costs,
    crops,
    execution,
    formats,
    harness,
    many_sources,
    mixtures,
    orders,
    remote,
    samples,
    tables,
    telemetry,
    tokens,
    video,
)
from benchmarks.workloads import WORKLOADS
from dataload.bench.runner import Results, describe_run

CASES = {
    **formats.CASES,
    "transforms": samples.transforms,
    "jpeg": samples.jpeg,
    "images": samples.images,
    "crops": crops.crops,
    "changed-import": lambda: importlib.import_module("benchmarks.changed_import").changed_import(),  # needs torch
    "peers": beside.peers,
    "own-readers": beside.own_readers,
    "overhead": costs.overhead,
    "open": costs.opening,
    "open-shards": costs.shards,
    "many-shards": costs.many_shards,
    "resume": costs.resuming,
    "unchanged": costs.unchanged,
    "cold": orders.cold,
    "tables": tables.tables,
    "telemetry": telemetry.telemetry,
    "tokens": tokens.tokens,
    "chat": chat.chat,
    "video": video.video,
    "orders": orders.orders,
    "mixtures": mixtures.mixtures,
    "many-sources": many_sources.many_sources,
    "order-start": orders.starting,
    "order-groups": orders.groups,
    "processes": execution.processes,
    "scaling": execution.scaling,
    "import": costs.imports,
    "iterators": execution.iterators,
    "first-batch": execution.first_batch,
    "memory": execution.memory,
    "adaptive": adaptive.adaptive,
    "fleet": lambda: importlib.import_module("benchmarks.fleet").fleet(),  # needs Ray
    "remote": remote.remote,
    **{f"remote-{name}": partial(remote.remote, (name,)) for name in remote.CASES},
    **convert.CASES,
}


def parse():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *CASES], metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--size", default=remote.SIZE, help="bytes of the data of the cases remote, such as 2GB")
    made = parser.add_argument_group("made data, in processes of their own")
    made.add_argument("--made", action="append", choices=[*WORKLOADS], help="the records; repeatable")
    made.add_argument("--formats", help="names, separated by commas")
    made.add_argument("--orders", default="global", help="any of global, pool, sequential")
    made.add_argument("--workers", default="0,1,2", help="numbers of workers")
    made.add_argument("--batch-size", type=int, help="records per batch")
    made.add_argument("--records", type=int, help="number of records")
    made.add_argument("--shards", default="1", help="numbers of files of each format")
    made.add_argument("--search", type=float, help="seconds of a short measurement of settings; the best are measured")
    made.add_argument("--repeats", type=int, default=3, help="rounds; tables show medians")
    made.add_argument("--seconds", type=float, default=2.0, help="of each measurement, after a warm-up")
    made.add_argument("--cache", type=Path, default=harness.ROOT, help="directory that keeps the written files")
    made.add_argument("--peers", help="also measure other loaders: all, or names; see benchmarks/beside.py")
    return parser.parse_args()


def main():
    arguments = parse()
    run = describe_run(shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]))
    run["versions"] = {**run["versions"], "dataload": _version()}
    machine = {"cpus": run["machine"]["cpus"], **run["versions"]}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    found = beside.made(arguments) if arguments.made else {"rows": tuple(cases(arguments))}
    if arguments.json:
        arguments.json.write_text(json.dumps(Results(**run, **found).to_json(), indent=1), "utf-8")
    aims(found.get("rows", ()))


def _version():
    """The version of the package that is measured, and the commit."""
    command = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"]
    described = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return f"{dataload.__version__} ({described})" if described else dataload.__version__


def cases(arguments):
    """Run the cases, and return their rows."""
    print(
        f"Steady state: all is open and warm; {harness.ROUNDS} interleaved rounds of {harness.SECONDS:g} s a case.\n"
        "ratio: median of the ratios to the first case of the same round; spread: their quartiles.\n"
        "faults, sys us: page faults and system time for each batch, workers included."
    )
    rows = []
    for name in arguments.names or [name for name in CASES if not name.startswith("remote-")]:
        begun = perf_counter()
        rows += CASES[name](size=arguments.size) if name.startswith("remote") else CASES[name]()
        print(f"  [{name}: {perf_counter() - begun:.0f} s]", flush=True)
    return rows


def aims(rows):
    """Print a line for each aim."""
    aimed = [row["met"] for row in rows if row.get("met") is not None]
    if aimed:
        print("\nAims")
        print("\n".join(harness.summary(rows)))
        print(f"\n{aimed.count(False)} of {len(aimed)} aims not met in this run")


if __name__ == "__main__":
    sys.exit(main())
