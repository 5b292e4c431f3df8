"""The samples of the Speechmatics eBook give what its own code gives on torch's loader."""

import itertools
import random

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader as TorchDataLoader  # noqa: E402 - skipped where torch is missing
from torch.utils.data import IterableDataset  # noqa: E402

from dataload.compat.speechmatics import MultiStreamDataLoader, plot_timings, split_datasets  # noqa: E402
from dataload.torch import DataLoader  # noqa: E402

LISTS = [[12, 13, 14, 15, 16, 17], [27, 28, 29], [31, 32, 33, 34, 35, 36, 37, 38, 39], [40, 41, 42, 43]]


class Rows(IterableDataset):
    """The data set of the eBook: each row goes through all lists in its own order, without end."""

    split_datasets = classmethod(split_datasets)

    def __init__(self, data_list, batch_size):
        self.data_list, self.batch_size = data_list, batch_size

    def shuffled(self, row):
        return random.Random(row).sample(self.data_list, len(self.data_list))

    def __iter__(self):
        rows = (itertools.cycle(self.shuffled(row)) for row in range(self.batch_size))
        return zip(*map(itertools.chain.from_iterable, rows), strict=False)


def batches_of_the_book(datasets, count):
    """What the eBook's `MultiStreamDataLoader` does."""
    parts = zip(*[TorchDataLoader(each, num_workers=1, batch_size=None) for each in datasets], strict=False)
    return [list(itertools.chain(*batch)) for batch in itertools.islice(parts, count)]


def test_data_sets_share_the_rows_evenly():
    for size, most, parts in ((4, -1, 1), (4, 0, 1), (4, 1, 1), (4, 3, 2), (4, 4, 4), (4, 5, 4), (6, 5, 3), (6, 1, 1)):
        made = split_datasets(lambda lists, batch_size: (lists, batch_size), LISTS, size, most)
        assert made == [(LISTS, size // parts)] * parts


@pytest.mark.parametrize("most", [0, 2, *(pytest.param(most, marks=pytest.mark.slow_suite) for most in (1, 3, 4))])
def test_batches_are_those_of_the_book(most):
    datasets = Rows.split_datasets(LISTS, batch_size=4, max_workers=most)
    assert [each.batch_size for each in datasets] == {0: [4], 1: [4], 2: [2, 2], 3: [2, 2], 4: [1] * 4}[most]
    loader = MultiStreamDataLoader(datasets)
    assert [each.num_workers for each in loader.loaders] == [1] * len(datasets)
    found = list(itertools.islice(loader, 9))
    assert found == batches_of_the_book(datasets, 9)
    resumed = MultiStreamDataLoader(datasets)
    iterator = iter(loader)
    next(iterator)
    resumed.load_state_dict(loader.state_dict())
    assert list(itertools.islice(resumed, 2)) == list(itertools.islice(iterator, 2))
    loader.loaders = [[[1], [2]], [[3]]]
    assert list(loader) == [[1, 3]], "the shortest ends it"


@pytest.mark.slow_suite
def test_timings_are_a_timeline():
    pytest.importorskip("matplotlib")
    loader = MultiStreamDataLoader(Rows.split_datasets(LISTS, batch_size=4, max_workers=2))
    for each in (loader, DataLoader(list(range(17)), batch_size=4, num_workers=0)):
        figure = plot_timings(each, model_time=0, n_batches=4)
        assert "4 batches, 0 s of model" in " ".join(text.get_text() for text in figure.texts)
        assert figure.axes[0].collections[2:], "the spans of steps"
        workers = [label.get_text().split("\n")[0] for label in figure.axes[0].get_yticklabels()]
        assert workers[:-1] == (["worker 0", "worker 1"] if each is loader else ["consumer makes"])
