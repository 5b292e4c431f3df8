"""Which source of a mixture each record comes from, in another library: PYTHON blends.py NAME COUNT RECORDS.

Prints JSON: the CPU seconds until the first record, the records a CPU second after it, and the largest difference from
its share that any of the first 100 sources has in any window of 1,000 records. This file imports no dataload.
"""

import itertools
import json
import sys
import tempfile
import time
from importlib import metadata, util
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

LENGTH, BATCH, WINDOW = 100_000, 256, 1000  # records of a source


def weights_of(count):
    """Weights of sources, 1 / rank^1.2, which add up to 1."""
    weights = 1 / np.arange(1, count + 1) ** 1.2
    return weights / weights.sum()


def sizes_of(count, records):
    """Records of sources that can be asked for so many records in all."""
    return np.minimum(LENGTH, weights_of(count) * records * 1.5 + 100).astype(int).tolist()


def hugging_face(count, records):
    """The map-style `interleave_datasets`, in batches; each source has the records that it can be asked for."""
    import datasets

    datasets.disable_progress_bars()
    parts = [datasets.Dataset.from_dict({"source": np.full(n, i)}) for i, n in enumerate(sizes_of(count, records))]
    yield  # sources are there
    mixed = datasets.interleave_datasets(parts, weights_of(count).tolist(), seed=0).with_format("numpy")
    for start in range(0, len(mixed), BATCH):
        yield mixed[start : start + BATCH]["source"].tolist()


def grain(count, _):
    import grain.python as pygrain

    parts = [pygrain.MapDataset.source(range(n * LENGTH, (n + 1) * LENGTH)) for n in range(count)]
    yield
    mixed = pygrain.MapDataset.mix(parts, weights_of(count).tolist())
    for start in itertools.count(step=BATCH):
        yield [mixed[i] // LENGTH for i in range(start, start + BATCH)]


def random_mix(count, _):
    import webdataset

    parts = [itertools.repeat(n) for n in range(count)]
    yield
    mixed = iter(webdataset.RandomMix(parts, weights_of(count).tolist()))
    while True:
        yield list(itertools.islice(mixed, BATCH))


def megatron(count, records):
    """The index builder of the blended data set, which makes the whole order first; no record is read."""
    (path,) = [each for each in metadata.files("megatron-core") or () if each.name.startswith("helpers_cpp")]
    spec: Any = util.spec_from_file_location("helpers_cpp", path.locate())  # its package would import torch
    helpers_cpp = util.module_from_spec(spec)
    spec.loader.exec_module(helpers_cpp)
    yield
    sources, within = np.zeros(records, np.int16), np.zeros(records, np.int64)
    helpers_cpp.build_blending_indices(sources, within, weights_of(count), count, records, False)
    for start in range(0, records, BATCH):
        yield sources[start : start + BATCH].tolist()


def streams(count, records):
    """MosaicML Streaming's `Stream`s, which are MDS files of 100 records each on the local disk, repeated as needed."""
    hide_torchvision()
    import streaming

    with tempfile.TemporaryDirectory() as directory:
        paths = [f"{directory}/{number}" for number in range(count)]
        for number, path in enumerate(paths):
            with streaming.MDSWriter(out=path, columns={"source": "int32"}) as writer:
                for _ in range(100):
                    writer.write({"source": np.int32(number)})
        streaming.base.util.clean_stale_shared_memory()
        shares = zip(paths, weights_of(count).tolist(), strict=True)
        yield
        parts = [streaming.Stream(local=path, proportion=share) for path, share in shares]
        settings = {"epoch_size": records + BATCH, "num_canonical_nodes": 1, "batch_size": BATCH, "shuffle": True}
        mixed = iter(streaming.StreamingDataset(streams=parts, **settings))
        while True:
            yield [int(record["source"]) for record in itertools.islice(mixed, BATCH)]


def hide_torchvision() -> None:
    """Let MosaicML Streaming do without torchvision, whose builds for CUDA and torch's for CPUs do not get along."""
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        stub: Any = sys.modules.setdefault(name, ModuleType(name))
        stub.__spec__, stub.VisionDataset, stub.to_tensor = ModuleSpec(name, None), object, None


NAMES = {
    "interleave_datasets": hugging_face,
    "MapDataset.mix": grain,
    "RandomMix": random_mix,
    "Stream": streams,
    "Megatron": megatron,
}


def deviation(sources, shares):
    """The largest difference from its share that any of the first 100 sources has in any window."""
    worst = 0.0
    for number, share in enumerate(shares[:100]):
        sums = np.concatenate([[0], np.cumsum(sources == number)]) - share * np.arange(len(sources) + 1)
        worst = max(worst, float(np.abs(sums[WINDOW:] - sums[:-WINDOW]).max()))
    return worst


def measured(batches, count, records):
    """Serve some records of batches of numbers of sources, the first of which is None: the sources are there."""
    next(batches)
    begun = time.process_time()
    found = [next(batches)]
    first = time.process_time() - begun
    while sum(map(len, found)) < records:
        found.append(next(batches))
    seconds = time.process_time() - begun - first
    sources = np.concatenate(found)
    rate = (len(sources) - len(found[0])) / max(seconds, 1e-9)
    return {"first": first, "rate": rate, "deviation": deviation(sources, weights_of(count))}


if __name__ == "__main__":
    name, count, records = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps(measured(NAMES[name](count, records), count, records)))
