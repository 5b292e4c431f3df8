"""A live view of a loader on a terminal, in a notebook, or as log lines. rich is imported on first use."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from html import escape
from time import strftime
from typing import Any, TextIO, TypeAlias

from dataload._util.interactive import is_terminal
from dataload._util.lazy import load_optional
from dataload._util.settings import Seconds, check_setting
from dataload.loader.base import LoaderBase, Progress
from dataload.loader.device import AnyLoader, loader_of
from dataload.loader.statistics import Statistics

_REFRESH_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_RECENT_SAMPLES = 20  # the view shows the last ten seconds


@contextmanager
def live_view(loader: AnyLoader, *, stream: TextIO | None = None, every: float | None = 30.0) -> Generator[None]:
    """Show a loader's position, speed, waits and bottleneck in a few lines while it is used.

    On a terminal and in a notebook, the lines are refreshed, and rates, waits and the verdict cover the last ten
    seconds. Elsewhere, as in the log of a cluster job, one line is written at intervals and at the end, and covers the
    time since the previous line. An error while showing ends the view, not the loop.

    Args:
        loader: A `Loader`, `MultiStreamLoader`, `dataload.torch.DataLoader` or device loader.
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
    inner = loader_of(loader, "live_view")
    every = check_setting("every", every, Seconds | None)
    shown: Any = sys.stderr if stream is None else stream
    output = None
    seconds, samples = _REFRESH_SECONDS, _RECENT_SAMPLES
    if stream is None and _in_notebook():
        output = _in_cell()
    elif is_terminal(shown):
        output = _on_terminal(shown)
    elif every is not None and shown is not None and not getattr(shown, "closed", False):  # a daemon has none
        output, seconds, samples = _in_log(shown), every, 1
    if output is None:
        yield
        return
    over, recent = threading.Event(), deque[Statistics](maxlen=samples)
    view = threading.Thread(
        target=_refresh, args=(inner, *output, recent, over, seconds), name="dataload-view", daemon=True
    )
    view.start()
    try:
        yield
    finally:
        over.set()
        view.join(_CLOSE_SECONDS)  # the terminal may be stopped (Ctrl-S)


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


_Show: TypeAlias = Callable[[list[str]], object]
"""Shows lines. The view's thread enters the context returned with it, and then calls it."""


def _on_terminal(stream: TextIO) -> tuple[AbstractContextManager[Any], _Show]:
    """Return how to replace the lines on a terminal."""
    live: Any = load_optional("rich.live", needed_by="the live view", extra="cli")
    console: Any = load_optional("rich.console", needed_by="the live view", extra="cli")
    text: Any = load_optional("rich.text", needed_by="the live view", extra="cli").Text
    shown = live.Live(
        console=console.Console(file=stream),
        auto_refresh=False,
        # Print other output above the lines, but only if it goes to the terminal.
        redirect_stdout=is_terminal(sys.stdout),
        redirect_stderr=is_terminal(sys.stderr),
    )
    return shown, lambda lines: shown.update(text("\n".join(lines)), refresh=True)


def _in_cell() -> tuple[AbstractContextManager[Any], _Show]:
    """Return how to replace the lines in the output of the notebook cell that started the view."""
    display: Any = load_optional("IPython.display", needed_by="the live view in a notebook", extra="cli")
    handle = display.display(display.HTML(""), display_id=True)

    def show(lines: list[str]) -> None:
        text = escape("\n".join(lines))
        handle.update(display.HTML(f'<pre style="color:inherit;background:transparent">{text}</pre>'))

    return nullcontext(), show


def _in_log(stream: TextIO) -> tuple[AbstractContextManager[Any], _Show]:
    """Return how to write one line at a time, after the time of day."""

    def show(lines: list[str]) -> None:
        stream.write(f"{strftime('%H:%M:%S')} {'; '.join(lines)}\n")  # one write: ranks may share the log
        stream.flush()

    return nullcontext(), show


def _refresh(
    loader: LoaderBase[Any],
    context: AbstractContextManager[Any],
    show: _Show,
    samples: deque[Statistics],
    over: threading.Event,
    seconds: float,
) -> None:
    """Refresh the lines in a thread, so that they change even while the consumer waits."""
    # A closed terminal or loader must end the view and not the training run.
    with suppress(Exception), context:
        last = False
        while not last:
            last = over.wait(min(seconds, threading.TIMEOUT_MAX))
            now = loader.statistics()
            recent = now.since(samples[0]) if samples else now
            samples.append(now)
            # At the end, all batches say more than none.
            show(describe(loader.progress(), recent if recent.steps or not last else now))
