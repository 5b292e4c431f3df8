"""The states of data sets, iterators and samplers in the state of dataload.torch.DataLoader."""

import itertools
import json

import pytest
from resumable import Resumable
from samples import sampled

from dataload import StateMismatchError

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402 - skipped where torch is missing

from dataload.torch import DataLoader  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # workers import torch
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def workers(count):
    return {"num_workers": count, **({"multiprocessing_context": "fork", "timeout": 60} if count else {})}


class Shared(data.IterableDataset):
    """Numbers that the workers share, without a state."""

    def __init__(self, length=13):
        self.length = length

    def numbers(self):
        info = data.get_worker_info()
        return range(self.length) if info is None else range(info.id * 3, self.length, info.num_workers)

    def __iter__(self):
        return iter(self.numbers())


class WithIterator(Shared):
    def __iter__(self):
        return Resumable(self.numbers())


class WithState(Shared):
    """The data set itself has a state, which counts its epochs, too."""

    at, epoch, resumed = 0, 0, None

    def __iter__(self):
        self.at, self.resumed = self.resumed or 0, None
        for number in self.numbers()[self.at :]:
            self.at += 1
            yield number, self.epoch
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.resumed, self.epoch = state["at"], state["epoch"]


class Uneven(Shared):
    """The first worker has most of the data."""

    def numbers(self):
        return range(data.get_worker_info().id * 30, 61, 3)


class Random(Shared):
    def __iter__(self):
        return (torch.rand(()).item() for _ in self.numbers())


class Begins(Shared):
    """An iterator of its own, which `iter` begins again."""

    def __iter__(self):
        self.rest = iter(self.numbers())
        return self

    def __next__(self):
        return next(self.rest)


def flat(batches):
    return [repr(batch) for batch in batches]


def make(kind, count, **settings):
    torch.manual_seed(3)
    return DataLoader(kind(), batch_size=2, **workers(count), **settings)


KINDS = [*itertools.product([Shared, WithIterator, WithState, Random], [0, 2]), (Uneven, 3)]


@pytest.mark.parametrize(("kind", "count"), sampled(KINDS, [*KINDS[::2], (Shared, 2), (WithState, 2)]))
def test_a_stream_resumes_at_any_step(kind, count):
    whole = make(kind, count)
    expected = flat(whole)
    before = make(kind, count)
    iterator, states = iter(before), [before.state_dict()]
    for _ in expected:
        next(iterator)
        states.append(json.loads(json.dumps(before.state_dict())))
    assert kind is Uneven or [state["position"] for state in states] == [*range(len(states))]
    list(iterator)
    for step, state in enumerate(states):
        if count and step != 4:  # workers take their time to start
            continue
        resumed = make(kind, count)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert flat(resumed) == expected[step:]
    assert states[1]["kind"] == "stateful"


def test_a_stream_gives_torchs_batches():
    for kind, count in ((Shared, 0), (WithIterator, 0), (Begins, 0), (Begins, 2)):
        settings = {} if count else {"drop_last": True}
        theirs = data.DataLoader(kind(), batch_size=2, **workers(count), **settings)
        assert flat(make(kind, count, **settings)) == flat(theirs)
    assert list(DataLoader(Shared(3), batch_size=None)) == [0, 1, 2]


@pytest.mark.parametrize("count", [0, 2])
def test_the_end_of_an_epoch_is_the_start_of_the_next_one(count):
    settings = {"persistent_workers": True} if count else {}
    whole = make(WithState, count, **settings)
    first = flat(whole)
    state = whole.state_dict()
    assert (whole.epoch, whole.step, state["epoch"]) == (1, 0, 1)
    later = [flat(whole), flat(whole)]
    assert len({*first, *later[0]}) == 2 * len(first)
    resumed = make(WithState, count, **settings)
    next(iter(resumed))
    resumed.load_state_dict(state)
    assert [flat(resumed), flat(resumed)] == later
    whole.close()
    resumed.close()


class Short(data.IterableDataset):
    """The first worker has less than the second one."""

    def __iter__(self):
        return iter(range(2 + 4 * data.get_worker_info().id))


def test_a_worker_that_ends_is_not_a_step():
    with DataLoader(Short(), batch_size=2, **workers(2)) as loader:
        assert [(loader.step, b.tolist()) for b in loader] == [(1, [0, 1]), (2, [0, 1]), (3, [2, 3]), (4, [4, 5])]


def test_states_may_come_from_every_few_steps():
    taken, settings = 5, {"snapshot_every_n_steps": 3}
    expected = flat(make(WithIterator, 2, **settings))
    before = make(WithIterator, 2, **settings)
    iterator = iter(before)
    for _ in range(taken):
        next(iterator)
    state = before.state_dict()
    assert state["_steps_since_snapshot"] == 2
    resumed = make(WithIterator, 2, **settings)
    resumed.load_state_dict(state)
    assert flat(resumed) == expected[taken:]


class Records(data.Dataset):
    """A map-style data set with a state: how often it was read."""

    reads = 0

    def __len__(self):
        return 7

    def __getitem__(self, index):
        self.reads += 1
        return index, self.reads

    def state_dict(self):
        return {"reads": self.reads}

    def load_state_dict(self, state):
        self.reads = state["reads"]


@pytest.mark.parametrize("count", [0, 2])
def test_a_map_style_data_set_keeps_its_state(count):
    expected = flat(make(Records, count))
    before = make(Records, count)
    iterator = iter(before)
    next(iterator)
    next(iterator)
    state = before.state_dict()
    list(iterator)
    resumed = make(Records, count)
    resumed.load_state_dict(state)
    assert flat(resumed) == expected[2:]
    own = state["_snapshot"]["_worker_snapshots"]["worker_0"] if count else state
    assert own["dataset_state"] == {"reads": 4 // max(1, count)}


class Turned(data.Sampler):
    """A sampler that continues where its state says, and otherwise begins later in each epoch."""

    def __init__(self):
        self.first = self.at = 0

    def __len__(self):
        return 5

    def __iter__(self):
        while self.at < 5:
            self.at += 1
            yield (self.first + self.at - 1) % 7
        self.at, self.first = 0, self.first + 1

    def state_dict(self):
        return {"first": self.first, "at": self.at}

    def load_state_dict(self, state):
        self.first, self.at = state["first"], state["at"]


@pytest.mark.parametrize("count", [0, 1])
def test_a_sampler_keeps_its_state(count):
    def loader():
        return DataLoader(range(7), 2, sampler=Turned(), **workers(count))

    whole = loader()
    expected = [flat(whole), flat(whole), flat(whole)]
    for taken in (1,) if count else range(4):
        before = loader()
        list(before)
        iterator = iter(before)
        for _ in range(taken):
            next(iterator)
        state = json.loads(json.dumps(before.state_dict()))
        assert state["kind"] == "stateful"
        resumed = loader()
        resumed.load_state_dict(state)
        assert flat(resumed) == (expected[1][taken:] or expected[2])
        if taken:
            assert flat(resumed) == (expected[2] if taken < 3 else flat(whole))


def test_a_state_of_other_workers_or_ranks_or_data_is_refused(monkeypatch):
    state = make(Records, 1).state_dict()
    with pytest.raises(StateMismatchError, match="num_workers: 1 in the state, 2 here"):
        make(Records, 2).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="num_workers: 1 in the state, no data set with a state here"):
        DataLoader(range(7), 2).load_state_dict(state)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(StateMismatchError, match=r"rank: \[0, 1\] in the state, \[1, 2\] here"):
        make(Records, 1).load_state_dict(state)
    assert "kind" not in DataLoader(range(7), 2).state_dict(), "other data keep the small state"


class Repeated(data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_workers_that_repeat_the_data_are_reported_with_the_remedy():
    with pytest.warns(
        UserWarning, match=r"each worker gives all of the data\. In __iter__, give each worker its part"
    ) as warned:
        assert len(list(DataLoader(Repeated(), 2, **workers(2)))) == 4
    assert [each.filename for each in warned] == [__file__]
    assert len(list(DataLoader(Repeated(), 2, **workers(1)))) == 2


class Sized(Repeated):
    def __len__(self):
        return 3


def test_more_samples_than_the_length_are_reported_once_it_was_asked_for():
    loader = DataLoader(Sized())
    assert len(list(loader)) == 4
    assert len(loader) == 3
    with pytest.warns(UserWarning, match="has length 3, but 4 samples have been fetched") as warned:
        list(loader)
    assert [each.filename for each in warned] == [__file__]
    with pytest.raises(TypeError, match="len"):
        len(DataLoader(Repeated()))


@pytest.mark.filterwarnings("ignore:the first samples of two workers:UserWarning")
@pytest.mark.parametrize("count", [0, 2])
def test_a_stream_that_fails_says_so(count):
    class Failing(data.IterableDataset):
        def __iter__(self):
            yield 1
            raise OSError(5, "disk")

    iterator = iter(DataLoader(Failing(), **workers(count)))
    found = [next(iterator).item() for _ in range(max(1, count))]
    with pytest.raises(OSError, match=r"failed in read: .*disk") as caught:
        next(iterator)
    assert (found, caught.value.errno) == ([1] * max(1, count), 5)

    class Unready(data.IterableDataset):
        def __iter__(self):
            raise KeyError("no shards")

    with pytest.raises(KeyError, match="no shards"):
        iter(DataLoader(Unready(), **workers(count)))


def test_a_stream_that_was_not_ready_is_asked_again():
    class Late(data.IterableDataset):
        ready = False

        def __iter__(self):
            if not self.ready:
                self.ready = True
                raise KeyError("no shards")
            return iter([1, 2])

    loader = DataLoader(Late())
    with pytest.raises(KeyError, match="no shards"):
        iter(loader)
    assert [*map(int, loader)] == [1, 2]
