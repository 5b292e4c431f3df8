"""Executors run tasks in the consumer's thread, in threads, or in processes (imported from its module)."""

from dataload.executors.base import (
    Executor,
    Result,
    SerialExecutor,
    StartMethod,
    TimeoutPolicy,
    WorkerLostError,
    WorkerPosition,
    WorkerStatus,
    worker_name,
)
from dataload.executors.threads import ThreadExecutor

__all__ = [
    "Executor",
    "Result",
    "SerialExecutor",
    "StartMethod",
    "ThreadExecutor",
    "TimeoutPolicy",
    "WorkerLostError",
    "WorkerPosition",
    "WorkerStatus",
    "worker_name",
]
