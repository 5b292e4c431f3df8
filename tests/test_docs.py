"""The examples of the documents and of docstrings run as written, and the documents name what exists."""

import doctest
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tables as _opened  # noqa: F401 - the first CSV file opens a pipe that stays open

import dataload
from dataload.cli import version_line

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
WRITTEN = {"config.md", "command-line.md"}  # by scripts/build_docs.py
SCRIPTS = ("python ", "torchrun ")  # what a page may run besides dataload


def test_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("torch")
    scope = {}
    for usage in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(usage, "README.md", "exec"), scope)
    assert sum(scope["rest"]) + 256 == 1000
    assert scope["batch"]["features"].shape == (256, 16)
    for name in ("loader", "train"):
        scope[name].close()


BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in sys.stdlib_module_names and root not in ("dataload", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_with_numpy_only(code, tmp_path, *arguments):
    command = [sys.executable, "-c", BLOCKED + code, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/index.md", marks=pytest.mark.slow_suite)])
def test_the_example_of_files_needs_numpy_only(tmp_path, page):
    (example,) = re.findall(r"```python\n(import dataload\n.*?)```", (ROOT / page).read_text(), re.DOTALL)
    shown = "print(batch['features'].dtype, batch['features'].shape[1:], batch['label'].dtype)"
    done = run_with_numpy_only(f"{example}\n{shown}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "float32 (16,) int64"


def test_the_command_without_its_packages(tmp_path):
    code = "from dataload.__main__ import main\nsys.exit(main())"
    done = run_with_numpy_only(code, tmp_path, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{version_line()}\n", "")
    done = run_with_numpy_only(code, tmp_path, "inspect", "train.tar")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the command line needs typer: pip install 'dataload[cli]' (or only typer)\n"


def test_the_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([\w./-]+)\)", README)
    assert len(links) > 30
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_links_between_pages_lead_to_headings():
    pages = {page.resolve(): page.read_text() for page in (ROOT / "docs").rglob("*.md") if page.name not in WRITTEN}
    open_parts = {page: re.sub(r"<details>.*?</details>", "", text, flags=re.S) for page, text in pages.items()}
    anchors = {
        page: {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in re.findall("^#+ (.+)$", text, re.M)}
        for page, text in open_parts.items()
    }
    links = [
        (page, link, (page.parent / path).resolve() if path else page, anchor)
        for page, text in pages.items()
        for link, path, anchor in re.findall(r"\]\((([\w./-]*)#([\w-]+))\)", text)
    ]
    assert len(links) > 20
    assert [(page.name, link) for page, link, to, anchor in links if to in pages and anchor not in anchors[to]] == []


def test_the_check_of_snippets_keeps_lines_and_files_apart():
    from scripts.check_snippets import modules

    page = "# T\n\n```python\nx = 1\n```\n\n1. So:\n\n   ```python\n   if x:\n       x = 2\n   ```\n\n"
    page += "```python\n# a.py\ny = 1\n```\n```python\ndef shown(): ...\n```\n"
    files = modules("docs/how-to/a-b.md", page, "def shown(): ...\n")
    assert {name: code.splitlines() for name, code in files.items()} == {
        "page_docs_how_to_a_b.py": [*[""] * 3, "x = 1", *[""] * 5, "if x:", "    x = 2"],
        "a.py": [*[""] * 14, "# a.py", "y = 1"],
    }


def run_page(name):
    """Run the examples of a page, and return the names they define."""
    text = (ROOT / "docs" / name).read_text()
    scope = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, f"docs/{name}", "exec"), scope)
    return scope


def run_as_typed(page):
    """Follow a page in the current directory, block by block, and return the names that its Python defines.

    A block that begins with a comment of a file's name is saved as that file. Commands of dataload are run, and so are
    scripts, in a shell. A comment says if a command ends with 1.
    """
    from typer.testing import CliRunner

    from dataload.cli.app import app

    scope = {"__name__": "page"}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        name = re.match(r"# ([\w./-]+\.\w+)\n", block)
        if name:
            Path(name[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(name[1]).write_text(block)
        elif language == "python":
            exec(compile(block, str(page), "exec"), scope)
        elif language == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("mkdir "):
                    Path(line.removeprefix("mkdir ")).mkdir()
                if line.startswith("dataload "):
                    done = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
                    assert done.exit_code == ("# ends with 1" in line), f"{line}\n{done.output}"
                if line.startswith(SCRIPTS):
                    run_in_shell(line)
    return scope


def run_in_shell(line):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # With DDP, torch 2.13 keeps gloo's threads to the end. Python aborts if one of them waits for the GIL just then.
    late = Path("ends_late", "sitecustomize.py").absolute()
    late.parent.mkdir(exist_ok=True)
    late.write_text("import atexit, time\natexit.register(time.sleep, 0.5)\n")
    modules = f"{late.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": modules}
    done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def followed(page):
    """Return the page as a parameter; those that run scripts take long."""
    runs_scripts = re.search(rf"^({'|'.join(SCRIPTS)})", page.read_text(), re.MULTILINE)
    trains = "torch.optim" in page.read_text()  # which imports torch's compiler
    marks = (
        [pytest.mark.train, pytest.mark.timeout(180)] if runs_scripts else [pytest.mark.slow_suite] if trains else []
    )
    return pytest.param(page, id=f"{page.parent.name}/{page.stem}", marks=marks)


BUCKET = ROOT / "docs" / "tutorials" / "bucket.md"  # needs a server
FOLLOWED = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
FOLLOWED.remove(ROOT / "docs" / "how-to" / "pictures.md")  # `make docs` follows it


@pytest.mark.parametrize("page", [followed(page) for page in FOLLOWED if page != BUCKET])
def test_a_page_can_be_followed(page, tmp_path, monkeypatch):
    pytest.importorskip("torch").set_num_threads(1)  # the threads of several tests would wait for each other
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)
    run_as_typed(page).clear()  # closes what the page leaves open
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_page_on_buckets_can_be_followed(object_server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in object_server.environment().items():
        monkeypatch.setenv(name, value)
    page = tmp_path / "page.md"
    page.write_text(BUCKET.read_text().replace("s3://my-bucket", object_server.url(object_server.bucket())))
    downloads = run_as_typed(page)["loader"].statistics().downloads
    assert (downloads.shards_downloaded, downloads.shards_again) == (4, 0)


def test_every_page_is_in_the_navigation():
    written = {f"reference/{page}" for page in WRITTEN}
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} | written
    decisions = {page for page in pages if page.startswith("decisions/")} - {"decisions/index.md"}
    assert pages - decisions == set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "decisions" / "index.md").read_text())
    assert sorted(decisions) == sorted(f"decisions/{name}" for name in listed)


def test_no_page_takes_longer_than_ten_minutes():
    """At 220 words a minute, without what is folded away. What scripts write is for looking up."""
    texts = {path: path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]}
    apart = re.compile(r"<details>.*?</details>|<!-- benchmark:begin -->.*?<!-- benchmark:end -->", re.DOTALL)
    texts = {path: apart.sub("", text) for path, text in texts.items()}
    written = {"config.md", "command-line.md"}
    assert [str(path) for path, text in texts.items() if len(text.split()) > 2200 and path.name not in written] == []


def test_the_generated_pages_name_every_command_and_table():
    from scripts import build_docs

    commands = "\n".join(build_docs.command_page())
    assert {"dataload convert", "dataload cache prune"} <= set(
        re.findall(r"^## (dataload [\w ]+) {", commands, re.MULTILINE)
    )
    assert "| `--max-bad <str>` |" in commands
    config = "\n".join(build_docs.config_page())
    assert "| `batch_size` | integer |  | Rows per batch of this rank. |" in config
    tables = re.findall(r"^## `(.*)`$", config, re.MULTILINE)
    assert tables[:3] == ["[source]", "[loader]", "[remote]"]
    assert '[sampler] kind = "packing"' in tables


def loader_page(scope):
    assert scope["state"]["position"] == 0
    assert 0 < sum(batch["flipped"].sum() for batch in scope["batches"]) < 1000


def torch_page(scope):
    assert sum(map(len, scope["fast"])) == 1000
    scope["fast"].close()


def jax_page(scope):
    assert scope["state"]["epoch"] == 1
    assert scope["batch"]["x"].sharding == scope["sharding"]


def streams_page(scope):
    assert scope["loss"].isfinite()
    scope["tokens"].close()


def orders_page(scope):
    assert len(scope["mixed"]) == len(scope["chosen"])


def converting_page(scope):
    photo = {"jpg": np.full((80, 60, 3), 7, np.uint8), "cls": 3}
    assert scope["resize"](photo)["image"].shape == (224, 224, 3)
    assert scope["keep_large"](photo) is dataload.DROP
    pieces = scope["tokenize"]({"txt": "word " * 400}, dataload.SampleContext(5, 0, 0))
    assert all(len(piece["tokens"]) <= 512 for piece in pieces)


PAGES = {
    "index.md": ("torch", lambda scope: scope["loader"].close()),
    "explanations/exactness.md": ("numpy", len),
    "orders.md": ("numpy", orders_page),
    "past-batches.md": ("numpy", len),
    "loader.md": ("numpy", loader_page),
    "convert.md": ("PIL", converting_page),
    "from-torch.md": ("torch", torch_page),
    "streams.md": ("torch", streams_page),
    "jax.md": ("jax", jax_page),
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.train] if page == "jax.md" else ()) for page in PAGES]
)
def test_a_page_runs(page, tmp_path, monkeypatch):
    package, check = PAGES[page]
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    check(run_page(page))


def test_the_page_on_object_stores_runs(monkeypatch):
    monkeypatch.setattr(dataload, "open", lambda url, decode, **options: dataload.storage.Remote.of(**options))
    assert run_page("object-stores.md")["source"].options.budget == 500 * 10**9


@pytest.fixture(scope="module")
def distributed():
    """torch.distributed, whose first store opens a pipe that stays open."""
    found = pytest.importorskip("torch.distributed")
    found.TCPStore("127.0.0.1", 0, is_master=True)
    return found


def test_the_page_on_ranks_runs(monkeypatch, distributed):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    try:
        scope = run_page("ranks.md")
    finally:
        distributed.destroy_process_group()
    assert scope["state"]["epoch"] == 1
    assert scope["place"] == {"rank": 0, "world_size": 1}
    scope["loader"].close()


def test_the_page_on_checkpoints_runs_or_shows_parts_of_the_examples(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    own, *shown = re.findall(r"```python\n(.*?)```\n(?:\nFrom .*?\(\.\./(.*?)\))?", text, re.DOTALL)
    for _ in range(2):  # the second run continues where the first one saved its last state
        exec(compile(own[0], "docs/checkpoints.md", "exec"), scope := {})
        scope["loader"].close()
    assert scope["loader"].statistics().steps == 3
    (grown,) = [block for block, example in shown if not example]
    exec(compile(grown, "docs/checkpoints.md", "exec"), {"dataload": dataload})
    assert len(shown) == 6
    for block, example in shown:
        if not example:
            continue
        part, whole = (re.sub(r"\s*\n\s*", "\n", code) for code in (block, (ROOT / example).read_text()))
        assert part in whole, example


@pytest.mark.slow_suite
def test_the_page_on_own_sources_runs(tmp_path):
    text = (ROOT / "docs" / "own-source.md").read_text()
    scope = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if name := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / name[1]).write_text(block)
        else:
            exec(compile(block, "docs/own-source.md", "exec"), scope)
    assert sorted(scope["batch"]) == ["x", "y"]
    assert {"check_repr", "check_wrong_index_types"} <= set(scope["failed"])

    def run(*command):
        command = [sys.executable, "-m", *command]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=55, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    (tmp_path / "train.lines").write_text('{"a": 1}\n{"a": 2}\n')
    (command,) = re.findall(r"```sh\ndataload (.*?)\n```", text)
    assert run("dataload", *shlex.split(command)).splitlines()[-1].endswith("2 records: all can be read")

    (group,) = tomllib.loads("\n".join(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)))["project"][
        "entry-points"
    ].items()
    info = tmp_path / "json_lines-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: json-lines\nVersion: 1.0\n")
    entry_points = "".join(f"{name} = {value}\n" for name, value in group[1].items())
    (info / "entry_points.txt").write_text(f"[{group[0]}]\n{entry_points}")
    run("dataload", "convert", "train.lines", "out.lines", "--to-option", "sort_keys=true")
    assert (tmp_path / "out.lines").read_text() == '{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize(
    ("picture", "settings"),
    [
        ("split", {"rows": 3}),
        ("pack", {"rows": 3, "mode": "pack"}),
        ("independent", {"rows": 3, "mode": "independent"}),
        ("shuffled", {"rows": 3, "mode": "shuffled"}),
        ("next", {"rows": 2, "chunk": 4}),
        ("pad", {"rows": 2, "chunk": 4, "ends": "pad"}),
        ("drop", {"rows": 2, "chunk": 4, "ends": "drop"}),
    ],
)
def test_the_page_on_streams_draws_what_rows_get(picture, settings):
    from dataload.streams import StreamSampler

    text = (ROOT / "docs" / "streams.md").read_text()
    (drawn,) = re.findall(rf"```{picture}\n(.*?)```", text, re.DOTALL)
    names = [f"{name}{i}" for name, length in zip("ABCD", (9, 5, 3, 7), strict=True) for i in range(length)]
    sampler = StreamSampler(sequence_lengths=[9, 5, 3, 7], seed=0, **settings)
    rows = [[] for _ in range(sampler.rows)]
    for plan in sampler.plans(range(sampler.steps(0)), epoch=0):
        cells = zip(plan.indices, plan.valid.ravel(), plan.columns["is_first"].ravel(), strict=True)
        for i, (index, valid, first) in enumerate(cells):
            rows[i // sampler.chunk].append(("|" if first else "") + (names[index] if valid else ".."))
    assert [re.findall(r"\|?[A-D.][\d.]", line) for line in drawn.splitlines()] == rows


def test_the_page_on_orders_names_every_kind_and_class():
    from dataload import samplers
    from dataload.config import json_schema

    text = (ROOT / "docs" / "orders.md").read_text()
    kinds = {
        definition["properties"]["kind"]["const"]
        for definition in json_schema()["$defs"].values()
        if "const" in definition.get("properties", {}).get("kind", {})
    }
    streams = re.findall(r'^kind = "(\w+)"', (ROOT / "docs" / "streams.md").read_text(), re.MULTILINE)
    assert kinds == {*re.findall(r"^\| `\w+\(.*?\| `(\w+)` \|", text, re.MULTILINE), *streams}
    documented = set(re.findall(r"^\| `(\w+)\(", text, re.MULTILINE))
    orders = {name for name in samplers.__all__ if hasattr(getattr(samplers, name), "records")}
    assert documented == orders - {"BatchPlanner", "BatchSampler", "OrderReport"}


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_paths_that_a_page_names_exist(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL).replace("NAME", "tar")
    named = set(re.findall(r"`([\w./-]+(?:/|\.(?:py|md|json|toml)))`", text))
    folders = ROOT, ROOT / "dataload", ROOT / "dataload/sources/tar"  # the last for `__init__.py` of any format
    assert len(named) > 5
    assert [name for name in sorted(named) if not any((folder / name).exists() for folder in folders)] == []


def test_the_page_on_the_architecture_lists_the_layers():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \| ", text.partition("## Layers")[2].partition("\n## ")[0], re.MULTILINE)
    listed = [{Path(name).stem for name in re.findall(r"`(.*?)`", row)} for row in rows]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert listed == [set(layer.split(" | ")) for layer in contracts[0]["layers"]]


def _with_examples():
    for path in sorted(ROOT.glob("dataload/**/*.py")):
        if ">>> " in path.read_text():  # torch's profiler imports its compiler, for seconds
            yield pytest.param(path, marks=pytest.mark.timeout(60) if path.name == "ranks.py" else ())


@pytest.mark.parametrize("path", [*_with_examples()])
def test_docstring_examples(path):
    assert not re.search("^ +Example:$", path.read_text(), re.MULTILINE), "the reference knows Examples: only"
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    results = doctest.testmod(
        pytest.importorskip(name, exc_type=ImportError), extraglobs={"np": np}, optionflags=doctest.ELLIPSIS
    )
    assert results.failed == 0
