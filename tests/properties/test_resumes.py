"""Jobs that stop and go on receive what a job without a stop receives: ``make resumes`` in few combinations."""

from __future__ import annotations

from collections import Counter

import pytest
from resumes import check, close_sources

BLOCK = 100
COMBINATIONS = 600


@pytest.fixture(autouse=True)
def closed_sources():
    yield
    close_sources()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("first", range(0, COMBINATIONS, BLOCK))
def test_random_resumes(first):
    kinds = Counter(check(number) for number in range(first, first + BLOCK))
    assert kinds["too long"] < BLOCK / 5


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_random_resumes_with_processes(number):
    check(number, processes=True)
