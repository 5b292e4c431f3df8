"""The usual memmap Dataset of language models, importable in torch's workers."""

import numpy as np
import torch


class Windows(torch.utils.data.Dataset):
    """Inputs and targets of T tokens each, one record after the other."""

    def __init__(self, path, length):
        self.path, self.length = path, length
        self.tokens = np.memmap(path, np.uint16, "r")

    def __len__(self):
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index):
        start = index * self.length
        window = self.tokens[start : start + self.length + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])
