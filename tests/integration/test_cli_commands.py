"""What all commands have in common: their paths, their texts, their help, and how they end."""

import ast
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from command_line import fail, ok, run
from rich.console import Console
from typer.testing import CliRunner

import dataload
import dataload.__main__
from dataload.cli import output
from dataload.cli.app import app
from dataload.cli.output import as_typed, options_typed
from dataload.sources.registry import built_in_formats

GROUPS = ("cache", "fleet")  # of commands
ROOT = typer.main.get_command(app)
COMMANDS = [
    *([name] for name in ROOT.commands if name not in GROUPS),
    *([group, name] for group in GROUPS for name in ROOT.get_command(None, group).commands),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with data, configs, and a module that only the command line finds."""
    (tmp_path / "my_code.py").write_text(
        "def numbers(count=20):\n"
        "    return [{'x': i, 'name': str(i)} for i in range(count)]\n"
        "def double(sample):\n"
        "    return {**sample, 'x': 2 * sample['x']}\n"
    )
    with dataload.create(tmp_path / "a.syr") as writer:
        writer.extend({"x": np.array(i)} for i in range(20))
    (tmp_path / "a.toml").write_text(
        '[source]\npath = "a.syr"\n[loader]\nbatch_size = 4\ntransform = "my_code:double"\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    yield tmp_path
    sys.modules.pop("my_code", None)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("inspect my_code:numbers", "function: 20 records"),
        ("inspect my_code:numbers -o count=7 --json", '"records": 7'),
        ("stats my_code:numbers", "not kept: the data have no files"),
        ("stats range:7", "0 to 6"),
        ("show my_code:numbers --records 3", "name: '3'"),
        ("convert my_code:numbers b.parquet", "20 records in b.parquet"),
        ("convert my_code:numbers b.syr --engine local --shards 2", "20 records in b-{00000..00001}"),
        ("convert a.syr b.syr --map my_code:double", "20 records in b.syr"),
        pytest.param(
            "bench my_code:numbers --formats syrah --workers 0 --seconds 0.05 --repeats 1 --cache cache",
            "us/batch",
            marks=pytest.mark.slow_suite,
        ),
        ("order a.toml --steps 1", "4 5 6 7"),
        ("show a.toml --step 1", "8 to 14"),
        ("trace a.toml --index 3", "served 3 times"),
        ("certify a.toml --steps 0:2 --output c.json", "wrote c.json: 2 steps"),
        ("timeline a.toml --steps 2", "consumer made 2 batches"),
    ],
)
def test_functions_of_the_current_directory_go_where_paths_go(here, command, found):
    before = [*sys.path]
    result = run(*command.split())
    assert (result.exit_code, found in result.output) == (0, True), result.output
    assert "warning" not in result.output
    assert sys.path == before
    assert not (here / "cache").exists() or not [*(here / "cache").iterdir()]  # nobody could tell what it returned


SAID = re.compile(r"""(?<![\w.(,)"'{}-])(?<!, )(?<!\w\()\b([a-z_]+)=""")


def messages(*places):
    """Yield the texts in the code that mention keyword arguments, with X in place of values."""
    root = Path(dataload.__file__).parent
    for file in sorted(file for place in places for file in (root / place).rglob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        nodes = [*ast.walk(tree)]
        apart = {node.value for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        apart |= {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
                yield "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in apart:
                yield node.value


def options_of(name):
    return frozenset(option for each in ROOT.get_command(None, name).params for option in each.opts)


@pytest.mark.slow_suite
def test_texts_name_options_as_one_types_them():
    """Of every text in the library that mentions an argument which `convert` or a format has as an option."""
    formats = built_in_formats()
    of_formats = {
        name
        for each in formats
        for kind in ("reader_options", "writer_options")
        for name in getattr(each, kind).names()
    }
    options = options_of("convert")
    known = {option.removeprefix("--").replace("-", "_") for option in options} | of_formats | {"fields"}
    seen = set()
    with options_typed(options):
        for text in messages("sources", "codecs", "convert", "storage"):
            wanted = {name for name in SAID.findall(text) if name in known}
            seen |= wanted
            left = {name for name in SAID.findall(re.sub(r"--(to-)?option \S+", "", as_typed(text))) if name in known}
            assert not left, (text, as_typed(text))
    assert {"format", "fields", "overwrite", "resume", "keep_key", "missing", "index", "pattern"} <= seen


@pytest.mark.parametrize(
    ("command", "text", "typed"),
    [
        ("convert", "pass format=, one of a, b", "pass --format, one of a, b"),
        ("convert", "choose fields=[...], or resume=True", "choose --field NAME, or --resume"),
        ("convert", "with shards=N, or records_per_shard=N", "with --shards N, or --records-per-shard N"),
        ("convert", "on_error='skip' leaves them out", "--on-error skip leaves them out"),
        ("convert", "pass missing='skip' or index=False", "pass --option missing=skip or --to-option index=false"),
        ("convert", "pass ragged=['a']", "pass --to-option 'ragged=[\"a\"]'"),
        ("inspect", "pass pattern='{key}.*'", "pass --option 'pattern={key}.*'"),
        ("inspect", "pass ragged=['a'] or resume=True", "pass ragged=['a'] or resume=True"),
        ("order", "pass format='tar', missing='skip'", "pass format='tar', missing='skip'"),
        ("inspect", "TarSource('a', decode='auto') f(decode=3)", "TarSource('a', decode='auto') f(decode=3)"),
        ("convert", "no split=a-1/part=2/x.tar", "no split=a-1/part=2/x.tar"),  # directories
    ],
)
def test_options_in_texts(command, text, typed):
    with options_typed(options_of(command)):
        assert as_typed(text) == typed
    assert as_typed("pass format=") == "pass format="


@pytest.mark.parametrize("arguments", [[], ["cache"]], ids=["dataload", "dataload cache"])
def test_no_command_is_answered_by_the_help_alone(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage: dataload" in result.output
    assert "error:" not in result.output


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (200, ["field     range", "features  one two three four five six"]),
        (30, ["field     range", "features  one two three four", "          five six"]),
        (20, ["field     range", "features  one two three four five six"]),  # for the terminal to break
    ],
)
def test_tables_keep_words_whole_on_narrow_terminals(monkeypatch, capsys, width, lines):
    monkeypatch.setattr(output, "_console", lambda: Console(width=width, color_system=None))
    output.print_table({"field": "left", "range": "left"}, [("features", "one two three four five six")])
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_and_an_interrupt_is_quiet(command, monkeypatch):
    for width in (60, 200):
        text = CliRunner().invoke(app, [*command, "--help"], prog_name="dataload", terminal_width=width).stdout
        assert "Usage: dataload" in text
        assert "\x1b" not in text
        help_text, example, options = re.fullmatch(
            r"(.*?)(  Examples?:.*?\n\n|)((?:Arg|Opt).*)", text, re.DOTALL
        ).groups()
        assert max(map(len, (help_text + options).splitlines())) <= width
        assert all(line.count("dataload ") <= 1 for line in example.splitlines()), "each on a line of its own"

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(typer.core.TyperCommand, "invoke", interrupted)
    takes_none = command in (["schema"], ["cache", "status"], ["cache", "prune"], ["fleet", "status"])
    arguments = [] if takes_none else ["x", "y"] if command == ["convert"] else ["x"]
    result = run(*command, *arguments)
    assert (result.exit_code, result.output) == (130, "error: interrupted\n")


def test_ctrl_c_while_the_command_line_is_imported(monkeypatch, capsys):
    class Interrupted:
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "dataload.cli.app", Interrupted())
    assert dataload.__main__.main() == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize(
    ("words", "count", "found"),
    [
        ("dataload ins", 1, "inspect\n"),
        ("dataload cache pr", 2, "prune\n"),
        ("dataload convert --over", 2, "--overwrite\n"),
    ],
)
def test_completion(words, count, found):
    result = run(_DATALOAD_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(count))
    assert (result.exit_code, result.output) == (0, found)
    assert "complete -o default" in run(_DATALOAD_COMPLETE="source_bash").output


def labels(directory):
    path = directory / "a.jsonl"
    path.write_text("".join(f'{{"label": {row % 4}, "row": {row}}}\n' for row in range(200)))
    os.utime(path, (0, 0))  # what is found in data that have just been written is not kept, which is warned of
    return path


def test_commands_show_the_records_that_are_selected(tmp_path):
    selected = labels(tmp_path), "--where", "label == 3"
    assert json.loads(ok("inspect", *selected, "--json"))["sample"] == {"label": "3", "row": "3"}
    ((found,),) = (report["data_sets"] for report in json.loads(ok("stats", *selected, "--json")))
    assert (found["records"], found["statistics"]["fields"]["row"]["numbers"]["minimum"]) == (50, 3)
    assert "index 1: record 7 of" in ok("show", *selected, "--records", "0:2")
    assert "parts and engines measure whole shards" in fail(2, "stats", *selected, "--part", "1/2").output
    assert not [*tmp_path.glob("*.json")]  # no manifest


def test_convert_writes_the_records_that_are_selected(tmp_path):
    arguments = ["convert", labels(tmp_path), tmp_path / "b.jsonl", "--where", "label != 0"]
    text = ok(*arguments, "--split", "train=.8, val=0.2, exact=true,seed=3", "--take", "val")
    assert "train: 120 of 150 records, 80.00% for 80.00%\nval: 30 of 150 records, 20.00% for 20.00%\n" in text
    found = dataload.open(tmp_path / "b.jsonl")
    assert len(found) == 30
    assert 0 not in found.read_batch(range(30))["label"]
    assert "--split names the parts, and --take the one to read" in fail(2, *arguments, "--take", "val").output
    twice = ("--split", "train=.8,val=.2,train=.8", "--take", "train", "--overwrite")
    assert "'train' stands twice" in fail(2, *arguments, *twice).output
    text = ok(*arguments, "--split", "folds=5,exact=true", "--take", "train-4", "--overwrite")
    assert "fold 4: 30 of 150 records, 20.00% for 20.00%\n" in text
    assert len(dataload.open(tmp_path / "b.jsonl")) == 120
    assert (
        "error: the part is 'test-5': did you" in fail(2, *arguments, "--split", "folds=5", "--take", "test-5").output
    )
