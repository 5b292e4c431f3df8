import csv
import gzip
import json
from pathlib import Path

import numpy as np
import tables  # noqa: F401 - starts what pyarrow keeps
from format_suite import FormatSuite

from dataload.sources.arrow.reader import CsvSource
from dataload.testing import SourceTraits

DTYPES = {int: "int64", float: "float64", str: "str"}


class TestCsv(FormatSuite):
    """Files of the standard library, with the dtypes in a file beside them: text may look like numbers."""

    expected_failures = {"check_damaged_files": "any text is a table: one of other columns is a ConfigError"}  # noqa: RUF012
    traits = SourceTraits(
        suffix=".csv", value_types=(str, int, float), several_paths=True, empty_dataset=False, notices_cuts=False
    )

    def write(self, path, records):
        with open(path, "w", encoding="utf-8", newline="") as stream:
            if records:
                writer = csv.DictWriter(stream, records[0], quoting=csv.QUOTE_NONNUMERIC)
                writer.writeheader()
                writer.writerows(records)
        dtypes = {name: DTYPES[type(value)] for record in records[:1] for name, value in record.items()}
        self.beside(path).write_text(json.dumps(dtypes))

    def open(self, path):
        beside = self.beside(path[0] if isinstance(path, list) else path)
        return CsvSource(path, dtypes=json.loads(beside.read_text()) if beside.exists() else None)

    @staticmethod
    def beside(path):
        return Path(path).with_name("dtypes.json")

    def expected(self, records):
        return [{n: v if isinstance(v, str) else np.array(v) for n, v in record.items()} for record in records]


def test_compressed_files_are_the_same(tmp_path):
    (tmp_path / "a.csv").write_text('x,t\n1,a\n2,"b\nc"\n')
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    plain, compressed = CsvSource(tmp_path / "a.csv"), CsvSource(tmp_path / "b.csv.gz")
    assert list(plain) == list(compressed) == [{"x": 1, "t": "a"}, {"x": 2, "t": "b\nc"}]
