"""`import dataload` is cheap, loads nothing optional, and does nothing."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAZY = ["dataload", "dataload.analysis", "dataload.sources", "dataload.testing"]
OPTIONAL = ["torch", "jax", "ray", "lmdb", "bson", "pymongo", "google.protobuf", "array_record", "msgpack", "pydantic"]
OPTIONAL += ["typer", "rich", "yaml", "PIL", "simplejpeg", "hypothesis", "opentelemetry", "pytest", "matplotlib"]
OPTIONAL += ["pyarrow", "pandas", "polars"]


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


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
import dataload, dataload.samplers, dataload.streams, dataload.telemetry
os.environ.__class__ = Watched.__base__
loaded = [name for name in {OPTIONAL!r} if name in sys.modules]
found = [loaded, threading.active_count(), warnings.filters == filters, dict(os.environ) == environ, reads]
with dataload.create({str(tmp_path / "a.syr")!r}) as writer:
    writer.write({{"x": 1}})
list(dataload.Loader(dataload.open({str(tmp_path / "a.syr")!r}), batch_size=1, num_workers=1))
print(json.dumps([*found, [name for name in {OPTIONAL!r} if name in sys.modules]]))
"""
    assert run(code) == [[], 1, True, True, [], ["bson"]]


def modules_of(*arguments):
    """The modules of numpy, rich and dataload that a new interpreter has loaded when it ends."""
    code = """
import atexit, json, runpy, sys
roots = ("dataload", "numpy", "rich")
installed = ("rich", "rich._extension")  # an empty package, imported to see whether there is one
found = lambda: sorted(name for name in sys.modules if name.partition(".")[0] in roots and name not in installed)
atexit.register(lambda: print("\\n" + json.dumps(found())))
sys.argv[0] = "dataload"
"""
    run = "import dataload" if not arguments else "runpy.run_module('dataload', run_name='__main__')"
    command = [sys.executable, "-c", code + run, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_import_and_help_load_next_to_nothing():
    assert modules_of() == (least := ["dataload", "dataload._util", "dataload._util.lazy"])
    assert modules_of("--help") == [
        *least,
        "dataload.cli",
        "dataload.cli.app",
        "dataload.cli.output",
        "dataload.errors",
    ]
    code = "import sys; before = 'typing' in sys.modules; import dataload; print(int('typing' in sys.modules) - before)"
    assert run(code) == 0


def test_the_registry_loads_no_parser():
    code = """
import json, sys
import dataload.sources.registry as registry
assert len(registry.built_in_formats()) > 15
names = [name.split(".") for name in sys.modules if name.startswith("dataload.sources.")]
print(json.dumps([".".join(name) for name in names if len(name) == 4 and name[3] != "format"]))
"""
    assert run(code) == []


def test_a_name_is_imported_when_it_is_used():
    code = """
import json, sys
import dataload
assert dataload.errors.ConfigError is dataload.ConfigError
assert not hasattr(dataload, "nothing")
before = "dataload.loader" in sys.modules
assert dataload.Loader is dataload.Loader
print(json.dumps([before, "dataload.loader" in sys.modules, {*dataload.__all__} <= {*dir(dataload)}]))
"""
    assert run(code) == [False, True, True]


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_see_the_same_names(package):
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text("utf-8"))
    seen = {
        alias.asname or alias.name: f"{node.module}{f':{alias.name}' if alias.asname else ''}"
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    module = importlib.import_module(package)
    assert seen == module._HOMES
    assert sorted(seen) == sorted(module.__all__)
