"""The fault proxy does the faults that it is asked for, again and again the same, and counts."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from fault_proxy import FaultProxy, Faults
from object_server import FileServer

DATA = bytes(range(256)) * 4096


@pytest.fixture
def proxy(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(DATA)
    with FileServer(tmp_path) as server, FaultProxy(server.endpoint) as proxy:
        yield proxy


def get(proxy, path="/a", timeout=30, **headers):
    with closing(http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=timeout)) as connection:
        connection.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.headers)


def test_without_faults(proxy):
    status, data, headers = get(proxy)
    assert (status, data) == (200, DATA)
    assert get(proxy, Range="bytes=5-14", If_Match=headers["ETag"])[:2] == (206, DATA[5:15])
    assert get(proxy, "/missing")[0] == 404
    counts = proxy.counts
    assert counts.requests == {("GET", "a"): 2, ("GET", "missing"): 1}
    assert counts.bytes == {"a": len(DATA) + 10, "missing": 9}
    assert counts.ranges == [("a", "bytes=5-14")]
    assert (counts.gets("a"), counts.faults) == (2, {})
    assert counts.most_at_once <= 2, "the client may have its answer a moment before the proxy has ended"
    proxy.reset()
    assert not proxy.counts.requests


def test_busy(proxy):
    proxy.faults = Faults(busy=1, attempts=2)
    assert [get(proxy)[0] for _ in range(4)] == [503, 503, 200, 200]
    assert proxy.counts.faults == {"busy": 2}
    proxy.faults = Faults(busy=1, keys="b$")
    assert (get(proxy, "/a")[0], get(proxy, "/b")[0]) == (200, 503)


def test_cut_bodies(proxy):
    proxy.faults = Faults(cut=1)
    with pytest.raises(http.client.IncompleteRead) as caught:
        get(proxy)
    assert 0 <= len(caught.value.partial) < len(DATA)
    assert DATA.startswith(caught.value.partial)
    assert proxy.counts.bytes["a"] == len(caught.value.partial)


def test_short_ranges(proxy):
    proxy.faults = Faults(short=1)
    status, data, headers = get(proxy, Range="bytes=100-199")
    assert (status, data, headers["Content-Range"]) == (206, DATA[100:150], f"bytes 100-199/{len(DATA)}")
    assert get(proxy)[:2] == (200, DATA), "only of ranges"
    assert proxy.counts.faults == {"short": 1}


def test_stalls(proxy):
    proxy.faults = Faults(stall=1)
    with pytest.raises(TimeoutError):
        get(proxy, timeout=0.1)
    proxy.faults = Faults(stall=1, stall_seconds=0.01)
    assert get(proxy)[:2] == (200, DATA), "it goes on afterwards"


def test_a_stall_ends_when_the_test_says_so(proxy):
    proxy.faults, found = Faults(stall=1), []
    thread = threading.Thread(target=lambda: found.append(get(proxy)[:2]))
    thread.start()
    assert proxy.stalled.wait(20)
    assert not found
    proxy.resume()
    thread.join()
    assert found == [(200, DATA)]


def test_latency_and_rate(proxy):
    proxy.faults = Faults(latency=0.1)
    begun = time.monotonic()
    get(proxy)
    assert time.monotonic() - begun >= 0.1
    proxy.faults = Faults(rate=len(DATA) * 4)
    begun = time.monotonic()
    assert get(proxy)[1] == DATA
    assert time.monotonic() - begun >= 0.24


def test_rates_are_per_connection(proxy):
    proxy.faults = Faults(rate=len(DATA))
    threads = [threading.Thread(target=get, args=(proxy,)) for _ in range(4)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begun < 3.6, "four together take no longer than one"
    assert proxy.counts.most_at_once > 1


def test_a_changed_etag(proxy):
    before = get(proxy)[2]["ETag"]
    proxy.faults = Faults(etag='"new"')
    assert get(proxy, If_Match=before)[0] == 412
    status, data, headers = get(proxy, If_Match='"new"')
    assert (status, data, headers["ETag"]) == (200, DATA, '"new"')
    assert get(proxy)[2]["ETag"] == '"new"'


def test_an_outage(proxy):
    proxy.outage()
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        get(proxy)
    assert proxy.counts.faults == {"outage": 1}
    proxy.recover()
    assert get(proxy)[0] == 200
    proxy.outage(0)
    assert get(proxy)[0] == 200, "it is over"


def test_an_outage_closes_what_is_open(proxy):
    proxy.faults = Faults(stall=1, stall_seconds=0.2)
    with closing(http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=30)) as connection:
        connection.request("GET", "/a")
        answer = connection.getresponse()
        proxy.outage()
        with pytest.raises((ConnectionError, http.client.IncompleteRead)):
            answer.read()


def test_the_same_requests_meet_the_same_faults(proxy):
    def outcomes():
        proxy.reset()
        return [get(proxy, f"/{name}", Range=f"bytes={start}-{start}")[0] for name in "ab" for start in range(40)]

    proxy.faults = Faults(busy=0.3)
    first = outcomes()
    assert 10 < first.count(503) < 40
    assert outcomes() == first
    proxy.seed = 1
    assert outcomes() != first


def test_closing_ends_a_stall(tmp_path):
    (tmp_path / "a").write_bytes(DATA)
    with (
        FileServer(tmp_path) as server,
        FaultProxy(server.endpoint, Faults(stall=1)) as proxy,
        pytest.raises(TimeoutError),
    ):
        get(proxy, timeout=0.05)


@pytest.mark.slow
def test_in_front_of_s3(object_server):
    pytest.importorskip("obstore")
    bucket = object_server.bucket()
    with FaultProxy(object_server.endpoint) as proxy:
        store = object_server.store(bucket, endpoint=proxy.endpoint)
        store.put("d/x", DATA)
        store.put("d/y", DATA * 12, use_multipart=True, chunk_size=5 << 20)
        assert bytes(store.get_range("d/y", start=5 << 20, end=(5 << 20) + 99)) == (DATA * 12)[5 << 20 :][:99]
        proxy.faults = Faults(busy=1, attempts=1)
        assert bytes(store.get("d/x").bytes()) == DATA, "obstore tries again"
        assert proxy.counts.faults == {"busy": 1}
        assert proxy.counts.requests["PUT", f"{bucket}/d/x"] == 1
        assert proxy.counts.gets("d/x") == 2
        assert [entry["path"] for page in store.list("d") for entry in page] == ["d/x", "d/y"]
        assert proxy.counts.lists == {f"{bucket}/d/": 2}
        del store
