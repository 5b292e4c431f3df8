from typing import Any, ClassVar

import numpy as np
import pytest
from format_suite import FormatSuite

from dataload.sources.memory import MemorySource
from dataload.testing import SourceTraits


class TestMemoryOfRecords(FormatSuite):
    traits = SourceTraits(in_files=False, closes=False)
    written: ClassVar[dict[str, list[Any]]] = {}

    def write(self, path, records):
        self.written[str(path)] = records

    def open(self, path):
        return MemorySource(self.written[str(path)])


@pytest.mark.slow_suite
class TestMemoryOfBytes(TestMemoryOfRecords):
    traits = SourceTraits(record_type=bytes, in_files=False, closes=False)


class TestMemoryOfColumns(TestMemoryOfRecords):
    """Numbers in arrays, whose rows all have one shape; everything else in lists."""

    traits = SourceTraits(in_files=False, closes=False, value_types=(bytes, str, int, float))

    def open(self, path):
        records = self.written[str(path)]
        names = records[0] if records else ()
        return MemorySource({name: _column([record[name] for record in records]) for name in names})

    def expected(self, records):
        """Numbers come back as arrays without a dimension, as from any file."""
        return [{name: _number(value) for name, value in record.items()} for record in records]


def _column(values):
    return np.array(values) if isinstance(values[0], (int, float)) else values


def _number(value):
    return np.array(value) if isinstance(value, (int, float)) else value
