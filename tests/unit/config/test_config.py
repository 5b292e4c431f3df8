from __future__ import annotations

import inspect
import json
import math
import sys
from pathlib import Path, PurePosixPath
from typing import get_args

import numpy as np
import pytest

from dataload.collate import Collate
from dataload.config import json_schema, read_config
from dataload.config.models import LoaderConfig, SourceConfig
from dataload.config.overrides import parse_assignment, parse_value
from dataload.errors import ConfigError, MissingDependencyError
from dataload.executors import StartMethod
from dataload.loader.loader import Loader
from dataload.loader.order import Shuffle
from dataload.loader.rescue import OnError
from dataload.loader.workers import ExecutorName
from dataload.samplers import GlobalShuffle, Sequential
from dataload.sources.range import RangeSource
from dataload.sources.registry import format_names, get_format, load

SOURCE = RangeSource(9)
OK = {"source": {"path": "a.syr"}, "loader": {"batch_size": 4}}


def config(*overrides, **sections):
    return read_config({**OK, **sections}, overrides)


def refuse(match, *overrides, **sections):
    with pytest.raises(ConfigError, match=match) as error:
        config(*overrides, **sections)
    return error.value


# Where settings come from


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


def test_the_users_dict_is_not_touched():
    table = {"source": {"path": "a.syr"}, "loader": {"batch_size": 4}}
    read_config(table, ["loader.seed=3", "source.shapes.x=[1]"])
    assert table == OK


def test_settings_are_frozen():
    settings = config()
    with pytest.raises(Exception, match="frozen"):
        settings.loader.batch_size = 3


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a.syr", "{here}/a.syr"),
        ("../b/*.tar", "{here}/../b/*.tar"),
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


def test_the_directory_of_a_config_may_look_like_a_pattern(tmp_path):
    import glob

    directory = tmp_path / "lr=[1,2]"
    directory.mkdir()
    (directory / "a1.syr").touch()
    (directory / "c.json").write_text(json.dumps({**OK, "source": {"path": "a*.syr"}}))
    pattern = read_config(directory / "c.json").source.path
    assert glob.glob(pattern) == [str(directory / "a1.syr")]


def test_index_files_lie_beside_the_config_too(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({**OK, "source": {"path": "a.tar", "index": "a.idx"}}))
    assert read_config(tmp_path / "c.json").source.index == str(tmp_path / "a.idx")


def test_a_path_that_is_no_path_is_left_alone(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({**OK, "source": {"path": "100", "format": "range"}}))
    assert read_config(tmp_path / "c.json").source.path == "100"


def test_paths_of_dicts_and_overrides_are_relative_to_the_working_directory(tmp_path):
    assert config().source.path == "a.syr"
    (tmp_path / "c.json").write_text(json.dumps(OK))
    assert read_config(tmp_path / "c.json", ["source.path=b.syr"]).source.path == "b.syr"


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
        (
            "a.yaml",
            "!!python/object/apply:os.getcwd []",
            r"a\.yaml is not valid YAML: could not determine a constructor",
        ),
        ("a.yaml", "loader: {seed: 1,\n seed: 2}", r"a\.yaml: the table at line 1 has two keys 'seed'"),
        ("a.yaml", "- 1\n", r"a\.yaml: a config is a table of sections, got \[1\]"),
        ("a.yaml", "1: 2\n", r"a\.yaml: keys are text, got 1 \(int\): put it in quotes"),
        ("a.yaml", "loader: {collate: {1: pad}}\n", r"a\.yaml: loader: collate: keys are text, got 1"),
        (
            "a.yaml",
            "",
            r"a\.yaml has 2 errors:\n  source is missing: expected a table or a list of tables.*\n  loader is missing",
        ),
        ("a.toml", b"\xff", r"cannot read the config .*a\.toml: it is not UTF-8 text"),
    ],
)
def test_files_that_are_no_configs(tmp_path, name, text, match):
    with pytest.raises(ConfigError, match=match):
        read_config(write(tmp_path, name, text))


def test_a_config_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the config .*none\.toml: No such file or directory"):
        read_config(tmp_path / "none.toml")


@pytest.mark.parametrize(("module", "package"), [("pydantic", "pydantic"), ("yaml", "pyyaml")])
def test_missing_packages_say_what_installs_them(monkeypatch, tmp_path, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"needs {package}: pip install 'dataload\[config\]'"):
        read_config(write(tmp_path, "a.yaml", YAML))


# Overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("1_000", 1000),
        ("0x10", 16),
        ("-1", -1),
        ("1e-3", 0.001),
        ("true", True),
        ("null", None),
        ("train.syr", "train.syr"),
        ('"64"', "64"),
        ("'64'", "64"),
        ("", ""),
        ("a b", "a b"),
        ("a=b", "a=b"),
        ("[1, 2]", [1, 2]),
        ("[a, b]", ["a", "b"]),
        ("[a,1,true]", ["a", 1, True]),
        ("[]", []),
        ("{a = 1}", {"a": 1}),
        ('{"a": [1]}', {"a": [1]}),
        # more likely names than what TOML and JSON make of them
        ("2024-01-01", "2024-01-01"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("NaN", "NaN"),
        ("Infinity", "Infinity"),
        ("{000..127}", "{000..127}"),
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


def test_infinite_numbers_inside_lists_stay_text():
    assert parse_value("[nan]") == ["nan"]
    assert not any(isinstance(v, float) and math.isnan(v) for v in parse_value("[nan, 1]"))


@pytest.mark.parametrize(
    ("text", "keys"),
    [("a=1", ("a",)), ("a.b-c.d_e=1", ("a", "b-c", "d_e")), ('a."b.c"=1', ("a", "b.c")), (" a . b = 1", ("a", "b"))],
)
def test_keys_of_overrides(text, keys):
    assert parse_assignment(text) == (keys, 1)


@pytest.mark.parametrize("text", ["a", "", "=1", "a b=1", "a..b=1", "a\nb=1", "a.=1", "ä=1", "a[0]=1"])
def test_what_is_no_assignment(text):
    with pytest.raises(ConfigError, match=r"is not 'key=value', such as loader\.batch_size=64"):
        parse_assignment(text)


def test_overrides_replace_add_and_take_away():
    loader = {"batch_size": 4, "tail": "drop", "collate": {"a": "pad"}}
    settings = config(
        "loader.batch_size=64",
        "loader.tail=null",
        'loader.collate."b.c"=list',
        "sampler.kind=sequential",
        "loader.batch_size=65",
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
        ("source.0.path=c.syr", ["c.syr", "b.syr"]),
        ("source[0]=null", ["b.syr"]),
        ("source[1]={path='c.syr'}", ["a.syr", "c.syr"]),
        ("source=[{path='c.syr'}]", ["c.syr"]),
    ],
)
def test_overrides_in_lists(override, paths):
    assert [section.path for section in config(override, source=TWO).source] == paths
    assert TWO == [{"path": "a.syr"}, {"path": "b.syr"}]


def test_overrides_deep_in_lists():
    table = {"kind": "mixture", "weights": [[1, 2], [3, 4]], "samplers": [{"kind": "sequential"}] * 2}
    overrides = ["sampler.weights[1][0]=5", "sampler.samplers[1]={kind='pool_shuffle'}", "sampler.samplers[1].seed=6"]
    sampler = config(*overrides, source=TWO, sampler=table).sampler
    assert sampler.weights == ((1, 2), (5, 4))
    assert [section.kind for section in sampler.samplers] == ["sequential", "pool_shuffle"]
    assert sampler.samplers[1].seed == 6


def test_a_quoted_key_may_have_brackets():
    assert config('loader.collate."x[0]"=pad').loader.collate == {"x[0]": "pad"}
    assert config("loader.collate.'x[0]'=pad").loader.collate == {"x[0]": "pad"}


@pytest.mark.parametrize("override", ["source.path=c.syr", "source[2].path=c.syr", 'source."²".path=c.syr'])
def test_overrides_that_lead_to_no_place_of_a_list(override):
    refuse(r"': 'source' is a list of 2; its first item is source\[0\]", override, source=TWO)


def test_an_override_into_a_value():
    refuse(r"override 'source\.path\.x=1': 'path' is 'a\.syr', not a table", "source.path.x=1")
    refuse(r"override 'source\[1\]\.path\[0\]=c': 'path' is 'b\.syr', not a table", "source[1].path[0]=c", source=TWO)
    refuse(r"override 'source\[0\]\.path=c': 'source\[0\]' is 3, not a table", "source[0].path=c", source=[3])


def test_overrides_that_are_one_text():
    with pytest.raises(ConfigError, match=r"overrides are a list of 'key=value', got the text 'a=1'"):
        read_config(OK, "a=1")


# What is wrong


@pytest.mark.parametrize(
    ("override", "match"),
    [
        (
            "loader.batch_sise=1",
            r"^config: loader\.batch_sise is 1: there is no such key, did you mean 'batch_size'\? Kn",
        ),
        (
            "lodaer.seed=1",
            r"lodaer is \{'seed': 1\}: there is no such key, did you mean 'loader'\? Known: loader, sampl",
        ),
        (
            "batch_size=1",
            r"^config: batch_size is 1: .*did you mean 'loader\.batch_size'\? Known: loader, sampler, source",
        ),
        ("loader.codec=npz", r"loader\.codec is 'npz': there is no such key, did you mean 'source\.codec'\?"),
        ("loader.zzz=1", r"loader\.zzz is 1: there is no such key\. Known: batch_size"),
        ("loader.batch_size=0", r"^config: loader\.batch_size is 0: expected a whole number >= 1$"),
        ("loader.batch_size='64'", r"loader\.batch_size is '64': expected a whole number >= 1$"),
        ("loader.batch_size=1.5", r"loader\.batch_size is 1\.5: expected a whole number >= 1$"),
        ("loader.batch_size=true", r"loader\.batch_size is true: expected a whole number >= 1$"),
        ("loader.batch_size=null", r"^config: loader\.batch_size is missing: expected a whole number >= 1$"),
        ("loader.shuffle=1", r"loader\.shuffle is 1: expected true or false or 'global' or 'shards'$"),
        ("loader.shuffle=shard", r"is 'shard': did you mean 'shards'\? Known: global, shards, or true or false$"),
        ("loader.seed=a", r"loader\.seed is 'a': expected a whole number$"),
        ("loader.tail=dropp", r"loader\.tail is 'dropp': did you mean 'drop'\? Known: drop, pad, partial$"),
        ("loader.tail=1", r"loader\.tail is 1: expected 'drop' or 'pad' or 'partial'$"),
        ("loader.num_workers=-1", r"loader\.num_workers is -1: expected a whole number >= 0 or 'auto'$"),
        ("loader.prefetch=0", r"loader\.prefetch is 0: expected a whole number >= 1$"),
        ("loader.executor=fibres", r"loader\.executor is 'fibres': Known: "),
        (
            "loader.transform=f",
            r"loader\.transform is 'f': expected a function as 'package\.module:function' or a list",
        ),
        (
            "loader.transform=[a:b, c]",
            r"loader\.transform\[1\] is 'c': expected a function as 'package\.module:function'$",
        ),
        ("loader.collate=1", r"loader\.collate is 1: expected a function as 'package\.module:function' or a table$"),
        (
            "loader.collate.x=padd",
            r"loader\.collate\.x is 'padd': did you mean 'pad'\? Known: list, pad, ragged, stack$",
        ),
        ("loader=1", r"^config: loader is 1: expected a table$"),
        ("source=null", r"^config: source is missing: expected a table or a list of tables, at"),
        ("source.path=1", r"source\.path is 1: expected text or a list of text, at least one$"),
        ("source.path=[]", r"source\.path is \[\]: expected text or a list of text, at least one$"),
        ("source.path=[a, 1]", r"^config: source\.path\[1\] is 1: expected text$"),
        ("source.fields=label", r"source\.fields is 'label': expected a list of text, at least one$"),
        ("source.shapes.x=3", r"source\.shapes\.x is 3: expected a list of whole numbers$"),
        ("source.shapes.x=[a]", r"source\.shapes\.x\[0\] is 'a': expected a whole number$"),
        ("source.index=true", r"source\.index is true: expected text or a list of text, at least one or false$"),
        ("source.missing=skp", r"source\.missing is 'skp': did you mean 'skip'\? Known: empty, error, skip$"),
        ("source.options=3", r"source\.options is 3: expected a table$"),
        ("source.options.codec=npz", r"source\.options\.codec is 'npz': belongs one level up: source\.codec$"),
        ("sampler=1", r"sampler is 1: expected a table$"),
        ("sampler.seed=1", r"^config: sampler\.kind is missing: expected 'sequential' or 'global_"),
        ("sampler.kind=globl_shuffle", r"sampler\.kind is 'globl_shuffle': did you mean 'global_shuffle'\? Known: glo"),
        ("sampler.kind=3", r"sampler\.kind is 3: expected 'sequential' or 'global_shuffle' or 'sh"),
        ("sampler={kind='sequential', seed=1}", r"sampler\.seed is 1: .*did you mean 'loader\.seed'\? Known: kind$"),
        (
            "sampler={kind='global_shuffle', sed=1}",
            r"sampler\.sed is 1: .*did you mean 'seed'\? Known: kind, parent, seed$",
        ),
        ("sampler={kind='global_shuffle', seed='x'}", r"^config: sampler\.seed is 'x': expected a whole number$"),
        ("loader.rank=1", r"loader\.rank is 1: rank and world_size go together: give both or none$"),
        ("loader.world_size=2", r"loader\.world_size is 2: rank and world_size go together: give both or none$"),
    ],
)
def test_one_thing_is_wrong(override, match):
    refuse(match, override)


def test_contradictions():
    error = refuse(
        r"^config has 2 errors:\n"
        r"  loader\.shuffle is true: conflicts with the section 'sampler', which chooses the order: remove one .*\n"
        r"  loader\.rank is 2: expected a number below world_size, 2$",
        "loader.shuffle=true",
        "sampler.kind=sequential",
        "loader.rank=2",
        "loader.world_size=2",
    )
    assert (error.key, error.value) == ("loader.shuffle", True)


def test_everything_is_said_at_once(tmp_path):
    path = write(
        tmp_path,
        "bad.toml",
        '[source]\npath = 3\n[sampler]\nkind = "random"\n[loader]\nbatch_size = 0\ntail = "drp"\nshufle = true\n',
    )
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    first, *rest = str(caught.value).split("\n  ")
    assert first == f"{path} has 5 errors:"
    assert [line.partition(" is ")[0] for line in rest] == [
        "source.path",
        "sampler.kind",
        "loader.batch_size",
        "loader.tail",
        "loader.shufle",
    ]
    assert (caught.value.key, caught.value.value) == ("source.path", 3)
    assert caught.value.__cause__ is None
    assert "pydantic" not in str(caught.value)


def test_long_values_are_shortened():
    assert len(str(refuse("is 'xxx.*\\.\\.\\.: expected a whole", f"loader.seed={'x' * 500}"))) < 150


# What becomes of the settings


def test_only_what_was_given_is_passed_on():
    settings = config()
    assert settings.source.open_options() == {}
    assert settings.loader_options(SOURCE) == {"batch_size": 4}


def test_source_options():
    settings = config(
        source={
            "path": "a.tar",
            "format": "tar",
            "fields": ["x"],
            "codec": "npz",
            "decode": {"bin": "math:sqrt", "png": "image"},
            "options": {"own": 1},
        }
    )
    assert settings.source.open_options() == {
        "fields": ("x",),
        "codec": "npz",
        "decode": {"bin": math.sqrt, "png": "image"},
        "own": 1,
    }


def test_index_files_may_be_refused():
    assert config("source.index=false").source.open_options() == {"index": False}
    assert config("source.index=[a.idx]").source.open_options() == {"index": ("a.idx",)}


def test_functions_are_imported():
    options = config(
        "loader.transform=[math:sqrt, json:JSONDecoder.decode]",
        "loader.batch_transform=math:floor",
        "loader.collate=math:prod",
        "source.codec=zlib:decompress",
    )
    found = options.loader_options(SOURCE)
    assert found["transform"] == [math.sqrt, json.JSONDecoder.decode]
    assert (found["batch_transform"], found["collate"]) == (math.floor, math.prod)
    assert options.source.open_options()["codec"].__name__ == "decompress"
    assert config("loader.transform=math:sqrt").loader_options(SOURCE)["transform"] is math.sqrt


def test_a_table_of_policies():
    assert config("loader.collate.x=pad").loader_options(SOURCE)["collate"] == Collate(policies={"x": "pad"})


@pytest.mark.parametrize(
    ("reference", "match"),
    [
        ("no_such_module:f", r"loader\.transform is 'no_such_module:f': importing 'no_such_module' failed \(No module"),
        ("math:sqr", r"loader\.transform is 'math:sqr': math has no 'sqr': did you mean 'sqrt'\?"),
        ("json:JSONDecoder.dekode", r"json has no 'dekode': did you mean 'decode'\?"),
        ("math:pi.x", r"math has no 'x': Known: \(none\)"),
    ],
)
def test_functions_that_do_not_exist(reference, match):
    with pytest.raises(ConfigError, match=match) as error:
        config(f"loader.transform={reference}").loader_options(SOURCE)
    assert error.value.key == "loader.transform"


def test_samplers():
    assert config("sampler.kind=sequential").loader_options(SOURCE)["sampler"] == Sequential(9)
    assert config("sampler.kind=global_shuffle", "loader.seed=5").loader_options(SOURCE)["sampler"] == GlobalShuffle(
        9, 5
    )
    own = config("sampler.kind=global_shuffle", "sampler.seed=6", "loader.seed=5")
    assert own.loader_options(SOURCE)["sampler"] == GlobalShuffle(9, 6)
    assert "sampler" not in config("loader.shuffle=true").loader_options(SOURCE)


# The models say what the classes take


def test_the_section_loader_has_the_loaders_arguments_and_defaults():
    arguments = inspect.signature(Loader).parameters
    elsewhere = {"source", "sampler", "batch_sampler", "fields"}  # sections of their own
    assert set(LoaderConfig.model_fields) == set(arguments) - elsewhere
    for name, field in LoaderConfig.model_fields.items():
        default = arguments[name].default
        assert field.is_required() if default is inspect.Parameter.empty else field.default == default, name


def test_choices_are_the_loaders():
    schema = json_schema()["$defs"]["LoaderConfig"]["properties"]
    for name, choices in (("executor", ExecutorName), ("start_method", StartMethod), ("on_error", OnError)):
        assert tuple(schema[name]["enum"]) == get_args(choices), name


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("num_workers=many", r"loader\.num_workers is 'many': .*auto"),
        ("num_workers=-1", r"loader\.num_workers is -1: expected a whole number >= 0"),
        ("executor=process", r"loader\.executor is 'process': did you mean 'processes'\?"),
        ("on_error=ignore", r"loader\.on_error is 'ignore'"),
        ("timeout=0", r"loader\.timeout is 0"),
        ("exclude=[a]", r"loader\.exclude"),
    ],
)
def test_wrong_settings_of_the_execution_are_named(override, match):
    with pytest.raises(ConfigError, match=match):
        config(f"loader.{override}")


def test_records_to_exclude_are_indices_or_a_report_beside_the_config(tmp_path):
    assert config("loader.exclude=[3, 1]").loader_options(SOURCE)["exclude"] == (3, 1)
    path = tmp_path / "train.toml"
    path.write_text('[source]\npath = "range:9"\n[loader]\nbatch_size = 2\nexclude = "bad.jsonl"\n')
    assert read_config(path).loader.exclude == str(tmp_path / "bad.jsonl")


def test_the_section_source_has_the_options_of_the_formats():
    options = {
        name: None if p.default is p.empty else p.default  # one that a format needs others do not have
        for entry in map(get_format, format_names())
        if entry.takes_paths
        for name, p in inspect.signature(load(entry, "source")).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }
    fields = SourceConfig.model_fields
    assert set(fields) - {"path", "format", "options"} == set(options)
    assert {name: fields[name].default for name in options} == options


def test_shuffle_allows_what_the_loader_does():
    choices = json_schema()["$defs"]["LoaderConfig"]["properties"]["shuffle"]["anyOf"]
    assert choices == [{"type": "boolean"}, {"enum": list(get_args(Shuffle)), "type": "string"}]
    for value in (True, False, *get_args(Shuffle)):
        assert config(loader={"batch_size": 4, "shuffle": value}).loader_options(SOURCE)["shuffle"] == value


def test_the_json_schema_is_one():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["loader"]
    assert schema["additionalProperties"] is False
    described = [
        p for section in schema["$defs"].values() for name, p in section["properties"].items() if name != "kind"
    ]
    assert all("description" in p for p in described), "editors show what a key means"


def test_reading_a_config_imports_no_format(tmp_path):
    import subprocess

    path = write(tmp_path, "a.toml", TOML)
    code = (
        "import sys; from dataload.config import read_config; read_config(sys.argv[1]);"
        "assert not {'lmdb', 'bson', 'torch', 'typer', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True)


def test_several_sources():
    settings = config(source=[{"path": "a.tar", "fields": ["x"]}, {"path": "b.syr"}])
    assert list(settings.sources()) == ["source[0]", "source[1]"]
    assert [section.open_options() for section in settings.sources().values()] == [{"fields": ("x",)}, {}]
    assert list(config().sources()) == ["source"]


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ([], r"^config: source is \[\]: expected a table or a list of tables, at least one$"),
        ([3, {"path": "a"}], r"^config: source\[0\] is 3: expected a table$"),
        (
            [{"path": "a"}, {"path": 3}],
            r"^config: source\[1\]\.path is 3: expected text or a list of text, at least one$",
        ),
        ([{"path": "a"}, {}], r"^config: source\[1\]\.path is missing: expected text or a list"),
        (
            [{"path": "a", "codek": "npz"}],
            r"^config: source\[0\]\.codek is 'npz': there is no such key, did you mean 'codec'",
        ),
        (
            [{"path": "a", "batch_size": 3}],
            r"source\[0\]\.batch_size is 3: .* did you mean 'loader\.batch_size'\? Known: cache, case",
        ),
        (
            [{"path": "a"}, {"path": "b", "options": {"codec": "npz"}}],
            r"^config: source\[1\]\.options\.codec is 'npz': belongs one level up: source\[1\]\.codec$",
        ),
    ],
)
def test_what_is_wrong_in_several_sources(source, match):
    refuse(match, source=source)


def test_functions_of_several_sources():
    section = config(source=[{"path": "a", "codec": "math:sqr"}]).source[0]
    with pytest.raises(ConfigError, match=r"^source\[0\]\.codec is 'math:sqr': math has no 'sqr'"):
        section.open_options("source[0]")


def test_paths_of_several_sources_are_relative_to_the_file(tmp_path):
    table = {**OK, "source": [{"path": "a.syr"}, {"path": "7", "format": "range"}, {"path": ["/b.tar"], "index": "c"}]}
    (tmp_path / "c.json").write_text(json.dumps(table))
    a, number, b = read_config(tmp_path / "c.json").source
    assert (a.path, number.path, b.path, b.index) == (str(tmp_path / "a.syr"), "7", ("/b.tar",), str(tmp_path / "c"))


def test_paths_in_what_is_no_table_are_left_alone(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({**OK, "source": 3, "sampler": "shuffle"}))
    with pytest.raises(ConfigError, match=r"(?s)source is 3: .*sampler is 'shuffle': expected a table"):
        read_config(tmp_path / "c.json")


def test_path_objects_and_posix_paths():
    assert config(source={"path": [Path("a"), PurePosixPath("b")]}).source.path == ("a", "b")


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
