import itertools
import os

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
