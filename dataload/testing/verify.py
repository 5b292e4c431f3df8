"""`check_source`: the read-only checks on existing data."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dataload._util.randomness import generator
from dataload.testing.cases import Case, CheckResult, NotApplicable, SourceTraits
from dataload.testing.checks import CHECKS
from dataload.testing.compare import snapshot

_MOST_AT_SHARDS = 32


def check_source(
    source: Any,
    expected: Any = None,
    *,
    sample: int = 64,
    traits: SourceTraits | None = None,
    report: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Run the read-only checks on a source, without pytest.

    Args:
        source: Anything with ``len`` and ``[index]``. It is read, also by several threads, but not closed.
        expected: The expected records: a sequence or another source, such as the original of a converted data set. If
            None, the checks compare all ways of reading with ``source[i]``.
        sample: Number of records to read: the first, the last, those at shard boundaries, and random ones. A smaller
            data set is read completely.
        traits: The abilities of the source. By default, support for negative indices and slices is detected.
        report: Called with each result as soon as it is known.

    Returns:
        One result per check, in order.

    Examples:
        >>> from dataload.sources.memory import MemorySource
        >>> results = check_source(MemorySource({"x": [1, 2, 3]}))
        >>> [result for result in results if result.status == "failed"]
        []
    """
    results: list[CheckResult] = []
    for result in _results(source, expected, sample, traits):
        if report is not None:
            report(result)
        results.append(result)
    return results


def _results(source: Any, expected: Any, sample: int, traits: SourceTraits | None) -> Iterator[CheckResult]:
    try:
        oracle = _Itself(source) if expected is None else expected
        indices = _sample(source, min(len(source), len(oracle)), sample)
        traits = traits or SourceTraits(
            negative_index=_takes(lambda: source[-1], IndexError),
            slices=_takes(lambda: source[0:0], TypeError),
            fingerprints=hasattr(source, "fingerprint"),
        )
        case = Case(source, oracle, indices, traits)
    except Exception as error:
        yield CheckResult("check_length", "Reads", "failed", _text(error), "the source opens and has a length")
        return
    for check in CHECKS:
        if check.needs != "source":
            continue
        status, message = "passed", ""
        try:
            check.run(case)
        except NotApplicable as reason:
            status, message = "skipped", str(reason)
        except Exception as error:
            status, message = "failed", _text(error)
        yield CheckResult(check.name, check.group, status, message, check.rule)


def _text(error: Exception) -> str:
    return str(error) if type(error) is AssertionError else f"{type(error).__name__}: {error}"


class _Itself:
    """A source's records, read one at a time: the oracle for all other ways of reading."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._length = len(source)
        self._known: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if index not in self._known:
            self._known[index] = snapshot(self._source[index])
        return snapshot(self._known[index])


def _sample(source: Any, length: int, size: int) -> tuple[int, ...]:
    """Return the indices to read, ascending."""
    if length <= size:
        return tuple(range(length))
    ends = np.cumsum(getattr(source, "shard_lengths", (length,)))[:_MOST_AT_SHARDS]
    at_shards = [index for end in ends.tolist() for index in (end - 1, end) if 0 <= index < length]
    ends_of_all = [*range(min(8, size)), *range(length - min(8, size), length)]
    random = generator(0, "check_source", length).integers(0, length, size)
    return tuple(sorted({*ends_of_all, *at_shards, *random.tolist()}))


def _takes(call: Callable[[], Any], refusal: type[Exception]) -> bool:
    try:
        call()
    except refusal:
        return False
    except Exception:
        return True
    return True
