"""Sources that were read are read again by workers that are forked, ours and torch's; or the error says what to do."""

import pytest
import tables  # noqa: F401 - tests/support: opens the pipe of pyarrow, which stays
from every_format import small_sets

import dataload
from dataload.sources.registry import built_in_formats

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402 - skipped where torch is missing

from dataload.torch import DataLoader  # noqa: E402


class Sources(list):
    """The first records of each source, as text, or the text of the error."""

    def __getitem__(self, index):
        source = super().__getitem__(index)
        try:
            return repr(source.__getitems__([*range(len(source))][:8]))
        except Exception as error:
            return str(error)


@pytest.mark.slow_suite
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_every_format_is_read_in_forked_workers(tmp_path):
    sets = small_sets(tmp_path)
    assert sets.keys() | {"memory"} == {entry.name for entry in built_in_formats()}
    sources = Sources([dataload.open(path, **options) for path, options in sets.values()] + [[{"x": 1}, {"x": 2}]])
    expected = [sources[index] for index in range(len(sources))]
    settings = {"num_workers": 1, "collate_fn": list, "multiprocessing_context": "fork", "timeout": 30}
    for loader in (data.DataLoader, DataLoader):
        (found,) = loader(sources, len(sources), **settings)
        for name, text, same in zip([*sets, "memory"], found, expected, strict=True):
            assert text == same, name
