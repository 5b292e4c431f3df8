"""What a loader is doing, on the terminal while it does it. rich is loaded when that is first wanted."""

from __future__ import annotations

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
_GOODBYE_SECONDS = 2.0
_RECENT_LOOKS = 20  # what is shown is of the last ten seconds


@contextmanager
def live_view(loader: LoaderBase[Any, Any], *, stream: TextIO | None = None) -> Generator[None]:
    """Show a few lines about a loader while it is used: where it is, how fast, who waits, and what the limit is.

    The rates, the waits and the verdict are those of the last ten seconds. Nothing is shown where `stream` is no
    terminal, and whatever goes wrong with showing ends the view and not the loop.

    Args:
        loader: Any.
        stream: Where to show it; stderr by default.

    Raises:
        MissingDependencyError: `stream` is a terminal, and rich is not installed.

    Example:
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
    """The lines of the view.

    Args:
        progress: Where the loader is.
        recent: What it did of late.
    """
    epochs = "" if progress.epochs is None else f" of {progress.epochs}"
    place = f"epoch {progress.epoch}{epochs}, step {progress.step:,} of {progress.steps:,}"
    stages = ", ".join(
        f"{name} {stage.seconds / recent.work_seconds:.0%}" for name, stage in recent.stages.items() if stage.seconds
    )
    return [
        f"{place}: {recent.rows_per_second:,.0f} rows/s",
        f"the consumer waits {recent.wait_share:.0%}; {recent.depth:.1f} batches ready; work in {recent.where}"
        + (f"; {recent.bad:,} bad records" if recent.bad else ""),
        *([f"work: {stages}"] if stages else []),
        recent.verdict,
    ]


class _View:
    """Refreshes the lines in a thread of its own, so that they change while the consumer waits, too."""

    def __init__(self, loader: LoaderBase[Any, Any], stream: TextIO) -> None:
        live: Any = load_optional("rich.live", needed_by="the live view", extra="cli")
        console: Any = load_optional("rich.console", needed_by="the live view", extra="cli")
        self._text: Any = load_optional("rich.text", needed_by="the live view", extra="cli").Text
        self._loader = loader
        self._looks: deque[Statistics] = deque(maxlen=_RECENT_LOOKS)
        self._live: Any = live.Live(
            console=console.Console(file=stream),
            auto_refresh=False,
            # What is printed goes above the lines, but only if it goes to the terminal anyway.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataload-view", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Showing is worth no training run: a terminal that is gone, or a loader that was closed, ends it.
        with suppress(Exception), ExitStack() as stack:
            stack.callback(self._stop)
            self._live.start()
            while not self._over.wait(_REFRESH_SECONDS):
                self._show()
            self._show()

    def _show(self) -> None:
        now = self._loader.statistics()
        recent = now.since(self._looks[0]) if self._looks else now
        self._looks.append(now)
        lines = describe(self._loader.progress(), recent if recent.steps else now)
        self._live.update(self._text("\n".join(lines)), refresh=True)

    def _stop(self) -> None:
        with suppress(Exception):
            self._live.stop()

    def close(self) -> None:
        self._over.set()
        self._thread.join(_GOODBYE_SECONDS)  # the terminal may have been stopped (Ctrl-S)
