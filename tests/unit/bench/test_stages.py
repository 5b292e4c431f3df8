"""Stages of a config: which there are, and that each is measured."""

import numpy as np
import pytest

import dataload
from dataload.bench import stages
from dataload.bench.stages import measure_stages, stage_overrides
from dataload.config import read_config
from dataload.errors import ConfigError

ALONE = "loader.num_workers=0"
AS_LIST = "loader.collate=dataload.bench.stages:as_list"
NO_DECODE, NO_TRANSFORM = "source.decode=null", "loader.transform=null"
NO_BATCH_TRANSFORM = "loader.batch_transform=null"


@pytest.fixture
def config(tmp_path):
    """A function: the settings of a loader and a source -> config over 12 records."""
    path = str(tmp_path / "x.syr")
    with dataload.create(path) as writer:
        writer.extend({"x": np.full(4, i, np.float32)} for i in range(12))
    return lambda source=(), **loader: {
        "source": {"path": path, **dict(source)},
        "loader": {"batch_size": 4, **loader},
    }


def overrides_of(config):
    return stage_overrides(read_config(config, ()))


# Which stages there are


def test_all_stages_in_the_order_of_their_work(config):
    made = config({"decode": "auto"}, transform="bench_steps:double", batch_transform="bench_steps:halve")
    found = overrides_of(made)
    assert list(found.items()) == [
        ("source", [NO_DECODE, NO_TRANSFORM, AS_LIST, NO_BATCH_TRANSFORM, ALONE]),
        ("+ decode", [NO_TRANSFORM, AS_LIST, NO_BATCH_TRANSFORM, ALONE]),
        ("+ transform", [AS_LIST, NO_BATCH_TRANSFORM, ALONE]),
        ("+ collate", [NO_BATCH_TRANSFORM, ALONE]),
        ("+ batch_transform", [ALONE]),
    ]
    for overrides in found.values():
        read_config(made, overrides)  # each is a config


def test_stages_that_a_config_does_not_have(config):
    """Columns are collated where they are read; of several sources decoding is no stage of its own."""
    one = config({"decode": "auto"})
    assert overrides_of(one) == {"source, collated": [NO_DECODE, ALONE], "+ decode": [ALONE]}
    assert overrides_of({**one, "source": [one["source"], one["source"]]}) == {"source, collated": [ALONE]}
    assert overrides_of(config(collate={"x": "pad"})) == {"source": [AS_LIST, ALONE], "+ collate": [ALONE]}
    padded = config(collate={"x": "pad"}, pad_value={"x": -100})
    assert overrides_of(padded) == {"source": [AS_LIST, "loader.pad_value=null", ALONE], "+ collate": [ALONE]}


# Measuring


def test_every_stage_is_measured(config):
    report = measure_stages(
        config(transform="bench_steps:double", batch_transform="bench_steps:halve"), seconds=0.01, repeats=2
    )
    assert [stage.name for stage in report.stages] == [
        "source",
        "+ transform",
        "+ collate",
        "+ batch_transform",
        "the config as it is",
        "the same batches from memory",
    ]
    for stage in report.stages:
        times = stage.batch_seconds
        assert 0 < times.low <= times.median <= times.high
        # The rate is that of both rounds together, so it lies between those of the slower and the faster one.
        assert 4 / times.high * 0.999 <= stage.rows_per_second <= 4 / times.low * 1.001
    assert report.verdict
    assert report.notes == (
        "copying to a device is not part of a config: wrap the loader in dataload.torch.DeviceLoader",
    )


def test_a_config_with_workers_and_few_epochs(config, monkeypatch):
    asked = []
    opened = stages.record_loader
    monkeypatch.setattr(
        stages,
        "record_loader",
        lambda config, overrides: asked.append(overrides) or opened(config, overrides=overrides),
    )
    report = measure_stages(
        config(epochs=1), overrides=["loader.num_workers=2"], seconds=0.01, repeats=1
    )  # epochs = 1 would have no second batch after some milliseconds
    assert [stage.name for stage in report.stages][-2:] == ["the config as it is", "the same batches from memory"]
    assert [[text for text in overrides if "num_workers" in text] for overrides in asked] == [
        ["loader.num_workers=2", ALONE],
        ["loader.num_workers=2"],
    ]


def test_the_batches_from_memory_are_those_of_the_config(config, monkeypatch):
    seen = []
    monkeypatch.setattr(stages, "_KEPT_BATCHES", 3)
    monkeypatch.setattr(stages, "cycle", lambda kept: seen.append([b["x"][:, 0].tolist() for b in kept]) or iter(kept))
    monkeypatch.setattr(stages, "_time_batches", lambda batches, seconds: (seconds, 5))
    report = measure_stages(config(transform="bench_steps:double"), seconds=1, repeats=1)
    assert seen == [[[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]]
    assert [stage.rows_per_second for stage in report.stages] == [20, 20, 20, 20, 80]
    assert [stage.batch_seconds.median for stage in report.stages] == [0.2, 0.2, 0.2, 0.2, 0.05]


def test_no_more_batches_are_kept_than_memory_takes(config, monkeypatch):
    seen = []
    monkeypatch.setattr(stages, "_KEPT_BYTES", 100)  # a batch has 64
    monkeypatch.setattr(stages, "cycle", lambda kept: seen.append(len(kept)) or iter(kept))
    monkeypatch.setattr(stages, "_time_batches", lambda batches, seconds: (seconds, 5))
    measure_stages(config(), repeats=1)
    assert seen == [2]


def test_what_is_not_measured_is_said(config, monkeypatch, tmp_path):
    monkeypatch.setattr(stages, "_time_batches", lambda batches, seconds: (seconds, 5))
    one = config()
    report = measure_stages({**one, "source": [one["source"], one["source"]]}, repeats=1)
    assert report.notes[0] == "decoding is part of the source: with several sources it is not measured apart"
    del one["loader"]["batch_size"]
    np.save(tmp_path / "lengths.npy", np.arange(1, 13))
    buckets = {"kind": "length_buckets", "max_tokens": 24, "lengths": str(tmp_path / "lengths.npy")}
    report = measure_stages({**one, "sampler": buckets}, repeats=1)
    assert report.notes[0] == "batches differ in rows: records/s are batches/s"


def test_a_config_without_a_step(config):
    with pytest.raises(ConfigError, match="the config has no step: there is nothing to measure"):
        measure_stages(config(batch_size=13, tail="drop"), seconds=0.01, repeats=1)
