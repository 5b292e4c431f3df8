"""A source of records that are the same in each process; it imports little, for programs that tests start."""

import numpy as np

COUNT = 23


class Records:
    """Some bytes, and the index of the record."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"x": np.random.default_rng(index).integers(0, 255, 3000, np.uint8), "n": index}

    def fingerprint(self):
        return "records"
