"""Jobs that stop and go on receive what a job without a stop receives: ``make resumes`` in few combinations."""

from collections import Counter

import pytest
from resumes import check, close_sources

BLOCK = 25


@pytest.fixture(autouse=True)
def closed_sources():
    yield
    close_sources()


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow_suite) for first in range(BLOCK, 24 * BLOCK, BLOCK))]
)
def test_random_resumes(first):
    kinds = Counter(check(number) for number in range(first, first + BLOCK))
    assert kinds["too long"] < BLOCK / 5


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow_suite) for number in range(1, 5))])
def test_random_resumes_with_processes(number):
    check(number, processes=True)
