"""Publish a loader's statistics: as OpenTelemetry metrics and spans, to TensorBoard and W&B, in trainers.

Nothing here runs in the loop of a loader that is not instrumented. OpenTelemetry is imported by `instrument` only.
"""

from dataload.telemetry.log import StatisticsLog, lightning_callback, log_to, trainer_callback
from dataload.telemetry.metrics import METRICS, Instrumentation, Metric, instrument

__all__ = [
    "METRICS",
    "Instrumentation",
    "Metric",
    "StatisticsLog",
    "instrument",
    "lightning_callback",
    "log_to",
    "trainer_callback",
]
