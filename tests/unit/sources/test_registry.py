"""Formats by name, suffix and first bytes, those of installed packages, and shards that are not all there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dataload
from dataload.errors import ConfigError, MissingDependencyError, SourceNotFoundError
from dataload.sources.discover import check_complete, find_shards, harmless_options
from dataload.sources.format import HEAD_BYTES, Format
from dataload.sources.registry import built_in_formats, by_suffix, by_suffixes, detect, format_of_files, get_format
from dataload.storage import Remote, storage_of

TESTS = Path(__file__).parents[2]
GOLDEN = TESTS / "golden"


@pytest.fixture
def plugin(monkeypatch):
    """A distribution with entry points, as pip would have installed it."""
    monkeypatch.syspath_prepend(str(TESTS / "plugin_package"))
    yield
    sys.modules.pop("countdown_plugin", None)


def add_distribution(directory, name, entry_points):
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dataload.sources]\n{entry_points}\n")


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
    assert {getattr(by_suffix(path), "name", None) for path in paths.split()} == {name}
    assert by_suffix("") is None


def test_a_suffix_decides_without_a_look_at_the_files_unless_a_variant_shares_it():
    assert [format_of_files([f"none/{name}"] * 2, None).name for name in ("a.syr", "a.csv")] == ["syrah", "csv"]
    for name in ("a.lmdb", "a.torchrecord"):
        with pytest.raises(SourceNotFoundError):
            format_of_files([f"none/{name}"], None)


ABSENT = r"that adds format 'absent' cannot be imported \(countdown_plugin_of_another_day:Source\): No module"
MISSPELT = r"adds format 'misspelt' cannot be imported .* no attribute 'Countdwon"
X = Format(name="x", source="x:X")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: get_format("syra"), ConfigError, r"there is no format 'syra': did you mean 'syrah'\?"),
        (lambda: dataload.create("range:x"), ConfigError, "'range' is read-only; choose one .*: syrah, torchrecord,"),
        (lambda: get_format("range").create("x"), ConfigError, r"format 'range' is read-only"),
        (lambda: find_shards("range:3"), ConfigError, "format 'range' has no files, which are needed here"),
        (lambda: dataload.create("a/out/", format="tar"), ConfigError, "a directory: .*, such as 'a/out/data.tar'"),
        (lambda: dataload.create("a/tt-*.tar"), ConfigError, r"is a pattern.*: name one file, or .*\('tt-\{00..07\}"),
        (lambda: dataload.create("a.syr"), MissingDependencyError, r"^format 'syrah' needs .*'dataload\[syrah\]' \(or"),
        (lambda: dataload.open(__file__, format="countdown", stop=2), ConfigError, r"format 'countdown' has no option"),
        (lambda: get_format("absent"), MissingDependencyError, ABSENT),
        (lambda: get_format("misspelt"), MissingDependencyError, MISSPELT),
        (lambda: X.require("no.module"), MissingDependencyError, r"^format 'x' needs no: pip install no$"),
    ],
)
def test_what_is_refused(plugin, monkeypatch, tmp_path, call, error, message):
    monkeypatch.setitem(sys.modules, "bson", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        call()
    if "syra'" in message:
        assert (caught.value.key, caught.value.value) == ("format", "syra")


def test_options_that_do_not_affect_records():
    found = harmless_options(get_format("csv"))
    assert found == {"cached_bytes", "max_record_bytes", "remote", "storage_options", "verify"}
    assert harmless_options(get_format("lmdb")).isdisjoint({"codec", "keys"})


def test_a_format_is_imported_only_when_it_is_loaded():
    # The package itself exports the source; a bare package of the same place does not.
    code = """
import sys, types
package = types.ModuleType('dataload')
package.__path__ = [sys.argv[1]]
sys.modules['dataload'] = package
import dataload.sources.registry
entry = dataload.sources.registry.get_format('range')
assert 'dataload.sources.memory' not in sys.modules
assert type(entry.open(3)).__name__ == 'RangeSource'
"""
    subprocess.run([sys.executable, "-c", code, str(Path(dataload.__file__).parent)], check=True)


def test_two_packages_that_add_one_name_are_both_named(plugin, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    add_distribution(tmp_path, "countdown_plugin", "countdown = countdown_plugin:CountdownSource")
    assert get_format("countdown").source == "countdown_plugin:CountdownSource"  # the same one, found twice
    add_distribution(tmp_path, "other_countdown", "countdown = other_countdown:Source")
    with pytest.raises(ConfigError) as error:
        get_format("countdown")
    for part in (
        "format 'countdown' is added by two installed packages",
        "countdown_plugin (countdown_plugin:CountdownSource)",
        "other_countdown (other_countdown:Source)",
        "uninstall one of them",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("syrah/[!cn]*.syr", "syrah"),
        ("arrayrecord/[!c]*.array_record", "array_record"),
        ("torchrecord/[!c]*/data.mdb", "lmdb"),
        ("tar/tars/[pgu]*.tar", "tar"),
        ("tfrecord/[!gz]*tfrecord*", "tfrecord"),
        ("hugging_face/**/*.arrow", "arrow"),
    ],
)
def test_files_of_the_original_tools(pattern, name):
    heads = {path: path.read_bytes()[:HEAD_BYTES] for path in GOLDEN.glob(pattern)}
    found = {path: getattr(detect(head), "name", None) for path, head in heads.items() if head.strip(b"\0")}
    assert len(found) >= 2
    assert found == dict.fromkeys(found, name)


def test_a_local_directory_without_some_shards(tmp_path):
    def write(*shards):
        for shard in shards:
            with dataload.create(tmp_path / f"a-{shard:05d}-of-00004.syr") as writer:
                writer.write({"n": shard})

    write(0, 2)
    match = r"has no a-00001-of-00004.syr \(and 1 more\): finish the conversion or the copy.*name them by a pattern"
    with pytest.raises(SourceNotFoundError, match=match):
        dataload.open(tmp_path)
    with dataload.open(f"{tmp_path}/*.syr") as source:
        assert len(source) == 2
    write(1)
    with pytest.raises(SourceNotFoundError, match=r"has no a-00003-of-00004.syr: finish"):
        dataload.open(tmp_path)
    write(3)
    with dataload.open(tmp_path) as source:
        assert [int(record["n"]) for record in source] == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def obstore():
    """Start the threads of obstore, which live as long as the process."""
    pytest.importorskip("obstore").store.MemoryStore().put("a", b"")


@pytest.mark.parametrize(
    ("journal", "complete"),
    [
        ({"shards": [["a", 0, 1], ["b", 1, 2]], "finished": {"a": {}}}, False),
        ({"shards": [["a", 0, 1]], "finished": {"a": {}}}, True),
        ({"shards": 3, "finished": {}}, True),
        ([], True),
    ],
)
def test_the_journal_of_an_unfinished_conversion_at_a_url(obstore, tmp_path, journal, complete):
    remote, url = Remote(), f"memory://journals/{tmp_path.name}"
    storage_of(url, remote).replace(f"{url}/.x.convert.json", json.dumps(journal).encode(), None)
    if complete:
        check_complete(url, ["a"], remote)
    else:
        match = r" has the shards of an unfinished conversion \(.x.convert.json\): finish the conversion"
        with pytest.raises(SourceNotFoundError, match=match):
            check_complete(url, ["a"], remote)


def test_a_directory_of_several_splits_warns(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001", "Validation"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    with pytest.warns(UserWarning, match="splits Validation, test, train, which are read together: open .*train\\*"):
        assert len(dataload.open(tmp_path)) == 4
    assert len(dataload.open(tmp_path / "train*")) == 2
    (tmp_path / "more.jsonl").write_text("{}\n")
    assert len(dataload.open(tmp_path)) == 5


@pytest.mark.parametrize("more", [(), ("_v1.raw",)])
def test_suffixes_of_many_paths_are_those_of_each(more):
    known = [*built_in_formats(), *(Format(name="raw", source="raw:Raw", suffixes=(suffix,)) for suffix in more)]
    ends = "tar", "a.tar", "tar.gz", "csv.gz", "x.csv.zst", "SYR", "syr-00001-of-00002", "tar.-1-of-2", "", "."
    ends += ("idx", "npy")
    stems = ("", "a", "a.b", "d/a", "d.tar/a", "d.tar/", "s3://b.tar/a", "a_v1.raw", "x.tar/a_v1.raw")
    paths = [f"{stem}.{end}{slash}" for stem in stems for end in ends for slash in ("", "/")] + [*stems]
    assert by_suffixes(paths, known) == [by_suffix(path, known) for path in paths]
    assert {of.name for of in by_suffixes(paths, known) if of} >= {"tar", "csv", "syrah", *("raw" for _ in more)}


def test_files_of_no_format_are_not_looked_into(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr("dataload.sources.discover._holds_data", lambda *args: looks.append(args) or True)
    for name in range(300):
        (tmp_path / f"{name}.txts").touch()
    for name in range(150):
        (tmp_path / f"part-{name:03}").mkdir()
    with pytest.raises(SourceNotFoundError, match=r"data sets: part-000, .*, part-009 \(and 90 more\)$"):
        dataload.open(tmp_path)
    assert len(looks) == 100
