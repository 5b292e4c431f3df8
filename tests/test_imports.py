"""`import dataload` is cheap, loads nothing optional, and does nothing."""

import json
import subprocess
import sys

OPTIONAL = [
    "torch",
    "jax",
    "ray",
    "lmdb",
    "bson",
    "pymongo",
    "google.protobuf",
    "array_record",
    "msgpack",
    "pydantic",
    "typer",
    "rich",
    "yaml",
    "PIL",
    "simplejpeg",
    "hypothesis",
    "pytest",
    "matplotlib",
    "pyarrow",
    "pandas",
    "polars",
]


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_loads_nothing_optional_starts_nothing_and_reads_no_environment():
    # numpy, which reads variables of its own, is imported before the environment is watched.
    code = f"""
import json, os, sys, threading, warnings
import numpy
filters, environ = list(warnings.filters), dict(os.environ)
reads = []
class Watched(type(os.environ)):
    def __getitem__(self, key):
        reads.append(key)
        return super().__getitem__(key)
os.environ.__class__ = Watched
import dataload, dataload.samplers, dataload.streams
os.environ.__class__ = Watched.__base__
loaded = [name for name in {OPTIONAL!r} if name in sys.modules]
print(json.dumps([loaded, threading.active_count(), warnings.filters == filters, dict(os.environ) == environ, reads]))
"""
    assert run(code) == [[], 1, True, True, []]


def test_opening_a_format_loads_only_what_it_needs(tmp_path):
    code = f"""
import json, sys
import dataload
with dataload.create({str(tmp_path / "a.syr")!r}) as writer:
    writer.write({{"x": 1}})
list(dataload.Loader(dataload.open({str(tmp_path / "a.syr")!r}), batch_size=1, num_workers=1))
print(json.dumps([name for name in {OPTIONAL!r} if name in sys.modules]))
"""
    assert run(code) == ["bson"]
