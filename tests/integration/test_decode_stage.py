"""Whatever format records are in, turning their bytes into fields counts as decoding."""

import numpy as np
import pytest

import dataload

ALIKE = [{"x": np.full(3, i, np.float32)} for i in range(8)]
DIFFERENT = [{"x": np.full(1 + i, i, np.float32)} for i in range(8)]
CODEC = {"codec": "tensorprotos"}


@pytest.mark.parametrize("records", [ALIKE, DIFFERENT], ids=["alike", "different"])
@pytest.mark.parametrize("transform", [None, lambda sample: {"n": len(sample["x"])}], ids=["columns", "samples"])
@pytest.mark.parametrize(
    ("name", "written", "opened"),
    [
        ("x.torchrecord", {}, {}),
        ("x.lmdb", CODEC, CODEC),
        ("x.array_record", CODEC, CODEC),
        ("x.array_record", {**CODEC, "options": "group_size:1,uncompressed"}, CODEC),
        ("x.tar", {}, {"decode": "auto", "fields": ["x"]}),
    ],
)
def test_decoding_is_a_stage(tmp_path, name, written, opened, transform, records):
    with dataload.create(tmp_path / name, **written) as writer:
        for record in records:
            writer.write(record)
    collate = {"x": "list"} if records is DIFFERENT and transform is None else None
    with (
        dataload.open(tmp_path / name, **opened) as source,
        dataload.Loader(source, batch_size=4, transform=transform, collate=collate) as loader,
    ):
        assert len(list(loader)) == 2
        stages = loader.statistics().stages
    # Alike .npy components are only gathered.
    assert ("decode" in stages) is not (name == "x.tar" and records is ALIKE)
    assert {stage.runs for stage in stages.values()} == {2}
