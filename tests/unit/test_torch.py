"""Batches as tensors that share memory; sources in torch's own DataLoader."""

import numpy as np
import pytest

import dataload
from dataload import ConfigError, Loader, MemorySource, Ragged

torch = pytest.importorskip("torch")

from dataload.torch import SourceDataset, to_tensors  # noqa: E402 - skipped where torch is missing


@pytest.fixture
def source():
    rng = np.random.default_rng(0)
    return MemorySource(
        {"x": rng.standard_normal((10, 3), dtype=np.float32), "y": np.arange(10), "name": list("abcdefghij")}
    )


def test_tensors_share_memory_with_the_arrays():
    batch = {"x": np.zeros((2, 3)), "n": {"y": np.zeros(2, np.int32)}, "t": (np.ones(1),), "s": ["a"], "k": 3}
    tensors = to_tensors(batch)
    tensors["x"][1, 2] = 7
    assert batch["x"][1, 2] == 7
    assert tensors["n"]["y"].dtype == torch.int32
    assert tensors["t"][0].tolist() == [1.0]
    assert (tensors["s"], tensors["k"]) == (["a"], 3)
    ragged = to_tensors(Ragged(np.arange(3), np.array([0, 3])))
    assert isinstance(ragged, Ragged)
    assert ragged.values.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"])
def test_dtypes(dtype):
    array = np.array([0, 1], dtype)
    assert to_tensors(array).numpy().dtype == array.dtype


def test_arrays_that_torch_cannot_share_are_copied():
    read_only = np.frombuffer(b"\1\2", np.uint8)
    to_tensors(read_only)[0] = 9
    assert read_only[0] == 1
    assert to_tensors(np.arange(3)[::-1]).tolist() == [2, 1, 0]
    assert to_tensors(np.array([1, 2], ">i4")).tolist() == [1, 2]


def test_a_dtype_that_torch_lacks():
    with pytest.raises(ConfigError, match=r"field 'd': torch has no dtype for datetime64\[s\]; cast it in a transform"):
        to_tensors({"d": np.array(["2020-01-01"], "datetime64[s]")})


@pytest.mark.parametrize("workers", [0, 2])
def test_as_a_batch_transform(source, workers):
    with Loader(source, batch_size=4, num_workers=workers, batch_transform=to_tensors, tail="pad") as loader:
        batches = list(loader)
    assert [batch["x"].shape for batch in batches] == [(4, 3)] * 3
    assert batches[-1]["valid"].tolist() == [True, True, False, False]
    assert torch.equal(torch.cat([b["y"] for b in batches])[:10], torch.arange(10))


class Watched(SourceDataset):
    requests = None

    def __getitems__(self, indices):
        self.requests.append(list(indices))
        return super().__getitems__(indices)


def test_torchs_own_loader_reads_in_batches(source):
    dataset = Watched(source)
    dataset.requests = []
    batches = list(torch.utils.data.DataLoader(dataset, batch_size=4))
    assert dataset.requests == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert torch.equal(batches[1]["x"], torch.from_numpy(source.read_batch([4, 5, 6, 7])["x"]))
    assert batches[2]["name"] == ["i", "j"]


def test_a_source_needs_no_wrapping(source, tmp_path):
    with dataload.create(tmp_path / "a.syr") as writer:
        writer.extend(source)
    opened = dataload.open(tmp_path / "a.syr")
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(
            opened, batch_size=5, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
        assert torch.equal(torch.cat([batch["y"] for batch in loader]), torch.arange(10))


def test_a_dataset_with_a_transform(source):
    dataset = SourceDataset(source, transform=lambda record: record["y"] * 2)
    assert len(dataset) == 10
    assert dataset[3] == 6
    assert list(dataset.__getitems__([1, 2])) == [2, 4]
    assert repr(dataset) == "SourceDataset(MemorySource(10 records))"
    plain = SourceDataset([5, 6])
    assert plain.__getitems__([1, 0]) == [6, 5]
    assert plain[0] == 5
