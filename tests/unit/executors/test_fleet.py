"""The settings of fleets, and how executors are found by name. What needs Ray is in tests/integration."""

import sys

import pytest

import dataload
from dataload.errors import ConfigError, MissingDependencyError
from dataload.executors import Fleet
from dataload.loader.scaling import WorkerSettings


def test_settings_are_checked():
    fleet = Fleet(num_cpus=2, name="train", detached=True)
    assert fleet == Fleet(num_cpus=2, name="train", detached=True)
    assert hash(fleet)
    for settings, message in [
        ({"num_cpus": 0}, "num_cpus must be a number above 0, got 0"),
        ({"memory": "4GB"}, "memory must be an integer >= 1 or None, got '4GB'"),
        ({"scheduling": "sprad"}, "scheduling is 'sprad': did you mean 'spread'"),
        ({"name": "a/b"}, "name must be text without a slash, got 'a/b'"),
        ({"name": ""}, "name must be text without a slash, got ''"),
        ({"detached": True}, "detached needs a name, by which other processes find the workers; got True"),
        ({"writable": 1}, "writable must be True or False, got 1"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            Fleet(**settings)
        assert caught.value.key == next(iter(settings))


@pytest.mark.parametrize("executor", ["rai", 5, None, ["ray"], Fleet])
def test_executors_are_names_or_fleets(executor):
    with pytest.raises(ConfigError, match="executor") as caught:
        dataload.Loader(dataload.RangeSource(3), batch_size=1, executor=executor)
    assert caught.value.key == "executor"


@pytest.mark.parametrize("executor", ["ray", Fleet()])
def test_without_ray_the_error_says_what_to_install(monkeypatch, executor):
    for name in [name for name in sys.modules if name.split(".")[0] == "ray" or name.startswith("dataload.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"needs ray: pip install 'dataload\[ray\]'"):
        dataload.Loader(dataload.RangeSource(3), batch_size=1, executor=executor, num_workers=1)


def test_without_workers_ray_is_not_needed():
    with dataload.Loader(dataload.RangeSource(3), batch_size=3, executor="ray") as loader:
        assert [batch["index"].tolist() for batch in loader] == [[0, 1, 2]]
        assert loader.statistics().executor == "serial"


def test_batches_of_a_fleet_are_made_elsewhere():
    settings = WorkerSettings.of(4, Fleet(), 2, None)
    assert (settings.workplace, settings.here) == ("ray", False)
    assert WorkerSettings.of(0, "ray", 2, None).workplace == "serial"


def test_configs_have_a_table_of_it():
    config = {"source": {"path": "range:4"}, "loader": {"batch_size": 4, "executor": {"num_cpus": 0.5, "name": "a"}}}
    with dataload.from_config(config) as loader:
        assert len([*loader]) == 1
    wrong = {"loader": {"batch_size": 4, "executor": {"nme": "a"}}}
    with pytest.raises(ConfigError, match="did you mean 'name'") as caught:
        dataload.from_config({**config, **wrong})
    assert caught.value.key == "loader.executor.nme"
    contradicting = {"loader": {"batch_size": 4, "executor": {"detached": True}}}
    with pytest.raises(ConfigError, match="detached needs a name") as caught:
        dataload.from_config({**config, **contradicting})
    assert caught.value.key == "loader.executor.detached"
