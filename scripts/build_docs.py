"""Write what the documents take from code: two pages of the reference, and the pictures in docs/pictures/."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from dataload import Loader, RangeSource
from dataload.cli.app import app
from dataload.config import json_schema

DOCS = Path(__file__).parents[1] / "docs"
REFERENCE, PICTURES = DOCS / "reference", DOCS / "pictures"
_TABLES = {
    "SourceConfig": "[source]",
    "LoaderConfig": "[loader]",
    "RemoteConfig": "[remote]",
    "Fleet": "[loader.executor]",
}


def config_page() -> Iterator[str]:
    """Yield the lines of a table for each table of a config."""
    schema = json_schema()
    yield "# Config files\n"
    yield "Settings for `dataload.from_config` and the commands that take a config, as TOML, YAML, JSON or a dict."
    yield "`dataload schema` prints them as a JSON schema, for editors.\n"
    yield from _keys(schema)
    for name in (*_TABLES, *(name for name in schema["$defs"] if name not in _TABLES)):
        table = schema["$defs"][name]
        kind = table["properties"].get("kind", {}).get("const")
        title = _TABLES.get(name, f'[sampler] kind = "{kind}"')
        yield f"\n## `{title}`\n\n{_text(table['description'])}\n"
        yield from _keys(table)


def _keys(table: Mapping[str, Any]) -> Iterator[str]:
    keys = {name: key for name, key in table["properties"].items() if name != "kind"}
    if keys:
        yield "| key | type | default | meaning |\n|---|---|---|---|"
    for name, key in keys.items():
        default = "required" if name in table.get("required", ()) else ""
        if key.get("default") is not None:
            default = f"`{json.dumps(key['default'])}`"
        yield f"| `{name}` | {_cell(_type(key))} | {default} | {_cell(_text(key.get('description', '')))} |"


def _type(key: Mapping[str, Any]) -> str:
    """Return the type of a value in words."""
    if "anyOf" in key or "oneOf" in key:
        words = [_type(choice) for choice in key.get("anyOf") or key["oneOf"]]
        return " or ".join(dict.fromkeys(word for word in words if word != "null"))
    if "$ref" in key:
        return "table"
    if "enum" in key or "const" in key:
        return " or ".join(f"`{json.dumps(value)}`" for value in key.get("enum", [key.get("const")]))
    if key.get("type") == "array" and "items" in key:
        return f"list of {_type(key['items'])}"
    name = str(key.get("type", "any"))
    return {"object": "table", "number": "float", "array": "list"}.get(name, name)


def command_page() -> Iterator[str]:
    """Yield the lines of a section for each command."""
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="dataload")
    yield f"# Command line\n\n{_text(root.help or '')}\n"
    yield "Every command has `--help`. Exit codes: 0; 1 for bad data; 2 for wrong usage; 130 after Ctrl-C.\n"
    commands = list(_commands(root, context))
    yield "| command | does |\n|---|---|"
    for path, command in commands:
        yield f"| [`{path}`](#{path.replace(' ', '-')}) | {_cell(command.get_short_help_str(200))} |"
    for path, command in commands:
        yield f"\n## {path} {{#{path.replace(' ', '-')}}}\n\n{_text(command.help or '')}\n"
        yield "| argument or option | meaning |\n|---|---|"
        with typer.Context(command, info_name=path) as inner:
            for parameter in command.get_params(inner):
                yield from _parameter(parameter, inner)


def _commands(group: Any, context: Any) -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        path = f"{context.command_path} {name}"
        if hasattr(command, "list_commands"):
            yield from _commands(command, typer.Context(command, info_name=name, parent=context))
        elif not command.hidden:
            yield path, command


def _parameter(parameter: Any, context: Any) -> Iterator[str]:
    record = parameter.get_help_record(context)
    if record and "--help" not in parameter.opts:
        name, meaning = record
        yield f"| `{_cell(' '.join(name.split()))}` | {_cell(meaning)} |"


def _text(text: str) -> str:
    """Return reStructuredText of docstrings as Markdown."""
    return re.sub(r"``(.+?)``", r"`\1`", text.replace("\f", "").replace("\b", ""))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def make_pictures() -> None:
    """Follow docs/how-to/pictures.md, and keep the pictures that its commands make."""
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "one-order.svg").write_text("\n".join(one_order()), "utf-8")
    page = DOCS / "how-to" / "pictures.md"
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, Path(__file__).with_name("follow.py"), page], cwd=folder, check=True)
        for made in [*Path(folder).glob("*.svg"), *Path(folder).glob("*.html")]:
            (PICTURES / made.name).write_bytes(made.read_bytes())


def one_order() -> Iterator[str]:
    """Yield the lines of a picture of one shuffled order of 24 records, as four kinds of loaders serve it."""
    settings: dict[str, Any] = {"shuffle": True, "seed": 7}

    def batches(loader: Any) -> list[list[int]]:
        return [batch["index"].tolist() for batch in loader]

    ranks = [batches(Loader(RangeSource(24), batch_size=2, rank=r, world_size=2, **settings)) for r in range(2)]
    stopped = Loader(RangeSource(24), batch_size=4, **settings)
    before = [batch for _, batch in zip(range(3), iter(stopped), strict=False)]
    resumed = Loader(RangeSource(24), batch_size=6, **settings)
    resumed.load_state_dict(stopped.state_dict())
    rows = {
        "batches of 4, no workers": batches(Loader(RangeSource(24), batch_size=4, num_workers=0, **settings)),
        "3 workers": batches(Loader(RangeSource(24), batch_size=4, num_workers=3, **settings)),
        "2 ranks of 2": [[n for pair in zip(*step, strict=True) for n in pair] for step in zip(*ranks, strict=True)],
        "killed after 3, then batches of 6": [batch["index"].tolist() for batch in before] + batches(resumed),
    }
    stopped.close()
    colours = ("#cce5f6", "#fbe3b5")  # tints of Okabe and Ito's sky blue and orange
    yield '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 190" font-family="sans-serif" font-size="15">'
    yield '<rect width="1000" height="190" fill="white"/>'
    for row, (title, groups) in enumerate(rows.items()):
        yield f'<text x="8" y="{row * 44 + 34}">{title}</text>'
        column = 0
        for number, group in enumerate(groups):
            for record in group:
                x, y = 258 + 30 * column, row * 44 + 14
                yield f'<rect x="{x}" y="{y}" width="28" height="30" fill="{colours[number % 2]}"/>'
                yield f'<text x="{x + 14}" y="{y + 20}" text-anchor="middle">{record}</text>'
                column += 1
    yield "</svg>"


if __name__ == "__main__":
    make_pictures()
    for page, lines in {"config.md": config_page(), "command-line.md": command_page()}.items():
        (REFERENCE / page).write_text("\n".join(lines) + "\n", "utf-8")
