"""Names that are imported on first use, names that have moved, and modules that import optional packages late."""

import json
import subprocess
import sys

import numpy as np
import pytest

from dataload.testing.compare import record_digest

MODULE = """
from dataload._util.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {"digits": "string", "say": "json:dumps"}, moved={"ConfigError": "dataload.errors"}, submodules=("inner",)
)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "lazy_package").mkdir()
    (tmp_path / "lazy_package" / "__init__.py").write_text(MODULE)
    (tmp_path / "lazy_package" / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("lazy_package")
    for name in [name for name in sys.modules if name.startswith("lazy_package")]:
        del sys.modules[name]


def test_names_are_imported_on_first_use_and_kept(package):
    assert "digits" not in vars(package)
    assert package.digits == "0123456789"
    assert package.say([1]) == "[1]"
    assert vars(package)["digits"] is package.digits
    assert package.inner.value == 1
    assert {"digits", "say", "inner"} <= {*dir(package)}
    with pytest.raises(AttributeError, match=r"module 'lazy_package' has no attribute 'other'"):
        _ = package.other


def test_a_name_that_has_moved_warns_each_time_at_the_line_that_uses_it(package):
    message = r"^lazy_package\.ConfigError is deprecated: use dataload\.errors\.ConfigError$"
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match=message) as warned:
            found = package.ConfigError
        assert found.__module__ == "dataload.errors"
        assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=message) as warned:
        exec(compile("from lazy_package import ConfigError", "user.py", "exec"), {})
    assert {one.filename for one in warned} == {"user.py"}
    assert "ConfigError" not in dir(package)


PROGRAM = """
import json, sys

def loaded(*names):
    return [name for name in names if name in sys.modules]

from dataload.codecs.codec import CODEC_NAMES, resolve_codec
for name in CODEC_NAMES:
    resolve_codec(name)
found = {"codecs": loaded("msgpack", "google.protobuf", "dataload.codecs.npz", "dataload.codecs.example")}

import dataload.analysis.live, dataload.analysis.timeline
import dataload.compat.torchrecord, dataload.compat.syrah
found["views and facades"] = loaded("rich", "torch", "lmdb", "bson", "google.protobuf", "PIL")

from dataload.config import read_config
read_config({"source": {"path": "a.syr"}, "loader": {"batch_size": 4}})
found["a config"] = loaded("lmdb", "bson", "torch", "typer", "rich")

import numpy as np
from dataload.testing.compare import record_digest
found["digest"] = record_digest({"a": np.arange(3), "b": b"x", "c": "\\xe9", "d": {"e": 1.5}})

sys.modules["google.protobuf"] = sys.modules["google.protobuf.message_factory"] = None
from dataload.codecs.example import decode, encode
found["examples without protobuf"] = decode(encode({"x": b"goat"}))["x"].decode()
for name, use in (
    ("other examples", lambda: decode(b"\\x10\\x05")),
    ("messages", lambda: dataload.compat.torchrecord.TensorProtos),
):
    try:
        use()
    except ImportError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def test_what_is_imported_late():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert "pip install 'dataload[lmdb]'" in found["messages"]
    assert found.pop("messages").startswith("TensorProtos needs protobuf")
    assert found == {
        "views and facades": [],
        "codecs": [],
        "a config": [],
        "digest": record_digest({"a": np.arange(3), "b": b"x", "c": "é", "d": {"e": 1.5}}),
        "examples without protobuf": "goat",
        "other examples": "codec 'example' needs protobuf: pip install 'dataload[codecs]' (or only protobuf)",
    }
