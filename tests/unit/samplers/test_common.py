"""What samplers share: groups, division."""

import numpy as np
import pytest

from dataload.samplers._common import divide, split_by_group


@pytest.mark.parametrize("last", [0, 1, 15, 16, 17, 300, 2**16 - 1, 2**16, 2**40])
@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_groups_are_those_of_a_dict(count, last):
    groups = np.random.default_rng(0).integers(0, last + 1, count)
    if count:
        groups[-1] = last
    expected = {}
    for row, group in enumerate(groups.tolist()):
        expected.setdefault(group, []).append(row)
    found = [(group, rows.tolist()) for group, rows in split_by_group(groups)]
    assert found == sorted(expected.items())


@pytest.mark.parametrize("divisor", [1, 2, 7, 1000, 2**31 + 1, 2**48])
def test_divide_is_divmod(divisor):
    values = np.array([0, 1, 6, 7, 999, 1000, 2**31, 2**48 - 1, 2**62])
    before = values.copy()
    quotients, remainders = divide(values, divisor)
    assert list(zip(quotients.tolist(), remainders.tolist(), strict=True)) == [
        divmod(value, divisor) for value in before.tolist()
    ]
    assert np.array_equal(values, before)
