"""Data sets of the original, and what its own code made of them: see tfds/README.md."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from golden_values import assert_same, value_of

from dataload import Loader
from dataload.errors import ConfigError
from dataload.sources.array_record.tfds import TfdsSource, split_names
from dataload.sources.array_record.tfds_info import parse_info, select_records

GOLDEN = Path(__file__).parent / "tfds"
DEMO = GOLDEN / "demo" / "1.0.0"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
SPLITS = json.loads((GOLDEN / "splits.json").read_text())


@pytest.mark.parametrize("split", ["train", "test"])
def test_records_are_those_of_the_original(split):
    with TfdsSource(DEMO, split=split) as source:
        records = list(source)
    assert_same(records, value_of(EXPECTED[split]))


def test_a_split_over_several_splits_and_shards():
    assert split_names(DEMO) == ("train", "test")
    ids = [noted["id"] for noted in EXPECTED["train"] + EXPECTED["test"]]
    with TfdsSource(DEMO, split="all") as source:
        assert [record["id"] for record in source] == ids
        assert source.shard_lengths == (4, 3, 1, 1)
        assert source[-1]["id"] == ids[-1]
    with TfdsSource(DEMO, split="train[2:6]+test[1:]", fields=["id", "nested"]) as source:
        assert [record["id"] for record in source] == [*ids[2:6], ids[-1]]
        assert list(source[0]) == ["id", "nested"]
        assert source.read_batch([4, 0])["nested"]["a"].tolist() == [ids[-1], ids[2]]


def test_it_is_read_by_a_loader_and_pickles():
    source = TfdsSource(DEMO, split="train", fields=["id", "image"])
    copy = pickle.loads(pickle.dumps(source))
    assert copy.fingerprint() == source.fingerprint() != TfdsSource(DEMO, split="train[1:]").fingerprint()
    with copy, source, Loader(copy, batch_size=4, shuffle=True, seed=0, num_workers=2) as loader:
        batches = list(loader)
    assert sorted(np.concatenate([batch["id"] for batch in batches])) == sorted(r["id"] for r in EXPECTED["train"])
    assert batches[0]["image"].shape == (4, 4, 5, 1)


@pytest.mark.parametrize("layout", SPLITS["layouts"])
def test_splits_are_rounded_as_the_original_does(layout):
    lengths = SPLITS["layouts"][layout].items()
    splits = [{"name": name, "shardLengths": [str(n) for n in each]} for name, each in lengths]
    info = json.dumps({"name": "demo", "fileFormat": "array_record", "splits": splits})
    splits = parse_info(info, "dataset_info.json")
    cases = [(spec, files) for name, spec, files in SPLITS["cases"] if name == layout]
    assert len(cases) == 76
    for spec, files in cases:
        if files is None:
            with pytest.raises(ConfigError):
                select_records(splits, spec)
        else:
            found = [[part.file, part.start, part.stop - part.start] for part in select_records(splits, spec)]
            assert found == [part for part in files if part[2] > 0], spec


@pytest.mark.parametrize(("template", "shards", "last"), SPLITS["templates"])
def test_names_of_files_are_those_of_the_original(template, shards, last):
    split = {"name": "train", "shardLengths": ["1"] * shards, "filepathTemplate": template}
    text = json.dumps({"name": "demo", "fileFormat": "array_record", "splits": [split]})
    assert parse_info(text, "dataset_info.json")["train"].files[-1] == last
