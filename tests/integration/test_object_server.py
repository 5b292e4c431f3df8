"""The servers that tests of remote data read from do what the real ones do, and end with the tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import object_server as servers
import pytest

pytestmark = pytest.mark.slow

obstore = pytest.importorskip("obstore", reason="obstore is not installed: pip install obstore")
DATA = bytes(range(256)) * 1000
SUPPORT = str(Path(servers.__file__).parent)


@pytest.fixture(scope="session")
def bucket(server):
    return server.bucket()


def test_ranges(server, bucket):
    store = server.store(bucket)
    server.put(bucket, "a/b", DATA)
    assert bytes(store.get_range("a/b", start=7, end=300)) == DATA[7:300]
    found = store.get_ranges("a/b", starts=[5, 255_000, 0], ends=[6, 256_000, 1000], coalesce=0)
    assert [bytes(part) for part in found] == [DATA[5:6], DATA[255_000:], DATA[:1000]]
    if server.scheme == "s3":  # Azure has no such ranges
        assert bytes(store.get("a/b", options={"range": {"suffix": 3}}).bytes()) == DATA[-3:]
    assert store.head("a/b")["size"] == len(DATA)


def test_a_changed_object_is_refused(server, bucket):
    store = server.store(bucket)
    before = server.put(bucket, "changing", DATA)
    assert bytes(store.get("changing", options={"if_match": before}).bytes()) == DATA
    after = server.put(bucket, "changing", DATA[1:])
    assert store.head("changing")["e_tag"] == after != before
    with pytest.raises(obstore.exceptions.PreconditionError):
        store.get("changing", options={"if_match": before})


def test_nothing_is_overwritten_unasked(server, bucket):
    store = server.store(bucket)
    store.put("once", b"1", mode="create")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        store.put("once", b"2", mode="create")
    assert bytes(store.get("once").bytes()) == b"1"


def test_multipart(server, bucket):
    store = server.store(bucket)
    data = DATA * 50  # 12.8 MB
    store.put("large", data, use_multipart=True, chunk_size=5 << 20)
    assert store.head("large")["size"] == len(data)
    assert server.scheme == "az" or store.head("large")["e_tag"].endswith('-3"')
    assert bytes(store.get_range("large", start=5 << 20, end=(5 << 20) + 999)) == data[5 << 20 :][:999]


def test_listing(server, tmp_path):
    bucket = server.bucket()
    (tmp_path / "sub").mkdir()
    for name in ("b", "a", "sub/c"):
        (tmp_path / name).write_text(name)
    assert server.put_directory(bucket, tmp_path, "d/") == ["d/a", "d/b", "d/sub/c"]
    store = server.store(bucket)
    listed = [entry for page in store.list("d", chunk_size=2) for entry in page]
    assert sorted((entry["path"], entry["size"]) for entry in listed) == [("d/a", 1), ("d/b", 1), ("d/sub/c", 5)]
    assert store.list_with_delimiter("d")["common_prefixes"] == ["d/sub"]


def test_other_keys_are_refused(server, bucket):
    server.put(bucket, "secret", b"x")
    name = "account_key" if server.scheme == "az" else "secret_access_key"
    for other in ({name: "b3RoZXI="}, {"skip_signature": True}):
        with pytest.raises(obstore.exceptions.PermissionDeniedError):
            server.store(bucket, **other).get("secret")


def test_a_killed_test_process_leaves_no_server(object_server):
    program = f"""if True:
        import os, sys
        sys.path.insert(0, {SUPPORT!r})
        from object_server import ObjectServer
        server = ObjectServer()
        print(server.endpoint, server.directory, server._server.pid, flush=True)
        sys.stdin.read()
        os.kill(os.getpid(), 9)
    """
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    endpoint, directory, _ = child.stdout.readline().split()
    port = urlsplit(endpoint).port
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        child.communicate()  # returns once the guard has closed its output too
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b"", "the server has ended"
    assert child.returncode == -9
    assert not Path(directory).exists()
    assert not list(Path("/tmp").glob(f"seaweedfs-*-{port}.sock"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_server_that_does_not_start(monkeypatch, tmp_path):
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho no room; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(servers, "weed", lambda: program)
    with pytest.raises(ChildProcessError, match="the s3 server ended with 3:\nno room"):
        servers.ObjectServer()


def test_why_there_is_no_server(monkeypatch, object_server):
    assert servers.why_not() is None
    monkeypatch.setattr(servers, "weed", lambda: "/no/such/weed")
    assert servers.why_not().startswith("SeaweedFS does not run here: ")
    monkeypatch.setattr(servers, "PACKAGE", "no-such-package")
    assert servers.why_not() == "no-such-package is not installed: pip install no-such-package"


# Files over HTTP


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a").write_bytes(DATA)
    with servers.FileServer(tmp_path) as server:
        yield server


def ask(url, **headers):
    request = urllib.request.Request(url, headers={name.replace("_", "-"): text for name, text in headers.items()})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


def test_files(files):
    url = f"{files.endpoint}/a"
    status, data, headers = ask(url)
    assert (status, data) == (200, DATA)
    status, data, found = ask(url, Range="bytes=10-19", If_Match=headers["ETag"])
    assert (status, data, found["Content-Range"]) == (206, DATA[10:20], f"bytes 10-19/{len(DATA)}")
    assert ask(url, Range="bytes=255990-")[:2] == (206, DATA[-10:])
    assert ask(url, Range="bytes=-5")[:2] == (206, DATA[-5:])
    assert ask(url, Range="bytes=256000-")[0] == 416
    assert ask(url, If_None_Match=headers["ETag"])[:2] == (304, b"")
    Path(files.root, "a").write_bytes(b"new")
    assert ask(url, If_Match=headers["ETag"])[:2] == (412, b"")
    assert ask(f"{files.endpoint}/../../etc/hostname")[0] == 404
    assert ask(f"{files.endpoint}/b")[0] == 404


def test_files_through_obstore(files):
    from obstore.store import HTTPStore

    store = HTTPStore(files.endpoint, client_options={"allow_http": True})
    assert bytes(store.get_range("a", start=3, end=9)) == DATA[3:9]
    assert store.head("a")["size"] == len(DATA)
