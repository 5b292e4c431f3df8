"""torch's DataLoader and dataload's by a changed import: ten shapes of data, with 0, 1, 2 and 4 workers.

python -m benchmarks.changed_import SHAPE PACKAGE METHOD    prints the PSS of all processes, in bytes
"""

import importlib.util
import io
import math
import multiprocessing
import os
import re
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils import data

from benchmarks.harness import ROOT, Case, aim, run_cases
from benchmarks.workloads import get_workload, made_data
from dataload.torch import DataLoader

BULK = "tensors", "memmap", "numpy"
PACKAGES = {"torch": data.DataLoader, "dataload": DataLoader}


class Records(data.Dataset):
    """What a function makes of each of `count` numbers."""

    def __init__(self, make, count):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


class Stream(data.IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.full((256,), float(number)) for number in range(first, self.count, step))


def image(files, index):
    from PIL import Image

    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(files[index])).convert("RGB").resize((224, 224))).copy())


def tokens(texts, known, index):
    return torch.tensor([known[word] for word in texts[index].split()])


def padded(samples):
    return pad_sequence(samples, batch_first=True)


def fields(rows, index):
    return {"x": rows[index], "label": index % 10, "name": f"record {index}"}


def pair(rows, index):
    return rows[index], index % 10


def nested(rows, index):
    return {"inputs": (rows[index], {"mask": [rows[index] > 0, index]}), "weight": float(index)}


def shape(name):
    """The data set of a shape, the records of its batches, and a function that collates them (None: the default)."""
    rows = torch.randn(32_768, 256, generator=torch.Generator().manual_seed(0))
    if name == "tensors":
        return data.TensorDataset(rows, torch.arange(len(rows))), 256, None
    if name == "memmap":
        path = ROOT / "changed_import.npy"
        if not path.exists():
            np.save(path, np.zeros((32_768, 1024), np.float32))
        return np.load(path, mmap_mode="c"), 256, None
    if name == "numpy":
        return rows.numpy(), 256, None
    if name == "images":
        files = [record["jpg"] for record in made_data(get_workload("jpeg"), 256).records]
        return Records(partial(image, files), len(files)), 32, None
    if name == "tokens":
        known = {f"w{number}": number for number in range(1000)}
        texts = [" ".join(f"w{number * i % 1000}" for i in range(100 + number % 50)) for number in range(8192)]
        return Records(partial(tokens, texts, known), len(texts)), 32, padded
    if name == "iterable":
        return Stream(32_768), 64, None
    if name == "hugging face":
        from datasets import Dataset

        return Dataset.from_dict({"x": rows[:8192].tolist(), "label": [*range(8192)]}).with_format("torch"), 64, None
    make = {"dicts": fields, "tuples": pair, "nested": nested}[name]
    return Records(partial(make, rows), len(rows)), 64, None


SHAPES = ["tensors", "memmap", "images", "tokens", "iterable", "numpy", "dicts", "tuples", "nested"]
SHAPES += ["hugging face"] * (importlib.util.find_spec("datasets") is not None)


def loader_of(package, made, workers, **settings):
    dataset, size, collate = made
    shuffle = None if isinstance(dataset, data.IterableDataset) else True
    return PACKAGES[package](
        dataset, size, shuffle, num_workers=workers, collate_fn=collate, persistent_workers=workers > 0, **settings
    )


def changed_import():
    found, ratios = [], []
    for name in SHAPES:
        made = shape(name)
        for workers in (0, 1, 2, 4):
            floors = {"torch": None, "dataload": 3 if name in BULK else 0.9}
            loaders = {package: loader_of(package, made, workers) for package in floors}
            cases = [Case(package, loader.__iter__, floors[package]) for package, loader in loaders.items()]
            with closing(loaders["dataload"]):
                found += run_cases(f"{name}, {workers} workers", cases, rows=lambda _, made=made: made[1], same=None)
            loaders.clear()  # torch's workers end
            ratios += [found[-1]["ratio"]]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    found.append(aim("A changed import", "geometric mean of the ratios to torch", mean, 0.97))
    for name in SHAPES:
        for method in ("fork", "spawn"):
            theirs, ours = (median(memory(name, package, method) for _ in range(3)) for package in PACKAGES)
            case = f"{name}, {method}: MB of PSS, torch's {theirs / 1e6:.0f}"
            found.append(aim("A changed import", case, ours / 1e6, most=round(1.05 * theirs / 1e6 + 30, 1)))
    return found


def memory(name, package, method):
    command = [sys.executable, "-m", "benchmarks.changed_import", name, package, method]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def pss():
    """The proportional set size of this process and of its children, in bytes."""
    lists = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [os.getpid(), *(int(child) for path in lists for child in path.read_text().split())]
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(1024 * int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1]) for text in texts)


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[3])
    peak = 0
    for step, _ in enumerate(loader_of(sys.argv[2], shape(sys.argv[1]), 2)):
        peak = peak if step % 8 else max(peak, pss())
    print(peak)
