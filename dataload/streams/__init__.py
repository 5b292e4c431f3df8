"""Batches whose rows each follow a sequence from batch to batch, for models that carry state."""

from dataload.samplers.streams.mixture import RowMixture
from dataload.samplers.streams.sampler import StreamSampler
from dataload.streams.loader import MultiStreamLoader
from dataload.streams.rows import StreamContext
from dataload.streams.state import MultiStreamStatistics, reset_state

__all__ = ["MultiStreamLoader", "MultiStreamStatistics", "RowMixture", "StreamContext", "StreamSampler", "reset_state"]
