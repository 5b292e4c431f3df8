"""Arguments of 0.2 that have another name now."""

import pytest

from dataload import ConfigError, Loader, RangeSource, from_config
from dataload.convert import LocalEngine
from dataload.samplers import BatchSampler, Sequential
from dataload.streams import MultiStreamLoader

BATCHES = BatchSampler(sampler=Sequential(6), batch_size=2)


def test_batches_were_an_argument_of_their_own():
    message = r"^batch_sampler of Loader is deprecated: pass it as sampler=$"
    with pytest.warns(DeprecationWarning, match=message) as warned:
        loader = Loader(RangeSource(6), batch_sampler=BATCHES)
    assert warned[0].filename == __file__
    assert loader.batch_sampler == BATCHES
    with pytest.warns(DeprecationWarning, match=message):
        assert Loader(RangeSource(6), batch_sampler=None, batch_size=4).batch_sampler.batch_size == 4
    with (
        pytest.warns(DeprecationWarning, match=message),
        pytest.raises(ConfigError, match="batch_sampler is the old name of sampler: give only sampler"),
    ):
        Loader(RangeSource(6), batch_sampler=BATCHES, sampler=Sequential(6))


def test_old_names_in_a_config_and_of_the_number_of_workers():
    config = {"source": {"path": "range:6"}, "loader": {"batch_size": 2, "start_method": "spawn"}}
    with pytest.warns(DeprecationWarning, match="start_method of Loader"), from_config(config) as loader:
        assert len(list(loader)) == 3
    iterators = {"kind": "iterators", "make_stream": "builtins:iter", "sequences": ["1"]}
    config = {"sampler": iterators, "loader": {"batch_size": 1, "start_method": "spawn"}}
    with pytest.warns(DeprecationWarning, match="start_method of MultiStreamLoader"):
        from_config(config).close()
    with (
        pytest.warns(DeprecationWarning, match=r"^max_workers of MultiStreamLoader is .* num_workers=$"),
        MultiStreamLoader(range, [3, 4], batch_size=2, max_workers=2) as loader,
    ):
        assert loader.num_workers == 2
    with pytest.warns(DeprecationWarning, match=r"^workers of LocalEngine is deprecated: pass it as num_workers=$"):
        assert LocalEngine(workers=3) == LocalEngine(num_workers=3)
