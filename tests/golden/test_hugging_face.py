"""Data sets that Hugging Face's library saved."""

import json
from pathlib import Path

import numpy as np
import pytest

import dataload
from dataload.errors import ConfigError, SourceNotFoundError
from dataload.sources.arrow.reader import HuggingFaceSource

GOLDEN = Path(__file__).parent / "hugging_face"


def test_records_are_those_of_the_library():
    expected = json.loads((GOLDEN / "expected.json").read_text())
    source = dataload.open(GOLDEN / "saved", decode="auto")
    assert isinstance(source, HuggingFaceSource)
    assert source.shard_lengths == (4, 3)
    assert not source.reads_in_order
    for record, want in zip(source, expected, strict=True):
        assert (record["image"] == want["image"]).all()
        assert record["image"].shape == (4, 5, 3)
        assert (record["text"], record["chat"]) == (want["text"], want["chat"])
        for name, dtype in {"label": np.int64, "matrix": np.float32, "tokens": np.int64, "vector": np.float32}.items():
            assert record[name].dtype == dtype
            assert record[name].tolist() == want[name]
    specs = {name: str(spec) for name, spec in source.fields.items()}
    assert (specs["matrix"], specs["tokens"], specs["vector"]) == ("float32 (2, 3)", "int64 (?)", "float32 (4)")
    batch = source.read_batch([5, 0], ["matrix", "text"])
    assert batch["matrix"].shape == (2, 2, 3)
    assert batch["text"] == ["text 5 é", "text 0 é"]


def test_without_decode_images_are_bytes():
    record = HuggingFaceSource(GOLDEN / "saved")[0]
    assert record["image"].startswith(b"\x89PNG")


def test_one_of_several_splits_is_opened():
    assert len(dataload.open(GOLDEN / "dict" / "train")) == 7
    with pytest.raises(ConfigError, match=r"dict has several splits, test, train: open one of these directories"):
        HuggingFaceSource(GOLDEN / "dict")
    with pytest.raises(
        SourceNotFoundError, match=r"has no files with a suffix of a known format; open one of its data sets: test, "
    ):
        dataload.open(GOLDEN / "dict")
