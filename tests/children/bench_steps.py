"""Functions that configs of `dataload bench --loader` name in tests."""

import numpy as np


def double(sample):
    return {"x": sample["x"] * 2}


def stack(samples):
    return {"x": np.stack([sample["x"] for sample in samples])}


def halve(batch):
    assert isinstance(batch, dict), "a batch transform is measured behind the collate function only"
    return {"x": batch["x"] / 2}
