from typing import ClassVar

from format_suite import FormatSuite

from dataload.sources.memory import RangeSource
from dataload.testing import SourceTraits


class TestRange(FormatSuite):
    traits = SourceTraits(in_files=False, closes=False, value_types=(int,))
    written: ClassVar[dict[str, int]] = {}

    def write(self, path, records):
        self.written[str(path)] = len(records)

    def open(self, path):
        count = self.written[str(path)]
        return RangeSource(10 + 3 * count, start=10, step=3)

    def expected(self, records):
        return [{"index": 10 + 3 * index} for index in range(len(records))]
