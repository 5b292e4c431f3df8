"""Executors run tasks in the consumer's thread, in threads, or in processes.

Import `ProcessExecutor` from its module: most programs do not need `multiprocessing`.
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
