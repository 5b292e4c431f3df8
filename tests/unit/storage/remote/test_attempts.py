"""Calls of a store that fail: which are made again, when, and what is said of the last; with a clock that is set."""

import errno
import random
from types import SimpleNamespace

import obstore.exceptions as failures
import pytest

from dataload._util.threads import DaemonThreads
from dataload.errors import ChangedFileError, MachineError, SourceNotFoundError, StoreError
from dataload.storage import RemoteOptions
from dataload.storage.remote import requests
from dataload.storage.remote.traffic import Traffic

URL = "s3://bucket/a.tar"


class Store:
    """Raises `errors`, one a call, and then answers."""

    def __init__(self, monkeypatch, *errors, **options):
        self.errors, self.waits, self.now = [*errors], [], 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(requests, "time", clock)
        monkeypatch.setattr(
            requests, "_own_random", SimpleNamespace(uniform=lambda *ends: ends[1] if ends == (0.5, 1) else -1)
        )
        self.traffic = Traffic()
        options = RemoteOptions(**options)
        threads = DaemonThreads(1)
        self.attempts = requests.Attempts(options, ["tops3cret"], failures, threads, self.traffic)

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds

    def answer(self):
        if self.errors:
            raise self.errors.pop(0)
        return b"bytes"

    def read(self):
        try:
            return self.attempts.make("read bytes 0 to 4", URL, self.answer)
        finally:
            self.attempts.threads.shutdown()


@pytest.mark.parametrize(
    ("options", "attempts", "seconds"),
    [
        ({"retries": 0}, 1, 0.0),
        ({"retries": 2}, 3, 0.3),
        # The last attempt has a quarter of the time-out left: 3.2 s after the others have taken 3.1 is too late.
        ({"timeout": 8, "retries": 99}, 6, 3.1),
        ({"timeout": 8.5, "retries": 99}, 7, 6.3),
        ({"timeout": 60, "retries": 99}, 11, 42.7),  # no wait is longer than 10 s
    ],
)
def test_it_gives_up_after_so_many_attempts_or_so_long(monkeypatch, caplog, options, attempts, seconds):
    store = Store(monkeypatch, *[failures.GenericError("status 500")] * 100, **options)
    with pytest.raises(StoreError) as caught:
        store.read()
    assert str(caught.value) == (
        f"cannot read bytes 0 to 4: status 500 ({attempts} attempts in {seconds:.1f} s; the options timeout and "
        "retries of remote allow more)"
    )
    assert caught.value.path == URL
    assert (len(store.waits), sum(store.waits)) == (attempts - 1, pytest.approx(seconds))
    noted = ["cannot read bytes 0 to 4: status 500; trying again for up to 32 s"]
    assert [record.getMessage() for record in caplog.records] == noted * (attempts >= 8)


REFUSED = (
    *(failures.PermissionDeniedError, failures.UnauthenticatedError, failures.NotSupportedError),
    *(failures.InvalidPathError, failures.UnknownConfigurationKeyError, ValueError, TypeError),
)
ANSWERS = (
    "Client error with status 400 Bad Request",
    "Server returned non-2xx status code: 405 Method Not Allowed",
    "Received non-partial response when range requested",
    "InvalidContentLength",
)
PANIC = type("PanicException", (BaseException,), {})


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (failures.NotFoundError("gone"), SourceNotFoundError, f"there is no {URL}"),
        (FileNotFoundError(), SourceNotFoundError, f"there is no {URL}"),
        (failures.PreconditionError("other ETag"), ChangedFileError, "has been rewritten"),
        (FileExistsError("there"), FileExistsError, f"^{URL}$"),
        *((kind("no"), StoreError, "^cannot read bytes 0 to 4: no$") for kind in REFUSED),
        *((failures.GenericError(answer), StoreError, f" 4: {answer}$") for answer in ANSWERS),
        (failures.GenericError("status 403, for tops3cret?key=1"), StoreError, r" 4: status 403, for \*\*\*\?\.\.\.$"),
        (failures.GenericError("a <?xml <Code>Slow</Code> status 404"), StoreError, r" 4: a \(Slow\)$"),
        (failures.GenericError("Parse(Header(Token))"), StoreError, r"Parse\(Header\(Token\)\) \(Token\)$"),
        (failures.GenericError(f"os error {errno.EMFILE}"), MachineError, "raise `ulimit -n`"),
        (PANIC("at the disco"), StoreError, "obstore panicked with at the disco: check the endpoint"),
        (MemoryError("none"), MemoryError, "^none$"),
        (StoreError("said already"), StoreError, "^said already"),
    ],
)
def test_what_would_fail_again_is_not_repeated(monkeypatch, error, raised, text):
    store = Store(monkeypatch, error)
    with pytest.raises(raised, match=text):
        store.read()
    assert store.waits == []
    figures = store.traffic.total()
    assert (figures.requests, figures.retries, figures.throttled) == (1, 0, 0)


def test_waits_leave_the_generator_of_transforms_alone(monkeypatch):
    own = requests._own_random
    store = Store(monkeypatch, failures.GenericError("status 500"))
    monkeypatch.setattr(requests, "_own_random", own)
    before = random.getstate()
    assert store.read() == b"bytes"
    assert random.getstate() == before
    assert 0.05 <= store.waits[0] <= 0.1


def test_only_what_cleans_up_after_an_interrupt_is_limited(monkeypatch):
    store, limits = Store(monkeypatch), []

    class Waits:
        def result(self, seconds):
            limits.append(seconds)
            raise TimeoutError

    monkeypatch.setattr(store.attempts.threads, "submit", lambda *_: Waits())
    with pytest.raises(StoreError, match="cannot read bytes 0 to 4"):
        store.read()
    interrupt = KeyboardInterrupt("by hand")
    try:
        raise interrupt
    except KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt) as caught:
            store.read()
    assert caught.value is interrupt
    assert limits == [None, 0.5]
