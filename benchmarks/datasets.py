"""Made data, the same on every machine, kept in the directory of temporary files."""

import shutil
import tempfile
from pathlib import Path

import numpy as np

import dataload

ROOT = Path(tempfile.gettempdir()) / "dataload-benchmarks"
VERSION = 1  # raise when what is made changes


def records(count, floats):
    """`count` records of one float32 field; a thousand different ones."""
    values = np.random.default_rng(0).standard_normal((1000, floats), dtype=np.float32)
    return ({"x": values[index % 1000]} for index in range(count))


def blobs(count, size):
    """`count` records of bytes of nearly `size`."""
    rng = np.random.default_rng(0)
    values = [rng.bytes(int(n)) for n in rng.integers(size * 9 // 10, size * 11 // 10, 100)]
    return ({"bin": values[index % 100]} for index in range(count))


def made(name, make_records, **options):
    """The path of a data set called `name`, written on first use."""
    path = ROOT / f"v{VERSION}-{name}"
    if not path.exists():
        ROOT.mkdir(exist_ok=True)
        if shutil.disk_usage(ROOT).free < 8 << 30:
            raise SystemExit(f"the benchmarks need 8 GiB in {ROOT}; set TMPDIR to another place")
        with dataload.create(path, **options) as writer:
            writer.extend(make_records())
    return str(path)
