"""Runs torch's and torchdata's own tests of data loaders with the import changed to dataload.torch.

    python tests/foreign/torch_suites.py CHECKOUT [--theirs] [--only TEXT]

CHECKOUT is a checkout of https://github.com/pytorch/data. Each test runs in a forked process of its own, with a time
limit. A test with a failing subtest fails. `--theirs` leaves the import as it is.
"""

import argparse
import collections
import contextlib
import importlib
import io
import json
import os
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path
from types import ModuleType

SUITES = {"torch": "test_dataloader", "torchdata": "test_state_dict"}
IMPORT = "from torchdata.stateful_dataloader import "
CHANGED = {
    f"{IMPORT}StatefulDataLoader as DataLoader": "from dataload.torch import DataLoader",
    f"{IMPORT}Stateful, StatefulDataLoader": (
        "from torch.distributed.checkpoint.stateful import Stateful\n"
        "from dataload.torch import DataLoader as StatefulDataLoader"
    ),
}
THEIRS = {f"{IMPORT}StatefulDataLoader as DataLoader": "from torch.utils.data import DataLoader"}
SECONDS = 300


def copied(checkout: Path, folder: Path, *, theirs: bool) -> None:
    """Write the suites to a folder, with the import changed."""
    for name in SUITES.values():
        text = (checkout / "test/stateful_dataloader" / f"{name}.py").read_text(encoding="utf-8")
        for old, new in (THEIRS if theirs else CHANGED).items():
            text = text.replace(old, new)
        text = text.replace("JOIN_TIMEOUT = 60.0", "JOIN_TIMEOUT = 200.0")  # of processes, on a busy machine
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


def tests_of(module: ModuleType) -> list[unittest.TestCase]:
    """Return the tests of a suite, one by one; torch's `load_tests` is not needed for that."""
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, unittest.TestCase)]
    own = [kind for kind in kinds if kind.__module__ == module.__name__]
    return [test for kind in own for test in unittest.defaultTestLoader.loadTestsFromTestCase(kind)]


def last_line(text: str) -> str:
    """Return the line of a traceback that names the error, without torch's advice."""
    lines = [line for line in text.split("To execute this test")[0].strip().splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line[:1].strip()), "")[:300]


def run(test: unittest.TestCase, write: int) -> None:
    """Run one test in this process, which ends with it, and write its outcome."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    result = unittest.TextTestRunner(io.StringIO()).run(unittest.TestSuite([test]))
    problems = [*result.failures, *result.errors]
    outcome = "failed" if problems or result.unexpectedSuccesses else "skipped" if result.skipped else "passed"
    last = last_line(problems[0][1]) if problems else ""
    full = problems[0][1] if problems else ""
    os.write(write, json.dumps([outcome, len(problems), last, full[-6000:]]).encode())
    os._exit(0)


def started(test: unittest.TestCase) -> tuple[int, int, float]:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        run(test, write)
    os.close(write)
    return pid, read, time.monotonic()


def ended(pid: int, read: int, begun: float, seconds: float) -> list | None:
    """Return the outcome of a test that has ended, or was ended for the time that it took; otherwise None."""
    found, _ = os.waitpid(pid, os.WNOHANG)
    late = time.monotonic() - begun > seconds
    if not found and not late:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it left behind, too
    if not found:
        os.waitpid(pid, 0)
    os.set_blocking(read, False)
    try:
        text = os.read(read, 1 << 16)
    except BlockingIOError:
        text = b""
    os.close(read)
    if text:
        return json.loads(text)
    return ["failed", 1, f"took more than {seconds} s" if late else "its process ended", ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--theirs", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--suite", choices=[*SUITES], help="by default both")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--verbose", action="store_true", help="show the tracebacks")
    given = parser.parse_args()
    sys.argv = sys.argv[:1]  # torch's suites parse it
    with tempfile.TemporaryDirectory() as name:
        copied(given.checkout, Path(name), theirs=given.theirs)
        sys.path.insert(0, name)
        for title in [given.suite] if given.suite else SUITES:
            module = importlib.import_module(SUITES[title])
            waiting = [test for test in tests_of(module) if given.only in test.id()][::-1]
            running: dict[tuple, str] = {}
            counts = collections.Counter()
            while waiting or running:
                while waiting and len(running) < given.jobs:
                    test = waiting.pop()
                    running[started(test)] = test.id()
                for key in [*running]:
                    if (outcome := ended(*key, given.seconds)) is None:
                        continue
                    kind, problems, last, full = outcome
                    counts[kind] += 1
                    if kind == "failed":
                        print(f"FAILED {running[key]} ({problems}): {last}", flush=True)
                        if given.verbose:
                            print(full)
                    del running[key]
                time.sleep(0.01)
            print(f"{title}: " + ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
