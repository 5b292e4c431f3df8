"""Only storage and executors touch files; formats, codecs, orders and the loader ask storage."""

import ast
from pathlib import Path

import pytest

import dataload

ROOT = Path(dataload.__file__).parent
FORBIDDEN_MODULES = {"glob", "mmap", "pathlib", "resource", "shutil", "tempfile"}
ALLOWED_OF_OS = {"PathLike", "environ", "fspath", "getpid", "strerror"}


def _modules():
    for name in ("sources", "codecs", "samplers", "loader"):
        yield from sorted((ROOT / name).rglob("*.py"))
    yield from (ROOT / "collate.py", ROOT / "transforms.py")


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
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os" and node.attr not in ALLOWED_OF_OS:
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


def test_what_is_allowed():
    assert not list(violations(ast.parse("import os\nfrom os import PathLike\nos.environ, os.getpid()\nx.open('y')")))
