"""TorchRecord's headline: a TorchRecord of decoded images beside torch's DataLoader over the JPEG files.

The transform is that of TorchRecord's README: ``Resize((224, 224))`` and ``ToTensor()``.
"""

import io
import shutil

import numpy as np

from benchmarks.harness import ROOT, Case, against, run_cases
from benchmarks.workloads import jpegs
from dataload.compat import torchrecord

COUNT, BATCH, WORKERS = 512, 32, (0, 1, 2)
SIZES = ((224, 224), (500, 375))  # as the network takes them, and as those of the README, about
FLOOR = 3


def images():
    """Both loaders with 0, 1 and 2 workers, with images that need to be resized and that do not."""
    return [row for size in SIZES for row in _beside(size)]


def _beside(size):
    from torch.utils.data import DataLoader

    title = f"A TorchRecord of images of {size[0]} x {size[1]}"
    folder = _written(size)
    record, files = str(folder / "record"), _Files(folder / "list.txt")
    cases = []
    for workers in WORKERS:
        several = {"num_workers": workers, "persistent_workers": workers > 0}
        loader = DataLoader(files, batch_size=BATCH, shuffle=True, **several)
        cases.append(Case(f"torch DataLoader, JPEG files, {workers} workers", loader.__iter__))
    for workers in WORKERS:
        loader = torchrecord.TorchRecord(record, 1, True, BATCH, workers)
        cases.append(Case(f"dataload.compat.torchrecord, {workers} workers", loader.__iter__))
    rows = run_cases(title, cases, rows=lambda batch: len(batch[1]), same=None, seconds=0.6)
    conventional, ours = (max(found, key=lambda row: row["records_per_second"]) for found in (rows[:3], rows[3:]))
    return [*rows, against(ours, conventional, FLOOR)]


def _written(size):
    """The folder of JPEG files, of the list that names them, and of the TorchRecord made of it."""
    from PIL import Image

    folder = ROOT / f"images-{size[0]}x{size[1]}"
    if (folder / "record").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    photos = [Image.open(io.BytesIO(record["jpg"])) for record in jpegs()]
    for number in range(COUNT):
        photos[number % len(photos)].crop((0, 0, *size)).save(folder / f"{number}.jpg", quality=90)
    lines = [f"{folder / str(number)}.jpg {number % 10}\n" for number in range(COUNT)]
    (folder / "list.txt").write_text("".join(lines))
    torchrecord.Writer(str(folder / "list.txt"), str(folder / "record")).write()
    return folder


class _Files:
    """The data set of a conventional loader: it opens, decodes and transforms a file at a time."""

    def __init__(self, list_path):
        self._items = [line.split() for line in list_path.read_text().splitlines()]

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        from PIL import Image

        path, label = self._items[index]
        with Image.open(path) as image:
            return _to_tensor(_resize(image.convert("RGB"))), int(label)


def _resize(image):
    """Resize an image of Pillow as torchvision's ``Resize((224, 224))`` does."""
    from PIL import Image

    return image.resize((224, 224), Image.Resampling.BILINEAR)


def _to_tensor(image):
    """Return the tensor of an image as torchvision's ``ToTensor()`` does."""
    import torch

    planes = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return planes.to(torch.float32).div(255)
