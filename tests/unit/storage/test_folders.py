"""Folders: the files in them, and names that may lead out of them."""

import os
import threading

import pytest

from dataload.errors import ChangedFileError, CorruptFileError, SourceError, SourceNotFoundError, StoreError
from dataload.storage import list_folder, named_files, read_files
from dataload.storage.local import folders
from dataload.storage.paths import leads_elsewhere


def fill(root, names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_links_that_lead_nowhere(tmp_path):
    fill(tmp_path, ["a/b/1.x"])
    os.symlink(tmp_path / "a", tmp_path / "a" / "b" / "up")
    with pytest.raises(
        SourceError, match=r"a/b/up is a link to a folder above it, so the list of files has no end: remove"
    ):
        list_folder(str(tmp_path))
    (tmp_path / "a" / "b" / "up").unlink()
    os.symlink(tmp_path / "gone", tmp_path / "a" / "2.x")
    with pytest.raises(SourceNotFoundError, match=r"there is no .*a/2\.x"):
        list_folder(str(tmp_path))
    with pytest.raises(SourceNotFoundError, match=r"there is no .*gone"):
        list_folder(str(tmp_path / "gone"))
    (tmp_path / "a" / "2.x").unlink()
    os.symlink(tmp_path / "a" / "2.x", tmp_path / "a" / "2.x")
    assert folders.list_names(str(tmp_path / "a")) == {"2.x": False, "b": True}
    with pytest.raises(StoreError, match=r"cannot read .*a/2\.x: Too many levels of symbolic links"):
        list_folder(str(tmp_path))


@pytest.mark.parametrize("slow", [True, False])
def test_files_are_read_in_order(tmp_path, monkeypatch, slow):
    names = [f"{i}.x" for i in range(40)]
    fill(tmp_path, names)
    threads = set()
    read, read_some = folders._read_file, os.read
    monkeypatch.setattr(os, "read", lambda file, most: read_some(file, min(most, 2)))  # as a signal may cut it short

    def noted(*arguments, **settings):
        threads.add(threading.get_ident())
        return read(*arguments, **settings)

    monkeypatch.setattr(folders, "_read_file", noted)
    monkeypatch.setattr(folders, "_SLOW_SECONDS", 0 if slow else 1e9)
    paths, sizes = [str(tmp_path / name) for name in names], [len(name) for name in names]
    newest = list_folder(str(tmp_path))[1]
    assert read_files(paths, sizes, range(40), newest) == [name.encode() for name in names]
    assert (len(threads) > 1) == slow
    sizes[30] -= 1
    with pytest.raises(CorruptFileError, match="the file had 3 bytes when it was opened and has 4 now") as caught:
        read_files(paths, sizes, range(100, 140), newest)
    assert (caught.value.path, caught.value.index) == (paths[30], 130)
    assert read_files([], [], [], 0) == []
    sizes[30] += 1
    os.utime(paths[5], ns=(0, newest + 1))
    with pytest.raises(ChangedFileError, match=r"5\.x: the file was overwritten while it was in use"):
        read_files(paths, sizes, range(40), newest)


INSIDE = [
    *("a.tar", "a/b/c.tar", "-a", ".hidden", "~/a", "{0..3}.tar", "*.tar", "a[0:4].tar", "a (1).tar", "é/ü.tar"),
    *("run:1.tar", "2024-01-01T00:00.tar", "..a", "a..", "...", "a\udcff", "a" * 4096),
]
ELSEWHERE = [
    *("", ".", "..", "/", "/a", "//host/a", "a/", "a//b", "./a", "a/./b", "a/..", "../a", "a/../../b", "\\a", "..\\a"),
    *("\\\\host\\a", "C:\\a", "c:a", "C:/a", "file:a", "file:/a", "FILE:///a", "http://h/a", "https://u:p@h/a?b"),
    *("s3://b/a", "gs:a", "az:a", "memory://a", "memory:a", "tfds:a", "hf://a", "pipe:cat a", "a+b:/c", "%2e%2e/a"),
    *("..%2fa", "%2fa", "a%00", "a%5cb", "a\0", "a\nb", "\t..", "a\x7f", "a\ud800", "a" * 4097, None, 3, ["a"], b"a"),
]


@pytest.mark.parametrize("name", INSIDE)
def test_names_inside(name):
    """They are neither patterns nor expanded."""
    assert leads_elsewhere(name) == ""
    assert named_files("d/x.json", [name]) == [f"d/{name}"]


@pytest.mark.parametrize("name", ELSEWHERE, ids=lambda name: repr(name)[:20])
def test_names_elsewhere(name):
    assert leads_elsewhere(name).endswith("is not the name of a file below this directory")
    for file in ("d/x.json", "s3://bucket/d/x.json"):
        with pytest.raises(CorruptFileError, match=r"d/x\.json: it must not name this file: ") as caught:
            named_files(file, ["good", name])
        assert "u:p" not in str(caught.value)
        assert str(caught.value).endswith("To open files elsewhere, list their paths")


def test_names_at_urls():
    for name in ("a?b", "a?b/../c", "a\udcff"):
        with pytest.raises(CorruptFileError, match="is not the name of a file below"):
            named_files("https://host/d/x.json", [name])
    assert named_files("https://host/d/x.json", ["a#b", "c%20d"]) == ["https://host/d/a#b", "https://host/d/c%20d"]
    assert named_files("https://host/d/x.json", ["a"], "https://host") == ["https://host/a"]
