"""Shared by all tests: what a test leaves behind fails it, and what hypothesis finds is found again."""

import contextlib
import faulthandler
import gc
import importlib.util
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from _pytest.logging import LogCaptureFixture, LogCaptureHandler, caplog_handler_key, catching_logs
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

# A thread of OpenBLAS spins for a while in each process that imports numpy, and again after each fork.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A few examples, the same every time, so that a red build is red again; `make fuzz` looks for new ones.
# No test fails because the machine is slow.
_NO_CLOCK = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", _NO_CLOCK, derandomize=True, max_examples=15)
settings.register_profile("thorough", _NO_CLOCK, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# A shell that puts the tests into the background has them ignore Ctrl-C, and so would all that they start.
with contextlib.suppress(ValueError):  # not the main thread
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

# What the library keeps for its user, such as the places of tables, ends with the tests.
_CACHE = tempfile.TemporaryDirectory(prefix="dataload-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

# Whoever starts a fork server, torch or a test, its processes start at once.
_PRELOAD = [f"dataload.{name}" for name in ("executors.preload", "executors.worker", "convert", "loader", "streams")]
multiprocessing.set_forkserver_preload(_PRELOAD)

# Started by multiprocessing once per process, for as long as it lives.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    if call.excinfo is not None:
        item.stash[_FAILED] = True
    return (yield)


# Seconds, at least ten times what such a test takes. Others have the 20 s of pyproject.toml.
_LIMITS = {"slow": 60, "slow_suite": 150, "remote": 150, "train": 180, "ray": 240}


def pytest_collection_modifyitems(config, items):
    """Begin with the files of slow tests, so that no process of pytest-xdist is left alone with one at the end."""
    slow = set()
    for item in items:
        names = {marker.name for marker in item.iter_markers()}
        limits = [_LIMITS[name] for name in names & _LIMITS.keys()]
        if limits and config.getoption("timeout") is None and "timeout" not in names:
            item.add_marker(pytest.mark.timeout(max(limits)))
        if "slow" in names:
            slow.add(item.path)
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leave the collector alone while everything that is made stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def threads_of_obstore():
    """Start the threads of obstore, which live as long as the process, before a test counts what it leaves behind."""
    # Not when collection ends: the mutation tester forks then, and a fork has no threads.
    if importlib.util.find_spec("obstore") is not None:
        import obstore

        obstore.put(obstore.store.MemoryStore(), "x", b"")


_armed = 0.0
_file = None


def pytest_runtest_protocol(item, nextitem):
    """Send what someone looks at only: a report of each phase costs more than most tests."""
    global _armed, _file
    if item.path != _file:  # with torch, a collection of what other files have left takes 0.2 s
        _file = item.path
        gc.collect()
        gc.freeze()
    if time.monotonic() > _armed + 10:  # for C code that hangs; pytest's own starts a thread for each test
        _armed = time.monotonic()
        faulthandler.dump_traceback_later(250, file=item.config.stash[fault_handler_stderr_fd_key])
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed or report.duration > 0.1:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    """Descriptors, threads and child processes that a test leaves behind fail it."""
    before = _held()
    yield
    if request.node.stash.get(_FAILED, False):
        return  # its traceback holds what it held
    if not (left := _left(before)):
        return
    for generation in range(3):  # what lies in a cycle is not held on purpose, and is mostly young
        if left:
            gc.collect(generation)
            left = _left(before)
    # A thread may be about to end, with what it alone holds; and those of obstore close connections a bit later.
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        time.sleep(0.005)
        gc.collect()
        if obstore := sys.modules.get("obstore"):
            obstore.parse_scheme("memory:///")  # lets go of what its threads have dropped without the GIL
        left = _left(before)
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


@pytest.fixture(scope="session")
def fonts():
    """Draw text: matplotlib keeps the files of fonts open, which is no leak of the test that draws first."""
    from dataload.analysis.pictures import new_figure

    new_figure(3, 3, "x", "x").savefig(io.BytesIO())


@pytest.fixture
def caplog(request):
    """What is logged: pytest's own takes a third of the time of a small test, also of those that do not use it."""
    with catching_logs(LogCaptureHandler()) as handler:
        request.node.stash[caplog_handler_key] = handler
        yield (fixture := LogCaptureFixture(request.node, _ispytest=True))
        fixture._finalize()


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


@pytest.fixture(scope="module")
def fork_server():
    """Start a fork server, unless one runs: it has the environment from before the module's tests."""
    forkserver.ensure_running()


def _held() -> set[tuple]:
    """Return a key of all that is open and alive; it is taken twice per test, so it costs little."""
    held: set[tuple] = {(_describe_thread, thread.name, thread.ident) for thread in threading.enumerate()}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found = os.fstat(int(name))  # a fifth of what reading its link takes
            held.add((_describe_descriptor, name, found.st_dev, found.st_ino))
    held.update((_describe_child, child) for child in _children())
    return held


def _left(before: set[tuple]) -> set[str]:
    """Describe what is held and was not held before, but for what helpers of multiprocessing hold."""
    described = {describe(*key) for describe, *key in _held() - before}
    return {text for text in described if text is not None}


def _describe_thread(name: str, ident: int) -> str:
    return f"thread {name} ({ident})"


def _describe_descriptor(name: str, *_: int) -> str | None:
    # The pipes of the helpers are opened with them, whichever test starts them.
    if int(name) in (resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd):
        return None
    with contextlib.suppress(OSError):  # a thread has closed it meanwhile
        target = os.readlink(f"/proc/self/fd/{name}")
        return None if target.startswith("/dev/") else f"descriptor {name} -> {target}"
    return None


def _describe_child(process: str) -> str | None:
    command = _command(process)
    return None if any(helper in command for helper in _HELPERS) else f"process {process}: {command[:80]}"


def _children():
    """Return the children of Python's threads; those of a thread that ends become children of another."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return  # the usual case
    for thread in threading.enumerate():
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread.native_id}/children") as listing:
            yield from listing.read().split()


def _command(process: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "(ended, and not waited for)"
