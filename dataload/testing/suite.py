"""`SourceSuite`: every check as a pytest test, for whoever subclasses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dataload.errors import closest
from dataload.testing.cases import Check, NotApplicable, run_check
from dataload.testing.checks import CHECKS
from dataload.testing.traits import SourceTraits

__all__ = ["SourceSuite"]


class SourceSuite:
    """The conformance suite of sources. Subclass it, in a class whose name begins with ``Test``.

    Nothing else is needed than `write` and `open`. The tests are inherited: one per check of
    `dataload.testing.checks`, ``check_x`` as ``test_x``. They cannot be redefined; what is known to fail is said in
    `expected_failures`, and turns red on the day it is repaired.

    Attributes:
        traits: What the source is able to do; a trait that is False means that the refusal is checked.
        expected_failures: Name of a check -> why it fails. Becomes ``xfail(strict=True)``.
        protocol_version: The newest checks to run, by the release that brought them ("0.1"); None means all. New
            checks come with minor releases.

    Example:
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
    protocol_version: ClassVar[str | None] = None

    def write(self, path: Path, records: Sequence[Any]) -> None:
        """Write a data set, without the source under test: what reads and what writes must not agree by being one.

        Args:
            path: Ends in `traits.suffix`; nothing is there, and its directory is empty. Make it a file or a directory.
            records: `traits.record_type`; those with fields hold `traits.value_types`.
        """
        raise NotImplementedError(f"{type(self).__name__}.write(path, records): write the records to that path")

    def open(self, path: Any) -> Any:
        """The source of what `write` wrote.

        Args:
            path: A path that was given to `write`, or one where nothing is; a list of several, as the shards of one
                data set, if `traits.several_paths`.
        """
        raise NotImplementedError(f"{type(self).__name__}.open(path): return a source of that path")

    def corrupt(self, path: Path, kind: str) -> None:
        """Damage the data set at `path`, so that reading must notice.

        Args:
            path: What `write` made.
            kind: One of `traits.corruptions`.
        """
        raise NotImplementedError(f"{type(self).__name__}.corrupt(path, kind): damage the data set by {kind!r}")

    def expected(self, records: Sequence[Any]) -> Sequence[Any]:
        """What the source gives for `records`: for formats that add a field, or store a number as an array."""
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
                        f"{parent.__name__} redefines {test}: a check cannot be replaced; say in expected_failures why "
                        f"it fails: {{{check.name!r}: 'reason'}}"
                    )
            setattr(cls, test, _test(check, cls.expected_failures.get(check.name)))


def _test_name(check: Check) -> str:
    return check.name.replace("check_", "test_", 1)


def _test(check: Check, known_failure: str | None) -> Any:
    def test(self: SourceSuite, tmp_path: Path) -> None:
        pinned = self.protocol_version
        if pinned is not None and _version(check.since) > _version(pinned):
            pytest.skip(f"since {check.since}; this suite is pinned to {pinned}")
        try:
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


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


for _check in CHECKS:
    setattr(SourceSuite, _test_name(_check), _test(_check, None))
