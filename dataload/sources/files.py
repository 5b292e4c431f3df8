"""Deprecated: use dataload.sources."""

from dataload._util.lazy import lazy_names

_MOVED = {"FileSource": "dataload.sources", "ShardReader": "dataload.sources"}

__getattr__, __dir__ = lazy_names(__name__, {}, moved=_MOVED)
