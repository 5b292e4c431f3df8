"""Read sources in a separate process: a new one, which tests pickling, hash seeds and lazy opening, or a forked one."""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dataload.testing.compare import record_digest

_TIMEOUT_SECONDS = 20  # for up to ten sources


@dataclass(frozen=True, slots=True)
class ReadReport:
    """The content of a source as another process read it."""

    digests: tuple[str, ...] = ()  # one per record, in index order
    fingerprint: str = ""  # result of `fingerprint()`, if the source has it
    error: str = ""  # the exception as "Class: message", if reading failed
    error_classes: tuple[str, ...] = ()  # names of its class and base classes
    error_path: str = ""  # its `path`, if it has one


def read_whole(source: Any) -> ReadReport:
    """Read every record, one at a time and all together."""
    try:
        indices = range(len(source))
        digests = tuple(record_digest(source[index]) for index in indices)
        if hasattr(source, "__getitems__"):
            together = tuple(record_digest(record) for record in source.__getitems__(list(indices)))
            if together != digests:
                return ReadReport(digests, error="AssertionError: __getitems__ and __getitem__ differ")
        return ReadReport(digests, fingerprint=source.fingerprint() if hasattr(source, "fingerprint") else "")
    except Exception as error:
        return failed_reading(error)


def failed_reading(error: Exception) -> ReadReport:
    """Return the reading of a source that raised `error`."""
    classes = tuple(kind.__name__ for kind in type(error).__mro__)
    text = f"{type(error).__name__}: {error}"
    return ReadReport(error=text, error_classes=classes, error_path=str(getattr(error, "path", None) or ""))


def read_in_new_process(sources: Sequence[Any]) -> list[ReadReport]:
    """Pickle sources and read them in one new process with another PYTHONHASHSEED."""
    pickles = pickle.dumps([pickled(source) for source in sources])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0",
    }
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    seconds = _timeout(sources)
    try:
        ended = subprocess.run(command, input=pickles, capture_output=True, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired as expired:
        return _readings(io.BytesIO(expired.stdout or b""), sources, f"did not end in {seconds} s")
    last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["(no output)"]
    return _readings(io.BytesIO(ended.stdout), sources, f"{_ending(ended.returncode)}: {last[0]}")


def read_in_fork(sources: Sequence[Any], *, read: Callable[[Any], ReadReport] = read_whole) -> list[ReadReport]:
    """Read sources in one forked child with `read`; raise AssertionError if it dies or hangs."""
    with tempfile.TemporaryFile() as answers:
        context: Any = multiprocessing.get_context("fork")
        child = context.Process(target=_answer, args=(answers, sources, read))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which are intended
            child.start()
        seconds = _timeout(sources)
        child.join(seconds)
        how = f"did not end in {seconds} s" if child.exitcode is None else _ending(child.exitcode)
        child.kill()
        child.join()
        child.close()
        return _readings(answers, sources, how)


def _timeout(sources: Sequence[Any]) -> float:
    return _TIMEOUT_SECONDS * (1 + len(sources) // 10)


def main() -> None:
    """Run in the new process: read pickles from standard input, write one reading per source."""
    for data in pickle.load(sys.stdin.buffer):  # noqa: S301 - from the process that started this one
        try:
            source = pickle.loads(data)  # noqa: S301
        except Exception as error:
            reading = ReadReport(error=f"unpickling raises {type(error).__name__}: {error}")
        else:
            reading = read_whole(source)
        _send(reading, sys.stdout.buffer)


def pickled(source: Any) -> bytes:
    """Pickle a source; raise AssertionError if that fails."""
    try:
        return pickle.dumps(source)
    except Exception as error:
        raise AssertionError(f"{type(source).__name__} does not pickle: {error}") from error


def _ending(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _readings(answers: Any, sources: Sequence[Any], ending: str) -> list[ReadReport]:
    """Return the readings that a child sent; check that they are one per source."""
    readings: list[ReadReport] = []
    answers.seek(0)
    with contextlib.suppress(EOFError, pickle.UnpicklingError):  # a killed child may leave a truncated reading
        while len(readings) < len(sources):
            readings.append(pickle.load(answers))  # noqa: S301 - from the process that this one started
    if len(readings) < len(sources):
        raise AssertionError(f"the process that read {sources[len(readings)]!r} {ending}")
    return readings


def _send(reading: ReadReport, answers: Any) -> None:
    pickle.dump(reading, answers)
    answers.flush()


def _answer(answers: Any, sources: Sequence[Any], read: Callable[[Any], ReadReport]) -> NoReturn:
    """Run in the forked child: send the readings and exit without this process's exit handlers."""
    code = 1
    faulthandler.disable()  # the parent reports the death of this process
    warnings.simplefilter("ignore")  # otherwise a warning raised as an error would look like a refusal
    with contextlib.suppress(BaseException):
        for source in sources:
            _send(read(source), answers)
        code = 0
    os._exit(code)
