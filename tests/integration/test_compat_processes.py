"""The facades in several processes, used as in the READMEs of the original libraries."""

import json
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "children"))
import compat_readers
from torch.utils.data import DataLoader

from dataload.compat.syrah import File, SyrahDataset
from dataload.compat.torchrecord import TRDataset, TRSampler

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]

GOLDEN = Path(__file__).parents[1] / "golden" / "torchrecord"
ITEMS = 40
FEATURES = np.random.default_rng(0).random((ITEMS, 30))


@pytest.fixture
def path(tmp_path):
    with File(tmp_path / "test.syr", mode="w") as syr:
        for index in range(ITEMS):
            syr.add_item({"label": np.array([index]), "features": FEATURES[index]})
    return tmp_path / "test.syr"


@pytest.mark.parametrize("reopened", [True, False])
def test_syrah_in_a_pool_that_forks(path, monkeypatch, reopened):
    """Reopening the file in each child, as the original requires, is harmless but not needed."""
    with File(path, mode="r") as syr:
        assert syr.get_array(0, "label").tolist() == [0]
        monkeypatch.setattr(compat_readers, "syr", syr)
        again = {"initializer": syr.open, "initargs": (path, "r")} if reopened else {}
        with multiprocessing.get_context("fork").Pool(2, **again) as pool:
            found = pool.map(compat_readers.read_item, range(ITEMS), chunksize=1)
            pool.close()
            pool.join()
        assert [features for _, features in found] == FEATURES.tolist()
        assert syr.get_array(3, "label").tolist() == [3]


@pytest.mark.slow_suite
def test_a_syrah_data_set_in_a_spawned_worker(path):
    """Only one worker, because it takes seconds to import torch."""
    dataset = SyrahDataset(path, ["features", "label"], process_funcs={"features": compat_readers.halved})
    context = {"multiprocessing_context": "spawn", "worker_init_fn": dataset.worker_init_fn}
    features, labels = zip(*DataLoader(dataset, batch_size=32, num_workers=1, **context), strict=True)
    assert np.concatenate(labels)[:, 0].tolist() == list(range(ITEMS))
    assert np.array_equal(np.concatenate(features), FEATURES / 2)


def test_torchrecord_by_hand_with_any_number_of_workers():
    dataset = TRDataset(GOLDEN / "db4_39", compat_readers.dims_and_label, record_num=4)
    sampler = TRSampler(GOLDEN / "db4_39", 4, batch_size=10)
    found = [
        [label for _, labels in DataLoader(dataset, batch_sampler=sampler, num_workers=n) for label in labels.tolist()]
        for n in (0, 2)
    ]
    case = next(case for case in json.loads((GOLDEN / "manifest.json").read_text()) if case["file"] == "db4_39")
    assert found == [[record["label"] for record in case["records"]]] * 2
