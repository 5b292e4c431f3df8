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


def run(tmp_path, script):
    path = tmp_path / "data"
    path.write_bytes(bytes(64 * 65536))
    source = PREAMBLE + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", source, path, CORE.origin], capture_output=True, text=True, timeout=50)


def check(tmp_path, script):
    done = run(tmp_path, script)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    return done.stderr


def test_every_function_survives(tmp_path):
    check(
        tmp_path,
        """
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
        print("ok")
        """,
    )


def test_the_rest_of_the_last_page_is_not_believed(tmp_path):
    check(
        tmp_path,
        """
        os.truncate(descriptor, 64 * PAGE - 1)  # reads as 0, without a fault
        assert survives(at=[64 * PAGE - 1])
        print("ok")
        """,
    )


def test_threads_survive_while_a_file_shrinks_and_grows(tmp_path):
    check(
        tmp_path,
        """
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
        print("ok")
        """,
    )


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_beside_faulthandler(tmp_path, when):
    error = check(
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
        print("ok")
        """,
    )
    assert "Bus error" not in error


@pytest.mark.parametrize("with_faulthandler", [False, True])
def test_a_fault_that_is_not_ours_still_kills(tmp_path, with_faulthandler):
    done = run(
        tmp_path,
        f"""
        if {with_faulthandler}:
            faulthandler.enable()
        assert not survives()
        os.truncate(descriptor, 0)
        assert survives()
        foreign()
        """,
    )
    assert done.returncode == -signal.SIGBUS
    assert ("Bus error" in done.stderr) == with_faulthandler
    assert done.stderr.count("foreign") == with_faulthandler  # the handlers do not call each other for ever


def test_faulthandler_enabled_later_still_reports_faults_that_are_not_ours(tmp_path):
    done = run(
        tmp_path,
        """
        assert not survives()
        faulthandler.enable()
        assert not survives()
        os.truncate(descriptor, 0)
        assert survives()
        foreign()
        """,
    )
    assert done.returncode == -signal.SIGBUS
    assert done.stderr.count("Bus error") >= 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_users_handler_still_gets_its_signals(tmp_path, when):
    check(
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
        print("ok")
        """,
    )


def test_a_signal_that_was_sent_still_kills(tmp_path):
    done = run(tmp_path, "survives(); os.kill(os.getpid(), signal.SIGBUS)")
    assert done.returncode == -signal.SIGBUS
    ignored = run(
        tmp_path,
        "signal.signal(signal.SIGBUS, signal.SIG_IGN); survives(); os.kill(os.getpid(), signal.SIGBUS); print('ok')",
    )
    assert ignored.stdout == "ok\n"


def test_a_forked_child_is_guarded(tmp_path):
    check(
        tmp_path,
        """
        assert not survives()
        os.truncate(descriptor, 0)
        child = os.fork()
        if not child:
            os._exit(0 if survives() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert survives()
        print("ok")
        """,
    )
