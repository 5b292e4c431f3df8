"""Cases of parametrized tests of which `make test` runs only some."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def sampled(
    cases: Iterable[Any], sample: Container[Any], others: pytest.MarkDecorator = pytest.mark.slow_suite
) -> list[Any]:
    """Return the cases; those that `sample` lacks get a mark, so that another target runs them."""
    return [
        case if case in sample else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=others)
        for case in cases
    ]
