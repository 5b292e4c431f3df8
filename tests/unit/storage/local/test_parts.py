"""Parts: what killed writers leave behind, links in the way, and writers that close at once."""

import contextlib
import fcntl
import os
import signal
import stat

import pytest

from dataload.errors import ConfigError, SourceError
from dataload.storage.local import atomic as parts
from dataload.storage.local.atomic import AtomicFile, remove_leftovers


@pytest.fixture(params=["flags", "no flags"])
def renames(request):
    """With the renames of Linux and macOS, and without them."""
    if request.param == "no flags":
        request.getfixturevalue("no_flags")


def make(part, kind="file", text="new"):
    if kind == "file":
        with part.create() as stream:
            stream.write(text.encode())
        return
    os.mkdir(part.temporary)
    for name in KINDS[kind]:
        with open(os.path.join(part.temporary, name), "w") as stream:
            stream.write(text)


def content(path):
    return path.read_text() if path.is_file() else {file.name: file.read_text() for file in path.iterdir()}


KINDS = {"file": (), "directory of one": ("a",), "directory of two": ("a", "b")}


def expected(kind, text):
    return text if kind == "file" else dict.fromkeys(KINDS[kind], text)


def publish(path, kind="file", text="new", *, overwrite=False):
    with AtomicFile(str(path), overwrite=overwrite) as part:
        make(part, kind, text)
        part.publish()


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture
def no_flags(monkeypatch):
    monkeypatch.setattr(parts, "_libc_rename", lambda: None)


def killed(work):
    """Run `work` in a child that is then killed."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_overwriting_leaves_only_the_new_one(tmp_path, renames, kind):
    publish(tmp_path / "x", kind, "old")
    if kind != "file":
        (tmp_path / "x" / "lock").touch()
        (tmp_path / "x" / "sub").mkdir()
    publish(tmp_path / "x", kind, "new", overwrite=True)
    assert content(tmp_path / "x") == expected(kind, "new")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path, renames, kind):
    killed(lambda: make(AtomicFile(str(tmp_path / "x")), kind))
    [left] = tmp_path.iterdir()
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    publish(tmp_path / "y", kind, "other")
    assert left.exists(), "of another destination"
    publish(tmp_path / "x", kind, "new")
    assert sorted(os.listdir(tmp_path)) == ["x", "y"]


def test_writing_does_not_list_the_directory(tmp_path, monkeypatch):
    publish(tmp_path / "x", text="old")
    listed = []
    for name in ("listdir", "scandir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, real=real: listed.append(path) or real(path))
    publish(tmp_path / "x", overwrite=True)
    os.listdir(tmp_path)
    assert listed.count(str(tmp_path)) + listed.count(tmp_path) == 1, "10,000 shards would take 100 times 1,000"


def test_the_folder_of_a_living_writer_stays(tmp_path):
    with AtomicFile(str(tmp_path / "x")) as first, AtomicFile(str(tmp_path / "x")) as second:
        make(first, text="1")
        make(second, text="2")
        remove_leftovers(str(tmp_path / "x"))
        assert len(os.listdir(tmp_path)) == 2
        first.publish()
    assert content(tmp_path / "x") == "1"
    assert os.listdir(tmp_path) == ["x"]


def test_only_what_is_provably_a_leftover_goes(tmp_path, monkeypatch):
    killed(lambda: make(AtomicFile(str(tmp_path / "x"))))
    [left] = os.listdir(tmp_path)
    unlocked = f"{left.rpartition('-')[0]}-2.tmp"  # after a gap
    (tmp_path / unlocked).mkdir(0o700)
    elsewhere = f".x.0badc0de-{left.rpartition('-')[2]}"
    (tmp_path / elsewhere).mkdir(0o700)
    (tmp_path / ".x.0123456789ab.tmp").touch()  # version 0.1
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        remove_leftovers(str(tmp_path / "x"))
        assert len(os.listdir(tmp_path)) == 4, "leftovers of another user stay"
    remove_leftovers(str(tmp_path / "x"))
    assert sorted(os.listdir(tmp_path)) == sorted([elsewhere, ".x.0123456789ab.tmp"])


def test_file_systems_without_locks(tmp_path, monkeypatch):
    killed(lambda: make(AtomicFile(str(tmp_path / "x"))))
    monkeypatch.setattr(fcntl, "flock", raising(OSError(37, "No locks available")))
    publish(tmp_path / "x")
    assert content(tmp_path / "x") == "new"
    assert len(os.listdir(tmp_path)) == 2, "the leftover stays"
    monkeypatch.setattr(fcntl, "flock", raising(OSError(5, "Input/output error")))
    with pytest.raises(SourceError, match=r"cannot write .*y: Input/output error"):
        AtomicFile(str(tmp_path / "y"))


def test_a_link_in_place_of_a_leftover_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    with AtomicFile(str(tmp_path / "x")):
        [machine] = [name.rpartition("-")[0] for name in os.listdir(tmp_path) if name != "victim"]
    os.symlink(victim, tmp_path / f"{machine}-0.tmp")
    publish(tmp_path / "x")
    assert (victim / "precious").exists()


def test_a_folder_that_is_taken_for_a_leftover_before_it_is_locked(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def remove_first(descriptor, how):
        calls.append(how)
        if len(calls) == 1:
            remove_leftovers(str(tmp_path / "x"))
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    publish(tmp_path / "x")
    assert content(tmp_path / "x") == "new"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("ends", ["by a kill", "by an error"])
def test_the_old_directory_comes_back_if_only_it_is_there(tmp_path, no_flags, monkeypatch, ends):
    path, rename = tmp_path / "x", os.rename
    publish(path, "directory of two", "old")

    def die(source, destination):
        if destination == str(path):
            if ends == "by a kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("odd")
        rename(source, destination)

    def overwrite():
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", die)
            publish(path, "directory of two", "new", overwrite=True)

    if ends == "by a kill":
        killed(overwrite)
    else:
        with pytest.raises(OSError, match="odd"):
            overwrite()
    assert not path.exists()
    with pytest.raises(ConfigError, match=r"x exists"):
        AtomicFile(str(path))
    assert content(path) == expected("directory of two", "old")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_writers_that_close_at_once_one_succeeds(tmp_path, renames, monkeypatch, kind):
    path = str(tmp_path / "x")
    first, second = AtomicFile(path), AtomicFile(path)
    make(first, kind, "first")
    make(second, kind, "second")
    published, closed = [], set()

    def close(name, part):
        if name not in closed:
            closed.add(name)
            with part, contextlib.suppress(ConfigError):
                part.publish()
                published.append(name)

    def watch(function):
        def watched(asked):
            found = function(asked)
            if asked == path:
                close("second", second)  # at the worst moment: the first has just seen that there is nothing
            return found

        return watched

    for name in ("exists", "lexists"):
        monkeypatch.setattr(os.path, name, watch(getattr(os.path, name)))
    close("first", first)
    close("second", second)
    assert len(published) == 1
    assert content(tmp_path / "x") == expected(kind, *published)
    assert os.listdir(tmp_path) == ["x"]


def test_where_there_are_not_even_links(tmp_path, no_flags, monkeypatch):
    monkeypatch.setattr(os, "link", raising(PermissionError(1, "Operation not permitted")))
    publish(tmp_path / "x")
    assert content(tmp_path / "x") == "new"
    assert os.listdir(tmp_path) == ["x"]


def test_a_dangling_link_at_the_destination(tmp_path):
    os.symlink(tmp_path / "nowhere", tmp_path / "x")
    with pytest.raises(ConfigError):
        AtomicFile(str(tmp_path / "x"))
    publish(tmp_path / "x", overwrite=True)
    assert not (tmp_path / "x").is_symlink()
    assert not (tmp_path / "nowhere").exists()
