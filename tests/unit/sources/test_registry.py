import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dataload
from dataload.errors import ConfigError, MissingDependencyError
from dataload.sources.find import find_destination
from dataload.sources.format import Format
from dataload.sources.registry import built_in_formats, by_suffix, format_names, get_format

PLUGIN = Path(__file__).parents[2] / "plugin_package"


@pytest.fixture
def plugin(monkeypatch):
    """A distribution with entry points, as pip would have installed it."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    yield
    sys.modules.pop("countdown_plugin", None)


def add_distribution(directory, name, entry_points):
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dataload.sources]\n{entry_points}\n")


def test_the_built_in_formats():
    tables = "arrow csv hugging_face jsonl parquet"
    known = f"array_record folder lmdb mds memory range syrah tar tfds tfrecord tokens torchrecord wids {tables}"
    assert format_names() == tuple(sorted(known.split()))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a.syr", "syrah"),
        ("x/a.SYR", "syrah"),
        ("a.tar", "tar"),
        ("a.lmdb/", "lmdb"),
        ("data.mdb", "lmdb"),
        ("a.torchrecord", "torchrecord"),
        ("a.array_record", "array_record"),
        ("a.arrayrecord", "array_record"),
        ("a.parquet", "parquet"),
        ("a.feather", "arrow"),
        ("a.csv.gz", "csv"),
        ("a.jsonl.zst", "jsonl"),
        ("a.tfrecord-00000-of-00010", "tfrecord"),
    ],
)
def test_a_suffix_means_a_format(path, name):
    entry = by_suffix(path)
    assert entry is not None
    assert entry.name == name


@pytest.mark.parametrize("path", ["a", "a.tar.gz", "syr", "a.syrup", ""])
def test_other_suffixes_mean_none(path):
    assert by_suffix(path) is None


def test_an_unknown_format_names_the_closest():
    with pytest.raises(ConfigError, match=r"there is no format 'syra': did you mean 'syrah'\? Known: array_recor") as e:
        get_format("syra")
    assert (e.value.key, e.value.value) == ("format", "syra")


def test_a_format_is_imported_only_when_it_is_loaded():
    code = (
        "import sys, dataload.sources.registry as r\n"
        "entry = r.get_format('range')\n"
        "assert 'dataload.sources.range' not in sys.modules\n"
        "assert type(entry.open(3)).__name__ == 'RangeSource'\n"
    )
    # The package itself exports the source; a bare package of the same place does not.
    bare = (
        "import sys, types; p = types.ModuleType('dataload'); p.__path__ = [sys.argv[1]]; sys.modules['dataload'] = p\n"
    )
    package = str(Path(dataload.__file__).parent)
    subprocess.run([sys.executable, "-c", bare + code, package], check=True)


def test_a_format_without_a_writer_names_those_that_have_one():
    with pytest.raises(ConfigError, match=r"format 'range' is read-only; choose one .*: syrah, torchrecord, lmdb, tar"):
        find_destination("range:x")
    with pytest.raises(ConfigError, match=r"format 'range' is read-only"):
        get_format("range").create("x")


def test_a_pattern_is_no_destination():
    with pytest.raises(ConfigError, match=r"'a/tt-\*.tar' is a pattern.*: name one file, or .*\('tt-\{00..07\}.tar'\)"):
        find_destination("a/tt-*.tar")


def test_a_missing_package_says_what_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "bson", None)
    with pytest.raises(MissingDependencyError, match=r"^format 'syrah' needs .*'dataload\[syrah\]' \(or only pymongo"):
        dataload.create(tmp_path / "a.syr")


def test_an_installed_package_adds_a_format(plugin, tmp_path):
    assert "countdown" in format_names()
    assert "countdown_plugin" not in sys.modules, "it is loaded only when it is named"
    (tmp_path / "three").write_text("3")
    source = dataload.open(f"countdown:{tmp_path / 'three'}")
    assert source.read_batch([0, 1, 2])["number"].tolist() == [3, 2, 1]
    assert dataload.open(tmp_path / "three", format="countdown", step=2, fields=["number"])[-1] == {"number": 1}


def test_options_of_an_added_format_are_checked(plugin):
    with pytest.raises(ConfigError, match=r"format 'countdown' has no option 'stop': did you mean 'step'\?"):
        dataload.open(__file__, format="countdown", stop=2)


def test_an_added_format_whose_module_is_absent(plugin, tmp_path):
    with pytest.raises(MissingDependencyError, match=r"that adds format 'absent' cannot be imported \(countdown_plugi"):
        get_format("absent")


def test_an_added_format_whose_class_is_absent(plugin):
    with pytest.raises(MissingDependencyError, match=r"adds format 'misspelt' cannot be imported .* no attribute 'Cou"):
        get_format("misspelt")


def test_two_packages_that_add_one_name_are_both_named(plugin, monkeypatch, tmp_path):
    add_distribution(tmp_path, "other_countdown", "countdown = other_countdown:Source")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as error:
        get_format("countdown")
    message = str(error.value)
    assert "format 'countdown' is added by two installed packages" in message
    assert "countdown-plugin (countdown_plugin:CountdownSource)" in message
    assert "other_countdown (other_countdown:Source)" in message
    assert "uninstall one of them" in message


def test_the_same_distribution_found_twice_is_no_conflict(plugin, monkeypatch, tmp_path):
    add_distribution(tmp_path, "countdown_plugin", "countdown = countdown_plugin:CountdownSource")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert get_format("countdown").source == "countdown_plugin:CountdownSource"


def test_every_extra_of_a_format_can_be_installed():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = {entry.extra for entry in built_in_formats()} - {None}
    assert len(extras) >= 3
    assert extras <= project["optional-dependencies"].keys()


def test_a_package_without_an_extra_is_installed_by_its_own_name():
    with pytest.raises(MissingDependencyError, match=r"^format 'x' needs nowhere: pip install nowhere$"):
        Format(name="x", source="x:X").require("nowhere.module")
