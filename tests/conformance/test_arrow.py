from __future__ import annotations

import numpy as np
import pyarrow as pa
import tables

from dataload.sources.arrow.reader import ArrowSource
from dataload.testing import SourceSuite, SourceTraits


class ArrowSuite(SourceSuite):
    """Files of pyarrow, with several batches."""

    traits = SourceTraits(suffix=".arrow", value_types=(np.ndarray, bytes, str), several_paths=True)
    options = pa.ipc.IpcWriteOptions()
    new = staticmethod(pa.ipc.new_file)

    def write(self, path, records):
        table = tables.table_of(records)
        with self.new(str(path), table.schema, options=self.options) as writer:
            writer.write_table(table, max_chunksize=8)

    def open(self, path):
        return ArrowSource(path)

    def expected(self, records):
        return tables.expected(records)


class TestArrowFile(ArrowSuite):
    pass


class TestArrowStream(ArrowSuite):
    new = staticmethod(pa.ipc.new_stream)


class TestCompressedArrow(ArrowSuite):
    options = pa.ipc.IpcWriteOptions(compression="zstd")
