"""Recording who did what when, the trace of it, and the view on a terminal."""

import io
import json
import math
import os
import re
import sys
import threading
from html.parser import HTMLParser
from types import ModuleType, SimpleNamespace

import pytest

import dataload
from dataload import ConfigError, Loader, MemorySource, RangeSource, WorkerError
from dataload.analysis import live as live_module
from dataload.analysis.live import describe, live_view
from dataload.analysis.pictures import timeline_figure
from dataload.analysis.timeline import CONSUMER, Timeline, TimelineStep, record_timeline
from dataload.errors import MissingDependencyError
from dataload.loader.base import Progress
from dataload.loader.recorder import Recorder
from dataload.loader.statistics import StageStatistics, Statistics
from dataload.storage.remote.traffic import Request
from dataload.streams import MultiStreamLoader


class Step:
    """A step as workers report it."""

    def __init__(self, step, worker, *spans, error=None, bad=()):
        self.epoch, self.step, self.worker, self.spans, self.error, self.bad = 2, step, worker, spans, error, bad
        self.rows, self.nbytes, self.batch, self.shares, self.downloads = 4, 32, object(), (), None


def scripted():
    """Three steps by two workers and one by the consumer, from second 10 on."""
    now = [0.0]
    recorder = Recorder("threads", clock=lambda: now[0], cpu_clock=lambda: 0.0)
    timeline = Timeline()
    recorder.listen(timeline)
    script = [
        (11.0, 13.0, Step(0, "dataload-10", ("read", 10.0, 11.0), ("transform", 11.0, 13.0))),
        (13.5, 13.5, Step(1, "dataload-9", ("read", 10.5, 13.25))),
        (14.0, 16.0, Step(2, "MainThread", ("read", 14.0, 15.0), ("collate", 15.0, 15.5), bad=("x",))),
        (16.0, 17.0, Step(3, "dataload-9", ("read", 13.5, 17.0), error=ValueError("x"))),
    ]
    recorder.resume()
    for asked, received, step in script:
        now[0] = asked
        recorder.begin_wait()
        now[0] = received
        recorder.end_wait(step)
    now[0] = 18.0
    recorder.pause()
    return timeline


def test_steps_and_work_of_a_script():
    timeline = scripted()
    assert [(s.epoch, s.step, s.worker, s.asked, s.received) for s in timeline.steps] == [
        (2, 0, "dataload-10", 11.0, 13.0),
        (2, 1, "dataload-9", 13.5, 13.5),
        (2, 2, CONSUMER, 14.0, 16.0),
        (2, 3, "dataload-9", 16.0, 17.0),
    ]
    assert timeline.steps[0].spans == (("read", 10.0, 11.0), ("transform", 11.0, 13.0))
    assert [(s.bad, s.failed) for s in timeline.steps] == [(0, False), (0, False), (1, False), (0, True)]
    assert timeline.work == [(13.0, 13.5), (13.5, 14.0), (16.0, 16.0), (17.0, 18.0)]
    assert timeline.workers == ["dataload-9", "dataload-10"]
    assert (timeline.begun, timeline.ended) == (10.0, 18.0)
    assert timeline.busy_seconds("dataload-9") == 2.75 + 3.5
    assert timeline.busy_seconds(CONSUMER) == 1.5
    assert repr(timeline) == "Timeline(4 steps, 2 workers, 8.000 s)"


def test_as_json():
    data = json.loads(json.dumps(scripted().to_json()))
    assert (data["seconds"], data["workers"]) == (8.0, ["dataload-9", "dataload-10"])
    where = {"epoch": 2, "step": 2, "worker": CONSUMER, "asked": 4.0, "received": 6.0}
    counted = {"rows": 4, "nbytes": 32, "bad": 1, "failed": False}
    assert data["steps"][2] == {**where, **counted, "spans": [["read", 4.0, 5.0], ["collate", 5.0, 5.5]]}
    assert data["work"][0] == [3.0, 3.5]
    timeline = Timeline()
    assert timeline.to_json() == {"seconds": 0.0, "workers": [], "steps": [], "work": [], "connections": []}
    assert [event["ph"] for event in timeline.to_trace()["traceEvents"]] == ["M", "M", "M"]


def test_requests_are_dealt_to_as_few_lines_as_have_one_at_a_time():
    timeline = scripted()
    for begun, ended, failed in ((9.0, 10.0, True), (9.5, 12.0, False), (10.0, 14.0, False), (11.0, 11.5, False)):
        timeline.requests.append(Request(f"at {begun}", begun, ended, failed))
    found = [[(each.begun, each.ended) for each in line] for line in timeline.connections]
    assert found == [[(9.0, 10.0), (10.0, 14.0)], [(9.5, 12.0)], [(11.0, 11.5)]]
    assert timeline.begun == 9.0
    assert timeline.to_json()["connections"][1] == [["at 9.5", 0.5, 3.0, False]]
    names, events = check_trace(timeline.to_trace())
    assert [names[line] for line in (3, 4, 5)] == ["connection 0", "connection 1", "connection 2"]
    assert [(each["name"], each["ts"], each["dur"], each["args"]) for each in events if each["cat"] == "request"] == [
        ("at 9.0", 0.0, 1e6, {"failed": True}),
        ("at 10.0", 1e6, 4e6, {"failed": False}),
        ("at 9.5", 0.5e6, 2.5e6, {"failed": False}),
        ("at 11.0", 2e6, 0.5e6, {"failed": False}),
    ]
    labels = [label.get_text() for label in timeline_figure(timeline, "", "").axes[0].get_yticklabels()]
    assert labels == ["worker 9", "worker 10", "consumer makes", CONSUMER, "downloads"]
    timeline.steps, timeline.work = [], []
    assert (timeline.begun, timeline.ended) == (9.0, 14.0)


def test_workers_on_a_cluster_are_in_the_order_of_their_numbers():
    names = [f"dataload-{number} (process {process} on node a)" for number, process in ((2, 900), (10, 7), (1, 12345))]
    timeline = Timeline()
    timeline.steps = [TimelineStep(0, 0, name, (), 0.0, 1.0, 1, 1, 0, failed=False) for name in names]
    assert timeline.workers == [names[2], names[0], names[1]]


def check_trace(trace):
    """The rules of the format: complete events on lines that have names, nested or apart; microseconds from 0."""
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X"}
    assert {event["pid"] for event in events} == {os.getpid()}
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    complete = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in complete) == 0
    for tid in {event["tid"] for event in complete}:
        assert tid in names
        inside = []  # ends of the events around the present one
        for event in sorted((e for e in complete if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"])):
            assert event["dur"] >= 0
            while inside and inside[-1] <= event["ts"] + 1e-3:
                inside.pop()
            assert not inside or event["ts"] + event["dur"] <= inside[-1] + 1e-3, event
            inside.append(event["ts"] + event["dur"])
    return names, complete


def test_the_trace_of_a_script():
    names, events = check_trace(scripted().to_trace())
    assert names == {0: CONSUMER, 1: "dataload-9", 2: "dataload-10"}
    found = {(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events}
    assert found == {
        ("dataload-10", "step 0", 0, 3e6),
        ("dataload-10", "read", 0, 1e6),
        ("dataload-10", "transform", 1e6, 2e6),
        ("dataload-9", "step 1", 0.5e6, 2.75e6),
        ("dataload-9", "read", 0.5e6, 2.75e6),
        ("dataload-9", "step 3", 3.5e6, 3.5e6),
        ("dataload-9", "read", 3.5e6, 3.5e6),
        (CONSUMER, "wait", 1e6, 2e6),
        (CONSUMER, "wait", 3.5e6, 0),
        (CONSUMER, "wait", 4e6, 2e6),
        (CONSUMER, "step 2", 4e6, 1.5e6),
        (CONSUMER, "read", 4e6, 1e6),
        (CONSUMER, "collate", 5e6, 0.5e6),
        (CONSUMER, "wait", 6e6, 1e6),
        (CONSUMER, "work", 3e6, 0.5e6),
        (CONSUMER, "work", 3.5e6, 0.5e6),
        (CONSUMER, "work", 6e6, 0),
        (CONSUMER, "work", 7e6, 1e6),
    }
    (step,) = (e["args"] for e in events if e["name"] == "step 2")
    assert step == {"epoch": 2, "step": 2, "rows": 4, "nbytes": 32, "bad": 1, "failed": False}


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("workers", "executor"), [(0, "threads"), (3, "threads"), (2, "processes")])
def test_a_loader_is_recorded_and_gives_the_same_batches(workers, executor, in_order):
    with Loader(
        RangeSource(24), batch_size=2, num_workers=workers, executor=executor, in_order=in_order, transform=dict
    ) as loader:
        with record_timeline(loader) as timeline:
            epochs = [[tuple(batch["index"]) for batch in loader] for _ in range(2)]
        assert [sorted(epoch) for epoch in epochs] == [[(i, i + 1) for i in range(0, 24, 2)]] * 2
        kept = len(timeline.steps)
        list(loader)
    assert len(timeline.steps) == kept == 24, "and no longer than it was asked for"
    received = [(step.epoch, step.step) for step in timeline.steps]
    assert received == [(e, batch[0] // 2) for e, epoch in enumerate(epochs) for batch in epoch]
    assert len(timeline.work) == 24
    times = [t for step in timeline.steps for t in (step.asked, step.received)]
    assert times == sorted(times)
    for step in timeline.steps:
        assert [stage for stage, _, _ in step.spans] == ["read", "transform", "collate"]
        inside = [t for _, begun, ended in step.spans for t in (begun, ended)]
        assert inside == sorted(inside)
        assert inside[-1] <= step.received
    makers = {step.worker for step in timeline.steps}
    assert makers <= {CONSUMER, *(f"dataload-{n}" for n in range(workers))}
    if executor == "processes":
        assert CONSUMER not in makers
    names, events = check_trace(timeline.to_trace())
    assert set(names.values()) == makers | {CONSUMER}
    assert sum(event["name"] == "wait" for event in events) == 24


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loader_of_iterators_is_recorded_with_the_share_of_each_worker(workers):
    with MultiStreamLoader(
        iter, [range(5), range(100, 105)], batch_size=2, mode="split", shuffle=False, num_workers=workers
    ) as loader:
        with record_timeline(loader) as timeline:
            assert sum(len(batch["data"]) for batch in loader) == 10
        statistics = loader.statistics()
        progress = loader.progress()
    assert {step.step for step in timeline.steps} == set(range(5))
    assert timeline.workers == [f"dataload-{worker}" for worker in range(workers)]
    assert sum(step.rows for step in timeline.steps) == 10
    assert sum(step.nbytes for step in timeline.steps) == statistics.nbytes
    for worker in timeline.workers or [CONSUMER]:
        assert timeline.busy_seconds(worker) > 0
    assert len([event for event in timeline.to_trace()["traceEvents"] if event["name"] == "wait"]) == 5
    assert (statistics.steps, statistics.rows, statistics.workers) == (5, 10, workers)
    assert statistics.stages["read"].runs == 5 * max(1, workers)
    assert statistics.work_seconds == pytest.approx(
        sum(timeline.busy_seconds(worker) for worker in [*timeline.workers, CONSUMER])
    )
    assert "verdict" in statistics.to_json()
    json.dumps(statistics.to_json())
    assert statistics.since(statistics).row_seconds.tolist() == [0, 0]
    assert describe(progress, statistics)[0].startswith("epoch 1, step 0: ")


def test_recording_ends_with_an_error_too():
    def fail(sample):
        raise ValueError("no")

    loader = Loader(RangeSource(4), batch_size=2, transform=fail)
    for _ in range(2):  # the second begins anew
        with pytest.raises(WorkerError, match="no"), record_timeline(loader) as timeline:
            list(loader)
        assert [step.failed for step in timeline.steps] == [True]
    with (
        record_timeline(loader) as timeline,
        pytest.raises(RuntimeError, match="a timeline of this loader is already being recorded"),
        record_timeline(loader),
    ):
        pass
    assert timeline.steps == []


class Terminal(io.StringIO):
    """A terminal that keeps what is shown on it, and says when there is something."""

    def __init__(self):
        super().__init__()
        self.written = threading.Event()

    def isatty(self):
        return True

    def write(self, text):
        self.written.set()
        return super().write(text)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(live_module, "_REFRESH_SECONDS", 1e-3)


def statistics(**values):
    stages = {"read": StageStatistics(10, 1.0), "transform": StageStatistics(10, 3.0), "collate": StageStatistics()}
    given = {"steps": 10, "rows": 4000, "nbytes": 10, "wait_seconds": 1.0, "consumer_seconds": 1.0, "cpus": 2}
    return Statistics(**{**given, "stages": stages, "workers": 2, "executor": "threads", "depth": 1.5, **values})


def test_the_lines_of_the_view():
    progress = Progress(epoch=1, epochs=3, step=1200, steps=5000, rows_per_second=1.0)
    assert describe(progress, statistics()) == [
        "epoch 1 of 3, step 1,200 of 5,000: 2,000 rows/s",
        "the consumer waits 50%; 1.5 batches ready; work in 2 threads",
        "work: read 25%, transform 75%",
        statistics().verdict,
    ]
    progress = Progress(epoch=1, epochs=None, step=0, steps=50, rows_per_second=0.0)
    nothing = statistics(steps=0, rows=0, stages={}, workers=0, executor="serial", bad=7, depth=0.0)
    assert describe(progress, nothing) == [
        "epoch 1, step 0 of 50: 0 rows/s",
        "the consumer waits 50%; 0.0 batches ready; work in the consumer's thread; 7 bad records",
        "limit: unknown, no batch was received",
    ]


def test_the_view_shows_where_the_loader_is(quick):
    terminal = Terminal()
    with Loader(RangeSource(40), batch_size=4, num_workers=2, epochs=1) as loader, live_view(loader, stream=terminal):
        for _ in loader:
            assert terminal.written.wait(20)
    shown = terminal.getvalue()
    assert "of 1, step " in shown
    assert "2 threads" in shown
    assert shown.count("limit: ") >= 1
    error = KeyError("mine")
    with pytest.raises(KeyError) as raised, live_view(Loader(RangeSource(8), batch_size=4), stream=Terminal()):
        raise error
    assert raised.value is error


def test_a_terminal_that_fails_ends_the_view_and_not_the_loop(quick):
    class Gone(Terminal):
        def write(self, text):
            self.written.set()
            raise OSError("the terminal is gone")

    terminal = Gone()
    loader = Loader(RangeSource(8), batch_size=4)
    with live_view(loader, stream=terminal):  # warnings are errors
        assert terminal.written.wait(20)
        assert len(list(loader)) == 2
        for thread in threading.enumerate():
            if thread.name == "dataload-view":
                thread.join(20)
                assert not thread.is_alive()


def test_a_log_has_a_line_every_so_often_and_one_at_the_end(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.live", None)
    log = Terminal()
    log.isatty = lambda: False
    loader = Loader(RangeSource(40), batch_size=4, epochs=1)
    with live_view(loader, stream=log, every=1e-3):
        for _ in loader:
            assert log.written.wait(20)
    with live_view(loader, stream=log):
        pass
    assert all(re.match(r"\d\d:\d\d:\d\d epoch \d of 1, .*; limit: ", line) for line in log.getvalue().splitlines())
    last = log.getvalue().splitlines()[-1]
    assert "epoch 1 of 1, step 0" in last, "where the next one would start"
    assert "no batch was received" not in log.getvalue()
    loader = Loader(RangeSource(40), batch_size=4)
    with live_view(loader, stream=log, every=1e-3):
        list(loader)
        for _ in range(3):
            log.written.clear()
            assert log.written.wait(20)
    assert "0 rows/s; " in log.getvalue()
    assert "no batch was received" in log.getvalue(), "since the line before"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with live_view(loader, every=math.inf):
        pass
    assert sys.stderr.getvalue().count("\n") == 1


def test_device_loaders_are_shown_and_recorded():
    device_loader, log = pytest.importorskip("dataload.torch").DeviceLoader, io.StringIO()
    with device_loader(Loader(RangeSource(8), batch_size=4), "cpu") as loader:
        with live_view(loader, stream=log), record_timeline(loader) as timeline:
            list(loader)
        assert [step.step for step in timeline.steps] == [0, 1]
        assert "epoch 1, step 0 of 2" in log.getvalue()
    for show in (live_view, record_timeline):
        message = f"{show.__name__} takes a Loader, a MultiStreamLoader, .*; found list"
        with pytest.raises(TypeError, match=message), show([1, 2]):
            pass


class Cell:
    """What a notebook shows of a cell, in place of IPython."""

    def __init__(self, monkeypatch):
        self.pages = []
        shell = SimpleNamespace(kernel=None)
        ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
        ipython.get_ipython = lambda: shell
        display.HTML = str
        display.display = self.display
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, page, *, display_id):
        assert display_id is True
        return SimpleNamespace(update=self.pages.append)


def test_a_notebook_shows_the_lines_in_its_cell(quick, monkeypatch):
    cell = Cell(monkeypatch)
    loader = Loader(MemorySource([{"x": 1}] * 8), batch_size=4, transform=[dict])
    with live_view(loader):
        assert len(list(loader)) == 2
    assert "epoch 1, step 0 of 2" in cell.pages[-1]
    assert re.search("limit: unknown, (1 batch is|2 batches are) too few to tell", cell.pages[-1])  # since a sample
    assert "color:inherit" in cell.pages[-1]


class Page(HTMLParser):
    """The tags and texts of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts = set(), []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert {name for name, _ in attributes} <= {"style"}

    def handle_data(self, data):
        self.texts.append(data)


def test_what_notebooks_show_of_sources_and_loaders(tmp_path):
    evil = "<script>alert('1')</script>\x1b[2J"
    source = MemorySource([{evil: 1, "b": "text"}] * 8)
    page = Page(source._repr_html_())
    shown = evil.replace("\x1b", r"\x1b")
    assert page.texts == [repr(source), "8 records", "field", "type", shown, "int64 ()", "b", "str ()"]
    loader = Loader(source, batch_size=4)
    assert Page(loader._repr_html_()).texts == [repr(loader)]
    list(loader)
    found = Page(loader._repr_html_())
    assert found.texts == [repr(loader), *str(loader.statistics()).splitlines()]
    assert (page.tags | found.tags) <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    with dataload.create(tmp_path / "a.syr") as writer:
        writer.extend({"x": 1} for _ in range(3))
    with dataload.open(tmp_path / "a.syr") as opened:
        assert "3 records" in Page(opened._repr_html_()).texts
    assert opened._repr_html_() is None, "its repr is shown once it is closed"


def test_nothing_is_shown_and_nothing_started_where_it_cannot_be_seen(monkeypatch):
    before = threading.active_count()
    loader, log, closed = Loader(RangeSource(8), batch_size=4), io.StringIO(), Terminal()
    closed.close()
    monkeypatch.setattr(sys, "stderr", None)  # of a program without a console
    for stream in (log, None, closed):
        with live_view(loader, stream=stream, every=None):
            assert threading.active_count() == before
            assert len(list(loader)) == 2
    assert log.getvalue() == ""
    with live_view(loader, stream=SimpleNamespace(write=log.write, flush=log.flush)):  # as programs put in its place
        list(loader)
    assert log.getvalue()


@pytest.mark.parametrize("every", [0, -1.0, "1", True, None])
def test_a_view_that_cannot_be(monkeypatch, every):
    error, message = ConfigError, "every must be a number of seconds above 0"
    if every is None:
        monkeypatch.setitem(sys.modules, "rich.live", None)
        error, message = MissingDependencyError, r"the live view needs rich: pip install 'dataload\[cli\]'"
    with (
        pytest.raises(error, match=message),
        live_view(Loader(RangeSource(8), batch_size=4), stream=Terminal(), every=every),
    ):
        pass


def test_a_terminal_that_is_stopped_does_not_stop_the_loop(quick, monkeypatch):
    monkeypatch.setattr(live_module, "_CLOSE_SECONDS", 0.01)
    goes_on = threading.Event()

    class Stopped(Terminal):
        def write(self, text):
            super().write(text)
            goes_on.wait(20)
            return len(text)

    terminal = Stopped()
    with live_view(Loader(RangeSource(8), batch_size=4), stream=terminal):
        assert terminal.written.wait(20)
    assert not goes_on.is_set()
    goes_on.set()  # and the thread ends
