"""Checks that need other processes, each for all formats in one process. LMDB and ArrayRecord also run them alone."""

import contextlib
import functools
import importlib.util
from pathlib import Path

import pytest
import tables  # noqa: F401 - starts what pyarrow keeps
from format_suite import TOGETHER, FormatSuite
from samples import sampled

from dataload.testing.cases import Maker


@functools.cache
def suites():
    found = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path == Path(__file__):
            continue
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        members = (value for name, value in vars(module).items() if name.startswith("Test"))
        found += [suite for suite in members if suite.__module__ == path.stem and suite.processes_together]
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*group_size")
@pytest.mark.parametrize("check", sampled(TOGETHER, ["check_new_process", "check_fork_after_read"]))
def test_all_formats_in_one_process(check, tmp_path):
    together = suites()
    assert len(together) > 30
    assert all(issubclass(suite, FormatSuite) for suite in together)
    with contextlib.ExitStack() as stack:
        makers = [Maker(suite(), tmp_path / str(number)) for number, suite in enumerate(together)]
        TOGETHER[check]([stack.enter_context(maker) for maker in makers])
