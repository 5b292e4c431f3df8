"""The sample path: a Python transform, JPEG decoding, and TorchRecord's headline.

That is a TorchRecord of decoded images beside torch's DataLoader over the JPEG files, with the transform of
TorchRecord's README: ``Resize((224, 224))`` and ``ToTensor()``.
"""

import io
import shutil
from contextlib import ExitStack
from itertools import islice
from statistics import median

import numpy as np

import dataload
from benchmarks.formats import copied
from benchmarks.harness import (
    ROOT,
    Case,
    against,
    aim,
    loaders,
    made,
    more_workers,
    run_cases,
    through,
    torch_loaders,
    workers_named,
)
from benchmarks.limits import in_threads
from benchmarks.peers.field import Field
from benchmarks.peers.torch_loader import LmdbRecords, Memmap
from benchmarks.workloads import floats, jpegs
from dataload._util.system import usable_cpus
from dataload.compat import torchrecord

COUNT, BATCH = 64 * 256, 256


def of_bytes(value):
    """A transform of a record of bytes: about a microsecond."""
    return {"x": np.frombuffer(value, np.float32), "size": len(value)}


def of_fields(sample):
    """A transform of a record with an array: about a microsecond."""
    return {"x": sample["x"], "size": sample["x"].nbytes}


class Transformed:
    """The usual map-style data set, whose transform is part of it."""

    def __init__(self, records, transform):
        self._records, self._transform = records, transform

    def __len__(self):
        return len(self._records)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        return list(map(self._transform, self._records.__getitems__(indices)))


class Values(LmdbRecords):
    """The values of an LMDB environment."""

    def __getitems__(self, indices):
        return list(self.read(indices))


def transforms():
    """A transform in Python over LMDB values, and over a memory-mapped array."""
    different = floats(1024)
    values = [{"x": record["x"].tobytes()} for record in different]
    lmdb_path = made(f"4096-{COUNT}-floats.lmdb", values, COUNT, field="x")
    array = str(ROOT / f"4096-{COUNT}.npy")
    np.save(array, np.stack([different[index % len(different)]["x"] for index in range(COUNT)]))
    field = Field(name="x")
    found = _beside_torch(
        "A Python transform of LMDB values of 4 KB",
        [value["x"] for value in values],
        of_bytes,
        dataload.open(lmdb_path),
        lambda workers: Values(copied(lmdb_path, workers), field),
        1.5,
    )
    syrah = dataload.open(made(f"4096-{COUNT}.syr", different, COUNT))
    return found + _beside_torch(
        "A Python transform of a memory-mapped array, 4 KB rows",
        different,
        of_fields,
        syrah,
        lambda _: Memmap(array, "x"),
        4,
    )


def _beside_torch(title, records, transform, source, peer, floor):
    def bare():
        for start in range(0, COUNT, BATCH):
            yield [transform(records[i % len(records)]) for i in range(start, start + BATCH)]

    cases = [Case("the transform alone, in a loop", bare)]
    with ExitStack() as held:
        held.enter_context(source)
        cases += loaders(held, source, BATCH, range(5), {}, transform=transform)
        pool = dataload.Loader(
            source, batch_size=BATCH, shuffle=True, transform=transform, num_workers=2, executor="processes"
        )
        cases.append(Case("Loader, 2 processes", through(held.enter_context(pool))))
        cases += torch_loaders(lambda workers: Transformed(peer(workers), transform), BATCH)
        rows = run_cases(title, cases, rows=lambda _: BATCH, same=None)
    by_name = {row["case"]: row for row in rows}
    serial, alone = by_name["Loader, no worker"], rows[0]
    own = [1e6 / mine - 1e6 / its for mine, its in zip(serial["rates"], alone["rates"], strict=True)]
    found = [*rows, more_workers(rows[1:6]), aim(title, "us of ours for a sample, no worker", median(own), most=3)]
    if "torch DataLoader, no worker" in by_name:
        found.append(against(serial, by_name["torch DataLoader, no worker"], floor))
        processes = by_name["Loader, 2 processes"]
        found.append(against(processes, by_name["torch DataLoader, 2 workers"], floor))
    return found


def jpeg(count=2048, batch_size=32):
    """JPEGs of 500x375 from a tar archive, against Pillow and against bare loops that decode and make no batches."""
    import simplejpeg
    from PIL import Image

    files = [record["jpg"] for record in jpegs(count)]
    cpus = usable_cpus()

    def bare():
        images = decode(iter(files))
        while batch := list(islice(images, batch_size)):
            yield batch

    def pillow(start):
        images = (Image.open(io.BytesIO(file)).convert("RGB") for file in files[start : start + batch_size])
        return np.stack([np.asarray(image) for image in images])

    starts = range(0, count, batch_size)
    held = ExitStack()
    decode, several = (in_threads(held, cpus, work) for work in (simplejpeg.decode_jpeg, pillow))
    cases = [
        Case(f"simplejpeg in {cpus} threads, no batches (the limit)", bare),
        Case("Pillow and np.stack, one thread", lambda: map(pillow, starts)),
        Case(f"Pillow and np.stack, {cpus} threads", lambda: several(iter(starts))),
    ]
    path = made(f"jpegs-{count}.tar", jpegs(), count)
    with held:
        source = held.enter_context(dataload.open(path, fields=["jpg"], decode="auto"))
        cases += loaders(held, source, batch_size, range(5), {cpus: 0.95})
        rows = run_cases("JPEG decoding, 500x375", cases, same=None, seconds=0.5)
    ours = rows[3:]
    return [*rows, more_workers(ours), against(ours[0], rows[1], 1.5), against(ours[min(cpus, 4)], rows[2], 1.5)]


_SIZES = ((224, 224), (500, 375))  # as the network takes them, and as those of the README, about


def images():
    """Both loaders with 0, 1 and 2 workers, with images that need to be resized and that do not."""
    return [row for size in _SIZES for row in _of_size(size)]


def _of_size(size):
    title = f"A TorchRecord of images of {size[0]} x {size[1]}"
    folder = _written(size)
    record, files = str(folder / "record"), _Files(folder / "list.txt")
    cases = [*torch_loaders(lambda _: files, 32, range(3), "torch DataLoader, JPEG files")]
    for workers in range(3):
        loader = torchrecord.TorchRecord(record, 1, True, 32, workers)
        cases.append(Case(workers_named(workers, "dataload.compat.torchrecord"), loader.__iter__))
    rows = run_cases(title, cases, rows=lambda batch: len(batch[1]), same=None, seconds=0.6)
    conventional, ours = (max(found, key=lambda row: row["records_per_second"]) for found in (rows[:3], rows[3:]))
    return [*rows, against(ours, conventional, 3)]


def _written(size):
    """The folder of JPEG files, of the list that names them, and of the TorchRecord made of it."""
    from PIL import Image

    folder = ROOT / f"images-{size[0]}x{size[1]}"
    if (folder / "record").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    photos = [Image.open(io.BytesIO(record["jpg"])) for record in jpegs()]
    for number in range(512):
        photos[number % len(photos)].crop((0, 0, *size)).save(folder / f"{number}.jpg", quality=90)
    lines = [f"{folder / str(number)}.jpg {number % 10}\n" for number in range(512)]
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
