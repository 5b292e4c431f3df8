"""Publish a loader's statistics: as OpenTelemetry metrics and spans, to TensorBoard and W&B, in trainers."""

from dataload.telemetry.log import lightning_callback, log_to, trainer_callback
from dataload.telemetry.metrics import METRICS, Metric, instrument

__all__ = ["METRICS", "Metric", "instrument", "lightning_callback", "log_to", "trainer_callback"]
