"""Where tasks run: in the consumer's thread, in threads, in processes.

`ProcessExecutor` is to be imported from its module: most programs do without `multiprocessing`.
"""

from dataload.executors.base import (
    Executor,
    Heartbeat,
    Patience,
    Place,
    Result,
    SerialExecutor,
    StartMethod,
    WorkerLostError,
    worker_name,
)
from dataload.executors.threads import ThreadExecutor

__all__ = [
    "Executor",
    "Heartbeat",
    "Patience",
    "Place",
    "Result",
    "SerialExecutor",
    "StartMethod",
    "ThreadExecutor",
    "WorkerLostError",
    "worker_name",
]
