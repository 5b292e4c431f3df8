"""Show what a loader does: statistics, timelines, live views, pictures."""

from typing import TYPE_CHECKING

from dataload._util.lazy import lazy_names

if TYPE_CHECKING:
    from dataload.analysis.live import live_view
    from dataload.analysis.timeline import record_timeline
    from dataload.loader.statistics import Statistics

__all__ = ["Statistics", "live_view", "record_timeline"]

_HOMES = {
    "Statistics": "dataload.loader.statistics",
    "live_view": "dataload.analysis.live",
    "record_timeline": "dataload.analysis.timeline",
}

if not TYPE_CHECKING:  # so that type checkers report names that do not exist
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
