import gzip

import pytest
from format_suite import FormatSuite, digest_of

from dataload.sources.text.reader import TextSource
from dataload.testing import SourceTraits


def line_of(record):
    """A line that differs for any two records, with a character of three bytes."""
    return f"\u2013 {digest_of(record, 16).hex()}"


class TestLines(FormatSuite):
    traits = SourceTraits(suffix=".txt", notices_cuts=False, several_paths=True, value_types=(int,))
    source, options = TextSource, {"records": "line", "fields": ["text"]}
    expected_failures = {"check_damaged_files": "any bytes are lines of a text"}  # noqa: RUF012

    def write(self, path, records):
        path.write_bytes(self.lines(records))

    @staticmethod
    def lines(records):
        return "".join(f"{line_of(record)}\n" for record in records).encode()

    def expected(self, records):
        return [{"text": line_of(record)} for record in records]


@pytest.mark.slow_suite
class TestCompressedParagraphs(TestLines):
    traits = SourceTraits(suffix=".txt.gz", has_checksums=True, several_paths=True, value_types=(int,))
    options = {"records": "paragraph", "fields": ["text"]}  # noqa: RUF012 - nobody changes it
    expected_failures = {}  # noqa: RUF012

    def write(self, path, records):
        path.write_bytes(gzip.compress(self.lines(records).replace(b"\n", b"\n\n")))
