import itertools
import os
from typing import ClassVar

import numpy as np
from format_suite import FormatSuite

from dataload.sources.syrah.reader import SyrahSource
from dataload.sources.syrah.writer import SyrahWriter
from dataload.sources.views.concat import ConcatSource
from dataload.testing import SourceTraits


class TestConcat(FormatSuite):
    """A directory of three Syrah files of different lengths, each a source of its own."""

    traits = SourceTraits(value_types=(np.ndarray, bytes, str))

    def write(self, path, records):
        path.mkdir()
        third = len(records) // 3
        cuts = [0, third, third + 1 if len(records) > third else third, len(records)]
        for part, (start, stop) in enumerate(itertools.pairwise(cuts)):
            if stop > start or not records:
                with SyrahWriter(path / f"data{part}.syr") as writer:
                    writer.extend(records[start:stop])

    def open(self, path):
        names = sorted(os.listdir(path)) if path.exists() else ["data"]
        return ConcatSource([SyrahSource(path / name) for name in names])


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
