"""Deprecated: use dataload.sources."""

from dataload._util.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {}, moved={"Options": "dataload.sources"})
