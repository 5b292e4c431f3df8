import numpy as np
import pyarrow as pa
import tables
from format_suite import FormatSuite

from dataload.sources.arrow.reader import ArrowSource
from dataload.testing import SourceTraits


class TestArrow(FormatSuite):
    """Files of pyarrow, with several batches. Data sets of Hugging Face are streams; Parquet is decoded in groups."""

    traits = SourceTraits(suffix=".arrow", value_types=(np.ndarray, bytes, str), several_paths=True)

    def write(self, path, records):
        table = tables.table_of(records)
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=8)

    source = ArrowSource

    def expected(self, records):
        return tables.expected(records)
