"""A live view of a loader on a terminal, in a notebook, or as log lines. rich is imported on first use."""

import sys
import threading
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from html import escape
from time import strftime
from typing import Any, Protocol, TextIO

from dataload._util.lazy import load_optional
from dataload._util.settings import Seconds, check_setting
from dataload.loader.base import LoaderBase, Progress
from dataload.loader.statistics import Statistics

_REFRESH_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_RECENT_SAMPLES = 20  # the view shows the last ten seconds


@contextmanager
def live_view(loader: LoaderBase[Any], *, stream: TextIO | None = None, every: float | None = 30.0) -> Generator[None]:
    """Show a loader's position, speed, waits and bottleneck in a few lines while it is used.

    On a terminal and in a notebook, the lines are refreshed, and rates, waits and the verdict cover the last ten
    seconds. Elsewhere, as in the log of a cluster job, one line is written at intervals and at the end, and covers the
    time since the previous line. An error while showing ends the view, not the loop.

    Args:
        loader: A `Loader` or `MultiStreamLoader`.
        stream: Destination of the lines; by default the notebook's cell, otherwise stderr.
        every: Seconds between two lines where `stream` is not a terminal; None writes nothing there.

    Raises:
        ConfigError: `every` is not a number above 0.
        MissingDependencyError: `stream` is a terminal, but rich is not installed.

    Examples:
        >>> import dataload
        >>> from dataload.analysis.live import live_view
        >>> loader = dataload.Loader(dataload.RangeSource(8), batch_size=4)
        >>> with live_view(loader):
        ...     for batch in loader:
        ...         pass
    """
    every = check_setting("every", every, Seconds | None)
    shown = sys.stderr if stream is None else stream
    if stream is None and _in_notebook():
        view = _View(loader, _Notebook())
    elif shown is None or shown.closed:  # pyright: ignore[reportUnnecessaryComparison] # daemons
        view = None
    elif shown.isatty():
        view = _View(loader, _Terminal(shown))
    else:
        view = None if every is None else _View(loader, _Log(shown), seconds=every, samples=1)
    try:
        yield
    finally:
        if view is not None:
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


def _in_notebook() -> bool:
    """Return whether this process is a notebook kernel, which shows what IPython displays."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class _Output(Protocol):
    """A destination for a view's lines. Used by the view's thread."""

    def start(self) -> None: ...
    def show(self, lines: list[str]) -> None: ...
    def stop(self) -> None: ...


class _Terminal:
    """Replaces its lines by the new ones."""

    def __init__(self, stream: TextIO) -> None:
        live: Any = load_optional("rich.live", needed_by="the live view", extra="cli")
        console: Any = load_optional("rich.console", needed_by="the live view", extra="cli")
        self._text: Any = load_optional("rich.text", needed_by="the live view", extra="cli").Text
        self._live: Any = live.Live(
            console=console.Console(file=stream),
            auto_refresh=False,
            # Print other output above the lines, but only if it goes to the terminal.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )

    def start(self) -> None:
        self._live.start()

    def show(self, lines: list[str]) -> None:
        self._live.update(self._text("\n".join(lines)), refresh=True)

    def stop(self) -> None:
        self._live.stop()


class _Notebook:
    """Replaces the lines in the output of the cell that started the view."""

    def __init__(self) -> None:
        display: Any = load_optional("IPython.display", needed_by="the live view in a notebook", extra="cli")
        self._html: Any = display.HTML
        self._handle: Any = display.display(self._html(""), display_id=True)

    def start(self) -> None:
        pass

    def show(self, lines: list[str]) -> None:
        text = escape("\n".join(lines))
        self._handle.update(self._html(f'<pre style="color:inherit;background:transparent">{text}</pre>'))

    def stop(self) -> None:
        pass


class _Log:
    """Writes a line with the time of day."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self) -> None:
        pass

    def show(self, lines: list[str]) -> None:
        self._stream.write(f"{strftime('%H:%M:%S')} {'; '.join(lines)}\n")  # one write: ranks may share the log
        self._stream.flush()

    def stop(self) -> None:
        pass


class _View:
    """Refreshes the lines in a thread, so that they change even while the consumer waits."""

    def __init__(
        self, loader: LoaderBase[Any], output: _Output, *, seconds: float | None = None, samples: int = _RECENT_SAMPLES
    ) -> None:
        self._loader = loader
        self._output = output
        self._seconds = _REFRESH_SECONDS if seconds is None else seconds
        self._samples: deque[Statistics] = deque(maxlen=samples)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataload-view", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # A closed terminal or loader must end the view and not the training run.
        with suppress(Exception), ExitStack() as stack:
            stack.callback(self._stop)
            self._output.start()
            while not self._over.wait(self._seconds):
                self._show()
            self._show()

    def _show(self) -> None:
        now = self._loader.statistics()
        recent = now.since(self._samples[0]) if self._samples else now
        self._samples.append(now)
        self._output.show(describe(self._loader.progress(), recent if recent.steps else now))

    def _stop(self) -> None:
        with suppress(Exception):
            self._output.stop()

    def close(self) -> None:
        self._over.set()
        self._thread.join(_CLOSE_SECONDS)  # the terminal may be stopped (Ctrl-S)
