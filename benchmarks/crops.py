"""JPEG files of an archive to batches of 224 x 224: decode, cut out a random part, resize, mirror half of them.

All use all CPUs, and decode as exactly as Pillow does unless "scaled" says otherwise. Each reader has a process of its
own. How far its resizing is from Pillow's, which takes all pixels into account, is measured by images that are resized
as a whole; torchvision's transforms of Pillow images give those of Pillow.
"""

import io
import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count, islice
from statistics import median
from typing import Any

import numpy as np

import dataload
from benchmarks.peers import Field
from benchmarks.peers.field import batches_of_rows, load, worker_options
from benchmarks.peers.torch_loader import TarRecords
from benchmarks.workloads import photographs, write_once
from dataload._util.system import usable_cpus
from dataload.bench.data import loader
from dataload.bench.runner import measure_all, ratios_of, run_task
from dataload.bench.task import Reading, Task

SIDE, BATCH = 224, 64
SIZES = {(375, 500): 1024, (1500, 2000): 192}  # of images, and how many
FIELD = Field(name="jpg", kind="image")


def part_of(height, width, rng):
    """Return top, left, height and width of a random part, as torchvision's `RandomResizedCrop` does."""
    for _ in range(10):
        area, ratio = height * width * rng.uniform(0.08, 1), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if rows <= height and columns <= width:
            return int(rng.integers(height - rows + 1)), int(rng.integers(width - columns + 1)), rows, columns
    return 0, 0, height, width


class Cut:
    """What users write with OpenCV: a random part of pixels, resized and perhaps mirrored; or all, if `whole`."""

    def __init__(self, whole):
        self.whole = whole

    def __call__(self, pixels, rng):
        import cv2

        top, left, rows, columns = (0, 0, *pixels.shape[:2]) if self.whole else part_of(*pixels.shape[:2], rng)
        image = cv2.resize(pixels[top : top + rows, left : left + columns], (SIDE, SIDE))
        return image[:, ::-1] if not self.whole and rng.random() < 0.5 else image


def bare(task):
    """Decode and cut the batches of a list in memory, in threads: no order, no loader."""
    import simplejpeg

    with dataload.open(task.path, fields=["jpg"]) as source:
        files = [bytes(record["jpg"]) for record in source]
    cut, rng, held = Cut("whole" in task.options), np.random.default_rng(0), ExitStack()
    pool = held.enter_context(ThreadPoolExecutor(task.workers))

    def batch(start):
        images = [simplejpeg.decode_jpeg(file) for file in files[start : start + BATCH]]
        return np.stack([cut(image, rng) for image in images])

    def batches(_):
        starts = iter(range(0, len(files), BATCH))
        ahead = deque(pool.submit(batch, start) for start in islice(starts, 2 * task.workers))
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(pool.submit(batch, start) for start in islice(starts, 1))

    return _reading(task, {}, batches, held)


def crop(task, *, exact):
    """Use dataload's own transform on the bytes of the files."""
    whole = {"scale": (1.0, 1.0), "ratio": (4 / 3, 4 / 3), "mirrored": 0.0} if "whole" in task.options else {}
    transform = dataload.RandomResizedCrop(size=SIDE, exact=exact, **whole)
    made = loader(replace(task, options={**task.options, "open": {"fields": ["jpg"]}}), transform)
    return _of_loader(task, made)


def own_transform(task):
    """Decode by dataload, and cut by a function of the user."""
    cut = Cut("whole" in task.options)

    def transform(sample, context):
        return {"jpg": cut(sample["jpg"], context.generator)}

    made = loader(replace(task, options={**task.options, "open": {"fields": ["jpg"], "decode": "auto"}}), transform)
    return _of_loader(task, made)


def _of_loader(task, made):
    held = ExitStack()
    held.callback(made.close)
    return _reading(task, made.settings, made.batches, held, lambda batch: batch["jpg"])


class Pictures:
    """What users of torch write, with Pillow; torchvision's transforms of Pillow images do the same."""

    def __init__(self, path, whole):
        self._records, self._whole = TarRecords(path, FIELD), whole

    def __len__(self):
        return len(self._records)

    def __getitem__(self, index):
        from PIL import Image

        image, rng = Image.open(io.BytesIO(next(iter(self._records.read([index]))))).convert("RGB"), np.random
        if not self._whole:
            top, left, rows, columns = part_of(image.height, image.width, np.random.default_rng(rng.randint(1 << 30)))
            image = image.crop((left, top, left + columns, top + rows))
        pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        return pixels[:, ::-1].copy() if not self._whole and rng.random() < 0.5 else pixels.copy()


def torch_loader(task):
    data, whole, several = load("torch.utils.data", "torch"), "whole" in task.options, worker_options(task)
    made = data.DataLoader(Pictures(task.path, whole), batch_size=BATCH, shuffle=not whole, **several)
    return _reading(task, several, lambda _: iter(made), None, lambda batch: batch.numpy())


def dali(task):
    """Run DALI on the CPU, whose decoder decodes only the part; it resizes with antialiasing, as Pillow does."""
    fn, types = load("nvidia.dali.fn", "nvidia-dali-cuda120"), load("nvidia.dali.types", "nvidia-dali-cuda120")
    whole, options = "whole" in task.options, {"batch_size": BATCH, "num_threads": task.workers}
    pipeline = load("nvidia.dali", "nvidia-dali-cuda120").Pipeline(**options, device_id=None, seed=0)
    with pipeline:
        data = fn.readers.webdataset(
            paths=[task.path],
            index_paths=[f"{task.path.removesuffix('.tar')}.idx"],
            ext=["jpg"],
            random_shuffle=not whole,
            name="reader",
            pad_last_batch=True,
        )
        exact = {"device": "cpu", "jpeg_fancy_upsampling": True}
        images = fn.decoders.image(data, **exact) if whole else fn.decoders.image_random_crop(data, **exact)
        images = fn.resize(images, size=[SIDE, SIDE], interp_type=types.INTERP_LINEAR)
        pipeline.set_outputs(images if whole else fn.flip(images, horizontal=fn.random.coin_flip()))
    pipeline.build()
    steps = range(0, pipeline.epoch_size("reader"), BATCH)
    batches = lambda _: (pipeline.run()[0] for _ in steps)  # noqa: E731 - as the other readers have it
    return _reading(task, options, batches, None, lambda batch: np.asarray(batch.as_tensor()))


def spdl(task):
    """Run SPDL's pipeline of threads, with the functions of the bare loop."""
    import simplejpeg

    builder = load("spdl.pipeline", "spdl-core").PipelineBuilder
    records, held, epochs = TarRecords(task.path, FIELD), ExitStack(), count()
    cut, rng = Cut("whole" in task.options), np.random.default_rng(0)
    held.callback(records.close)

    class Batches:
        def __iter__(self):
            return (rows.tolist() for rows in batches_of_rows(task, len(records), next(epochs)))

    def batch(indices):
        return np.stack([cut(simplejpeg.decode_jpeg(file), rng) for file in records.read(indices)])

    pipeline = builder().add_source(Batches(), continuous=True).pipe(batch, concurrency=task.workers).add_sink(3)
    pipeline = pipeline.build(num_threads=task.workers, max_failures=0)
    held.enter_context(pipeline.auto_stop())
    return _reading(task, {"num_threads": task.workers}, lambda _: iter(pipeline), held)


def _reading(task, settings, batches, held, images=lambda batch: batch):
    """Return a reading; if the task asks for whole images, their first batch is stored, too."""

    def kept(epoch):
        for step, batch in enumerate(batches(epoch)):
            if step == 0 and (path := task.options.get("whole")):
                np.save(path, images(batch))
            yield batch

    return Reading(settings, kept, lambda batch: {"jpg": images(batch)}, held or ExitStack())


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
        tasks = [
            Task(
                **common,
                kind="peer",
                name=name,
                order="global",
                workers=usable_cpus(),
                batch_size=BATCH,
                seconds=seconds,
            )
            for name in READERS
        ]
        found = {m.task.name: m for m in measure_all(tasks, rounds, run=partial(run_task, interpreters=pythons))}
        far = {task.name: _distance(task, path, pythons) for task in tasks}
        rows += _rows(title, found, far)
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


def _distance(task, path, pythons):
    """Return the mean difference of whole images, resized by a reader, from Pillow's; None if it failed."""
    from PIL import Image

    from benchmarks.harness import ROOT

    saved = ROOT / "crops-whole.npy"
    saved.unlink(missing_ok=True)
    run_task(
        replace(task, seconds=0.05, order="sequential", workers=1, options={"whole": str(saved)}), interpreters=pythons
    )
    if not saved.exists():
        return None
    with dataload.open(path, fields=["jpg"]) as source:
        files = [record["jpg"] for record in source.read(range(BATCH))]
    pillow = [Image.open(io.BytesIO(file)).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for file in files]
    return float(np.abs(np.stack([np.asarray(each) for each in pillow]).astype(int) - np.load(saved)).mean())


def _rows(title, found, far):
    from benchmarks.harness import aim

    print(f"\n{title}")
    rows = []
    for name, measured in found.items():
        if not measured.answers:
            print(f"  {name:40} {measured.error}")
            continue
        rate, cpu = median(measured.rates), median(each.cpu_seconds / each.records for each in measured.answers) * 1e3
        distance = "" if far[name] is None else f"{far[name]:.2f}"
        faults = median(a.minor_faults / a.records for a in measured.answers)
        print(
            f"  {name:40} {rate:8,.0f} images/s  {cpu:6.2f} ms of CPU  {faults:5.0f} faults  from Pillow's {distance}"
        )
        rows.append({"title": title, "case": name, "records_per_second": rate, "cpu_ms": cpu, "distance": far[name]})
    for ours in [name for name in found if name.startswith("dataload") and found[name].answers]:
        for name, floor in AIMS.items():
            if found[name].answers:
                ratios = ratios_of(found[ours].rates, found[name].rates)
                rows.append(aim(title, f"{ours} / {name}", median(ratios), floor, ratios=ratios))
    return rows
