"""Formats by name, suffix and first bytes, and those of installed packages."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dataload
from dataload.errors import ConfigError, MissingDependencyError
from dataload.sources.find import HEAD_BYTES, detect, find_destination, find_shards
from dataload.sources.format import Format
from dataload.sources.head import describe_head
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
    ("paths", "name"),
    [
        ("a.syr x/a.SYR", "syrah"),
        ("a.tar", "tar"),
        ("a.lmdb/ data.mdb", "lmdb"),
        ("a.torchrecord", "torchrecord"),
        ("a.array_record a.arrayrecord", "array_record"),
        ("a.parquet", "parquet"),
        ("a.feather", "arrow"),
        ("a.csv.gz", "csv"),
        ("a.jsonl.zst", "jsonl"),
        ("a.tfrecord-00000-of-00010", "tfrecord"),
        ("a a.tar.gz syr a.syrup", None),
    ],
)
def test_a_suffix_means_a_format(paths, name):
    for path in paths.split():
        assert getattr(by_suffix(path), "name", None) == name
    assert by_suffix("") is None


ABSENT = r"that adds format 'absent' cannot be imported \(countdown_plugin_of_another_day:Source\): No module"
MISSPELT = r"adds format 'misspelt' cannot be imported .* no attribute 'Countdwon"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: get_format("syra"), ConfigError, r"there is no format 'syra': did you mean 'syrah'\? Known: absent,"),
        (lambda: find_destination("range:x"), ConfigError, "'range' is read-only; choose one .*: syrah, torchrecord,"),
        (lambda: get_format("range").create("x"), ConfigError, r"format 'range' is read-only"),
        (lambda: find_destination("a/tt-*.tar"), ConfigError, r"is a pattern.*: name one file, or .*\('tt-\{00..07\}"),
        (lambda: dataload.create("a.syr"), MissingDependencyError, r"^format 'syrah' needs .*'dataload\[syrah\]' \(or"),
        (lambda: dataload.open(__file__, format="countdown", stop=2), ConfigError, r"format 'countdown' has no option"),
        (lambda: get_format("absent"), MissingDependencyError, ABSENT),
        (lambda: get_format("misspelt"), MissingDependencyError, MISSPELT),
        (
            lambda: Format(name="x", source="x:X").require("nowhere.module"),
            MissingDependencyError, r"^format 'x' needs nowhere: pip install nowhere$",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(plugin, monkeypatch, tmp_path, call, error, message):
    monkeypatch.setitem(sys.modules, "bson", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        call()
    if "syra'" in message:
        assert (caught.value.key, caught.value.value) == ("format", "syra")


def test_a_format_is_imported_only_when_it_is_loaded():
    # The package itself exports the source; a bare package of the same place does not.
    code = """
import sys, types
package = types.ModuleType('dataload')
package.__path__ = [sys.argv[1]]
sys.modules['dataload'] = package
import dataload.sources.registry
entry = dataload.sources.registry.get_format('range')
assert 'dataload.sources.range' not in sys.modules
assert type(entry.open(3)).__name__ == 'RangeSource'
"""
    subprocess.run([sys.executable, "-c", code, str(Path(dataload.__file__).parent)], check=True)


def test_an_installed_package_adds_a_format(plugin, tmp_path):
    assert "countdown" in format_names()
    assert "countdown_plugin" not in sys.modules, "it is loaded only when it is named"
    (tmp_path / "three").write_text("3")
    source = dataload.open(f"countdown:{tmp_path / 'three'}")
    assert source.read_batch([0, 1, 2])["number"].tolist() == [3, 2, 1]
    assert dataload.open(tmp_path / "three", format="countdown", step=2, fields=["number"])[-1] == {"number": 1}


def test_two_packages_that_add_one_name_are_both_named(plugin, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    add_distribution(tmp_path, "countdown_plugin", "countdown = countdown_plugin:CountdownSource")
    assert get_format("countdown").source == "countdown_plugin:CountdownSource"  # the same one, found twice
    add_distribution(tmp_path, "other_countdown", "countdown = other_countdown:Source")
    with pytest.raises(ConfigError) as error:
        get_format("countdown")
    for part in (
        "format 'countdown' is added by two installed packages", "countdown_plugin (countdown_plugin:CountdownSource)",
        "other_countdown (other_countdown:Source)", "uninstall one of them",
    ):  # fmt: skip
        assert part in str(error.value)


def test_every_extra_of_a_format_can_be_installed():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = {entry.extra for entry in built_in_formats()} - {None}
    assert len(extras) >= 3
    assert extras <= project["optional-dependencies"].keys()


GOLDEN = Path(__file__).parents[2] / "golden"


def head(path):
    return path.read_bytes()[:HEAD_BYTES]


@pytest.mark.parametrize(
    ("folder", "pattern", "name"),
    [
        ("syrah", "[!cn]*.syr", "syrah"),
        ("arrayrecord", "[!c]*.array_record", "array_record"),
        ("torchrecord", "[!c]*/data.mdb", "lmdb"),
        ("tar/tars", "[pgu]*.tar", "tar"),
    ],
)
def test_files_of_the_original_tools(folder, pattern, name):
    paths = [path for path in sorted((GOLDEN / folder).glob(pattern)) if head(path).strip(b"\0")]
    assert len(paths) >= 5
    assert {path: getattr(detect(head(path)), "name", None) for path in paths} == dict.fromkeys(paths, name)


@pytest.mark.parametrize(
    "data",
    [b"", b"GS", b"hello", bytes(512), bytes(20), b"x" * 512, b"\x1f\x8b", b"0" * 148 + b"zzzzzzzz" + b"0" * 356],
)
def test_other_bytes_are_nothing(data):
    assert detect(data) is None


def test_what_is_said_of_them():
    assert describe_head(b"") == "the file is empty"
    assert describe_head(b"BZh9") == (
        "byte 0 has the magic bytes of bzip2: decompress it first, to allow random access"
    )
    assert describe_head(b"\x00\x01abc") == r"byte 0 has b'\x00\x01abc'"


def test_formats_without_files():
    with pytest.raises(ConfigError, match="format 'range' has no files, which are needed here"):
        find_shards("range:3")
