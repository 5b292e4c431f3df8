"""Modules that import optional packages only when they are used, in one process of their own."""

import json
import subprocess
import sys

import numpy as np

from dataload.testing.compare import record_digest

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
