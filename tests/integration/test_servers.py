"""The servers and the proxy of tests of remote data do what real ones do, fail as asked, count, and end with a test."""

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import object_server as servers
import obstore
import pytest
from fault_proxy import FaultProxy, Faults

DATA = bytes(range(256)) * 4096


@pytest.fixture
def files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(DATA)
    with servers.FileServer(tmp_path) as server:
        yield server


@pytest.fixture
def faulty(files):
    with FaultProxy(files.endpoint) as proxy:
        yield proxy


def get(server, path="/a", timeout=30, **headers):
    with contextlib.closing(http.client.HTTPConnection(urlsplit(server.endpoint).netloc, timeout=timeout)) as client:
        client.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        answer = client.getresponse()
        return answer.status, answer.read(), dict(answer.headers)


def test_files_over_http(files):
    status, data, headers = get(files)
    assert (status, data) == (200, DATA)
    status, data, found = get(files, Range="bytes=10-19", If_Match=headers["ETag"])
    assert (status, data, found["Content-Range"]) == (206, DATA[10:20], f"bytes 10-19/{len(DATA)}")
    for span in (f"{len(DATA) - 10}-", "-10"):
        assert get(files, Range=f"bytes={span}")[:2] == (206, DATA[-10:])
    assert get(files, Range=f"bytes={len(DATA)}-")[0] == 416
    assert get(files, If_None_Match=headers["ETag"])[:2] == (304, b"")
    Path(files.root, "a").write_bytes(b"new")
    assert get(files, If_Match=headers["ETag"])[:2] == (412, b"")
    for path in ("/../../etc/hostname", "/c"):
        assert get(files, path)[0] == 404
    store = obstore.store.HTTPStore(files.endpoint, client_options={"allow_http": True})
    assert bytes(store.get_range("b", start=3, end=9)) == DATA[3:9]
    assert store.head("b")["size"] == len(DATA)


def test_without_faults(faulty):
    status, data, headers = get(faulty)
    assert (status, data) == (200, DATA)
    assert get(faulty, Range="bytes=5-14", If_Match=headers["ETag"])[:2] == (206, DATA[5:15])
    assert get(faulty, "/missing")[0] == 404
    counts = faulty.counts
    assert counts.requests == {("GET", "a"): 2, ("GET", "missing"): 1}
    assert counts.bytes == {"a": len(DATA) + 10, "missing": 9}
    assert counts.ranges == [("a", "bytes=5-14")]
    assert (counts.gets("a"), counts.faults) == (2, {})
    assert counts.most_at_once <= 2, "the client may have its answer a moment before the proxy has ended"
    faulty.reset()
    assert not faulty.counts.requests


def test_busy_and_short(faulty):
    faulty.faults = Faults(busy=1, attempts=2)
    assert [get(faulty)[0] for _ in range(4)] == [503, 503, 200, 200]
    assert faulty.counts.faults == {"busy": 2}
    faulty.faults = Faults(busy=1, keys="b$")
    assert (get(faulty, "/a")[0], get(faulty, "/b")[0]) == (200, 503)
    faulty.reset()
    faulty.faults = Faults(short=1)
    status, data, headers = get(faulty, Range="bytes=100-199")
    assert (status, data, headers["Content-Range"]) == (206, DATA[100:150], f"bytes 100-199/{len(DATA)}")
    assert get(faulty)[:2] == (200, DATA), "only of ranges"
    assert faulty.counts.faults == {"short": 1}


def test_cut_bodies(faulty):
    faulty.faults = Faults(cut=1)
    with pytest.raises(http.client.IncompleteRead) as caught:
        get(faulty)
    assert 0 <= len(caught.value.partial) < len(DATA)
    assert DATA.startswith(caught.value.partial)
    assert faulty.counts.bytes["a"] == len(caught.value.partial)


def test_stalls_end_when_the_test_says_so(faulty):
    faulty.faults, found = Faults(stall=1), []
    thread = threading.Thread(target=lambda: found.append(get(faulty)[:2]))
    thread.start()
    assert faulty.stalled.wait(20)
    assert found == []
    faulty.resume()
    thread.join()
    assert found == [(200, DATA)]


def test_stalls_end_by_themselves_and_with_the_proxy(faulty):
    faulty.faults = Faults(stall=1, stall_seconds=0.01)
    assert get(faulty)[:2] == (200, DATA), "it goes on afterwards"
    faulty.faults = Faults(stall=1)
    with pytest.raises(TimeoutError):
        get(faulty, timeout=0.05)


def test_latency_and_rates_of_each_connection(faulty):
    faulty.faults = Faults(latency=0.1)
    begun = time.monotonic()
    get(faulty)
    assert time.monotonic() - begun >= 0.1
    faulty.faults = Faults(rate=len(DATA) * 4)
    begun = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(get, [faulty] * 4))
    assert time.monotonic() - begun >= 0.24
    assert faulty.counts.most_at_once > 1, "they do not wait for each other"


def test_a_changed_etag(faulty):
    before = get(faulty)[2]["ETag"]
    faulty.faults = Faults(etag='"new"')
    assert get(faulty, If_Match=before)[0] == 412
    status, data, headers = get(faulty, If_Match='"new"')
    assert (status, data, headers["ETag"]) == (200, DATA, '"new"')


def test_an_outage(faulty):
    faulty.faults = Faults(stall=1, stall_seconds=0.2)
    with contextlib.closing(http.client.HTTPConnection(urlsplit(faulty.endpoint).netloc, timeout=30)) as connection:
        connection.request("GET", "/a")
        answer = connection.getresponse()
        faulty.outage()
        with pytest.raises((ConnectionError, http.client.IncompleteRead)):
            answer.read()
    faulty.reset()
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        get(faulty)
    assert faulty.counts.faults == {"outage": 1}
    for end in (faulty.recover, lambda: faulty.outage(0)):
        end()
        assert get(faulty)[0] == 200


@pytest.mark.remote
def test_the_same_requests_meet_the_same_faults(faulty):
    def outcomes():
        faulty.reset()
        return [get(faulty, f"/{name}", Range=f"bytes={start}-{start}")[0] for name in "ab" for start in range(40)]

    faulty.faults = Faults(busy=0.3)
    first = outcomes()
    assert 10 < first.count(503) < 40
    assert outcomes() == first
    faulty.seed = 1
    assert outcomes() != first


@pytest.mark.slow
def test_the_proxy_in_front_of_s3(object_server):
    bucket = object_server.bucket()
    with FaultProxy(object_server.endpoint) as proxy:
        store = object_server.store(bucket, endpoint=proxy.endpoint)
        store.put("d/x", DATA)
        proxy.faults = Faults(busy=1, attempts=1)
        assert bytes(store.get("d/x").bytes()) == DATA, "obstore tries again"
        assert proxy.counts.faults == {"busy": 1}
        assert proxy.counts.requests["PUT", f"{bucket}/d/x"] == 1
        assert proxy.counts.gets("d/x") == 2
        assert [entry["path"] for page in store.list("d") for entry in page] == ["d/x"]
        assert proxy.counts.lists == {f"{bucket}/d/": 2}
        del store


@pytest.mark.slow
def test_an_object_store(server, tmp_path):
    bucket = server.bucket()
    store = server.store(bucket)
    before = server.put(bucket, "a/b", DATA)
    assert bytes(store.get_range("a/b", start=7, end=300)) == DATA[7:300]
    found = store.get_ranges("a/b", starts=[5, 255_000, 0], ends=[6, 256_000, 1000], coalesce=0)
    assert [bytes(part) for part in found] == [DATA[5:6], DATA[255_000:256_000], DATA[:1000]]
    assert bytes(store.get("a/b", options={"if_match": before}).bytes()) == DATA
    after = server.put(bucket, "a/b", DATA[1:])
    assert store.head("a/b")["e_tag"] == after != before
    with pytest.raises(obstore.exceptions.PreconditionError):
        store.get("a/b", options={"if_match": before})
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        store.put("a/b", b"2", mode="create")
    store.put("large", DATA * 12, use_multipart=True, chunk_size=5 << 20)
    assert store.head("large")["size"] == 12 * len(DATA)
    assert bytes(store.get_range("large", start=5 << 20, end=(5 << 20) + 999)) == (DATA * 12)[5 << 20 :][:999]
    name = "account_key" if server.scheme == "az" else "secret_access_key"
    for other in ({name: "b3RoZXI="}, {"skip_signature": True}):
        with pytest.raises(obstore.exceptions.PermissionDeniedError):
            server.store(bucket, **other).get("a/b")
    (tmp_path / "sub").mkdir()
    for path in ("b", "a", "sub/c"):
        (tmp_path / path).write_text(path)
    assert server.put_directory(bucket, tmp_path, "d/") == ["d/a", "d/b", "d/sub/c"]
    listed = [(entry["path"], entry["size"]) for page in store.list("d", chunk_size=2) for entry in page]
    assert sorted(listed) == [("d/a", 1), ("d/b", 1), ("d/sub/c", 5)]
    assert store.list_with_delimiter("d")["common_prefixes"] == ["d/sub"]


@pytest.mark.slow_suite
def test_a_killed_test_process_leaves_no_server(object_server):
    program = f"""if True:
        import os, sys
        sys.path.insert(0, {str(Path(servers.__file__).parent)!r})
        from object_server import ObjectServer
        server = ObjectServer()
        print(server.endpoint, server.directory, flush=True)
        sys.stdin.read()
        os.kill(os.getpid(), 9)
    """
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    endpoint, directory = child.stdout.readline().split()
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


@pytest.mark.slow
def test_why_there_is_no_server(monkeypatch, tmp_path, object_server):
    assert servers.why_not() is None
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho no room; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(servers, "weed", lambda: program)
    with pytest.raises(ChildProcessError, match="the s3 server ended with 3:\nno room"):
        servers.ObjectServer()
    monkeypatch.setattr(servers, "weed", lambda: "/no/such/weed")
    assert servers.why_not().startswith("SeaweedFS does not run here: ")
    monkeypatch.setattr(servers, "PACKAGE", "no-such-package")
    assert servers.why_not() == "no-such-package is not installed: pip install no-such-package"
