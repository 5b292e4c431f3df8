import zipfile

import numpy as np
from format_suite import FormatSuite, flip, members

from dataload.sources.folder.reader import FolderSource
from dataload.testing import SourceTraits


class TestFolder(FormatSuite):
    """Arrays, because other files do not say how long they should be."""

    source, options, keyed = FolderSource, {"pattern": "{key}.*.npy"}, True
    traits = SourceTraits(several_paths=True, value_types=(np.ndarray,), empty_dataset=False)

    def write(self, path, records):
        path.mkdir()
        for name, data in members(records):
            (path / name).write_bytes(data)


class TestZip(FormatSuite):
    """Half of the members stored, half deflated."""

    source, options, keyed = FolderSource, {"pattern": "{key}.*"}, True
    traits = SourceTraits(
        suffix=".zip",
        several_paths=True,
        value_types=(np.ndarray, bytes, str, int),
        empty_dataset=False,
        corruptions=("content", "other_name", "other_size"),
    )

    def write(self, path, records):
        with zipfile.ZipFile(path, "w") as archive:
            for number, member in enumerate(members(records)):
                archive.writestr(*member, compress_type=(zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[number % 2])

    def corrupt(self, path, kind):
        data = path.read_bytes()
        entry = data.index(b"PK\1\2")
        if kind == "other_name":
            path.write_bytes(data[: entry + 46] + b"../" + data[entry + 49 :])
        else:
            flip(path, entry + 24 if kind == "other_size" else 31 + int.from_bytes(data[26:28], "little"))
