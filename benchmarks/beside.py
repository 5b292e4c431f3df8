"""Other loaders at their best settings beside this one, measured as `dataload bench` measures.

Every measurement has a process of its own. ``PEER_PYTHON=PATH`` names the Python of an environment with the peers,
``DALI_PYTHON``, ``TF_PYTHON`` and ``STREAMING_PYTHON`` those of DALI, TensorFlow and MosaicML Streaming; without them,
the peers that this environment has are measured.
"""

import os
from dataclasses import replace
from itertools import product
from statistics import median
from typing import get_args

from benchmarks.harness import ROOT, aim
from benchmarks.limits import plan_limits
from benchmarks.peers import PEERS, plan
from benchmarks.rates import measure_tasks, ratios_of
from benchmarks.workloads import WORKLOADS, made_data, write_made
from dataload.bench import runner as table
from dataload.bench.data import BATCH_SIZE, Choices, Written, plan_loaders, write
from dataload.bench.runner import FileFacts, run_task
from dataload.bench.task import Order
from dataload.cli.bench import choose, numbers
from dataload.cli.output import ProgressBar

TITLE = "Beside peers, 4 KB records"
AIMS = (("DALI on CPU", "tar", 10), ("WebDataset", "tar", 20), ("Grain", "array_record", 40))
OWN_PYTHONS = {"DALI on CPU": "DALI_PYTHON", "tf.data": "TF_PYTHON", "MosaicML Streaming": "STREAMING_PYTHON"}
OWN_TITLE = "TFRecord and MDS beside their own readers, 4 KB records"
OWN_READERS = (("tf.data", "tfrecord", 5), ("MosaicML Streaming", "mds", 5))


def peers(records=20_480, rounds=5, seconds=0.5):
    data = made_data("floats-4k", records)
    written = {name: write(data, name, ROOT) for name in ("syrah", "torchrecord", "lmdb", "tar", "array_record")}
    choices = Choices(orders=("global",), workers=(0, 2), batch_size=BATCH_SIZE, seconds=seconds)
    planned = _plan(PEERS, interpreters(), data, written, choices, ROOT)
    return _rows(measure_tasks(TITLE, *planned, rounds, interpreters()), AIMS, TITLE)


def own_readers(records=20_480, rounds=5, seconds=0.5):
    """TFRecord and MDS beside the readers of those who made them, in the order of the files, which suits these best."""
    data = made_data("floats-4k", records)
    written = {name: write(data, name, ROOT) for name in ("tar", "tfrecord")}
    choices = Choices(orders=("sequential",), workers=(0, 2), batch_size=BATCH_SIZE, seconds=seconds)
    names = [name for name, _, _ in OWN_READERS]
    tasks, missing = plan.plan_peers(names, data, written, choices, ROOT, interpreters=interpreters())
    del written["tar"]  # from which MDS is written
    for path in {task.path for task in tasks if task.format == "mds"}:
        written["mds"] = Written(path, {}, FileFacts(data.name, "mds", records, 0, None))
    planned = [*plan_loaders(data, written, choices), *tasks], missing
    return _rows(measure_tasks(OWN_TITLE, *planned, rounds, interpreters()), OWN_READERS, OWN_TITLE)


def made(arguments):
    """Measure made data as the command line says; return the files and measurements of `Results`."""
    orders, workers = choose("orders", arguments.orders, get_args(Order)), numbers("workers", arguments.workers)
    given, pythons = arguments.peers, interpreters()
    names = tuple(PEERS) if given == "all" else () if given is None else choose("peers", given, tuple(PEERS))
    found = {"files": (), "measurements": (), "rows": ()}
    for name, shards in product(arguments.made, numbers("shards", arguments.shards)):
        data, searched = made_data(name, arguments.records), []
        if shards > 1:
            data = replace(data, name=f"{data.name} in {shards:,} shards", content=f"{data.content}-{shards}")
        forms = choose("formats", arguments.formats, data.formats) if arguments.formats else data.formats
        written = {form: write_made(data, form, arguments.cache, shards) for form in forms}
        rows = arguments.batch_size or WORKLOADS[name][1]
        choices = Choices(orders=orders, workers=workers, batch_size=rows, seconds=arguments.seconds)
        planned = _plan(names, pythons, data, written, choices, arguments.cache, shards)
        if arguments.search:
            planned = _searched(data.name, *planned, pythons, arguments.search, searched)
        files = [one.facts for one in written.values()]
        done = measure_tasks(data.name, *planned, arguments.repeats, pythons, files=files)
        more = {"files": files, "measurements": done, "rows": searched}
        found = {key: (*value, *more[key]) for key, value in found.items()}
    return found


def _searched(title, tasks, missing, pythons, seconds, searched):
    """Return limits, and of each reader the settings that are fastest in a short search, whose figures are printed."""
    best, bar = [task for task in tasks if task.kind == "limit"], ProgressBar(f"searching settings of {title}")

    def rate(task):
        answer = run_task(replace(task, seconds=seconds, whole=False), interpreters=pythons)
        settings = table.describe_task(task) + "".join(f", {k} {v}" for k, v in task.options.get("tuned", {}).items())
        figure = 0.0 if isinstance(answer, str) else answer.records_per_second
        searched.append({"title": title, "case": settings, "records_per_second": figure})
        print(f"  {settings:80} {answer if isinstance(answer, str) else f'{figure:,.0f}/s'}", flush=True)
        return figure

    readers = {}
    for task in tasks:
        if task.kind != "limit":
            readers.setdefault((task.name, task.format if task.kind == "dataload" else ""), []).append(task)
    with bar:
        for (name, _), several in readers.items():
            rates = [(rate(task), number, task) for number, task in enumerate(several)]
            chosen = max(rates)[2]
            for more in PEERS[name].grid if name in PEERS else ():
                if "prefetch_factor" in more and not chosen.workers:
                    continue
                tuned = replace(chosen, options={**chosen.options, "tuned": more})
                rates.append((rate(tuned), len(rates), tuned))
            best.append(max(rates)[2])
    return best, missing


def _plan(names, pythons, data, written, choices, cache, shards=1):
    """Plan limits, loaders and peers; return the tasks, and the measurements that are impossible."""
    tasks, missing = plan.plan_peers(names, data, written, choices, cache, interpreters=pythons, shards=shards)
    own = [*plan_limits(data, written, choices), *plan_loaders(data, written, choices)]
    if shards > 1:  # the packages' own loops read one file
        own = [task for task in own if not task.reading.endswith(("lmdb_get", "array_record_read"))]
    return [*own, *tasks], missing


def interpreters():
    """The Python of each peer that has another one."""
    python = os.environ.get("PEER_PYTHON")
    found = dict.fromkeys(PEERS, python) if python else {}
    others = {name: os.environ.get(variable) for name, variable in OWN_PYTHONS.items()}
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
