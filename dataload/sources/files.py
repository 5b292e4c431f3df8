"""Deprecated: use dataload.sources."""

from typing import TYPE_CHECKING

from dataload._util.lazy import lazy_names

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__, {}, moved={"FileSource": "dataload.sources", "ShardReader": "dataload.sources"}
    )
