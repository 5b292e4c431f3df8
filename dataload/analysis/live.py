"""A live view of a loader on the terminal. rich is imported on first use."""

import sys
import threading
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TextIO

from dataload._util.optional import load_optional
from dataload.loader.base import LoaderBase, Progress
from dataload.loader.statistics import Statistics

_REFRESH_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_RECENT_SAMPLES = 20  # the view shows the last ten seconds


@contextmanager
def live_view(loader: LoaderBase[Any], *, stream: TextIO | None = None) -> Generator[None]:
    """Show a few lines about a loader while it is used: its position, its speed, who waits, and what the limit is.

    Rates, waits and the verdict cover the last ten seconds. Nothing is shown if `stream` is not a terminal. An error
    while showing ends the view, not the loop.

    Args:
        loader: A `Loader` or `MultiStreamLoader`.
        stream: Where to show the lines; stderr by default.

    Raises:
        MissingDependencyError: `stream` is a terminal, but rich is not installed.

    Examples:
        >>> import dataload
        >>> from dataload.analysis.live import live_view
        >>> loader = dataload.Loader(dataload.RangeSource(8), batch_size=4)
        >>> with live_view(loader):
        ...     for batch in loader:
        ...         pass
    """
    shown = sys.stderr if stream is None else stream
    if shown is None or shown.closed or not shown.isatty():  # pyright: ignore[reportUnnecessaryComparison] # daemons
        yield
        return
    view = _View(loader, shown)
    try:
        yield
    finally:
        view.close()


def describe(progress: Progress, recent: Statistics) -> list[str]:
    """Return the lines of the view."""
    position = str(progress).rpartition(", ")[0]
    stages = ", ".join(
        f"{name} {stage.seconds / recent.work_seconds:.0%}" for name, stage in recent.stages.items() if stage.seconds
    )
    return [
        f"{position}: {recent.rows_per_second:,.0f} rows/s",
        f"the consumer waits {recent.wait_share:.0%}; {recent.depth:.1f} batches ready; work in {recent.where}"
        + (f"; {recent.bad:,} bad records" if recent.bad else ""),
        *([f"work: {stages}"] if stages else []),
        recent.verdict,
    ]


class _View:
    """Refreshes the lines in its own thread, so that they change even while the consumer waits."""

    def __init__(self, loader: LoaderBase[Any], stream: TextIO) -> None:
        live: Any = load_optional("rich.live", needed_by="the live view", extra="cli")
        console: Any = load_optional("rich.console", needed_by="the live view", extra="cli")
        self._text: Any = load_optional("rich.text", needed_by="the live view", extra="cli").Text
        self._loader = loader
        self._samples: deque[Statistics] = deque(maxlen=_RECENT_SAMPLES)
        self._live: Any = live.Live(
            console=console.Console(file=stream),
            auto_refresh=False,
            # Redirect what is printed to above the lines, but only if it goes to the terminal.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataload-view", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # A terminal that is gone, or a closed loader, must end the view and not the training run.
        with suppress(Exception), ExitStack() as stack:
            stack.callback(self._stop)
            self._live.start()
            while not self._over.wait(_REFRESH_SECONDS):
                self._show()
            self._show()

    def _show(self) -> None:
        now = self._loader.statistics()
        recent = now.since(self._samples[0]) if self._samples else now
        self._samples.append(now)
        lines = describe(self._loader.progress(), recent if recent.steps else now)
        self._live.update(self._text("\n".join(lines)), refresh=True)

    def _stop(self) -> None:
        with suppress(Exception):
            self._live.stop()

    def close(self) -> None:
        self._over.set()
        self._thread.join(_CLOSE_SECONDS)  # the terminal may be stopped (Ctrl-S)
