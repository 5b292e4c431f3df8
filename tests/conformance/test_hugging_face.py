from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import tables

from dataload.sources.arrow.hugging_face import HuggingFaceSource
from dataload.testing import SourceSuite, SourceTraits


class TestHuggingFace(SourceSuite):
    """Directories as `save_to_disk` lays them out; golden files are by the library itself."""

    traits = SourceTraits(value_types=(np.ndarray, bytes, str), several_paths=True, corruptions=("names_other",))

    def write(self, path, records):
        path.mkdir()
        table, name = tables.table_of(records), "data-00000-of-00001.arrow"
        with pa.ipc.new_stream(str(path / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=8)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_split": None}))

    def open(self, path):
        return HuggingFaceSource(path)

    def expected(self, records):
        return tables.expected(records)

    def corrupt(self, path, kind):
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../data.arrow"}]}))
