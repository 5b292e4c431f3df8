"""The conformance suite of formats that tests/conformance/test_together.py reads in one process."""

from dataload.testing import SourceSuite


class FormatSuite(SourceSuite):
    processes_together = True
    written_once = True
