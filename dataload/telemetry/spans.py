"""Spans of the steps that a tracer samples."""

import weakref
from time import perf_counter, time_ns
from typing import Any

from dataload.loader.base import LoaderBase
from dataload.loader.step import StepResult


class StepSpans:
    """Traces each step that a consumer receives: its wait, and the stages of the work."""

    def __init__(self, api: Any, provider: Any, loader: LoaderBase[Any], name: str) -> None:
        self._api = api
        self._tracer = provider.get_tracer("dataload")
        self._loader = weakref.ref(loader)  # whose recorder refers to this object
        self._name = name

    def waited(self, step: StepResult, asked: float, received: float) -> None:
        """Add the spans of a step; called by the loader."""
        origin = time_ns() - int(1e9 * perf_counter())
        begun = min([asked, *(start for _, start, _ in step.spans)])
        span = self._tracer.start_span("dataload.step", start_time=origin + int(1e9 * begun))
        if not span.is_recording():  # most often, so this comes first
            return
        loader = self._loader()
        rank = loader and loader._known_rank()  # pyright: ignore[reportPrivateUsage] # it has begun, so it knows
        about = {"rank": rank or 0, "loader": self._name, "epoch": step.epoch, "step": step.step}
        about |= {"rows": step.rows, "bytes": step.nbytes, "bad_records": len(step.bad), "worker": step.worker}
        span.set_attributes(about)
        if step.error is not None:
            span.record_exception(step.error)
            span.set_status(self._api.StatusCode.ERROR, type(step.error).__name__)
        context = self._api.set_span_in_context(span)
        for name, start, end in [("wait", asked, received), *step.spans]:
            child = self._tracer.start_span(f"dataload.{name}", context, start_time=origin + int(1e9 * start))
            child.end(origin + int(1e9 * end))
        span.end(origin + int(1e9 * received))

    def worked(self, begun: float, ended: float) -> None:
        """Do nothing; called by the loader."""
