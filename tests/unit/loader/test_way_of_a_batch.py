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


def stacks_of(source):
    """Return the files of the package on the stack, outermost first, of each call of the storage for a second batch."""
    stacks = set()

    def note(frame, *_):
        if frame.f_code.co_filename.startswith(f"{PACKAGE}/storage/"):
            files = [each.f_code.co_filename for each, _ in traceback.walk_stack(frame)][::-1]
            inside = dict.fromkeys(file for file in files if file.startswith(f"{PACKAGE}/"))
            stacks.add(tuple(file.removeprefix(f"{PACKAGE}/") for file in inside))

    with dataload.Loader(source, batch_size=4) as loader:
        batches = iter(loader)
        next(batches)  # which opens the file
        sys.setprofile(note)
        try:
            next(batches)
        finally:
            sys.setprofile(None)
    assert stacks
    return stacks


def test_few_files_lie_between_the_consumer_and_the_copy(tmp_path):
    path = tmp_path / "a.syr"
    with dataload.create(path) as writer:
        for index in range(8):
            writer.write({"x": np.full(4, index, np.float32)})
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text().partition("## The way of one batch")[2]
    documented = re.findall(r"^\d\. .*?`([\w/]+\.py)`", page.partition("\n## ")[0], re.MULTILINE)
    assert len(documented) == 8
    # Below the first call into the storage, files are its own business.
    for files in stacks_of(dataload.open(path)):
        assert list(files[:8]) == documented
        assert all(file.startswith("storage/") for file in files[8:])


@pytest.mark.parametrize(
    ("name", "record", "most"),
    [
        ("a.tar", {"txt": b"x"}, 8),
        ("a.jsonl", {"x": 1}, 8),
        ("a.tfrecord", {"x": [1, 2]}, 9),
        ("a.arrow", {"x": [1, 2]}, 10),
        ("a.array_record", {"x": [1, 2]}, 9),
        ("a.lmdb", {"x": np.arange(2)}, 10),
    ],
)
def test_other_formats_have_up_to_two_files_more(name, record, most, tmp_path):
    with dataload.create(tmp_path / name) as writer:
        writer.extend([record] * 8)
    # Decoding, which copies as well, comes after the copy, and compiled functions have no files.
    stacks = [files for files in stacks_of(dataload.open(tmp_path / name)) if not files[-1].endswith("_numpy.py")]
    found = [files for files in stacks if "codecs/codec.py" not in files]
    assert max(next(n for n, file in enumerate(files, 1) if file.startswith("storage/")) for files in found) == most


@pytest.mark.parametrize("path", sorted((PACKAGE / "loader").glob("*.py")), ids=lambda path: path.name)
def test_the_loader_leaves_files_to_the_storage(path):
    allowed = {"PathLike", "environ", "fspath", "getpid", "path"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr in allowed
        assert not (isinstance(node, ast.Name) and node.id == "open")
        assert not (isinstance(node, ast.Import) and any(alias.name == "mmap" for alias in node.names))
