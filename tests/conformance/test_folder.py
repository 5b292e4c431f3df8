from __future__ import annotations

import io
import json
import zipfile

import numpy as np
from format_suite import FormatSuite

from dataload.sources.folder.reader import FolderSource
from dataload.testing import SourceTraits


def files_of(records):
    """The files of records, as a user would name them."""
    for index, record in enumerate(records):
        for name, value in record.items():
            yield f"{index:06d}.{name}", value


def npy(value):
    stream = io.BytesIO()
    np.save(stream, value)
    return stream.getvalue()


def encode(name, value):
    if isinstance(value, bytes):
        return name, value
    if isinstance(value, str):
        return f"{name}.txt", value.encode()
    if isinstance(value, int):
        return f"{name}.json", json.dumps(value).encode()
    return f"{name}.npy", npy(value)


def with_keys(records):
    return [{"__key__": f"{index:06d}", **record} for index, record in enumerate(records)]


class TestFolder(FormatSuite):
    """Arrays, because other files do not say how long they should be."""

    traits = SourceTraits(several_paths=True, value_types=(np.ndarray,), empty_dataset=False)

    def write(self, path, records):
        path.mkdir()
        for name, value in files_of(records):
            np.save(path / f"{name}.npy", value)

    def open(self, path):
        return FolderSource(path, pattern="{key}.*.npy")

    def expected(self, records):
        return with_keys(records)


class TestZip(FormatSuite):
    """Half of the members stored, half deflated."""

    traits = SourceTraits(
        suffix=".zip",
        several_paths=True,
        value_types=(np.ndarray, bytes, str, int),
        empty_dataset=False,
        corruptions=("content", "other_name", "other_size"),
    )

    def write(self, path, records):
        with zipfile.ZipFile(path, "w") as archive:
            for number, (name, value) in enumerate(files_of(records)):
                methods = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
                archive.writestr(*encode(name, value), compress_type=methods[number % 2])

    def open(self, path):
        return FolderSource(path, pattern="{key}.*")

    def expected(self, records):
        return with_keys(records)

    def corrupt(self, path, kind):
        data = bytearray(path.read_bytes())
        entry = data.index(b"PK\1\2")
        if kind == "content":
            data[30 + int.from_bytes(data[26:28], "little") + 1] ^= 1
        elif kind == "other_name":
            data[entry + 46 : entry + 49] = b"../"
        else:
            data[entry + 24] ^= 1
        path.write_bytes(data)
