"""Read our sources with Grain's own loaders. This is a script, because Grain's workers import the main module."""

import sys

import grain
from absl import app

import dataload
from dataload.compat.grain import ArrayRecordDataSource, RangeDataSource, tfds_data_source


class Identity(grain.transforms.Map):
    def map(self, element):
        return element


class Together:
    """Several sources in one, because starting Grain's workers takes seconds."""

    def __init__(self, *sources):
        self.sources = sources

    def __len__(self):
        return len(self.sources[0])

    def __getitem__(self, index):
        *rows, record = (source[index % len(source)] for source in self.sources)
        return (*rows, record["id"])

    def __repr__(self):
        return f"Together{self.sources}"


def values(source, **options):
    sampler = grain.samplers.IndexSampler(len(source), grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=0)
    loader = grain.DataLoader(data_source=source, sampler=sampler, operations=[Identity()], **options)
    return loader, list(loader)


def main(arguments):
    path, demo = arguments[1:]
    source = Together(
        ArrayRecordDataSource(path), dataload.open(path), RangeDataSource(0, 200, 2), tfds_data_source(demo, "all")
    )
    _, alone = values(source, worker_count=0)
    _, found = values(source, worker_count=2)
    ids = [0, 1, 2, 3, 4, 5, 6, 20, 21]
    assert sorted(alone) == sorted(found) != alone
    assert [row[:3] for row in sorted(found)] == [(b"%03d" % i, b"%03d" % i, 2 * i) for i in range(100)], found
    assert sorted({row[3] for row in found}) == ids, found
    # Our source continues from a checkpoint of Grain's own source.
    loader, all_of_it = values(grain.sources.ArrayRecordDataSource(path), worker_count=0)
    iterator = iter(loader)
    for _ in range(30):
        next(iterator)
    state = iterator.get_state()
    loader, _ = values(ArrayRecordDataSource(path), worker_count=0)
    iterator = iter(loader)
    iterator.set_state(state)
    assert list(iterator) == all_of_it[30:]
    # Grain's pipelines call _getitems where there is one.
    pipeline = grain.MapDataset.source(ArrayRecordDataSource(path)).shuffle(seed=1).batch(10)
    assert sorted(x for batch in pipeline for x in batch) == [b"%03d" % i for i in range(100)]
    sys.stdout.write("all read\n")


if __name__ == "__main__":
    app.run(main)  # Grain's workers need its flags parsed
