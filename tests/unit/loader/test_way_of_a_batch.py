"""The way of a batch is short: few files lie between the consumer and the copy, and none of the loader's opens one."""

import ast
import re
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

import dataload

PACKAGE = Path(dataload.__file__).parent


def test_few_files_lie_between_the_consumer_and_the_copy(tmp_path):
    path = tmp_path / "a.syr"
    with dataload.create(path) as writer:
        for index in range(8):
            writer.write({"x": np.full(4, index, np.float32)})
    stacks = set()

    def note(frame, *_):
        files = [Path(each.f_code.co_filename) for each, _ in traceback.walk_stack(frame)][::-1]
        rooms = dict.fromkeys(file.relative_to(PACKAGE) for file in files if file.is_relative_to(PACKAGE))
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE / "storage"):
            stacks.add(tuple(map(str, rooms)))

    with dataload.Loader(dataload.open(path), batch_size=4) as loader:
        batches = iter(loader)
        next(batches)  # which opens the file
        sys.setprofile(note)
        try:
            assert next(batches)["x"][:, 0].tolist() == [4, 5, 6, 7]
        finally:
            sys.setprofile(None)
    assert stacks
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text().partition("## The way of one batch")[2]
    documented = re.findall(r"^\d\. .*?`([\w/]+\.py)`", page.partition("\n## ")[0], re.MULTILINE)
    assert len(documented) == 8
    # Below the first call into the storage, files are its own business.
    for files in stacks:
        assert list(files[:8]) == documented
        assert all(file.startswith("storage/") for file in files[8:])


@pytest.mark.parametrize("path", sorted((PACKAGE / "loader").glob("*.py")), ids=lambda path: path.name)
def test_the_loader_leaves_files_to_the_storage(path):
    allowed = {"PathLike", "environ", "fspath", "getpid", "path"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr in allowed
        assert not (isinstance(node, ast.Name) and node.id == "open")
        assert not (isinstance(node, ast.Import) and any(alias.name == "mmap" for alias in node.names))
