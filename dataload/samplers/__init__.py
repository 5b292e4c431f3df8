"""Orders of records, as frozen values.

A sampler maps positions of an epoch to indices of records. It is a pure function of seed, epoch and position, so it
gives the same order on any number of workers and machines, and any position can be computed directly. A batch sampler
distributes an order over steps and ranks.
"""

from dataload.samplers.basic import GlobalShuffle, Lanes, Repeat, Sequential, ShardSequential, Subset
from dataload.samplers.batch import BatchPlan, BatchPlanner, BatchSampler, Serving, servings_of
from dataload.samplers.buckets import BucketBatchSampler
from dataload.samplers.mixture import Mixture
from dataload.samplers.mixture_weights import blend_weights
from dataload.samplers.packing import PackedBatchSampler
from dataload.samplers.pool import PoolShuffle
from dataload.samplers.pool_quality import pool_size_for
from dataload.samplers.quality import OrderReport, order_report
from dataload.samplers.weighted import Weighted

__all__ = [
    "BatchPlan",
    "BatchPlanner",
    "BatchSampler",
    "BucketBatchSampler",
    "GlobalShuffle",
    "Lanes",
    "Mixture",
    "OrderReport",
    "PackedBatchSampler",
    "PoolShuffle",
    "Repeat",
    "Sequential",
    "Serving",
    "ShardSequential",
    "Subset",
    "Weighted",
    "blend_weights",
    "order_report",
    "pool_size_for",
    "servings_of",
]
