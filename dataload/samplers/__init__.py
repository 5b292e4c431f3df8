"""Orders as values: which index stands at which position of an epoch, for any number of workers and machines."""

from dataload.samplers.batch import BatchPlan, BatchSampler
from dataload.samplers.sequential import Sequential
from dataload.samplers.shuffle import GlobalShuffle

__all__ = ["BatchPlan", "BatchSampler", "GlobalShuffle", "Sequential"]
