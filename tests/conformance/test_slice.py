from typing import ClassVar

import numpy as np
from format_suite import FormatSuite

from dataload.sources.syrah.reader import SyrahSource
from dataload.sources.syrah.writer import SyrahWriter
from dataload.testing import SourceTraits


class TestSlice(FormatSuite):
    traits = SourceTraits(suffix=".syr", value_types=(np.ndarray, bytes, str))
    expected_failures: ClassVar[dict[str, str]] = {
        "check_construction_opens_nothing": "a slice asks its parent for the length"
    }

    def write(self, path, records):
        with SyrahWriter(path) as writer:
            writer.extend([*records[:1] * 2, *records, *records[:1]])

    def open(self, path):
        return SyrahSource(path)[2:-1]
