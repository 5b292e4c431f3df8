"""Batches of dataload.torch.DataLoader compared with those of torch's own, and what it does beyond."""

import copy
import functools
import random
import weakref
from collections import OrderedDict, namedtuple

import numpy as np
import pytest

import dataload
from dataload import ConfigError, MemorySource, StateMismatchError

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402 - skipped where torch is missing

from dataload.torch import DataLoader  # noqa: E402

Point = namedtuple("Point", ["x", "y"])


class Made(data.Dataset):
    """Eleven records that a function makes."""

    def __init__(self, make, length=11):
        self.make, self.length = make, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.make(index)


def sample(index):
    return {"x": np.full(3, index, np.float32), "y": index, "t": str(index), "p": (index / 2, [index, b"b"])}


def identity(value):
    return value


def same(ours, theirs):
    """Check that batches are equal, with their types."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        ours, theirs = [*ours.values()], [*theirs.values()]
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(ours, (list, tuple)):
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert ours == theirs


def check(dataset, *args, epochs=2, **settings):
    """Compare with torch's own loader; samplers are copied, with their generators."""
    torch.manual_seed(5)
    theirs = data.DataLoader(dataset, *args, **copy.deepcopy(settings))
    expected = [batch for _ in range(epochs) for batch in theirs]
    torch.manual_seed(5)
    with DataLoader(dataset, *args, **settings) as loader:
        found = [batch for _ in range(epochs) for batch in loader]
        same(found, expected)
        assert len(loader) == len(theirs)


MAKES = {
    "dict": sample,
    "tuple": lambda i: (torch.full((2, 2), i), i, float(i), i % 2 == 0),
    "named tuple": lambda i: Point(np.arange(i, i + 2), Point(str(i), bytes([i]))),
    "ordered dict": lambda i: OrderedDict(a=np.float32(i), b=np.uint8(i), c=np.array(i)),
    "lists": lambda i: [[i, i + 1], ["a", str(i)]],
    "numbers": identity,
    "text": str,
}


@pytest.mark.parametrize("kind", MAKES)
def test_samples_are_collated_as_by_torch(kind):
    check(Made(MAKES[kind]), batch_size=4)


class Left(Made):
    """A data set that leaving destroys, as those of Hugging Face."""

    def __enter__(self):
        raise AssertionError("the loader entered it")

    def __exit__(self, *_):
        del self.make


def test_a_data_set_is_neither_entered_nor_left():
    for workers in (0, 1):
        dataset = Left(identity)
        check(dataset, batch_size=4, num_workers=workers)
        assert dataset[3] == 3


COLUMNS = {
    "source of arrays": lambda: MemorySource(
        {"x": np.arange(33.0, dtype=np.float32).reshape(11, 3), "y": np.arange(11), "u": np.arange(11, dtype=np.uint8)}
    ),
    "source of records": lambda: MemorySource(
        [{"x": np.full(2, i, np.int8), "y": i / 2, "t": str(i), "l": [i, i + 1], "b": b"x" * i} for i in range(11)]
    ),
    "source of bytes": lambda: MemorySource([bytes([i]) for i in range(11)]),
    "array": lambda: np.arange(33, dtype=np.int16).reshape(11, 3),
    "numbers": lambda: np.arange(11, dtype=np.float32),
    "tensor": lambda: torch.arange(22).reshape(11, 2),
    "tensor data set": lambda: data.TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11)),
    "dtypes that numpy does not have": lambda: data.TensorDataset(torch.arange(11).to(torch.bfloat16)),
    "list": lambda: list(range(11)),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_give_the_batches_that_torch_makes_of_records(kind):
    check(COLUMNS[kind](), batch_size=4)
    check(COLUMNS[kind](), batch_size=4, drop_last=True, num_workers=1)


def test_columns_are_read_in_threads_without_records(monkeypatch):
    array = np.arange(22).reshape(11, 2)
    loader = DataLoader(array, 4, num_workers=2)
    assert loader.statistics().executor == "threads"
    assert loader.dataset is array
    for other in (Made(sample), torch.ones(3, requires_grad=True), torch.eye(3).to_sparse()):
        assert DataLoader(other, num_workers=2).statistics().executor == "processes"
    assert DataLoader(array, num_workers=2, collate_fn=identity).statistics().executor == "processes"
    assert DataLoader(array, num_workers=2, worker_init_fn=identity).statistics().executor == "processes"
    source = MemorySource({"x": array})
    monkeypatch.setattr(MemorySource, "_read", None)
    same(next(iter(DataLoader(source, 4))), {"x": torch.from_numpy(array[:4])})


class Evens:
    """A sampler as people write them."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(np.arange(0, self.length, 2))

    def __len__(self):
        return self.length // 2


class TwoSizes(data.Sampler):
    """A batch sampler with batches of different sizes, shuffled by torch's global generator."""

    def __iter__(self):
        order = torch.randperm(9).tolist()
        yield order[:2]
        yield order[2:5]
        yield (-1, 0)

    def __len__(self):
        return 3


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


NUMBERS = Made(identity)
ORDERS = {
    "none": lambda: {"batch_size": 3},
    "sequential": lambda: {"batch_size": 3, "sampler": data.SequentialSampler(NUMBERS)},
    "random": lambda: {"batch_size": 3, "sampler": data.RandomSampler(NUMBERS)},
    "random with a generator": lambda: {"sampler": data.RandomSampler(NUMBERS, generator=seeded())},
    "with replacement": lambda: {"batch_size": 4, "sampler": data.RandomSampler(NUMBERS, True, 20), "drop_last": True},
    "subset": lambda: {"batch_size": 2, "sampler": data.SubsetRandomSampler([9, 1, 5], seeded())},
    "weighted": lambda: {"batch_size": 3, "sampler": data.WeightedRandomSampler([1.0] * 11, 8)},
    "batches": lambda: {"batch_sampler": data.BatchSampler(data.SequentialSampler(NUMBERS), 4, True)},
    "random batches": lambda: {"batch_sampler": data.BatchSampler(data.RandomSampler(NUMBERS), 4, False)},
    "one's own": lambda: {"batch_size": 4, "sampler": Evens(12)},
    "a list": lambda: {"batch_size": 2, "sampler": [3, 1, 2, 1, -1]},
    "one's own batches": lambda: {"batch_sampler": TwoSizes()},
    "lists of lists": lambda: {"batch_sampler": [[1, 2], [3], [0, 5, 6]]},
    "no batches": lambda: {"batch_size": None, "sampler": data.RandomSampler(NUMBERS)},
    "shared generator": lambda: {"generator": (g := seeded()), "sampler": data.RandomSampler(NUMBERS, generator=g)},
}


def share(length, rank, **settings):
    return {"batch_size": 2, "sampler": data.DistributedSampler(range(length), 2, rank, **settings)}


ORDERS |= {
    f"rank {rank} of {length} {drops=} {shuffle=}": functools.partial(
        share, length, rank, drop_last=drops, shuffle=shuffle
    )
    for rank in range(2)
    for length, drops in ((10, False), (11, True), (11, False))
    for shuffle in (False, True)
}


@pytest.mark.parametrize("kind", ORDERS)
def test_the_orders_of_samplers_are_those_of_torch(kind):
    length = {"one's own": 12}.get(kind, 10 if "of 10" in kind else 11)
    check(list(range(length)), **ORDERS[kind]())


@pytest.mark.parametrize("name", ["random", "random with a generator", "one's own batches", "weighted", "subset"])
def test_a_sampler_that_was_drawn_resumes_at_any_step(name):
    torch.manual_seed(0)
    whole = DataLoader(NUMBERS, **ORDERS[name]())
    iterator = iter(whole)
    before = [next(iterator)]
    state = whole.state_dict()
    rest = [batch.tolist() for batch in iterator]
    after = [batch.tolist() for batch in whole] if "generator" in name or name == "subset" else None
    torch.manual_seed(77)
    resumed, untouched = DataLoader(NUMBERS, **ORDERS[name]()), torch.get_rng_state()
    resumed.load_state_dict(state)
    assert after is not None or torch.equal(torch.get_rng_state(), untouched)
    assert resumed.state_dict() == state
    assert (resumed.step, len(before)) == (1, 1)
    assert [batch.tolist() for batch in resumed] == rest
    if after is not None:
        assert [batch.tolist() for batch in resumed] == after


def test_a_shuffled_loader_resumes_without_a_seed():
    first = DataLoader(NUMBERS, 4, shuffle=True)
    assert sorted(torch.cat(list(first)).tolist()) == list(range(11))
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    second = DataLoader(NUMBERS, 4, True)
    second.load_state_dict(state)
    assert second.epoch == 1
    same(list(second), list(iterator))
    torch.manual_seed(1)
    one, other = (DataLoader(NUMBERS, 11, shuffle=True) for _ in range(2))
    assert not torch.equal(next(iter(one)), next(iter(other))), "each draws a seed of its own"
    by_generator = [next(iter(DataLoader(NUMBERS, 11, shuffle=True, generator=seeded()))) for _ in range(2)]
    assert torch.equal(*by_generator)


def test_a_sampler_that_begins_anew_when_its_iterator_is_iterated():
    """As Lightning's wrapper of the batch sampler of `predict` does."""

    class Anew:
        def __iter__(self):
            self.left = iter([[0, 1], [2, 3], [4]])
            return self

        def __next__(self):
            return next(self.left)

        def __len__(self):
            return 3

    check([*range(5)], batch_sampler=Anew())


def test_a_distributed_sampler_decides_the_epoch():
    sampler = data.DistributedSampler(NUMBERS, 2, 1, shuffle=True)
    loader = DataLoader(NUMBERS, 2, sampler=sampler, num_workers=1, persistent_workers=True)
    for epoch in (0, 0, 3):
        sampler.set_epoch(epoch)
        iterator = iter(loader)
        found = [next(iterator)]
        state = loader.state_dict()
        found += iterator
        assert torch.cat(found).tolist() == list(sampler)
    assert state["sampler"]["epoch"] == 3
    loader.set_epoch(5)
    assert sampler.epoch == 5
    loader.load_state_dict(state)
    assert sampler.epoch == 3
    same(list(loader), found[1:])
    loader.close()


def test_ranks_in_index_order_resume_with_another_number_of_ranks():
    def rank(number, ranks):
        return DataLoader(range(12), 2, sampler=data.DistributedSampler(range(12), ranks, number, shuffle=False))

    before = rank(0, 2)
    next(iter(before))
    state = before.state_dict()
    after = rank(1, 4)
    after.load_state_dict(state)
    assert [batch.tolist() for batch in after] == [[5, 9]]


def test_past_batches_are_those_of_the_order_that_was_drawn():
    loader = DataLoader(NUMBERS, 3, sampler=data.RandomSampler(NUMBERS))
    for epoch in range(2):
        found = list(loader)
        same([loader.batch(epoch, step) for step in range(4)], found)
    with pytest.raises(
        ConfigError, match="RandomSampler draws its order when an epoch begins, so the order of epoch 0 is "
    ):
        loader.batch(0, 1)


class Unseeded(Evens):
    """A sampler whose order nothing shows."""

    def __iter__(self):
        return iter(random.sample(range(self.length), self.length // 2))


def test_a_refused_state_leaves_the_sampler_alone():
    sampler = data.DistributedSampler(NUMBERS, 2, 1)
    sampler.set_epoch(2)
    loader = DataLoader(NUMBERS, 2, sampler=sampler)
    other = DataLoader(range(9), 2, sampler=data.DistributedSampler(range(9), 2, 1))
    next(iter(other))
    with pytest.raises(StateMismatchError):
        loader.load_state_dict(other.state_dict())
    assert sampler.epoch == 2
    assert torch.cat(list(loader)).tolist() == list(sampler)
    generator = seeded()
    loader = DataLoader(NUMBERS, 2, sampler=data.RandomSampler(NUMBERS, generator=generator))
    expected, state = generator.get_state(), DataLoader(range(9), 2, sampler=data.RandomSampler(range(9))).state_dict()
    with pytest.raises(StateMismatchError):
        loader.load_state_dict({**state, "sampler": loader.state_dict()["sampler"] | {"digest": "another"}})
    assert torch.equal(generator.get_state(), expected)


class Numbered(list):
    """Indices, or lists of them, as a sampler gives them."""


@pytest.mark.parametrize("argument", ["sampler", "batch_sampler"])
def test_states_of_0_2_count_negative_indices_from_the_start(argument):
    def order(first):
        return {argument: Numbered([1, first, 4] if argument == "sampler" else [[1, first], [4, 0]])}

    saved = DataLoader(Made(sample), **order(10))
    next(iter(saved))
    resumed = DataLoader(Made(sample), **order(-1))
    resumed.load_state_dict(saved.state_dict())
    assert len(list(resumed)) == len(saved) - 1


def test_an_order_that_cannot_be_had_again_is_refused():
    loader = DataLoader(range(10), 2, sampler=Unseeded(10))
    next(iter(loader))
    random.seed(0)
    state = loader.state_dict()
    for changed, message in (
        (state, r"Unseeded gives another order than when the state was saved, so the "),
        (
            dataload.Loader(range(10), batch_size=2).state_dict(),
            r"not a state of a dataload.torch.DataLoader: it has no seed",
        ),
        ({**state, "sampler": {"seed": loader.seed, "epoch": "x"}}, "sampler epoch must be an integer, found 'x'"),
        (
            {**state, "sampler": {"seed": loader.seed, "generator": "AAAA"}},
            "torch.Generator cannot be restored: .*(size|gen)",
        ),
        (DataLoader(range(9), 4, True).state_dict(), "saved with other data"),
    ):
        with pytest.raises(StateMismatchError, match=message):
            loader.load_state_dict(changed)
        assert loader.state_dict() == state, "a refused state changes nothing"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": iter([1])}, r"list_iterator has no __len__, so its epoch might never end: a sampler is an iter"),
        ({"batch_sampler": 3}, r"int has no __iter__: a sampler is an iterable of indices with a length"),
        ({"sampler": [1], "shuffle": True}, "sampler option is mutually exclusive with shuffle"),
        ({"batch_sampler": [[1]], "drop_last": True}, "batch_sampler option is mutually exclusive"),
        ({"prefetch_factor": 2}, "prefetch_factor option could only be specified in multiprocessing"),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, "should specify a valid start method"),
    ],
)
def test_wrong_arguments_are_refused_when_it_is_built(settings, message):
    with pytest.raises(ValueError, match=message):
        DataLoader(NUMBERS, **settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader("train.tar", 4), r"a path is not a source: pass dataload.open\('train.tar'\)"),
        (lambda: DataLoader(data.Dataset(), 4), "no __len__"),
        (lambda: DataLoader(np.arange(11), sampler=[0, 11]), r"must give integers in \[0, 11\): index 11 is out"),
        (lambda: DataLoader(np.arange(11), sampler=[(0, 1)]), r"integers in \[0, 11\): .* 'tuple' object cannot be"),
        (lambda: DataLoader(NUMBERS, batch_sampler=[0]), "must give lists of integers: 'int' object is not iterable"),
    ],
)
def test_what_cannot_be_read_is_refused(make, message):
    with pytest.raises((ConfigError, TypeError), match=message):
        next(iter(make()))


def test_a_dict_of_columns_is_a_data_set_and_a_sampler_may_choose_from_one_that_has_grown():
    assert DataLoader({"x": np.arange(3)}, 2).dataset[2] == {"x": 2}
    rows = list(range(4))
    loader = DataLoader(rows, 2, sampler=[3, 1])
    rows.append(4)
    assert [batch.tolist() for batch in loader] == [[3, 1]]


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_may_change_between_epochs(workers):
    loader = DataLoader(dataset := data.TensorDataset(torch.arange(40)), 2, num_workers=workers)
    for added in range(3):
        assert torch.cat([rows for (rows,) in loader]).tolist() == [*range(added, 40 + added)]
        dataset.tensors[0].add_(1)
        dataset.tensors = (dataset.tensors[0].clone(),)


def test_a_collate_fn_that_is_set_later_is_refused():
    loader = DataLoader(NUMBERS, 2)
    loader.collate_fn = len
    with pytest.raises(ConfigError, match=r"^collate_fn was set after the loader was built: pass it to DataLoader$"):
        list(loader)


class Told(data.Dataset):
    """Records that say what the worker knows."""

    value = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        info = data.get_worker_info()
        own = info is not None and info.dataset is self
        return [index, self.value, -1 if info is None else info.id, 0 if info is None else info.num_workers, own]


def test_workers_are_set_up_as_in_torch():
    dataset = Told()

    def init(worker):
        dataset.value += 10 * (worker + 1)
        random.seed(0)

    assert torch.cat(next(iter(DataLoader(dataset)))).tolist() == [0, 0, -1, 0, 0]
    loader = DataLoader(dataset, 4, num_workers=1, worker_init_fn=init, multiprocessing_context="fork")
    for value in (1, 2):
        dataset.value = value
        (batch,) = loader
        assert [column.tolist() for column in batch] == [[0, 1, 2, 3], [10 + value] * 4, [0] * 4, [1] * 4, [True] * 4]
    assert dataset.value == 2
    keeps = DataLoader(dataset, 4, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    for value in (1, 2):
        dataset.value = value
        assert next(iter(keeps))[1].tolist() == [1] * 4
    keeps.close()


@pytest.mark.parametrize("stream", [False, True])
def test_the_loader_keeps_no_batch_that_the_loop_has_dropped(stream):
    class Batch(list):
        """A list that can be referred to weakly."""

    dataset = Iterated() if stream else Made(identity, 4)
    iterator = iter(DataLoader(dataset, 2, collate_fn=Batch))
    kept = weakref.ref(next(iterator))
    assert kept() is None


class Iterated(data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_pinned_batches_keep_their_types(monkeypatch):
    from dataload.torch import dataloader

    pinned = []
    monkeypatch.setattr(dataloader, "pinned", lambda batch: pinned.append(batch) or batch)
    for available, pins in ((True, False), (False, True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert len([*DataLoader(range(3), 3, pin_memory=pins), *DataLoader(np.arange(3), 3, pin_memory=pins)]) == 2
    assert not pinned
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (batch,) = DataLoader(range(3), 3, pin_memory=True)
    (columns,) = DataLoader(np.arange(3), 3, pin_memory=True)
    assert [part.tolist() for part in pinned] == [[0, 1, 2], [0, 1, 2]]
    assert torch.equal(batch, columns)


@pytest.mark.skipif(not hasattr(data, "IterDataPipe"), reason="torch has no DataPipes")
def test_a_data_pipe_is_read_by_torch():
    pipe = data.datapipes.iter.IterableWrapper(range(5))
    with pytest.warns(UserWarning, match="torch's own DataLoader reads a DataPipe"):
        loader = DataLoader(pipe, 2, snapshot_every_n_steps=3)
    assert type(loader) is data.DataLoader
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert isinstance(type("Own", (DataLoader,), {})(pipe, 2), DataLoader)


def test_it_is_a_loader_of_both_libraries():
    with DataLoader(NUMBERS, 4, True, num_workers=0) as loader:
        assert isinstance(loader, data.DataLoader)
        assert isinstance(loader, dataload.Loader)
        assert isinstance(loader.sampler, data.RandomSampler)
        assert isinstance(loader.batch_sampler, data.BatchSampler)
        assert (loader.batch_size, loader.drop_last, loader.num_workers, loader.timeout) == (4, False, 0, 0)
        assert loader.collate_fn is data.default_collate
        with pytest.raises(ValueError, match="batch_size attribute should not be set"):
            loader.batch_size = 3
        assert repr(loader) == "DataLoader(11 records, 4 rows per step, epoch 0, step 0)"
    assert repr(DataLoader(data.TensorDataset(torch.arange(3)), num_workers=0).source) == "Tensor of 3 rows"
