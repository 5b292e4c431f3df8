"""Orders as values: which index stands at which position of an epoch, for any number of workers and machines."""

from dataload.samplers.batch import BatchPlan, BatchPlanner, BatchSampler
from dataload.samplers.buckets import BucketBatchSampler
from dataload.samplers.lanes import Lanes
from dataload.samplers.mixture import Mixture
from dataload.samplers.packing import PackedBatchSampler
from dataload.samplers.pool import PoolShuffle
from dataload.samplers.pool_quality import pool_size_for
from dataload.samplers.quality import OrderReport, order_report
from dataload.samplers.repeat import Repeat
from dataload.samplers.sequential import Sequential
from dataload.samplers.shards import ShardSequential
from dataload.samplers.shuffle import GlobalShuffle
from dataload.samplers.subset import Subset
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
    "ShardSequential",
    "Subset",
    "Weighted",
    "order_report",
    "pool_size_for",
]
