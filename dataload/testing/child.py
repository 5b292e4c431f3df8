"""Read sources in a separate process, new or forked.

A new process tests pickling, another hash seed and lazy opening. In either, a file that kills its reader does no harm.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from dataload.testing.compare import record_digest

_TIMEOUT_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of one source, as read by another process.

    Attributes:
        digests: A digest per record, in index order.
        fingerprint: The result of `fingerprint()`, or "" without that method.
        error: The exception as "Class: message", or "".
        error_classes: Names of the exception's class and its bases.
        error_path: The exception's `path`, if it has one.
    """

    digests: tuple[str, ...] = ()
    fingerprint: str = ""
    error: str = ""
    error_classes: tuple[str, ...] = ()
    error_path: str = ""


def read_whole(source: Any) -> Reading:
    """Read every record, one at a time and all together."""
    try:
        indices = range(len(source))
        digests = tuple(record_digest(source[index]) for index in indices)
        read = getattr(source, "__getitems__", None)
        if read is not None:
            together = tuple(record_digest(record) for record in read(list(indices)))
            if together != digests:
                return Reading(digests, error="AssertionError: __getitems__ and __getitem__ differ")
        identify = getattr(source, "fingerprint", None)
        return Reading(digests, fingerprint=identify() if identify else "")
    except Exception as error:
        return failed_reading(error)


def failed_reading(error: Exception) -> Reading:
    """Return the reading of a source that raised `error`."""
    classes = tuple(kind.__name__ for kind in type(error).__mro__)
    text = f"{type(error).__name__}: {error}"
    return Reading(error=text, error_classes=classes, error_path=str(getattr(error, "path", None) or ""))


def read_in_new_process(sources: Sequence[Any], *, hash_seed: int | None = None) -> list[Reading]:
    """Pickle sources and read them completely in one new process.

    Args:
        sources: The sources, read one after another.
        hash_seed: PYTHONHASHSEED of the new process. By default, it differs from this process's.

    Raises:
        AssertionError: A source cannot be pickled, or the process died or hung; the message names the source.
    """
    if hash_seed is None:
        hash_seed = 1 if os.environ.get("PYTHONHASHSEED") == "0" else 0
    pickles = [base64.b64encode(pickled(source)).decode() for source in sources]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONHASHSEED": str(hash_seed),
    }
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        try:
            out, complaints = process.communicate(json.dumps(pickles), timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as expired:
            process.kill()
            return _readings((expired.stdout or b"").decode(), sources, f"did not end in {_TIMEOUT_SECONDS} s")
    last = complaints.strip().splitlines()[-1:] or ["(no output)"]
    return _readings(out, sources, f"{_ending(process.returncode)}: {last[0]}")


def read_in_fork(sources: Sequence[Any], *, read: Callable[[Any], Reading] = read_whole) -> list[Reading]:
    """Read sources in one forked child.

    Args:
        sources: The sources, passed to `read` one after another.
        read: The function to call in the child.

    Raises:
        AssertionError: The child died or hung; the message names the source.
    """
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about threads, which are intended here
        child = os.fork()
    if not child:
        _answer(sender, sources, read)
    os.close(sender)
    try:
        data, ended = _receive(receiver)
    finally:
        os.close(receiver)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    how = _ending(os.waitstatus_to_exitcode(status)) if ended else f"did not end in {_TIMEOUT_SECONDS} s"
    return _readings(data.decode(), sources, how)


def main() -> None:
    """Run in the new process: read pickles from standard input, write one line of JSON per source."""
    for text in json.load(sys.stdin):
        try:
            source = pickle.loads(base64.b64decode(text))  # noqa: S301 - from the process that started this one
        except Exception as error:
            reading = Reading(error=f"unpickling raises {type(error).__name__}: {error}")
        else:
            reading = read_whole(source)
        sys.stdout.write(_to_json(reading))
        sys.stdout.flush()


def pickled(source: Any) -> bytes:
    """Pickle a source; raise AssertionError if that is impossible."""
    try:
        return pickle.dumps(source)
    except Exception as error:
        raise AssertionError(f"{type(source).__name__} does not pickle: {error}") from error


def _ending(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _readings(lines: str, sources: Sequence[Any], ending: str) -> list[Reading]:
    """Parse the output of a child, which should have one line per source."""
    readings = [_from_json(line) for line in lines.splitlines()]
    if len(readings) < len(sources):
        raise AssertionError(f"the process that read {sources[len(readings)]!r} {ending}")
    return readings


def _to_json(reading: Reading) -> str:
    return json.dumps(asdict(reading)) + "\n"


def _from_json(line: str) -> Reading:
    values: dict[str, Any] = json.loads(line)
    for name in ("digests", "error_classes"):
        values[name] = tuple(values[name])
    return Reading(**values)


def _answer(sender: int, sources: Sequence[Any], read: Callable[[Any], Reading]) -> NoReturn:
    """Run in the forked child: send the readings and exit without running this process's exit handlers."""
    code = 1
    faulthandler.disable()  # the parent reports what kills this process
    warnings.simplefilter("ignore")  # if warnings are errors, one would look like a refusal
    with contextlib.suppress(BaseException):
        for source in sources:
            data = _to_json(read(source)).encode()
            while data:
                data = data[os.write(sender, data) :]
        code = 0
    os._exit(code)


def _receive(receiver: int) -> tuple[bytes, bool]:
    """Return the data received, and whether the child ended in time."""
    data = b""
    while True:
        ready, _, _ = select.select([receiver], [], [], _TIMEOUT_SECONDS)
        if not ready:
            return data, False
        piece = os.read(receiver, 1 << 16)
        if not piece:
            return data, True
        data += piece
