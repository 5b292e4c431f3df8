import gzip
import json

import pytest
from format_suite import FormatSuite

from dataload.sources.jsonl.records import JsonlSource
from dataload.testing import SourceTraits

TRAITS = {"value_types": (str, int, float), "several_paths": True}


class TestJsonl(FormatSuite):
    """Files of the standard library."""

    traits = SourceTraits(suffix=".jsonl", notices_cuts=False, **TRAITS)

    def write(self, path, records):
        path.write_bytes(self.lines(records))

    @staticmethod
    def lines(records):
        return "".join(f"{json.dumps(record)}\n" for record in records).encode() or b"\n"

    source = JsonlSource


@pytest.mark.slow_suite
class TestCompressedJsonl(TestJsonl):
    traits = SourceTraits(suffix=".jsonl.gz", has_checksums=True, **TRAITS)

    def write(self, path, records):
        path.write_bytes(gzip.compress(self.lines(records)))
