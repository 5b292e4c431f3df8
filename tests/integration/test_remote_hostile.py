"""Stores and servers that answer more than was asked, never end a list, redirect, or count wrongly."""

import errno
import re
import threading
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hostile_server import HostileServer

from dataload.errors import ChangedFileError, ConfigError, MachineError, StoreError
from dataload.storage import Remote, storage_of
from dataload.storage.remote import requests as listing
from dataload.storage.remote.clients import client_of
from dataload.storage.remote.requests import Chunk
from dataload.storage.remote.settings import ObjectVersion

obstore = pytest.importorskip("obstore")
SIZE, WANTED = 1 << 20, 2000
VERSION = ObjectVersion(SIZE, '"e"', True)
CHUNKED = {"Transfer-Encoding": "chunked"}


def answering(status=206, *, chunked=False, whole=False, **headers):
    """Return an answer to a request for a range, with `headers` beside or instead of the right ones."""

    def answer(handler):
        start, stop = handler.span(SIZE)
        right = {"ETag": '"e"', "Content-Length": stop - start, "Content-Range": f"bytes {start}-{stop - 1}/{SIZE}"}
        found = {**right, **{name.replace("_", "-"): value for name, value in headers.items()}}
        handler.begin(status, {name: value for name, value in found.items() if value is not None})
        if whole:
            handler.wfile.write(bytes(stop - start))
        else:
            handler.send_endlessly(chunked=chunked)

    return answer


def get(server, received, *pieces):
    url = f"{server.endpoint}/x"
    client, key = client_of(url, Remote.of(None, {"timeout": 4, "retries": 1}))
    client.fetch(
        url, key, VERSION, pieces or [Chunk(0, WANTED, 0)], lambda _, offset, data: received.append((offset, len(data)))
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (answering(Content_Length=5 << 30), "the response is longer than the expected 2000 bytes"),
        (answering(Content_Length=1 << 63), "the response is longer than the expected 2000 bytes"),
        (answering(chunked=True, **CHUNKED), "the response is longer than the expected 2000 bytes"),
        (answering(Content_Length=None), "Content-Length Header missing"),
        (answering(Content_Length=1 << 64), r"error sending request \(ContentLengthInvalid\)"),
        (answering(Content_Length=-1), r"error sending request \(ContentLengthInvalid\)"),
        (answering(200), "Range request not supported by x; every mode of remote needs ranges: use a server that"),
        (answering(Content_Range=f"bytes 0-1999/{1 << 63}"), f"an impossible size of http.*/x: {1 << 63} bytes"),
        (answering(Content_Range=f"bytes 0-1999/{1 << 64}"), "Failed to parse value for CONTENT_RANGE"),
        (answering(Content_Range=f"bytes 0-{(1 << 64) - 1}/{SIZE}"), r"Requested 0..2000, got 0..0"),
        (answering(Content_Range=f"bytes -5-1999/{SIZE}"), "Failed to parse value for CONTENT_RANGE"),
        (answering(Content_Range=f"bytes 10-2009/{SIZE}"), r"Requested 0..2000, got 10..2010"),
    ],
)
def test_an_answer_that_is_not_what_was_asked(answer, message):
    received = []
    with HostileServer(answer) as server, pytest.raises(StoreError, match=message):
        get(server, received)
    assert not received
    assert len(server.seen) == 1  # another request would get the same answer


def test_a_total_of_another_size_is_another_object():
    with (
        HostileServer(answering(whole=True, Content_Range=f"bytes 0-1999/{SIZE + 1}")) as server,
        pytest.raises(ChangedFileError, match="rewritten since it was opened"),
    ):
        get(server, [])


def peak_memory():
    """Return kilobytes."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.parametrize("call", ["load", "read"])
def test_memory_that_a_long_answer_takes(call):
    def answer(handler):
        headers = {"ETag": '"e"', "Content-Length": WANTED}
        if handler.command == "HEAD":
            return handler.begin(200, headers)
        body = {**headers, **CHUNKED, "Content-Range": f"bytes 0-{WANTED - 1}/{WANTED}"}
        handler.begin(206 if "Range" in handler.headers else 200, body)
        return handler.send_endlessly(chunked=True)

    with HostileServer(answer) as server:
        url = f"{server.endpoint}/dataload.json"
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = peak_memory()
        with pytest.raises(StoreError, match="the response is longer than the expected 2000 bytes"):
            getattr(storage_of(url), call)(url)
    assert peak_memory() - before < 32 << 10


def s3(server, **options):
    keys = {"access_key_id": "k", "secret_access_key": "s", "region": "r", "client_options": {"allow_http": True}}
    return Remote.of({"endpoint": server.endpoint, **keys}, {"timeout": 4, "retries": 1, **options})


def page(keys, size=1, token=None):
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    files = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
        '<ETag>"e"</ETag></Contents>'
        for key in keys
    )
    return f"<ListBucketResult><IsTruncated>{bool(token)}</IsTruncated>{more}{files}</ListBucketResult>".encode()


def list_names(answer, **options):
    with HostileServer(answer) as server:
        return storage_of("s3://b/d", s3(server, **options)).list("s3://b/d")


def endless(make_keys, group=""):
    """Return answers to requests for pages, each of which says that there are more."""
    pages = iter(range(1 << 30))
    lock = threading.Lock()

    def answer(handler):
        with lock:
            number = next(pages)
        handler.close_connection = False
        handler.send(page(make_keys(number) if "delimiter" not in handler.path or not group else [group], token="more"))

    return answer


def test_a_list_that_never_ends_or_repeats_itself(monkeypatch):
    monkeypatch.setattr(listing, "_MOST_NAMES", 3000)
    with pytest.raises(StoreError, match=r"list s3://b/d: it has more than 3,000 names; write a manifest .*000..127"):
        list_names(endless(lambda number: [f"d/{number}-{row}" for row in range(1000)]))
    with pytest.raises(StoreError, match=r"cannot list s3://b/d: the store repeats names, such as part-0"):
        list_names(endless(lambda _: [f"d/part-{row}" for row in range(1000)]))


@pytest.mark.parametrize("keys", [[], ["d/sub/x"]], ids=["empty pages", "directories"])
def test_a_list_has_a_deadline(keys):
    with pytest.raises(StoreError, match=r"cannot list s3://b/d: the list has not ended after [01] s; raise the opti"):
        list_names(endless(lambda _: keys, "d/y"))


@pytest.mark.parametrize(("size", "message"), [(1 << 63, "impossible size"), (1 << 64, "u64"), (-5, "expected u64")])
def test_sizes_in_a_list(size, message):
    with pytest.raises(StoreError, match=message):
        list_names(lambda handler: handler.send(page(["d/x"], size)))


@pytest.mark.parametrize(
    ("kind", "arguments"), [(OSError, (errno.ENOSPC, "full")), (OSError, (errno.EDQUOT, "full")), (MemoryError, ())]
)
@pytest.mark.parametrize("count", [1, 3])
def test_errors_of_the_receiver_are_not_those_of_the_store(kind, arguments, count):
    raised = kind(*arguments)

    def receive(*_):
        raise raised

    with HostileServer(answering(whole=True)) as server:
        url = f"{server.endpoint}/x"
        client, key = client_of(url, Remote.of(None, {"timeout": 60}))
        with pytest.raises(kind) as caught:
            client.fetch(url, key, VERSION, [Chunk(10 * i, 10 * i + 10, 10 * i) for i in range(count)], receive)
        assert caught.value is raised
        assert len(server.seen) <= count
        with pytest.raises(kind):
            client.stream(url, key, VERSION, Chunk(0, 10, 0), receive, lambda: None)


def test_no_descriptors_for_a_request(monkeypatch):
    url = "memory://descriptors/x"
    client, key = client_of(url, Remote())

    def head(*_):
        raise obstore.exceptions.GenericError("error sending request: Too many open files (os error 24)")

    monkeypatch.setattr(obstore, "head", head)
    with pytest.raises(MachineError, match=r"cannot look up memory.*lacks descriptors or memory .*raise `ulimit -n`"):
        client.head(url, key)


def test_no_part_arrives_after_a_failure():
    """The memory or the file of the receiver may be another's by then."""
    received, go_on = [], threading.Event()

    def answer(handler):
        start, stop = handler.span(SIZE)
        if start:
            go_on.wait(20)
        status = 206 if start else 403
        handler.send(bytes(stop - start), {"ETag": '"e"', "Content-Range": f"bytes {start}-{stop - 1}/{SIZE}"}, status)

    with HostileServer(answer) as server:
        with pytest.raises(StoreError, match="cannot read bytes 0 to 10"):
            get(server, received, Chunk(0, 10, 0), Chunk(10, 20, 10))
        go_on.set()
    assert not received


def test_headers_do_not_follow_redirects():
    kept = {"Authorization": "s3cret", "Cookie": "s3cret", "Proxy-Authorization": "s3cret", "User-Agent": "me"}

    def serve(handler):
        handler.send(b"abc", {"ETag": '"e"'})

    def redirect(handler):
        handler.send(b"", {"Location": f"{other.endpoint}/y"}, 302)

    with HostileServer(serve) as other, HostileServer(redirect) as server:
        url = f"{server.endpoint}/x"

        def load(**options):
            return storage_of(url, Remote.of(options, {"timeout": 4, "retries": 0})).load(url)

        assert load(client_options={"default_headers": kept})[0] == b"abc"
        assert "s3cret" in str(server.seen)
        assert "s3cret" not in str(other.seen)
        secret = {"default_headers": {**kept, "X-Api-Key": "s3cret"}}
        server.seen.clear()
        with pytest.raises(ConfigError, match=r"default_headers has X-Api-Key, which a redirect would send") as e:
            load(client_options=secret)
        assert "s3cret" not in str(e.value)
        assert not server.seen
        assert load(client_options=secret, headers_follow_redirects=True)[0] == b"abc"


@pytest.mark.parametrize("etag", [False, True])
def test_names_that_no_store_has(etag):
    long = "x" * 2000
    answer = page(["d/x" if etag else f"d/{long}"]).replace(b'"e"', f'"{long if etag else "e"}"'.encode())
    with pytest.raises(
        StoreError, match=r"cannot list s3://b/d: the store returned a name or an ETag of more than 1024"
    ):
        list_names(lambda handler: handler.send(answer))
