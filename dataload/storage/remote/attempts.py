"""Calls of obstore: repeated until the time-out, counted, and open to Ctrl-C; their errors are translated."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dataload._util.per_process import first_process
from dataload._util.threads import DaemonThreads
from dataload.errors import DataloadError, MachineError, SourceError, SourceNotFoundError, StoreError
from dataload.storage.errors import rewritten_error
from dataload.storage.remote.failures import failure_reason, is_of_machine, is_permanent, is_throttled
from dataload.storage.remote.settings import RemoteOptions
from dataload.storage.remote.traffic import Request, Traffic

T = TypeVar("T")

REQUESTS_IN_TIMEOUT = 4
"""The last attempt has to end before the time-out."""

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0  # seconds between attempts
_INTERRUPTED_SECONDS = 0.5  # for a request that cleans up after Ctrl-C


@dataclass(frozen=True, slots=True)
class Attempts:
    """Makes the calls of one client."""

    options: RemoteOptions
    secrets: Sequence[str]  # texts that no message may contain
    errors: Any  # the module `obstore.exceptions`
    threads: DaemonThreads  # make the calls of the main thread
    traffic: Traffic

    def make(self, what: str, url: str, call: Callable[[], T]) -> T:
        """Call, and again after failures that may pass."""
        check_process()
        if not can_be_interrupted():
            return self._repeat(what, url, call)
        error = sys.exception()  # cleaning up after Ctrl-C may take requests, too
        interrupt = error if isinstance(error, KeyboardInterrupt) else None
        seconds = -1 if interrupt is None else _INTERRUPTED_SECONDS
        try:
            return self.threads.wait_for(lambda: self._repeat(what, url, call), seconds)
        except TimeoutError:
            raise interrupt or StoreError(f"cannot {what}", path=url) from None

    def _repeat(self, what: str, url: str, call: Callable[[], T]) -> T:
        """Call until it succeeds. obstore's own texts may hold secrets."""
        begun, attempts = time.monotonic(), 0
        last = begun + self.options.timeout * (1 - 1 / REQUESTS_IN_TIMEOUT)
        while True:
            attempts += 1
            try:
                return self._counted(what, call, again=attempts > 1)
            except (DataloadError, MemoryError):
                raise
            except (self.errors.NotFoundError, FileNotFoundError):
                raise SourceNotFoundError(f"there is no {url}", path=url) from None
            except self.errors.PreconditionError:
                raise rewritten_error(url) from None
            except FileExistsError:
                raise FileExistsError(url) from None
            except Exception as error:
                reason, permanent = failure_reason(error, self.secrets), is_permanent(error, self.errors)
                of_machine = is_of_machine(error)
            if of_machine:
                raise MachineError(
                    f"cannot {what}: this machine lacks descriptors or memory ({reason}): raise `ulimit -n`, or lower "
                    "remote.connections",
                    path=url,
                )
            if permanent:
                raise StoreError(f"cannot {what}: {reason}", path=url)
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (attempts - 1)) * random.uniform(0.5, 1)
            if attempts > self.options.retries or time.monotonic() + wait > last:
                raise StoreError(
                    f"cannot {what}: {reason} ({attempts} attempts in {time.monotonic() - begun:.1f} s; the options "
                    "timeout and retries of remote allow more)",
                    path=url,
                )
            time.sleep(wait)

    def _counted(self, what: str, call: Callable[[], T], *, again: bool) -> T:
        begun, failed, throttled = time.perf_counter(), True, False
        try:
            result = call()
            failed = False
        except BaseException as error:
            throttled = is_throttled(error)
            if type(error).__name__ == "PanicException":  # of Rust, for what no store can have asked for
                message = f"cannot {what}: obstore ends with {failure_reason(error, self.secrets)}"
                raise StoreError(f"{message}: check the endpoint and the other storage_options") from None
            raise
        finally:
            request = Request(what, begun, time.perf_counter(), failed)
            self.traffic.requested(request, again=again, throttled=throttled)
        return result


def can_be_interrupted() -> bool:
    """Return whether this is the thread that Ctrl-C interrupts. It cannot do that while obstore waits."""
    return threading.get_ident() == threading.main_thread().ident and callable(signal.getsignal(signal.SIGINT))


def check_process() -> None:
    """Raise in a forked child of a process that has used obstore: its threads are gone, and every call would hang."""
    if first_process("obstore") != os.getpid():
        raise SourceError(
            "this process was forked by one that had read from a URL, whose connections do not survive that: start "
            "processes with 'forkserver' or 'spawn'"
        )
