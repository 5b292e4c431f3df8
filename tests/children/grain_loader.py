"""Read our sources with Grain's own loaders. This is a script, because Grain's workers import the main module."""

import json
import sys

import grain
import numpy as np
from absl import app

import dataload
from dataload.compat.grain import ArrayRecordDataSource, RangeDataSource, SharedMemoryDataSource, tfds_data_source
from dataload.testing.compare import difference


class Identity(grain.transforms.Map):
    def map(self, element):
        return element


class Together:
    """Several sources in one, because starting Grain's workers takes seconds."""

    def __init__(self, sources):
        self.sources = sources

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, {name: source[index % len(source)] for name, source in self.sources.items()}

    def __repr__(self):
        return f"Together{self.sources}"


def check(elements, source, shuffled):
    """Compare the elements of a loader, in any order, with the records of the source in this process."""
    elements = [(index, plain(records)) for index, records in elements]
    assert ([index for index, _ in elements] != [*range(len(source))]) == shuffled
    elements.sort(key=lambda element: element[0])
    found = difference(elements, [source[index] for index in range(len(source))], "elements")
    assert found is None, found


def plain(value):
    """Return an element with numpy's own arrays in the place of Grain's, each of which holds a file open."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return np.array(value) if isinstance(value, np.ndarray) else value


def loader_of(source, worker_count=0):
    sampler = grain.samplers.IndexSampler(len(source), grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=0)
    return grain.DataLoader(data_source=source, sampler=sampler, operations=[Identity()], worker_count=worker_count)


def main(arguments):
    path, demo, formats = arguments[1:]
    shared = SharedMemoryDataSource(["a", b"b", 3, None])
    source = Together(
        {name: dataload.open(path, **options) for name, (path, options) in json.loads(formats).items()}
        | {"memory": dataload.MemorySource({"x": np.arange(5)}), "tfds_data_source": tfds_data_source(demo, "all")}
        | {"ArrayRecordDataSource": ArrayRecordDataSource(path), "RangeDataSource": RangeDataSource(0, 200, 2)}
        | {"SharedMemoryDataSource": shared}
    )
    check(loader_of(source, worker_count=2), source, shuffled=True)
    pipeline = grain.MapDataset.source(source).to_iter_dataset()
    check(pipeline.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)), source, shuffled=False)
    shared.close()
    shared.unlink()
    # Our source continues from a checkpoint of Grain's own source.
    iterator = iter(loader_of(grain.sources.ArrayRecordDataSource(path)))
    for _ in range(30):
        next(iterator)
    ours = iter(loader_of(ArrayRecordDataSource(path)))
    ours.set_state(iterator.get_state())
    rest = list(iterator)
    assert len(rest) == 70
    assert list(ours) == rest
    # Grain's pipelines call _getitems where there is one.
    pipeline = grain.MapDataset.source(ArrayRecordDataSource(path)).shuffle(seed=1).batch(10)
    assert sorted(x for batch in pipeline for x in batch) == [b"%03d" % i for i in range(100)]
    sys.stdout.write("all read\n")


if __name__ == "__main__":
    app.run(main)  # Grain's workers need its flags parsed
