"""`SourceSuite`: every check as a pytest test."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dataload.errors import closest
from dataload.testing.cases import Check, Maker, NotApplicable, SourceTraits, run_check
from dataload.testing.checks import CHECKS


class SourceSuite:
    """The conformance suite for sources. Subclass it in a class whose name begins with ``Test``.

    Only `write` and `open` are required. Each check ``check_x`` of `dataload.testing.checks` becomes an inherited test
    ``test_x``. Do not redefine the tests: list known failures in `expected_failures`. A listed check that passes is an
    error.

    Attributes:
        traits: The abilities of the source. If a trait is False, the refusal is checked.
        expected_failures: Check name -> reason for its failure. Becomes ``xfail(strict=True)``.
        written_once: If True, write the standard data set once for all checks that only read. `open` must then not
            depend on attributes that `write` sets on `self`, because each test has its own instance.
        protocol_version: Run only checks introduced up to this release, such as "0.1". None runs all. New checks come
            with minor releases.

    Examples:
        A source of your own, in a test module::

            class TestBagz(SourceSuite):
                traits = SourceTraits(record_type=bytes, suffix=".bagz")

                def write(self, path, records):
                    with bagz.Writer(path) as writer:
                        for record in records:
                            writer.write(record)

                def open(self, path):
                    return BagzSource(path)

                expected_failures = {"check_fork_after_read": "libbagz 0.3 shares a file offset, its issue 12"}
    """

    traits: SourceTraits = SourceTraits()
    expected_failures: ClassVar[Mapping[str, str]] = {}
    written_once: ClassVar[bool] = False
    protocol_version: ClassVar[str | None] = None

    def write(self, path: Path, records: Sequence[Any]) -> None:
        """Write a data set with code that is independent of the source under test.

        Args:
            path: An unused path ending in `traits.suffix`, in an empty directory. Make it a file or a directory.
            records: Records of type `traits.record_type`. Their fields hold `traits.value_types`.
        """
        raise NotImplementedError(f"{type(self).__name__}.write(path, records): write the records to that path")

    def open(self, path: Any) -> Any:
        """Return the source for a data set.

        Args:
            path: A path that was passed to `write`, or a missing path. If `traits.several_paths`, also a list of paths:
                the shards of one data set.
        """
        raise NotImplementedError(f"{type(self).__name__}.open(path): return a source of that path")

    def corrupt(self, path: Path, kind: str) -> None:
        """Damage a data set in a way that reading must detect.

        Args:
            path: The path of a data set that `write` made.
            kind: One of `traits.corruptions`.
        """
        raise NotImplementedError(f"{type(self).__name__}.corrupt(path, kind): damage the data set by {kind!r}")

    def expected(self, records: Sequence[Any]) -> Sequence[Any]:
        """Return the records that the source gives for `records`: a format may add a field or wrap a number."""
        return records

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        by_name = {check.name: check for check in CHECKS}
        for name in cls.expected_failures:
            if name not in by_name:
                raise TypeError(f"{cls.__name__}.expected_failures: no check {name!r}: {closest(name, by_name)}")
        for check in CHECKS:
            test = _test_name(check)
            for parent in cls.__mro__:
                own = parent.__dict__.get(test)
                if own is not None and not hasattr(own, "from_the_suite"):
                    raise TypeError(
                        f"{parent.__name__} redefines {test}: a check cannot be replaced; for a known failure, set "
                        f"expected_failures = {{{check.name!r}: 'reason'}}"
                    )
            setattr(cls, test, _test(check, cls.expected_failures.get(check.name)))


def _test_name(check: Check) -> str:
    return f"test_{check.name.removeprefix('check_')}"


def _test(check: Check, known_failure: str | None) -> Any:
    def test(self: SourceSuite, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        pinned = self.protocol_version
        if pinned is not None and _version(check.since) > _version(pinned):
            pytest.skip(f"since {check.since}; this suite is pinned to {pinned}")
        try:
            if check.needs == "source" and self.written_once:
                run_check(check, self, tmp_path, _standard_data(type(self), tmp_path_factory))
            else:
                run_check(check, self, tmp_path)
        except NotApplicable as reason:
            pytest.skip(str(reason))

    test.__name__ = _test_name(check)
    test.__doc__ = check.run.__doc__
    marked: Any = pytest.mark.conformance(check.group, check.since)(test)
    if known_failure is not None:
        if not known_failure.strip():
            raise TypeError(f"expected_failures: {check.name} needs a reason")
        marked = pytest.mark.xfail(reason=known_failure, strict=True)(marked)
    marked.from_the_suite = True
    return marked


_STANDARD: dict[type[SourceSuite], Path] = {}


def _standard_data(suite: type[SourceSuite], directories: pytest.TempPathFactory) -> Path:
    if suite not in _STANDARD:
        maker = Maker(suite(), directories.mktemp(suite.__name__))
        _STANDARD[suite] = maker.write(maker.records())
    return _STANDARD[suite]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


for _check in CHECKS:
    setattr(SourceSuite, _test_name(_check), _test(_check, None))
