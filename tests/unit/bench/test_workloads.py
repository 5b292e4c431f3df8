"""Made data."""

import numpy as np
import pytest

from benchmarks.workloads import WORKLOADS, get_workload


@pytest.mark.parametrize("name", WORKLOADS)
def test_records_are_the_same_each_time(name):
    if WORKLOADS[name].decodes:
        pytest.importorskip("simplejpeg")
    first, again = (get_workload(name).make(70) for _ in range(2))
    assert len(first) == 70
    for index in (0, 3, 69):
        np.testing.assert_equal(first[index], again[index])
