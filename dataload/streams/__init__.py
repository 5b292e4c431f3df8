"""Batch rows that continue the sequence they follow, for models that carry state."""

from dataload.streams.mixture import RowMixture
from dataload.streams.reset import reset_state
from dataload.streams.sampler import StreamSampler

__all__ = ["RowMixture", "StreamSampler", "reset_state"]
