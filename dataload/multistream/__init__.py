"""Batches whose rows follow iterators that cannot seek."""

from dataload.multistream.loader import MultiStreamLoader
from dataload.multistream.rows import StreamContext
from dataload.multistream.statistics import MultiStreamStatistics

__all__ = ["MultiStreamLoader", "MultiStreamStatistics", "StreamContext"]
