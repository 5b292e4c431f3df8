"""The first import of the fork server, and of nothing else: it prepares the server for its other imports.

Without the garbage collector, which would look again and again at what is never garbage, the imports take 15% less CPU
time. The collector goes on in the processes that the server starts, and leaves out what they inherit.

Ctrl-C goes to the server, too, which ignores it once it serves. Until then, it would end with a traceback.
"""

import gc
import os
import signal
from typing import Any

_SERVER = os.getpid()


def _resume() -> None:
    gc.freeze()
    gc.enable()


def _interrupted(number: int, frame: Any) -> None:
    if os.getpid() != _SERVER:
        signal.default_int_handler(number, frame)


gc.disable()
os.register_at_fork(after_in_child=_resume)
signal.signal(signal.SIGINT, _interrupted)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
