"""Batches from samples: pure functions, which sources also use to build columns."""

from dataload.collate.collate import Collate, Pad, PadValue, Policy, PolicyName, default_collate
from dataload.collate.columns import Ragged, empty_like, in_chunks, scatter_columns
from dataload.collate.pack import Overlong, Pack, Packing, Strategy

__all__ = [
    "Collate",
    "Overlong",
    "Pack",
    "Packing",
    "Pad",
    "PadValue",
    "Policy",
    "PolicyName",
    "Ragged",
    "Strategy",
    "default_collate",
    "empty_like",
    "in_chunks",
    "scatter_columns",
]
