"""The examples of README.md and of docstrings run as they are written."""

import doctest
import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usage, from_config = blocks("python")
    (toml,) = blocks("toml")
    scope = {}
    exec(compile(usage, "README.md", "exec"), scope)
    assert sum(scope["rest"]) + 256 == 1000
    assert scope["batch"]["features"].shape == (256, 16)
    scope["loader"].close()

    import dataload

    pytest.importorskip("torch")
    with dataload.create("train.tar") as writer:
        writer.extend(dataload.open("train.syr"))
    Path("train.toml").write_text(toml)
    exec(compile("import dataload\n" + from_config, "README.md", "exec"), scope)
    batch = next(iter(scope["loader"]))
    assert batch["features"].shape == (64, 16)
    assert tomllib.loads(toml)["source"]["path"] == "train.tar"
    scope["loader"].close()


def run_page(name):
    """The names that the examples of a page have left."""
    text = (ROOT / "docs" / name).read_text()
    scope = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, f"docs/{name}", "exec"), scope)
    return scope


def test_the_page_on_orders_runs():
    scope = run_page("orders.md")
    assert len(scope["mixed"]) == len(scope["chosen"])


def test_the_page_on_the_loader_runs():
    scope = run_page("loader.md")
    assert scope["state"]["position"] == 0
    assert 0 < sum(batch["flipped"].sum() for batch in scope["batches"]) < 1000


def test_the_page_on_orders_names_every_kind_and_class():
    from dataload import samplers
    from dataload.config import json_schema

    text = (ROOT / "docs" / "orders.md").read_text()
    kinds = {
        definition["properties"]["kind"]["const"]
        for definition in json_schema()["$defs"].values()
        if "const" in definition.get("properties", {}).get("kind", {})
    }
    assert kinds == set(re.findall(r"^\| `\w+\(.*?\| `(\w+)` \|", text, re.MULTILINE))
    documented = set(re.findall(r"^\| `(\w+)\(", text, re.MULTILINE))
    orders = {name for name in samplers.__all__ if hasattr(getattr(samplers, name), "records")}
    assert documented == orders - {"BatchPlanner", "BatchSampler", "OrderReport"}


def test_the_readme_names_the_commands_that_exist():
    named = set(re.findall(r"^dataload (\w+)", README, re.MULTILINE))
    import typer

    app = importlib.import_module("dataload.cli.app").app
    assert named == set(typer.main.get_command(app).commands)


@pytest.mark.parametrize(
    "module",
    [
        "collate",
        "errors",
        "loader",
        "sharding",
        "types",
        "sources.memory",
        "samplers.batch",
        "samplers.pool_quality",
        "samplers.quality",
        "samplers.shuffle",
        "state",
    ],
)
def test_docstring_examples(module):
    found = importlib.import_module(f"dataload.{module}")
    import numpy as np

    results = doctest.testmod(found, extraglobs={"np": np}, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
