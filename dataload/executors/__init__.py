"""Where tasks run: in the consumer's thread, in threads, in processes.

`ProcessExecutor` is to be imported from its module: most programs do without `multiprocessing`.
"""

from dataload.executors.base import (
    Executor,
    Place,
    Result,
    SerialExecutor,
    StartMethod,
    TimeoutPolicy,
    WorkerLostError,
    WorkerStatus,
    worker_name,
)
from dataload.executors.threads import ThreadExecutor

__all__ = [
    "Executor",
    "Place",
    "Result",
    "SerialExecutor",
    "StartMethod",
    "ThreadExecutor",
    "TimeoutPolicy",
    "WorkerLostError",
    "WorkerStatus",
    "worker_name",
]
