"""Each folder of a cache is believed only if nobody else could have written to it."""

import os

import numpy as np
import pytest

from dataload.catalog.arrays import IndexKey, load_cached, store_cached
from dataload.errors import ConfigError
from dataload.storage import Remote, storage_of
from dataload.storage.kept import CachedTable
from dataload.storage.local.folders import trusted_folder, user_directory
from dataload.storage.remote.cache import ShardCache
from dataload.storage.remote.jobs import Shares
from dataload.storage.remote.settings import RemoteOptions, node_folder

URL = "memory://trusted/x.tar"


def remote(root):
    return Remote.of(None, {"cache": root})


def lock(root):
    with storage_of(URL, remote(root)).lock(URL):
        pass


USES = {
    "shards": lambda root: ShardCache(str(root), None),
    "jobs": lambda root: Shares(str(root), lambda: 1, "x"),
    "plans": lambda root: trusted_folder(str(root), "plans"),
    "locks": lock,
    "uploads": lambda root: storage_of(URL, remote(root)).create(URL, overwrite=True).abort(),
    "indexing": lambda root: node_folder(remote(root), "indexing"),
}


@pytest.mark.parametrize("folder", USES)
def test_folders_that_others_may_write_to_are_refused(tmp_path, folder):
    pytest.importorskip("obstore")
    root, use = tmp_path / "cache", USES[folder]
    use(root)
    assert [path.stat().st_mode & 0o777 for path in (root, root / folder)] == [0o700] * 2

    def refused(path, reason):
        with pytest.raises(ConfigError, match=rf"{path} cannot be used as a cache, because {reason}: run `chmod go-w "):
            use(root)

    for path in (root, root / folder):
        for mode, who in ((0o777, "all users"), (0o770, r"its group \d+")):
            path.chmod(mode)
            refused(path, f"{who} may write to it")
        path.chmod(0o755)
        use(root)
        if os.geteuid() == 0:
            os.chown(path, 4321, -1)
            refused(path, "it belongs to user 4321")
            os.chown(path, 0, -1)
    (root / folder).rename(tmp_path / "elsewhere")
    (root / folder).symlink_to(tmp_path / "elsewhere")
    refused(root / folder, "it is a symbolic link")


def test_tables_of_such_folders_are_not_used(tmp_path):
    root = tmp_path / "cache"
    remote = Remote(options=RemoteOptions(cache=str(root)))
    key = IndexKey("tar", URL, ((1, 1),), (), None, remote)
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
    tmp_path.chmod(0o1777)  # as /tmp, where everybody may create files
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "dataload"
    root.mkdir()
    for mode, expected in ((0o711, 0o711), (0o720, 0o700), (0o702, 0o700), (0o775, 0o700)):
        root.chmod(mode)
        ShardCache(user_directory(), None)
        assert root.stat().st_mode & 0o777 == expected
    (root / "shards").chmod(0o777)
    with pytest.raises(ConfigError):
        ShardCache(user_directory(), None)
