import numpy as np
import pyarrow.parquet as pq
import tables
from format_suite import FormatSuite

from dataload.sources.arrow.parquet import ParquetSource
from dataload.testing import SourceTraits


class TestParquet(FormatSuite):
    """Files of pyarrow, with several row groups and checksums."""

    traits = SourceTraits(
        suffix=".parquet", value_types=(np.ndarray, bytes, str), several_paths=True, corruptions=("flip_value",)
    )

    def write(self, path, records):
        options = {"row_group_size": 8, "compression": "none", "use_dictionary": False, "write_page_checksum": True}
        pq.write_table(tables.table_of(records), path, **options)

    source = ParquetSource

    def expected(self, records):
        return tables.expected(records)

    def corrupt(self, path, kind):
        data = bytearray(path.read_bytes())
        column = pq.read_metadata(path).row_group(0).column(0)
        data[column.data_page_offset + column.total_compressed_size - 1] ^= 1
        path.write_bytes(data)
