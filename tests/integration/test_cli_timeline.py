"""``dataload timeline`` as a user runs it."""

import json
import re
from dataclasses import replace

import pytest
from command_line import facts, ok, run
from figures import assert_no_overlap

from dataload.analysis.pictures import timeline_figure
from dataload.analysis.timeline import CONSUMER, FleetEstimate, Timeline, TimelineStep
from dataload.loader.recorder import Recorder
from dataload.loader.statistics import StageStatistics
from dataload.storage.remote.traffic import Request

pytestmark = pytest.mark.usefixtures("fonts")


def timeline(*arguments):
    return ok("timeline", *arguments)


@pytest.fixture
def config(tmp_path):
    """100 records, batches of 8: 13 steps an epoch."""
    path = tmp_path / "train.toml"
    path.write_text(
        '[source]\npath = "range:100"\n[loader]\nbatch_size = 8\nnum_workers = 2\ntransform = ["builtins:dict"]\n'
    )
    return path


@pytest.mark.slow_suite
def test_a_fleet_is_estimated(config):
    slow = ("--steps", 8, "--model-ms", 20, "--set", "loader.num_workers=0")
    line = next(line for line in timeline(config, *slow, "--fleet", 4).splitlines() if line.startswith("a fleet of 4"))
    assert re.search(r" batches/s, \d\.\d MB/s over the network.*; the trainer needs \d+ to wait for none$", line)
    found = facts("timeline", config, *slow, "--fleet", 4)
    each = sum(stage["seconds"] for stage in found["statistics"]["stages"].values()) / 8
    assert found["fleet"]["batches_per_second"] == pytest.approx(4 / each)
    assert (
        found["fleet"]["bytes_per_second"] <= 64 / 0.02 * 8 / 7
    )  # what the model takes, of 8 bytes a row; none follows the last


@pytest.mark.parametrize(("model", "needed"), [(0.02, 5), (0.1, 1), (0.0, None)])
def test_the_workers_that_a_trainer_needs(model, needed):
    recorder = Recorder(clock=iter(range(1000)).__next__, cpu_clock=float)
    figures = recorder.snapshot(0)
    stages = {"transform": StageStatistics(10, 1.0)}
    figures = replace(figures, steps=10, nbytes=1000, consumer_seconds=10 * model, stages=stages)
    found = FleetEstimate.of(figures, 20)
    assert (found.needed, found.batches_per_second) == (needed, 200)
    assert found.bytes_per_second == pytest.approx(min(200, 1 / model if model else 200) * 100)
    limit = "one trainer can receive about 1,000/s"
    assert (limit in str(found), limit in str(FleetEstimate.of(figures, 101))) == (False, True)


def test_json_has_every_step_and_goes_on_in_the_next_epoch(config):
    found = facts("timeline", config, "--steps", 20, "--epoch", 3, "--model-ms", 2)
    assert [(s["epoch"], s["step"]) for s in found["timeline"]["steps"]] == [
        *((3, step) for step in range(13)),
        *((4, step) for step in range(7)),
    ]
    assert found["statistics"]["steps"] == 20
    assert found["statistics"]["rows"] == 100 + 7 * 8
    assert found["statistics"]["verdict"].startswith("limit: ")
    assert found["statistics"]["stages"]["transform"]["runs"] == 20
    assert (found["picture"], found["trace"]) == (None, None)
    work = found["timeline"]["work"]
    assert len(work) == 19  # the last one has no end: nothing was asked for behind it
    assert all(ended - begun >= 0.002 for begun, ended in work)


def test_settings_are_replaced_and_the_data_end(config):
    found = facts("timeline", config, "--steps", 3, "--set", "loader.num_workers=0")
    assert found["statistics"]["executor"] == "serial"
    assert {step["worker"] for step in found["timeline"]["steps"]} == {CONSUMER}
    processes = ("--set", "loader.num_workers=1", "--set", "loader.executor=processes")
    found = facts("timeline", config, "--steps", 3, *processes)
    assert (found["statistics"]["executor"], found["timeline"]["workers"]) == ("processes", ["dataload-0"])
    assert facts("timeline", config, "--steps", 100, "--set", "loader.epochs=2")["statistics"]["steps"] == 26


def test_a_picture_and_a_trace_are_written(config, tmp_path):
    picture, trace = tmp_path / "t.png", tmp_path / "t.json"
    lines = timeline(config, "--steps", 5, "--picture", picture, "--trace", trace).splitlines()
    assert lines[-2:] == [f"wrote {picture}", f"wrote {trace}"]
    assert lines[-3].startswith("limit: ")
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["name"] == "wait" for event in events) == 5
    found = facts("timeline", config, "--steps", 5, "--picture", picture, "--trace", trace)
    assert (found["picture"], found["trace"]) == (str(picture), str(trace))


def test_dark_is_deprecated(config):
    for command in ("timeline", "order", "plan"):
        result = run(command, config, "--dark", *(("--steps", 2) if command == "timeline" else ()))
        assert "--dark is deprecated and has no effect" in result.stderr, command


def step(number, worker, asked, received, *spans, epoch=0, rows=4):
    return TimelineStep(epoch, number, worker, spans, asked, received, rows, nbytes=8, bad=0, failed=False)


def drawn(made):
    """Of each bar of a picture: what it is, its begin, its length, and the lane it is on."""
    axes, *_ = timeline_figure(made, "limit: read", "train.toml").axes
    lanes = {tick: label.get_text() for tick, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    bars = set()
    for collection in axes.collections:
        for path in collection.get_paths() if not collection.get_label().startswith("_") else ():
            (left, bottom), (right, top) = path.get_extents().get_points()
            bars.add((collection.get_label(), round(left, 6), round(right - left, 6), lanes[round((bottom + top) / 2)]))
    return axes, bars


def texts_of(figure):
    return [text.get_text() for text in figure.texts]


def test_the_picture_has_a_lane_for_each_worker_and_one_for_the_consumer():
    made = Timeline()
    made.steps = [
        step(0, "dataload-0", 100.0, 102.0, ("read", 100.0, 101.0), ("collate", 101.0, 102.0)),
        step(1, "dataload-1", 103.0, 103.0, ("read", 100.5, 102.5)),
        step(0, CONSUMER, 104.0, 106.0, ("read", 104.0, 105.5), epoch=1),
    ]
    made.work = [(102.0, 103.0), (103.0, 104.0)]
    made.requests = [Request("a", 100.0, 102.0, failed=True), Request("a", 102.0, 103.0, failed=False)]
    axes, bars = drawn(made)
    lanes = ["worker 0", "worker 1", "consumer makes", CONSUMER, "downloads"]
    assert bars == {
        ("read", 0.0, 1.0, lanes[0]),
        ("collate", 1.0, 1.0, lanes[0]),
        ("read", 0.5, 2.0, lanes[1]),
        ("read", 4.0, 1.5, lanes[2]),
        ("consumer waits", 0.0, 2.0, CONSUMER),
        ("consumer waits", 3.0, 0.0, CONSUMER),
        ("consumer waits", 4.0, 2.0, CONSUMER),
        ("consumer works", 2.0, 1.0, CONSUMER),
        ("consumer works", 3.0, 1.0, CONSUMER),
        ("request", 0.0, 2.0, "downloads"),
        ("request", 2.0, 1.0, "downloads"),
    }
    assert list(axes.get_yticks()) == [0, 1, 2, 3, 4]
    assert axes.yaxis_inverted(), "the consumer's is lower than those of workers"
    assert (axes.get_xlim(), axes.get_xlabel()) == ((0, 6), "time (s)")
    shown = [text.get_text() for text in axes.texts]
    assert {"busy 33%", "busy 25%", "waits 50%", "2 requests"} <= set(shown)
    legend = axes.get_legend()
    marks = dict(zip([text.get_text() for text in legend.get_texts()], legend.legend_handles, strict=True))
    stages = ["read 82%", "collate 18%", "consumer waits", "consumer works"]
    assert [*marks] == [*stages, "failed request", "idle", "a new epoch"]
    colours = {c.get_label(): [*map(tuple, c.get_facecolor())] for c in axes.collections if c.get_label()[0] != "_"}
    failed, worked = colours.pop("request")
    assert marks["failed request"].get_facecolor() == failed != worked
    assert len({each[0] for each in colours.values()}) == len(colours) == 4
    title, about = texts_of(axes.figure)
    assert title == "Limit: read"
    assert about.startswith("train.toml: step 0 of epoch 0 to step 0 of epoch 1")
    assert_no_overlap(axes.figure)


def test_the_start_of_processes_is_left_out_and_said():
    made = Timeline()
    made.steps = [step(0, "dataload-0", 0.0, 5.0, ("read", 4.0, 5.0)), step(1, "dataload-0", 6, 6, ("read", 5, 6))]
    made.work = [(5.0, 6.0)]
    axes, _ = drawn(made)
    assert axes.get_xlim() == (0, 2)
    assert texts_of(axes.figure)[1].endswith("; the 4.0 s in which workers start are left out")


def test_workers_that_share_batches_have_their_rows():
    made = Timeline()
    for n in range(3):
        made.steps += [
            step(n, f"dataload-{worker}", n, n + 1, ("read", n, n + 0.8 + worker / 10), rows=2) for worker in range(2)
        ]
        made.steps.append(step(n, CONSUMER, n, n + 1, ("collate", n + 0.9, n + 1.0), rows=0))
    axes, bars = drawn(made)
    lanes = ["worker 0\nrows 0-1", "worker 1\nrows 2-3", CONSUMER]
    assert [label.get_text() for label in axes.get_yticklabels()] == lanes
    assert ("collate", 0.9, 0.1, CONSUMER) in bars, "what it joins itself is on the consumer's lane"


def test_a_picture_of_nothing():
    figure = timeline_figure(Timeline(), "limit: unknown", "train.toml")
    assert texts_of(figure) == ["Limit: unknown", "train.toml"]


def test_a_timeline_of_iterators(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "letters.py").write_text("def letters(word):\n    return iter(word)\n")
    config = tmp_path / "streams.toml"
    config.write_text(
        '[sampler]\nkind = "iterators"\nmake_stream = "letters:letters"\nsequences = ["abc", "defg", "hij", "klmn"]\n'
        "[loader]\nbatch_size = 4\nnum_workers = 2\n"
    )
    found = facts("timeline", config, "--steps", 6)
    assert found["statistics"]["steps"] == 6
    assert len(found["statistics"]["row_seconds"]) == 4
    assert found["timeline"]["workers"] == ["dataload-0", "dataload-1"]
