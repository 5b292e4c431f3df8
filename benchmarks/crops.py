"""JPEG files of an archive to batches of 224 x 224: decode, cut out a random part, resize, mirror half of them.

All use all CPUs, and decode as exactly as Pillow does unless "scaled" says otherwise. Each reader has a process of its
own.
"""

import io
import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import dataload
from benchmarks.limits import in_threads
from benchmarks.peers import Field
from benchmarks.peers.field import load, worker_options
from benchmarks.peers.readers import dali_reading, spdl_reading
from benchmarks.peers.torch_loader import TarRecords
from benchmarks.rates import ratios_of
from benchmarks.workloads import photographs, write_once
from dataload._util.system import usable_cpus
from dataload.bench.data import loader
from dataload.bench.runner import measure_all, run_task
from dataload.bench.task import Reading, Task

SIDE, BATCH = 224, 64
SIZES = {(375, 500): 1024, (1500, 2000): 192}  # of images, and how many
FIELD = Field(name="jpg")


def part_of(height, width, rng):
    """Return top, left, height and width of a random part, as torchvision's `RandomResizedCrop` does."""
    for _ in range(10):
        area, ratio = height * width * rng.uniform(0.08, 1), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if rows <= height and columns <= width:
            return int(rng.integers(height - rows + 1)), int(rng.integers(width - columns + 1)), rows, columns
    return 0, 0, height, width


def cut(pixels, rng):
    """What users write with OpenCV: a random part of pixels, resized and perhaps mirrored."""
    import cv2

    top, left, rows, columns = part_of(*pixels.shape[:2], rng)
    image = cv2.resize(pixels[top : top + rows, left : left + columns], (SIDE, SIDE))
    return image[:, ::-1] if rng.random() < 0.5 else image


def bare(task):
    """Decode and cut the batches of a list in memory, in threads: no order, no loader."""
    import simplejpeg

    with dataload.open(task.path, fields=["jpg"]) as source:
        files = [bytes(record["jpg"]) for record in source]
    rng, held = np.random.default_rng(0), ExitStack()

    def batch(start):
        return {"jpg": np.stack([cut(simplejpeg.decode_jpeg(file), rng) for file in files[start : start + BATCH]])}

    run = in_threads(held, task.workers, batch)
    return Reading({}, lambda _: run(iter(range(0, len(files), BATCH))), held=held)


def crop(task, *, exact):
    """Use dataload's own transform on the bytes of the files."""
    transform = dataload.RandomResizedCrop(size=SIDE, exact=exact)
    return loader(replace(task, options={**task.options, "open": {"fields": ["jpg"]}}), transform)


def own_transform(task):
    """Decode by dataload, and cut by a function of the user."""

    def transform(sample, context):
        return {"jpg": cut(sample["jpg"], context.generator)}

    return loader(replace(task, options={**task.options, "open": {"fields": ["jpg"], "decode": "auto"}}), transform)


class Pictures:
    """What users of torch write, with Pillow; torchvision's transforms of Pillow images do the same."""

    def __init__(self, path):
        self._records = TarRecords(path, FIELD)

    def __len__(self):
        return len(self._records)

    def __getitem__(self, index):
        from PIL import Image

        image, rng = Image.open(io.BytesIO(next(iter(self._records.read([index]))))).convert("RGB"), np.random
        top, left, rows, columns = part_of(image.height, image.width, np.random.default_rng(rng.randint(1 << 30)))
        image = image.crop((left, top, left + columns, top + rows))
        pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        return pixels[:, ::-1].copy() if rng.random() < 0.5 else pixels.copy()


def torch_loader(task):
    data, several = load("torch.utils.data", "torch"), worker_options(task)
    made = data.DataLoader(Pictures(task.path), batch_size=BATCH, shuffle=True, **several)
    return Reading(several, lambda _: iter(made), lambda batch: {"jpg": batch.numpy()})


def dali(task):
    """Run DALI on the CPU, whose decoder decodes only the part; it resizes with antialiasing, as Pillow does."""
    fn, types = load("nvidia.dali.fn", "nvidia-dali-cuda120"), load("nvidia.dali.types", "nvidia-dali-cuda120")

    def images(files):
        decoded = fn.decoders.image_random_crop(files, device="cpu", jpeg_fancy_upsampling=True)
        resized = fn.resize(decoded, size=[SIDE, SIDE], interp_type=types.INTERP_LINEAR)
        return fn.flip(resized, horizontal=fn.random.coin_flip())

    return dali_reading(task, "jpg", images, shuffled=True)


def spdl(task):
    """Run SPDL's pipeline of threads, with the functions of the bare loop."""
    import simplejpeg

    records, rng = TarRecords(task.path, FIELD), np.random.default_rng(0)

    def batch(indices):
        return {"jpg": np.stack([cut(simplejpeg.decode_jpeg(file), rng) for file in records.read(indices)])}

    return spdl_reading(task, records, batch)


READERS: dict[str, Any] = {
    "bare loop": bare,
    "dataload, RandomResizedCrop": partial(crop, exact=True),
    "dataload, RandomResizedCrop, scaled": partial(crop, exact=False),
    "dataload, a transform of the user": own_transform,
    "SPDL": spdl,
    "DALI on CPU": dali,
    "Pillow + torch DataLoader": torch_loader,
}
AIMS = {"bare loop": 1.0, "DALI on CPU": 1.5, "Pillow + torch DataLoader": 2.0}


def open_reader(task: Task) -> Reading:
    """Open the reader that a task names: the ``Task.reading`` of all."""
    return READERS[task.name](task)


def crops(rounds=5, seconds=1.0):
    from benchmarks.beside import interpreters  # which imports what the environments of peers lack

    pythons = {name: path for name, path in interpreters().items() if name in READERS}
    if "SPDL" in pythons:
        pythons["Pillow + torch DataLoader"] = pythons["SPDL"]
    rows = []
    for (height, width), number in SIZES.items():
        title = f"JPEG files of {width} x {height} to batches of {SIDE} x {SIDE}, {usable_cpus()} CPUs"
        path = _written(height, width, number)
        common = {"workload": "crops", "reading": f"{__name__}:open_reader", "path": path, "format": "tar"}
        common |= {"kind": "peer", "order": "global", "workers": usable_cpus(), "batch_size": BATCH, "seconds": seconds}
        tasks = [Task(**common, name=name) for name in READERS]
        found = {m.task.name: m for m in measure_all(tasks, rounds, run=partial(run_task, interpreters=pythons))}
        rows += _rows(title, found)
    return rows


def _written(height, width, number):
    """The path of an archive of photos, with its index."""
    import cv2
    import simplejpeg

    from benchmarks.harness import ROOT, VERSION

    photos, rng = photographs(simplejpeg.decode_jpeg), np.random.default_rng(0)

    def image():
        photo = photos[int(rng.integers(len(photos)))]
        top, left, rows, columns = part_of(*photo.shape[:2], rng)
        enlarged = cv2.resize(
            photo[top : top + rows, left : left + columns], (width, height), interpolation=cv2.INTER_CUBIC
        )
        noise = rng.integers(-4, 5, enlarged.shape, np.int8)
        return simplejpeg.encode_jpeg(
            (enlarged.astype(np.int16) + noise).clip(0, 255).astype(np.uint8), 90, colorsubsampling="420"
        )

    records = ({"jpg": image()} for _ in range(number))
    return write_once(ROOT / f"v{VERSION}-crops-{width}x{height}-{number}.tar", lambda: records)


def _rows(title, found):
    from benchmarks.harness import aim

    print(f"\n{title}")
    rows = []
    for name, measured in found.items():
        if not measured.answers:
            print(f"  {name:40} {measured.error}")
            continue
        rate, cpu = median(measured.rates), median(each.cpu_seconds / each.records for each in measured.answers) * 1e3
        faults = median(a.minor_faults / a.records for a in measured.answers)
        print(f"  {name:40} {rate:8,.0f} images/s  {cpu:6.2f} ms of CPU  {faults:5.0f} faults")
        rows.append({"title": title, "case": name, "records_per_second": rate, "cpu_ms": cpu})
    for ours in [name for name in found if name.startswith("dataload") and found[name].answers]:
        for name, floor in AIMS.items():
            if found[name].answers:
                ratios = ratios_of(found[ours].rates, found[name].rates)
                rows.append(aim(title, f"{ours} / {name}", median(ratios), floor, ratios=ratios))
    return rows
