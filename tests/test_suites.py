"""The conformance suite, tested: on sources that are wrong on purpose, on one that is right, and as a plug-in."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from line_source import LineBackend, LineSource
from part_sources import Unloadable
from samples import sampled
from wrong_sources import FAULTS, LeaksDescriptors  # tests/support

from dataload.sources.memory import MemorySource, RangeSource
from dataload.sources.registry import format_names, get_format
from dataload.testing import SourceSuite, SourceTraits, check_source, child
from dataload.testing.cases import NotApplicable, run_check
from dataload.testing.checks import CHECKS
from dataload.testing.child import read_in_fork, read_in_new_process

CHECK_BY_NAME = {check.name: check for check in CHECKS}


def test_checking_a_source_changes_neither_its_memory_nor_its_file(tmp_path):
    rows = np.arange(40.0).reshape(10, 4)
    rows.tofile(tmp_path / "rows")
    mapped = np.memmap(tmp_path / "rows", np.float64, shape=(10, 4))  # in numpy's mode, "r+"
    for source, told in ((mapped, "changes a file"), ([*rows.copy()], "differs at")):
        failed = {result.name: result.message for result in check_source(source) if result.status == "failed"}
        assert told in failed["check_records_belong_to_caller"]
        assert np.array_equal(source, rows)
    assert np.array_equal(np.fromfile(tmp_path / "rows"), rows.ravel())


class TestHonestSource(SourceSuite):
    """The source that the wrong ones are made from follows every rule, so what fails them is their fault."""

    traits = LineBackend.traits
    write, expected, corrupt = LineBackend.write, LineBackend.expected, LineBackend.corrupt

    def open(self, path):
        return LineSource(path)


@pytest.mark.parametrize(("source", "check"), FAULTS)
def test_wrong_source_fails_in_the_check_named_for_it(source, check, tmp_path):
    with pytest.raises(Exception) as caught:
        run_check(CHECK_BY_NAME[check], LineBackend(source), tmp_path)
    assert not isinstance(caught.value, NotApplicable)
    while LeaksDescriptors.leaked:
        os.close(LeaksDescriptors.leaked.pop())


@pytest.mark.parametrize(
    ("trait", "check"),
    {
        "negative_index": "check_negative_index",
        "slices": "check_slices",
        "closes": "check_read_after_close",
        "fork_safe": "check_fork_after_read",
        "fingerprints": "check_fingerprint",
        "empty_dataset": "check_empty_dataset",
    }.items(),
)
def test_trait_that_is_false_demands_a_refusal(trait, check, tmp_path):
    """The honest source does all of it, so to deny it is an error; a trait is no way to skip a check."""
    backend = LineBackend()
    backend.traits = SourceTraits(suffix=".lines", **{trait: False})
    with pytest.raises(Exception if trait == "closes" else AssertionError) as caught:
        run_check(CHECK_BY_NAME[check], backend, tmp_path)
    assert not isinstance(caught.value, NotApplicable)


def test_every_check_states_its_rule_and_its_release():
    for check in CHECKS:
        assert check.rule.endswith("."), check.name
        assert check.since.count(".") == 1
        assert check.group
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert {check.group for check in CHECKS} == {
        "Reads", "Columns", "Sizes", "Bounds", "Ownership", "Lifecycle", "Concurrency", "Processes", "Identity",
        "Errors", "Round trip",
    }  # fmt: skip


def test_every_built_in_format_has_a_conformance_test():
    directory = Path(__file__).parent / "conformance"
    built_in = [name for name in format_names() if get_format(name).source.startswith("dataload.")]
    missing = [name for name in built_in if not (directory / f"test_{name}.py").exists()]
    assert len(built_in) >= 7
    assert not missing, f"formats without a file in tests/conformance: {missing}"


def suite_with(**members):
    return type("TestSomething", (SourceSuite,), members)


def suite_with_mixin():
    mixin = type("Mixin", (), {"test_duplicates": lambda self: None})
    return type("TestMixed", (mixin, SourceSuite), {})


@pytest.mark.parametrize(
    ("define", "text"),
    [
        (
            lambda: suite_with(test_length=lambda self: None),
            "TestSomething redefines test_length: a check cannot be replaced",
        ),
        (suite_with_mixin, "Mixin redefines test_duplicates"),
        (
            lambda: suite_with(expected_failures={"check_lenght": "a slip"}),
            r"no check 'check_lenght': did you mean 'check_length'\?",
        ),
        (lambda: suite_with(expected_failures={"check_length": " "}), "check_length needs a reason"),
        (lambda: SourceTraits(record_type=list), "record_type must be dict or bytes, got <class 'list'>"),
        (
            lambda: SourceTraits(value_types=(set,)),
            "value_types may hold ndarray, bytes, str, int, float, got <class 'set'>",
        ),
    ],
)
def test_what_no_suite_can_be_is_refused(define, text):
    with pytest.raises(TypeError, match=text):
        define()


def test_a_test_of_the_authors_own_is_welcome():
    assert suite_with(test_something_else=lambda self: None)


@pytest.mark.parametrize(
    ("method", "arguments"), [("write", (Path("x"), [])), ("open", (Path("x"),)), ("corrupt", (Path("x"), "cut"))]
)
def test_a_method_that_is_missing_says_what_it_must_do(method, arguments):
    with pytest.raises(NotImplementedError, match=rf"SourceSuite\.{method}\(path"):
        getattr(SourceSuite(), method)(*arguments)


@pytest.mark.slow_suite
@pytest.mark.slow
def test_suite_runs_in_a_project_of_somebody_else(tmp_path):
    """Under --strict-markers; a known failure is expected, one that was repaired is red, a pinned suite skips."""
    (tmp_path / "test_mine.py").write_text(
        """
from dataload.testing import SourceSuite
from line_source import LineBackend, LineSource
from part_sources import Unloadable


class ForgetsLastRecord(LineSource):
    def __len__(self):
        return super().__len__() - 1


class Author(SourceSuite):
    traits, write, expected = LineBackend.traits, LineBackend.write, LineBackend.expected


class TestWrong(Author):
    expected_failures = {"check_length": "its issue 12"}

    def open(self, path):
        return ForgetsLastRecord(path)


class TestRepaired(Author):
    expected_failures = {"check_length": "its issue 12"}

    def open(self, path):
        return LineSource(path)


class TestPinned(Author):
    protocol_version = "0.0"

    def open(self, path):
        return LineSource(path)
"""
    )
    options = ["-rA", "--strict-markers", "-k", "test_length", "-m", "conformance", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert "XFAIL test_mine.py::TestWrong::test_length - its issue 12" in done.stdout
    assert "FAILED test_mine.py::TestRepaired::test_length" in done.stdout
    assert "[XPASS(strict)] its issue 12" in done.stdout
    assert "since 0.1; this suite is pinned to 0.0" in done.stdout
    assert "1 failed, 1 skipped" in done.stdout
    assert "1 xfailed" in done.stdout


@pytest.mark.slow_suite
@pytest.mark.slow
def test_check_source_needs_neither_pytest_nor_hypothesis():
    program = (
        "import sys; import dataload.testing.plugin; assert not {'pytest', 'hypothesis'} & set(sys.modules)\n"
        "from dataload.testing import check_source\n"
        "from dataload.sources.memory import RangeSource\n"
        "results = check_source(RangeSource(100))\n"
        "assert not [r for r in results if r.status == 'failed'], results\n"
        "assert not {'pytest', 'hypothesis'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_has_no_other_names():
    import dataload.testing

    with pytest.raises(AttributeError, match=r"module 'dataload\.testing' has no attribute 'SamplerSuit'"):
        dataload.testing.SamplerSuit  # noqa: B018


class CountingSource(RangeSource):
    asked = 0

    def _read(self, indices):
        self.asked += len(indices)
        return super()._read(indices)


def failed(results):
    return {result.name for result in results if result.status == "failed"}


def test_check_source_reports_each_check_as_it_ends():
    seen = []
    results = check_source(MemorySource({"x": np.arange(50), "name": list("ab" * 25)}), report=seen.append)
    assert seen == results
    assert failed(results) == set()
    assert {result.status for result in results} == {"passed"}
    assert str(results[0]) == "passed  check_length"
    assert results[0].rule == "`len` is the number of records, and does not change."


def test_check_source_compares_with_what_is_expected():
    records = [{"x": i} for i in range(9)]
    assert failed(check_source(MemorySource(records), records)) == set()
    changed = [*records[:4], {"x": -1}, *records[5:]]
    wrong = {result.name: result for result in check_source(MemorySource(changed), records)}
    assert wrong["check_records"].status == "failed"
    assert wrong["check_records"].message == "record 4, field 'x' is -1 (int), expected 4 (int)"
    assert str(wrong["check_records"]).startswith("failed  check_records: record 4")
    shorter = [{"x": i} for i in range(5)]
    assert "check_length" in failed(check_source(MemorySource(shorter), [*shorter, {"x": 5}]))


def test_check_source_takes_a_sample_of_many_records():
    source = CountingSource(10**9)
    results = check_source(source, sample=20)
    assert failed(results) == set()
    assert source.asked < 20_000
    assert "only some of the records are known" in {result.message for result in results}


def test_check_source_on_a_source_of_two_methods():
    """All that the protocol asks for: no batches, no slices, no negative index."""

    class Squares:
        def __len__(self):
            return 40

        def __getitem__(self, index):
            if isinstance(index, bool) or not hasattr(index, "__index__"):
                raise TypeError(index)
            if not 0 <= index.__index__() < 40:
                raise IndexError(f"index {index.__index__()} is out of range for 40 squares")
            return {"x": np.array(index.__index__() ** 2)}

        def __repr__(self):
            return "Squares()"

    results = {result.name: result for result in check_source(Squares())}
    assert failed(results.values()) == {"check_pickle"}  # a class inside of a function does not
    assert results["check_pickle"].message.startswith("Squares does not pickle: ")
    assert results["check_columns"].message == "Squares has no read_batch"


def test_check_source_on_a_source_that_does_not_open(tmp_path):
    [result] = check_source(LineSource(tmp_path / "nothing.lines"))
    assert (result.status, result.name) == ("failed", "check_length")
    assert "SourceNotFoundError: there is no " in result.message


FOUND = [(wrong, check) for wrong, check in FAULTS if CHECK_BY_NAME[check].needs == "source"]


@pytest.mark.parametrize(("wrong", "check"), sampled(FOUND, FOUND[::3]))
def test_check_source_finds_faults_on_real_data(wrong, check, tmp_path):
    """Without an oracle: all ways of reading are compared with single reads, so only a wrong single read can hide."""
    backend = LineBackend(wrong)
    records = [{"data": bytes([i]) * (12 + i)} for i in range(30)]
    backend.write(tmp_path / "data.lines", records)
    source = backend.open(tmp_path / "data.lines")
    expected = LineSource(tmp_path / "data.lines")
    assert check in failed(check_source(source, expected))
    source.close()


class Dies(LineSource):
    """Ends its process, hangs, or is killed when the second of its files is read."""

    def __getitem__(self, index, /):
        if "second" in self.paths[0]:
            os.kill(os.getpid(), signal.SIGBUS)
        return super().__getitem__(index)


@pytest.mark.parametrize("read", [read_in_fork, read_in_new_process])
def test_a_source_that_kills_its_process_is_named(read, tmp_path):
    backend = LineBackend(Dies)
    for name in ("first", "second", "third"):
        backend.write(tmp_path / name, [{"data": bytes(20)}])
    with pytest.raises(AssertionError, match=r"the process that read Dies\('.*second'\) was killed by SIGBUS"):
        read([backend.open(tmp_path / name) for name in ("first", "second", "third")])


def test_a_source_that_hangs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(AssertionError, match=r"the process that read 'hangs' did not end in 0\.2 s"):
        read_in_fork(["hangs", "waits for its turn"], read=lambda _: signal.pause())


def test_a_source_that_does_not_unpickle_is_told_and_the_next_one_is_read():
    lost, found = read_in_new_process([Unloadable("log", "die"), RangeSource(3)])
    assert lost.error == "unpickling raises KeyError: 'lost'"
    assert len(found.digests) == 3
