"""Shared by all tests: what a test leaves behind fails it, and what hypothesis finds is found again."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time, so that a red build is red again; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True, max_examples=60)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# A shell that puts the tests into the background has them ignore Ctrl-C, and so would all that they start.
with contextlib.suppress(ValueError):  # not the main thread
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

# Started by multiprocessing once per process, for as long as it lives.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    if call.excinfo is not None:
        item.stash[_FAILED] = True
    return (yield)


def pytest_collection_modifyitems(items):
    """Begin with the files of slow tests, so that no process of pytest-xdist is left alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    """Spare each later collection of garbage the modules and the thousands of tests, which are most of the heap."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    """Descriptors, threads and child processes that a test leaves behind fail it."""
    before = _held()
    yield
    if request.node.stash.get(_FAILED, False):
        return  # its traceback holds what it held
    left = _held() - before
    for generation in range(3):  # what lies in a cycle is not held on purpose, and is mostly young
        if left:
            gc.collect(generation)
            left = _held() - before
    if left:
        for thread in threading.enumerate():
            if _name_of(thread) in left:
                thread.join(timeout=10)  # one that is about to end
        left = _held() - before
    deadline = time.monotonic() + 10  # the threads of obstore close the connections of a client that is gone
    while any("socket:" in name for name in left) and time.monotonic() < deadline:
        time.sleep(0.005)
        left = _held() - before
    if left:
        pytest.fail(f"the test left behind: {', '.join(sorted(left))}")


@pytest.fixture(scope="session")
def object_server():
    """An S3 server; each process of pytest-xdist has its own."""
    import object_server

    if reason := object_server.why_not():
        pytest.skip(reason)
    with object_server.ObjectServer() as server:
        server.bucket()  # starts obstore's threads, which live as long as the process
        yield server


@pytest.fixture(scope="session")
def azure_server():
    """An Azure server; each process of pytest-xdist has its own."""
    import object_server

    if reason := object_server.why_no_azure():
        pytest.skip(reason)
    with object_server.AzureServer() as server:
        server.store(server.bucket()).put("x", b"")  # starts obstore's threads, which live as long as the process
        yield server


@pytest.fixture(scope="session", params=["object_server", pytest.param("azure_server", marks=pytest.mark.remote)])
def server(request):
    """A server of each kind."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def proxy(object_server, monkeypatch):
    """A proxy in front of S3, with credentials in the environment."""
    from fault_proxy import FaultProxy

    for name, value in object_server.environment().items():
        if name != "AWS_ENDPOINT":
            monkeypatch.setenv(name, value)
    with FaultProxy(object_server.endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def new_fork_server():
    """End the fork server of earlier tests: its processes have the environment that was there when it started."""
    forkserver._forkserver._stop()


def _held() -> set[str]:
    return {*_descriptors(), *map(_name_of, threading.enumerate()), *_children()}


def _name_of(thread: threading.Thread) -> str:
    return f"thread {thread.name} ({thread.ident})"


def _descriptors():
    # The pipes of the helpers are opened with them, whichever test starts them.
    helpers = resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            target = os.readlink(f"/proc/self/fd/{name}")
            if int(name) not in helpers and not target.startswith("/dev/"):
                yield f"descriptor {name} -> {target}"


def _children():
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as listing:  # or it has ended
            for child in listing.read().split():
                command = _command(child)
                if not any(helper in command for helper in _HELPERS):
                    yield f"process {child}: {command[:80]}"


def _command(process: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "(ended, and not waited for)"
