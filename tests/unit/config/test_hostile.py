"""Configs that would take long, or raise other errors than ConfigError, if they were believed."""

import json
import time

import pytest

from dataload.config import parse_assignment, read_config
from dataload.errors import ConfigError

DEEP = 5_000


def aliases(levels: int, each: int = 9) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * each)}]" for i in range(1, levels)]
    return "\n".join(lines)


def merges(levels: int) -> str:
    return "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, levels))])


def shared(levels: int, make=list) -> object:
    value: object = ["x"] * 10
    for _ in range(levels):
        value = make([value] * 10) if make is list else {str(i): value for i in range(10)}
    return value


def nested(levels: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def circular() -> dict[str, object]:
    table: dict[str, object] = {"loader": {"batch_size": 4}}
    table["source"] = [table]
    return table


FILES = {
    "aliases": ("a.yaml", aliases(9), r"a\.yaml: a\d: the same tables and lists add more than 20,000 repeated"),
    "merges": ("a.yaml", merges(30), r"takes over more than 20,000 keys|a29 is \['x'\]: there is no such key"),
    "merged twice": ("a.yaml", "a: &a {" + ", ".join(f"k{i}: 1" for i in range(1_000)) + "}\nb: {<<: ["
                     + "*a, " * 1_000 + "*a]}", r"over more than 20,000 keys|a is .*there is no such key"),
    "yaml, itself": ("a.yaml", "source: &a [*a]", r"nested more than 64 deep, or contain themselves"),
    "yaml, itself as a key": ("a.yaml", "&a {*a : 1}", r"a\.yaml is not valid YAML: .* unhashable key"),
    "yaml, deep": ("a.yaml", "source: " + "[" * DEEP, r"a\.yaml: brackets at line 1 are nested more than 64 deep"),
    "yaml, deep blocks": ("a.yaml", "- " * DEEP, r"a\.yaml is not valid YAML: maximum recursion depth"),
    "yaml, deep keys": ("a.yaml", "? " * DEEP, r"a\.yaml is not valid YAML: maximum recursion depth"),
    "yaml, deep and closed": ("a.yaml", "source:\n  " + "- " * 100 + "x", r"a\.yaml: source: .* more than 64 deep"),
    "yaml, digits": ("a.yaml", "loader: {seed: " + "9" * DEEP + "}",
                     r"a\.yaml: the value at line 1 has 5000 characters, without quotes"),
    "yaml, base 60": ("a.yaml", "loader: {seed: 1" + ":59" * 10_000 + "}", r"the value at line 1 has 30001 characters"),
    "yaml, hex": ("a.yaml", "loader: {seed: 0x" + "f" * 90 + "}", r"seed: an integer of 360 bits; the limit is 256"),
    "yaml, date": ("a.yaml", "loader: {seed: 2001-99-99}", r"a\.yaml is not valid YAML: month must be in 1\.\.12"),
    "yaml, bool": ("a.yaml", "a: !!bool x", r"a\.yaml is not valid YAML: 'x'"),
    "yaml, timestamp": ("a.yaml", "a: !!timestamp x", r"a\.yaml is not valid YAML: 'NoneType' object"),
    "yaml, key": ("a.yaml", "0x" + "f" * 90 + ": 1", r"a\.yaml: keys are text, got \d+\.\.\. \(int\)"),
    "yaml, many keys": ("a.yaml", "a: {" + ", ".join(["k: 1"] * 300) + "}", r"the table at line 1 has two keys 'k'"),
    "toml, deep": ("a.toml", "x = " + "[" * DEEP, r"a\.toml is not valid TOML: maximum recursion depth"),
    "toml, tables": ("a.toml", "x = " + "{a=" * DEEP, r"a\.toml is not valid TOML: maximum recursion depth"),
    "toml, dots": ("a.toml", "a." * DEEP + "b = 1", r"a\.toml is not valid TOML: a key has 64 parts or more"),
    "toml, spaces": ("a.toml", "x = {" + "'a' . " * DEEP + "b = 1}", r"TOML: a key has 64 parts or more"),
    "toml, quotes": ("a.toml", "[" + '"a".' * DEEP + "b]", r"TOML: a key has 64 parts or more"),
    "toml, digits": ("a.toml", "x = " + "9" * DEEP, r"a\.toml is not valid TOML: Exceeds the limit \(4300 digits\)"),
    "toml, hex": ("a.toml", "x = 0x" + "f" * DEEP, r"a\.toml: x: an integer of 20,000 bits; the limit is 256"),
    "toml, date": ("a.toml", "x = 2001-99-99", r"a\.toml is not valid TOML: "),
    "json, deep": ("a.json", '{"x": ' + "[" * DEEP, r"not valid JSON: (maximum recursion depth|Expecting value)"),
    "json, digits": ("a.json", '{"x": ' + "9" * DEEP + "}", r"a\.json is not valid JSON: Exceeds the limit"),
    "json, date": ("a.json", '{"x": 2001-99-99}', r"a\.json is not valid JSON: Expecting ',' delimiter"),
    "json, findings": ("a.json", json.dumps({"source": {"path": [[1, 2, 3]] * 2_000}, "loader": {"batch_size": 4}}),
                       r"a\.json has \d+ errors"),
    "long": ("a.json", " " * (4 << 20) + "{}", r"a\.json has more than 4,194,304 characters, so it is hardly a config"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "match"), FILES.values(), ids=FILES)
def test_files(tmp_path, name, text, match):
    (tmp_path / name).write_text(text)
    check(lambda: read_config(tmp_path / name), match)


TABLES = {
    "repeated lists": ({"source": {"path": shared(9)}}, "config: source: path: the same tables and lists add more"),
    "repeated tables": ({"source": shared(9, dict)}, "config: source: .*: the same tables and lists add"),
    "itself": (circular(), "config: source: source: .* are nested more than 64 deep, or contain themselves"),
    "deep": (nested(DEEP), "config: a: .* are nested more than 64 deep"),
    "too deep": (nested(65), "config: a: .* are nested more than 64 deep"),
    "not too deep": (nested(64), "there is no such key: choose from loader"),
    "not too many bits": ({"loader": {"seed": 2**256 - 1, "sead": 1}}, "sead"),
    "digits": ({"loader": {"seed": 10**DEEP}}, r"config: loader: seed: an integer of 16,610 bits; the limit is 256"),
    "key": ({10**DEEP: 1}, r"config: keys are text, got a value of type int \(int\): put it in quotes"),
    "date": ({"source": {"path": "a.tar"}, "loader": {"batch_size": "2001-99-99"}}, "batch_size is '2001-99-99'"),
}  # fmt: skip


@pytest.mark.parametrize(("table", "match"), TABLES.values(), ids=TABLES)
def test_tables(table, match):
    check(lambda: read_config(table), match)


OVERRIDES = {
    "deep key": ("a." * DEEP + "b=1", r"'a\.a\..*\.\.\. is not 'key=value'"),
    "deep index": ("a" + "[0]" * DEEP + "=1", r"'a\[0\]\[0\].*|'a\.0.* is not 'key=value'"),
    "deep value": (
        "loader.batch_size=" + "[" * 900 + "]" * 900,
        r"loader\.batch_size is '\[\[\[|batch_size: .* more than 64 deep",
    ),
    "deeper value": ("loader.batch_size=" + "[" * DEEP, r"loader\.batch_size is '\[\[\["),
    "digits": ("loader.batch_size=" + "9" * DEEP, r"loader\.batch_size is '999.*expected a whole number"),
    "hex": ("loader.batch_size=0x" + "f" * DEEP, r"config: loader: batch_size: an integer of 20,000 bits"),
    "index": ("source.path[" + "9" * DEEP + "]=1", r"'path' is a list of 1"),
    "date": ("loader.batch_size=2001-99-99", r"loader\.batch_size is '2001-99-99'"),
}


@pytest.mark.parametrize(("override", "match"), OVERRIDES.values(), ids=OVERRIDES)
def test_overrides(override, match):
    table = {"source": {"path": ["a.tar"]}, "loader": {"batch_size": 4}}
    check(lambda: read_config(table, [override]), match)


def check(read, match):
    with pytest.raises(ConfigError):  # so that imports do not count
        read_config({"loader": {"batch_size": "x"}})
    begun = time.process_time()
    with pytest.raises(ConfigError, match=match):
        read()
    assert time.process_time() - begun < 0.5  # 0.1 s on a quiet machine; without limits, many seconds


def test_keys_have_at_most_63_dots():
    assert len(parse_assignment("a." * 63 + "b=1")[0]) == 64
    with pytest.raises(ConfigError, match="is not 'key=value'"):
        parse_assignment("a." * 64 + "b=1")
