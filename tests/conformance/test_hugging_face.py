import json

import numpy as np
import pyarrow as pa
import tables
from format_suite import FormatSuite

from dataload.sources.arrow.reader import HuggingFaceSource
from dataload.testing import SourceTraits


class TestHuggingFace(FormatSuite):
    """Directories as `save_to_disk` lays them out; golden files are by the library itself."""

    traits = SourceTraits(
        value_types=(np.ndarray, bytes, str), several_paths=True, corruptions=("names_other", "list_too_large")
    )

    def write(self, path, records):
        path.mkdir()
        table, name = tables.table_of(records), "data-00000-of-00001.arrow"
        with pa.ipc.new_stream(str(path / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=8)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_split": None}))

    source = HuggingFaceSource

    def expected(self, records):
        return tables.expected(records)

    def corrupt(self, path, kind):
        list_of_files = path / "state.json"
        if kind == "list_too_large":
            with list_of_files.open("a") as file:  # white space is valid JSON
                file.write(" " * (65 << 20))
        else:
            list_of_files.write_text(json.dumps({"_data_files": [{"filename": "../data.arrow"}]}))
