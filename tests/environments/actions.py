"""Tries all that may need a package: prints what fails, as JSON. Needs nothing but dataload."""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import dataload
import dataload.compat
from dataload.sources.registry import built_in_formats
from dataload.telemetry import instrument

GOLDEN = Path(__file__).parents[1] / "golden"
READ = {
    "arrayrecord/default.array_record": {},
    "hugging_face/saved": {},
    "mds/snappy": {},
    "mds/zstd": {},
    "tar/tars/longlink.tar": {},
    "tfds/demo/1.0.0": {"split": "train"},
    "tfrecord/examples.tfrecord-00000-of-00002": {},
    "tokens/u16.bin": {"format": "tokens", "window": 2, "dtype": "uint16"},
    "torchrecord/plain_padded": {},
    "wids/shards.json": {},
}
RECORD = {"id": np.array(3), "values": np.arange(4.0)}
RECORDS = {"tokens": np.arange(40), "video": {"frame": np.zeros((16, 16, 3), np.uint8)}}
CODECS = ("example", "msgpack", "npz", "raw", "tensorprotos")


def actions() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each action, and the action."""
    for package in (dataload, dataload.compat):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if "._" not in module.name:
                yield f"import {module.name}", lambda name=module.name: importlib.import_module(name)
    yield "run the command", command
    for path, options in READ.items():
        yield f"read {path}", lambda path=path, options=options: dataload.open(GOLDEN / path, **options)[0]
    for entry in built_in_formats():
        if entry.writer is not None and entry.name not in ("memory", "range"):
            yield f"write {entry.name}", lambda name=entry.name: written(name)
    for codec in CODECS:
        yield f"write with codec {codec}", lambda codec=codec: written("tfrecord", codec=codec)
    yield "list a URL", lambda: dataload.storage.storage_of("memory://bucket/").exists("memory://bucket/a.tar")
    yield "publish a loader", lambda: instrument(dataload.Loader(dataload.RangeSource(4), batch_size=2))
    yield "read a config", lambda: dataload.from_config({"source": {"path": "range:10"}, "loader": {"batch_size": 2}})


def command() -> None:
    """Run the command line."""
    done = subprocess.run([sys.executable, "-m", "dataload", "--version"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImportError(done.stderr)


def written(name: str, **options: object) -> object:
    """Write a record in a format, and read it."""
    record = b"text" if options.get("codec") == "raw" else RECORDS.get(name, RECORD)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data")
        with dataload.create(path, format=name, **options) as writer:
            writer.write(record)
        return dataload.open(path, format=name, **({"window": 2} if name == "tokens" else {}))[0]


def main() -> None:
    found: dict[str, str] = {}
    for name, action in actions():
        try:
            action()
        except ImportError as error:
            extra = re.search(r"dataload\[(\w+)\]", str(error))
            found[name] = f"extra {extra[1]}" if extra else f"package: {error}"
        except dataload.DataloadError as error:
            found[name] = f"refused: {error}"
        except Exception as error:
            found[name] = f"error: {error!r}"
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
