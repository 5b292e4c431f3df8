"""Each folder of a cache is believed only if nobody else could have written to it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from dataload.convert import indexing
from dataload.errors import ConfigError
from dataload.storage import Remote, storage_of
from dataload.storage.local.trusted import discard_untrusted, distrust, trusted_folder, user_directory
from dataload.storage.remote.cache import ShardCache
from dataload.storage.remote.jobs import Shares
from dataload.storage.table_cache import CachedTable, IndexKey, load_cached, store_cached

URL = "memory://trusted/x.tar"


def lock(root):
    with storage_of(URL, Remote.of(None, {"cache": root})).lock(URL):
        pass


def upload(root):
    storage_of(URL, Remote.of(None, {"cache": root})).create(URL, overwrite=True).abort()


def journal(root):
    indexing._journal_path("memory://trusted", Remote.of(None, {"cache": root}), None)


USES = {
    "shards": lambda root: ShardCache(str(root), None),
    "jobs": lambda root: Shares(str(root), lambda: 1, "x"),
    "plans": lambda root: trusted_folder(str(root), "plans"),
    "locks": lock,
    "uploads": upload,
    "indexing": journal,
}


@pytest.mark.parametrize("folder", USES)
@pytest.mark.parametrize("which", ["root", "folder", "link"])
def test_folders_that_others_may_write_to_are_refused(tmp_path, folder, which):
    pytest.importorskip("obstore")
    root = tmp_path / "cache"
    USES[folder](root)
    assert [path.stat().st_mode & 0o777 for path in (root, root / folder)] == [0o700] * 2
    if which == "link":
        (root / folder).rename(tmp_path / "elsewhere")
        (root / folder).symlink_to(tmp_path / "elsewhere")
    else:
        (root if which == "root" else root / folder).chmod(0o770)
    reason = "it is a symbolic link" if which == "link" else r"its group \d+ may write to it"
    with pytest.raises(
        ConfigError, match=rf"cannot be used as a cache, because {reason}: run `chmod go-w .*` if nobody"
    ):
        USES[folder](root)


def test_tables_of_such_folders_are_not_used(tmp_path):
    root = tmp_path / "cache"
    key = IndexKey("tar", URL, ((1, 1),), (), None, str(root / "tables"))
    store_cached(key, CachedTable({"a": np.arange(3)}, {}))
    assert load_cached(key) is not None
    for path in (root, root / "tables"):
        path.chmod(0o770)
        assert load_cached(key) is None
        store_cached(key, CachedTable({"a": np.arange(3)}, {}))  # without an error, as if it could not be written
        path.chmod(0o700)
    assert load_cached(key) is not None


def test_the_users_own_directory_is_closed_to_others(tmp_path, monkeypatch):
    """Version 0.2 created it with the mode that the umask gave, which may have let a group write."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "dataload"
    root.mkdir()
    root.chmod(0o775)
    ShardCache(user_directory(), None)
    assert root.stat().st_mode & 0o777 == 0o700
    (root / "shards").chmod(0o777)
    with pytest.raises(ConfigError, match="everybody may write to it"):
        ShardCache(user_directory(), None)


def test_a_directory_below_one_where_everybody_may_create_files(tmp_path):
    tmp_path.chmod(0o1777)  # as /tmp
    ShardCache(str(tmp_path / "cache"), None)


def test_whose_files_are_trusted(tmp_path):
    path = tmp_path / "file"
    path.touch(0o600)
    assert distrust(os.stat(path)) is None
    assert discard_untrusted(str(path)) == str(path)
    assert path.exists()
    path.chmod(0o620)
    discard_untrusted(str(path))
    assert not path.exists()
    status = list(os.stat(tmp_path))
    status[4] = 4321
    assert distrust(os.stat_result(status)) == "it belongs to user 4321"
    assert distrust(os.stat_result(status), 4321) is None
    status[4] = 0
    assert distrust(os.stat_result(status)) is None
