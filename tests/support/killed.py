"""Jobs in processes that end by SIGKILL: before an operation on files, or when their directory is in a state."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from unittest import mock

import numpy as np

import dataload
from dataload.catalog.arrays import list_cache, list_data, remove
from dataload.convert import convert
from dataload.convert.indexing import Measuring, index_shards
from dataload.storage import Remote
from dataload.storage.local import atomic

OPERATIONS = ("open", "os.", "shutil.", "fcntl.")  # audit events
NEVER = 1 << 30
FORMATS = {"syr": {}, "tar": {}, "lmdb": {"codec": "tensorprotos"}}  # suffix -> options
MORE = {  # only for `FEW` jobs
    "torchrecord": {},
    "array_record": {"codec": "tensorprotos", "options": "group_size:1,uncompressed"},
    "mp4": {"pixel_format": "rgb24", "crf": 0, "preset": "ultrafast"},
}
FEW = ("write", "rewrite", "rewrite without exchange", "convert", "overwrite")


def at_operations(act):
    """Call `act` with the number of each operation on files of this process, from 0, before it happens."""
    number, busy = 0, False

    def note(event, _):
        nonlocal number, busy
        if event.startswith(OPERATIONS) and not busy:
            busy = True
            try:
                act(number)
            finally:
                number, busy = number + 1, False

    sys.addaudithook(note)


def kill_before(operation):
    at_operations(lambda number: number == operation and end())


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def source(records=9, suffix=""):
    if suffix == "mp4":
        return dataload.MemorySource([{"frame": np.full((64, 64, 3), i, np.uint8)} for i in range(records)])
    return dataload.MemorySource([{"x": np.arange(i + 1.0), "n": np.array(i)} for i in range(records)])


def old(suffix=""):
    return dataload.MemorySource([{"frame": np.zeros((64, 64, 3), np.uint8)} if suffix == "mp4" else {"n": 0}] * 8)


def opened(directory, suffix, options):
    reading = {"decode": "auto"} if suffix == "tar" else {}
    codec = (FORMATS | MORE)[suffix].get("codec")
    return dataload.open(directory, **reading, **({} if codec is None else {"codec": codec}), **options)


def written(directory, suffix, options, **settings):
    path = f"{directory}/a.{suffix}"
    given = {"shards": 2, **settings}
    given.setdefault("source", source(suffix=suffix))
    return convert(given.pop("source"), path, writer_options=(FORMATS | MORE)[suffix], **given, **options)


def write(directory, suffix, options, *, again=False, records=None, **settings):
    """Write one file, over one that a killed writer has left complete."""
    path = f"{directory}/a.{suffix}"
    if again and (options or os.path.exists(path)):
        settings["overwrite"] = True
    with dataload.create(path, **(FORMATS | MORE)[suffix], **settings, **options) as writer:
        writer.extend(source(suffix=suffix) if records is None else records)


def rewrite_without_exchange(*place, again):
    """Replace a file where the system cannot exchange two directories."""
    with mock.patch.object(atomic, "_libc_rename", return_value=None):
        write(*place, overwrite=True)


def indexed(directory, suffix, options, **settings):
    return index_shards(directory, options={**FORMATS[suffix], **options}, **settings)


def appended(directory, suffix, options, *, again):
    """Add three records in two shards, unless a killed run has done so."""
    decoding = {"decode": "auto"} if suffix == "tar" else {}
    with dataload.open(directory, **decoding, **options) as found:
        done = len(found) > 9
    with dataload.create(directory, append=True, shards=2, **options) as writer:  # which removes what is left over
        if not (again and done):
            writer.extend(source(3))
    if again:  # as `dataload cache prune` does
        remote = Remote.of(options["storage_options"], options["remote"]) if options else None
        left = list_data(directory, remote) + (list_cache(options["remote"]["cache"]) if options else [])
        unnamed = [each for each in left if each.kind in ("upload", "lengths", "lock") and each.removal != "never"]
        for each in remove(unnamed, remote):
            if each.kind == "upload":
                os.rmdir(os.path.dirname(each.path))


JOBS = {  # of a directory, a suffix and options for URLs; `again` after a kill
    "write": write,
    "rewrite": lambda *place, again: write(*place, overwrite=True),
    "rewrite without exchange": rewrite_without_exchange,
    "convert": lambda *place, again: written(*place, resume=again),
    "overwrite": lambda *place, again: written(*place, overwrite=True),
    "part": lambda *place, again: written(*place, shards=3, part=(2, 2)),
    "merge": lambda *place, again: written(*place, shards=3, merge=True),
    "append": appended,
    "index": lambda *place, again: indexed(*place),
    "stats": lambda *place, again: indexed(*place, measuring=Measuring()),
    "merged stats": lambda *place, again: indexed(*place, measuring=Measuring(), merge=True),
}


def prepare(job, *place, forget):
    """Make what the job finds; `forget` deletes a file of the directory by its name."""
    if job == "overwrite":
        written(*place, source=old(place[1]))
    elif job.startswith("rewrite"):
        write(*place, records=old(place[1]))
    elif job in ("part", "merge"):
        for number in (1, 2)[: 1 if job == "part" else 2]:
            written(*place, shards=3, part=(number, 2))
    elif job == "append":
        written(*place, shards=3)
        indexed(*place, measuring=Measuring())
    elif job not in ("convert", "write"):
        written(*place, shards=3)
        for name in ("dataload.json", f".a.{place[1]}.convert.json"):
            forget(name)
        for number in (1, 2) if job == "merged stats" else ():
            indexed(*place, measuring=Measuring(), part=(number, 2))


def complete(job, *place):
    """Do what makes the directory of a job complete."""
    if job == "part":
        JOBS["merge"](*place, again=True)


def run(target, *arguments):
    """Return the exit code of a function in a process."""
    process = start(target, *arguments)
    process.join()
    code = process.exitcode
    process.close()
    return code


def start(target, *arguments):
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    process.start()
    return process


def job_killed_before(job, place, operation, counted):
    """Do a job, killed before an operation, and write the number of operations to `counted`."""
    done = 0

    def note(number):
        nonlocal done
        done = number + 1
        if number == operation:
            end()

    with open(counted, "w") as file:  # which is none of the job's operations
        at_operations(note)
        JOBS[job](*place, again=False)
        file.write(str(done))


def job_killed_when(job, place, state):
    """Do a job, killed before the first operation in whose state of the directory `STATES` is true."""
    at_operations(lambda _: STATES[state](Seen(place[0])) and end())
    JOBS[job](*place, again=False)


def job_with_pauses(place, settings, seed, told):
    """Convert with pauses before operations, and write what came of it to a file."""
    chooser = random.Random(seed)
    if not place[2]:
        at_operations(lambda _: chooser.random() < 0.2 and time.sleep(chooser.expovariate(200)))
    time.sleep(chooser.uniform(0, 0.1))
    try:
        settings = dict(settings)
        written(*place, source=source(settings.pop("records", 9)), **settings)
        outcome = "done"
    except dataload.DataloadError as error:
        outcome = str(error)
    with open(told, "w") as file:
        file.write(outcome)


class Seen:
    """What lies in a local directory of a conversion to Syrah."""

    def __init__(self, directory):
        self.directory, self.names = directory, {*os.listdir(directory)}
        self.lines = self._read(".a.syr.convert.log").count(b"\n")
        self.finished = len(json.loads(self._read(".a.syr.convert.json") or b'{"finished": []}')["finished"])
        self.hidden = sum(name.startswith(".a-") for name in self.names)
        self.lengths = sum(name.startswith(".dataload.lengths") for name in self.names)

    def _read(self, name):
        if name not in self.names:
            return b""
        with open(os.path.join(self.directory, name), "rb") as file:
            return file.read()


STATES = {  # the rows of the table of crashes, in order
    "the lock is held": lambda seen: {*seen.names} == {".a.syr.convert.json.lock"},
    "the journal is begun": lambda seen: ".a.syr.convert.json" in seen.names and not seen.lines,
    "the log is begun": lambda seen: seen.lines == 1 and not seen.hidden,
    "a shard is in its hidden folder": lambda seen: seen.lines == 1 and seen.hidden,
    "a shard has its name and no line": lambda seen: seen.lines == 1 and "a-00000-of-00002.syr" in seen.names,
    "a shard has its line": lambda seen: seen.lines == 2,
    "lengths are written": lambda seen: seen.lengths and "dataload.json" not in seen.names,
    "the journal is complete": lambda seen: seen.finished == 2 and "dataload.json" not in seen.names,
    "the manifest is there": lambda seen: "dataload.json" in seen.names and seen.lines,
    "the log is gone": lambda seen: "dataload.json" in seen.names and not seen.lines,
}
