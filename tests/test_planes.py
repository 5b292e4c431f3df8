"""Only storage and executors touch files; formats, codecs, the catalog, orders and the loader ask storage."""

import ast
import graphlib
from pathlib import Path

import pytest

import dataload

ROOT = Path(dataload.__file__).parent
FORBIDDEN_MODULES = {"glob", "mmap", "pathlib", "resource", "shutil", "tempfile"}
ALLOWED_OF_OS = {"PathLike", "environ", "fspath", "getpid", "getppid", "strerror"}


def _modules():
    for name in ("sources", "catalog", "codecs", "samplers", "loader", "collate", "text"):
        yield from sorted((ROOT / name).rglob("*.py"))
    yield ROOT / "transforms.py"


def violations(tree):
    """Yield what a module does with files by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield node.lineno, "open()"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in FORBIDDEN_MODULES or alias.name.startswith("os."):
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = (node.module or "").partition(".")[0]
                if module in FORBIDDEN_MODULES or (module == "os" and alias.name not in ALLOWED_OF_OS):
                    yield node.lineno, f"from {node.module} import {alias.name}"
        elif (
            isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "os" and node.attr not in ALLOWED_OF_OS
        ):
            yield node.lineno, f"os.{node.attr}"


def test_no_files_outside_of_storage():
    found = [f"{path}:{line}: {what}" for path in _modules() for line, what in violations(ast.parse(path.read_text()))]
    assert not found, "ask dataload.storage instead"


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("open('x')", "open()"),
        ("import mmap", "import mmap"),
        ("import os.path", "import os.path"),
        ("from os import stat", "from os import stat"),
        ("from os.path import join", "from os.path import join"),
        ("import os\nos.stat('x')", "os.stat"),
        ("from tempfile import mkstemp", "from tempfile import mkstemp"),
    ],
)
def test_each_violation_is_found(code, what):
    assert [found for _, found in violations(ast.parse(code))] == [what]


def test_no_module_is_too_long():
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in ROOT.rglob("*.py")}
    assert {path for path, lines in lengths.items() if lines > 400} == set()


def test_what_is_allowed():
    assert not list(violations(ast.parse("import os\nfrom os import PathLike\nos.environ, os.getpid()\nx.open('y')")))


def imports_of(root, name="dataload"):
    """Return the modules below `root` and what each imports of them, also in functions and for annotations."""
    modules = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join((name, *parts[: -1 if parts[-1] == "__init__" else None]))] = path
    imports = {}
    for module, path in modules.items():
        named = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                each = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {full if full in modules else node.module for full in each}
        imports[module] = (named & modules.keys()) - {module}
    return imports


def circle(imports):
    """Return the modules of a circle of imports, if there is one."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as found:
        return {*found.args[1]}
    return set()


def test_no_modules_import_each_other():
    assert not circle(imports_of(ROOT))


def test_a_circle_is_found(tmp_path):
    for name, text in {
        "__init__": "",
        "a": "from dataload import b",
        "b": "if TYPE_CHECKING:\n    from dataload.c import x",
        "c": "def use():\n    import dataload.a",
        "d": "import dataload.a",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert circle(imports_of(tmp_path)) == {"dataload.a", "dataload.b", "dataload.c"}
