"""Data sets of each format, of equal size whatever value they hold."""

import shutil
import zipfile

import numpy as np
from written import written

NPZ = {"codec": "npz"}
BIN = {"pattern": "{key}.bin"}
# suffix -> options of the writer if it is ours, and of the reader
FORMATS = {
    **dict.fromkeys((".syr", ".tar", ".arrow", ".parquet", ".jsonl", ".jsonl.gz", ".torchrecord"), ({}, {})),
    **dict.fromkeys((".tfrecord", ".lmdb", ".compressed.array_record"), (NPZ, NPZ)),
    ".array_record": ({**NPZ, "options": "group_size:1,uncompressed"}, NPZ),
    ".npy": (None, {"window": 4, "stride": 4}),
    ".csv": (None, {}),
    ".zip": (None, BIN),
    ".folder": (None, {**BIN, "format": "folder"}),
}


def make(path, suffix, value, rows=40, numbers=256):
    """Write a data set of which each number of each record is this value; LMDB's have the same meta page."""
    options = FORMATS[suffix][0]
    if options is not None:
        x = [value] * numbers if ".jsonl" in suffix else np.full(numbers, value, np.int32)
        keys = [{"__key__": f"{i:03}"} if suffix == ".tar" else {} for i in range(rows)]
        written(path, [{"x": x, **key} for key in keys], **options)
    elif suffix == ".npy":
        np.save(path, np.full(4 * rows, value, np.uint16))
    elif suffix == ".csv":
        path.write_text("x\n" + f"{value}\n" * rows)
    else:
        with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
            for index in range(rows):
                archive.writestr(f"{index:03}.bin", bytes([value]) * 4 * numbers)
        if suffix == ".folder":
            shutil.unpack_archive(path.with_suffix(".zip"), path)
            path.with_suffix(".zip").unlink()
    return path
