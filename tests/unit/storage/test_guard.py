"""A file that shrinks while it is mapped is an error, not the end of the process."""

import importlib.util
import signal
import subprocess
import sys
import textwrap

import pytest

CORE = importlib.util.find_spec("dataload.storage._core_c")
pytestmark = pytest.mark.skipif(CORE is None, reason="only the compiled core has a guard")

PREAMBLE = """
import faulthandler, importlib.machinery, importlib.util, mmap, os, signal, sys, threading
import numpy as np

# Without the package, whose import takes a second.
loader = importlib.machinery.ExtensionFileLoader("dataload.storage._core_c", sys.argv[2])
spec = importlib.util.spec_from_file_location(loader.name, loader.path, loader=loader)
_core_c = importlib.util.module_from_spec(spec)
loader.exec_module(_core_c)

PAGE = mmap.PAGESIZE
descriptor = os.open(sys.argv[1], os.O_RDWR)
mapped = mmap.mmap(descriptor, 64 * PAGE, access=mmap.ACCESS_READ)
rows = np.arange(64)
lengths = np.full(64, PAGE)

def gather(length=PAGE):
    _core_c.gather(bytearray(64 * length), mapped, 0, PAGE, rows, length, descriptor)

def survives(function=gather, at=range(64 * PAGE)):
    try:
        function()
    except _core_c.MapFault as error:
        assert int(str(error)) in at
        return True
    return False

def foreign():
    return mapped[-1]  # outside the core
"""


SCRIPTS = {
    "every function survives": """
        assert not survives()
        os.truncate(descriptor, 3 * PAGE)
        for function in (
            gather,
            lambda: gather(8),
            lambda: _core_c.gather_ranges(bytearray(64 * PAGE), mapped, rows * PAGE, lengths, descriptor),
            lambda: _core_c.copies(mapped, rows * PAGE, lengths, descriptor),
            lambda: _core_c.hash_ranges(bytearray(512), mapped, rows * PAGE, lengths, bytes(32), descriptor),
            lambda: _core_c.hash_ranges_portable(bytearray(512), mapped, rows * PAGE, lengths, bytes(32), descriptor),
        ):
            for _ in range(100):
                assert survives(function, [3 * PAGE])
        os.truncate(descriptor, 64 * PAGE)
        assert not survives()
        os.truncate(descriptor, 64 * PAGE - 1)  # the rest of the last page reads as 0, without a fault
        assert survives(at=[64 * PAGE - 1])
        """,
    "threads survive while a file shrinks and grows": """
        caught, done = [0] * 3, threading.Event()

        def read(number):
            while not done.is_set():
                caught[number] += survives()

        threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for round in range(300):
            os.truncate(descriptor, round % 5 * PAGE)
            os.truncate(descriptor, 64 * PAGE)
        while min(caught) < 5:
            os.truncate(descriptor, 0)
        done.set()
        for thread in threads:
            thread.join()
        """,
    "a forked child is guarded": """
        assert not survives()
        os.truncate(descriptor, 0)
        child = os.fork()
        if not child:
            os._exit(0 if survives() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert survives()
        """,
    "an ignored signal stays ignored": """
        signal.signal(signal.SIGBUS, signal.SIG_IGN)
        survives()
        os.kill(os.getpid(), signal.SIGBUS)
        """,
}


def run(tmp_path, script):
    path = tmp_path / "data"
    path.write_bytes(bytes(64 * 65536))
    source = PREAMBLE + textwrap.dedent(script) + "\nprint('ok')"
    return subprocess.run([sys.executable, "-c", source, path, CORE.origin], capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_process_survives(tmp_path, script):
    done = run(tmp_path, script)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_beside_faulthandler(tmp_path, when):
    done = run(
        tmp_path,
        f"""
        if {when!r} != "after":
            faulthandler.enable()
        assert not survives()  # installs the handler
        if {when!r} != "before":
            faulthandler.enable()
        os.truncate(descriptor, 0)
        for _ in range(10):
            assert survives()
        """,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert "Bus error" not in done.stderr


@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_a_fault_that_is_not_ours_still_kills(tmp_path, when):
    done = run(
        tmp_path,
        f"""
        if {when!r} == "before":
            faulthandler.enable()
        assert not survives()
        if {when!r} == "after":
            faulthandler.enable()
            assert not survives()
        os.truncate(descriptor, 0)
        assert survives()
        foreign()
        """,
    )
    assert done.returncode == -signal.SIGBUS
    assert ("Bus error" in done.stderr) == (when != "never")
    if when != "after":
        assert done.stderr.count("foreign") == (when == "before")  # the handlers do not call each other for ever


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_users_handler_still_gets_its_signals(tmp_path, when):
    done = run(
        tmp_path,
        f"""
        found = []
        if {when!r} == "before":
            signal.signal(signal.SIGBUS, lambda number, frame: found.append(number))
        assert not survives()
        if {when!r} == "after":
            signal.signal(signal.SIGBUS, lambda number, frame: found.append(number))
        os.truncate(descriptor, 0)
        assert survives()
        os.kill(os.getpid(), signal.SIGBUS)
        signal.raise_signal(signal.SIGBUS)
        assert found == [signal.SIGBUS] * 2
        assert survives()
        """,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_a_signal_that_was_sent_still_kills(tmp_path):
    assert run(tmp_path, "survives(); os.kill(os.getpid(), signal.SIGBUS)").returncode == -signal.SIGBUS
