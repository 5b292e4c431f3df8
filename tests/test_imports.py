"""`import dataload` is cheap, loads nothing optional, and does nothing."""

import json
import subprocess
import sys

OPTIONAL = ["torch", "jax", "ray", "lmdb", "bson", "pymongo", "google.protobuf", "array_record", "msgpack", "pydantic"]
OPTIONAL += [
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


def test_nothing_optional_is_loaded_or_started_before_it_is_needed(tmp_path):
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
found = [loaded, threading.active_count(), warnings.filters == filters, dict(os.environ) == environ, reads]
with dataload.create({str(tmp_path / "a.syr")!r}) as writer:
    writer.write({{"x": 1}})
list(dataload.Loader(dataload.open({str(tmp_path / "a.syr")!r}), batch_size=1, num_workers=1))
print(json.dumps([*found, [name for name in {OPTIONAL!r} if name in sys.modules]]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert json.loads(done.stdout) == [[], 1, True, True, [], ["bson"]]
