"""Batches as tensors that share memory; sources in torch's own DataLoader; states as single values of a checkpoint."""

import importlib
import sys
from unittest.mock import Mock

import numpy as np
import pytest

import dataload
from dataload import ConfigError, Loader, MemorySource, Ragged, RangeSource, StateMismatchError
from dataload.errors import DataloadError
from dataload.samplers import GlobalShuffle
from dataload.streams import MultiStreamLoader

torch = pytest.importorskip("torch")

from dataload.torch import DeviceLoader, JsonState, SourceDataset, check_ranks, distributed_place, to_tensors  # noqa: E402


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
    rows = [np.zeros(2), np.zeros(3)]  # what the collate policy "list" gives
    to_tensors({"rows": rows})["rows"][1][2] = 5
    assert rows[1][2] == 5
    ragged = to_tensors(Ragged(np.arange(3), np.array([0, 3])))
    assert isinstance(ragged, Ragged)
    assert ragged.values.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"])
def test_dtypes(dtype):
    array = np.array([0, 1], dtype)
    assert to_tensors(array).numpy().dtype == array.dtype


def test_arrays_that_torch_cannot_share_are_copied_or_refused():
    read_only = np.frombuffer(b"\1\2", np.uint8)
    to_tensors(read_only)[0] = 9
    assert read_only[0] == 1
    assert to_tensors(np.arange(3)[::-1]).tolist() == [2, 1, 0]
    assert to_tensors(np.array([1, 2], ">i4")).tolist() == [1, 2]
    assert to_tensors(np.array([(1, 2.5)] * 2, "u1,f4")["f1"]).tolist() == [2.5, 2.5]  # 5 bytes apart
    with pytest.raises(ConfigError, match="field 'x': some values are masked: fill them first"):
        to_tensors({"x": np.ma.masked_array([1, 2], [0, 1])})
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        tensor = to_tensors(np.array([[0.5, -2]], getattr(pytest.importorskip("ml_dtypes"), name)))
        assert (tensor.dtype, tensor.tolist()) == (getattr(torch, name), [[0.5, -2]])
    with pytest.raises(ConfigError, match=r"field 'd': torch has no dtype for datetime64\[s\]; cast it in a transform"):
        to_tensors({"d": np.array(["2020-01-01"], "datetime64[s]")})


def is_in_a_slot(tensor):
    """Whether a tensor lies in memory that worker processes write to."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        slots = [line.split()[0].split("-") for line in maps if "memfd:dataload" in line]
    return any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in slots)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into Linux's /proc/self/maps")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_tensors_of_worker_processes_are_views_of_shared_memory_and_may_be_kept():
    values = np.arange(96 * 1024, dtype=np.float64).reshape(96, 1024)
    order = [GlobalShuffle(96, 4).indices(np.arange(96), epoch=epoch) for epoch in range(3)]
    expected = values[np.concatenate(order)].reshape(72, 4, 1024)
    settings = {"num_workers": 1, "executor": "fork", "batch_transform": to_tensors}
    with Loader(MemorySource({"x": values}), batch_size=4, shuffle=True, seed=4, **settings) as loader:
        shared = 0
        for step, batch in enumerate(loader):
            assert np.array_equal(batch["x"].numpy(), expected[step])
            shared += is_in_a_slot(batch["x"])
        assert shared > 24 / 2  # all of them, but for results that come while no slot is free
        del batch
        kept = [batch["x"] for _ in range(2) for batch in loader]
        assert any(map(is_in_a_slot, kept))
    assert np.array_equal(np.stack(kept), expected[24:])


def test_the_place_by_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert distributed_place() == {"rank": 2, "world_size": 4}
    monkeypatch.delenv("RANK")
    with pytest.raises(
        ConfigError, match=r"RANK and WORLD_SIZE are both needed, .* or initialise torch.distributed before"
    ):
        distributed_place()


def test_the_place_by_torch_comes_first(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"a process group has ranks only after .*init_process_group"):
        distributed_place("some group")
    ranks, sizes = {None: 5, "mine": 1, "first": 0, "theirs": -1}, {None: 8, "mine": 2, "first": 2}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", ranks.get)
    monkeypatch.setattr(torch.distributed, "get_world_size", sizes.get)
    assert distributed_place() == {"rank": 5, "world_size": 8}
    assert distributed_place("mine") == {"rank": 1, "world_size": 2}
    assert distributed_place("first") == {"rank": 0, "world_size": 2}
    with pytest.raises(ConfigError, match="this process is not in the process group: pass the group that it reads"):
        distributed_place("theirs")
    with pytest.raises(ConfigError, match="data_dims are dimensions of a DeviceMesh: pass one as group, or leave"):
        distributed_place("mine", data_dims=["dp"])


def test_without_torch_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("dataload.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ImportError, match=r"dataload.torch needs torch: pip install 'dataload\[torch\]' \(or only torch\)"
    ):
        importlib.import_module("dataload.torch")


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


def test_a_dataset_with_a_transform(source):
    dataset = SourceDataset(source, transform=lambda record: record["y"] * 2)
    assert len(dataset) == 10
    assert dataset[3] == 6
    assert list(dataset.__getitems__([1, 2])) == [2, 4]
    assert repr(dataset) == "SourceDataset(MemorySource(10 records))"
    plain = SourceDataset([5, 6])
    assert plain.__getitems__([1, 0]) == [6, 5]
    assert plain[0] == 5


class Mesh:
    """As much of a DeviceMesh as tells a place."""

    def __init__(self, names, shape, at):
        self.mesh_dim_names, self.shape, self.at = names, shape, at

    def get_coordinate(self):
        return self.at


@pytest.mark.parametrize(
    ("mesh", "settings", "expected"),
    [
        (Mesh(("dp", "tp"), (2, 4), (1, 3)), {}, (1, 2)),
        (Mesh(("dp_replicate", "dp_shard", "cp"), (2, 3, 2), (1, 2, 0)), {}, (5, 6)),
        (Mesh(("tp",), (4,), (2,)), {}, (0, 1)),
        (Mesh(("mine", "tp"), (1, 4), (0, 2)), {}, (0, 1)),
        (Mesh(("mine", "tp"), (3, 4), (2, 2)), {"data_dims": ["mine"]}, (2, 3)),
        (Mesh(("mine", "tp"), (2, 4), (1, 2)), {}, "'mine' does not say whether processes along it read different"),
        (Mesh(("dp",), (2,), (0,)), {"data_dims": ["pd"]}, "data_dims has 'pd', .* no such dimension: choose from dp"),
        (Mesh(None, (2,), (0,)), {}, "the dimensions of the mesh have no names: give mesh_dim_names"),
        (Mesh(("dp",), (2,), None), {}, "this process is not in the process group"),
    ],
)
def test_the_place_in_a_mesh(mesh, settings, expected):
    if isinstance(expected, tuple):
        rank, world_size = expected
        assert distributed_place(mesh, **settings) == {"rank": rank, "world_size": world_size}
        return
    with pytest.raises(ConfigError, match=expected):
        distributed_place(mesh, **settings)


@pytest.fixture
def compared(monkeypatch):
    """Pretends that this is one of so many processes; notes what they compare, and says how the others differ."""

    def pretend(processes, **changes):
        found = []

        def gather(parts, values, group=None):
            ((_, facts),) = values
            found.append(facts)
            parts[:] = [values, *([(rank, {**facts, "rank": rank, **changes})] for rank in range(1, len(parts)))]

        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: processes)
        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        return found

    return pretend


def test_loaders_of_several_processes_are_compared_before_the_first_batch(compared, monkeypatch):
    def loader(world_size):
        return Loader(range(8), batch_size=2, shuffle=True, seed=1, rank=0, world_size=world_size)

    check_ranks(loader(3))  # a single process has none to compare with
    for processes, world_size, times in ((2, 2, 1), (1, 1, 0), (2, 1, 0)):
        found = compared(processes)
        batches = DeviceLoader(loader(world_size), "cpu")
        for _ in range(2):
            next(iter(batches))
        assert len(found) == times
    compared(2, seed=3)
    with pytest.raises(ConfigError, match="the loaders of 2 processes do not match:\n  seed: 1 in process 0; 3 in"):
        next(iter(DeviceLoader(loader(2), "cpu")))
    for processes, others in ((9, "1, 2, 3, 4, 5, 6, 7, 8"), (10, "1, 2, 3, 4, 5, 6, 7, 8, ...")):
        compared(processes, seed=3)
        with pytest.raises(ConfigError, match=f"seed: 1 in process 0; 3 in {processes - 1} processes: {others}$"):
            check_ranks(loader(processes))
    compared(3)
    missing = "rank: no process has 3 of 5; 0 in process 0; 1 in process 1; 2 in process 2$"
    with pytest.raises(ConfigError, match=f"the loaders of 3 processes do not match:\n  {missing}"):
        check_ranks(MultiStreamLoader(iter, [[1]], batch_size=1, rank=0, world_size=5))
    monkeypatch.setattr(torch.distributed, "all_gather_object", Mock(side_effect=RuntimeError("closed")))
    with pytest.raises(DataloadError, match=r"could not be compared: a process has ended .*\(closed\)"):
        check_ranks(loader(3))


def test_changes_of_weights_are_compared(compared):
    source = dataload.mix({"a": dataload.RangeSource(50), "b": dataload.RangeSource(50)}, {"a": 1, "b": 1})
    loader = Loader(source, batch_size=2, rank=0, world_size=2)
    batches = iter(loader)
    next(batches)
    loader.change_weights({"a": 1, "b": 3})
    compared(2)
    check_ranks(loader)
    compared(2, **{"changes of weights": "none"})
    message = r"changes of weights: 'step 1 of epoch 0 \([0-9a-f]{6}\)' in process 0; 'none' in process 1"
    with pytest.raises(ConfigError, match=message):
        check_ranks(loader)


def test_the_state_is_one_text():
    loader, resumed = (Loader(RangeSource(9), batch_size=2) for _ in range(2))
    next(iter(loader))
    (text,) = JsonState(loader).state_dict().values()
    assert isinstance(text, str)
    JsonState(resumed).load_state_dict({"json": text})
    assert resumed.state_dict() == loader.state_dict()
    assert repr(JsonState(loader)) == f"JsonState({loader!r})"


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({}, r"the keys \[\]"),
        ({"json": 3}, "3"),
        ({"json": "{"}, "'{'"),
        ({"json": "null"}, "'null'"),
        ({"json": "x" * 200}, r"'x{59} \.\.\.\(122 characters\)\.\.\. x{19}'"),
        ({1: 2, "a": 3}, r"the keys \[1, 'a'\]"),
    ],
)
def test_a_state_of_something_else_is_refused(state, found):
    message = f"this is not a state of a JsonState: expected a dict as JSON text under 'json', found {found}$"
    with pytest.raises(StateMismatchError, match=message):
        JsonState(Loader(RangeSource(9), batch_size=2)).load_state_dict(state)
