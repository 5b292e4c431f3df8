"""Made data."""

import importlib.util

import numpy as np
import pytest

from benchmarks import workloads
from benchmarks.workloads import WORKLOADS, get_workload


@pytest.fixture(autouse=True)
def _fresh():
    workloads._photos.cache_clear()
    yield
    workloads._photos.cache_clear()


@pytest.mark.parametrize("name", WORKLOADS)
def test_records_are_the_same_each_time(name):
    if WORKLOADS[name].decodes:
        pytest.importorskip("simplejpeg")
    first, again = (get_workload(name).make(70) for _ in range(2))
    assert len(first) == 70
    for index in (0, 3, 69):
        np.testing.assert_equal(first[index], again[index])


def colours(file):
    simplejpeg = pytest.importorskip("simplejpeg")
    image = simplejpeg.decode_jpeg(file)
    assert image.shape == (375, 500, 3)
    return len(np.unique(image.astype(np.int64) @ [1 << 16, 1 << 8, 1]))


def test_jpegs_are_photos_where_a_package_has_some():
    if importlib.util.find_spec("sklearn") is None and importlib.util.find_spec("matplotlib") is None:
        pytest.skip("neither scikit-learn nor matplotlib is installed")
    files = [get_workload("jpeg").make(16)[i]["jpg"] for i in range(16)]
    assert min(map(colours, files)) > 10_000
    assert len(set(files)) > 8  # cut out at different places


def test_and_noise_where_none_has(monkeypatch):
    monkeypatch.setattr(workloads, "_PHOTO_FILES", (("dataload", "no_such_folder", ("a.jpg",)), ("no_such", "", ())))
    files = [get_workload("jpeg").make(16)[i]["jpg"] for i in range(16)]
    assert max(map(colours, files)) < 10_000
    assert len(set(files)) == 16
