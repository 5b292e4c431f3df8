import json
import sys
from collections import UserDict
from pathlib import Path

import numpy as np
import pytest

from dataload.config import json_schema, parse_assignment, parse_value, read_config
from dataload.errors import ConfigError, MissingDependencyError
from dataload.samplers import GlobalShuffle, Lanes
from dataload.sources.memory import RangeSource

SOURCE = RangeSource(9)
OK = {"source": {"path": "a.syr"}, "loader": {"batch_size": 4}}


def config(*overrides, **sections):
    return read_config({**OK, **sections}, overrides)


def refuse(match, *overrides, **sections):
    with pytest.raises(ConfigError, match=match) as error:
        config(*overrides, **sections)
    return error.value


TOML = """
[source]
path = "data/train.syr"
fields = ["features", "label"]
shapes.features = [2, -1]

[sampler]
kind = "global_shuffle"
seed = 7

[loader]
batch_size = 256
collate = { label = "pad" }
"""
YAML = """
source:
  path: data/train.syr
  fields: [features, label]
  shapes: {features: [2, -1]}
sampler: {kind: global_shuffle, seed: 7}
loader:
  batch_size: 256
  collate: {label: pad}
"""


def test_toml_yaml_json_and_a_dict_mean_the_same(tmp_path):
    table = {
        "source": {
            "path": tmp_path / "data/train.syr",
            "fields": ("features", "label"),
            "shapes": {"features": (np.int64(2), -1)},
        },
        "sampler": {"kind": "global_shuffle", "seed": 7},
        "loader": {"batch_size": np.int32(256), "collate": {"label": "pad"}},
    }
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "a.yaml").write_text(YAML)
    (tmp_path / "a.YML").write_text(YAML)
    (tmp_path / "a.json").write_text(json.dumps(table, default=lambda v: v.item() if hasattr(v, "item") else str(v)))
    expected = read_config(table)
    assert expected.source.shapes == {"features": (2, -1)}
    for name in ("a.toml", "a.yaml", "a.YML", "a.json"):
        assert read_config(tmp_path / name) == expected, name
        marked = write(tmp_path, f"marked-{name}", "\ufeff" + (tmp_path / name).read_text())  # as Windows saves text
        assert read_config(marked) == expected, name


class Views(UserDict):
    """A mapping whose tables are objects made on request, as those of libraries for settings."""

    def __getitem__(self, key):
        value = super().__getitem__(key)
        return Views(value) if isinstance(value, dict) else value


def test_a_dict_takes_what_classes_take():
    assert config(loader={"batch_size": np.int8(4), "in_order": np.False_, "timeout": np.float32(2)}) == config(
        loader={"batch_size": 4, "in_order": False, "timeout": 2.0}
    )


def test_tables_may_be_made_on_request():
    table = {**OK, "sampler": {"kind": "lanes", "lanes": 2}, "remote": {"mode": "ranges"}}
    assert read_config(Views(table)) == read_config(table)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a.syr", "{here}/a.syr"),
        ("../b/*.tar", "{here}/../b/*.tar"),
        ("", ""),
        ("/abs/a.syr", "/abs/a.syr"),
        ("tar:a-{00..03}", "tar:{here}/a-{{00..03}}"),
        ("range:100", "range:100"),
        ("s3://bucket/a.tar", "s3://bucket/a.tar"),
        ("weird:name.tar", "weird:{here}/name.tar"),
        ("~/a.syr", "{home}/a.syr"),
        (["a.syr", "/b.syr"], ["{here}/a.syr", "/b.syr"]),
    ],
)
def test_paths_in_a_file_are_relative_to_it(tmp_path, monkeypatch, written, meant):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "c.json").write_text(json.dumps({**OK, "source": {"path": written}}))
    monkeypatch.chdir("/")
    path = read_config(tmp_path / "c.json").source.path
    if isinstance(written, list):
        assert list(path) == [item.format(here=tmp_path) for item in meant]
    elif written.startswith("tar:"):
        assert path == f"tar:{tmp_path}/a-{{00..03}}"
    else:
        assert path == meant.format(here=tmp_path, home="/home/me")


def test_files_of_a_loader_are_relative_to_its_config(tmp_path, monkeypatch):
    names = ("changes", "error_report", "exclude")  # the last is a report that an earlier run has written
    write(tmp_path, "c.json", json.dumps({**OK, "loader": {**dict.fromkeys(names, "a.jsonl"), "batch_size": 2}}))
    monkeypatch.chdir("/")
    loader = read_config(tmp_path / "c.json").loader
    assert {getattr(loader, name) for name in names} == {f"{tmp_path}/a.jsonl"}


def write(directory, name, text):
    path = directory / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.ini", "", r"a\.ini: the name of a config ends in \.toml, \.yaml, \.yml, \.json, not '\.ini'"),
        ("a.toml", "[source\n", r"a\.toml is not valid TOML: .*line 1"),
        ("a.json", "{", r"a\.json is not valid JSON: .*line 1"),
        ("a.yaml", "a: [1", r"a\.yaml is not valid YAML: .*line 1"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", r"a\.yaml is not valid YAML: could not determine a constr"),
        ("a.yaml", "loader: {seed: 1,\n seed: 2}", r"a\.yaml: the table at line 1 has two keys 'seed'"),
        ("a.json", '{"loader": {"seed": 1, "epochs": 1, "seed": 2}}', r"a\.json .*: a table has two keys 'seed'"),
        ("a.json", '{"source": {"path": "a.tar", "format": ["tar"]}}', r"source\.format is \['tar'\]: expected text"),
        ("a.yaml", "- 1\n", r"a\.yaml: a config is a table of sections, got \[1\]"),
        ("a.yaml", "1: 2\n", r"a\.yaml: keys are text, got 1 \(int\): put it in quotes"),
        ("a.yaml", "loader: {collate: {1: pad}}\n", r"a\.yaml: loader: collate: keys are text, got 1"),
        ("a.json", '{"source": 3, "sampler": "x"}', r"(?s)source is 3: .*sampler is 'x': expected a table"),
        ("a.toml", b"\xff", r"cannot read the config .*a\.toml: it is not UTF-8 text"),
        ("a.toml", None, r"cannot read the config .*a\.toml: the directory .* exists, but has no entry of that name"),
    ],
)
def test_files_that_are_no_configs(tmp_path, name, text, match):
    if text is not None:
        write(tmp_path, name, text)
    with pytest.raises(ConfigError, match=match):
        read_config(tmp_path / name)


@pytest.mark.parametrize(("module", "package"), [("pydantic", "pydantic"), ("yaml", "pyyaml")])
def test_missing_packages_say_what_installs_them(monkeypatch, tmp_path, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"needs {package}: pip install 'dataload\[config\]'"):
        read_config(write(tmp_path, "a.yaml", YAML))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("-1", -1),
        ("true", True),
        ("null", None),
        ("train.syr", "train.syr"),
        ('"64"', "64"),
        ("", ""),
        ("a=b", "a=b"),
        ("[1, 2]", [1, 2]),
        ("[a, b]", ["a", "b"]),
        ("[nan]", ["nan"]),
        ("[a,1,true]", ["a", 1, True]),
        ("{a = 1}", {"a": 1}),
        ('{"a": [1]}', {"a": [1]}),
        # more likely names than what TOML and JSON make of them
        ("2024-01-01", "2024-01-01"),
        ("inf", "inf"),
        ("NaN", "NaN"),
        ("train-{000..127}.tar", "train-{000..127}.tar"),
        ("[a[0]]", "[a[0]]"),
        ("1\nx = 2", "1\nx = 2"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_values_of_overrides(text, value):
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("text", ["a", "", "=1", "a b=1", "a..b=1", "a\nb=1", "a.=1", "ä=1", "a[0]=1"])
def test_what_is_no_assignment(text):
    with pytest.raises(ConfigError, match=r"is not 'key=value', such as loader\.batch_size=64"):
        parse_assignment(text)


def test_overrides_replace_add_and_take_away():
    loader = {"batch_size": 4, "tail": "drop", "collate": {"a": "pad"}}
    settings = config(
        "loader.batch_size=64",
        "loader.tail=null",
        "source.select.part=null",
        'loader.collate."b.c"=list',
        "sampler.kind=sequential",
        "loader.batch_size=65",
        "sampler.parent.seed=null",
        loader=loader,
    )
    assert settings.loader.batch_size == 65
    assert settings.loader.tail is None
    assert settings.loader.collate == {"a": "pad", "b.c": "list"}
    assert settings.sampler.kind == "sequential"


TWO = [{"path": "a.syr"}, {"path": "b.syr"}]


@pytest.mark.parametrize(
    ("override", "paths"),
    [
        ("source[1].path=c.syr", ["a.syr", "c.syr"]),
        ("source[0]=null", ["b.syr"]),
        ("source[1]={path='c.syr'}", ["a.syr", "c.syr"]),
    ],
)
def test_overrides_in_lists(override, paths):
    assert [section.path for section in config(override, source=TWO).source] == paths
    assert TWO == [{"path": "a.syr"}, {"path": "b.syr"}]


NO_PLACE = r"': 'source' is a list of 2; its first item is source\[0\]"


@pytest.mark.parametrize(
    ("override", "source", "match"),
    [
        ("source.path=c.syr", TWO, NO_PLACE),
        ("source[2].path=c.syr", TWO, NO_PLACE),
        ('source."²".path=c.syr', TWO, NO_PLACE),
        ("source.path.x=1", OK["source"], r"override 'source\.path\.x=1': 'path' is 'a\.syr', not a table"),
        ("source[1].path[0]=c", TWO, r"override 'source\[1\]\.path\[0\]=c': 'path' is 'b\.syr', not a table"),
        ("source[0].path=c", [3], r"override 'source\[0\]\.path=c': 'source\[0\]' is 3, not a table"),
    ],
)
def test_overrides_that_lead_nowhere(override, source, match):
    refuse(match, override, source=source)
    with pytest.raises(ConfigError, match=r"overrides are a list of 'key=value', got the text 'a=1'"):
        read_config(OK, "a=1")


def test_options_of_a_format_of_another_package(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "plugin_package"))
    settings = config(source={"path": "countdown:3.txt", "step": 2, "options": {"own": 1}})
    assert settings.source.open_options() == {"step": 2, "own": 1}
    assert config(source={"path": "3.txt", "format": "countdown", "step": 2}).source.open_options() == {"step": 2}
    refuse(r"source\.stepp is 2: there is no such key", source={"path": "countdown:3.txt", "stepp": 2})
    sys.modules.pop("countdown_plugin", None)


@pytest.mark.parametrize(
    ("reference", "match"),
    [
        ("no_such_module:f", r"loader\.transform is 'no_such_module:f': importing 'no_such_module' failed \(No module"),
        ("math:sqr", r"loader\.transform is 'math:sqr': math has no 'sqr': did you mean 'sqrt'\?"),
        ("json:JSONDecoder.dekode", r"json has no 'dekode': did you mean 'decode'\?"),
        ("math:pi.x", r"math has no 'x': there is none"),
    ],
)
def test_functions_that_do_not_exist(reference, match):
    with pytest.raises(ConfigError, match=match) as error:
        config(f"loader.transform={reference}").loader_options(SOURCE)
    assert error.value.key == "loader.transform"


def test_the_json_schema_is_one():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert "required" not in schema, "what is required depends on the kind of sampler"
    assert schema["additionalProperties"] is False
    described = [p for each in schema["$defs"].values() for name, p in each["properties"].items() if name != "kind"]
    assert not [p for p in described if p["description"].endswith("None")], "editors show what a key means"


def test_the_schema_has_the_bounds_of_the_classes():
    tables = json_schema()["$defs"]
    bounds = {"minimum": 1, "exclusiveMaximum": 65_537}
    assert bounds.items() <= tables["LanesConfig"]["properties"]["lanes"].items()
    with pytest.raises(ConfigError, match=r"lanes must be an integer in \[1, 65537\), got 65537"):
        Lanes(GlobalShuffle(9, 0), 65_537)
    refuse(r"sampler\.lanes is 65537: expected a number < 65537", sampler={"kind": "lanes", "lanes": 65_537})
    _, share = tables["LoaderConfig"]["properties"]["max_bad"]["anyOf"]
    assert share == {"exclusiveMinimum": 0, "maximum": 1, "type": "number"}
    weights, _ = tables["MixtureConfig"]["properties"]["weights"]["anyOf"]  # changes, names, or a list: one of them
    assert [form["type"] for form in weights["oneOf"]] == ["object", "object", "array"]


def test_a_loader_from_a_config_file(tmp_path, monkeypatch):
    import dataload

    (tmp_path / "data").mkdir()
    with dataload.create(tmp_path / "data/a.syr") as writer:
        writer.extend({"x": np.full(2, i), "y": i} for i in range(10))
    path = write(
        tmp_path,
        "a.toml",
        '[source]\npath = "data/*.syr"\nfields = ["y"]\n[sampler]\nkind = "global_shuffle"\n[loader]\nbatch_size = 4\n',
    )
    monkeypatch.chdir("/")
    for overrides, seed in (([], 0), (["loader.seed=3"], 3), (["loader.seed=3", "sampler.seed=4"], 4)):
        batches = list(dataload.from_config(path, overrides=overrides))
        expected = GlobalShuffle(10, seed).indices(np.arange(10), epoch=0)
        assert [batch.keys() for batch in batches] == [{"y"}] * 3
        np.testing.assert_array_equal(np.concatenate([batch["y"] for batch in batches]), expected)
    last = list(dataload.from_config(path, overrides=["loader.tail=drop", "loader.batch_transform=builtins:len"]))
    assert last == [1, 1], "batches of one field"
