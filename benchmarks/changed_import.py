"""torch's DataLoader and dataload's by a changed import: ten shapes of data, with 0, 1, 2 and 4 workers.

python -m benchmarks.changed_import SHAPE PACKAGE METHOD    prints the PSS of all processes, in bytes
"""

import importlib.util
import io
import multiprocessing
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import geometric_mean

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils import data

from benchmarks.harness import ROOT, Case, aim, run_cases
from benchmarks.workloads import jpegs
from dataload.torch import DataLoader

COUNT, BATCH = 16_384, 128
BULK = ["tensors", "memmap", "numpy"]
SHAPES = [*BULK, "images", "tokens", "iterable", "dicts", "tuples", "nested"]
SHAPES += ["hugging face"] * (importlib.util.find_spec("datasets") is not None)
PACKAGES = {"torch": data.DataLoader, "dataload": DataLoader}


class Records(data.Dataset):
    """What a function makes of each number below `count`."""

    def __init__(self, make, count=COUNT):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


class Stream(data.IterableDataset):
    def __iter__(self):
        info = data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.full((1024,), float(number)) for number in range(first, COUNT, step))


def image(files, index):
    from PIL import Image

    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(files[index])).convert("RGB").resize((224, 224))).copy())


def tokens(index):
    text = " ".join(f"w{index * number % 1000}" for number in range(100 + index % 50))
    return torch.tensor([int(word[1:]) for word in text.split()])


def row(rows, kind, index):
    x = rows[index]
    if kind == "dicts":
        return {"x": x, "label": index % 10, "name": f"record {index}"}
    return (x, index % 10) if kind == "tuples" else {"in": (x, {"mask": [x > 0, index]}), "weight": float(index)}


def loader_of(package, name, workers):
    rows = torch.randn(COUNT, 1024, generator=torch.Generator().manual_seed(0))
    size, collate, shuffle = BATCH, None, True
    if name == "images":
        files = [record["jpg"] for record in jpegs(256)]
        dataset, size = Records(partial(image, files), len(files)), 32
    elif name == "tokens":
        dataset, size, collate = Records(tokens), 32, partial(pad_sequence, batch_first=True)
    elif name == "iterable":
        dataset, shuffle = Stream(), None
    elif name == "hugging face":
        from datasets import Dataset

        dataset = Dataset.from_dict({"x": rows[:4096].numpy(), "label": [*range(4096)]}).with_format("torch")
    elif name == "memmap":
        np.save(ROOT / "changed_import.npy", rows.numpy())
        dataset = np.load(ROOT / "changed_import.npy", mmap_mode="c")
    elif name in BULK:
        dataset = rows.numpy() if name == "numpy" else data.TensorDataset(rows, torch.arange(COUNT))
    else:
        dataset = Records(partial(row, rows, name))
    settings = {"num_workers": workers, "collate_fn": collate, "persistent_workers": workers > 0}
    return PACKAGES[package](dataset, size, shuffle, **settings)


def changed_import():
    title, found, ratios = "A changed import", [], []
    for name in SHAPES:
        for workers in (0, 1, 2, 4):
            loaders = {package: loader_of(package, name, workers) for package in PACKAGES}
            floors = {"torch": None, "dataload": 3 if name in BULK else 0.9}
            cases = [Case(package, loader.__iter__, floors[package]) for package, loader in loaders.items()]
            size = loaders["torch"].batch_size
            found += run_cases(f"{name}, {workers} workers", cases, rows=lambda _, size=size: size, same=None)
            ratios.append(found[-1]["ratio"])
            loaders["dataload"].close()
    found.append(aim(title, "geometric mean of the ratios to torch", geometric_mean(ratios), 0.97))
    for name in SHAPES:
        for method in ("fork", "spawn"):
            theirs, ours = (memory(name, package, method) / 1e6 for package in PACKAGES)
            case = f"{name}, 2 workers, {method}: MB of PSS; torch's {theirs:.0f}"
            found.append(aim(title, case, ours, most=round(1.05 * theirs + 30, 1)))
    return found


def memory(*arguments):
    command = [sys.executable, "-m", "benchmarks.changed_import", *arguments]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def pss():
    """The proportional set size of this process and of its children, in bytes."""
    lists = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [os.getpid(), *(int(child) for path in lists for child in path.read_text().split())]
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(1024 * int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1]) for text in texts)


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[3])
    print(max(pss() for step, _ in enumerate(loader_of(sys.argv[2], sys.argv[1], 2)) if step % 8 == 0))
