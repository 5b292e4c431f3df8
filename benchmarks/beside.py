"""Other loaders at their best settings beside this one, 4 KB records, in one run of the engine of `dataload bench`.

Every measurement has a process of its own. ``PEER_PYTHON=PATH`` names the Python of an environment with the peers,
``DALI_PYTHON=PATH`` that of DALI, ``TF_PYTHON=PATH`` that of TensorFlow; without them, the peers that this environment
has are measured.
"""

import os
from functools import partial
from statistics import median

from benchmarks.harness import ROOT, aim
from benchmarks.peers import PEERS
from benchmarks.peers.plan import plan_peers
from dataload.bench import table
from dataload.bench.data import Written, made_data, write
from dataload.bench.plan import Choices, plan_limits, plan_loaders
from dataload.bench.results import FileFacts
from dataload.bench.runner import agreeing, measure_all, run_task
from dataload.bench.timing import ratios_of
from dataload.bench.workloads import get_workload
from dataload.cli.output import print_table

TITLE = "Beside peers, 4 KB records"
AIMS = (("DALI on CPU", "tar", 10), ("WebDataset", "tar", 20), ("Grain", "array_record", 40))
OWN_TITLE = "TFRecord and MDS beside their own readers, 4 KB records"
OWN_READERS = (("tf.data", "tfrecord", 5), ("MosaicML Streaming", "mds", 5))


def peers(records=20_480, rounds=5, seconds=0.5):
    data = made_data(get_workload("floats-4k"), records)
    written = {name: write(data, name, ROOT) for name in ("syrah", "torchrecord", "lmdb", "tar", "array_record")}
    choices = Choices(orders=("global",), workers=(0, 2), batch_size=data.batch_size, seconds=seconds)
    pythons = interpreters()
    names = [name for name, peer in PEERS.items() if "generator" not in peer.readings]
    tasks, missing = plan_peers(names, data, written, choices, ROOT, interpreters=pythons)
    planned = [*plan_limits(data, written, choices), *plan_loaders(data, written, choices), *tasks]
    measured = agreeing(measure_all(planned, rounds, run=partial(run_task, interpreters=pythons)))
    found = [*measured, *missing]
    print(f"\n{TITLE}, a process for each row and round")
    print_table(*table.shortened(table.RATE_COLUMNS, table.rate_rows(found)))
    for line in (*table.settings(measured), *table.problems(found)):
        print(f"  {line}")
    return _rows(found, AIMS, TITLE)


def own_readers(records=20_480, rounds=5, seconds=0.5):
    """TFRecord and MDS beside the readers of those who made them, in the order of the files, which suits these best."""
    data = made_data(get_workload("floats-4k"), records)
    written = {name: write(data, name, ROOT) for name in ("tar", "tfrecord")}
    choices = Choices(orders=("sequential",), workers=(0, 2), batch_size=data.batch_size, seconds=seconds)
    pythons = interpreters()
    tasks, missing = plan_peers(
        [name for name, _, _ in OWN_READERS], data, written, choices, ROOT, interpreters=pythons
    )
    del written["tar"]  # from which MDS is written
    for path in {task.path for task in tasks if task.format == "mds"}:
        written["mds"] = Written(path, {}, FileFacts(data.name, "mds", records, 0, None))
    planned = [*plan_loaders(data, written, choices), *tasks]
    measured = agreeing(measure_all(planned, rounds, run=partial(run_task, interpreters=pythons)))
    found = [*measured, *missing]
    print(f"\n{OWN_TITLE}, a process for each row and round")
    print_table(*table.shortened(table.RATE_COLUMNS, table.rate_rows(found)))
    for line in (*table.settings(measured), *table.problems(found)):
        print(f"  {line}")
    return _rows(found, OWN_READERS, OWN_TITLE)


def interpreters():
    """The Python of each peer that has another one."""
    python, dali = os.environ.get("PEER_PYTHON"), os.environ.get("DALI_PYTHON")
    found = dict.fromkeys(PEERS, python) if python else {}
    others = {"DALI on CPU": dali, "tf.data": os.environ.get("TF_PYTHON")}
    return {**found, **{name: path for name, path in others.items() if path}}


def _rows(found, aims, title):
    rows = [_row(m, title) for m in found if m.answers]
    return rows + [aimed for name, form, floor in aims for aimed in _aim(found, name, form, floor, title)]


def _row(measurement, title):
    rates = measurement.rates
    figures = {"records_per_second": median(rates), "rates": rates, "aim": None, "met": None}
    return {"title": title, "case": table.describe_task(measurement.task), **figures}


def _aim(measured, peer, form, floor, title):
    """Compare this library's best number of workers on a format with a peer's best."""
    ours = _best(m for m in measured if m.task.kind == "dataload" and m.task.format == form)
    theirs = _best(m for m in measured if m.task.name == peer)
    if ours is None or theirs is None:
        print(f"  {peer}: not measured")
        return []
    ratios = ratios_of(ours.rates, theirs.rates)
    case = f"{form}, {ours.task.workers} workers / {table.describe_task(theirs.task)}"
    return [aim(title, case, median(ratios), floor, ratios=ratios)]


def _best(measurements):
    return max((m for m in measurements if m.answers), key=lambda m: median(m.rates), default=None)
