import os
import threading

import pytest

from dataload.errors import ChangedFileError, CorruptFileError, SourceError, SourceNotFoundError, StoreError
from dataload.storage import list_folder, read_files
from dataload.storage.local import folders


def fill(root, names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_links_that_lead_nowhere(tmp_path):
    fill(tmp_path, ["a/b/1.x"])
    os.symlink(tmp_path / "a", tmp_path / "a" / "b" / "up")
    with pytest.raises(SourceError, match=r"a/b/up is a link to a folder above it, so the list of files has no "):
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
