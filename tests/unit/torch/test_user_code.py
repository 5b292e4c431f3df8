"""Data sets of one's own in dataload.torch.DataLoader: workers in turns, seeds, errors, and what torch accepts."""
# ruff: noqa: NPY002 - the global generator is what is tested

import copy
import itertools
import multiprocessing
import os
import pickle
import random
import signal
from multiprocessing import resource_sharer

import numpy as np
import pytest

from dataload import WorkerError

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402 - skipped where torch is missing

from dataload.torch import DataLoader  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # workers import torch
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

TorchDataLoader = data.DataLoader
FORK = {"multiprocessing_context": "fork", "timeout": 60}


def workers(count, **settings):
    return {"num_workers": count, **(FORK if count else {}), **settings}


class Made(data.Dataset):
    """Records that a function makes of their index."""

    def __init__(self, make, length=8):
        self.make, self.length = make, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.make(index)


def lists(batches):
    return [batch.tolist() if hasattr(batch, "tolist") else batch for batch in batches]


def test_it_may_take_the_place_of_torchs_class(monkeypatch):
    monkeypatch.setattr(data, "DataLoader", DataLoader)
    monkeypatch.setattr(torch.utils.data.dataloader, "DataLoader", DataLoader)
    assert lists(data.DataLoader(range(3), 2)) == [[0, 1], [2]]
    assert lists(data.DataLoader(np.arange(3), 2, shuffle=False)) == [[0, 1], [2]]
    assert DataLoader[int].__origin__ is DataLoader


def test_the_iterator_has_the_length_and_the_processes_of_torchs():
    iterator = iter(DataLoader(Made(int), 3, **workers(2)))
    assert len(iterator) == 3
    processes = iterator._workers
    assert [process.is_alive() for process in processes] == [True, True]
    assert len(list(iterator)) == 3
    for process in processes:
        process.join(60)
        process.terminate()  # which does nothing now
    assert [process.is_alive() for process in processes] == [False, False]
    iterator = iter(DataLoader(Made(int), 3, **workers(1)))
    (process,) = iterator._workers
    process.terminate()
    process.join(60)
    assert not process.is_alive()
    assert len(iter(DataLoader(np.arange(8), 3))) == 3


class Doubled:
    """A data set without a length, of any integers."""

    def __getitem__(self, index):
        return 2 * index


SAMPLERS = {
    "lists without batch size": lambda: (Made(sum), {"batch_size": None, "sampler": [[1, 2], [3], [0, 5, 6]]}),
    "tuples": lambda: (Made(lambda key: key[0] * 10 + key[1]), {"sampler": [(1, 2), (3, 4), (0, 5)], "batch_size": 2}),
    "batches of tuples": lambda: (Made(sum), {"batch_sampler": [[(1, 2), (3, 4)], [(0, 5)]]}),
    "texts": lambda: ({"a": 1, "b": 2, 3: 4}, {"sampler": ["a", "b", "a"], "batch_size": 2}),
    "beyond the length": lambda: (Made(int), {"sampler": [7, 8, 100, -1], "batch_size": 2}),
    "no length": lambda: (Doubled(), {"sampler": [4, 2, 9], "batch_size": 2}),
    "no length, in batches": lambda: (Doubled(), {"batch_sampler": [[4, 2], [9]]}),
}


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_samplers_may_give_what_the_data_set_takes(kind, count):
    dataset, settings = SAMPLERS[kind]()
    expected = lists(TorchDataLoader(dataset, **settings))
    loader = DataLoader(dataset, **settings, **workers(count))
    iterator = iter(loader)
    assert [lists([next(iterator)])[0]] == expected[:1]
    resumed = DataLoader(dataset, **copy.deepcopy(settings))
    resumed.load_state_dict(loader.state_dict())
    assert lists(resumed) == lists(iterator) == expected[1:]


def test_a_data_set_that_grows_is_read_whole_in_the_next_epoch():
    rows = [0, 1, 2, 3]
    for settings in ({}, {"shuffle": True}):
        loader = DataLoader(rows, 2, **settings)
        list(loader)
        rows.append(len(rows))
        assert len(loader) == -(-len(rows) // 2)
        assert loader.epoch == 1
        assert sorted(itertools.chain(*lists(loader))) == rows


def test_a_batch_sampler_gives_the_order_that_is_served_next():
    loader = DataLoader(Made(int, 9), 2, shuffle=True)
    assert isinstance(loader.sampler, data.RandomSampler)
    passes = [list(loader.sampler) for _ in range(3)]
    assert passes == [[*itertools.chain(*lists(loader))] for _ in range(3)]
    loader.set_epoch(0)
    for _ in range(2):
        assert list(loader.batch_sampler) == lists(loader)
    state = loader.state_dict()
    later = lists(loader)
    loader.load_state_dict(state)
    assert list(loader.batch_sampler) == later
    loader.set_epoch(0)
    assert list(loader.batch_sampler) == lists(loader)
    # Another library's generator, which is the same in all processes, decides for torch's loaders over its sampler.
    loader.sampler.generator = torch.Generator().manual_seed(3)
    expected = data.RandomSampler(range(9), generator=torch.Generator().manual_seed(3))
    assert list(loader.sampler) == list(expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow_suite)])
def test_what_only_torch_can_send_comes_from_a_worker(method):
    parts = [torch.nested.nested_tensor([torch.full((3,), float(i))]) for i in range(2)]
    found = list(DataLoader(parts, 1, collate_fn=list, num_workers=1, multiprocessing_context=method))
    assert [batch[0].to_padded_tensor(0).tolist() for batch in found] == [[[0.0] * 3], [[1.0] * 3]]
    resource_sharer.stop(60)


class Holds(data.Dataset):
    """A data set with a tensor."""

    def __init__(self):
        self.tensor = torch.arange(40_000)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.tensor[index], self.tensor.is_shared()


@pytest.mark.slow_suite
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_tensors_of_a_data_set_are_shared_with_workers(method):
    dataset = Holds()
    (batch,) = DataLoader(dataset, 2, num_workers=1, multiprocessing_context=method)
    assert [column.tolist() for column in batch] == [[0, 1], [True, True]]
    assert dataset.tensor.is_shared()
    resource_sharer.stop(60)  # of multiprocessing: its thread has handed the memory over


class Together(data.Dataset):
    """Records that are read when all workers read one."""

    def __init__(self, count):
        self.barrier = multiprocessing.get_context("fork").Barrier(count)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.barrier.wait(60)
        return index


def test_workers_take_turns():
    loader = DataLoader(
        Made(lambda _: data.get_worker_info().id), batch_sampler=[[3, 1], [2], [0], [1, 5]], **workers(3)
    )
    assert [batch.unique().item() for batch in loader] == [0, 1, 2, 0]
    assert lists(DataLoader(Together(3), **workers(3))) == [[i] for i in range(6)]
    out_of_order = DataLoader(Together(2), prefetch_factor=1, in_order=False, **workers(2))
    assert sorted(lists(out_of_order)) == [[i] for i in range(6)]


def draw(_):
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_random_items_do_not_depend_on_the_number_of_workers():
    torch.manual_seed(5)
    before = draw(0)
    torch.manual_seed(5)
    found = []
    for count in (0, 1, 2):
        torch.manual_seed(7)
        random.seed(1)
        np.random.seed(1)
        loader = DataLoader(Made(draw), 3, **workers(count))
        iterator = iter(loader)
        next(iterator)
        resumed = DataLoader(Made(draw), 3)
        resumed.load_state_dict(loader.state_dict())
        found.append([torch.stack(batch).tolist() for batch in loader])
        state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        rest = [torch.stack(batch).tolist() for batch in resumed]
        assert state == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        assert len(rest) == 2
        assert before != draw(0)
    assert found[0] == found[1] == found[2]
    assert len({str(values) for values in found[0]}) == 3


@pytest.mark.parametrize("numbers", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_generators_go_on_between_batches_as_without_a_loader(numbers, kind):
    """Normal numbers are drawn in pairs, of which the generator keeps the second one."""
    own = np.random.get_bit_generator()
    try:
        found = []
        for loader in ([None] * 3, DataLoader(Normals(), 1)):
            np.random.set_bit_generator(kind(7))
            random.seed(7)
            drawn = [(np.random.randn(numbers).tolist(), random.gauss(0, 1)) for _ in loader]
            found.append((drawn, random.getstate()))
    finally:
        np.random.set_bit_generator(own)
    assert found[0] == found[1]


class Normals(data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.random.randn(3) + random.gauss(0, 1)


def test_what_worker_init_fn_seeds_stays():
    def init(number):
        np.random.seed(number)

    loader = DataLoader(Made(lambda _: np.random.rand()), 2, worker_init_fn=init, **workers(2))
    expected = [np.random.RandomState(number).rand(4).tolist() for number in range(2)]
    found = lists(loader)
    assert [found[0] + found[2], found[1] + found[3]] == expected
    with pytest.warns(UserWarning, match="worker_init_fn seeds a random generator, so the loader does not") as warned:
        loader.state_dict()
    assert [each.filename for each in warned] == [__file__]


class Refused(Exception):
    """An error with an attribute and a constructor of its own."""

    def __init__(self, code, *, reason=""):
        super().__init__(code)
        self.code, self.reason = code, reason


def fail(index):
    if index == 2:
        raise Refused(7, reason="full")
    if index == 3:
        raise FileNotFoundError(2, "gone", "x.bin")
    if index == 4:
        raise StopIteration
    return {0: 1}[index % 5 and 1]


@pytest.mark.parametrize("count", [0, 2])
def test_an_error_is_of_its_own_class_and_the_next_batch_follows(count):
    loader = DataLoader(Made(fail, 6), **workers(count))
    iterator, errors, positions, batches = iter(loader), [], [], 0
    while True:
        try:
            next(iterator)
            batches += 1
        except StopIteration:
            break
        except WorkerError as error:
            errors.append(error)
            positions.append(loader.state_dict()["position"])
    assert batches == 2
    assert [error.step for error in errors] == positions == [1, 2, 3, 4]
    key, refused, missing, _ = errors
    for error, kind in zip(errors, (KeyError, Refused, FileNotFoundError, StopIteration), strict=True):
        assert isinstance(error.__cause__, kind)
        assert str(error).startswith(f"step {error.step} of epoch 0 failed in read on index {error.step}: ")
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), copied.step) == (type(error), str(error), error.step)
        again = type(error)("text")
        assert (str(again), again.step, again.epoch, again.indices, again.worker) == ("text", -1, -1, (), "main")
        assert isinstance(error, kind) == (kind is not StopIteration)
    assert (refused.code, refused.reason) == (7, "full")
    assert (missing.errno, missing.filename) == (2, "x.bin")
    assert pickle.loads(pickle.dumps(missing)).errno == 2
    assert (loader.epoch, key.worker) == (1, "MainThread" if not count else "dataload-1")


def hang(_):
    while True:
        signal.pause()  # returns after the signal that asks for the stack


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (die, {}, r"DataLoader worker \(pid \d+\) is killed by signal: "),
        (hang, {"timeout": 1}, "DataLoader timed out after 1 seconds"),
    ],
)
@pytest.mark.filterwarnings("ignore:no batch for:RuntimeWarning")
@pytest.mark.parametrize("begins", [False, True], ids=["reads", "begins"])
def test_a_lost_worker_is_reported_in_torchs_words_too(make, settings, message, begins):
    data_set = type("Stream", (data.IterableDataset,), {"__iter__": make})() if begins else Made(make)
    with pytest.raises(WorkerError, match=message):
        list(DataLoader(data_set, num_workers=1, multiprocessing_context="fork", **settings))
